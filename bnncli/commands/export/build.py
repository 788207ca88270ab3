"""Build an export: tensors, graph, decision rules, and measurements of the file before it is published."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.atomic import publish_bytes, publish_together
from bnncli.artifacts.exports import KIND, write_export
from bnncli.artifacts.headers import Header
from bnncli.artifacts.outputs import check_side_output
from bnncli.artifacts.posteriors import DecisionFile, write_tensors
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import Inputs, InputSplit
from bnncli.errors import DataError, NumericError, UsageError
from bnncli.evaluation.decisions import AcceptanceRule, ClassRule, CostRule, OutlierRule, SetRule
from bnncli.evaluation.detectors import DEFAULT_SCORE
from bnncli.evaluation.recommendation import score_predictive
from bnncli.export import MARK
from bnncli.integrators import Prediction, Ready
from bnncli.lazy import torch
from bnncli.models.huggingface import use_plain_attention
from bnncli.names import FORMATS, percent
from bnncli.session.decisions import open_decisions
from bnncli.session.inputs import Split
from bnncli.session.network_splits import NetworkReader
from bnncli.session.predictor import IntegratorChoice, Predictor
from bnncli.session.produce import ComputationOutput, Request
from bnncli.session.run import Run
from bnncli.system.memory import bytes_text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.commands.export import ExportOptions
    from bnncli.export import graphs
    from bnncli.export.parts import HeadParts
    from bnncli.export.steps import Values


def check_suffix(out: str | None, form: str) -> None:
    """Raise UsageError where a file's name ends as those of another format do."""
    others = {suffix: name for name, suffix in FORMATS.items() if name != form}
    other = None if out is None else others.get(Path(out).suffix.lower())
    if other is not None:
        raise UsageError(
            f"\0out\0 {out} has the ending of \0format\0 {other}, but the format is {form}; add \0format\0 "
            f"{other} or use another name"
        )


def check_code_path(target: Path, *, force: bool) -> None:
    """Raise before any work where the module may not be written there."""
    if code_path(target) == target:
        raise UsageError("\0out\0: expected a tensor file such as head.safetensors; the module is written beside it")
    check_side_output(code_path(target), "\0out\0", "module", is_ours=_is_ours, force=force, others=[])


