"""Moments of logits of heads and networks, and what is kept of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from problems.heads import LAYOUTS
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.inference.memory import logit_cache_bytes
from bnncli.inference.mode import covariance_at
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import ggn, network_logits
from bnncli.structures.full import Full
from bnncli.structures.logit_gaussian import covariances_together, is_by_layer, logit_gaussian
from bnncli.structures.logits import LogitCovariance, LogitGaussian, Pulled, head_spread, pull_back_logits
from bnncli.structures.network_logits import keeping
from bnncli.structures.row_space import WithinRows
from bnncli.targets import blocks
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget
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
    any_way = pull_back_logits(covariance, layout.jacobian)
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
    asked = LogitGaussian(lambda x: logits_at(theta, x), pull_back_logits(Full(root), jacobian))
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


K, N = 3, 7
STEP = 1e-5


class Mixed(nn.Module):
    """A layer and a norm used twice, a layer whose weight another reads, a bare parameter, a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.grouped, self.scaled = (
            nn.Conv2d(1, 2, 2, padding=1),
            nn.Conv2d(2, 2, 2, groups=2),
            nn.BatchNorm2d(2),
        )
        self.again, self.read, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, K)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scaled(self.scaled(self.grouped(self.conv(x).tanh())).tanh()).mean(dim=(2, 3))
        hidden = self.again(self.again(hidden).tanh())
        hidden = self.read(hidden) + hidden @ self.read.weight
        return self.last(hidden * self.scale)


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, K)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(18, K)
    ),
    "mixed": Mixed,
}
SHAPE = (1, 2, 2)


def make_gaussian(
    structure: str,
    module: str = "mlp",
    pattern: str = "all",
    prior: Prior | None = None,
    rank: int | None = None,
) -> Gaussian:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ModuleNetwork(MODULES[module]().eval())
    layout = ModuleLayout.of(network, pattern, num_outputs=K, input_shape=SHAPE)
    choice = CurvatureChoice(rank=rank)
    target = NetworkTarget(network_inputs(20, 1), torch.arange(20) % K, layout, prior or Prior(0.7), choice=choice)
    mean = layout.trained()
    hessian = ggn(target, mean, structure)
    covariance = registry.load_class("covariances", structure).from_hessian(hessian, target.prior, layout)
    return Gaussian(mean, covariance, layout, target.prior)


def network_inputs(count: int = N, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, generator=seeded(seed), dtype=torch.float64)


def by_differences(gaussian: Gaussian, features: Tensor) -> Tensor:
    """J Sigma J^T (n, K, K), J by central differences, Sigma multiplied out."""
    steps = STEP * torch.eye(len(gaussian.mean), dtype=torch.float64)
    sides = [gaussian.layout.logits(features, gaussian.mean + sign * steps) for sign in (1, -1)]
    jacobian = (sides[0] - sides[1]).permute(1, 2, 0) / (2 * STEP)
    root = gaussian.covariance.unwhiten(torch.eye(len(gaussian.mean), dtype=torch.float64)).T
    return jacobian @ root @ root.T @ jacobian.mT


def check(gaussian: Gaussian) -> None:
    expected, features = by_differences(gaussian, network_inputs()), network_inputs()
    near = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)
    mean, covariance = gaussian.logit_moments(features)
    torch.testing.assert_close(mean, gaussian.layout.logits(features, gaussian.mean[None])[0])
    near(covariance, expected)
    near(gaussian.logit_marginals(features)[1], expected.diagonal(dim1=1, dim2=2))
    contrast = torch.eye(K, dtype=torch.float64) - 1 / K
    projected = (contrast @ expected @ contrast).diagonal(dim1=1, dim2=2)
    near(gaussian.logit_marginals(features, is_projected=True)[1], projected)
    columns = gaussian.logit_root(features)[1].apply(torch.eye(K, dtype=torch.float64)).permute(2, 1, 0)
    near(columns @ columns.mT, expected)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("structure", registry.names("network_curvature"))
