"""Who makes the normals of a draw, and that parts of them are what one call makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems.seeds import seeded

from bnncli import posteriors
from bnncli.inference.elbo import elbo, log_weights
from bnncli.latent.factors import initial_factors
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.numerics import random
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import noise_blocks, sample_from_noise, standard_normal
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget

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
