"""Confidence of small classifiers: probabilities against averages by hand, gaps from what they are gaps of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bnncli.experiments import Measurements
from bnncli.experiments._toy_networks import TanhLayout
from bnncli.experiments.confidence_map import draw, examples, linear_probs, mean_probs, measure
from bnncli.progress import SILENT

SETTINGS = {
    "examples": 30, "spread": 0.5, "hidden": 2, "prior": 1.0, "draws": 200, "chains": 4, "hmc_draws": 30, "repeats": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure(SETTINGS, {}, generator=torch.Generator().manual_seed(2), progress=SILENT)


def test_classes_lie_around_the_corners_of_a_triangle() -> None:
    x, labels = examples(30_000, 0.6, torch.Generator().manual_seed(0))
    expected = torch.tensor([[2.0, 0.0], [-1.0, 3**0.5], [-1.0, -(3**0.5)]]).double()
    for label, center in enumerate(expected):
        own = x[labels == label]
        torch.testing.assert_close(own.mean(dim=0), center, atol=0.03, rtol=0)
        torch.testing.assert_close(own.T.cov(), 0.36 * torch.eye(2).double(), atol=0.02, rtol=0)


def test_mean_probabilities_are_averages_over_theta() -> None:
    layout, generator = TanhLayout((2, 3, 3)), torch.Generator().manual_seed(1)
    theta = torch.randn(7, layout.num_params, generator=generator, dtype=torch.float64)
    inputs = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    expected = sum(layout.outputs(inputs, one.unsqueeze(0))[0].softmax(dim=1) for one in theta) / 7
    torch.testing.assert_close(mean_probs(layout, inputs, theta), expected)


def test_linear_probabilities_are_those_of_normal_logits() -> None:
    root = torch.tensor([[1.0, 0.0, 0.0], [-0.8, 0.5, 0.0], [0.3, 0.2, 0.9]]).double()
    mean, covariance = torch.tensor([[1.0, 0.0, -1.0]]).double(), (root @ root.T).unsqueeze(0)
    found = linear_probs(mean, covariance, 200_000, torch.Generator().manual_seed(1))
    normal = torch.distributions.MultivariateNormal(mean[0], covariance[0])
    expected = normal.sample((200_000,)).softmax(dim=1).mean(dim=0, keepdim=True)
    torch.testing.assert_close(found, expected, atol=0.005, rtol=0)


def test_gaps_are_differences_and_confidence_is_that_of_the_maps(measured: Measurements) -> None:
    values = {name: one.value for name, one in measured.values.items()}
    assert values["gap_mc_mpa"] == pytest.approx(values["near_mc"] - values["near_mpa"])
    assert values["gap_error"] == pytest.approx(values["error_mc"] - values["error_mpa"])
    one, hmc = measured.arrays["map mpa"], measured.arrays["map hmc"]
    assert values["error_mpa"] == pytest.approx(np.abs(one - hmc).mean())
    rim = np.concatenate([one[0], one[-1], one[1:-1, 0], one[1:-1, -1]])
    assert values["far_mpa"] == pytest.approx(rim.mean())
    assert values["near_plug"] > values["near_mpa"]


def test_maps_are_drawn_with_their_confidence_at_the_examples(measured: Measurements) -> None:
    figure = draw(measured, SETTINGS)["confidence"]
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert [title.split("\n")[0] for title in titles] == ["Monte Carlo", "multi-class probit", "HMC"]
    assert f"{measured.values['near_mc'].value:.2f} at the examples" in titles[0]
