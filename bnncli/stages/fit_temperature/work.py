"""The work of fit-temperature: the temperature, and the NLL of val before and after."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import NumericError
from bnncli.inference.temperature import LARGEST, SMALLEST, LabelledLogits, TemperatureFit, fit_temperature
from bnncli.lazy import torch
from bnncli.posteriors.point import Point
from bnncli.session.inputs import Split, open_posterior
from bnncli.session.out_of_fold import fit_on_meta, knows, out_of_fold
from bnncli.session.posteriors import Fitted
from bnncli.session.predictor import TrainData
from bnncli.session.run import Run
from bnncli.session.val_report import logits_on_val

if TYPE_CHECKING:
    from torch import Tensor

_WHY_UNBOUNDED = {
    "separable": "the correct class has the largest logit in every val example, so a lower temperature is always better",
    "hopeless": "the logits predict the val labels so poorly that a higher temperature is always better",
}


def fit(run: Run, val: Split, base_path: Path | None) -> Fitted:
    """The network, or the mean of the base, divided by the best temperature."""
    theta, layout, told = val.start(), val.layout, {}
    judged: Any = Point(theta, layout)
    if base_path is not None:
        base, header = open_posterior(base_path)
        theta, layout, told = base.center.double(), base.layout, fit_on_meta(header)
        val.check_fits(layout)
        judged = Point(theta, layout)
        if knows(header, val):
            judged = out_of_fold(header, base.to(run.device), val, TrainData(run).target)
    labels = val.labels(run.device)
    logits = logits_on_val(run, judged, val)
    fit = fit_temperature(LabelledLogits(logits, labels, layout.likelihood), progress=run.console)
    if not bool(torch.isfinite(fit.nll_after).all()):
        raise NumericError(
            "the NLL on val is not finite", hint="the logits are not finite; find the damaged file with bnncli verify"
        )
    metrics = _metrics(fit, base_path)
    if fit.temperature in (SMALLEST, LARGEST):
        why = _WHY_UNBOUNDED.get(fit.unbounded or "", "the best one on val is outside that range")
        run.console.warn(f"the temperature {fit.temperature:g} is at the end of the search range: {why}")
    tensors, meta = Point(theta / fit.temperature, layout).to_tensors()
    tensors |= {"temperature": torch.tensor([fit.temperature], dtype=torch.float64)}
    meta |= {"method": "temperature", "base": metrics["base"], "param_layout": layout.to_json(), **told}
    return Fitted(tensors, meta, metrics, val)


def _metrics(fit: TemperatureFit, base_path: Path | None) -> dict[str, Any]:
    return {
        "temperature": fit.temperature,
        "temperature_at_bound": fit.temperature in (SMALLEST, LARGEST),
        "unbounded": fit.unbounded,
        "base": base_path.stem if base_path else None,
        "num_examples": len(fit.nll_after),
        "val_nll_before": _mean(fit.nll_before),
        "val_nll_after": _mean(fit.nll_after),
        "val_nll_change": _mean(fit.nll_after - fit.nll_before),
    }


def _mean(losses: Tensor) -> dict[str, float | None]:
    """The mean of (N,) and its standard error; None for one example."""
    error = float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return {"value": float(losses.mean()), "standard_error": error}
