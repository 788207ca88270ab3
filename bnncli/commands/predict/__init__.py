"""predict: from posteriors and features to class probabilities, one file per posterior, integrator and split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted, UsageError
from bnncli.integrators._partitions import NUM_GROUPS, num_group_mean_rows
from bnncli.likelihoods import has_exclusive_classes, read_recorded_name
from bnncli.names import count_noun
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.predict import PredictOptions
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split, posterior_classes, posterior_source
from bnncli.session.out_of_fold import is_fitted_to
from bnncli.session.predictions import find_named, select_by_layers
from bnncli.session.predictor import (
    ALL,
    IntegratorChoice,
    Predictor,
    RequestedIntegrators,
    TrainData,
    count_stored_draws,
    warn,
    warn_of_draws,
    warn_of_few_draws,
)
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.recommendation import open_recommendation
from bnncli.session.run import Result, Run
from bnncli.session.unreadable import suggest_skipping
from bnncli.system.workers import is_leader

if TYPE_CHECKING:
    from bnncli.commands.predict.table import SplitDecisions

COMMAND = Command(
    "Compute class probabilities from posteriors.",
    "Predicts every split except train, or new data with --data or --follow. An integrator's settings become "
    "part of its name: mc with --qmc is mc-qmc. Writes predictions/<posterior>.<integrator>/<split>.h5. For new "
    "data, writes only a table.",
    (PredictOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli predict ckpt.pt",
        "bnncli predict ckpt.pt --posterior laplace --integrator all --split test",
        "bnncli predict ckpt.pt --data new=images:incoming --table new.csv",
        "bnncli predict ckpt.pt --follow incoming --table new.csv",
    ),
    section="Use",
    place=10,
)


def execute(run: Run, options: PredictOptions) -> Result:
    """Predict each split by each posterior and integrator. Skip what cannot be used with a warning, unless it was named."""
    from bnncli.commands.predict.table import check_table_path, decide, make_table, parse_merges, rule_columns

    options.check_together()
    options = _apply_recommendation(run, options)
    if options.is_of_new_data:
        return _predict_new(run, options)
    splits = [load_split(run, name) for name in _split_names(run, options)]
    posteriors = _posteriors(run, options)
    classes = splits[0].content.classes
    if not has_exclusive_classes(splits[0].content.likelihood):
        _refuse_of_labels(options)
    taken = rule_columns(run) if options.merge else []
    merges = parse_merges(options.merge, classes, probabilities=options.probabilities, taken=taken)
    if options.table is not None:
        inputs = [source.path for source in (*(split.source for split in splits), *(one.source for one in posteriors))]
        check_table_path(run, Path(options.table), inputs)
    total = Result()
    for predictor, choice, source in _iterate_pairs(run, options, posteriors, len(classes)):
        try:
            total.add(_predict(run, options, predictor, choice, source, splits))
        except (UsageError, MissingInput, Untrusted) as error:
            if not _may_skip(options, choice, error):
                raise
            run.console.warn(f"skipping {source.path.stem} with {choice.variant}: {error.message}{error.advice}")
    if not total.outputs:
        raise DataError(
            "no posterior of the run can be used: each is stale or does not work with the integrator",
            code="stale_input",
            hint=run.suggest("status"),
        )
    if not run.write.dry_run:
        counts = f"{count_noun(len(total.outputs), 'file')}, {count_noun(len(splits), 'split')}"
        total.summary = [f"{counts}: {total.action.replace('_', ' ')}", *_describe_draws(run, total.outputs)]
    files = [Path(output["path"]) for output in total.outputs]
    decided: list[SplitDecisions] = []
    if (options.table is not None or options.decide) and is_leader() and not run.write.dry_run:
        decided = decide(run, files, only=options.decide)
        total.extra["decisions"] = [row for one in decided for row in one.to_json()]
        total.summary += [line for one in decided for line in one.lines()]
    if options.table is not None and is_leader():
        table = make_table(
            run,
            Path(options.table),
            files,
            merges=merges,
            classes=classes,
            names={split.content.name: split.content.names for split in splits},
            probabilities=options.probabilities,
            decided=decided,
            is_raw=options.raw_text,
        )
        total.add(table)
    return total


def _apply_recommendation(run: Run, options: PredictOptions) -> PredictOptions:
    """Return the options with the posterior and integrator that auto recommends, where no posterior, integrator or layers are named."""
    if options.posterior == [ALL]:
        return replace(options, posterior=[])
    if options.posterior or options.integrator or options.layers is not None:
        return options
    found = open_recommendation(run)
    if found is None:
        return options
    run.console.info(
        f"using {found.posterior} ({found.integrator}), which auto recommends; choose others with \0posterior\0 "
        "NAME or all"
    )
    return replace(options, posterior=[found.posterior], integrator=[found.integrator])


def _predict_new(run: Run, options: PredictOptions) -> Result:
    """Predict data that are not a split of the run."""
    from bnncli.commands.predict.new_data import Maker, predict_new
    from bnncli.commands.predict.table import parse_merges, rule_columns

    if run.naming.name is not None or run.naming.out is not None:
        raise UsageError("\0name\0 and \0out\0 apply to stored predictions; new data only have a \0table\0")
    posteriors = _posteriors(run, options)
    classes = list(posterior_classes(run.folder, posteriors[0].header))
    if not has_exclusive_classes(read_recorded_name(posteriors[0].header.meta)):
        _refuse_of_labels(options)
    taken = rule_columns(run) if options.merge else []
    merges = parse_merges(options.merge, classes, probabilities=options.probabilities, taken=taken)
    pairs = list(_iterate_pairs(run, options, posteriors, len(classes)))
    if not pairs:
        raise DataError("no posterior of the run works with the integrator", hint=run.suggest("status"))
    makers = [Maker(replace(predictor), choice, source.content_digest) for predictor, choice, source in pairs]
    with suggest_skipping(options):
        return predict_new(run, options, makers, merges)


def _split_names(run: Run, options: PredictOptions) -> list[str]:
    """Return the splits to predict: those named, or all except train."""
    names = list(dict.fromkeys(options.split)) or [name for name in run.folder.splits() if name != "train"]
    if not names:
        checkpoint = run.checkpoint_path
        if not run.folder.root.is_dir():
            raise run.no_run()
        raise MissingInput(
            f"{checkpoint} has no splits to predict except train"
            if run.folder.splits()
            else f"{checkpoint} has no features",
            hint=run.suggest("extract-features", model="MODEL", data="test=SPEC"),
            path=run.folder.root / "features",
        )
    is_one_maker = len(options.posterior) == 1 and len(options.integrator) <= 1 and ALL not in options.integrator
    if run.naming.out is not None and (len(names) != 1 or not is_one_maker):
        raise UsageError("--out FILE holds one prediction: give one --posterior, one --integrator and one --split")
    if run.naming.name is not None and not is_one_maker:
        raise UsageError(
            "--name applies to one posterior and one integrator: give one --posterior and one --integrator"
        )
    return names


@dataclass(frozen=True)
class PosteriorFile:
    """A posterior to predict with."""

    path: Path
    header: Header
    source: Source


def _posteriors(run: Run, options: PredictOptions) -> list[PosteriorFile]:
    """Return the posteriors to predict with. Skip a stale one with a warning, unless it was named."""
    found = []
    for path in _posterior_paths(run, options):
        try:
            found.append(PosteriorFile(path, *posterior_source(run, path, "posterior")))
        except DataError as error:
            if options.posterior:
                raise
            run.console.warn(f"skipping {path.stem}: {error.message}{error.advice}")
    return found


def _posterior_paths(run: Run, options: PredictOptions) -> list[Path]:
    found = run.folder.posteriors()
    if options.posterior:
        named = dict.fromkeys(options.posterior)
        otherwise, trusts = run.suggest("status"), options.trust_code
        found = [find_named(run, name, flag="--posterior", otherwise=otherwise, trust_code=trusts) for name in named]
    if not found:
        raise MissingInput(
            f"{run.checkpoint_path} has no posteriors",
            hint=run.suggest("fit-laplace"),
            path=run.folder.root / "posteriors",
        )
    return select_by_layers(
        run, options.layers, found, are_named=bool(options.posterior), trust_code=options.trust_code
    )


def _refuse_of_labels(options: PredictOptions) -> None:
    """Raise UsageError for options that need mutually exclusive classes."""
    given = {
        "\0merge\0": (options.merge, "the probability of a union is not the sum of its members'"),
        "\0top_k\0": (options.top_k, "each label is present or absent regardless of the others"),
    }
    for flag, (is_given, why) in given.items():
        if is_given:
            raise UsageError(f"{flag}: the run is multilabel, so its classes are not mutually exclusive: {why}")


def _iterate_pairs(
    run: Run, options: PredictOptions, posteriors: list[PosteriorFile], num_classes: int
) -> Iterator[tuple[Predictor, IntegratorChoice, Source]]:
    """Yield each posterior with each of its integrators. Skip pairs that do not fit with a warning, unless named."""
    asked, train = (
        RequestedIntegrators.of(options, [one.header for one in posteriors]),
        TrainData(run, options.trust_code),
    )
    for posterior in posteriors:
        choices, refusals = asked.choices(posterior.header, num_classes)
        for refusal in refusals:
            if options.posterior:
                raise refusal
            run.console.warn(f"skipping {posterior.path.stem}: {refusal.message}")
        warn_of_few_draws(run, posterior.path, posterior.header, options.samples)
        predictor = Predictor(run, posterior.path, posterior.header, train)
        for choice in choices:
            if ALL not in options.integrator:
                warn_of_draws(run, posterior.path, posterior.header, choice.name)
            yield predictor, choice, posterior.source


def _predict(
    run: Run,
    options: PredictOptions,
    predictor: Predictor,
    choice: IntegratorChoice,
    source: Source,
    splits: list[Split],
) -> Result:
    """Predict every split by one posterior and integrator. Open the posterior only if a prediction is missing."""
    from bnncli.commands.predict.stored import predict_split, read_facts

    sources = [source]
    if choice.integrator.needs_target:
        sources += predictor.train.fitted(predictor.header).sources
    sources += [one.source for one in predictor.train.detector_splits if one.source not in sources]
    total = Result()
    for split in splits:
        if (
            is_fitted_to(predictor.header, split)
            and "num_folds" not in predictor.header.meta
            and not (options.split and options.posterior)
        ):
            run.console.warn(f"skipping {source.path.stem} on val: it was fitted to val and has no folds")
            continue
        request = _request(run, options, predictor, choice, split, sources)

        def compute(split: Split = split, request: Request = request) -> ComputationOutput:
            keep_samples = bool(request.params["keep_samples"])
            return predict_split(predictor, choice, split, request.target, keep_samples=keep_samples)

        def when_fresh(header: Header) -> ComputationOutput:
            warn(run, source.path.stem, header.meta)
            return ComputationOutput(
                lambda provenance, may_replace: header.content_digest, facts=read_facts(header.meta)
            )

        total.add(produce(run, request, compute, when_fresh=when_fresh))
    return total


def _request(
    run: Run,
    options: PredictOptions,
    predictor: Predictor,
    choice: IntegratorChoice,
    split: Split,
    sources: list[Source],
) -> Request:
    from bnncli.commands.predict.stored import build_params, estimate_bytes

    posterior, name = sources[0].path.stem, split.content.name
    label = run.naming.name or f"{posterior}.{choice.variant}"
    is_sampling, header = choice.integrator.is_sampling, read_header(sources[0].path)
    params = build_params(run, choice, posterior, keep_samples=options.keep_samples)
    # Other methods store their draws, or draw a latent network.
    is_drawn = is_sampling and header.meta.get("method") in ("laplace", "refine")

    @cache
    def planned_memory() -> int | None:
        return estimate_bytes(predictor, choice, split, keep_samples=bool(params["keep_samples"]))

    return Request(
        Path(run.naming.out) if run.naming.out else run.folder.predictions(label, name),
        "predictions",
        f"predictions.{label}.{name}",
        params,
        _revisions.of_predict(split.layout.num_params if is_drawn else 0, choice.name),
        [
            split.source,
            *(one for one in sources if one.role != split.source.role),
            *([split.classes_source] if split.classes_source is not None else []),
        ],
        split.checkpoint,
        lambda: _estimated_bytes(
            split, choice, keep_samples=params["keep_samples"], num_stored=count_stored_draws(header)
        ),
        require=planned_memory,
        estimated_memory=planned_memory,
    )


def _estimated_bytes(split: Split, choice: IntegratorChoice, *, keep_samples: bool, num_stored: int) -> int:
    num_examples, num_classes = len(split.content.features), len(split.content.classes)
    size = num_examples * (8 * num_classes + 64)
    num_draws = choice.samples or num_stored
    if choice.integrator.is_sampling and num_draws > 1:
        num_groups = min(NUM_GROUPS, num_draws)
        size += 4 * num_groups * num_classes * num_group_mean_rows(num_examples, num_classes, num_groups)
    return size + 2 * num_draws * num_examples * num_classes * keep_samples


def _may_skip(options: PredictOptions, choice: IntegratorChoice, error: BnnError) -> bool:
    """True where the error says that a posterior and an integrator do not fit, and the pair was not named."""
    is_named = choice.name in options.integrator
    if error.code == "unsupported_integrator":
        return not options.posterior or (ALL in options.integrator and not is_named)
    if isinstance(error, Untrusted):
        return not options.posterior and options.layers is None
    return isinstance(error, MissingInput) and not is_named


def _describe_draws(run: Run, outputs: list[dict[str, Any]]) -> list[str]:
    """Return lines on the draws of each posterior, and on intervals of less than 95%."""
    from bnncli.commands.predict.table import few_draws_lines

    by_maker = {Path(output["path"]).parent.name: output for output in outputs if output.get("draws")}
    counts = ", ".join(f"{maker} {output['draws']}" for maker, output in by_maker.items())
    lines = [f"draws: {counts}"] if counts else []
    levels: dict[str, tuple[str, float]] = {}
    for output in outputs:
        if output.get("draws") and output["interval_level"] is not None:
            maker = Path(output["path"]).parent.name
            levels[maker] = maker.partition(".")[0], min(output["interval_level"], levels.get(maker, ("", 1.0))[1])
    return [*lines, *few_draws_lines(run, levels)]
