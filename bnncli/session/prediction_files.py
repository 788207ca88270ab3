"""Read predictions from files of any origin, and compare predictions with a reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.headers import Header
from bnncli.artifacts.predictions import PredictionFile, read_predictions
from bnncli.data.columns import LOGITS, PROBS
from bnncli.data.labels import FROM_1, common_task
from bnncli.data.prediction_files import (
    HDF5_MAGIC,
    FilePredictions,
    read_given_predictions,
    read_labels,
    read_magic,
    split_prediction_place,
)
from bnncli.errors import DataError, UsageError
from bnncli.evaluation.detectors import example_scores
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.scores import ScoredPredictions, fidelities
from bnncli.evaluation.statistics import ROW_SUM_TOLERANCE, ExampleStatistics, compute_example_statistics, row_blocks
from bnncli.lazy import torch
from bnncli.likelihoods import MULTILABEL, Likelihood, has_exclusive_classes, likelihood_of, read_recorded_name
from bnncli.names import quote_name

if TYPE_CHECKING:
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.detection import ExampleScores
    from bnncli.evaluation.fidelity import Forecasts, ReferencePredictions


class PredictionClaims(NamedTuple):
    """The user's statements about predictions.

    Args:
        holds: PROBS or LOGITS; None to detect it.
        task: one of TASKS; None to detect it.
    """

    holds: str | None = None
    task: str | None = None


@dataclass(frozen=True)
class GivenPredictions:
    """Predictions of a split to score.

    Args:
        name: of the split. path: of the file.
        probs: (N, C); rows sum to one if the classes are exclusive.
        labels: (N,) int64, (N, C) uint8 with several labels per example, or None.
        classes: names.
        arrays: further inputs of detectors, named as in prediction files.
        ranking: rule, threshold and cap of the uncertainty-aware ranking, if any.
        header: of a prediction file from predict. file: its content.
        doubt: evidence against what the user stated.
        unordered: class columns, if nothing confirms that their order matches numeric labels.
        groups: groups of dependent examples, or None.
    """

    name: str
    path: Path
    probs: NDArray
    labels: NDArray | None
    classes: tuple[str, ...]
    has_names: bool
    is_exclusive: bool = True
    arrays: Mapping[str, NDArray] = field(default_factory=dict)
    ranking: Mapping[str, Any] | None = None
    header: Header | None = None
    file: PredictionFile | None = None
    doubt: str | None = None
    unordered: tuple[str, ...] = ()
    groups: RowGroups | None = None

    @cached_property
    def examples(self) -> ExampleStatistics:
        """Return the statistics of each example.

        Raises:
            DataError: a value is not a probability.
        """
        size = len(self.classes)
        try:
            return compute_example_statistics(self.probs, self.labels, num_classes=size, is_exclusive=self.is_exclusive)
        except DataError as error:
            hint = error.hint
            if hint is not None and "these look like" in hint and "percent" not in hint:
                hint = "if they are logits (or log-probabilities, which have the same softmax), add \0logits\0"
            elif hint is not None and "sum to 1" in hint:
                hint = f"{hint}; if each class is a separate label, add \0task\0 multilabel"
            raise DataError(f"{quote_name(self.path, limit=300)}: {error.message}", hint=hint, path=self.path) from None

    def check(self) -> None:
        """Check the probabilities; raises as `examples`."""
        _ = self.examples

    @property
    def samples(self) -> int | None:
        """Return the number of draws averaged, if recorded."""
        return None if self.header is None else self.header.meta["samples"]

    @property
    def likelihood(self) -> str | None:
        """Return the likelihood's name as recorded in rows."""
        return None if self.is_exclusive else MULTILABEL

    def scored(self, settings: Mapping[str, Any]) -> ScoredPredictions:
        """Return the inputs of scores, with the options that scores define."""
        lengths = self.arrays.get("top_k")
        mutual_info = self.arrays.get("mutual_info")
        return ScoredPredictions(
            self.probs,
            self.examples,
            mutual_info,
            lengths=lengths,
            ranking=self.ranking,
            settings=settings,
            classes=self.classes,
            groups=self.groups,
            sample_id=None if self.file is None else self.file.sample_id,
        )

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """Return the named scores of each example, or the reason there are none."""
        return example_scores(names, self.examples, self.arrays.get)

    def named(self, name: str) -> GivenPredictions:
        """Return the predictions under another split name."""
        return replace(self, name=name)

    def of_rows(self, rows: NDArray[np.int64], name: str) -> GivenPredictions:
        """Return the predictions of some examples (n,) under another split name."""
        arrays = {key: array[rows] for key, array in self.arrays.items()}
        labels = None if self.labels is None else self.labels[rows]
        groups = None if self.groups is None else self.groups.of_rows(rows)
        probs = np.asarray(self.probs[rows])
        return replace(self, name=name, probs=probs, labels=labels, arrays=arrays, groups=groups)


