"""Metric rows of weight-space distances between a posterior and a reference such as draws of hmc."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import DataError
from bnncli.evaluation.draw_blocks import MIN_INDEPENDENT, ThinnedDraws, compare_draws, thin_draws
from bnncli.evaluation.mmd import NUM_DRAWS, Distances, median_of, mmd2_of, published_bandwidth, squared_distances, thin
from bnncli.evaluation.weight_space import (
    covariance_error,
    covariance_floor,
    mean_error,
    mean_floor,
    reference_scale,
    wasserstein_distances,
    wasserstein_floor,
)
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]

MOST_DRAWS = 1000  # per side, for marginals and covariances
_MOST_VALUES = 2**20  # draws times P, for marginals and covariances
_UNIT = "standard deviation of the reference's draws"
_RULES = {
    "unbiased": "median distance of the reference's draws",
    "biased": "median distance of the reference's draws",
    "published": "median distance of the first 50 draws of the reference and the first 50 of the posterior, together: "
    "differs by posterior",
}


@dataclass(frozen=True)
class WeightDraws:
    """The draws of a posterior in weight space.

    Args:
        draws: (C, T, P), or (S, P) for a single chain.
        num_independent: effective number of independent draws, 0 if unknown; None: all are independent.
        mean: (P,), exact mean if known.
    """

    draws: Tensor
    num_independent: int | None = None
    mean: Tensor | None = None

    @property
    def chains(self) -> Tensor:
        """Draws as (C, T, P)."""
        return self.draws if self.draws.ndim == 3 else self.draws.unsqueeze(0)

    @property
    def num_draws(self) -> int:
        """Number of draws, C T."""
        return self.chains.shape[0] * self.chains.shape[1]

    def independent(self, most: int) -> int:
        """Return the effective number of independent draws among `most` evenly spaced ones."""
        count = min(most, self.num_draws)
        return count if self.num_independent is None else min(count, self.num_independent)

    def center(self) -> Tensor:
        """Return the mean (P,) float64: exact if known, else of all draws."""
        return self.draws.double().flatten(0, -2).mean(dim=0) if self.mean is None else self.mean.double()


def num_draws_for(num_params: int) -> int:
    """Return the number of draws to measure distances with: 1,000, decreasing to 600 for many parameters."""
    return max(NUM_DRAWS, min(MOST_DRAWS, _MOST_VALUES // num_params))


class DrawPair:
    """Draws of a posterior and of a reference, with cached statistics that several distances need.

    Args:
        reference: name of the reference posterior.
        generator: random generator of permutations.
        device: device for thinned draws.
    """

    def __init__(
        self,
        ours: WeightDraws,
        theirs: WeightDraws,
        *,
        reference: str,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ours, self.theirs, self.reference = ours, theirs, reference
        self.generator, self.device = generator, torch.device(device)

    @property
    def sides(self) -> tuple[WeightDraws, WeightDraws]:
        """Both sides, ours first."""
        return self.ours, self.theirs

    def thinned(self, *counts: int) -> tuple[Tensor, Tensor]:
        """Return thinned draws (n, P) and (m, P); `counts` is one limit for both sides or one for each."""
        pairs = zip(self.sides, (counts * 2)[:2], strict=True)
        x, y = (thin(side.chains, count).to(self.device) for side, count in pairs)
        return x, y

    def independent(self, most: int) -> list[int]:
        """Return the effective number of independent draws per side among at most `most`."""
        return [side.independent(most) for side in self.sides]

    @property
    def most_draws(self) -> int:
        """Draws per side for marginals and covariances."""
        return num_draws_for(self.theirs.chains.shape[2])

    @cached_property
    def marginals(self) -> tuple[Tensor, Tensor]:
        """Draws (n, P) and (m, P) for the comparison of marginals."""
        return self.thinned(self.most_draws)

    @cached_property
    def scale(self) -> Tensor:
        """(P,), the unit of every parameter. Raises DataError if a parameter of the reference is constant."""
        return reference_scale(self.marginals[1])


class Distance(NamedTuple):
    """A distance between draws, in one or several forms.

    Args:
        forms: per form, a row with its defining settings and no value.
        measure: returns the fields that each form's row gains, such as its value. Raises DataError if undefined.
    """

    forms: Sequence[Row]
    measure: Callable[[DrawPair], Sequence[Row]]


def reference_rows(
    ours: WeightDraws | None,
    theirs: WeightDraws | None,
    distances: Mapping[str, Distance],
    *,
    reference: str,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> list[Row]:
    """Return the rows of every distance by name, with the reason for undefined ones.

    Args:
        ours: None if the posterior has no draws of theta.
        theirs: draws of the reference, or None. Identical draws are undefined: a posterior has no distance to itself.
        reference, generator, device: as in DrawPair.
    """
    reason = _why_undefined(ours, theirs, reference)
    pair = None
    if ours is not None and theirs is not None and reason is None:
        pair = DrawPair(ours, theirs, reference=reference, generator=generator, device=device)
    return [
        row for name, distance in distances.items() for row in _distance_rows(name, distance, pair, reference, reason)
    ]


def undefined_rows(distances: Mapping[str, Distance], *, reference: str, reason: str) -> list[Row]:
    """Return the rows of every distance, undefined for this reason."""
    return [
        row for name, distance in distances.items() for row in _distance_rows(name, distance, None, reference, reason)
    ]


def _distance_rows(
    name: str, distance: Distance, pair: DrawPair | None, reference: str, reason: str | None
) -> list[Row]:
    if pair is not None:
        try:
            found = distance.measure(pair)
        except DataError as error:
            reason = error.message
        else:
            told = {"name": name, "reference": reference}
            return [{**form, **told, **row} for form, row in zip(distance.forms, found, strict=True)]
    known = [
        {key: value for key, value in form.items() if key not in ("name", "n", "reference")} for form in distance.forms
    ]
    nothing = {"value": None, "n": None, "reference": reference, "undefined": reason}
    return [{"name": name, **form, **nothing} for form in known]


def _mmd2(pair: DrawPair) -> list[Row]:
    x, y = (thin_draws(side.chains, side.num_independent).to(pair.device) for side in pair.sides)
    distances = squared_distances(x.draws, y.draws)
    bandwidth = median_of(distances.yy)
    shared: Row = {"n": [len(x.draws), len(y.draws)], "bandwidth": bandwidth}
    found = [
        _unbiased(x, y, distances, bandwidth, generator=pair.generator),
        {"value": mmd2_of(distances, bandwidth).biased},
        _published(pair, distances),
    ]
    return [shared | row for row in found]


def _published(pair: DrawPair, distances: Distances) -> Row:
    """The biased estimate with the published bandwidth, which is 0 if a posterior repeats a point."""
    try:
        bandwidth = published_bandwidth(*(side.chains.flatten(0, 1) for side in pair.sides))
    except DataError:
        reason = "half of the pairs of draws that set the bandwidth coincide, so their median distance is 0"
        return {"value": None, "n": None, "bandwidth": None, "undefined": reason}
    return {"value": mmd2_of(distances, bandwidth).biased, "bandwidth": bandwidth}


def _unbiased(
    x: ThinnedDraws, y: ThinnedDraws, distances: Distances, bandwidth: float, *, generator: torch.Generator
) -> Row:
    """Return estimate, standard error and test; with too few independent draws, only the estimate from all draws."""
    found = compare_draws(x, y, distances, bandwidth, generator=generator)
    row: Row = {"value": found.value, "standard_error": found.standard_error, "p_value": found.p_value}
    if found.p_value is None:
        return row | {"p_value_undefined": found.untested}
    return row | {
        "p_value_draws": [len(x.draws), len(y.draws)],
        "permutations": found.num_permutations,
        "blocks": found.num_blocks,
    }


def _wasserstein(pair: DrawPair) -> list[Row]:
    x, y = pair.marginals
    found = wasserstein_distances(x, y, pair.scale)
    independent = pair.independent(pair.most_draws)
    floor = wasserstein_floor(*independent) if min(independent) > 0 else None
    shared = {"n": [len(x), len(y)]}
    return [
        {**shared, "value": float(found.mean()), "noise_floor": floor},
        {**shared, "value": float(found.max()), "noise_floor": None},
    ]


def _mean_error(pair: DrawPair) -> list[Row]:
    ours, theirs = pair.sides
    counts: list[float] = [side.independent(side.num_draws) for side in (ours, theirs)]
    if ours.mean is not None:
        counts[0] = math.inf
    row = {
        "value": mean_error(ours.center(), theirs.center(), pair.scale),
        "mean": "draws" if ours.mean is None else "exact",
        "n": [ours.num_draws, theirs.num_draws],
        "noise_floor": mean_floor(*counts) if min(counts) > 0 else None,
    }
    return [row]


def _covariance_error(pair: DrawPair) -> list[Row]:
    """Return the error between draws thinned to the effective number of independent draws."""
    scale, counts = pair.scale, pair.independent(pair.most_draws)
    shared = {"n": [len(side) for side in pair.marginals]}
    if min(counts) < MIN_INDEPENDENT:
        return [{**shared, "value": None, "undefined": _too_few(counts)}]
    try:
        value = covariance_error(*pair.thinned(*counts), scale)
    except DataError as error:
        return [{**shared, "value": None, "undefined": error.message}]
    return [{"value": value, "n": counts, "noise_floor": covariance_floor(*counts)}]


def _too_few(counts: list[int]) -> str:
    return f"only about {min(counts)} of the draws are independent; expected at least {MIN_INDEPENDENT}"


def _why_undefined(ours: WeightDraws | None, theirs: WeightDraws | None, reference: str) -> str | None:
    """Return why the distance is undefined, or None."""
    if theirs is None:
        return f"no draws of {reference}"
    if ours is None:
        return "no draws of theta"
    x, y = ours.chains, theirs.chains
    if x.shape[2] != y.shape[2]:
        return f"theta has {x.shape[2]} parameters, but the draws of {reference} have {y.shape[2]}"
    if min(ours.num_draws, theirs.num_draws) < 2:
        return "fewer than two draws"
    if ours.draws is theirs.draws or (x.shape == y.shape and torch.equal(x.cpu(), y.cpu())):
        return f"the draws are identical to the reference {reference}"
    return None


# None fixes the position of a key whose value is known later: rows keep this order.
_SCALED: Row = {"n": None, "reference": None, "unit": _UNIT, "higher_is_better": False, "name": None}
_KERNEL: Row = {"name": None, "kernel": "rbf", "higher_is_better": False, "reference": None, "n": None}
MMD2 = Distance(
    [{**_KERNEL, "estimator": name, "bandwidth_rule": rule, "bandwidth": None} for name, rule in _RULES.items()], _mmd2
)
WASSERSTEIN = Distance([{**_SCALED, "order": 1, "over": over} for over in ("mean", "largest")], _wasserstein)
MEAN_ERROR = Distance([{**_SCALED, "over": "root mean square"}], _mean_error)
COVARIANCE_ERROR = Distance(
    [{**_SCALED, "norm": "frobenius", "estimator": "root of the unbiased square"}], _covariance_error
)