def _is_ours(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(len(MARK)) == MARK.encode()


CODE = "code"  # in what a file of tensors says of itself: the module that reads it


def restore_module(header: Header) -> None:
    """Write the module of a file of tensors again where it is gone."""
    if CODE in header.meta and not code_path(header.path).exists():
        publish_bytes(code_path(header.path), header.meta[CODE].encode(), may_replace=False)


def open_rules(run: Run, name: str, options: ExportOptions, *, posterior: str) -> list[DecisionFile]:
    """The rules of calibrate that were named, for the predictions of this name, <posterior>.<integrator>.

    Args:
        posterior: the content digest of the one that is exported.

    Raises:
        MissingInput, DataError: there is none that can be used, or it is of another posterior.
        UsageError: a file cannot have what it decides by, or two give sets.
    """
    found = open_decisions(run, name, only=list(dict.fromkeys(options.decide)))
    for one in found:
        if (why := _explain_refusal(one, str(options.score))) is not None:
            message = f"\0decide\0: rule {one.name!r} of {name} {why}"
            raise UsageError(message, code="unsupported_export")
        if one.header.meta["maker"].get("posterior") != posterior:
            message = f"{one.header.path} was calibrated with a posterior other than {name.partition('.')[0]}"
            raise DataError(message, code="wrong_posterior", path=one.header.path)
    if len(sets := [one.name for one in found if isinstance(one.rule, SetRule)]) > 1:
        raise UsageError(f"\0decide\0: a file has one output `set`, but {' and '.join(sets)} each give a set")
    return found


def _explain_refusal(decision: DecisionFile, score: str) -> str | None:
    """Return why a file cannot have what a rule decides by; None if it can."""
    rule = decision.rule
    if isinstance(rule, SetRule):
        return (
            None
            if rule.score.seed is None
            else "draws a random number for each example, which an exported file cannot do"
        )
    if isinstance(rule, OutlierRule):
        own = decision.header.meta["settings"]["score"]
        return None if own == score else f"uses {own}, but ood_score is {score}; add \0score\0 {own}"
    is_of_example = isinstance(rule, AcceptanceRule | ClassRule | CostRule)
    return None if is_of_example else "applies to whole batches, which an exported file does not see"


def compute(
    run: Run,
    options: ExportOptions,
    request: Request,
    predictor: Predictor,
    choice: IntegratorChoice,
    split: Split,
    rules: Sequence[DecisionFile] = (),
) -> ComputationOutput:
    """Make, check and time the file. Raises NumericError where it does not give what predict does.

    Args:
        rules: whose prediction sets and thresholds the file has.
    """
    from bnncli.export.parts import thin_to_budget
    from bnncli.export.source import source_of

    _check_fits(predictor, split)
    goes_in = _open_inputs(run, options, split)  # first, as it refuses what cannot be exported
    ready = predictor.ready(choice)
    kept = thin_to_budget(ready, options.draws, run.stream("export/draws"))
    model = _build_model(options, predictor, choice, goes_in, kept, rules)
    module = model.module
    made = _export_module(run, options, module, goes_in.first(2), goes_in.name)
    expected = compute_expected_outputs(
        run, predictor, choice, split.stored[torch.from_numpy(goes_in.rows)], ready, kept
    )
    runs = {made.runtime: made.run, "torch": wrap_eager(module)}
    outputs = {name: compute_outputs(run, one, goes_in, name) for name, one in runs.items()}
    own, parity = (
        outputs[made.runtime],
        check_parity(
            options,
            split,
            goes_in,
            outputs,
            expected.stored,
            _compute_combined_score(options, predictor, split.stored[goes_in.rows]),
        ),
    )
    metrics = {"parity": parity, **measure_losses(split, goes_in.rows, expected, own, model.rule)}
    meta = {
        **_meta(options, predictor, choice, split),
        **_describe_file(options, split, model, own),
        "decisions": {one.name: describe_decision(one) for one in rules},
        "draws": expected.num_stored,
        "metrics": metrics,
    }
    times = {name: measure_times(run, one, goes_in) for name, one in runs.items()}
    if options.format == "torch":
        return _prepare_publication(
            request, dict(model.head.named_buffers()), meta | {CODE: source_of(model.parts.steps)}, times
        )
    return _prepare_publication(request, made.content, meta, times)


def _check_fits(predictor: Predictor, split: Split) -> None:
    """Pass where the posterior is over the last layer of the run. Raises UsageError, DataError otherwise."""
    layout = predictor.posterior.layout
    if layout.head is None:
        raise UsageError(
            f"{predictor.path.stem} has its own hidden layers; export takes only posteriors over the last layer",
            code="unsupported_export",
        )
    split.check_fits(layout)


BATCH = 256


@dataclass(frozen=True)
class ModelInputs:
    """Inputs that a file takes.

    Attributes:
        name: of the input, where it has no name of its own. rows: (n,) of the split, those that are checked.
        trunk: from inputs to features; None where features go in.
        read: inputs (B, ...) of the examples at some of the positions among `rows`.
        preprocessing: what of it is inside, in words.
        split: whose examples they are; None for features.
    """

    name: str
    rows: np.ndarray
    trunk: nn.Module | None
    preprocessing: str
    stored: Tensor | None = None
    split: InputSplit | None = None
    is_raw: bool = False

    def batches(self, most: int | None = None, *, size: int = BATCH) -> Iterator[Inputs]:
        """Inputs (B, ...) of the rows in order, at most so many of them, B at once."""
        count = len(self.rows) if most is None else min(most, len(self.rows))
        if self.stored is not None:
            for start in range(0, count, size):
                yield self.stored[self.rows[start : min(start + size, count)]].float()
            return
        assert self.split is not None
        if not self.is_raw:
            for batch in self.split.take(np.arange(count)).batches(size):
                yield batch.inputs
            return
        dataset: Any = getattr(self.split.dataset, "opened", self.split.dataset)
        for start in range(0, count, size):
            raw = dataset.read(self.split.rows[start : min(start + size, count)])[0]
            tensor = torch.as_tensor(np.ascontiguousarray(raw) if isinstance(raw, np.ndarray) else raw)
            yield tensor.float() if tensor.is_floating_point() else tensor

    def first(self, count: int) -> Inputs:
        """So many inputs: the first rows, from the start again where there are fewer."""
        found = next(self.batches(count, size=count))
        if isinstance(found, dict):
            return {name: one[torch.arange(count) % len(one)] for name, one in found.items()}
        return found[torch.arange(count) % len(found)]

    def described(self, example: Inputs) -> list[dict[str, Any]]:
        """As files say it, one entry an input."""
        from bnncli.export.graphs import has_length

        named = example if isinstance(example, dict) else {self.name: example}
        has_names = isinstance(example, dict)
        return [
            {
                "name": name,
                "type": str(one.dtype).removeprefix("torch."),
                "shape": ["batch", *one.shape[1:-1], "sequence"]
                if has_names and has_length(one)
                else ["batch", *one.shape[1:]],
                "preprocessing": self.preprocessing,
            }
            for name, one in named.items()
        ]


def _open_inputs(run: Run, options: ExportOptions, split: Split) -> ModelInputs:
    """Features, or the inputs of the network. Raises what read_inputs raises."""
    if options.head_only:
        return read_features(split)
    return read_inputs(run, split, trusts_code=options.trust_code, is_halved=options.dtype == "float16")


def read_features(split: Split) -> ModelInputs:
    """Features of all rows."""
    from bnncli.export.graphs import FEATURES

    rows = np.arange(len(split.content.features))
    return ModelInputs(FEATURES, rows, None, "none: the file takes features", stored=split.stored)


MOST_ROWS = 2000  # of a split that a whole network is checked on: each is a pass, twice


def read_inputs(run: Run, split: Split, *, trusts_code: bool, is_halved: bool) -> ModelInputs:
    """Inputs of at most MOST_ROWS rows, evenly spaced, and the network that made their features, on the CPU.

    Raises:
        Untrusted, MissingInput, DataError: the network or the data cannot be had, or cannot be exported.
    """
    from bnncli.export.graphs import INPUTS
    from bnncli.export.network import FeatureNetwork, HalfPrecisionStorage

    header = split.content.header
    assert header is not None
    reader = NetworkReader(run, trusts_code)
    whole = reader.input_split(split, header)
    count = min(MOST_ROWS, len(whole))
    rows = np.arange(count) * len(whole) // count
    chosen, recorded = whole.take(rows), reader.recorded
    with recorded.visible():
        head = recorded.network.head(chosen)
        recorded.check_head(head)
        assert head is not None
        _check_padding(chosen)
        model = use_plain_attention(recorded.network.module.eval().requires_grad_(False).cpu())
    is_raw = _is_inside(chosen)
    trunk: nn.Module = FeatureNetwork(model, head, chosen.preprocess if is_raw else None).eval()
    trunk = HalfPrecisionStorage(trunk).eval() if is_halved else trunk
    words = _format_inside(chosen.preprocess) if is_raw else "outside: the file takes inputs as the network does"
    return ModelInputs(INPUTS, rows, trunk, words, split=chosen, is_raw=is_raw)


def _check_padding(split: InputSplit) -> None:
    """Pass where the network takes a batch as it is. Raises DataError where it sees each example without its padding."""
    if next(split.take(np.arange(1)).batches(1)).lengths is not None:
        raise DataError(
            "the network processes each example without its padding, which an exported file cannot",
            hint="export only the head: \0head_only\0",
            code="not_exportable",
        )


def _is_inside(split: InputSplit) -> bool:
    """Return whether stored inputs can go in: arrays that no image library has to decode or resize."""
    done, is_sized = split.preprocess, split.dataset.is_sized
    is_plain = done.transform is None and split.shift is None and split.items == "arrays"
    return is_plain and (is_sized or (done.resize is None and done.crop is None)) and not _is_named(split)


def _is_named(split: InputSplit) -> bool:
    """Return whether an example is several arrays by name."""
    dataset: Any = getattr(split.dataset, "opened", split.dataset)
    return isinstance(dataset.read(split.rows[:1])[0], Mapping)


def _format_inside(done: Preprocess) -> str:
    parts = ["uint8 to [0, 1], channels first"]
    parts += [f"mean {', '.join(map(str, done.mean))}"] if done.mean else []
    parts += [f"std {', '.join(map(str, done.std))}"] if done.std else []
    return f"inside: {'; '.join(parts)}"


@dataclass(frozen=True)
class _Model:
    """Steps and tensors to write: the head's, alone or behind the network.

    Attributes:
        rule: whose prediction sets come out; None for none.
    """

    parts: HeadParts
    head: nn.Module
    goes_in: ModelInputs
    rule: SetRule | None

    @property
    def module(self) -> nn.Module:
        """Inputs to outputs."""
        from bnncli.export.network import WholeNetwork

        trunk = self.goes_in.trunk
        return self.head if trunk is None else WholeNetwork(trunk, self.head).eval()


def _build_model(
    options: ExportOptions,
    predictor: Predictor,
    choice: IntegratorChoice,
    goes_in: ModelInputs,
    kept: Ready,
    rules: Sequence[DecisionFile],
) -> _Model:
    """The integrator, with the draws that are kept, as steps and tensors; with the network where that is asked for."""
    from bnncli.export.parts import add_combined_score, add_ood_score, head_parts

    layout, is_halved = predictor.posterior.layout, options.dtype == "float16"
    parts = head_parts(predictor.posterior.to("cpu"), choice.integrator, kept)
    if options.score == DEFAULT_SCORE and predictor.train.detector is not None:
        parts = add_combined_score(parts, predictor.train.detector)
    else:
        parts = add_ood_score(parts, str(options.score), layout, predictor.mean_theta.cpu())
    rule = next((one.rule for one in rules if isinstance(one.rule, SetRule)), None)
    parts = parts if rule is None else add_rule(parts, rule, layout.num_classes)
    head = parts.module(dtype=torch.float16 if is_halved else torch.float32)
    return _Model(parts, head, goes_in, rule)


def add_rule(parts: HeadParts, rule: SetRule, num_classes: int) -> HeadParts:
    """With the rule's sets."""
    from bnncli.export.parts import add_sets

    score, thresholds = rule.score, torch.from_numpy(np.asarray(rule.thresholds))
    if score.scheme == "lac":
        return add_sets(parts, thresholds, is_filled=rule.is_filled)
    beyond = torch.arange(1, num_classes + 1, dtype=torch.float64) - score.free_ranks
    return add_sets(parts, thresholds, score.penalty * beyond.clamp_min(0), is_filled=rule.is_filled)


def _export_module(
    run: Run, options: ExportOptions, module: nn.Module, example: Inputs, name: str
) -> graphs.ExportedModel:
    """The module in its format, with what runs it."""
    from bnncli.export import graphs

    if options.format == "torch":
        return graphs.ExportedModel(b"", "torch", wrap_eager(module))
    run.console.poll("building the graph")
    if options.format == "pt2":
        return graphs.export_program(module, example, input_name=name)
    return graphs.export_onnx(module, example, input_name=name, threads=run.compute.threads)


@dataclass(frozen=True)
class ExpectedOutputs:
    """Outputs of predict for the rows to check, from all draws and from those that are kept."""

    whole: Prediction
    stored: Prediction
    num_whole: int | None
    num_stored: int | None


def compute_expected_outputs(
    run: Run, predictor: Predictor, choice: IntegratorChoice, features: Tensor, ready: Ready, kept: Ready
) -> ExpectedOutputs:
    """Return what predict gives for features (n, D), from all draws and from those that are kept."""
    whole = predictor.predict(choice, features).prediction
    if kept is ready:
        return ExpectedOutputs(whole, whole, ready.num_draws, ready.num_draws)
    stored = kept.predict(
        predictor.posterior,
        features.to(run.device).float(),
        num_samples=kept.num_draws,
        generator=run.stream("predict/draws"),
        progress=run.console,
    )
    return ExpectedOutputs(whole, stored, ready.num_draws, kept.num_draws)


def wrap_eager(module: nn.Module) -> Callable[[Inputs], Values]:
    """The module as torch runs it."""

    def run(inputs: Inputs) -> Values:
        with torch.no_grad():
            outputs: Values = module(inputs)
        return outputs

    return run


def compute_outputs(run: Run, model: Callable[[Inputs], Values], goes_in: ModelInputs, name: str) -> Values:
    """Return the file's outputs for all rows to check."""
    task = run.console.task(f"check in {name}", len(goes_in.rows))
    found: dict[str, list[Tensor]] = {}
    for inputs in goes_in.batches():
        for output, values in model(inputs).items():
            found.setdefault(output, []).append(values)
        run.console.poll("checking the file")
        task.advance(len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs))
    return {output: torch.cat(values) for output, values in found.items()}


