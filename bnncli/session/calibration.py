"""Fit calibration maps with cross-validation, and report them: for fit-calibration, and for predictions in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.outputs import TableBlock
from bnncli.artifacts.posteriors import read_tensors, write_tensors
from bnncli.artifacts.provenance import Source, build_provenance
from bnncli.errors import DAMAGED_HINT, BnnError, DataError, NumericError, UsageError
from bnncli.evaluation.calibration_maps import (
    MAPS,
    CalibrationData,
    CalibrationMap,
    FittedMap,
    Temperature,
    fit_map,
    is_tried,
    open_map,
    paired_gain,
)
from bnncli.evaluation.statistics import THRESHOLD
from bnncli.inference.prior_variants import stratified_folds
from bnncli.lazy import special, torch
from bnncli.likelihoods import likelihood_of, name_to_record, read_recorded_name
from bnncli.names import percent
from bnncli.numerics.digests import file_sha256
from bnncli.progress import SILENT, Progress
from bnncli.session import revisions as _revisions
from bnncli.session.prediction_files import GivenPredictions
from bnncli.session.run import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_FOLDS = 5
FEWEST_ROWS = 10


@dataclass(frozen=True)
class TriedMaps:
    """Maps fitted to the same rows, temperature among them.

    Attributes:
        folds: (N,) uint8, the fold that left out each row.
        left_out: maps that were not fitted, with reasons.
    """

    fitted: Sequence[FittedMap]
    folds: NDArray
    left_out: Sequence[str]

    def named(self, name: str) -> FittedMap:
        """Return the map of this name."""
        return next(one for one in self.fitted if one.name == name)


def fit_maps(
    data: CalibrationData, name: str | None, generator: torch.Generator, *, progress: Progress = SILENT
) -> TriedMaps:
    """Fit temperature and the named map, or every map that takes the labels and at most about a minute.

    Raises:
        NumericError: the fit of the named map did not converge.
        UsageError: all rows are of one group.
    """
    num_rows, likelihood = data.logits.shape[0], data.likelihood
    fits = [one for one, kind in MAPS.items() if kind.takes_labels or likelihood.is_exclusive]
    tried = [one for one in fits if is_tried(one, num_rows, likelihood)]
    names = tried if name is None else [Temperature.name, *([name] if name != Temperature.name else [])]
    left_out = [f"{one} (would take long)" for one in fits if one not in tried and name is None]
    count = num_rows if data.groups is None else len(data.groups)
    if count < 2:
        raise UsageError("a calibration map is judged out of fold, which needs at least 2 groups; there is only 1")
    labels = torch.from_numpy(data.labels)
    folds = stratified_folds(labels, min(NUM_FOLDS, count), generator, groups=data.groups).numpy()
    fitted = []
    for one in names:
        try:
            fitted.append(fit_map(one, data, folds, progress=progress))
        except NumericError:
            if name is not None:
                raise
            left_out.append(f"{one} (did not converge)")
    return TriedMaps(fitted, folds, left_out)


def describe_maps(found: TriedMaps, chosen: FittedMap, why: str | None, data: CalibrationData) -> dict[str, Any]:
    """Return the numbers of the maps: the chosen one, why it was chosen, and the out-of-fold scores of each."""
    from bnncli.evaluation.recommendation import score_predictive

    plain = found.named(Temperature.name)
    entries = []
    for one in found.fitted:
        probs = data.likelihood.class_probabilities(torch.from_numpy(one.logits), dim=1).float().numpy()
        gain, error = paired_gain(plain.losses, one.losses, data.groups)
        entries.append(
            {
                "map": one.name,
                **score_predictive(one.name, probs, data.labels, losses=one.losses, groups=data.groups).to_json(),
                "regularisation": one.precision,
                "gain": None if one is plain else {"value": gain, "standard_error": error},
            }
        )
    return {
        "map": chosen.name,
        "chosen_because": why,
        "regularisation": chosen.precision,
        "num_examples": len(data.labels),
        "num_folds": int(found.folds.max()) + 1,
        "maps": entries,
        "left_out": list(found.left_out),
    }


def summarize_maps(metrics: Mapping[str, Any], examples: str) -> list[str]:
    """Return lines for people: the map, and the out-of-fold scores of every map that was tried.

    Args:
        examples: what the map was fitted on, such as "val examples".
    """
    name, precision = metrics["map"], metrics["regularisation"]
    lines = [
        f"map {name} ({MAPS[name].words}), fitted on {metrics['num_examples']} {examples}"
        + ("" if precision is None else f"; prior precision {precision:g}")
    ]
    if metrics["chosen_because"] is not None:
        lines.append(f"chosen: {metrics['chosen_because']}")
    own = next(one["gain"] for one in metrics["maps"] if one["map"] == name)
    if own is not None and own["value"] < 0:
        lines.append(
            f"{name} has a higher NLL than one temperature on rows it has not seen, by {-own['value']:.4f} +- "
            f"{own['standard_error']:.4f}"
        )
    ordered = sorted(metrics["maps"], key=lambda one: float(one["nll"]))
    shown = [
        f"{one['map']} {one['nll']:.4f}, {percent(one['ece'])}, {percent(one['accuracy'])}{_gain(one['gain'])}"
        for one in ordered
    ]
    lines.append(
        f"NLL, ECE and accuracy in {metrics['num_folds']} folds (gain in NLL over temperature): {'; '.join(shown)}"
    )
    if metrics["left_out"]:
        lines.append(f"left out: {', '.join(metrics['left_out'])}")
    return lines


def _gain(gain: Mapping[str, float] | None) -> str:
    return "" if gain is None else f" ({gain['value']:+.4f} +- {gain['standard_error']:.4f})"


KIND = "calibration"
SMALLEST = 1e-12  # probability


def find_floor(probs: NDArray) -> float:
    """Return the probability that stands for zeros: half the smallest other one, so that they are no outliers."""
    positive = probs[probs > 0]
    return SMALLEST if len(positive) == probs.size else max(SMALLEST, float(positive.min(initial=1.0)) / 2)


def convert_to_logits(given: NDArray, floor: float, *, is_exclusive: bool) -> NDArray[np.float64]:
    """Return class logits (N, C) of probabilities (N, C), none of them below the floor."""
    probs = np.asarray(given, dtype=np.float64)
    if is_exclusive:
        return np.log(probs.clip(floor))
    found: NDArray = special.logit(probs.clip(floor, 1 - floor))
    return found


def calibration_data(given: GivenPredictions, name: str | None) -> tuple[CalibrationData, float]:
    """Return labelled predictions as the fit of a map takes them, and the probability that stands for zeros.

    Raises:
        DataError: there are no labels. UsageError: there are too few rows, or the map does not take several labels.
    """
    if given.labels is None:
        raise DataError(f"{given.path} has no labels, which a calibration map is fitted to", code="no_labels",
            hint="add \0labels\0 FILE[:COLUMN]",
        )  # fmt: skip
    if len(given.probs) < FEWEST_ROWS:
        raise UsageError(
            f"{given.path} has only {len(given.probs)} rows; a calibration map needs at least {FEWEST_ROWS}"
        )
    likelihood = likelihood_of(len(given.classes), given.likelihood)
    if name is not None:
        check_takes_labels(name, is_exclusive=given.is_exclusive)
    given.check()
    floor = find_floor(given.probs if given.is_exclusive else np.minimum(given.probs, 1 - given.probs))
    logits = convert_to_logits(given.probs, floor, is_exclusive=given.is_exclusive)
    return CalibrationData(logits, np.asarray(given.labels, dtype=np.int64), likelihood, given.groups), floor


def check_takes_labels(name: str, *, is_exclusive: bool) -> None:
    """Raise UsageError for several labels and a map of exclusive classes."""
    if not is_exclusive and not MAPS[name].takes_labels:
        choices = ", ".join(one for one, kind in MAPS.items() if kind.takes_labels)
        raise UsageError(
            f"map {name} needs mutually exclusive classes, but the data are multi-label",
            hint=f"choose one of {choices}",
        )


def with_logits(given: GivenPredictions, logits: NDArray) -> GivenPredictions:
    """Return predictions with the probabilities of class logits (N, C)."""
    likelihood = likelihood_of(len(given.classes), given.likelihood)
    return replace(given, probs=likelihood.class_probabilities(torch.from_numpy(logits), dim=1).numpy())


def apply_map(given: GivenPredictions, file: Header, calibration: CalibrationMap) -> GivenPredictions:
    """Return calibrated predictions. Raises DataError for other classes than those of the map."""
    classes = tuple(file.meta["classes"])
    is_same = len(classes) == len(given.classes) and given.is_exclusive == calibration.likelihood.is_exclusive
    if not is_same or (given.has_names and file.meta["has_names"] and classes != given.classes):
        raise DataError(
            f"{file.path} was fitted to the classes {', '.join(classes)}, but {given.path} has {', '.join(given.classes)}",
            code="wrong_classes",
            path=file.path,
        )
    return map_given(given, calibration, float(file.meta["floor"]))


def map_given(given: GivenPredictions, calibration: CalibrationMap, floor: float) -> GivenPredictions:
    """Return predictions through a map of the same classes."""
    given.check()
    logits = torch.from_numpy(convert_to_logits(given.probs, floor, is_exclusive=given.is_exclusive))
    return with_logits(given, calibration.class_logits(logits).numpy())


def table_of(given: GivenPredictions, name: str) -> TableBlock:
    """Return predictions as a table: the most probable class or the labels, the label if there is one, and probabilities."""
    probs, labels = given.probs, given.labels
    columns: dict[str, NDArray] = {"sample_id": np.arange(len(probs))}
    if given.is_exclusive:
        columns |= {"predicted": probs.argmax(axis=1), "probability": probs.max(axis=1)}
    else:
        columns["predicted"] = (probs >= THRESHOLD).astype(np.int64)
    if labels is not None:
        columns["label"] = np.asarray(labels)
    return TableBlock((given.name, given.path.name.partition(".")[0], name), {**columns, "probabilities": probs})


def write_map(
    run: Run,
    target: Path,
    given: GivenPredictions,
    chosen: FittedMap,
    metrics: Mapping[str, Any],
    *,
    floor: float,
    seed: int,
) -> str:
    """Publish a map, replacing an older one, and return its content digest."""
    is_artifact = given.header is not None
    digest = given.header.content_digest if given.header is not None else f"sha256:{file_sha256(given.path)}"
    provenance = build_provenance(
        target,
        command=run.line.words(),
        params={"map": metrics["map"], "seed": seed},
        algo_rev=_revisions.FIT_CALIBRATION,
        inputs=[Source("predictions", given.path, digest, is_artifact)],
        checkpoint=None,
        environment={**run.environment(), "seed": seed},
        seconds=0.0,
        warnings=[],
    )
    meta = {
        "map": chosen.name,
        "classes": list(given.classes),
        "has_names": given.has_names,
        "floor": floor,
        "metrics": dict(metrics),
        **name_to_record(given.likelihood),
    }
    return write_tensors(target, chosen.whole.tensors, kind=KIND, meta=meta, provenance=provenance, may_replace=True)


def read_map(path: Path) -> tuple[CalibrationMap, Header]:
    """Read a map that `write_map` wrote. Raises MissingInput or DataError as read_posterior does."""
    tensors, header = read_tensors(path, kind=KIND)
    try:
        likelihood = likelihood_of(len(header.meta["classes"]), read_recorded_name(header.meta))
        found = open_map(header.meta["map"], tensors, likelihood)
        found.probs(torch.zeros(1, likelihood.num_classes))
    except (KeyError, ValueError, RuntimeError) as error:
        message = f"{path} is damaged: {' '.join(str(error).split())[:120]}"
        raise DataError(message, code="damaged", hint=DAMAGED_HINT, path=path) from None
    return found, header


def is_map(path: Path) -> bool:
    """Return whether a file is a map that `write_map` wrote."""
    try:
        return read_header(path).kind == KIND
    except BnnError:
        return False