def test_moments_are_those_of_finite_differences(structure: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(network_logits._BLOCK_ELEMENTS, "cpu", 2000)  # several blocks of examples
    check(make_gaussian(structure, module))


@pytest.mark.parametrize(
    ("pattern", "prior"), [("*.weight", Prior(0.7)), ("*.bias+1", Prior(0.7)), ("all", Prior(0.7, 0.1))]
)
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block"])
def test_so_are_those_of_some_parameters_and_under_two_precisions(structure: str, pattern: str, prior: Prior) -> None:
    check(make_gaussian(structure, "conv", pattern, prior))


@pytest.mark.parametrize("prior", [Prior(0.7), Prior(0.7, 0.1)], ids=str)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_so_are_those_of_factors_of_one_eigenvector(structure: str, module: str, prior: Prior) -> None:
    gaussian = make_gaussian(structure, module, prior=prior, rank=1)
    bases = [part for name, part in gaussian.covariance.stored.items() if name.endswith(".outputs")]
    assert any(len(basis) == K > basis.shape[1] for basis in bases)
    check(gaussian)


def test_single_precision_is_near() -> None:
    for structure in ("diag", "kron", "ekfac", "block"):
        gaussian = make_gaussian(structure, "conv")
        single = gaussian.logit_moments(network_inputs().float())[1]
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), gaussian.logit_moments(network_inputs())[1], rtol=1e-4, atol=1e-5)


NUM_CLASSES, NUM_INPUTS, D = 3, 12, 5
PRECISIONS = 0.3, 2.0, 40.0


