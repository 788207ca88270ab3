"""Which of several predictives to recommend, by a val split: never one that is worse there than the network at one temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bnncli.evaluation.excess import Scored, excesses


@dataclass(frozen=True)
class Predictive:
    """A posterior by an integrator.

    Args:
        posterior, integrator: names.
        rung: of the ladder; lower ones are simpler.
        is_good: whether the posterior is good for its target.
        scored: on val.
    """

    posterior: str
    integrator: str
    rung: int
    is_good: bool
    scored: Scored


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    Args:
        chosen: a candidate; None for the baseline.
        pays: whether any candidate is better than the baseline beyond chance, at 5 % for all together.
        why: in words.
    """

    chosen: Predictive | None
    pays: bool
    why: str


def recommend(candidates: Sequence[Predictive], baseline: Scored) -> Recommendation:
    """The recommendation among candidates and the network at one temperature, or as trained: `baseline`.

    Of those whose mean loss on val is at most the baseline's: the simplest posterior that is good for its target, by the first of its
    integrators in their order here, unless another candidate is better than that beyond chance; where none is good, that of the
    lowest loss. The baseline where none is left.
    """
    if not candidates:
        return Recommendation(None, False, "no posterior was fitted")
    pays = any(gap.is_worse for gap in excesses(baseline, [one.scored for one in candidates]))
    eligible = [one for one in candidates if one.scored.nll <= baseline.nll]
    if not eligible:
        return Recommendation(None, pays, "none of the posteriors fitted predicts val better than it")
    good = [one for one in eligible if one.is_good]
    if good:
        first, why = min(good, key=lambda one: one.rung), "the simplest posterior that is good for its target"
    else:
        first = min(eligible, key=_loss)
        why = "the lowest loss on val; none that predicts as well is known to be good for its target"
    others = [one for one in eligible if one is not first]
    gaps = excesses(first.scored, [one.scored for one in others])
    better = [other for other, gap in zip(others, gaps, strict=True) if gap.is_worse]
    if better:
        why = f"better on val than {first.posterior} by {first.integrator} beyond chance"
        return Recommendation(min(better, key=_loss), pays, why)
    return Recommendation(first, pays, why)


def _loss(one: Predictive) -> float:
    return one.scored.nll
