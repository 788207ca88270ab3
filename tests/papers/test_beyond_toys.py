"""Experiments of bnncli's own recipes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.heads import by_noisy_sign, head_target
from sklearn.metrics import accuracy_score, log_loss

from bnncli import registry
from bnncli.errors import DataError
from bnncli.inference.laplace import fit_gaussian
from bnncli.papers.beyond_toys import (
    compute_errors,
    compute_last_features,
    draw_published_ece,
    draw_refinement_gain,
    measure_published_ece,
    measure_reference_scores,
    measure_refinement_gain,
    measure_target,
    simulate_calibrated,
)
from bnncli.papers.recipe import Measurements
from bnncli.parameters.layouts import HeadLayout
from bnncli.progress import SILENT

ECE = {"percentages": [0, 80, 95], "examples": 4000, "repeats": 10}


@pytest.fixture(scope="module")
def measured_published_ece() -> Measurements:
    return measure_published_ece(ECE, {}, generator=torch.Generator().manual_seed(2), progress=SILENT)


def by_loop(confidence: np.ndarray, is_right: np.ndarray, num_bins: int, *, leaves_out: bool) -> float:
    """The mean gap of bins, as the script's loop over `range(num_bins)` of digits from 1 on has it, or over all."""
    digits = np.digitize(confidence, np.linspace(0, 1, num_bins + 1))
    gaps, sizes = [], []
    for digit in range(num_bins if leaves_out else num_bins + 2):
        inside = digits == digit
        if inside.any():
            gaps.append(abs(confidence[inside].mean() - is_right[inside].mean()))
            sizes.append(inside.sum())
    return float(np.average(gaps, weights=sizes))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_errors_are_those_of_the_loops(share: float) -> None:
    probs, labels = simulate_calibrated(3000, share, np.random.default_rng(1))
    found, confidence = compute_errors((probs, labels)), probs[:, 0]
    assert found["published"] == pytest.approx(by_loop(confidence, labels == 0, 100, leaves_out=True), abs=1e-9)
    assert found["real"] == pytest.approx(by_loop(confidence, labels == 0, 100, leaves_out=False), abs=1e-9)
    assert found["usual"] == pytest.approx(by_loop(confidence, labels == 0, 15, leaves_out=False), abs=1e-9)


def test_the_model_is_calibrated_and_as_sure_as_it_should_be() -> None:
    probs, labels = simulate_calibrated(200_000, 0.3, np.random.default_rng(0))
    confidence = probs.max(axis=1)
    assert (confidence >= 0.99).mean() == pytest.approx(0.3)
    for low, high in ((0.5, 0.6), (0.8, 0.9), (0.99, 1.0)):
        inside = (confidence >= low) & (confidence < high)
        gap = (labels[inside] == 0).mean() - confidence[inside].mean()
        assert abs(gap) < 4 * (0.25 / inside.sum()) ** 0.5


def test_the_published_error_grows_with_what_it_leaves_out(measured_published_ece: Measurements) -> None:
    values = {name: one.value for name, one in measured_published_ece.values.items()}
    assert values["published_0"] == pytest.approx(values["real_0"])
    # Of the 20 % that it counts, chance is sqrt(5) times as large.
    assert values["published_80"] / values["published_0"] == pytest.approx(5**0.5, rel=0.1)
    assert values["real_80"] < values["real_0"]


def test_the_figure_has_its_three_lines(measured_published_ece: Measurements) -> None:
    axes = draw_published_ece(measured_published_ece, ECE)["calibrated"].axes[0]
    assert len(axes.containers) == 3


COUNT = 500


def measured_reference_scores(folder: Path, probs: np.ndarray, labels: np.ndarray) -> Measurements:
    np.savez(folder / "hmc.npz", hmc=probs)
    np.savez(folder / "test.npz", y=labels)
    inputs = {"reference": folder / "hmc.npz", "test": folder / "test.npz"}
    return measure_reference_scores({"percents": [50, 100]}, inputs, generator=torch.Generator(), progress=SILENT)