def open_given(
    place: str, said: PredictionClaims, *, name: str | None = None, labels: str | None = None, is_labeled: bool = True
) -> GivenPredictions:
    """Open the predictions in `FILE[:probs=COLUMN,label=COLUMN]` or `FILE:ARRAY[,LABELS]`.

    Args:
        name: of the split; None for the name in a prediction file, or the file's stem.
        labels: location of the labels, if separate.
        is_labeled: whether labels are required.

    Raises:
        MissingInput, UsageError, DataError, Untrusted: see read_given; also if values are neither clearly probabilities nor
            clearly logits, or labels do not fit.
    """
    path, named = split_prediction_place(place)
    if read_magic(path) == HDF5_MAGIC:
        if named:
            raise UsageError(f"{place!r} is a prediction file of bnncli, which has no columns to name")
        found = _open_prediction_file(path, name, said)
    else:
        given = read_given_predictions(place, wanted=said.holds, has_labels=is_labeled and labels is None)
        found = _convert_file(given, said, name or path.name.partition(".")[0])
    if labels is not None:
        own = read_labels(labels, found.classes if found.has_names else None, found.unordered)
        found = _add_labels(found, own, said, quote_name(split_prediction_place(labels)[0], limit=300))
    return found if is_labeled else replace(found, labels=None)


def _open_prediction_file(path: Path, name: str | None, said: PredictionClaims) -> GivenPredictions:
    if said.holds == LOGITS:
        raise UsageError(
            f"\0logits\0: {quote_name(path, limit=300)} is a prediction file of bnncli, which holds probabilities"
        )
    file = read_predictions(path)
    assert file.header is not None
    meta = file.header.meta
    is_exclusive = has_exclusive_classes(read_recorded_name(meta))
    if said.task is not None and (said.task == MULTILABEL) == is_exclusive:
        raise UsageError(f"\0task\0 {said.task}: {quote_name(path, limit=300)} was predicted for another task")
    names = ("mutual_info", "energy", "max_logit", "combined", "log_concentration", "top_k")
    arrays = {key: array for key in names if (array := getattr(file, key)) is not None}
    return GivenPredictions(
        name or str(meta["split"]), path, file.probs, file.labels, tuple(file.classes), True, is_exclusive, arrays,
        meta.get("top_k"), file.header, file, groups=RowGroups.of(file.groups),
    )  # fmt: skip


def _convert_file(given: FilePredictions, said: PredictionClaims, name: str) -> GivenPredictions:
    where, num_outputs = quote_name(given.path, limit=300), given.values.shape[1]
    likelihood = _likelihood(given.labels, num_outputs, said, where)
    holds = said.holds or _infer_form(given, likelihood, where)
    arrays, doubt = {} if given.mutual_info is None else {"mutual_info": given.mutual_info}, None
    if holds == LOGITS:
        is_called = "logit" in given.column.casefold()
        if said.holds and not is_called and _are_distributions(given.values, likelihood):
            doubt = (
                f"{where}: {quote_name(given.column)} is read as logits, but its rows sum to 1 like probabilities; if "
                "they are, omit \0logits\0"
            )
        probs, of_logits = _convert_logits(given.values, likelihood, f"{where}: {given.column}")
        arrays |= of_logits
    else:
        if given.holds == LOGITS and said.holds is None:
            raise DataError(
                f"{where}: {quote_name(given.column)} is named as logits, but its rows are probabilities", code="which",
                hint="add \0probabilities\0 or \0logits\0", path=given.path,
            )  # fmt: skip
        probs = given.values
        if likelihood.is_exclusive and num_outputs == likelihood.num_classes:
            probs, doubt = _normalise_sums(probs, f"{where}: {quote_name(given.column)}")
        _check_agreement(given, likelihood)
        if num_outputs < likelihood.num_classes:
            probs = np.concatenate([1 - probs, probs], axis=1)
    has_names = given.classes is not None and len(given.classes) == likelihood.num_classes
    classes = given.classes if has_names and given.classes else tuple(map(str, range(likelihood.num_classes)))
    found = GivenPredictions(
        name,
        given.path,
        probs,
        None,
        classes,
        has_names,
        likelihood.is_exclusive,
        arrays,
        doubt=doubt or (f"{where}: {given.note}" if given.note else None),
        unordered=given.unordered,
        groups=RowGroups.of(given.groups),
    )
    return found if given.labels is None else _add_labels(found, given.labels, said, where)


