"""fit-calibration: fit a calibration map to the network's logits on val."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.commands.fit_temperature import FitTemperatureOptions, find_scaled, open_scaled
from bnncli.commands.fit_temperature import execute as fit_temperature
from bnncli.errors import NumericError, UsageError
from bnncli.evaluation.calibration_maps import CalibrationData, Temperature, choose_map
from bnncli.evaluation.temperature import LabelledLogits
from bnncli.lazy import torch
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.options.shared import list_maps
from bnncli.posteriors.calibrated import Calibrated
from bnncli.session import revisions as _revisions
from bnncli.session.calibration import (
    FEWEST_ROWS,
    NUM_FOLDS,
    check_takes_labels,
    describe_maps,
    fit_maps,
    summarize_maps,
)
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import BOTH, Split
from bnncli.session.run import Result, Run
from bnncli.session.val_report import (
    logits_on_val,
    measure_probs_on_val,
    require_labeled_val,
    val_lines,
    warn_if_worse,
)


@dataclass(frozen=True)
class FitCalibrationOptions(CheckedOptions):
    """Options of fit-calibration."""

    map: str | None = option(
        None,
        "Map to fit. Default: the one with the lowest out-of-fold NLL if it beats temperature by more than the "
        "paired standard error, else temperature.",
        choices=list_maps,
    )
    base: str | None = option(
        None,
        "Posterior whose mean to calibrate, by name or file. Default: the network's last layer.",
        metavar="NAME|FILE",
        numeric=False,
    )


COMMAND = Command(
    "Fit a calibration map to the network's logits on val.",
    "Maps range from one temperature over a scale or matrix of the logits to an increasing function of each class's "
    "probability. 5-fold cross-validation on val scores each map, and chooses its prior precision where it has one. "
    "Maps other than temperature may change the predicted class. Writes posteriors/<map>.safetensors, or "
    "posteriors/calibration.safetensors without --map.",
    (FitCalibrationOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-calibration ckpt.pt",
        "bnncli fit-calibration ckpt.pt --map isotonic",
        "bnncli fit-calibration ckpt.pt --map vector --base laplace --name laplace-vector",
    ),
    section="Fit",
    place=15,
)
NAME = "calibration"


def execute(run: Run, options: FitCalibrationOptions) -> Result:
    """Fit and publish. The result's metrics have the map, and the scores of every map that was tried, out of fold."""
    if options.map == Temperature.name:
        return fit_temperature(run, FitTemperatureOptions(options.base))
    val = require_labeled_val(run, "a calibration map is fitted")
    if len(val.content.features) < FEWEST_ROWS:
        raise UsageError(
            f"val has only {len(val.content.features)} rows; a calibration map needs at least {FEWEST_ROWS}"
        )
    base_path, sources = find_scaled(run, options.base, val)
    if options.map is not None:
        check_takes_labels(options.map, is_exclusive=val.layout.likelihood.is_exclusive)
    run.require_device()
    request = posterior_request(
        run,
        options.map or NAME,
        params={**options.params(), "base": base_path.stem if base_path else None, "seed": run.compute.seed},
        algo_rev=_revisions.FIT_CALIBRATION,
        sources=sources,
        checkpoint=val.checkpoint,
        estimated_bytes=lambda: 16 * val.layout.num_params + (1 << 20),
    )

    def fit() -> FitOutput:
        return fit_calibration(run, options, val, base_path)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request.target, meta))


def fit_calibration(run: Run, options: FitCalibrationOptions, val: Split, base_path: Path | None) -> FitOutput:
    """Fit the maps and return the chosen one, with those of the folds if the logits on val are not out of fold themselves."""
    theta, layout, judged, told = open_scaled(run, val, base_path)
    logits = logits_on_val(run, judged, val)
    if not bool(torch.isfinite(logits).all()):
        raise NumericError("the logits on val are not finite", hint="find the damaged file with bnncli verify")
    labels = val.labels(run.device)
    data = CalibrationData.of(LabelledLogits(logits, labels, layout.likelihood), groups=val.groups)
    found = fit_maps(data, options.map, run.stream("fit-calibration/folds"), progress=run.console)
    chosen, why = (found.named(options.map), None) if options.map else choose_map(found.fitted, groups=data.groups)
    probs = data.likelihood.class_probabilities(torch.from_numpy(chosen.logits), dim=1).float().numpy()
    metrics = {
        **describe_maps(found, chosen, why, data),
        "base": base_path.stem if base_path else None,
        **measure_probs_on_val(
            run, probs, val, method=NAME, integrator="plug-in", num_draws=None, losses=chosen.losses
        ),
    }
    tensors, meta = Calibrated(theta, layout, chosen.whole).to_tensors()
    meta |= {"method": NAME, "base": metrics["base"], "param_layout": layout.to_json(), "fit_on": BOTH}
    if not told:
        tensors["folds.rows"] = torch.from_numpy(found.folds)
        for number, one in enumerate(chosen.folds):
            tensors |= {f"folds.{number}.{name}": tensor for name, tensor in one.tensors.items()}
        meta["num_folds"] = NUM_FOLDS
    return FitOutput(tensors, meta, metrics, val)


def _report(run: Run, path: Path, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    warn_if_worse(run, path, metrics, method=NAME)
    return Report(metrics, [*summarize_maps(metrics, "val examples"), *val_lines(metrics, where=" (out of fold)")])
