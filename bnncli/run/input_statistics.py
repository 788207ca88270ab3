"""Inputs of a split that are unlike those that the run's network was extracted on: another scale, normalisation, size or vocabulary.

What is compared is recorded with the features of every split. A warning is for what data do not do by themselves: FashionMNIST
beside MNIST, CIFAR-10 beside SVHN, and images that were corrupted, rotated or blurred, have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, interpreting
from bnncli.errors import DataError
from bnncli.names import percent
from bnncli.run.session import Run

_FACTOR, _OOD_FACTOR = 10.0, 50.0  # of scale, both of the mean absolute value and of the deviation
_FEW_ROWS = 16  # with fewer, an image may be all white or all black
_MUCH_NEGATIVE = 0.2
_SHIFT, _LARGE_SHIFT, _SPREAD = 0.5, 3.0, 1.9  # of the mean, in deviations; between deviations
_INVERTED, _NEAR, _ALIKE = 1.0, 0.25, 1.25  # shift of the mean, from its mirror image; between deviations
_SIDE = 1.5  # of the height or width of images
_FEW_TOKENS, _COVERED, _ONE_TOKEN, _TIMES = 200, 4.0, 0.25, 20.0


def recorded_statistics(header: Header) -> Mapping[str, Any] | None:
    """Return what the features of a split record of its inputs; None of earlier versions and of ready features."""
    record = header.provenance.get("input_statistics")
    if record is None:
        return None
    with interpreting(header.path):
        difference("", record, "", record, is_scale_alone=False)  # which looks at all of it
    return dict(record)


def reference_of(run: Run) -> tuple[str, Mapping[str, Any]] | None:
    """Return the split whose inputs the others are compared with, train or the first that is not OOD, and its statistics."""
    for name in run.folder.splits():
        with suppress(DataError):  # of a damaged split, which other splits do without
            header = read_header(run.folder.features(name))
            if not _is_lenient(header) and (found := recorded_statistics(header)) is not None:
                return name, found
    return None


def unlike_inputs(run: Run, names: Iterable[str]) -> list[str]:
    """Return how the inputs of each of these splits of the run are unlike those of the first, in words, where they are."""
    reference = reference_of(run)
    found = []
    for name in names:
        header = read_header(run.folder.features(name))
        statistics = recorded_statistics(header)
        if reference is not None and statistics is not None and name != reference[0]:
            found.append(difference(name, statistics, *reference, is_scale_alone=_is_lenient(header)))
    return [text for text in found if text is not None]


def difference(
    name: str, found: Mapping[str, Any], reference: str, known: Mapping[str, Any], *, is_scale_alone: bool
) -> str | None:
    """Return how inputs are unlike others, in words; None where they are alike.

    Args:
        name, reference: of the two splits. found, known: their statistics, see `InputSums.statistics`.
        is_scale_alone: whether they may differ in all but a factor such as 255, as OOD data and corrupted copies may.
    """
    if "tokens" in found and "tokens" in known:
        return None if is_scale_alone else _of_tokens(name, found["tokens"], reference, known["tokens"])
    if "mean" not in found or "mean" not in known:
        return None
    what = _of_numbers(found, reference, known, is_scale_alone=is_scale_alone)
    return None if what is None else f"{name}: {what}: {_numbers(found)} ({reference}: {_numbers(known)})"


def _of_numbers(
    found: Mapping[str, Any], reference: str, known: Mapping[str, Any], *, is_scale_alone: bool
) -> str | None:
    deviation, own = _pooled(found["std"]), _pooled(known["std"])
    most = _OOD_FACTOR if is_scale_alone else _FACTOR
    factors = (_ratio(found["mean_absolute"], known["mean_absolute"]), _ratio(deviation, own))
    is_few = found["num_rows"] < _FEW_ROWS
    if min(factors) >= most:
        return (
            f"values are about {min(factors):.3g} times as large as in {reference} (uint8 is divided by 255, "
            "floats are used unchanged)"
        )
    if max(factors) <= 1 / most and not is_few:
        return (
            f"values are about {1 / max(max(factors), 1e-9):.3g} times smaller than in {reference} (uint8 is "
            "divided by 255, floats are used unchanged)"
        )
    if is_scale_alone:
        return None
    sides, own_sides = found["shape"][1:], known["shape"][1:]
    if len(sides) == len(own_sides) == 2:
        largest = max(max(_ratio(*pair), _ratio(*pair[::-1])) for pair in zip(sides, own_sides, strict=True))
        if largest >= _SIDE:
            return f"images have {_size(sides)} pixels, but {_size(own_sides)} in {reference} (see \0resize\0)"
    if is_few:
        return None
    shifts = [abs(one - other) / max(own, 1e-30) for one, other in zip(found["mean"], known["mean"], strict=False)]
    shift, spread = max(shifts, default=0.0), max(factors[1], 1 / max(factors[1], 1e-9))
    more, less = max(found["negative"], known["negative"]), min(found["negative"], known["negative"])
    if less == 0 and more >= _MUCH_NEGATIVE and (shift > _SHIFT or spread > _SPREAD):
        of_found, of_known = percent(found["negative"], ".0f"), percent(known["negative"], ".0f")
        return f"{of_found} of the values are negative, but {of_known} in {reference}: only one of them is normalised"
    mirrored = known["min"] + known["max"] - _mean(known["mean"])
    if shift > _INVERTED and spread < _ALIKE and abs(_mean(found["mean"]) - mirrored) < _NEAR * own:
        return f"images look inverted compared with {reference}"
    if shift > _LARGE_SHIFT:
        return f"the mean is {shift:.2g} standard deviations from that of {reference}; is it normalised differently?"
    return None


def _of_tokens(name: str, found: Mapping[str, Any], reference: str, known: Mapping[str, Any]) -> str | None:
    shares, own = (
        {token: count / one["num"] for token, count in zip(one["commonest"], one["counts"], strict=True)}
        for one in (found, known)
    )
    covered, of_own = sum(share for token, share in shares.items() if token in own), sum(own.values())
    if found["num"] < _FEW_TOKENS:
        return None
    token, share = max(shares.items(), key=lambda pair: pair[1])
    if share >= _ONE_TOKEN and share >= _TIMES * own.get(token, 0.0):
        return (
            f"{name}: {percent(share, '.0f')} of its tokens have the id {token}, but "
            f"{percent(own.get(token, 0.0), '.2g')} in {reference}; if this is the unknown token, the texts or "
            "the tokenizer differ"
        )
    if covered < of_own / _COVERED:
        return (
            f"{name}: {percent(covered, '.2g')} of its tokens are among the {len(own)} most common ones of "
            f"{reference}, which make up {percent(of_own, '.2g')} there: the texts or the tokenizer differ"
        )
    return None


def _is_lenient(header: Header) -> bool:
    """Whether a split is OOD, or its images were shifted on purpose."""
    params = header.provenance.get("params", {})
    return bool(header.meta.get("is_ood")) or any(params.get(name) is not None for name in ("rotate", "corrupt"))


def _numbers(one: Mapping[str, Any]) -> str:
    mean, std = (", ".join(f"{value:.3g}" for value in one[name]) for name in ("mean", "std"))
    return (
        f"{one['min']:.3g} to {one['max']:.3g}, mean {mean}, standard deviation {std}, "
        f"{percent(one['zeros'], '.0f')} zeros"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _pooled(deviations: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in deviations) / len(deviations))


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.inf if one else 1.0


def _size(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))
