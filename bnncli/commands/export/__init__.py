"""export: from a posterior over the last layer to one file that predicts without bnncli."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.exports import KIND
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.provenance import Source
from bnncli.errors import MissingInput, UsageError
from bnncli.evaluation.detectors import DEFAULT_SCORE, default_score
from bnncli.names import FORMATS
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, declare_option_group, option
from bnncli.options.predict import PredictOptions
from bnncli.options.shared import NO_NETWORK
from bnncli.session import revisions as _revisions
from bnncli.session.calibration import is_map
from bnncli.session.inputs import Split, load_split, posterior_source
from bnncli.session.network_splits import network_sources
from bnncli.session.predictions import find_named
from bnncli.session.predictor import (
    IntegratorChoice,
    Predictor,
    RequestedIntegrators,
    TrainData,
    count_stored_draws,
    type_of,
)
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.recommendation import open_recommendation
from bnncli.session.run import Result, Run

EXPORTED_SCORES = (
    "combined",
    "max_prob",
    "entropy",
    "mutual_info",
    "energy",
    "max_logit",
)  # detectors that need nothing but the head
DEFAULT_DRAWS = 100
TOLERANCES = {"float32": 1e-5, "float16": 1e-2}  # of probabilities
STEEP = {"isotonic": 1e-3, "histogram": 1e-3}  # of calibration maps that may rise steeply between two examples


@dataclass(frozen=True)
class ExportOptions(CheckedOptions):
    """Options of export, `settings` being those that integrators declare."""

    posterior: str | None = option(
        None,
        "Posterior over the last layer, by name or file. Default: auto's recommendation.",
        metavar="NAME|FILE",
        numeric=False,
        group="What to export",
    )
    integrator: str | None = option(
        None,
        "Integrator; mc stores draws, the others give small files that reproduce predict. Default: the one "
        "predict uses.",
        family="integrators",
        numeric=False,
        group="What to export",
    )
    settings: dict[str, Any] = declare_option_group("integrators", numeric=False)
    format: str = option(
        "onnx",
        "File format: onnx (for onnxruntime), pt2 (torch.export), or torch (safetensors with a Python module, "
        "head only).",
        choices=tuple(FORMATS),
        group="Output",
    )
    head_only: bool = option(
        False, "Export only the head, which takes features instead of inputs.", group="What to export"
    )
    draws: int = option(
        DEFAULT_DRAWS,
        "Maximum number of draws to store. The summary reports the loss in NLL.",
        minimum=1,
        group="What to export",
    )
    dtype: str = option(
        "float32", "Storage type. Computation uses float32.", choices=tuple(TOLERANCES), group="Output", is_rare=True
    )
    score: str | None = option(
        None,
        "Score to export as the output ood_score; higher means farther from the training data. Default: "
        "combined, else mutual_info or max_prob.",
        choices=EXPORTED_SCORES,
        group="What to export",
        is_rare=True,
    )
    decide: list[str] = option(
        [],
        "Store this calibrated rule in the file (rule names such as sets). Randomised aps and raps rules are refused.",
        metavar="NAME",
        group="What to export",
    )
    tolerance: float | None = option(
        None,
        "Refuse to publish if a probability differs from predict's by more than this value. Default: 1e-5; isotonic and histogram maps 1e-3; float16 1e-2.",
        minimum=0,
        maximum=1,
        numeric=False,
        group="Output",
        is_rare=True,
    )
    trust_code: bool = option(
        False,
        "Execute the code that the run folder names (network factory, jit, py: data). Without this option, no "
        "such code runs.",
        numeric=False,
        group="What to export",
    )

    def check_together(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.format == "torch" and not self.head_only:
            raise UsageError("\0format\0 torch exports only the head", hint="add \0head_only\0")
        if self.head_only and self.trust_code:
            raise UsageError("\0trust_code\0 applies to whole networks; \0head_only\0 runs no code")

    @property
    def own_tolerance(self) -> float:
        """The one that was given, or that of the type."""
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance


COMMAND = Command(
    "Export the network and posterior as one ONNX, pt2 or safetensors file.",
    "The exported file takes inputs as in the run's data and returns probs, entropy, mutual_information (if "
    "available) and ood_score. Before publishing the file, compares its probabilities with predict's on val. "
    "Writes exports/<posterior>.<integrator>.onnx. A calibration map of score in place of CKPT gives a graph from "
    "probabilities to calibrated ones.",
    (ExportOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli export ckpt.pt --posterior laplace --integrator probit",
        "bnncli export ckpt.pt --posterior hmc --head-only --draws 200 --dtype float16",
        "bnncli export ckpt.pt --posterior laplace --integrator probit --head-only --format torch --out head.safetensors",
        "bnncli export map.safetensors",
    ),
    section="Use",
    place=30,
)


def execute(run: Run, options: ExportOptions) -> Result:
    """Export one posterior by one integrator."""
    from bnncli.commands.export import build
    from bnncli.commands.export.build import format_summary

    if is_map(run.checkpoint_path):
        from bnncli.commands.export.maps import export_map

        return export_map(run, options, run.checkpoint_path)
    options.check_together()
    build.check_suffix(run.naming.out, options.format)
    name, integrator = _choose_posterior(run, options)
    path = find_named(run, name, flag="\0posterior\0", otherwise=run.suggest("status"))
    header, source = posterior_source(run, path, "posterior")
    if header.meta.get("layers") is not None:
        raise UsageError(
            f"{path.stem} is not over the last layer; export takes only posteriors over the last layer",
            code="unsupported_export",
        )
    split = _judge(run)
    choice = _integrator(options, integrator, header, len(split.content.classes))
    sources = [split.source, source, *([split.classes_source] if split.classes_source is not None else [])]
    if not options.head_only:
        _require_network(run, split)
        sources += network_sources([split])
    predictor = Predictor(run, path, header, TrainData(run, options.trust_code))
    options = replace(options, score=_score(options, predictor, choice))
    if options.tolerance is None and options.dtype == "float32":
        options = replace(options, tolerance=STEEP.get(str(header.meta.get("map"))))
    if options.score == DEFAULT_SCORE:
        sources += [one.source for one in predictor.train.detector_splits if one.source not in sources]
    rules = []
    if options.decide:
        from bnncli.commands.export.build import open_rules

        rules = open_rules(run, f"{path.stem}.{choice.variant}", options, posterior=source.content_digest)
        sources += [Source(f"decision.{one.name}", one.header.path, one.header.content_digest) for one in rules]
    if choice.integrator.needs_target:
        sources += [source for source in predictor.train.fitted(header).sources if source not in sources]
    request = _request(run, options, predictor, choice, split, sources)
    if options.format == "torch":
        build.check_code_path(request.target, force=run.write.force)

    def compute() -> ComputationOutput:
        from bnncli.commands.export import build

        return build.compute(run, options, request, predictor, choice, split, rules)

    def when_fresh(found: Header) -> ComputationOutput:
        with convert_lookup_errors(found.path):
            build.restore_module(found)
            metrics = {"bytes": found.path.stat().st_size, **found.meta["metrics"], "milliseconds": None}
            return ComputationOutput(
                lambda provenance, may_replace: found.content_digest, metrics, format_summary(found.meta, metrics)
            )

    return produce(run, request, compute, when_fresh=when_fresh)


def _choose_posterior(run: Run, options: ExportOptions) -> tuple[str, str | None]:
    """The posterior and the integrator: as named, or as auto recommends."""
    if options.posterior is not None:
        return options.posterior, options.integrator
    found = open_recommendation(run)
    if found is None:
        there = ", ".join(path.stem for path in run.folder.posteriors())
        if not there:
            place = run.folder.root / "posteriors"
            raise MissingInput(f"{run.checkpoint_path} has no posteriors", hint=run.suggest("fit-laplace"), path=place)
        raise UsageError(f"export takes one posterior; name it with \0posterior\0 (have: {there})")
    run.console.info(f"using {found.posterior}, which auto recommends; choose another with \0posterior\0 NAME")
    return found.posterior, options.integrator or found.integrator


def _judge(run: Run) -> Split:
    """The split that the file is held against predict on: val, else another labelled one, else the training split."""
    there = run.folder.splits()
    for name in [one for one in ("val", *there) if one in there and one != "train"]:
        split = load_split(run, name)
        if split.content.labels is not None:
            return split
    return load_split(run, "train")


def _integrator(options: ExportOptions, name: str | None, header: Header, num_classes: int) -> IntegratorChoice:
    """Raises UsageError where it does not fit the posterior."""
    asked = PredictOptions(integrator=[] if name is None else [name], settings=options.settings)
    choices, refusals = RequestedIntegrators.of(asked, [header]).choices(header, num_classes)
    if refusals:
        raise refusals[0]
    return choices[0]


def _require_network(run: Run, split: Split) -> None:
    """Pass where the run's features were made by a network. Raises MissingInput otherwise."""
    header = split.content.header
    spec = None if header is None else header.provenance.get("params", {}).get("model")
    if not isinstance(spec, str) or spec == NO_NETWORK:
        raise MissingInput(
            f"the run {run.checkpoint_path} has only features, no network",
            hint="to export the head, which takes features, add \0head_only\0",
            code="no_network",
        )


