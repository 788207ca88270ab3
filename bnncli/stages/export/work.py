"""The work of export: the head's tensors, the graph, the check against predict, the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bnncli.decisions.prediction_sets import SetRule
from bnncli.errors import NumericError, UsageError
from bnncli.evaluation.excess import score
from bnncli.exported import graphs
from bnncli.exported.network import WholeNetwork
from bnncli.exported.parts import head_parts, with_ood_score
from bnncli.exported.source import source_of
from bnncli.exported.steps import Values
from bnncli.exported.thinning import thinned
from bnncli.integrators import Prediction, Ready
from bnncli.options import ExportOptions
from bnncli.run.inputs import Split
from bnncli.run.integrator_choice import IntegratorChoice
from bnncli.run.predictor import Predictor
from bnncli.run.produce import Computed, Request
from bnncli.run.session import Run
from bnncli.stages.export import publishing
from bnncli.stages.export.decided import agreement, thresholds_of, with_rule
from bnncli.stages.export.inputs import GoesIn, features_in, inputs_in
from bnncli.stages.export.report import SIZES, summary
from bnncli.storage.decisions import DecisionFile

MEANINGS = {
    "probs": "class probabilities (batch, classes), which sum to one; of several labels an example, of each being there",
    "entropy": "of the probabilities, nats; summed over several labels",
    "mutual_information": "of class and weights, nats: the part of the entropy that is due to not knowing the weights",
    "ood_score": "higher is farther from the training data: {score} of bnncli evaluate, its sign turned",
    "set": "the conformal set: whether each class is in it",
}
_SHARES = (0.95, 0.99)  # of the split that have at most the thresholds that the file names
_SECONDS, _MOST_SECONDS, _MOST_REPEATS = 0.3, 20.0, 200  # of each measurement of time


@dataclass(frozen=True)
class _Outcome:
    """What predict and its thinned draws give for the rows that are checked, and how many draws there are of both."""

    whole: Prediction
    stored: Prediction
    num_whole: int | None
    num_stored: int | None


def compute(
    run: Run,
    options: ExportOptions,
    request: Request,
    predictor: Predictor,
    choice: IntegratorChoice,
    split: Split,
    rules: Sequence[DecisionFile] = (),
) -> Computed:
    """Make, check and time the file. Raises NumericError where it does not give what predict does.

    Args:
        rules: whose prediction sets and thresholds the file has.
    """
    layout = predictor.posterior.layout
    if layout.head is None:
        raise UsageError(
            f"{predictor.path.stem} has hidden layers of its own; export takes posteriors over the last layer",
            code="unsupported_export",
        )
    split.check_fits(layout)
    ready = predictor.ready(choice)
    kept = thinned(ready, options.draws, run.stream("export/draws"))
    parts = head_parts(predictor.posterior.to("cpu"), choice.integrator, kept)
    parts = with_ood_score(parts, options.score, layout, predictor.mean_theta.cpu())
    set_rule = next((one.rule for one in rules if isinstance(one.rule, SetRule)), None)
    parts = parts if set_rule is None else with_rule(parts, set_rule, layout.num_classes)
    is_halved = options.dtype == "float16"
    head = parts.module(dtype=torch.float16 if is_halved else torch.float32)
    goes_in = (
        features_in(split)
        if options.head_only
        else inputs_in(run, split, trusts_code=options.trust_code, is_halved=is_halved)
    )
    module: nn.Module = head if goes_in.trunk is None else WholeNetwork(goes_in.trunk, head).eval()
    found = _outcome(run, predictor, choice, split.stored[torch.from_numpy(goes_in.rows)], ready, kept)
    example = goes_in.first(2)
    made = _written(run, options, module, example, goes_in.name)
    runs = {made.runtime: made.run, "torch": _eager(module)}
    outputs = {name: _outputs(run, one, goes_in, name) for name, one in runs.items()}
    parity = _parity(options, split, goes_in, outputs, found.stored)
    labels = None if split.content.labels is None else split.content.labels[goes_in.rows]
    own = outputs[made.runtime]
    metrics: dict[str, Any] = {
        "parity": parity,
        "draws": None if found.num_whole is None else {"stored": found.num_stored, "predict": found.num_whole},
        "nll": None if labels is None or len(labels) == 0 else _losses(found.whole, own["probs"], labels),
    }
    if set_rule is not None:
        metrics["sets"] = agreement(set_rule, found.whole.probs.cpu(), own["set"])
    meta = _meta(options, predictor, choice, split) | {
        "input": goes_in.described(example),
        "outputs": [{"name": name, "what": MEANINGS[name].format(score=options.score)} for name in own],
        "steps": [step.__name__ for step in parts.steps],
        "thresholds": _thresholds(split, own["ood_score"]),
        "decisions": {one.name: thresholds_of(one) for one in rules},
        "draws": found.num_stored,
        "metrics": metrics,
    }
    told = {**metrics, "bytes": 0, "milliseconds": {name: _times(run, one, goes_in) for name, one in runs.items()}}
    lines: list[str] = []
    content: bytes | Mapping[str, Tensor] = made.content
    if options.format == "torch":
        meta[publishing.CODE] = source_of(parts.steps)
        content = dict(head.named_buffers())

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        digest = publishing.write(request.target, content, meta=meta, provenance=provenance, may_replace=may_replace)
        told["bytes"] = request.target.stat().st_size
        lines.extend(summary(meta, told))
        return digest

    return Computed(publish, told, lines)


def _written(run: Run, options: ExportOptions, module: nn.Module, example: Tensor, name: str) -> graphs.ExportedModel:
    """The module in its format, with what runs it."""
    if options.format == "torch":
        return graphs.ExportedModel(b"", "torch", _eager(module))
    run.console.poll("making the graph")
    if options.format == "pt2":
        return graphs.to_program(module, example, input_name=name)
    return graphs.to_onnx(module, example, input_name=name, threads=run.compute.threads)


def _eager(module: nn.Module) -> Callable[[Tensor], Values]:
    def run(inputs: Tensor) -> Values:
        with torch.no_grad():
            outputs: Values = module(inputs)
        return outputs

    return run


def _outcome(
    run: Run, predictor: Predictor, choice: IntegratorChoice, features: Tensor, ready: Ready, kept: Ready
) -> _Outcome:
    whole = predictor.predict(choice, features).prediction
    if kept is ready:
        return _Outcome(whole, whole, ready.num_draws, ready.num_draws)
    stored = kept.predict(
        predictor.posterior,
        features.to(run.device).float(),
        num_samples=kept.num_draws,
        generator=run.stream("predict/draws"),
        progress=run.console,
    )
    return _Outcome(whole, stored, ready.num_draws, kept.num_draws)


def _outputs(run: Run, model: Callable[[Tensor], Values], goes_in: GoesIn, name: str) -> Values:
    """What the file gives for all rows that are checked."""
    task = run.console.task(f"check in {name}", len(goes_in.rows))
    found: dict[str, list[Tensor]] = {}
    for inputs in goes_in.batches():
        for output, values in model(inputs).items():
            found.setdefault(output, []).append(values)
        run.console.poll("checking the file")
        task.advance(len(inputs))
    return {output: torch.cat(values) for output, values in found.items()}


def _parity(
    options: ExportOptions, split: Split, goes_in: GoesIn, outputs: Mapping[str, Values], expected: Prediction
) -> dict[str, Any]:
    """How far outputs are from those of predict. Raises NumericError where probabilities are too far."""
    wanted = {"probs": expected.probs, "entropy": expected.entropy, "mutual_information": expected.mutual_info}
    every = {
        runtime: {name: _largest(found[name] - values.cpu()) for name, values in wanted.items() if values is not None}
        for runtime, found in outputs.items()
    }
    worst = max(found["probs"] for found in every.values())
    if not worst <= options.own_tolerance:
        where = ", ".join(f"{found['probs']:.2g} in {runtime}" for runtime, found in every.items())
        raise NumericError(
            f"probabilities are up to {worst:.2g} from those of predict on {split.content.name} ({where}), at most "
            f"{options.own_tolerance:g} was asked for; nothing was written",
            hint="give a larger \0tolerance\0 where that is near enough",
            code="not_at_par",
        )
    return {
        "split": split.content.name,
        "rows": len(goes_in.rows),
        "tolerance": options.own_tolerance,
        "max_difference": {runtime: found["probs"] for runtime, found in every.items()},
        "outputs": every,
    }


def _largest(differences: Tensor) -> float:
    return float(differences.abs().max()) if differences.numel() else 0.0


def _losses(whole: Prediction, probs: Tensor, labels: Any) -> dict[str, float]:
    """NLL of predict and of the file, nats an example, and by how much the file's is larger."""
    of_predict = score("predict", whole.probs.cpu().numpy(), labels).nll
    of_export = score("export", probs.numpy(), labels).nll
    return {"predict": of_predict, "export": of_export, "loss": of_export - of_predict}


