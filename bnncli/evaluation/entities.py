"""Entities in tagged texts: precision, recall and F1, as conlleval and the default of seqeval define them.

Classes are tags: O outside of entities, and a prefix with a type, such as B-PER and I-PER, in IOB1, IOB2, IOBES or BILOU (which
is IOBES with L for E and U for S). A tag starts an entity after O, after an entity has ended (E, S), with B or S, or with
another type, whatever the scheme would allow (Tjong Kim Sang and De Meulder 2003, W03-0419; Nakayama 2018, seqeval).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.statistics import NO_LABELS, ExampleStatistics, Floats, ScoreForm, ScoreGroup

_TAG = re.compile(r"([BIESLU])-(.+)")
_OUTSIDE = "O"
_SAME = {"L": "E", "U": "S"}
_NAMES = ("entity_f1", "entity_precision", "entity_recall")


def are_tags(classes: Sequence[str]) -> bool:
    """Return whether class names are tags of entities: O, and at least one prefix with a type."""
    others = [name for name in classes if name != _OUTSIDE]
    return _OUTSIDE in classes and bool(others) and all(_TAG.fullmatch(name) for name in others)


def entity_scores(
    examples: ExampleStatistics, classes: Sequence[str], groups: RowGroups, sample_id: NDArray | None
) -> list[ScoreGroup]:
    """Return F1, precision and recall of entities, over all types together, and by type.

    Args:
        classes: tags.
        groups: the text of each row.
        sample_id: (N,), which orders the rows of a text; None for rows in order.
    """
    members = [
        ScoreForm(name, {"average": "micro"}, True, bounds=(0.0, 1.0), when_nan="no entities") for name in _NAMES
    ]
    if examples.labels is None:
        return [ScoreGroup(members, None, NO_LABELS)]
    counts, of_types = count_entities(examples.labels, examples.predicted, classes, groups, sample_id)

    def statistic(weights: NDArray) -> Floats:
        return _scores(weights.astype(np.float64) @ counts)

    def of_classes() -> list[list[float | None]]:
        """Each tag has the score of its type; O has none."""
        none = np.zeros(3)
        values = _scores(np.stack([of_types.get(_split(name)[1], none) for name in classes]))
        return [[None if np.isnan(value) else float(value) for value in column] for column in values.T]

    return [ScoreGroup(members, statistic, per_class=of_classes)]


def count_entities(
    labels: NDArray, predicted: NDArray, classes: Sequence[str], groups: RowGroups, sample_id: NDArray | None
) -> tuple[Floats, dict[str, Floats]]:
    """Count common, true and predicted entities: (N, 3) at the row that ends each, and (3,) of each type."""
    split = [_split(name) for name in classes]
    types = sorted({kind for _, kind in split if kind})
    ids = np.arange(len(labels)) if sample_id is None else np.asarray(sample_id)
    order = np.lexsort((ids, groups.index))
    text = groups.index[order]
    sides = [_entities(side[order], text, split, types) for side in (labels, predicted)]
    # An entity is found if end, begin and type agree.
    keys = [(last * len(labels) + first) * len(types) + kinds for last, first, kinds in sides]
    common = np.isin(keys[0], keys[1], assume_unique=True)
    found = [(sides[0][0][common], sides[0][2][common]), *((last, kinds) for last, _, kinds in sides)]
    counts, of_types = np.zeros((len(labels), 3)), np.zeros((len(types), 3))
    for place, (last, kinds) in enumerate(found):
        counts[order[last], place] = 1
        of_types[:, place] = np.bincount(kinds, minlength=len(types))
    return counts, dict(zip(types, of_types, strict=True))


def _split(name: str) -> tuple[str, str]:
    """Return prefix and type of a tag; O and no type outside of entities."""
    match = _TAG.fullmatch(name)
    return (_OUTSIDE, "") if match is None else (_SAME.get(match[1], match[1]), match[2])


def _entities(
    tags: NDArray, text: NDArray, split: Sequence[tuple[str, str]], types: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the last and the first position, and the type, of every entity.

    Args:
        tags: (N,), numbers of classes, text by text.
        text: (N,), the text of each.
    """
    prefix = np.array([one for one, _ in split])[tags]
    kind = np.array([types.index(one) if one else -1 for _, one in split])[tags]
    is_first = np.append(True, text[1:] != text[:-1])
    before, kind_before = np.append(_OUTSIDE, prefix[:-1]), np.append(-1, kind[:-1])
    before, kind_before = np.where(is_first, _OUTSIDE, before), np.where(is_first, -1, kind_before)
    is_inside = prefix != _OUTSIDE
    starts = is_inside & (np.isin(prefix, ("B", "S")) | np.isin(before, (_OUTSIDE, "E", "S")) | (kind != kind_before))
    # An entity ends before the next start, before O, and with its text.
    goes_on = np.append(is_inside[1:] & ~starts[1:] & ~is_first[1:], False)
    first, last = np.flatnonzero(starts), np.flatnonzero(is_inside & ~goes_on)
    return last, first, kind[last]


def _scores(counts: NDArray) -> Floats:
    """Return F1, precision and recall (..., 3) from counts (..., 3); NaN without entities on both sides, 0 without on one."""
    common, true, predicted = np.moveaxis(np.asarray(counts, dtype=np.float64), -1, 0)
    found = np.stack(
        [
            2 * common / np.maximum(true + predicted, 1),
            common / np.maximum(predicted, 1),
            common / np.maximum(true, 1),
        ],
        axis=-1,
    )
    return np.where((true + predicted > 0)[..., None], found, np.nan)
