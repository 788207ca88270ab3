"""One prior precision a layer, and the effective number of parameters."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from problems.tiny_networks import losses_of, tiny_target
from scipy.optimize import minimize
from torch import Tensor

from bnncli.inference.laplace import fit_gaussian, num_effective
from bnncli.inference.prior_variants import choose_layer_precisions, safe_update
from bnncli.parameters.prior import Prior
from bnncli.structures import ggn
from bnncli.targets.curvature_choice import CurvatureChoice

LAYERS = {"0": slice(0, 25), "2": slice(25, 43)}


@cache
def curvature_of(structure: str, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """H as a dense matrix, and the loss of all examples, at the network's parameters times a scale."""
    target = tiny_target(examples=120, prior=Prior(1.0))
    theta = scale * target.layout.trained()
    hessian = ggn(target, theta, structure)[f"hessian.{structure}"]
    return hessian.diag() if structure == "diag" else hessian, losses_of(target, theta).sum()


def brute_evidence(target: Any, structure: str, logs: Tensor, scale: float = 1.0) -> float:
    """Of one log precision for each layer, in full."""
    theta = scale * target.layout.trained()
    dense, loss = curvature_of(structure, scale)
    precisions = torch.cat([logs[i].exp().repeat(place.stop - place.start) for i, place in enumerate(LAYERS.values())])
    log_prior = torch.distributions.Normal(0.0, precisions.rsqrt()).log_prob(theta).sum()
    joint = log_prior - loss
    return float(joint + 0.5 * len(theta) * math.log(2 * math.pi) - 0.5 * torch.logdet(dense + precisions.diag()))


@pytest.mark.parametrize("has_variances", [True, False])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_precisions_are_those_of_the_largest_evidence(
    structure: str, has_variances: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(examples=120, prior=Prior(1.0))
    start = fit_gaussian(target, start=target.layout.trained(), structure=structure, center="checkpoint")
    if not has_variances:
        monkeypatch.delattr(type(start.gaussian.covariance), "marginal_variances", raising=False)
    chosen = choose_layer_precisions(target, start, structure)
    found = torch.tensor([math.log(one) for one in chosen.precisions.values()], dtype=torch.float64)
    best = minimize(
        lambda x: -brute_evidence(target, structure, torch.as_tensor(x)), [0.0, 0.0], method="Nelder-Mead",
        options={"xatol": 1e-5, "fatol": 1e-9},
    )  # fmt: skip
    assert list(chosen.precisions) == list(LAYERS)
    torch.testing.assert_close(found, torch.as_tensor(best.x), rtol=0, atol=5e-3)
    gain = brute_evidence(target, structure, found) - brute_evidence(
        target, structure, torch.zeros(2, dtype=torch.float64)
    )
    assert chosen.gain == pytest.approx(gain, abs=1e-8)
    diagonal = chosen.fit.gaussian.require_prior().diagonal(target.layout)
    for index, place in enumerate(LAYERS.values()):
        torch.testing.assert_close(diagonal[place].log(), found[index].expand(place.stop - place.start))


@pytest.mark.parametrize("scale", [0.03, 0.3])
def test_so_are_those_of_layers_that_the_data_say_little_of(scale: float) -> None:
    """Where MacKay's update alone goes back and forth."""
    target = tiny_target(examples=120, prior=Prior(1.0))
    start = fit_gaussian(target, start=scale * target.layout.trained(), structure="full", center="checkpoint")
    found = torch.tensor(list(choose_layer_precisions(target, start, "full").precisions.values()), dtype=torch.float64)
    best = minimize(
        lambda x: -brute_evidence(target, "full", torch.as_tensor(x), scale), [0.0, 0.0], method="Nelder-Mead",
        options={"xatol": 1e-5, "fatol": 1e-9},
    )  # fmt: skip
    torch.testing.assert_close(found.log(), torch.as_tensor(best.x), rtol=0, atol=5e-3)


def test_the_evidence_never_falls() -> None:
    """From far away, where the quick update overshoots."""
    target = tiny_target(examples=120)
    for precision in (1e-3, 0.1, 10.0, 1e4):
        under = target.with_prior(Prior(precision))
        start = fit_gaussian(under, start=target.layout.trained(), structure="full", center="checkpoint")
        assert choose_layer_precisions(under, start, "full").gain >= 0


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_safe_update_raises_the_evidence_from_anywhere(scale: float) -> None:
    target = tiny_target(examples=120)
    theta = scale * target.layout.trained()
    hessian = ggn(target, theta, "full")["hessian.full"]
    sizes = torch.tensor([25.0, 18.0], dtype=torch.float64)

    def of_layers(values: Tensor) -> Tensor:
        return torch.stack([values[place].sum() for place in LAYERS.values()])

    def evidence(logs: Tensor) -> Tensor:
        precisions = logs.exp().repeat_interleave(sizes.long())
        fits = (precisions.log() - precisions * theta.square()).sum()
        return 0.5 * (fits - torch.logdet(hessian + precisions.diag()))

    for start in ([-7.0, -7.0], [2.3, 2.3], [9.0, 9.0], [-4.0, 6.0]):
        logs = torch.tensor(start, dtype=torch.float64)
        covariance = torch.linalg.inv(hessian + logs.exp().repeat_interleave(sizes.long()).diag())
        new = safe_update(sizes, of_layers(theta.square()), of_layers(covariance.diagonal()))
        assert evidence(new) > evidence(logs)


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
