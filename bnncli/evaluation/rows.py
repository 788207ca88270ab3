"""Metric rows for strict JSON: a value with the choices that define it, or None with the reason."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from bnncli.evaluation import detection, scores
from bnncli.evaluation.calibration import NUM_BINS, reliability
from bnncli.evaluation.examples import check_labels
from bnncli.evaluation.mmd import median_bandwidth, mmd2, thin

Row = dict[str, Any]

_CHOICES: dict[str, Row] = {
    "accuracy": {"higher_is_better": True},
    "nll": {"reduction": "mean", "higher_is_better": False},
    "brier": {"reduction": "mean", "classes": "sum", "higher_is_better": False},
    "ece": {"norm": "l1", "strategy": "equal-width", "higher_is_better": False},
    "mce": {"strategy": "equal-width", "higher_is_better": False},
    "auroc": {"score": "max_prob", "positive": "in", "higher_is_better": True},
    "fpr95": {
        "score": "max_prob",
        "positive": "in",
        "threshold": "5th percentile of in-distribution scores, linear",
        "higher_is_better": False,
    },
    "mmd2": {
        "kernel": "rbf",
        "bandwidth_rule": "median distance of the reference's draws",
        "higher_is_better": False,
    },
}


def in_distribution_rows(probs: NDArray, labels: NDArray | None, *, num_bins: int = NUM_BINS) -> list[Row]:
    """Rows of accuracy, nll, brier, ece and mce.

    Args:
        probs: (N, C), as check_probabilities accepts them.
        labels: (N,) integers in [0, C), or None for an unlabelled split.
        num_bins: equal-width bins of ece and mce.

    Raises:
        DataError: labels of another length or outside [0, C).
    """
    names = ("accuracy", "nll", "brier", "ece", "mce")
    choices: dict[str, Row] = {name: {"bins": num_bins} if name in ("ece", "mce") else {} for name in names}
    reason = "no labels" if labels is None else "empty split" if len(probs) == 0 else None
    if reason is not None or labels is None:
        return [_row(name, None, n=len(probs), undefined=reason, **choices[name]) for name in names]
    check_labels(labels, probs.shape)
    bins = reliability(probs, labels, num_bins=num_bins)
    values = {
        "accuracy": scores.accuracy(probs, labels),
        "nll": scores.nll(probs, labels),
        "brier": scores.brier(probs, labels),
        "ece": bins.ece,
        "mce": bins.mce,
    }
    return [_row(name, values[name], n=len(probs), **choices[name]) for name in names]


def detection_rows(probs_in: NDArray, probs_out: NDArray, ood_name: str) -> list[Row]:
    """Rows of auroc and fpr95 between the in-distribution split and the split called `ood_name`.

    Args:
        probs_in: (N, C).
        probs_out: (M, C).
        ood_name: the name of the other split.
    """
    n = [len(probs_in), len(probs_out)]
    reason = None
    if len(probs_in) == 0:
        reason = "empty in-distribution split"
    elif len(probs_out) == 0:
        reason = f"only one class present: split {ood_name} is empty"
    functions = {"auroc": detection.auroc, "fpr95": detection.fpr95}
    return [
        _row(name, None if reason else function(probs_in, probs_out), n=n, undefined=reason, ood=ood_name)
        for name, function in functions.items()
    ]


def mmd_rows(draws: Tensor | None, hmc_draws: Tensor | None, *, reference: str = "hmc") -> list[Row]:
    """Rows of the unbiased and the biased squared discrepancy to the hmc draws, each side thinned to 600.

    Args:
        draws: (C, T, P) or (S, P); None where the posterior has no draws of theta.
        hmc_draws: (C, T, P); None where there is no hmc posterior. The same draws again are undefined: a
            posterior has no distance to itself.
        reference: name of the posterior that hmc_draws belong to.
    """
    reason = _why_no_mmd(draws, hmc_draws, reference)
    if draws is None or hmc_draws is None or reason is not None:
        return [
            _row("mmd2", None, n=None, undefined=reason, estimator=name, bandwidth=None, reference=reference)
            for name in ("unbiased", "biased")
        ]
    theirs = thin(hmc_draws)
    sample = thin(_with_chain_axis(draws)).to(theirs.device)
    result = mmd2(sample, theirs, median_bandwidth(theirs))
    n = [len(sample), len(theirs)]
    values = {"unbiased": result.unbiased, "biased": result.biased}
    return [
        _row("mmd2", value, n=n, estimator=name, bandwidth=result.bandwidth, reference=reference)
        for name, value in values.items()
    ]


def _row(name: str, value: float | None, *, n: Any, undefined: str | None = None, **choices: Any) -> Row:
    """One row: name, value, n, the choices that define the metric, and the reason when there is no value."""
    row = {"name": name, "value": value, "n": n, **choices, **_CHOICES[name]}
    if value is None:
        row["undefined"] = undefined
    return row


def _with_chain_axis(draws: Tensor) -> Tensor:
    """Draws (C, T, P); draws (S, P) become one chain."""
    return draws if draws.ndim == 3 else draws.unsqueeze(0)


def _why_no_mmd(draws: Tensor | None, hmc_draws: Tensor | None, reference: str) -> str | None:
    """The reason why there is no discrepancy, or None."""
    if hmc_draws is None:
        return f"no draws of {reference}"
    if draws is None:
        return "no draws of theta"
    chains = _with_chain_axis(draws)
    if chains.shape[2] != hmc_draws.shape[2]:
        return f"theta has {chains.shape[2]} parameters, the draws of {reference} have {hmc_draws.shape[2]}"
    if min(chains.shape[0] * chains.shape[1], hmc_draws.shape[0] * hmc_draws.shape[1]) < 2:
        return "fewer than two draws"
    if draws is hmc_draws or (chains.shape == hmc_draws.shape and torch.equal(chains.cpu(), hmc_draws.cpu())):
        return f"the draws are those of the reference, {reference}, itself"
    return None