def _likelihood(labels: NDArray | None, num_outputs: int, said: PredictionClaims, where: str) -> Likelihood:
    """Return the likelihood for this number of outputs, from the given task and the labels."""
    name = common_task({where: labels}, said.task)
    if said.task == MULTILABEL:
        name = MULTILABEL
    if name == MULTILABEL and num_outputs < 2:
        raise DataError(f"{where}: multilabel predictions need one column per label; got one column", code="bad_shape")
    likelihood = likelihood_of(num_outputs, name)
    if said.task == "binary" and likelihood.num_classes > 2:
        raise DataError(f"{where}: \0task\0 binary needs one or two columns; got {num_outputs}", code="bad_shape")
    return likelihood


def _add_labels(split: GivenPredictions, labels: NDArray, said: PredictionClaims, where: str) -> GivenPredictions:
    """Return the predictions with these labels.

    Raises:
        DataError: the labels do not fit.
    """
    num_rows, num_classes = split.probs.shape
    if len(labels) != num_rows:
        raise DataError(
            f"{where} has {len(labels)} labels, but {quote_name(split.path, limit=300)} has {num_rows} predictions",
            code="bad_labels",
        )
    task = said.task if split.is_exclusive else MULTILABEL
    common_task({where: labels}, task or "multiclass")
    if labels.ndim == 2 and labels.shape[1] != num_classes:
        raise DataError(
            f"{where} has {labels.shape[1]} labels per example, but the predictions have {num_classes}",
            code="bad_labels",
        )
    if labels.ndim == 1 and labels.max(initial=0) >= num_classes:
        row = int(labels.argmax())
        raise DataError(
            f"{where}: row {row} has label {labels[row]}; expected 0 to {num_classes - 1} ({num_classes} classes)",
            code="bad_labels", hint=FROM_1 if labels.min() == 1 else None,
        )  # fmt: skip
    return replace(split, labels=labels)


def _infer_form(given: FilePredictions, likelihood: Likelihood, where: str) -> str:
    """Return whether values are probabilities or logits, judging by name and content.

    Raises:
        DataError: NaN or infinity, log probabilities, or ambiguous values.
    """
    values, column = given.values, f"{where}: {quote_name(given.column)}"
    smallest, largest = float(values.min()), float(values.max())
    if not np.isfinite([smallest, largest]).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise DataError(
            f"{column}: expected finite numbers; row {row} has NaN or infinity",
            hint=_LOG_HINT if largest <= 0 else None,
            code="not_finite",
            path=given.path,
        )
    is_probable = _are_distributions(values, likelihood) or (given.holds is None and _are_within(values))
    if given.holds == PROBS or is_probable:
        return PROBS  # errors in them are reported by the check of probabilities
    if given.holds == LOGITS:
        return LOGITS
    if largest <= 0 and _are_distributions(np.exp(values, dtype=np.float64), likelihood):
        raise DataError(
            f"{column}: expected probabilities or logits; got log-probabilities",
            hint=_LOG_HINT,
            code="which",
            path=given.path,
        )
    if smallest < 0:
        return LOGITS
    raise DataError(
        f"{column}: cannot tell whether these are probabilities or logits (values from {smallest:g} to {largest:g})", code="which", path=given.path,
        hint="add \0logits\0 if they are logits; divide percentages by 100",
    )  # fmt: skip


_LOG_HINT = "add \0logits\0 (the softmax is the same), or exponentiate them first"


def _are_within(values: NDArray) -> bool:
    return float(values.min()) >= -ROW_SUM_TOLERANCE and float(values.max()) <= 1 + ROW_SUM_TOLERANCE


def _are_distributions(values: NDArray, likelihood: Likelihood) -> bool:
    """Return whether the rows can be probabilities of exclusive classes."""
    is_exclusive = likelihood.is_exclusive and values.shape[1] > 1
    return is_exclusive and _are_within(values) and _sum_error(values) <= ROW_SUM_TOLERANCE


