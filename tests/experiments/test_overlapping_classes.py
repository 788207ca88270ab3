"""Uncertainty-aware top-k with the released covariance and the right one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.experiments import Measurements
from bnncli.experiments.overlapping_classes import draw, mean_curvature, measure, of_lengths, with_one
from bnncli.lazy import torch
from bnncli.progress import SILENT
from bnncli.stages.demo.fixtures import fixture_path

SETTINGS = {"variances": [0.5, 100.0], "images": 100}


@pytest.fixture(scope="module")
def measured() -> Measurements:
    names = {"net": "lenet5-fmnist.pt", "train": "val.npz", "test": "test.npz"}
    inputs: dict[str, Path] = {key: fixture_path(name) for key, name in names.items()}
    return measure(SETTINGS, inputs, generator=torch.Generator(), progress=SILENT)


def test_the_curvature_is_the_diagonal_of_the_mean_hessian() -> None:
    generator = torch.Generator().manual_seed(0)
    inner = with_one(torch.randn(7, 3, generator=generator))
    head = torch.randn(4, 4, generator=generator, dtype=torch.float64)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return (inner @ flat.reshape(4, 4).T).logsumexp(dim=1).mean()

    hessian = torch.autograd.functional.hessian(loss, head.flatten())
    torch.testing.assert_close(mean_curvature(inner, head).flatten(), hessian.diagonal())


def test_lengths_of_one_rescue_nothing_and_longer_ones_the_labels_within() -> None:
    alpha = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 2.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    labels = torch.tensor([2, 0, 0])
    one = of_lengths(alpha, alpha, torch.tensor([1, 1, 1]), labels)
    assert [one[name].value for name in ("length", "rescued", "gain", "longer")] == [1, 0, 0, 0]
    two = of_lengths(alpha, alpha, torch.tensor([2, 1, 1]), labels)
    assert [two[name].value for name in ("length", "rescued", "longer")] == pytest.approx([4 / 3, 1 / 3, 1 / 3])


def test_a_wider_prior_keeps_more_classes_and_the_factor_fewer(measured: Measurements) -> None:
    value = {name: one.value for name, one in measured.values.items()}
    assert value["length_100000_neighbor"] >= value["length_500_neighbor"] >= value["length_500_neighbor_right"] >= 1
    assert value["length_500_best"] <= value["length_500_neighbor"]
    assert 0.5 < value["confidence_500"] < 1.5


def test_the_figure_has_the_shares_of_all_images(measured: Measurements) -> None:
    figure = draw(measured, SETTINGS)["lengths"]
    assert len(figure.axes) == 2
    for line in figure.axes[0].lines:
        assert float(np.asarray(line.get_ydata()).sum()) == pytest.approx(1)
