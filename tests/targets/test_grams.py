"""Weighted Gram matrices and quadratic forms: both routes against sums in float64, and how many launches they take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import count
from problems.oracles import in_theta_order
from torch import Tensor

from bnncli.covariances.full import Full
from bnncli.curvature import full, ggn
from bnncli.logits._head import head_spread
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets import grams
from bnncli.targets.grams import (
    is_packed,
    pack_quadratic_form,
    packed_grams,
    packed_places,
    packed_products,
    quadratic_forms,
    unpack_symmetric,
    weighted_grams,
)
from bnncli.targets.last_layer import LastLayerTarget

every_route = pytest.mark.parametrize("packs", [True, False], ids=["packed", "square"])


def take_route(monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    for module in (grams, full):
        monkeypatch.setattr(module, "is_packed", lambda *words: packs)


def make_problem(count: int, size: int, num_examples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(num_examples, size, generator=generator) + 1  # sums grow: float32 alone would lose digits
    return torch.rand(count, num_examples, generator=generator), features


@every_route
@pytest.mark.parametrize(("count", "size"), [(1, 70), (3, 33), (6, 40), (2, 1)])
def test_grams_of_long_sums_are_those_of_float64(packs: bool, count: int, size: int) -> None:
    weights, features = make_problem(count, size, 8000)
    expected = torch.einsum("mn,ni,nj->mij", weights.double(), features.double(), features.double())

    def rows_of(rows: slice) -> Tensor:
        return weights[:, rows]

    if packs:
        got = unpack_symmetric(packed_grams(rows_of, features), packed_places(size, features.device)[0])
    else:
        got = weighted_grams(rows_of, features, count=count)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=0)


@every_route
@pytest.mark.parametrize(("count", "size"), [(1, 70), (3, 33), (6, 4), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quadratic_forms_are_those_of_einsum(
    packs: bool, count: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_route(monkeypatch, packs)
    features = make_problem(count, size, 1500)[1].to(dtype)
    matrices = torch.randn(count, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.einsum("ni,mij,nj->nm", features.double(), matrices, features.double())
    got = quadratic_forms(features, matrices.to(dtype))
    error = (got.double() - expected).abs().max() / (features.double().square().sum(dim=1).max() * matrices.abs().max())
    assert error < (1e-6 if dtype == torch.float32 else 1e-15) * size**0.5


@pytest.mark.parametrize("size", [1, 7, 32, 33, 70, 131])
def test_packed_products_have_a_coefficient_for_every_pair(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, x = (torch.randn(*shape, size, generator=generator, dtype=torch.float64) for shape in ((size,), (1,)))
    packed = packed_products(x)
    torch.testing.assert_close(unpack_symmetric(packed[:, 0], packed_places(size, x.device)[0]), x.T @ x)
    torch.testing.assert_close(pack_quadratic_form(matrix) @ packed[:, 0], (x @ matrix @ x.T)[0, 0])
    assert len(packed) <= size * (size + 1) / 2 * (1 + 2 / 32)


def test_few_classes_of_wide_features_take_the_square_route_and_many_the_packed_one() -> None:
    head = {
        (10, 85): True,
        (2, 85): False,
        (2, 9): True,
        (2, 2049): False,
        (10, 2049): False,
        (100, 65): True,
        (30, 5): True,
    }
    for (num_outputs, size), packs in head.items():
        assert is_packed(num_outputs * (num_outputs - 1) // 2, torch.empty(1, size)) == packs


def test_a_gpu_takes_the_route_of_fewer_calls_until_the_products_outweigh_them() -> None:
    for num_outputs, size, packs in (
        (10, 85, False),
        (100, 65, True),
        (100, 641, True),
        (2, 2049, False),
        (30, 5, True),
    ):
        features: Any = SimpleNamespace(shape=(60_000, size), device=torch.device("cuda"))
        assert is_packed(num_outputs * (num_outputs - 1) // 2, features) == packs


def make_target(layout: HeadLayout, num_examples: int) -> tuple[LastLayerTarget, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_examples, layout.num_features, generator=generator)
    labels = torch.randint(layout.num_classes, (num_examples,), generator=generator)
    theta = torch.randn(layout.num_params, generator=generator, dtype=torch.float64) / layout.num_features
    return LastLayerTarget(features, labels, layout, Prior(1.0)), theta


def dense_hessian(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """sum_n (diag(p) - p p^T) kron x x^T in float64, theta order."""
    layout = target.layout
    logits = layout.logits(target.features.double(), theta[None])[0]
    p = logits.softmax(dim=1)
    each = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    if layout.num_outputs == 1:
        each = (logits.sigmoid() * (1 - logits.sigmoid())).unsqueeze(2)
    x = layout.augment_features(target.features).double()
    dense = torch.einsum("nkl,ni,nj->kilj", each, x, x).reshape(layout.num_params, -1)
    return in_theta_order(dense, layout)


@every_route
@pytest.mark.parametrize("layout", [HeadLayout(2, 40), HeadLayout(5, 33, has_bias=False), HeadLayout(1, 50)], ids=str)
def test_the_full_hessian_is_the_sum_over_examples(
    layout: HeadLayout, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_route(monkeypatch, packs)
    target, theta = make_target(layout, 2000)
    got, expected = ggn(target, theta, "full")["hessian.full"], dense_hessian(target, theta)
    assert torch.equal(got, got.T)
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-7


@every_route
def test_logit_moments_are_those_of_sigma(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    take_route(monkeypatch, packs)
    layout = HeadLayout(3, 40)
    target, theta = make_target(layout, 400)
    covariance = Full.from_hessian(ggn(target, theta, "full"), Prior(1.0), layout)
    sigma = layout.augment(layout.augment(covariance.scale_tril @ covariance.scale_tril.T).permute(1, 2, 0))
    x = layout.augment_features(target.features).double()
    expected = torch.einsum("kalb,na,nb->nkl", sigma.permute(2, 3, 0, 1), x, x)
    torch.testing.assert_close(head_spread(covariance, layout).covariance(target.features.double()), expected)
    single = head_spread(covariance.to(dtype=torch.float32), layout)
    variance = single.variance(target.features).double()
    torch.testing.assert_close(variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=0)
    less_mean = torch.eye(3, dtype=torch.float64) - 1 / 3
    projected = (less_mean @ expected @ less_mean).diagonal(dim1=1, dim2=2)
    got = single.projected_variance(target.features).double()
    torch.testing.assert_close(got, projected, rtol=1e-4, atol=0)


def test_wide_features_of_two_classes_take_few_launches_a_block() -> None:
    target, theta = make_target(HeadLayout(2, 300), 64)
    assert count(lambda: ggn(target, theta, "full")).launches < 60
    root = Full(torch.eye(602))
    assert count(lambda: head_spread(root, target.layout).variance(target.features)).launches < 20
    assert count(lambda: packed_products(target.features)).launches < 40


def test_a_hessian_of_many_outputs_takes_a_few_launches_an_output() -> None:
    layout = HeadLayout(100, 3)
    sums = (torch.rand(4950, 10, dtype=torch.float64),)
    assert count(lambda: full.whole_of_pairs(sums[0], layout)).launches < 12 * 100