def check_parity(
    options: ExportOptions,
    split: Split,
    goes_in: ModelInputs,
    outputs: Mapping[str, Values],
    expected: Prediction,
    combined: Tensor | None,
) -> dict[str, Any]:
    """Return how far outputs are from those of predict. Raises NumericError where probabilities are too far.

    Args:
        combined: (n,) of the rows, where it is the score; its sign is turned in the file.
    """
    wanted = {"probs": expected.probs, "entropy": expected.entropy, "mutual_information": expected.mutual_info}
    wanted |= {"ood_score": None if combined is None else -combined}
    every = {
        runtime: {
            name: _find_largest(found[name] - values.cpu()) for name, values in wanted.items() if values is not None
        }
        for runtime, found in outputs.items()
    }
    worst = max(found["probs"] for found in every.values())
    if not worst <= options.own_tolerance:
        where = ", ".join(f"{found['probs']:.2g} in {runtime}" for runtime, found in every.items())
        raise NumericError(
            f"probabilities differ by up to {worst:.2g} from those of predict on {split.content.name} ({where}), "
            f"more than the tolerance of {options.own_tolerance:g}; nothing was written",
            hint="use a larger \0tolerance\0 if that is close enough",
            code="not_at_par",
        )
    return {
        "split": split.content.name,
        "rows": len(goes_in.rows),
        "tolerance": options.own_tolerance,
        "max_difference": {runtime: found["probs"] for runtime, found in every.items()},
        "outputs": every,
    }


