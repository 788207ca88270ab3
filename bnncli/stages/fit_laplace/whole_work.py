"""The work of fit-laplace over other layers than the last."""

from __future__ import annotations

from typing import Any

from bnncli import registry
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.prior_precision import PriorSearch, search
from bnncli.options import FitLaplaceOptions
from bnncli.run.inputs import Split
from bnncli.run.network_splits import NetworkReader
from bnncli.run.produce_posterior import Fitted
from bnncli.run.session import Run
from bnncli.stages.fit_laplace.warnings import warn_of_jitter
from bnncli.stages.fit_laplace.work import fit_metrics
from bnncli.theta.prior import Prior

MOST_FULL = 2000  # parameters that full is taken for unasked


def fit(
    run: Run, options: FitLaplaceOptions, criterion: str, train: Split, val: Split | None, *, structures: list[str]
) -> Fitted:
    """The Gaussian with what is told of it."""
    reader = NetworkReader.of(run, options)
    with reader.recorded.visible():
        whole = reader.split(train, options.layers)
        held = None if val is None else reader.split(val, options.layers)
        weight_precision = float(options.prior_precision) if criterion == "number" else 1.0
        target = whole.target(Prior(weight_precision, options.own_bias_precision), run.device)
        target = target.with_choice(options.curvature_choice)
        structure = options.structure
        if structure == "auto":
            structure = "full" if whole.layout.num_params <= MOST_FULL else structures[-1]
        found: PriorSearch | None = None
        start = whole.start().to(run.device)
        common: dict[str, Any] = {
            "structure": structure,
            "center": options.own_center,
            "start": start,
            "progress": run.console,
        }
        if criterion == "number":
            fit = fit_gaussian(target, **common)
        else:
            held_out = None
            if criterion == "val" and held is not None:
                held_out = target.held_out(held.inputs, held.labels(run.device))
            stream = run.stream("fit-laplace/val")
            found = search(target, criterion=criterion, held_out=held_out, generator=stream, **common)
            fit = found.fit
        warn_of_jitter(run, fit.gaussian)
        metrics = fit_metrics(run, fit, found, criterion, whole, held)
    metrics |= {"center": options.own_center, "structure_nll": None, "layers": options.layers}
    if registry.has_attribute("network_curvature", structure, "metrics"):
        metrics |= registry.load_class("network_curvature", structure).metrics(fit.hessian)
    tensors, meta = fit.gaussian.to_tensors()
    meta |= {
        "method": "laplace",
        "center": options.own_center,
        "layers": options.layers,
        **fit.gaussian.require_prior().to_meta(),
        "criterion": criterion,
        "param_layout": fit.gaussian.layout.to_json(),
        "curve": [list(point) for point in found.curve] if found else None,
    }
    return Fitted(tensors, meta, metrics, train)
