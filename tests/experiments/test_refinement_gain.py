"""Gains of refinement: of a logistic regression against its evidence on a grid; features against the network itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.heads import by_noisy_sign, head_target

from bnncli import registry
from bnncli.experiments.refinement_gain import draw, last_features, measure, of_target
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.progress import SILENT

FIXTURES = Path(__file__).parents[2] / "fixtures"
INPUTS = {"net": FIXTURES / "lenet5-fmnist.pt", "train": FIXTURES / "train.npz"}
SETTINGS = {"flows": {"affine": 300}, "draws": 2048}


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
    found = of_target(target, "full", SETTINGS, generator=seeded())
    assert found["elbo"].standard_error is not None
    assert abs(found["elbo"].value - elbo) < 4 * found["elbo"].standard_error
    gap, gain = evidence - elbo, found["gain_affine"]
    assert gain.standard_error is not None
    assert 0.2 * gap < gain.value < gap + 4 * gain.standard_error


def test_a_strong_prior_leaves_nothing_to_gain() -> None:
    found = of_target(head_target(HeadLayout(3, 4), 20, prior=1e4), "full", SETTINGS, generator=seeded())
    assert found["gain_affine"].value == pytest.approx(0, abs=0.01)
    assert found["k"].value < 0.5


def test_features_are_what_the_last_layer_takes() -> None:
    features, labels = last_features(INPUTS, 30)
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
    found = measure(settings, INPUTS, generator=seeded(), progress=SILENT)
    wanted = {f"{quantity}_{size}_1000_diag" for quantity in ("elbo", "k", "gain_radial") for size in (20, 40)}
    assert wanted <= {*found.values}
    assert all(np.isfinite(one.value) for one in found.values.values())
    assert {*draw(found, settings)} == {"gain_radial", "k"}