def _score(options: ExportOptions, predictor: Predictor, choice: IntegratorChoice) -> str:
    """The score that was named, else the default, or what stands in for it. Raises UsageError for the default where the run lacks it."""
    if predictor.train.detector_splits:
        return options.score or DEFAULT_SCORE
    if options.score == DEFAULT_SCORE:
        raise UsageError(
            f"\0score\0 {DEFAULT_SCORE} needs the features of splits train and val, which this run lacks",
            hint="use another score",
            code="unsupported_export",
        )
    return options.score or default_score([["mutual_info"] if choice.integrator.is_sampling else []])


def _request(
    run: Run,
    options: ExportOptions,
    predictor: Predictor,
    choice: IntegratorChoice,
    split: Split,
    sources: list[Source],
) -> Request:
    from bnncli.models.libraries import require_onnx

    label = run.naming.name or f"{predictor.path.stem}.{choice.variant}"
    named = run.folder.export(label, FORMATS[options.format])
    is_drawn = choice.integrator.is_sampling
    params: dict[str, Any] = {
        **options.params(),
        "posterior": predictor.path.stem,
        "integrator": choice.name,
        "settings": choice.settings,
        "samples": choice.samples,
        "draws": options.draws if is_drawn else None,
        "seed": run.compute.seed if is_drawn else None,
    }
    return Request(
        Path(run.naming.out) if run.naming.out else named,
        KIND,
        f"export.{label}",
        params,
        _revisions.EXPORT,
        sources,
        split.checkpoint,
        lambda: _estimated_bytes(options, predictor.header, choice, split),
        require=lambda: predictor.require_memory(choice.samples, option=None) if is_drawn else None,
        begin=require_onnx if options.format == "onnx" else lambda: None,
    )


def _estimated_bytes(options: ExportOptions, header: Header, choice: IntegratorChoice, split: Split) -> int:
    """Estimate the bytes of the head's tensors and, if it goes into the file, of the checkpoint."""
    layout = split.layout
    size = 4 * layout.num_params * 2
    if choice.integrator.is_sampling:
        size += 4 * layout.num_params * min(options.draws, count_stored_draws(header) or options.draws)
    elif type_of(header) == "gaussian":
        size += 4 * layout.num_outputs * (layout.num_features + 1) ** 2
    checkpoint: Mapping[str, Any] = {} if options.head_only or split.checkpoint is None else split.checkpoint
    return size + int(checkpoint.get("size", 0)) + (1 << 17)