def check_parity_of_probs(found: Tensor, expected: Tensor, tolerance: float, runtime: str) -> dict[str, Any]:
    """Return how far probabilities (N, C) of a file are from the expected ones. Raises NumericError where they are too far."""
    worst = _find_largest(found - expected)
    if not worst <= tolerance:
        raise NumericError(
            f"probabilities differ by up to {worst:.2g} from those of score ({runtime}), more than the tolerance of "
            f"{tolerance:g}; nothing was written",
            hint="use a larger \0tolerance\0 if that is close enough",
            code="not_at_par",
        )
    return {"rows": len(found), "tolerance": tolerance, "max_difference": worst, "runtime": runtime}


def _find_largest(differences: Tensor) -> float:
    return float(differences.abs().max()) if differences.numel() else 0.0


def _compute_combined_score(options: ExportOptions, predictor: Predictor, features: Tensor) -> Tensor | None:
    """The combined score (n,) of features, where that is asked for."""
    detector = predictor.train.detector if options.score == DEFAULT_SCORE else None
    return None if detector is None else detector.scores(features)


def measure_losses(
    split: Split, rows: np.ndarray, expected: ExpectedOutputs, own: Values, rule: SetRule | None
) -> dict[str, Any]:
    """Measure what fewer draws cost: their number, the NLL if there are labels, and how often sets are the same."""
    labels = None if split.content.labels is None else split.content.labels[rows]
    num_draws = {"stored": expected.num_stored, "predict": expected.num_whole}
    found: dict[str, Any] = {
        "draws": None if expected.num_whole is None else num_draws,
        "nll": None if labels is None or len(labels) == 0 else _compare_losses(expected.whole, own["probs"], labels),
    }
    return found if rule is None else {**found, "sets": measure_agreement(rule, expected.whole.probs.cpu(), own["set"])}


