"""Metric rows for strict JSON: a value with the choices that define it, or None with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnncli.evaluation import detection
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import NUM_BINS, calibration_scores
from bnncli.evaluation.class_wise import class_wise_scores
from bnncli.evaluation.decomposition import decomposition_scores
from bnncli.evaluation.examples import Examples
from bnncli.evaluation.mmd import median_bandwidth, mmd2, thin
from bnncli.evaluation.ranking import ranking_scores
from bnncli.evaluation.scores import Score, Scores, label_scores, prediction_scores
from bnncli.evaluation.selective import selective_scores

Row = dict[str, Any]

TOP_K = 5
MOST_OPERATIONS = 4e8  # of the replicates of one dear group: below a second
FEWEST_REPLICATES = 100  # fewer tell little of a standard error

_CHOICES: dict[str, Row] = {
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


def split_scores(
    probs: NDArray,
    examples: Examples,
    mutual_info: NDArray | None = None,
    *,
    lengths: NDArray | None = None,
    ranking: Mapping[str, Any] | None = None,
    num_bins: int = NUM_BINS,
    top_k: int = TOP_K,
) -> list[Scores]:
    """Every score of one split's predictions.

    Args:
        probs: (N, C), what `examples` was made from; may be mapped from a file.
        mutual_info: (N,) nats, or None.
        lengths: (N,) classes that the uncertainty-aware ranking keeps, or None. ranking: its rule, threshold and cap.
        num_bins: bins of the calibration errors.
        top_k: k of the top-k accuracy.
    """
    found = [*label_scores(examples, top_k=top_k), *calibration_scores(examples, num_bins=num_bins)]
    found.append(class_wise_scores(probs, examples.labels, num_bins=num_bins))
    found += [selective_scores(examples), decomposition_scores(examples)]
    return found + prediction_scores(examples, mutual_info) + ranking_scores(probs, examples, lengths, ranking)


def score_rows(scores: Sequence[Scores], split: tuple[str, int], bootstrap: Bootstrap | None = None) -> list[Row]:
    """A row for each score of a split, given by name and number of examples; with its interval where there is a bootstrap."""
    size = split[1]
    values = [_estimate(group, size) for group in scores]
    replicates = _replicates(scores, values, split, bootstrap)
    rows = []
    for group, found, drawn in zip(scores, values, replicates, strict=True):
        for i, score in enumerate(group.members):
            reason = (group.undefined if group.statistic is None else "empty split") if found is None else None
            value = None if found is None or math.isnan(found[i]) else float(found[i])
            choices = {**score.choices, **score.facts, "higher_is_better": score.higher_is_better}
            row = {"name": score.name, "value": value, "n": size, **choices}
            if value is None:
                row["undefined"] = reason or score.when_nan
            elif bootstrap is not None:
                row |= _uncertainty(bootstrap, score, value, None if drawn is None else drawn[:, i])
            rows.append(row)
    return rows


def _estimate(group: Scores, size: int) -> NDArray | None:
    """The scores (m,) themselves, in float64; None where they are undefined."""
    return None if group.statistic is None or size == 0 else group.statistic(np.ones((1, size)))[0]


def _replicates(
    scores: Sequence[Scores], values: Sequence[NDArray | None], split: tuple[str, int], bootstrap: Bootstrap | None
) -> list[NDArray | None]:
    """The replicates (R, m) of each group; the weights are drawn once for all, and dear groups take the first of them."""
    parts: list[list[NDArray]] = [[] for _ in scores]
    if bootstrap is not None and split[1] > 1:
        wanted = [
            _affordable(group, split[1], bootstrap) if v is not None else 0
            for group, v in zip(scores, values, strict=True)
        ]
        done = 0
        for (weights,) in replace(bootstrap, num_replicates=max([1, *wanted])).weights(split):
            for group, part, count in zip(scores, parts, wanted, strict=True):
                if group.statistic is not None and done < count:
                    part.append(group.statistic(weights[: count - done]))
            done += len(weights)
    return [np.concatenate(part) if part else None for part in parts]


def _affordable(group: Scores, size: int, bootstrap: Bootstrap) -> int:
    """How many replicates the group gets: all, or as many as its cost allows, or none where those would say little."""
    most = int(MOST_OPERATIONS / (group.cost * size)) if group.cost > 1 else bootstrap.num_replicates
    return bootstrap.num_replicates if most >= bootstrap.num_replicates else most if most >= FEWEST_REPLICATES else 0


def _uncertainty(bootstrap: Bootstrap, score: Score, value: float, replicates: NDArray | None) -> Row:
    if replicates is None:
        return {"standard_error": None, "interval": None}
    return bootstrap.describe(value, replicates, method=score.method, bounds=score.bounds)


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
