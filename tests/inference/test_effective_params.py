"""The effective number of parameters against traces of dense matrices."""

from __future__ import annotations

import pytest
import torch
from problems.tiny_networks import tiny_target

from bnncli.curvature import ggn
from bnncli.inference.laplace import fit_gaussian, num_effective
from bnncli.parameters.prior import Prior
from bnncli.targets.curvature_choice import CurvatureChoice

PRIORS = {"one": Prior(2.0), "bias": Prior(2.0, 0.5)}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("structure", ["full", "block", "diag", "kron", "ekfac", "low-rank"])
def test_it_is_the_trace_that_the_prior_leaves(structure: str, prior: str) -> None:
    target = tiny_target(examples=120, prior=PRIORS[prior], choice=CurvatureChoice(rank=10))
    fit = fit_gaussian(target, start=target.layout.trained(), structure=structure, center="checkpoint")
    root = fit.gaussian.covariance.unwhiten(torch.eye(target.layout.num_params, dtype=torch.float64))
    shares = PRIORS[prior].diagonal(target.layout) * root.square().sum(dim=0)
    found = num_effective(target.with_prior(Prior(7.0)), fit)
    assert found == pytest.approx(target.layout.num_params - float(shares.sum()), abs=1e-4)
    assert 0 < found < target.layout.num_params


def test_it_is_that_of_the_curvature_under_a_precision_for_each_layer() -> None:
    target = tiny_target(examples=120)
    target = target.with_prior(Prior.of_parts((1.0, 2.0, 30.0, 4.0), target.layout))
    theta = target.layout.trained()
    dense = ggn(target, theta, "full")["hessian.full"]
    wanted = torch.linalg.solve(dense + target.prior.diagonal(target.layout).diag(), dense).trace()
    for structure in ("full", "block"):
        fit = fit_gaussian(target, start=theta, structure=structure, center="checkpoint")
        found = num_effective(target, fit)
        assert (found == pytest.approx(float(wanted), abs=1e-6)) == (structure == "full")


def test_of_a_subnetwork_it_counts_those_that_vary() -> None:
    target = tiny_target(examples=120, choice=CurvatureChoice(size=6))
    fit = fit_gaussian(target, start=target.layout.trained(), structure="subnetwork", center="checkpoint")
    places = fit.gaussian.covariance.varying
    dense = ggn(target, target.layout.trained(), "full")["hessian.full"][places][:, places]
    wanted = torch.linalg.solve(dense + target.prior.diagonal(target.layout)[places].diag(), dense).trace()
    assert num_effective(target, fit) == pytest.approx(float(wanted), abs=1e-8)


def test_a_prior_times_a_factor_multiplies_each_precision() -> None:
    layout = tiny_target().layout
    for prior in (*PRIORS.values(), Prior.of_parts((1.0, 2.0, 30.0, 4.0), layout)):
        torch.testing.assert_close(prior.times(3.0).diagonal(layout), 3 * prior.diagonal(layout))
