"""Posteriors: densities, draws, logit moments and their tensors."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from problems.heads import at_random_by, gaussian_at_mode, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli import posteriors, registry
from bnncli.flows import SPACES, build_layers
from bnncli.inference.elbo import elbo, log_weights
from bnncli.latent.factors import initial_factors
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.numerics import random
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import noise_blocks, sample_from_noise, standard_normal
from bnncli.posteriors.flow import Flow, is_idle
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.point import Point
from bnncli.posteriors.samples import Samples
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget

every_structure = pytest.mark.parametrize("structure", registry.names("curvature"))
every_space = pytest.mark.parametrize("space", SPACES)
every_flow_and_space = pytest.mark.parametrize(
    ("kind", "space"),
    [(kind, space) for kind in registry.names("flows") for space in registry.load_class("flows", kind).spaces],
)


@functools.cache
def make_gaussian(structure: str = "full", layout: HeadLayout | None = None) -> Gaussian:
    target = head_target(layout or HeadLayout(3, 2), labels=at_random_by(0), prior=0.5)
    return gaussian_at_mode(target, structure)


def make_flow(kind: str, space: str, base: Gaussian) -> Flow:
    layers = []
    for seed in range(3):
        layer = build_layers(kind, base.layout, seeded(seed), length=3)[seed]
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
            size = parameter.shape[-1] if parameter.ndim > 1 else 1
            step = torch.randn(parameter.shape, generator=seeded(seed), dtype=torch.float64)
            parameter += 0.4 * step / max(size, 1) ** 0.5
        layers.append(layer)
    return Flow(base, tuple(layers), kind, space)


def dense(gaussian: Gaussian) -> Tensor:
    root = gaussian.covariance.unwhiten(torch.eye(gaussian.layout.num_params, dtype=torch.float64))
    return root.T @ root


@every_structure
def test_gaussian_density_is_torchs(structure: str) -> None:
    gaussian = make_gaussian(structure)
    reference = torch.distributions.MultivariateNormal(gaussian.mean, dense(gaussian))
    theta, log_density = gaussian.from_noise(gaussian.noise(5, seeded()))
    torch.testing.assert_close(log_density, reference.log_prob(theta))
    torch.testing.assert_close(gaussian.log_density(theta + 1), reference.log_prob(theta + 1))
    assert gaussian.entropy == pytest.approx(float(reference.entropy()))


@every_structure
def test_gaussian_draws_have_its_moments(structure: str) -> None:
    gaussian = make_gaussian(structure)
    z = gaussian.covariance.whiten(gaussian.sample(4000, seeded()).double() - gaussian.mean)
    assert z.mean(dim=0).abs().max() < 4.5 / 4000**0.5
    errors = (z.T @ z / 4000 - torch.eye(9)).abs()
    assert errors.max() < 4.5 * (2 / 4000) ** 0.5


@every_structure
@pytest.mark.parametrize("layout", [HeadLayout(3, 2), HeadLayout(1, 2, has_bias=False)], ids=str)
def test_logit_moments_are_those_of_many_draws(structure: str, layout: HeadLayout) -> None:
    gaussian = make_gaussian(structure, layout)
    features = torch.randn(3, 2, generator=seeded(5), dtype=torch.float64)
    mean, covariance = gaussian.logit_moments(features)
    marginals = gaussian.logit_marginals(features)
    torch.testing.assert_close(marginals, (mean, covariance.diagonal(dim1=1, dim2=2)))
    logits = layout.logits(features, gaussian.sample(20_000, seeded()).double())
    sd = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((logits.mean(dim=0) - mean) / sd).abs().max() < 4.5 / 20_000**0.5
    for n in range(3):
        scale = sd[n].outer(sd[n])
        empirical = torch.atleast_2d(torch.cov(logits[:, n].T))
        assert ((empirical - covariance[n]) / scale).abs().max() < 4.5 * (2 / 20_000) ** 0.5


@every_structure
def test_projected_marginals_are_those_of_draws_minus_their_mean(structure: str) -> None:
    gaussian, num_draws = make_gaussian(structure), 20_000
    gaussian = replace(gaussian, mean=gaussian.mean + 0.3)  # the mode's weights sum to zero over the outputs
    features = torch.randn(3, 2, generator=seeded(5), dtype=torch.float64)
    mean, variance = gaussian.logit_marginals(features, is_projected=True)
    logits = gaussian.layout.logits(features, gaussian.sample(num_draws, seeded()).double())
    logits = logits - logits.mean(dim=2, keepdim=True)
    assert ((logits.mean(dim=0) - mean) / variance.sqrt()).abs().max() < 4.5 / num_draws**0.5
    assert (logits.var(dim=0) / variance - 1).abs().max() < 4.5 * (2 / num_draws) ** 0.5


@every_flow_and_space
def test_flow_density_integrates_to_one(kind: str, space: str) -> None:
    base = make_gaussian(layout=HeadLayout(1, 1))
    flow = make_flow(kind, space, base)
    draws = flow.sample(2000, seeded()).double()
    centre, reach = draws.mean(dim=0), 10 * draws.std(dim=0)
    axes = [
        torch.linspace(float(c - r), float(c + r), 151, dtype=torch.float64) for c, r in zip(centre, reach, strict=True)
    ]
    density = flow.log_density(torch.cartesian_prod(*axes)).exp()
    cell = float(axes[0][1] - axes[0][0]) * float(axes[1][1] - axes[1][0])
    assert float(density.sum()) * cell == pytest.approx(1, abs=5e-3)


@every_flow_and_space
@every_structure
def test_flow_density_of_a_draw_is_the_one_it_came_with(kind: str, space: str, structure: str) -> None:
    flow = make_flow(kind, space, make_gaussian(structure))
    theta, log_density = flow.from_noise(flow.noise(20, seeded()))
    torch.testing.assert_close(flow.log_density(theta), log_density, rtol=1e-7, atol=1e-7)


@every_space
def test_a_flow_without_layers_is_its_base(space: str) -> None:
    base = make_gaussian()
    flow = Flow(base, (), "radial", space)
    theta = base.sample(4, seeded()).double()
    torch.testing.assert_close(flow.log_density(theta), base.log_density(theta))
    assert torch.equal(flow.sample(4, seeded()), base.sample(4, seeded()))


@every_structure
@every_flow_and_space
def test_flow_comes_back_from_its_tensors(structure: str, kind: str, space: str) -> None:
    flow = make_flow(kind, space, make_gaussian(structure))
    tensors, meta = flow.to_tensors()
    again = Flow.from_tensors(tensors, json.loads(json.dumps(meta)))
    assert torch.equal(again.sample(5, seeded()), flow.sample(5, seeded()))
    assert torch.equal(flow.to("cpu").sample(5, seeded()), flow.sample(5, seeded()))
    assert again.base.prior.weight_precision == 0.5


@every_structure
def test_gaussian_comes_back_from_its_tensors(structure: str) -> None:
    gaussian = make_gaussian(structure)
    tensors, meta = gaussian.to_tensors()
    again = Gaussian.from_tensors(tensors, json.loads(json.dumps(meta)))
    assert torch.equal(again.sample(5, seeded()), gaussian.sample(5, seeded()))
    assert again.layout == gaussian.layout
    assert all(part.is_contiguous() and part.dtype == torch.float64 for part in tensors.values())


def test_point_is_certain_of_its_logits() -> None:
    layout = HeadLayout(3, 2)
    point = Point(torch.arange(9.0), layout)
    features = torch.tensor([[1.0, -1.0]])
    mean, covariance = point.logit_moments(features)
    expected = torch.nn.functional.linear(features, torch.arange(6.0).view(3, 2), torch.tensor([6.0, 7.0, 8.0]))
    torch.testing.assert_close(mean, expected)
    assert torch.equal(covariance, torch.zeros(1, 3, 3))
    assert all(map(torch.equal, point.logit_marginals(features), (mean, torch.zeros(1, 3))))
    projected = point.logit_marginals(features, is_projected=True)
    torch.testing.assert_close(projected, (mean - mean.mean(), torch.zeros(1, 3)))
    tensors, meta = point.to_tensors()
    assert torch.equal(Point.from_tensors(tensors, meta).sample(2, seeded()), point.sample(2, seeded()))


def make_samples() -> Samples:
    return Samples(torch.arange(4 * 5 * 9, dtype=torch.float32).view(4, 5, 9), HeadLayout(3, 2))


@pytest.mark.parametrize("count", [None, 20, 1000])
def test_all_draws_come_in_order(count: int | None) -> None:
    assert torch.equal(make_samples().sample(count, seeded()), make_samples().draws.view(20, 9))


def test_fewer_draws_are_chosen_by_seed_without_replacement() -> None:
    chosen = make_samples().sample(8, seeded(1))
    assert chosen.unique(dim=0).shape == (8, 9)
    assert torch.equal(chosen, make_samples().sample(8, seeded(1)))
    assert not torch.equal(chosen, make_samples().sample(8, seeded(2)))


def test_centers_are_theta_mean_mean_of_draws_and_none() -> None:
    gaussian = make_gaussian()
    assert torch.equal(gaussian.center, gaussian.mean)
    assert torch.equal(make_samples().center, make_samples().draws.mean(dim=(0, 1)))
    assert not hasattr(make_flow("radial", "whitened", gaussian), "center")


def test_a_flow_near_the_identity_is_called_idle() -> None:
    base = make_gaussian()
    noise = base.noise(50, seeded())
    assert not is_idle(make_flow("radial", "whitened", base), noise)
    assert is_idle(Flow(base, (), "radial", "weight"), noise)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("distance", "expected"), [(0.049, True), (0.051, False)])
def test_a_shift_of_a_twentieth_of_a_standard_deviation_is_not_idle(
    space: str, distance: float, expected: bool
) -> None:
    base = make_gaussian()
    shift = distance * torch.eye(9, dtype=torch.float64)[:1]
    layer = build_layers("affine", base.layout, seeded(), length=1)[0].requires_grad_(False)
    layer.shift.copy_((shift if space == "whitened" else base.covariance.unwhiten(shift))[0])
    assert is_idle(Flow(base, (layer,), "affine", space), base.noise(50, seeded())) is expected


def test_sizes_that_do_not_fit_the_head_are_refused() -> None:
    gaussian = make_gaussian()
    with pytest.raises(ValueError, match="mean: expected shape"):
        Gaussian(torch.zeros(4), gaussian.covariance, gaussian.layout, Prior(1.0))
    with pytest.raises(ValueError, match="the covariance has 9 parameters, but the head has 6"):
        Gaussian(torch.zeros(6), gaussian.covariance, HeadLayout(3, 2, has_bias=False), Prior(1.0))
    with pytest.raises(ValueError, match="expected one of whitened, weight"):
        Flow(gaussian, (), "radial", "log")
    assert math.isfinite(gaussian.entropy)


CPU = torch.device("cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Long draws are made as where the device has generators of its own; those that were made."""
    made = []

    def elsewhere(generator: torch.Generator, device: torch.device) -> torch.Generator:
        made.append(torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator))))
        return made[-1]

    monkeypatch.setattr(random, "on_device", elsewhere)
    return made


