"""Errors of Monte Carlo and probit over a grid: against bounds, and against the same by hand."""

from __future__ import annotations

import math

import pytest
import torch

from bnncli.experiments import Measurements
from bnncli.experiments.integral_errors import draw, measure
from bnncli.progress import SILENT

SETTINGS = {"limit": 4.0, "cells": 40, "samples": [100, 400], "repeats": 8}


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure(SETTINGS, {}, generator=torch.Generator().manual_seed(3), progress=SILENT)


def test_probit_errs_by_less_than_its_supremum(measured: Measurements) -> None:
    assert 0.005 < measured.values["probit_max"].value < 0.0178


def test_monte_carlo_has_half_the_error_with_four_times_the_draws(measured: Measurements) -> None:
    few, many = (measured.values[f"mc_mean_{count}"] for count in (100, 400))
    assert few.value / many.value == pytest.approx(2, abs=0.1)
    assert few.count == 8


def test_the_mean_error_is_that_of_a_normal_mean(measured: Measurements) -> None:
    """E|error| = sqrt(2 / pi) sd / sqrt(S) in each cell, with the sd of sigma(f) by quadrature."""
    means, sds = (torch.from_numpy(measured.arrays[name]) for name in ("means", "sds"))
    nodes = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weights = torch.softmax(-(nodes**2) / 2, dim=0)
    probs = torch.sigmoid(means[None, :, None] + sds[:, None, None] * nodes)
    variance = (probs**2 @ weights) - (probs @ weights) ** 2
    expected = float((variance.clamp_min(0) * 2 / math.pi / 100).sqrt().mean())
    assert measured.values["mc_mean_100"].value == pytest.approx(expected, rel=0.03)


def test_maps_are_drawn_with_their_largest_errors(measured: Measurements) -> None:
    figure = draw(measured, SETTINGS)["errors"]
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert [title.split("\n")[0] for title in titles] == ["probit", "mc 100", "mc 400"]
    assert f"largest {measured.arrays['probit'].max():.2g}" in titles[0]
