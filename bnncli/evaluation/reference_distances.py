"""Metric rows of the distance in weight space between a posterior and a reference, such as draws of hmc."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation.draw_blocks import MIN_INDEPENDENT, ThinnedDraws, compare_draws, thin_draws
from bnncli.evaluation.mmd import (
    NUM_DRAWS,
    Distances,
    median_of,
    mmd2_of,
    published_bandwidth,
    squared_distances,
    thin,
)
from bnncli.evaluation.weight_space import (
    covariance_error,
    covariance_floor,
    mean_error,
    mean_floor,
    reference_scale,
    wasserstein_distances,
    wasserstein_floor,
)

Row = dict[str, Any]

MOST_DRAWS = 1000  # of one side, for marginals and covariances
_MOST_VALUES = 2**20  # of draws, for marginals and covariances, where P is large
_UNIT = "standard deviation of the reference's draws"
_MMD: Row = {"name": "mmd2", "kernel": "rbf", "higher_is_better": False}
_RULES = {
    "unbiased": "median distance of the reference's draws",
    "biased": "median distance of the reference's draws",
    "published": "median distance of the first 50 draws of the reference and the first 50 of the posterior, together: "
    "differs by posterior",
}
_DISTANCES: dict[str, list[Row]] = {
    "wasserstein": [{"order": 1, "over": "mean"}, {"order": 1, "over": "largest"}],
    "mean_error": [{"over": "root mean square"}],
    "covariance_error": [{"norm": "frobenius", "estimator": "root of the unbiased square"}],
}


@dataclass(frozen=True)
class WeightDraws:
    """What is known of a posterior in weight space.

    Args:
        draws: (C, T, P), or (S, P) of one chain.
        num_independent: about how many of the draws are independent, 0 where that is unknown; None: all of them.
        mean: (P,), the exact mean where there is one.
    """

    draws: Tensor
    num_independent: int | None = None
    mean: Tensor | None = None

    @property
    def chains(self) -> Tensor:
        """(C, T, P)."""
        return self.draws if self.draws.ndim == 3 else self.draws.unsqueeze(0)

    @property
    def num_draws(self) -> int:
        """C T."""
        return self.chains.shape[0] * self.chains.shape[1]

    def independent(self, most: int) -> int:
        """About how many of `most` draws, spread evenly, are independent."""
        count = min(most, self.num_draws)
        return count if self.num_independent is None else min(count, self.num_independent)

    def center(self) -> Tensor:
        """The mean (P,) float64: exact where known, else of all draws."""
        return self.draws.double().flatten(0, -2).mean(dim=0) if self.mean is None else self.mean.double()


def num_draws_for(num_params: int) -> int:
    """How many draws of a posterior the distances are measured with: 1,000, fewer (down to 600) for many parameters."""
    return max(NUM_DRAWS, min(MOST_DRAWS, _MOST_VALUES // num_params))


def weight_space_rows(
    ours: WeightDraws | None,
    theirs: WeightDraws | None,
    *,
    reference: str,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> list[Row]:
    """Rows of mmd2 (unbiased with its p-value, biased, published), wasserstein, mean_error and covariance_error.

    Args:
        ours: None where the posterior has no draws of theta.
        theirs: of the reference; None where there is none. The same draws again are undefined: a posterior has no
            distance to itself.
        reference: name of the posterior that theirs are of.
        generator: of the permutations.
        device: where thinned draws are compared.
    """
    reason = _why_undefined(ours, theirs, reference)
    if ours is None or theirs is None or reason is not None:
        return _undefined_rows(reason or "undefined", reference)
    pair = _Pair(ours, theirs, torch.device(device))
    return [*_mmd_rows(pair, reference, generator=generator), *_distance_rows(pair, reference)]


class _Pair(NamedTuple):
    """The two sides that are compared, and where."""

    ours: WeightDraws
    theirs: WeightDraws
    device: torch.device

    def thinned(self, *counts: int) -> tuple[Tensor, Tensor]:
        """At most so many draws (n, P) and (m, P) of each side; one count for both, or one for each."""
        sides = (self.ours, self.theirs)
        x, y = (thin(side.chains, count).to(self.device) for side, count in zip(sides, (counts * 2)[:2], strict=True))
        return x, y

    def independent(self, most: int) -> list[int]:
        """About how many of at most so many draws of each side are independent."""
        return [side.independent(most) for side in (self.ours, self.theirs)]


def _mmd_rows(pair: _Pair, reference: str, *, generator: torch.Generator) -> list[Row]:
    x, y = (thin_draws(side.chains, side.num_independent).to(pair.device) for side in (pair.ours, pair.theirs))
    try:
        distances = squared_distances(x.draws, y.draws)
        bandwidth = median_of(distances.yy)
    except DataError as error:
        return [row for row in _undefined_rows(error.message, reference) if row["name"] == "mmd2"]
    facts: dict[str, Row] = {
        "unbiased": _unbiased(x, y, distances, bandwidth, generator=generator),
        "biased": {"value": mmd2_of(distances, bandwidth).biased},
        "published": _published(pair, distances),
    }
    shared = {**_MMD, "reference": reference, "n": [len(x.draws), len(y.draws)]}
    return [
        {**shared, "estimator": name, "bandwidth_rule": _RULES[name], "bandwidth": bandwidth, **found}
        for name, found in facts.items()
    ]


def _published(pair: _Pair, distances: Distances) -> Row:
    """The biased estimate with a bandwidth of its own, which copies of a point beside few draws of the reference leave at 0."""
    try:
        bandwidth = published_bandwidth(*(side.chains.flatten(0, 1) for side in pair[:2]))
    except DataError:
        reason = "half of the pairs of the draws that tell the bandwidth coincide: their median distance is 0"
        return {"value": None, "n": None, "bandwidth": None, "undefined": reason}
    return {"value": mmd2_of(distances, bandwidth).biased, "bandwidth": bandwidth}


def _unbiased(
    x: ThinnedDraws, y: ThinnedDraws, distances: Distances, bandwidth: float, *, generator: torch.Generator
) -> Row:
    """Estimate, standard error and test; of too few independent draws there is the estimate of all, and no more."""
    found = compare_draws(x, y, distances, bandwidth, generator=generator)
    row: Row = {"value": found.value, "standard_error": found.standard_error, "p_value": found.p_value}
    if found.p_value is None:
        return row | {"p_value_undefined": found.untested}
    return row | {
        "p_value_draws": [len(x.draws), len(y.draws)],
        "permutations": found.num_permutations,
        "blocks": found.num_blocks,
    }


def _distance_rows(pair: _Pair, reference: str) -> list[Row]:
    """Rows of wasserstein, mean_error and covariance_error, each with its noise."""
    most = num_draws_for(pair.theirs.chains.shape[2])
    x, y = pair.thinned(most)
    independent = pair.independent(most)
    try:
        scale = reference_scale(y)
        distances = wasserstein_distances(x, y, scale)
    except DataError as error:
        return [row for row in _undefined_rows(error.message, reference) if row["name"] != "mmd2"]
    floor = wasserstein_floor(*independent) if min(independent) > 0 else None
    found: dict[str, list[Row]] = {
        "wasserstein": [
            {"value": float(distances.mean()), "noise_floor": floor},
            {"value": float(distances.max()), "noise_floor": None},
        ],
        "mean_error": [_mean_error(pair, scale)],
        "covariance_error": [_covariance_error(pair, scale, most=most)],
    }
    shared = {"n": [len(x), len(y)], "reference": reference, "unit": _UNIT, "higher_is_better": False}
    return [
        {**shared, "name": name, **choices, **row}
        for name, rows in found.items()
        for choices, row in zip(_DISTANCES[name], rows, strict=True)
    ]


def _mean_error(pair: _Pair, scale: Tensor) -> Row:
    ours, theirs = pair.ours, pair.theirs
    counts: list[float] = [side.independent(side.num_draws) for side in (ours, theirs)]
    if ours.mean is not None:
        counts[0] = math.inf
    return {
        "value": mean_error(ours.center(), theirs.center(), scale),
        "mean": "draws" if ours.mean is None else "exact",
        "n": [ours.num_draws, theirs.num_draws],
        "noise_floor": mean_floor(*counts) if min(counts) > 0 else None,
    }


def _covariance_error(pair: _Pair, scale: Tensor, *, most: int) -> Row:
    """The error between draws thinned to about as many as are independent."""
    counts = pair.independent(most)
    if min(counts) < MIN_INDEPENDENT:
        return {"value": None, "undefined": _too_few(counts)}
    try:
        value = covariance_error(*pair.thinned(*counts), scale)
    except DataError as error:
        return {"value": None, "undefined": error.message}
    return {"value": value, "n": counts, "noise_floor": covariance_floor(*counts)}


def _too_few(counts: list[int]) -> str:
    return f"only about {min(counts)} of the draws are independent; {MIN_INDEPENDENT} are needed"


def _undefined_rows(reason: str, reference: str) -> list[Row]:
    """Every row without a value."""
    rows = [{**_MMD, "estimator": name, "bandwidth_rule": rule, "bandwidth": None} for name, rule in _RULES.items()]
    for name, variants in _DISTANCES.items():
        rows += [{"name": name, "unit": _UNIT, "higher_is_better": False, **choices} for choices in variants]
    return [{**row, "value": None, "n": None, "reference": reference, "undefined": reason} for row in rows]


def _why_undefined(ours: WeightDraws | None, theirs: WeightDraws | None, reference: str) -> str | None:
    """The reason why there is no distance, or None."""
    if theirs is None:
        return f"no draws of {reference}"
    if ours is None:
        return "no draws of theta"
    x, y = ours.chains, theirs.chains
    if x.shape[2] != y.shape[2]:
        return f"theta has {x.shape[2]} parameters, the draws of {reference} have {y.shape[2]}"
    if min(ours.num_draws, theirs.num_draws) < 2:
        return "fewer than two draws"
    if ours.draws is theirs.draws or (x.shape == y.shape and torch.equal(x.cpu(), y.cpu())):
        return f"the draws are those of the reference, {reference}, itself"
    return None