def _sum_error(values: NDArray) -> float:
    """Return the largest deviation from one of the sums of rows; NaN if any row has one."""
    return float(np.abs(values.sum(axis=1, dtype=np.float64) - 1).max(initial=0))


def _normalise_sums(values: NDArray, where: str) -> tuple[NDArray, str | None]:
    """Normalise rounded probabilities (N, C) and return them with a note; others unchanged, with None."""
    worst = _sum_error(values)
    if not (ROW_SUM_TOLERANCE < worst <= _MOST_ROUNDING and _are_within(values)):
        return values, None
    tolerance, what = next(
        ((bound, what) for bound, what in _roundings(values) if worst <= min(bound, _MOST_ROUNDING)), (0.0, "")
    )
    if not tolerance:
        return values, None
    divided = np.asarray(values, np.float64) / np.sum(values, axis=1, dtype=np.float64, keepdims=True)
    kept = divided.astype(np.promote_types(values.dtype, np.float32))
    return kept, f"{where}: rows of {what} sum to 1 only to within {worst:.1g}; each row was divided by its sum"


_MOST_ROUNDING = 0.05  # rows further from 1 lack a class, whatever the rounding


def _roundings(values: NDArray) -> Iterator[tuple[float, str]]:
    """Yield possible roundings of the values: the largest deviation from 1 of a row's sum, and the name of the rounding."""
    narrow = np.ascontiguousarray(values, np.float32)  # tables hold 16-bit numbers in float64
    if (narrow.astype(np.float16) == values).all():
        yield 2.0**-10, "16-bit numbers"
    if (narrow == values).all() and not (narrow.view(np.uint32) & 0xFFFF).any():
        yield 2.0**-7, "bfloat16 numbers"
    for decimals in range(5, 0, -1):
        scaled = np.asarray(values, np.float64) * 10**decimals
        if np.abs(scaled - np.round(scaled)).max() > 10**decimals * np.finfo(values.dtype).eps:
            return
        yield 0.5 * values.shape[1] * 10.0**-decimals, f"probabilities with {decimals} decimals"


def _convert_logits(logits: NDArray, likelihood: Likelihood, where: str) -> tuple[NDArray, dict[str, NDArray]]:
    """Return probabilities (N, C), and energy and largest logit (N,), from logits.

    Computed in float64 and stored in the type of the logits, at least float32.

    Raises:
        DataError: a logit is not finite.
    """
    size = len(logits)
    kept = np.promote_types(logits.dtype, np.float32)
    probs = np.empty((size, likelihood.num_classes), dtype=np.float64 if kept.itemsize > 8 else kept)
    energy, largest = np.empty(size), np.empty(size)
    for rows in row_blocks(*logits.shape):
        block = torch.from_numpy(np.array(logits[rows], dtype=np.float64))
        if not bool(torch.isfinite(block).all()):
            row = rows.start + int((~torch.isfinite(block)).any(dim=1).int().argmax())
            raise DataError(f"{where}: expected finite logits; row {row} has NaN or infinity", code="not_finite")
        probs[rows] = likelihood.class_probabilities(block, dim=1).numpy()
        energy[rows] = -likelihood.log_partitions(block).numpy()
        largest[rows] = likelihood.balanced_class_logits(block, dim=1).amax(dim=1).numpy()
    return probs, {"energy": energy, "max_logit": largest}


_ROUNDING = 0.01  # of probabilities beside logits: two decimals, or 16 bits of either


def _check_agreement(given: FilePredictions, likelihood: Likelihood) -> None:
    """Raise DataError if logits beside the probabilities contradict them."""
    if given.beside is None or given.beside[0].shape != given.values.shape or not np.isfinite(given.beside[0]).all():
        return
    logits, name = given.beside
    probs, _ = _convert_logits(logits, likelihood, name)
    apart = float(np.abs(probs[:, -given.values.shape[1] :] - given.values).max())
    if apart > _ROUNDING:
        raise DataError(
            f"{quote_name(given.path, limit=300)}: {quote_name(given.column)} and {quote_name(name)} disagree: "
                f"probabilities computed from the logits differ by up to {apart:.3g}",
            code="which", hint=f"choose one: FILE:probs={given.column} or FILE:logits={name}", path=given.path,
        )  # fmt: skip


