"""The options that scores and detectors bring, for the commands that score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from bnncli.evaluation import detectors, scores
from bnncli.evaluation.scores import ScoreOption
from bnncli.options.declaration import Declared, declared_as, option


@cache
def of_scores() -> Declared:
    """Those of scores, in evaluate."""
    return _declared(scores.options())


@cache
def of_predicted_scores() -> Declared:
    """Those of scores that are made of predictions alone, in score."""
    names = {name for score in scores.declared().values() if score.of_split is not None for name in score.options}
    return _declared({name: one for name, one in scores.options().items() if name in names})


@cache
def of_detectors() -> Declared:
    """Those of detectors, in evaluate."""
    return _declared(detectors.options())


@cache
def of_compared_scores() -> Declared:
    """Those of scores that compare has as well."""
    every = scores.options()
    return _declared({name: replace(one, text=one.in_compare) for name, one in every.items() if one.in_compare})


def _declared(options: Mapping[str, ScoreOption]) -> Declared:
    found = {}
    for name, one in options.items():
        hint = one.type | None if one.default is None else one.type
        low, high = one.minimum, one.maximum
        spec = option(
            one.default,
            one.text,
            minimum=low,
            maximum=high,
            metavar=one.metavar,
            check=one.check,
            group="Scores",
            is_rare=True,
        )
        found[name] = declared_as(name, hint, spec)
    return found
