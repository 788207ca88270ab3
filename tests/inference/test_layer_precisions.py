"""One prior precision a layer: the marginal likelihood against brute force, and its maximum against a general optimiser's."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from problems.tiny_networks import losses_of, tiny_target
from scipy.optimize import minimize
from torch import Tensor

from bnncli.curvature import ggn
from bnncli.inference import prior_variants
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.prior_variants import choose_layer_precisions, safe_update
from bnncli.parameters.prior import Prior

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


def test_the_evidence_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """From far away, where the quick update overshoots."""
    monkeypatch.setattr(prior_variants, "_MOST_UPDATES", 1)
    target = tiny_target(examples=120)
    for precision in (1e-3, 0.1, 10.0, 1e4):
        under = target.with_prior(Prior(precision))
        start = fit_gaussian(under, start=target.layout.trained(), structure="full", center="checkpoint")
        assert choose_layer_precisions(under, start, "full").gain >= 0


def test_safe_updates_alone_find_the_largest_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every quick one would lower it."""
    monkeypatch.setattr(prior_variants, "quick_update", lambda *_: torch.full((2,), 16.0, dtype=torch.float64))
    target = tiny_target(examples=120, prior=Prior(1.0))
    start = fit_gaussian(target, start=target.layout.trained(), structure="diag", center="checkpoint")
    found = choose_layer_precisions(target, start, "diag").precisions
    monkeypatch.undo()
    best = choose_layer_precisions(target, start, "diag").precisions
    assert [math.log(one) for one in found.values()] == pytest.approx(
        [math.log(one) for one in best.values()], abs=0.02
    )


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
