"""The Laplace bridge on a network of digits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy import stats

from bnncli.errors import DataError
from bnncli.papers import bridge_digits
from bnncli.papers.bridge_digits import (
    check_condition,
    draw_digit_variance,
    measure_digit_variance,
    predicted_variance,
    summarize_variance,
)
from bnncli.papers.bridge_toys import weights
from bnncli.papers.figures import draw_times
from bnncli.progress import SILENT
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
    return bridge_digits.train_network(*bridge_digits.read_images(path), classes=10, epochs=3, generator=seeded(1))


def test_images_of_the_first_classes_are_taken_in_their_order(tmp_path: Path) -> None:
    path = written(tmp_path / "a.npz", 30)
    inputs, labels = bridge_digits.read_images(path, classes=3, count=7)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert inputs.shape == (7, 1, 28, 28)
    assert float(inputs.max()) <= 1
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 8, 8), dtype=np.uint8), y=np.zeros(2))
    with pytest.raises(DataError, match="expected uint8 images of 28 x 28"):
        bridge_digits.read_images(tmp_path / "b.npz")


def test_curvature_is_the_mean_over_images_of_the_gauss_newton_diagonal(target: NetworkTarget) -> None:
    theta, network = weights(target), target.layout.network
    assert network is not None
    expected = torch.zeros(len(theta), dtype=torch.float64)

    def logits_of(inputs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return target.layout.logits(inputs, at[None])[0, 0]

    for image in target.inputs[:2].split(1):
        jacobian = torch.autograd.functional.jacobian(partial(logits_of, image), theta).double()
        probs = logits_of(image, theta).double().softmax(dim=0)
        fisher = torch.diag(probs) - torch.outer(probs, probs)
        expected += ((fisher @ jacobian) * jacobian).sum(dim=0) / 2
    torch.testing.assert_close(bridge_digits.compute_curvature(target, 2), expected, rtol=1e-3, atol=1e-7)


def test_samples_of_the_logits_are_those_of_a_multivariate_normal() -> None:
    mean = torch.tensor([[1.0, 0.0, -1.0]]).double()
    root = torch.randn(3, 3, generator=seeded(2)).double()
    noise = torch.randn(100_000, 3, generator=seeded(3)).double()
    found = bridge_digits.sample_probs(mean, (root @ root.T)[None], noise)[0]
    draws = torch.distributions.MultivariateNormal(mean[0], root @ root.T).sample((100_000,))
    torch.testing.assert_close(found, draws.softmax(dim=1).mean(dim=0), atol=0.006, rtol=0)


def test_the_prior_makes_samples_less_confident_by_a_twentieth(target: NetworkTarget) -> None:
    curvature, few = bridge_digits.compute_curvature(target, 20), target.inputs[:8]
    tau = bridge_digits.prior_precision(target, curvature, few, seeded(4), draws=400)
    gaussian = bridge_digits.build_gaussian(target, 1 / (120 * curvature + tau))
    noise = torch.randn(4000, 10, generator=seeded(5)).double()
    found = bridge_digits.sample_probs(*gaussian.logits.moments(few), noise).amax(dim=1).mean()
    alone = target.layout.logits(few, weights(target)[None])[0].softmax(dim=1).amax(dim=1).mean()
    assert float(found / alone) == pytest.approx(0.95, abs=0.02)


def test_scores_are_means_and_shares_of_pairs() -> None:
    inside, outside = np.array([0.9, 0.8, 0.4]), np.array([0.5, 0.8])
    found = bridge_digits.score_methods({"map": {"test": inside, "other": outside}}, seeded(6))
    assert found["mmc_map_other"][0] == pytest.approx(0.65)
    pairs = [(a > b) + 0.5 * (a == b) for a in inside for b in outside]
    assert found["auroc_map_other"][0] == pytest.approx(np.mean(pairs))
    assert "auroc_map_test" not in found


def test_the_bars_of_times_have_the_length_of_their_parts() -> None:
    figure = draw_times({"a": {"one": 1.0, "two": 2.0}, "b": {"one": 1.0, "three": 0.5}}, title="t")
    ends = sorted(bar.get_x() + bar.get_width() for bar in figure.axes[0].patches)
    assert ends == pytest.approx([1.0, 1.0, 1.5, 3.0])


def test_the_standard_error_of_an_area_is_near_that_of_delong() -> None:
    random = np.random.default_rng(3)
    inside, outside = random.normal(1, 1, 150), random.normal(0, 1, 120)
    value, error = bridge_digits.compute_auroc(inside, outside, random)
    wins = inside[:, None] > outside
    assert value == pytest.approx(wins.mean())
    delong = wins.mean(axis=1).var(ddof=1) / 150 + wins.mean(axis=0).var(ddof=1) / 120
    assert error == pytest.approx(delong**0.5, rel=0.2)  # 200 replicates: 5 %


def test_the_variance_is_that_of_the_most_probable_class() -> None:
    alpha = torch.tensor([[2.0, 5.0, 1.0], [9.0, 1.0, 3.0]]).double()
    expected = [stats.dirichlet(alpha[0].numpy()).var()[1], stats.dirichlet(alpha[1].numpy()).var()[0]]
    np.testing.assert_allclose(predicted_variance(alpha.log()), expected)


def test_means_are_of_the_digits_seen_and_unseen() -> None:
    digits = np.repeat(np.arange(10), 2)
    found = summarize_variance(np.arange(20) / 10, digits)
    assert found["variance_4"].value == pytest.approx(0.85)
    assert found["variance_4"].standard_error == pytest.approx(0.05)
    assert found["variance_seen"].value == pytest.approx(0.25)
    assert (found["highest_seen"].value, found["lowest_unseen"].value) == (pytest.approx(0.45), pytest.approx(0.65))


@pytest.mark.nightly
def test_a_network_of_a_few_images_gives_every_digit_a_variance(tmp_path: Path) -> None:
    labels = np.arange(60) % 10
    pixels = np.random.default_rng(0).integers(0, 60, (60, 28, 28), dtype=np.uint8)
    for row, label in enumerate(labels):
        pixels[row, 2 * label : 2 * label + 5] += 180
    np.savez(tmp_path / "a.npz", x=pixels, y=labels)
    inputs = {"train": tmp_path / "a.npz", "test": tmp_path / "a.npz"}
    settings = {"train": 18, "epochs": 40, "curvature": 6, "images": 60}
    measured = measure_digit_variance(settings, inputs, generator=seeded(0), progress=SILENT)
    assert all(0 <= measured.values[f"variance_{digit}"].value < 0.25 for digit in range(10))
    assert measured.values["variance_seen"].value < measured.values["variance_unseen"].value
    assert all(measured.values[f"auroc{one}"].standard_error for one in ("_map", "", "_published"))
    figures = draw_digit_variance(measured, settings)
    assert len(figures["densities"].axes) == 2 * 6


def test_the_condition_says_where_the_variance_falls_with_the_concentration() -> None:
    log_alpha = torch.randn(400, 5, generator=seeded(0), dtype=torch.float64)
    falls = []
    for alpha in log_alpha.exp().numpy():
        top = alpha.argmax()
        more = alpha.copy()
        more[top] *= 1 + 1e-6
        falls.append(stats.dirichlet(more).var()[top] < stats.dirichlet(alpha).var()[top])
    assert 20 < sum(falls) < 380
    np.testing.assert_array_equal(check_condition(log_alpha).numpy(), falls)


def test_of_huge_concentrations_more_than_a_third_is_enough() -> None:
    shares = torch.tensor([[0.33, 0.25, 0.21, 0.21], [0.34, 0.24, 0.21, 0.21], [0.25, 0.25, 0.25, 0.25]]).double()
    assert check_condition(shares.log() + 500).tolist() == [False, True, False]