def check_together(one: GivenPredictions, other: GivenPredictions) -> None:
    """Check that two predictions have the same classes.

    Raises:
        DataError: they do not.
    """
    shown = [quote_name(split.path, limit=300) for split in (one, other)]
    if len(one.classes) != len(other.classes):
        raise DataError(
            f"{shown[0]} has {len(one.classes)} classes, but {shown[1]} has {len(other.classes)}", code="other_classes"
        )
    if one.is_exclusive != other.is_exclusive:
        raise DataError(f"only one of {' and '.join(shown)} has several labels per example", code="other_classes")
    if one.has_names and other.has_names and one.classes != other.classes:
        place = next(k for k, pair in enumerate(zip(one.classes, other.classes, strict=True)) if pair[0] != pair[1])
        same = "the same classes in a different order" if {*one.classes} == {*other.classes} else "other classes"
        message = f"{shown[1]} has {same} than {shown[0]}: class {place} is {quote_name(other.classes[place])}, not {quote_name(one.classes[place])}"
        raise DataError(message, code="other_classes")


def artifact_names(split: GivenPredictions) -> dict[str, Any]:
    """Return a row's name for the predictions: posterior and integrator for those of predict, otherwise the file."""
    if split.header is not None:
        meta = split.header.meta
        variant = str(meta.get("variant", meta["integrator"]))
        settings = dict(meta.get("settings", {}))
        named = {
            "name": split.path.parent.name,
            "posterior": str(meta["posterior"]),
            "integrator": str(meta["integrator"]),
        }
        return {**named, "variant": variant, "settings": settings, "samples": meta["samples"]}
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", split.path.name.partition(".")[0]) or "given"
    return {
        "name": f"{stem}.none",
        "posterior": stem,
        "integrator": "none",
        "variant": "none",
        "settings": {},
        "samples": None,
    }


Row = dict[str, Any]
_OLD = "the reference's predictions store no groups of draws; run predict again"


def rows_against(
    ours: GivenPredictions,
    reference: GivenPredictions,
    *,
    name: str,
    bootstrap: Bootstrap | None,
    tell: Callable[[str], None],
) -> list[Row]:
    """Return the rows of distances between predictions and a reference.

    Args:
        name: of the reference, in rows.
        tell: reports which rows of the reference are used.

    Raises:
        DataError: the reference has other rows, labels or classes.
    """
    from bnncli.evaluation.fidelity import Forecasts, fidelity_rows

    rows = check_against(ours, reference, tell=tell)
    return fidelity_rows(
        Forecasts(ours.probs, ours.arrays.get("mutual_info")),
        _select_rows(reference, rows, name),
        fidelities(),
        split=(ours.name, len(ours.probs)),
        bootstrap=bootstrap,
        is_exclusive=ours.is_exclusive,
    )


def check_against(
    ours: GivenPredictions, reference: GivenPredictions, *, tell: Callable[[str], None] = lambda text: None
) -> NDArray[np.int64] | None:
    """Check predictions against a reference and return `matching_rows`; raises as `rows_against`."""
    if reference.is_exclusive != ours.is_exclusive or reference.probs.shape[1] != ours.probs.shape[1]:
        what = f"{reference.probs.shape[1]}" + ("" if reference.is_exclusive else " that are not mutually exclusive")
        raise DataError(
            f"{_format_reference(reference)}: expected {ours.probs.shape[1]} classes, as in split {ours.name!r}; got {what}"
        )
    reference.check()
    return matching_rows(ours, reference, tell=tell)


def matching_rows(
    ours: GivenPredictions, reference: GivenPredictions, *, tell: Callable[[str], None]
) -> NDArray[np.int64] | None:
    """Return the rows (N,) of the reference that match the examples; None if all match in order.

    Rows are matched by sample IDs if the reference has them. Otherwise a reference with more rows than the split is
    taken as the whole data the split was held out of, and one with as many rows as the split in its order.

    Raises:
        DataError: the numbers of rows do not fit, or labels differ.
    """
    size, others = len(ours.probs), len(reference.probs)
    rows = None
    theirs = None if reference.file is None else np.asarray(reference.file.sample_id)
    ids = None if ours.file is None else np.asarray(ours.file.sample_id)
    if theirs is not None and ids is not None:
        rows = None if np.array_equal(ids, theirs) else _places(ids, theirs)
        if rows is None and not np.array_equal(ids, theirs):
            raise DataError(
                f"{_format_reference(reference)} lacks some examples of split {ours.name!r}: their rows in the data differ",
                code="other_rows",
            )
    elif others != size:
        is_whole = (
            others > size and ids is not None and len(np.unique(ids)) == size and ids.min() >= 0 and ids.max() < others
        )
        if not is_whole or ids is None:
            raise DataError(
                f"{_format_reference(reference)} has {others} rows, but split {ours.name!r} has {size}", code="other_rows",
                hint="a reference needs the rows of the split in the same order, or the rows of the data that the "
                    "split was held out from",
            )  # fmt: skip
        rows = ids.astype(np.int64)
        tell(
            f"reference {_format_reference(reference)}: using the {size} of its {others} rows that belong to split {ours.name!r}"
        )
    _check_labels(ours, reference, rows)
    return rows


