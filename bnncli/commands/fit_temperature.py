"""fit-temperature: fit one number that divides all logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.errors import NumericError, UsageError
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.temperature import LARGEST, SMALLEST, LabelledLogits, TemperatureFit, fit_temperature
from bnncli.lazy import torch
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, option
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.point import Point
from bnncli.registry import has_attribute, names
from bnncli.session import revisions as _revisions
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import Split, open_posterior, posterior_source
from bnncli.session.out_of_fold import fit_on_meta, is_fitted_to, out_of_fold
from bnncli.session.predictions import find_named
from bnncli.session.predictor import TrainData, type_of
from bnncli.session.run import Result, Run
from bnncli.session.val_report import logits_on_val, require_labeled_val

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FitTemperatureOptions(CheckedOptions):
    """Options of fit-temperature."""

    base: str | None = option(
        None,
        "Posterior whose mean to scale, by name or file. Default: the network's last layer.",
        metavar="NAME|FILE",
        numeric=False,
    )


COMMAND = Command(
    "Scale the network's logits by one temperature, fitted on val.",
    "This is the plain calibration baseline: it divides the logits by the T that minimises the NLL on val. The "
    "confidence changes, but the predicted class does not. Writes posteriors/temperature.safetensors.",
    (FitTemperatureOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-temperature ckpt.pt",
        "bnncli fit-temperature ckpt.pt --base laplace --name laplace-temperature",
    ),
    section="Fit",
    place=10,
)


def execute(run: Run, options: FitTemperatureOptions) -> Result:
    """Fit and publish. The result's metrics have the temperature and the NLL before and after."""
    val = require_labeled_val(run, "a temperature is fitted")
    base_path, sources = find_scaled(run, options.base, val)
    request = posterior_request(
        run,
        "temperature",
        params={**options.params(), "base": base_path.stem if base_path else None},
        algo_rev=_revisions.FIT_TEMPERATURE,
        sources=sources,
        checkpoint=val.checkpoint,
        estimated_bytes=lambda: 16 * val.layout.num_params,
    )

    def fit() -> FitOutput:
        return fit_factor(run, val, base_path)

    return produce_posterior(run, request, fit, _report)


def find_scaled(run: Run, base: str | None, val: Split) -> tuple[Path | None, list[Source]]:
    """Return the file of the posterior whose mean is calibrated, None for the network, and all sources.

    Raises:
        MissingInput, UsageError: there is none, or it has no mean over the last layer.
    """
    if base is None:
        if val.content.head_weight is None:
            raise UsageError("this run has no network whose last layer could be scaled; give --base NAME")
        return None, [val.source]
    path = find_named(run, base, flag="--base", otherwise=run.suggest("fit-laplace", name=base))
    header, source = posterior_source(run, path, "base")
    _check_has_center(path, header)
    return path, [val.source, source]


def open_scaled(run: Run, val: Split, base_path: Path | None) -> tuple[Tensor, HeadLayout, Any, dict[str, str]]:
    """Return what is calibrated: theta (P,) of the network's head or the mean of the base, and its layout.

    Also return what gives its logits on val, out of fold if the base was fitted to val, and the metadata of the rows that
    the base was fitted to.
    """
    if base_path is None:
        return val.start(), val.layout, Point(val.start(), val.layout), {}
    base, header = open_posterior(base_path)
    theta, layout = base.center.double(), base.layout
    val.check_fits(layout)
    judged: Any = Point(theta, layout)
    if is_fitted_to(header, val):
        judged = out_of_fold(header, base.to(run.device), val, TrainData(run).target)
    return theta, layout, judged, fit_on_meta(header)


def _check_has_center(path: Path, header: Header) -> None:
    posterior_type, layers = type_of(header), header.meta.get("layers")
    if layers is not None:
        raise UsageError(
            f"--base: {path.stem} is over --layers {layers}, but a temperature divides only the last layer"
        )
    if not has_attribute("posteriors", posterior_type, "center"):
        having = [name for name in names("posteriors") if has_attribute("posteriors", name, "center")]
        raise UsageError(
            f"--base: {path.stem} is a {posterior_type} posterior, which has no mean to scale; types that have "
            f"one: {', '.join(having)}",
            code="wrong_type",
        )


_WHY_UNBOUNDED = {
    "separable": "the correct class has the largest logit in every val example, so a lower temperature is always better",
    "hopeless": "the logits predict the val labels so poorly that a higher temperature is always better",
}


def fit_factor(run: Run, val: Split, base_path: Path | None) -> FitOutput:
    """Divide the network's head, or the mean of the base, by the best temperature."""
    theta, layout, judged, told = open_scaled(run, val, base_path)
    labels = val.labels(run.device)
    logits = logits_on_val(run, judged, val)
    fit = fit_temperature(LabelledLogits(logits, labels, layout.likelihood), progress=run.console)
    if not bool(torch.isfinite(fit.nll_after).all()):
        raise NumericError(
            "the NLL on val is not finite", hint="the logits are not finite; find the damaged file with bnncli verify"
        )
    metrics = _metrics(fit, base_path, val.groups)
    if fit.temperature in (SMALLEST, LARGEST):
        why = _WHY_UNBOUNDED.get(fit.unbounded or "", "the best one on val is outside that range")
        run.console.warn(f"the temperature {fit.temperature:g} is at the end of the search range: {why}")
    tensors, meta = Point(theta / fit.temperature, layout).to_tensors()
    tensors |= {"temperature": torch.tensor([fit.temperature], dtype=torch.float64)}
    meta |= {"method": "temperature", "base": metrics["base"], "param_layout": layout.to_json(), **told}
    return FitOutput(tensors, meta, metrics, val)


def _metrics(fit: TemperatureFit, base_path: Path | None, groups: RowGroups | None) -> dict[str, Any]:
    return {
        "temperature": fit.temperature,
        "temperature_at_bound": fit.temperature in (SMALLEST, LARGEST),
        "unbounded": fit.unbounded,
        "base": base_path.stem if base_path else None,
        "num_examples": len(fit.nll_after),
        "val_nll_before": _mean(fit.nll_before, groups),
        "val_nll_after": _mean(fit.nll_after, groups),
        "val_nll_change": _mean(fit.nll_after - fit.nll_before, groups),
    }


def _mean(losses: Tensor, groups: RowGroups | None) -> dict[str, float | None]:
    """Return the mean of (N,) values and its standard error; None as the error of one example, or group."""
    if groups is not None:
        losses = torch.from_numpy(groups.linearized(losses.double().cpu().numpy()))
    error = float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return {"value": float(losses.mean()), "standard_error": error}


def _report(meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]

    def said(name: str, form: str) -> str:
        value, error = metrics[name]["value"], metrics[name]["standard_error"]
        return f"{value:{form}}" + ("" if error is None else f" +- {error:.4f}")

    lines = [
        f"temperature {metrics['temperature']:.4g}, fitted on {metrics['num_examples']} val examples",
        f"val NLL {said('val_nll_before', '.4f')} before, {said('val_nll_after', '.4f')} after; "
        f"change {said('val_nll_change', '+.4f')}",
    ]
    return Report(metrics, lines)