def _compare_losses(whole: Prediction, probs: Tensor, labels: Any) -> dict[str, float]:
    """NLL of predict and of the file, nats an example, and by how much the file's is larger."""
    of_predict = score_predictive("predict", whole.probs.cpu().numpy(), labels).nll
    of_export = score_predictive("export", probs.numpy(), labels).nll
    return {"predict": of_predict, "export": of_export, "loss": of_export - of_predict}


def measure_agreement(rule: SetRule, probs: Tensor, sets: Tensor) -> dict[str, Any]:
    """Return the share of checked rows whose set equals the rule's for the probabilities of predict, and mean sizes of both."""
    expected = rule.sets(probs.numpy())
    return {
        "same": float((expected == sets.numpy()).all(axis=1).mean()),
        "size": float(sets.sum(dim=1, dtype=torch.float64).mean()),
        "size_of_predict": float(expected.sum(axis=1).mean()),
    }


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


MEANINGS = {
    "probs": "class probabilities (batch, classes), which sum to one; of several labels an example, of each being there",
    "entropy": "of the probabilities, nats; summed over several labels",
    "mutual_information": "of class and weights, nats: the part of the entropy that is due to not knowing the weights",
    "ood_score": "higher is farther from the training data: {score} of bnncli evaluate, its sign turned",
    "set": "the conformal set: whether each class is in it",
}