def _places(ids: NDArray, theirs: NDArray) -> NDArray[np.int64] | None:
    """Return the position of each ID in `theirs`; None if one is missing or repeated."""
    order = np.argsort(theirs)
    ordered = theirs[order]
    at = np.searchsorted(ordered, ids).clip(max=max(0, len(ordered) - 1))
    is_found = len(ordered) > 0 and bool((ordered[at] == ids).all()) and len(np.unique(theirs)) == len(theirs)
    return order[at] if is_found else None


def _check_labels(ours: GivenPredictions, reference: GivenPredictions, rows: NDArray | None) -> None:
    """Check that labels agree if both have them.

    Raises:
        DataError: they differ.
    """
    if ours.labels is None or reference.labels is None:
        return
    theirs = np.asarray(reference.labels)[rows if rows is not None else slice(None)]
    differs = np.asarray(ours.labels) != theirs
    count = int((differs.any(axis=1) if differs.ndim == 2 else differs).sum())
    if count:
        raise DataError(
            f"{_format_reference(reference)} and split {ours.name!r} have different labels in {count} of {len(theirs)} rows", code="other_rows",
            hint="its rows must be in the order of the split",
        )  # fmt: skip


def _select_rows(reference: GivenPredictions, rows: NDArray[np.int64] | None, name: str) -> ReferencePredictions:
    """Return the reference's predictions of these rows, with those of two halves of its draws."""
    from bnncli.evaluation.fidelity import NO_DRAWS, Forecasts, ReferencePredictions

    info = reference.arrays.get("mutual_info")
    taken: Any = slice(None) if rows is None else rows
    predicted = Forecasts(reference.probs[taken], None if info is None else np.asarray(info)[taken])
    halves = None if reference.file is None else halves_of(reference.file, rows)
    has_draws = reference.file is not None and reference.samples is not None
    return ReferencePredictions(name, predicted, halves, _OLD if has_draws else NO_DRAWS)


def halves_of(file: PredictionFile, rows: NDArray[np.int64] | None) -> tuple[Forecasts, Forecasts] | None:
    """Return the predictions of each half of the draws for the stored rows among `rows`; None if none are stored.

    From stored draws, mutual information is computed as well; from stored groups of draws, every second group forms a
    half.
    """
    from bnncli.evaluation.fidelity import Forecasts

    if file.probs_samples is not None and len(file.probs_samples) > 1:
        taken: Any = slice(None) if rows is None else rows
        parts = [np.asarray(file.probs_samples[start::2, taken], dtype=np.float64) for start in (0, 1)]
        first, second = (
            Forecasts(part.mean(axis=0), _mutual_info(part) if file.is_exclusive else None) for part in parts
        )
        return first, second
    if file.group_probs is None or file.group_rows is None or file.group_weights is None:
        return None
    kept = np.arange(len(file.group_rows))
    if rows is not None:
        kept = kept[np.isin(np.asarray(file.group_rows), rows)]
    weights = np.asarray(file.group_weights, dtype=np.float64)
    sums = []
    for start in (0, 1):
        own = weights[start::2]
        if own.sum() <= 0:
            return None
        means = np.asarray(file.group_probs[start::2])[:, kept].astype(np.float64)
        sums.append(Forecasts(np.tensordot(own / own.sum(), means, axes=1)))
    return sums[0], sums[1]


def _mutual_info(probs: NDArray) -> NDArray:
    """Return the mutual information of class and draw (N,), nats, from probabilities (S, N, C)."""
    from bnncli.lazy import special

    found: NDArray = special.entr(probs.mean(axis=0)).sum(axis=-1) - special.entr(probs).sum(axis=-1).mean(axis=0)
    return found


def _format_reference(reference: GivenPredictions) -> str:
    return quote_name(reference.path, limit=300)
