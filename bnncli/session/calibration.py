"""Fit calibration maps with cross-validation, and report them: for fit-calibration, and for predictions in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.evaluation.calibration_maps import (
    MAPS,
    CalibrationData,
    FittedMap,
    Temperature,
    fit_map,
    is_tried,
    paired_gain,
)
from bnncli.inference.prior_variants import stratified_folds
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_FOLDS = 5
FEWEST_ROWS = 10


@dataclass(frozen=True)
class TriedMaps:
    """Maps fitted to the same rows, temperature among them.

    Attributes:
        folds: (N,) uint8, the fold that left out each row.
        left_out: names of the maps that would take too long.
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
        NumericError: a fit did not converge.
    """
    num_rows, likelihood = data.logits.shape[0], data.likelihood
    fits = [one for one, kind in MAPS.items() if kind.takes_labels or likelihood.is_exclusive]
    tried = [one for one in fits if is_tried(one, num_rows, likelihood)]
    names = tried if name is None else [Temperature.name, *([name] if name != Temperature.name else [])]
    folds = stratified_folds(torch.from_numpy(data.labels), min(NUM_FOLDS, num_rows), generator).numpy()
    fitted = [fit_map(one, data, folds, progress=progress) for one in names]
    return TriedMaps(fitted, folds, [] if name else [one for one in fits if one not in tried])


def describe_maps(found: TriedMaps, chosen: FittedMap, why: str | None, data: CalibrationData) -> dict[str, Any]:
    """Return the numbers of the maps: the chosen one, why it was chosen, and the out-of-fold scores of each."""
    from bnncli.evaluation.recommendation import score_predictive

    plain = found.named(Temperature.name)
    entries = []
    for one in found.fitted:
        probs = data.likelihood.class_probabilities(torch.from_numpy(one.logits), dim=1).float().numpy()
        gain, error = paired_gain(plain.losses, one.losses)
        entries.append(
            {
                "map": one.name,
                **score_predictive(one.name, probs, data.labels, losses=one.losses).to_json(),
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
    shown = [f"{one['map']} {one['nll']:.4f}, {percent(one['ece'])}{_gain(one['gain'])}" for one in ordered]
    lines.append(f"NLL and ECE in {metrics['num_folds']} folds (gain over temperature): {'; '.join(shown)}")
    if metrics["left_out"]:
        lines.append(f"not tried, as they would take long: {', '.join(metrics['left_out'])} (\0map\0 fits one)")
    return lines


def _gain(gain: Mapping[str, float] | None) -> str:
    return "" if gain is None else f" ({gain['value']:+.4f} +- {gain['standard_error']:.4f})"
