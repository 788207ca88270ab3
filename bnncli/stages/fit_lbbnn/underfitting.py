"""Signs that a latent binary fit is underfitted: too few steps, a bound that still rises, labels explained by nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bnncli.latent.fit import History, Plan, Scaling
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.options.fit_lbbnn import FitLbbnnOptions

if TYPE_CHECKING:
    from torch import Tensor

STEEP = 0.1  # of the bound, by which it rises over the last tenth of the epochs where it is far from its end
MIN_EPOCHS = 10  # below which a tenth of them is none
LARGE = (
    30.0  # mean or standard deviation of an input, from which learning rates and priors that are made for 1 fit badly
)


def reach(plan: Plan, num_examples: int) -> float:
    """How far an inclusion logit can move at most: Adam's steps are about as long as its learning rate."""
    num_batches = math.ceil(num_examples / plan.batch_size)
    early = min(plan.early_epochs, plan.epochs)
    total = 0.0
    for epoch in range(plan.epochs):
        is_early = epoch < early and plan.inclusion_rate is not None
        rate = plan.inclusion_rate if is_early and plan.inclusion_rate is not None else plan.learning_rate
        course = 0.5 * (1 + math.cos(math.pi * (epoch + 0.5) / plan.epochs)) if plan.schedule == "cosine" else 1.0
        total += rate * course * num_batches
    return total


def short_plan(options: FitLbbnnOptions, plan: Plan, num_examples: int) -> str | None:
    """What to say of a plan whose steps cannot take an inclusion logit from its start to the prior; None of a longer one."""
    high = options.start_logits[1]
    prior = math.log(options.prior_inclusion / (1 - options.prior_inclusion))
    need, farthest = high - prior, reach(plan, num_examples)
    if farthest >= need * (1 - 1e-9):  # sums round
        return None
    steps = plan.epochs * math.ceil(num_examples / plan.batch_size)
    return (
        f"{steps} steps move an inclusion logit by at most {farthest:.2g}, but getting from {high:g} to the "
        f"prior's {prior:.2g} takes {need:.2g}, so density and inclusions will reflect the start, not the data; "
        f"use at least --epochs {math.ceil(plan.epochs * need / farthest - 1e-9)}, or a larger --learning-rate "
        "or --inclusion-rate"
    )


def guessing(labels: Tensor, num_classes: int) -> float:
    """Log likelihood of labels (N,) under the classes' own shares, nats; of labels (N, C) under the share of each."""
    if labels.ndim == 2:
        there = labels.cpu().double().sum(dim=0)
        rest = len(labels) - there
        return float(
            (torch.special.xlogy(there, there / len(labels)) + torch.special.xlogy(rest, rest / len(labels))).sum()
        )
    counts = torch.bincount(labels.cpu(), minlength=num_classes).double()
    return float(torch.special.xlogy(counts, counts / counts.sum()).sum())


def poor_fit(metrics: dict[str, Any], features: Tensor, *, is_standardized: bool) -> str | None:
    """What to say where the drawn networks explain the training labels worse than the classes' shares; None elsewhere."""
    value, guess, count = (
        metrics["expected_log_likelihood"]["value"],
        metrics["log_likelihood_of_shares"],
        len(features),
    )
    if value >= guess:
        return None
    found = (
        f"the sampled networks explain the training labels worse ({value / count:.3g} nats per example) than the "
        f"class frequencies ({guess / count:.3g})"
    )
    scaling = Scaling.of(features, features.device)
    largest = float(torch.maximum(scaling.shift.abs(), scaling.scale).max())
    if not is_standardized and largest > LARGE:
        return f"{found}: inputs have means or standard deviations of up to {largest:.2g}; use --standardize"
    return f"{found}: use more --epochs or another --learning-rate"


def rise(history: History, best: int) -> float | None:
    """Share of the bound by which it rose over the last tenth of the epochs; None of fewer than ten epochs."""
    bound = history.bound()[:, best]
    tenth = len(bound) // 10
    if len(bound) < MIN_EPOCHS or float(bound[-1]) == 0:
        return None
    return float((bound[-tenth:].mean() - bound[-2 * tenth : -tenth].mean()) / bound[-1].abs())


def still_rising(share: float | None, schedule: str) -> str | None:
    """What to say of a bound that rises steeply at the end of a fit at a constant learning rate; None of another."""
    if share is None or share < STEEP or schedule != "constant":
        return None
    return f"the bound still rose by {percent(share, '.0f')} over the last tenth of the epochs: use more --epochs"
