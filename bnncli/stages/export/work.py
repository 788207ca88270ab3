"""The work of export: the head's tensors, the graph, what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.posteriors import DecisionFile
from bnncli.data.splits import Inputs
from bnncli.decisions.prediction_sets import SetRule
from bnncli.errors import UsageError
from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.export import graphs
from bnncli.export.network import WholeNetwork
from bnncli.export.parts import HeadParts, head_parts, thinned, with_combined_score, with_ood_score
from bnncli.export.source import source_of
from bnncli.export.steps import Values
from bnncli.integrators import Ready
from bnncli.lazy import torch
from bnncli.options.export import ExportOptions
from bnncli.session.inputs import Split
from bnncli.session.predictor import IntegratorChoice, Predictor
from bnncli.session.produce import Computed, Request
from bnncli.session.run import Run
from bnncli.stages.export import publishing
from bnncli.stages.export.decided import thresholds_of, with_rule
from bnncli.stages.export.inputs import GoesIn, features_in, inputs_in
from bnncli.stages.export.measures import eager, expected_outputs, losses, outputs_of, parity_of, thresholds, times_of
from bnncli.stages.export.report import summary

if TYPE_CHECKING:
    from torch import Tensor, nn

MEANINGS = {
    "probs": "class probabilities (batch, classes), which sum to one; of several labels an example, of each being there",
    "entropy": "of the probabilities, nats; summed over several labels",
    "mutual_information": "of class and weights, nats: the part of the entropy that is due to not knowing the weights",
    "ood_score": "higher is farther from the training data: {score} of bnncli evaluate, its sign turned",
    "set": "the conformal set: whether each class is in it",
}


@dataclass(frozen=True)
class _Model:
    """What is written: the head's steps and tensors, alone or behind the network.

    Attributes:
        rule: whose prediction sets come out; None for none.
    """

    parts: HeadParts
    head: nn.Module
    goes_in: GoesIn
    rule: SetRule | None

    @property
    def module(self) -> nn.Module:
        """Inputs to outputs."""
        trunk = self.goes_in.trunk
        return self.head if trunk is None else WholeNetwork(trunk, self.head).eval()


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
    _check_fits(predictor, split)
    goes_in = _goes_in(run, options, split)  # first, as it refuses what cannot be exported
    ready = predictor.ready(choice)
    kept = thinned(ready, options.draws, run.stream("export/draws"))
    model = _modelled(options, predictor, choice, goes_in, kept, rules)
    module = model.module
    made = _written(run, options, module, goes_in.first(2), goes_in.name)
    expected = expected_outputs(run, predictor, choice, split.stored[torch.from_numpy(goes_in.rows)], ready, kept)
    runs = {made.runtime: made.run, "torch": eager(module)}
    outputs = {name: outputs_of(run, one, goes_in, name) for name, one in runs.items()}
    own, parity = (
        outputs[made.runtime],
        parity_of(
            options, split, goes_in, outputs, expected.stored, _combined(options, predictor, split.stored[goes_in.rows])
        ),
    )
    metrics = {"parity": parity, **losses(split, goes_in.rows, expected, own, model.rule)}
    meta = {
        **_meta(options, predictor, choice, split),
        **_described(options, split, model, own),
        "decisions": {one.name: thresholds_of(one) for one in rules},
        "draws": expected.num_stored,
        "metrics": metrics,
    }
    times = {name: times_of(run, one, goes_in) for name, one in runs.items()}
    if options.format == "torch":
        return _computed(
            request, dict(model.head.named_buffers()), meta | {publishing.CODE: source_of(model.parts.steps)}, times
        )
    return _computed(request, made.content, meta, times)


def _check_fits(predictor: Predictor, split: Split) -> None:
    """Pass where the posterior is over the last layer of the run. Raises UsageError, DataError otherwise."""
    layout = predictor.posterior.layout
    if layout.head is None:
        raise UsageError(
            f"{predictor.path.stem} has its own hidden layers; export takes only posteriors over the last layer",
            code="unsupported_export",
        )
    split.check_fits(layout)


def _goes_in(run: Run, options: ExportOptions, split: Split) -> GoesIn:
    """Features, or the inputs of the network. Raises what inputs_in raises."""
    if options.head_only:
        return features_in(split)
    return inputs_in(run, split, trusts_code=options.trust_code, is_halved=options.dtype == "float16")


def _modelled(
    options: ExportOptions,
    predictor: Predictor,
    choice: IntegratorChoice,
    goes_in: GoesIn,
    kept: Ready,
    rules: Sequence[DecisionFile],
) -> _Model:
    """The integrator, with the draws that are kept, as steps and tensors; with the network where that is asked for."""
    layout, is_halved = predictor.posterior.layout, options.dtype == "float16"
    parts = head_parts(predictor.posterior.to("cpu"), choice.integrator, kept)
    if options.score == DEFAULT_SCORE and predictor.train.detector is not None:
        parts = with_combined_score(parts, predictor.train.detector)
    else:
        parts = with_ood_score(parts, str(options.score), layout, predictor.mean_theta.cpu())
    rule = next((one.rule for one in rules if isinstance(one.rule, SetRule)), None)
    parts = parts if rule is None else with_rule(parts, rule, layout.num_classes)
    head = parts.module(dtype=torch.float16 if is_halved else torch.float32)
    return _Model(parts, head, goes_in, rule)


def _combined(options: ExportOptions, predictor: Predictor, features: Tensor) -> Tensor | None:
    """The combined score (n,) of features, where that is asked for."""
    detector = predictor.train.detector if options.score == DEFAULT_SCORE else None
    return None if detector is None else detector.scores(features)


def _described(options: ExportOptions, split: Split, model: _Model, own: Values) -> dict[str, Any]:
    """What goes in, what comes out and by which steps, and from where on ood_score is unusual."""
    goes_in = model.goes_in.described(model.goes_in.first(2))
    return {
        **({"input": goes_in[0]} if len(goes_in) == 1 else {"inputs": goes_in}),
        "outputs": [{"name": name, "what": MEANINGS[name].format(score=options.score)} for name in own],
        "steps": [step.__name__ for step in model.parts.steps],
        "thresholds": thresholds(split, own["ood_score"]),
    }


def _computed(
    request: Request,
    content: bytes | Mapping[str, Tensor],
    meta: Mapping[str, Any],
    times: Mapping[str, Mapping[str, float | None]],
) -> Computed:
    """The file ready to be published; its size is known when it is."""
    told = {**meta["metrics"], "bytes": 0, "milliseconds": times}
    lines: list[str] = []

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        digest = publishing.write(request.target, content, meta=meta, provenance=provenance, may_replace=may_replace)
        told["bytes"] = request.target.stat().st_size
        lines.extend(summary(meta, told))
        return digest

    return Computed(publish, told, lines)


def _written(run: Run, options: ExportOptions, module: nn.Module, example: Inputs, name: str) -> graphs.ExportedModel:
    """The module in its format, with what runs it."""
    if options.format == "torch":
        return graphs.ExportedModel(b"", "torch", eager(module))
    run.console.poll("building the graph")
    if options.format == "pt2":
        return graphs.to_program(module, example, input_name=name)
    return graphs.to_onnx(module, example, input_name=name, threads=run.compute.threads)


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