def gaussian(num_params: int) -> Gaussian:
    mean = torch.linspace(-1, 1, num_params, dtype=torch.float64)
    return Gaussian(mean, Diag(0.5 + mean.abs()), HeadLayout(1, num_params, has_bias=False), Prior(1.0))


def test_short_draws_are_the_streams_own_in_double_precision() -> None:
    expected = torch.randn(3, random.LARGE, generator=seeded(), dtype=torch.float64)
    assert torch.equal(standard_normal(3, random.LARGE, seeded(), CPU), expected)


def test_long_draws_on_a_cpu_are_normal_in_single_precision() -> None:
    size = random.LARGE + 1
    got = standard_normal(6, size, seeded(), CPU)
    assert got.dtype == torch.float64
    assert torch.equal(got, torch.randn(6, size, generator=seeded()).double())
    error = 1 / math.sqrt(got.numel())
    assert abs(float(got.mean())) < 4 * error
    assert abs(float(got.square().mean()) - 1) < 4 * math.sqrt(2) * error
    assert abs(float(got.pow(4).mean()) - 3) < 4 * math.sqrt(96) * error


def test_long_draws_where_a_device_has_generators_are_seeded_by_the_stream(
    as_on_a_gpu: list[torch.Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "LARGE", 10)
    generator = seeded()
    first, second = (standard_normal(2, 11, generator, CPU) for _ in range(2))
    assert not torch.equal(first, second)
    assert len(as_on_a_gpu) == 2
    again = seeded()
    assert torch.equal(standard_normal(2, 11, again, CPU), first)
    other = seeded()
    torch.randint(2**62, (1,), generator=other)
    assert torch.equal(
        again.get_state(), other.get_state()
    )  # one number of the stream a call, and so all that is stored


@pytest.mark.parametrize("num_samples", [1, 15, 64, 65, 128, 131, 300])
@pytest.mark.parametrize("num_params", [1, 3, 5, 40])
@pytest.mark.parametrize("is_long", [False, True])
def test_parts_of_the_noise_are_together_what_one_call_makes(
    monkeypatch: pytest.MonkeyPatch, num_samples: int, num_params: int, is_long: bool
) -> None:
    monkeypatch.setattr(posteriors, "_AT_ONCE", 600)
    if is_long:
        monkeypatch.setattr(random, "LARGE", 0)
    q = gaussian(num_params)
    whole, parts = q.noise(num_samples, seeded()), list(noise_blocks(q, num_samples, seeded()))
    assert torch.equal(torch.cat(parts), whole)
    assert max(part.numel() for part in parts) <= max(600, 16 * num_params) + 16
    assert torch.equal(sample_from_noise(q, num_samples, seeded()), q.from_noise(whole)[0].float())


def test_the_elbo_of_blocks_of_draws_has_the_bits_of_one_block() -> None:
    features = torch.randn(30, 7, generator=seeded(1), dtype=torch.float64)
    target = LastLayerTarget(features, (features[:, 0] > 0).long(), HeadLayout(1, 7, has_bias=False), Prior(1.0))
    q = gaussian(7)
    expected = log_weights(target, q, q.noise(500, seeded()))
    assert torch.equal(elbo(target, q, generator=seeded(), num_samples=500).log_weights, expected)


def test_large_draws_need_few_at_once() -> None:
    class Counted:
        layout = HeadLayout(1000, 2048)

        def noise(self, num_samples: int, generator: Any) -> torch.Tensor:
            return torch.empty(num_samples, 0)

    assert [len(part) for part in noise_blocks(Counted(), 40, seeded())] == [16, 16, 8]


def test_networks_with_many_weights_are_drawn_where_they_are_needed(
    as_on_a_gpu: list[torch.Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = NetworkLayout((6, 4, 3))
    model = LatentModel(layout, initial_factors(layout, 2, seeded()), SpikeAndSlab.constant(2))
    monkeypatch.setattr(random, "LARGE", layout.num_weights)
    model.draw_weights(torch.arange(2), seeded())
    assert as_on_a_gpu == []
    monkeypatch.setattr(random, "LARGE", layout.num_weights - 1)
    weights, biases = model.draw_weights(torch.arange(2), seeded())
    assert len(as_on_a_gpu) == 1
    again = model.draw_weights(torch.arange(2), seeded())
    assert torch.equal(again[0], weights)
    assert torch.equal(again[1], biases)
