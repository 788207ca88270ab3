"""The Gaussian of the logits: the short way of every structure, and the one that serves any, against the Jacobian's products."""

import pytest
import torch
from problems.heads import LAYOUTS
from torch import Tensor

from bnncli import registry
from bnncli.covariances._row_space import WithinRows
from bnncli.covariances.full import Full
from bnncli.curvature import ggn
from bnncli.logits import LogitCovariance, LogitGaussian
from bnncli.logits._asked import logit_gaussian
from bnncli.logits._head import head_spread
from bnncli.logits._pulled import Pulled, pulled
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets import blocks
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace

every_layout = pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
every_structure = pytest.mark.parametrize("structure", registry.names("curvature"))


def inputs(count: int = 11, size: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_covariance(structure: str, layout: HeadLayout) -> object:
    labels = torch.arange(30) % layout.num_classes
    target = LastLayerTarget(inputs(30, layout.num_features, seed=1), labels, layout, Prior(0.7, 0.2))
    hessian = ggn(target, torch.full((layout.num_params,), 0.1, dtype=torch.float64), structure)
    return registry.load_class("covariances", structure).from_hessian(hessian, target.prior, layout)


def answers(spread: LogitCovariance, features: Tensor) -> list[Tensor]:
    columns = spread.root(features).apply(torch.eye(spread.variance(features).shape[1], dtype=features.dtype))
    squared = torch.einsum("zkn,zln->nkl", columns, columns)
    return [spread.variance(features), spread.projected_variance(features), spread.covariance(features), squared]


def test_the_jacobian_of_a_head_is_autograds() -> None:
    layout, theta = LAYOUTS[0], torch.ones(15, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda one: layout.logits(inputs(), one[None])[0], theta)
    assert torch.equal(layout.jacobian(inputs()), expected)


@every_structure
@every_layout
def test_the_short_way_of_a_structure_is_that_of_any(
    structure: str, layout: HeadLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 2 * layout.num_outputs * layout.num_params)  # several blocks
    covariance = make_covariance(structure, layout)
    short = head_spread(covariance, layout)
    assert not isinstance(short, Pulled)
    any_way = pulled(covariance, layout.jacobian)
    torch.testing.assert_close(answers(short, inputs()), answers(any_way, inputs()), rtol=1e-9, atol=1e-12)


@every_structure
def test_a_structure_without_a_short_way_is_pulled_back(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = HeadLayout(3, 6)
    rows = RowSpace.of(inputs(4, 6, seed=2), layout)
    inner = make_covariance(structure, rows.reduced)
    for covariance, of in ((make_covariance(structure, layout), layout), (WithinRows(inner, rows, 0.7), layout)):
        expected = answers(head_spread(covariance, of), inputs(size=6))
        with monkeypatch.context() as patch:
            patch.setattr(registry, "names", lambda family: [])
            torch.testing.assert_close(answers(head_spread(covariance, of), inputs(size=6)), expected)


def test_a_networks_logits_are_asked_in_the_same_place() -> None:
    theta = torch.randn(35, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def logits_at(theta: Tensor, x: Tensor) -> Tensor:
        return (x @ theta[:20].view(4, 5)).tanh() @ theta[20:].view(5, 3)

    def jacobian(x: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(lambda one: logits_at(one, x), theta)

    root = torch.tril(torch.randn(35, 35, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    asked = LogitGaussian(lambda x: logits_at(theta, x), pulled(Full(root), jacobian))
    mean, covariance = asked.moments(inputs())
    rows = jacobian(inputs())
    torch.testing.assert_close(mean, logits_at(theta, inputs()))
    torch.testing.assert_close(covariance, rows @ root @ root.T @ rows.mT)
    torch.testing.assert_close(asked.marginals(inputs())[1], covariance.diagonal(dim1=1, dim2=2))


def test_one_theta_has_certain_logits_in_the_precision_of_its_inputs() -> None:
    asked = logit_gaussian(torch.ones(15, dtype=torch.float64), LAYOUTS[0])
    mean, covariance = asked.moments(inputs().float())
    assert (mean.dtype, covariance.dtype, covariance.shape) == (torch.float32, torch.float32, (11, 3, 3))
    assert not any(part.any() for part in answers(asked.spread, inputs()))