def _describe_file(options: ExportOptions, split: Split, model: _Model, own: Values) -> dict[str, Any]:
    """Describe the inputs, outputs and steps of the file, and the threshold from which ood_score is unusual."""
    goes_in = model.goes_in.described(model.goes_in.first(2))
    return {
        **({"input": goes_in[0]} if len(goes_in) == 1 else {"inputs": goes_in}),
        "outputs": [{"name": name, "what": MEANINGS[name].format(score=options.score)} for name in own],
        "steps": [step.__name__ for step in model.parts.steps],
        "thresholds": compute_thresholds(split, own["ood_score"]),
    }


_SHARES = (0.95, 0.99)  # of the split that have at most the thresholds that the file names


def compute_thresholds(split: Split, scores: Tensor) -> dict[str, Any]:
    """The ood_score that shares of the split have at most."""
    quantiles = np.quantile(scores.double().numpy(), _SHARES, method="inverted_cdf")
    shares = {str(share): float(value) for share, value in zip(_SHARES, quantiles, strict=True)}
    return {"ood_score": {"split": split.content.name, "at_most": shares}}


def describe_decision(decision: DecisionFile) -> dict[str, Any]:
    """Return the decision rules for whoever runs the file: the output, its threshold, and the guarantee."""
    rule, settings = decision.rule, decision.header.meta["settings"]
    found: dict[str, Any] = {"kind": decision.kind, "confidence": settings["confidence"]}
    if isinstance(rule, SetRule):
        return {**found, "output": "set", "coverage": settings["coverage"]}
    if isinstance(rule, OutlierRule):
        above = -rule.threshold
        return {**found, "output": "ood_score", "outlier_above": above, "false_alarm": settings["false_alarm"]}
    if isinstance(rule, ClassRule):
        found |= {"output": "probs", "class": settings["class"], "class_index": rule.of_class}
        return {**found, "flag_from": rule.threshold, decision.kind: settings[decision.kind]}
    if isinstance(rule, CostRule):
        return {**found, "output": "probs", "decisions": list(rule.names), "costs": rule.costs.tolist()}
    assert isinstance(rule, AcceptanceRule)
    least = None if rule.most_doubt is None else 1 - rule.most_doubt
    return {**found, "output": "probs", "accept_largest_from": least, "risk": settings["risk"]}


SIZES = (1, 32, 1024)  # of batches that are timed
_SECONDS, _MOST_SECONDS, _MOST_REPEATS = 0.3, 20.0, 200  # of each measurement of time


def measure_times(run: Run, model: Callable[[Inputs], Values], goes_in: ModelInputs) -> dict[str, float | None]:
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


def _prepare_publication(
    request: Request,
    content: bytes | Mapping[str, Tensor],
    meta: Mapping[str, Any],
    times: Mapping[str, Mapping[str, float | None]],
) -> ComputationOutput:
    """The file ready to be published; its size is known when it is."""
    told = {**meta["metrics"], "bytes": 0, "milliseconds": times}
    lines: list[str] = []

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        digest = write(request.target, content, meta=meta, provenance=provenance, may_replace=may_replace)
        told["bytes"] = request.target.stat().st_size
        lines.extend(format_summary(meta, told))
        return digest

    return ComputationOutput(publish, told, lines)