def test_scores_are_those_of_sklearn(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    true = random.dirichlet(np.ones(4), size=COUNT)
    labels = np.array([random.choice(4, p=row) for row in true])
    flat = np.sqrt(true) / np.sqrt(true).sum(axis=1, keepdims=True)  # a temperature of 2, which one of 0.5 undoes
    values = measured_reference_scores(tmp_path, flat, labels).values
    assert values["reference_accuracy"].value == pytest.approx(accuracy_score(labels, flat.argmax(axis=1)))
    assert values["reference_confidence"].value == pytest.approx(flat.max(axis=1).mean())
    assert values["reference_nll"].value == pytest.approx(log_loss(labels, flat))
    assert values["gain_50"].value == pytest.approx(log_loss(labels, flat) - log_loss(labels, true))
    losses = -np.log(flat[np.arange(COUNT), labels]) + np.log(true[np.arange(COUNT), labels])
    assert values["gain_50"].standard_error == pytest.approx(losses.std(ddof=1) / COUNT**0.5)
    assert values["gain_100"].value == pytest.approx(0, abs=1e-12)


def test_other_numbers_of_rows_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 rows, but there are 2 labels"):
        measured_reference_scores(tmp_path, np.full((3, 2), 0.5), np.zeros(2, np.int64))


FIXTURES = Path(__file__).parents[2] / "fixtures"
INPUTS = {"net": FIXTURES / "lenet5-fmnist.pt", "train": FIXTURES / "train.npz"}
GAIN = {"flows": {"affine": 300}, "draws": 2048}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def test_elbo_is_that_of_a_grid_and_the_gain_closes_part_of_the_gap_to_the_evidence() -> None:
    target = head_target(HeadLayout(1, 1), 6, labels=by_noisy_sign, prior=0.02)
    gaussian = fit_gaussian(target, start=torch.zeros(2)).gaussian
    axis = torch.linspace(-60, 60, 1201, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    cell = float(axis[1] - axis[0]) ** 2
    log_joint = target.log_joint(grid)
    log_q = gaussian.log_density(grid)
    evidence = float(torch.logsumexp(log_joint, 0)) + np.log(cell)
    elbo = float((log_q.exp() * (log_joint - log_q)).sum()) * cell
    found = measure_target(target, "full", GAIN, generator=seeded())
    assert found["elbo"].standard_error is not None
    assert abs(found["elbo"].value - elbo) < 4 * found["elbo"].standard_error
    gap, gain = evidence - elbo, found["gain_affine"]
    assert gain.standard_error is not None
    assert 0.2 * gap < gain.value < gap + 4 * gain.standard_error


def test_a_strong_prior_leaves_nothing_to_gain() -> None:
    found = measure_target(head_target(HeadLayout(3, 4), 20, prior=1e4), "full", GAIN, generator=seeded())
    assert found["gain_affine"].value == pytest.approx(0, abs=0.01)
    assert found["k"].value < 0.5


def test_features_are_what_the_last_layer_takes() -> None:
    features, labels = compute_last_features(INPUTS, 30)
    network = registry.load_module("networks", "lenet5").build()
    state = torch.load(INPUTS["net"])
    network.load_state_dict(state)
    with np.load(INPUTS["train"]) as arrays:
        expected = network(torch.from_numpy(arrays["x"][:30, None] / np.float32(255)))
        assert labels.tolist() == arrays["y"][:30].tolist()
    assert torch.allclose(features @ state["ll.weight"].T + state["ll.bias"], expected, atol=1e-4)


def test_every_target_has_its_numbers_and_those_that_are_none_are_left_out() -> None:
    settings = {
        "sizes": [20, 40],
        "precisions": [1e-4, 1000],
        "structures": ["diag"],
        "flows": {"radial": 1},
        "draws": 64,
    }
    found = measure_refinement_gain(settings, INPUTS, generator=seeded(), progress=SILENT)
    wanted = {f"{quantity}_{size}_1000_diag" for quantity in ("elbo", "k", "gain_radial") for size in (20, 40)}
    assert wanted <= {*found.values}
    assert all(np.isfinite(one.value) for one in found.values.values())
    assert {*draw_refinement_gain(found, settings)} == {"gain_radial", "k"}
