"""fit-temperature: a val split in, the network's last layer divided by a temperature out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnncli.artifacts.headers import Header
from bnncli.errors import UsageError
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.fit_temperature import FitTemperatureOptions
from bnncli.registry import has_attribute, names
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import posterior_source
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior
from bnncli.session.predictions import find_named
from bnncli.session.predictor import type_of
from bnncli.session.run import Result, Run
from bnncli.session.val_report import require_labeled_val

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


def run(run: Run, options: FitTemperatureOptions) -> Result:
    """Fit and publish; the result's metrics have the temperature and the NLL before and after."""
    val = require_labeled_val(run, "a temperature is fitted")
    sources, base_path = [val.source], None
    if options.base is not None:
        base_path = find_named(
            run, options.base, flag="--base", otherwise=run.suggest("fit-laplace", name=options.base)
        )
        header, source = posterior_source(run, base_path, "base")
        _check_has_center(base_path, header)
        sources.append(source)
    elif val.content.head_weight is None:
        raise UsageError("this run has no network whose last layer could be scaled; give --base NAME")
    request = posterior_request(
        run,
        "temperature",
        params={**options.params(), "base": base_path.stem if base_path else None},
        algo_rev=_revisions.FIT_TEMPERATURE,
        sources=sources,
        checkpoint=val.checkpoint,
        estimated_bytes=lambda: 16 * val.layout.num_params,
    )

    def fit() -> Fitted:
        from bnncli.stages.fit_temperature import work

        return work.fit(run, val, base_path)

    return produce_posterior(run, request, fit, _report)


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