def write(
    target: Path,
    content: bytes | Mapping[str, Tensor],
    *,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a graph, or tensors with their module, and return the content digest."""
    if isinstance(content, bytes):
        return write_export(target, content, meta=meta, provenance=provenance, may_replace=may_replace)
    with publish_together(lambda targets: None):
        digest = write_tensors(target, content, kind=KIND, meta=meta, provenance=provenance, may_replace=may_replace)
        publish_bytes(code_path(target), meta[CODE].encode(), may_replace=True)
    return digest


def code_path(target: Path) -> Path:
    """Return the path of the module that reads a file of tensors: beside it."""
    return target.with_suffix(".py")


def format_summary(meta: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    """Lines for people."""
    parity = metrics["parity"]
    goes_in = ", ".join(
        f"{one['name']} ({', '.join(map(str, one['shape']))}) {one['type']}"
        for one in meta.get("inputs") or [meta["input"]]
    )
    lines = [
        f"{meta['posterior']} ({meta['variant']}), {bytes_text(metrics['bytes'])}: {goes_in} -> "
        + ", ".join(output["name"] for output in meta["outputs"]),
        f"probabilities on {parity['split']} ({parity['rows']} rows) match predict to within "
        f"{_format_values(parity['max_difference'])}",
    ]
    draws, is_shared = metrics["draws"], meta["variant"].startswith("logit-mc")
    if draws is not None and (is_shared or draws["stored"] < draws["predict"]):
        shared = ", shared by all inputs" if is_shared else ""
        lines.append(f"draws: {draws['stored']} of predict's {draws['predict']}{shared}{_loss(metrics)}")
    if "sets" in metrics:
        sets = metrics["sets"]
        lines.append(
            f"sets of rule {_find_rule_name(meta, 'sets')}: {percent(sets['same'])} match predict; mean size "
            f"{sets['size']:.2f} ({sets['size_of_predict']:.2f} in predict)"
        )
    for name, rule in meta["decisions"].items():
        if rule["kind"] == "ood":
            lines.append(
                f"{name}: ood_score above {rule['outlier_above']:.6g} marks an outlier, with "
                f"{percent(rule['false_alarm'])} false alarms"
            )
        if "flag_from" in rule:
            least = rule["flag_from"]
            said = "nothing" if least is None else f"a probability of {rule['class']} of at least {least:.6g}"
            lines.append(f"{name}: flags {said}, with a {rule['kind']} of {percent(rule[rule['kind']])}")
        if "costs" in rule:
            lines.append(
                f"{name}: decides for the least of probs times the costs in the header: {', '.join(rule['decisions'])}"
            )
        if rule["kind"] == "risk":
            least = rule["accept_largest_from"]
            said = (
                "accepts nothing"
                if least is None
                else f"accepts predictions with a largest probability of at least {least:.6g}"
            )
            lines.append(f"{name}: {said}, with a risk of {percent(rule['risk'])}")
    if metrics["milliseconds"] is not None:
        sizes = " / ".join(f"{size:,}" for size in SIZES)
        each = "; ".join(f"{name} {_times(times)}" for name, times in metrics["milliseconds"].items())
        lines.append(f"time for {sizes} inputs: {each}")
    return lines


def _format_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.1e} ({name})" for name, value in values.items())


def _loss(metrics: Mapping[str, Any]) -> str:
    """Return what fewer draws lose, if there are labels."""
    nll = metrics["nll"]
    return "" if nll is None else f"; NLL {nll['export']:.4f}, {nll['predict']:.4f} with all ({nll['loss']:+.4f})"


def _find_rule_name(meta: Mapping[str, Any], kind: str) -> str:
    """The name of the rule of a kind."""
    return next(name for name, rule in meta["decisions"].items() if rule["kind"] == kind)


def _times(times: Mapping[str, float | None]) -> str:
    return " / ".join(_time(times[str(size)]) for size in SIZES)


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.2g} ms"
