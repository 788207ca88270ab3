"""Quasi-random normals: evenly spread in every coordinate, unbiased, inside the real line."""

from __future__ import annotations

import math

import pytest
import torch
from problems.seeds import seeded

from bnncli.errors import UsageError
from bnncli.numerics.random import MOST_DIMENSIONS, balance_warning, quasi_normal


@pytest.mark.parametrize("dim", [1, 10, 2000])
def test_each_of_64_equal_cells_of_every_coordinate_has_one_point(dim: int) -> None:
    cells = (64 * torch.special.ndtr(quasi_normal(64, dim, seeded()))).floor().long()
    assert torch.equal(cells.sort(dim=0).values, torch.arange(64).unsqueeze(1).expand(-1, dim))


def test_each_point_is_a_standard_normal() -> None:
    first = torch.stack([quasi_normal(3, 2, seeded(seed)) for seed in range(600)])
    error = 1 / math.sqrt(600)
    assert first.mean(dim=0).abs().max() < 4 * error
    assert (first.square().mean(dim=0) - 1).abs().max() < 4 * math.sqrt(2) * error
    assert (first[:, :, 0] * first[:, :, 1]).mean(dim=0).abs().max() < 4 * error


def test_the_error_of_a_smooth_mean_falls_faster_than_that_of_random_draws() -> None:
    direction = torch.tensor([0.8, 0.5, 0.3], dtype=torch.float64)
    exact = math.exp(0.5 * float(direction.square().sum()))

    def error(size: int) -> float:
        found = [float((quasi_normal(size, 3, seeded(seed)) @ direction).exp().mean()) for seed in range(60)]
        return math.sqrt(sum((value - exact) ** 2 for value in found) / 60)

    # Random draws: 1 / 8 of it. The ratio of two root mean squares of 60 has a standard error of about 13 %.
    assert error(2048) < 0.6 / 8 * error(32)


def test_no_point_lies_at_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    points = quasi_normal(4096, 50, seeded())
    assert torch.isfinite(points).all()
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.zeros(shape, dtype=torch.float64))
    monkeypatch.setattr("scipy.stats.qmc.Sobol.random", lambda self, n: torch.zeros(n, 2, dtype=torch.float64).numpy())
    assert torch.isfinite(quasi_normal(4, 2, seeded())).all()


def test_the_generator_decides_every_point() -> None:
    assert torch.equal(quasi_normal(8, 3, seeded(1)), quasi_normal(8, 3, seeded(1)))
    assert not torch.equal(quasi_normal(8, 3, seeded(1)), quasi_normal(8, 3, seeded(2)))


def test_more_dimensions_than_there_are_direction_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 21201 dimensions, but 21202 are needed") as caught:
        quasi_normal(2, MOST_DIMENSIONS + 1, seeded())
    assert caught.value.hint is not None
    assert "logit-mc" in caught.value.hint


def test_only_powers_of_two_are_balanced() -> None:
    assert [size for size in range(1, 40) if balance_warning(size) is None] == [1, 2, 4, 8, 16, 32]
    assert "use \0samples\0 16 or 32" in str(balance_warning(20))
