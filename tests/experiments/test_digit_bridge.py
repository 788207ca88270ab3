"""The network on digits: its curvature by autograd, samples of its logits by another way, the choice of the prior, scores by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.seeds import seeded

from bnncli.errors import DataError
from bnncli.experiments import digit_bridge, digit_network
from bnncli.figures import time_shares
from bnncli.targets.network import NetworkTarget


def written(path: Path, count: int, seed: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 10
    pixels = generator.integers(0, 80, (count, 28, 28), dtype=np.uint8)
    for row, label in enumerate(labels):
        pixels[row, 2 * label : 2 * label + 4] += 150
    np.savez(path, x=pixels, y=labels.astype(np.int64))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> NetworkTarget:
    path = written(tmp_path_factory.mktemp("digits") / "train.npz", 120)
    return digit_network.trained(*digit_network.images(path), classes=10, epochs=3, generator=seeded(1))


def test_images_of_the_first_classes_are_taken_in_their_order(tmp_path: Path) -> None:
    path = written(tmp_path / "a.npz", 30)
    inputs, labels = digit_network.images(path, classes=3, count=7)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert inputs.shape == (7, 1, 28, 28)
    assert float(inputs.max()) <= 1
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 8, 8), dtype=np.uint8), y=np.zeros(2))
    with pytest.raises(DataError, match="expected uint8 images of 28 x 28"):
        digit_network.images(tmp_path / "b.npz")


def test_curvature_is_the_mean_over_images_of_the_gauss_newton_diagonal(target: NetworkTarget) -> None:
    theta, network = digit_network.weights(target), target.layout.network
    assert network is not None
    expected = torch.zeros(len(theta), dtype=torch.float64)

    def logits_of(inputs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return target.layout.logits(inputs, at[None])[0, 0]

    for image in target.inputs[:2].split(1):
        jacobian = torch.autograd.functional.jacobian(partial(logits_of, image), theta).double()
        probs = logits_of(image, theta).double().softmax(dim=0)
        fisher = torch.diag(probs) - torch.outer(probs, probs)
        expected += ((fisher @ jacobian) * jacobian).sum(dim=0) / 2
    torch.testing.assert_close(digit_network.curvature(target, 2), expected, rtol=1e-3, atol=1e-7)


def test_samples_of_the_logits_are_those_of_a_multivariate_normal() -> None:
    mean = torch.tensor([[1.0, 0.0, -1.0]]).double()
    root = torch.randn(3, 3, generator=seeded(2)).double()
    noise = torch.randn(100_000, 3, generator=seeded(3)).double()
    found = digit_bridge.sampled(mean, (root @ root.T)[None], noise)[0]
    draws = torch.distributions.MultivariateNormal(mean[0], root @ root.T).sample((100_000,))
    torch.testing.assert_close(found, draws.softmax(dim=1).mean(dim=0), atol=0.006, rtol=0)


def test_the_prior_makes_samples_less_confident_by_a_twentieth(target: NetworkTarget) -> None:
    curvature, few = digit_network.curvature(target, 20), target.inputs[:8]
    tau = digit_bridge.prior_precision(target, curvature, few, seeded(4), draws=400)
    gaussian = digit_network.gaussian(target, 1 / (120 * curvature + tau))
    noise = torch.randn(4000, 10, generator=seeded(5)).double()
    found = digit_bridge.sampled(*gaussian.logits.moments(few), noise).amax(dim=1).mean()
    alone = target.layout.logits(few, digit_network.weights(target)[None])[0].softmax(dim=1).amax(dim=1).mean()
    assert float(found / alone) == pytest.approx(0.95, abs=0.02)


def test_scores_are_means_and_shares_of_pairs() -> None:
    inside, outside = np.array([0.9, 0.8, 0.4]), np.array([0.5, 0.8])
    found = digit_bridge._scores({"map": {"test": inside, "other": outside}}, seeded(6))
    assert found["mmc_map_other"][0] == pytest.approx(0.65)
    pairs = [(a > b) + 0.5 * (a == b) for a in inside for b in outside]
    assert found["auroc_map_other"][0] == pytest.approx(np.mean(pairs))
    assert "auroc_map_test" not in found


def test_the_bars_of_times_have_the_length_of_their_parts() -> None:
    figure = time_shares.draw({"a": {"one": 1.0, "two": 2.0}, "b": {"one": 1.0, "three": 0.5}}, title="t")
    ends = sorted(bar.get_x() + bar.get_width() for bar in figure.axes[0].patches)
    assert ends == pytest.approx([1.0, 1.0, 1.5, 3.0])


def test_the_standard_error_of_an_area_is_near_that_of_delong() -> None:
    random = np.random.default_rng(3)
    inside, outside = random.normal(1, 1, 150), random.normal(0, 1, 120)
    value, error = digit_bridge.area(inside, outside, random)
    wins = inside[:, None] > outside
    assert value == pytest.approx(wins.mean())
    delong = wins.mean(axis=1).var(ddof=1) / 150 + wins.mean(axis=0).var(ddof=1) / 120
    assert error == pytest.approx(delong**0.5, rel=0.2)  # 200 replicates: 5 %
