"""Curvature and covariances of every structure against dense matrices."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from problems.heads import LAYOUTS, draw_theta, every_layout, head_target
from problems.oracles import hessian_of_loss, in_theta_order
from torch import Tensor

from bnncli import registry
from bnncli.errors import NumericError
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.structures import block, cheapest_root, ggn
from bnncli.structures.full import Full
from bnncli.structures.kron import Kron
from bnncli.structures.logits import head_spread
from bnncli.targets import blocks as stream
from bnncli.targets import grams

pytestmark = pytest.mark.core

every_structure = pytest.mark.parametrize("structure", registry.names("curvature"))
PRIOR = 0.7
make_target = partial(head_target, prior=PRIOR)


def kron_to_dense(parts: dict[str, Tensor], layout: HeadLayout) -> Tensor:
    return in_theta_order(torch.kron(parts["hessian.kron.B"], parts["hessian.kron.A"]), layout)


def blocks_to_dense(blocks: Tensor, layout: HeadLayout) -> Tensor:
    return in_theta_order(torch.block_diag(*blocks).double(), layout)


DENSE = {
    "full": lambda parts, layout: parts["hessian.full"],
    "kron": kron_to_dense,
    "block": lambda parts, layout: blocks_to_dense(parts["hessian.block"], layout),
    "diag": lambda parts, layout: parts["hessian.diag"].diag(),
}


def make_covariance(structure: str, layout: HeadLayout) -> tuple[object, Tensor]:
    """The covariance of a small problem, and the same as a dense matrix."""
    parts = ggn(make_target(layout), draw_theta(layout), structure)
    covariance = registry.load_class("covariances", structure).from_hessian(parts, Prior(PRIOR), layout)
    precision = DENSE[structure](parts, layout) + PRIOR * torch.eye(layout.num_params, dtype=torch.float64)
    return covariance, torch.linalg.inv(precision)


@every_layout
def test_full_ggn_is_autograds_hessian(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout)
    torch.testing.assert_close(
        ggn(target, theta, "full")["hessian.full"], hessian_of_loss(target, theta), rtol=1e-11, atol=1e-11
    )


@every_layout
def test_diag_ggn_is_the_diagonal_of_autograds_hessian(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout)
    torch.testing.assert_close(ggn(target, theta, "diag")["hessian.diag"], hessian_of_loss(target, theta).diagonal())


@every_layout
def test_block_ggn_is_autograds_hessian_within_each_output(layout: HeadLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grams._BLOCK_EXAMPLES, "cpu", 7)
    monkeypatch.setitem(stream.BLOCK_ELEMENTS, "cpu", 7 * 2 * 5)
    target, theta = make_target(layout), draw_theta(layout)
    output_of = layout.flatten(torch.arange(layout.num_outputs).unsqueeze(1).expand(-1, 4 + layout.has_bias))
    expected = hessian_of_loss(target, theta) * (output_of[:, None] == output_of)
    got = blocks_to_dense(ggn(target, theta, "block")["hessian.block"], layout)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@every_layout
def test_kron_factors_are_sums_over_examples(layout: HeadLayout) -> None:
    target, theta = make_target(layout), draw_theta(layout)
    features = layout.augment_features(target.features)
    feature_factor, output_factor = ggn(target, theta, "kron").values()
    torch.testing.assert_close(feature_factor, torch.stack([x.outer(x) for x in features]).mean(dim=0))
    p = target.probabilities(theta).T
    outer = [q.diag() - q.outer(q) if layout.num_outputs > 1 else (q * (1 - q)).diag() for q in p]
    torch.testing.assert_close(output_factor, torch.stack(outer).sum(dim=0))


@every_structure
def test_likelihood_scale_multiplies_the_hessian(structure: str) -> None:
    layout, theta = LAYOUTS[0], draw_theta(LAYOUTS[0])
    plain = make_target(layout)
    once, scaled = (
        DENSE[structure](ggn(replace(plain, likelihood_scale=scale), theta, structure), layout) for scale in (1.0, 2.0)
    )
    torch.testing.assert_close(scaled, 2 * once)


@every_structure
@every_layout
def test_the_root_squares_to_the_inverse_precision(structure: str, layout: HeadLayout) -> None:
    covariance, sigma = make_covariance(structure, layout)
    root = covariance.unwhiten(torch.eye(layout.num_params)).T
    torch.testing.assert_close(root @ root.T, sigma, rtol=1e-10, atol=1e-12)
    assert covariance.log_det_scale() == pytest.approx(float(torch.linalg.slogdet(root)[1]), rel=1e-10)


@pytest.mark.parametrize("bias_precision", [None, 3.0])
@every_structure
@every_layout
def test_the_cheapest_root_squares_to_it_too_and_pulls_back_by_its_transpose(
    structure: str, layout: HeadLayout, bias_precision: float | None
) -> None:
    if bias_precision is not None and not layout.has_bias:
        pytest.skip("no biases")
    hessian = ggn(make_target(layout), draw_theta(layout), structure)
    kind = registry.load_class("covariances", structure)
    covariance = kind.from_hessian(hessian, Prior(PRIOR, bias_precision), layout)
    eye = torch.eye(layout.num_params, dtype=torch.float64)
    root, own = cheapest_root(covariance), covariance.unwhiten(eye).T
    found = root.unwhiten(eye).T
    torch.testing.assert_close(found @ found.T, own @ own.T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(root.pull_back(eye), found, rtol=1e-10, atol=1e-12)
    single = root.to(dtype=torch.float32)
    torch.testing.assert_close(single.unwhiten(eye.float()).T.double(), found, rtol=1e-4, atol=1e-5)


@every_layout
def test_kron_with_the_prior_is_the_inverse_of_the_whole_matrix(layout: HeadLayout) -> None:
    generator = torch.Generator().manual_seed(3)
    size = 4 + layout.has_bias
    factors = [torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (size, layout.num_outputs)]
    a, b = (factor @ factor.T for factor in factors)
    hessian = {"hessian.kron.A": a, "hessian.kron.B": b}
    eye = torch.eye(layout.num_params, dtype=torch.float64)
    root = Kron.from_hessian(hessian, Prior(PRIOR), layout).unwhiten(eye).T
    expected = torch.linalg.inv(kron_to_dense(hessian, layout) + PRIOR * eye)
    torch.testing.assert_close(root @ root.T, expected, rtol=1e-9, atol=1e-12)


@every_layout
def test_another_output_factor_is_another_fit(layout: HeadLayout) -> None:
    target, theta = make_target(layout, likelihood_scale=2.5), draw_theta(layout)
    before, after = (ggn(target, one, "kron") for one in (theta, 2 * theta))
    first = Kron.from_hessian(before, Prior(PRIOR), layout)
    again = ggn(target, 2 * theta, "kron", before=before)
    assert again["hessian.kron.A"] is before["hessian.kron.A"]
    torch.testing.assert_close(again["hessian.kron.B"], after["hessian.kron.B"])
    moved = Kron.from_hessian(again, Prior(PRIOR), layout, before=first)
    assert moved.feature_basis is first.feature_basis
    z = torch.eye(layout.num_params, dtype=torch.float64)
    torch.testing.assert_close(moved.unwhiten(z), Kron.from_hessian(after, Prior(PRIOR), layout).unwhiten(z))


@every_structure
@every_layout
def test_whiten_undoes_unwhiten(structure: str, layout: HeadLayout) -> None:
    covariance, _ = make_covariance(structure, layout)
    z = torch.randn(3, layout.num_params, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(covariance.whiten(covariance.unwhiten(z)), z)


@every_structure
@every_layout
def test_pull_back_is_the_chain_rule(structure: str, layout: HeadLayout) -> None:
    covariance, _ = make_covariance(structure, layout)
    z = torch.randn(3, layout.num_params, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z.requires_grad_()
    upstream = torch.arange(z.numel(), dtype=torch.float64).view_as(z)
    covariance.unwhiten(z).backward(upstream)
    torch.testing.assert_close(covariance.pull_back(upstream), z.grad)


@every_structure
@every_layout
def test_logit_covariance_is_the_jacobians(structure: str, layout: HeadLayout) -> None:
    covariance, sigma = make_covariance(structure, layout)
    features = make_target(layout).features[:5]
    for x, got in zip(features, head_spread(covariance, layout).covariance(features), strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda theta, x=x: layout.logits(x[None], theta[None])[0, 0], draw_theta(layout)
        )
        torch.testing.assert_close(got, jacobian @ sigma @ jacobian.T, rtol=1e-9, atol=1e-12)


@every_structure
@every_layout
def test_logit_variance_is_the_diagonal_of_the_covariance(structure: str, layout: HeadLayout) -> None:
    covariance, _ = make_covariance(structure, layout)
    features = make_target(layout, num_examples=1500).features
    expected = head_spread(covariance, layout).covariance(features).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(head_spread(covariance, layout).variance(features), expected)


@every_structure
@every_layout
def test_projected_variance_is_that_of_logits_minus_their_mean(structure: str, layout: HeadLayout) -> None:
    covariance, _ = make_covariance(structure, layout)
    features, size = make_target(layout, num_examples=1500).features, layout.num_outputs
    projection = torch.eye(size, dtype=torch.float64) - 1 / size
    expected = (projection @ head_spread(covariance, layout).covariance(features) @ projection).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(head_spread(covariance, layout).projected_variance(features), expected)


@every_structure
def test_projected_variance_takes_single_precision_and_is_never_negative(structure: str) -> None:
    covariance, _ = make_covariance(structure, LAYOUTS[0])
    features = make_target(LAYOUTS[0]).features
    single = head_spread(covariance.to(dtype=torch.float32), LAYOUTS[0]).projected_variance(features.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(
        single.double(), head_spread(covariance, LAYOUTS[0]).projected_variance(features), rtol=1e-4, atol=1e-6
    )
    assert single.min() >= 0


@every_structure
@every_layout
def test_tensors_bring_the_covariance_back(structure: str, layout: HeadLayout) -> None:
    covariance, _ = make_covariance(structure, layout)
    again = type(covariance).from_tensors(covariance.to_tensors(), layout)
    z = torch.eye(layout.num_params, dtype=torch.float64)
    assert torch.equal(again.unwhiten(z), covariance.unwhiten(z))
    assert all(part.is_contiguous() and part.dtype == torch.float64 for part in again.to_tensors().values())


@every_structure
def test_single_precision_copies_agree(structure: str) -> None:
    covariance, _ = make_covariance(structure, LAYOUTS[0])
    single = covariance.to(dtype=torch.float32)
    z = torch.eye(15)
    assert single.unwhiten(z).dtype == torch.float32
    torch.testing.assert_close(single.unwhiten(z), covariance.unwhiten(z).float(), rtol=1e-4, atol=1e-5)


def test_a_singular_precision_gets_a_recorded_jitter() -> None:
    singular = {"hessian.full": torch.ones(15, 15, dtype=torch.float64)}
    assert Full.from_hessian(singular, Prior(1e-300), LAYOUTS[0]).jitter > 0
    assert make_covariance("full", LAYOUTS[0])[0].jitter == 0  # type: ignore[attr-defined]


def test_a_singular_block_gets_a_recorded_jitter() -> None:
    singular = {"hessian.block": torch.ones(3, 5, 5, dtype=torch.float64)}
    covariance = block.Block.from_hessian(singular, Prior(1e-300), LAYOUTS[0])
    assert 0 < covariance.jitter < 1e-5
    assert block.Block.from_tensors(covariance.to_tensors(), LAYOUTS[0]).jitter == covariance.jitter


def test_an_indefinite_precision_is_an_error() -> None:
    indefinite = {"hessian.full": torch.diag(torch.tensor([1.0] * 14 + [-5.0]))}
    with pytest.raises(NumericError, match="not positive definite"):
        Full.from_hessian(indefinite, Prior(1.0), LAYOUTS[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("structure", ["block", "diag", "full", "kron"])
def test_a_hessian_that_is_not_finite_is_an_error(structure: str, value: float) -> None:
    parts = ggn(make_target(LAYOUTS[0]), draw_theta(LAYOUTS[0]), structure)
    broken = {name: torch.full_like(part, value) for name, part in parts.items()}
    with pytest.raises(NumericError, match="not finite"):
        registry.load_class("covariances", structure).from_hessian(broken, Prior(1.0), LAYOUTS[0])
