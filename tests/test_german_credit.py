"""The standard logistic posterior, its moments published by the Inference Gym, judges hmc, laplace and refine; skipped where it is absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from torch import Tensor

from bnncli.evaluation.convergence import convergence
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget

DATA = Path(__file__).parents[2] / "shared" / "data" / "german-credit.npz"

pytestmark = [pytest.mark.shared, pytest.mark.skipif(not DATA.is_file(), reason="the German credit data are not here")]


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    with np.load(DATA) as file:
        return {name: torch.from_numpy(file[name]) for name in file}


@pytest.fixture(scope="module")
def target(published: dict[str, Tensor]) -> LastLayerTarget:
    return LastLayerTarget(published["x"], published["y"], HeadLayout(1, 24), Prior(1.0))


@pytest.fixture(scope="module")
def gaussian(target: LastLayerTarget) -> Gaussian:
    return fit_gaussian(target, structure="full", center="mode", start=torch.zeros(25).double()).gaussian


def errors(mean: Tensor, published: dict[str, Tensor], effective: float) -> float:
    """The largest distance of a mean from the published one, in their combined standard errors."""
    combined = (published["sd"].square() / effective + published["mean_standard_error"].square()).sqrt()
    return float(((mean - published["mean"]) / combined).abs().max())


def test_hmc_meets_the_published_means_and_standard_deviations(
    target: LastLayerTarget, gaussian: Gaussian, published: dict[str, Tensor]
) -> None:
    common = {"mode": gaussian.mean, "covariance": gaussian.covariance, "generator": seeded()}
    draws = sample_hmc(target, **common, num_draws=500, target_accept=0.9).draws
    judged = convergence(draws.numpy())
    assert judged.ess_bulk is not None
    assert judged.ess_tail is not None
    flat = draws.flatten(0, 1).double()
    assert errors(flat.mean(dim=0), published, judged.ess_bulk) < 4
    relative = (flat.std(dim=0) / published["sd"] - 1).abs().max()
    assert float(relative) < 4 / (2 * judged.ess_tail) ** 0.5


def test_the_mode_is_no_mean_and_refinement_goes_most_of_the_way(
    target: LastLayerTarget, gaussian: Gaussian, published: dict[str, Tensor]
) -> None:
    assert errors(gaussian.mean, published, effective=5000) > 10
    flow = fit_flow(target, gaussian, flow="affine", generator=seeded()).posterior
    refined = flow.sample(4000, seeded(1)).double().mean(dim=0)

    def distance(mean: Tensor) -> float:
        """Root mean square, in posterior standard deviations."""
        return float(((mean - published["mean"]) / published["sd"]).square().mean().sqrt())

    assert distance(gaussian.mean) == pytest.approx(0.13, abs=0.01)
    assert distance(refined) < 0.25 * distance(gaussian.mean)
