"""Normals of rows: standard, independent between rows, and a function of the row alone."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import normal, seeded
from scipy import stats
from torch import Tensor

from bnncli.numerics.random import quasi_normal, row_shifts, shifted_normal, uniform_points

ROWS = normal(300, 5, seed=1)


def noise_of(rows: Tensor, points: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return shifted_normal(points, row_shifts(rows, points.shape[1]), torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_is_standard_normal_and_independent_of_all_others(dtype: torch.dtype) -> None:
    found = noise_of(ROWS, uniform_points(normal(40, 3)), dtype).double()
    assert stats.kstest(found.flatten().numpy(), "norm").pvalue > 1e-3
    of_coordinates = torch.corrcoef(found.permute(1, 0, 2).flatten(1))[[0, 0, 1], [1, 2, 2]]
    assert of_coordinates.abs().max() < 4 / (40 * 300) ** 0.5
    for values in (found[:, 0], found[:, 1] ** 2 - 1, found[:, 1] * found[:, 2]):
        # A mean over rows and draws errs as if all were independent.
        assert values.mean().abs() < 4 * values.std() / (40 * 300) ** 0.5


def test_points_that_are_even_stay_even_for_every_row() -> None:
    """Of 64 Sobol points each coordinate has one in every 64th, and every pair of coordinates one in most cells of 8 x 8."""
    points = uniform_points(quasi_normal(64, 2, seeded()))
    cells = torch.special.ndtr(noise_of(ROWS, points))
    for row in range(0, 300, 30):
        for coordinate in range(2):
            assert (cells[:, coordinate, row] * 64).long().unique().numel() == 64
        assert ((cells[:, 0, row] * 8).long() * 8 + (cells[:, 1, row] * 8).long()).unique().numel() == 64


@pytest.mark.parametrize(
    "rows",
    [ROWS, ROWS.float(), ROWS.half(), (10 * ROWS).long(), ROWS.view(300, 5, 1), ROWS > 0, ROWS.bfloat16()],
    ids=lambda rows: f"{rows.dtype} {rows.ndim}",
)
def test_rows_of_any_type_have_shifts_of_their_own(rows: Tensor) -> None:
    shifts = row_shifts(rows, 4)
    assert (shifts.dtype, shifts.shape) == (torch.int32, (4, 300))
    assert torch.equal(row_shifts(rows[3:9], 4), shifts[:, 3:9])
    assert torch.equal(row_shifts(rows.flip(0), 6)[:4], shifts.flip(1))
    assert shifts.unique().numel() == 4 * len(rows.flatten(1).unique(dim=0))


def test_wide_rows_are_hashed_in_parts() -> None:
    wide = torch.zeros(2, (1 << 21) + 3)
    wide[1, -1] = 1
    assert not torch.equal(*row_shifts(wide, 3).T)
    assert torch.equal(row_shifts(wide[1:], 3)[:, 0], row_shifts(wide, 3)[:, 1])


def test_nothing_is_infinite() -> None:
    extremes = torch.tensor([[-(2**31), -1, 0, 2**31 - 1]], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        found = shifted_normal(extremes, torch.zeros(4, 1, dtype=torch.int32), torch.empty(0, dtype=dtype))
        assert bool(found.isfinite().all())
        assert found.abs().max() > 5
    assert uniform_points(torch.tensor([[-40.0, 40.0]], dtype=torch.float64)).tolist() == [[-(2**31), 2**31 - 1]]