class Counting(nn.Module):
    """A layer used at several places, one used once, a norm and a bare parameter; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.norm, self.last = nn.Linear(1, 2), nn.LayerNorm(2), nn.Linear(2, NUM_CLASSES)
        self.scale = nn.Parameter(torch.ones(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.norm(self.each(x.unsqueeze(2)).tanh()).mean(dim=1) * self.scale)


def make_target() -> tuple[Counting, NetworkTarget]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Counting().eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=NUM_CLASSES, input_shape=(D,))
    inputs = torch.randn(NUM_INPUTS, D, generator=seeded(1))
    return module, NetworkTarget(inputs, torch.arange(NUM_INPUTS) % NUM_CLASSES, layout, Prior(1.0))


def gaussians(target: NetworkTarget, structure: str, theta: Tensor) -> list[Gaussian]:
    """Of one curvature under several priors."""
    hessian, found = ggn(target, theta, structure), []
    for precision in PRECISIONS:
        own = target.with_prior(Prior(precision))
        covariance = covariance_at(own, theta, structure, hessian=hessian).covariance
        found.append(Gaussian(theta, covariance, target.layout, own.prior))
    return found


@pytest.mark.parametrize("structure", registry.names("network_curvature"))
def test_moments_are_the_same_in_any_blocks_and_take_one_pass_of_each_input(structure: str) -> None:
    module, target = make_target()
    every = gaussians(target, structure, target.layout.trained())
    expected = [one.logit_moments(target.inputs) for one in every]
    with keeping(target.layout.network, NUM_INPUTS, most_derivatives=NUM_INPUTS):
        every[0].logit_moments(target.inputs)
        calls = module.calls
        order = torch.randperm(NUM_INPUTS, generator=seeded(2))
        for one, (mean, covariance) in zip(every, expected, strict=True):
            for rows in (slice(0, 5), slice(5, NUM_INPUTS), order, order[:3]):
                found = one.logit_moments(target.inputs[rows])
                torch.testing.assert_close(found, (mean[rows], covariance[rows]), rtol=1e-4, atol=1e-6)
                marginals = one.logit_marginals(target.inputs[rows], is_projected=False)
                torch.testing.assert_close(marginals[1], found[1].diagonal(dim1=1, dim2=2), rtol=1e-4, atol=1e-6)
        assert module.calls == calls


def test_covariances_are_kept_where_jacobians_are_not() -> None:
    module, target = make_target()
    first, second = gaussians(target, "kron", target.layout.trained())[:2]
    expected = [
        (
            *one.logit_moments(target.inputs),
            *(one.logit_marginals(target.inputs, is_projected=flag)[1] for flag in (0, 1)),
        )
        for one in (first, second)
    ]
    with keeping(target.layout.network, NUM_INPUTS, most_derivatives=0):
        for one, (mean, covariance, *variances) in zip((first, second), expected, strict=True):
            one.logit_moments(target.inputs)
            calls, some = module.calls, slice(2, 7)
            torch.testing.assert_close(one.logit_moments(target.inputs[some]), (mean[some], covariance[some]))
            for is_projected, variance in enumerate(variances):
                found = one.logit_marginals(target.inputs[some], is_projected=bool(is_projected))
                torch.testing.assert_close(found[1], variance[some], rtol=1e-5, atol=1e-7)
            root = one.logit_root(target.inputs[some])[1]
            assert module.calls == calls
            torch.testing.assert_close(root.scale @ root.scale.mT, covariance[some], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_covariances_of_many_priors_share_it(structure: str) -> None:
    module, target = make_target()
    theta = target.layout.trained()
    covariances = [one.covariance for one in gaussians(target, structure, theta)]
    expected = covariances_together(covariances, target.layout, theta)(target.inputs)
    with keeping(target.layout.network, NUM_INPUTS, most_derivatives=NUM_INPUTS):
        first = covariances_together(covariances[:1], target.layout, theta)(target.inputs)
        torch.testing.assert_close(first, expected[:1])
        calls = module.calls
        for rows in (slice(0, 3), slice(1, 3)):
            found = covariances_together(covariances[rows], target.layout, theta)(target.inputs)
            torch.testing.assert_close(found, expected[rows])
    assert module.calls == calls


def test_another_theta_or_another_curvature_has_its_own() -> None:
    _, target = make_target()
    first = target.layout.trained()
    second = first + 0.3
    other = NetworkTarget(target.inputs.flip(0).square(), target.labels, target.layout, Prior(1.0))
    made = [gaussians(target, "kron", first)[0], gaussians(target, "kron", second)[0]]
    made.append(gaussians(other, "kron", second)[0])  # other bases at the same theta
    expected = [one.logit_moments(target.inputs) for one in made]
    with keeping(target.layout.network, NUM_INPUTS, most_derivatives=NUM_INPUTS):
        for one, moments in zip(made, expected, strict=True):
            torch.testing.assert_close(one.logit_moments(target.inputs), moments, rtol=1e-4, atol=1e-6)
    assert not target.layout.network.kept


@pytest.mark.parametrize("room", [0, NUM_INPUTS - 1])
def test_without_room_nothing_is_kept_of_what_exceeds_it(room: int) -> None:
    module, target = make_target()
    gaussian = gaussians(target, "kron", target.layout.trained())[0]
    expected = gaussian.logit_moments(target.inputs)
    with keeping(target.layout.network, room, most_derivatives=room) if room else nullcontext():
        gaussian = replace(gaussian)  # without what the first has kept of its own
        torch.testing.assert_close(gaussian.logit_moments(target.inputs), expected)
        calls = module.calls
        torch.testing.assert_close(gaussian.logit_moments(target.inputs), expected)
        assert module.calls > calls


@pytest.mark.parametrize("structure", ["kron", "diag", "block", "full"])
def test_room_is_planned_as_it_is_taken(structure: str) -> None:
    _, target = make_target()
    gaussian = gaussians(target, structure, target.layout.trained())[0]
    with keeping(target.layout.network, NUM_INPUTS, most_derivatives=NUM_INPUTS):
        gaussian.logit_moments(target.inputs)
        made = [one for kept in target.layout.network.kept.values() for one in kept.made.values()]
        taken = sum(part.nbytes for one in made for part in one if isinstance(part, Tensor))
    assert taken == NUM_INPUTS * logit_cache_bytes(target.layout, structure)


def test_a_posterior_without_a_structure_such_as_draws_has_no_blocks() -> None:
    assert not is_by_layer("")
    assert is_by_layer("kron")