def _thresholds(split: Split, scores: Tensor) -> dict[str, Any]:
    """The ood_score that shares of the split have at most."""
    quantiles = np.quantile(scores.double().numpy(), _SHARES, method="inverted_cdf")
    shares = {str(share): float(value) for share, value in zip(_SHARES, quantiles, strict=True)}
    return {"ood_score": {"split": split.content.name, "at_most": shares}}


def _meta(options: ExportOptions, predictor: Predictor, choice: IntegratorChoice, split: Split) -> dict[str, Any]:
    return {
        "posterior": predictor.path.stem,
        "method": predictor.header.meta.get("method"),
        "integrator": choice.name,
        "variant": choice.variant,
        "settings": choice.settings,
        "format": options.format,
        "dtype": options.dtype,
        "score": options.score,
        "decide": options.decide,
        "classes": list(split.content.classes),
    }


def _times(run: Run, model: Callable[[Tensor], Values], goes_in: GoesIn) -> dict[str, float | None]:
    """Median milliseconds of a batch of each of the sizes; None where one would take too long."""
    found: dict[str, float | None] = {}
    per_input = 0.0
    for size in SIZES:
        if per_input * size > _MOST_SECONDS:
            found[str(size)] = None
            continue
        inputs = goes_in.first(size)
        model(inputs)
        taken: list[float] = []
        while len(taken) < 3 or (sum(taken) < _SECONDS and len(taken) < _MOST_REPEATS):
            start = time.perf_counter()
            model(inputs)
            taken.append(time.perf_counter() - start)
            run.console.poll("measuring times")
        per_input = statistics.median(taken) / size
        found[str(size)] = round(1e3 * statistics.median(taken), 4)
    return found
