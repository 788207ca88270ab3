"""evaluate: from predictions to scores, one metrics file per posterior and integrator, and one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from bnncli.artifacts.files import read_header, write_metrics
from bnncli.artifacts.headers import Header
from bnncli.artifacts.predictions import list_arrays
from bnncli.artifacts.provenance import Source
from bnncli.data.prediction_files import split_prediction_place
from bnncli.errors import CheckFailed, DataError, DeviceError, MissingInput, OutputExists, UsageError
from bnncli.evaluation.convergence import GOOD_RHAT, STUCK_ACCEPTANCE, deciding_numbers
from bnncli.evaluation.detection import detection_rows
from bnncli.evaluation.detectors import (
    DEFAULT_SCORE,
    FALLBACK_SCORES,
    Detector,
    FittedDetector,
    TrainingFeatures,
    all_detectors,
    default_score,
    feature_detectors,
)
from bnncli.evaluation.distances import WeightDraws, num_distance_draws, reference_rows, undefined_rows
from bnncli.evaluation.fidelity import undefined_fidelity
from bnncli.evaluation.scores import detection_forms, distances, fidelities, unplaced_scores
from bnncli.evaluation.statistics import Row
from bnncli.lazy import torch
from bnncli.names import FEATURES_NAME
from bnncli.numerics.digests import file_sha256
from bnncli.options.command import COMPUTE, Command, InputOptions
from bnncli.options.declaration import spell_options
from bnncli.options.scoring import Assertion, EvaluateOptions
from bnncli.options.shared import LayersOptions
from bnncli.parameters.module import LAST, STATE
from bnncli.posteriors import draw
from bnncli.session import revisions as _revisions
from bnncli.session.decisions import ScoredDecisions
from bnncli.session.inputs import Split, load_split, open_posterior, read_recorded_prior, require_draws
from bnncli.session.prediction_files import (
    GivenPredictions,
    PredictionClaims,
    check_against,
    open_given,
    rows_against,
)
from bnncli.session.predictions import PredictionGroup, SkippedPosterior, layers_of, open_groups
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.recommendation import open_recommendation
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import (
    AbsentPosterior,
    PredictedSplit,
    bind_assertions,
    bootstrap_of,
    check_assertions,
    check_names,
    failure_text,
    group_rows,
    is_of_every,
    warn_of_rare_classes,
)
from bnncli.session.score_tables import (
    add_class_counts,
    class_table,
    drop_class_values,
    legend,
    score_table,
    select_metrics,
)
from bnncli.system.input_files import open_regular
from bnncli.system.workers import is_leader

if TYPE_CHECKING:
    from torch import Tensor


COMMAND = Command(
    "Score predictions: accuracy, NLL, Brier, ECE, OOD detection.",
    "Prints one row per posterior, integrator and in-distribution split. Writes all scores with their settings "
    "to metrics/<posterior>.<integrator>.json. Undefined scores are null, with a reason. An --assert that names "
    "no posterior, split or choices refers to auto's recommendation (else all posteriors), the test split, and "
    "the usual form of the score.",
    (EvaluateOptions, InputOptions, *COMPUTE),
    (
        "bnncli evaluate ckpt.pt",
        "bnncli evaluate ckpt.pt --split test --json | jq '.rows[].posterior'",
        "bnncli evaluate ckpt.pt --plot figures",
        "bnncli evaluate ckpt.pt --score max_prob --score energy --score knn",
        "bnncli evaluate ckpt.pt --assert 'ece<=0.02' --assert 'laplace.mc.nll<map.nll'",
    ),
    section="Judge",
    place=10,
)


USUAL = "hmc"  # the reference of distances by default


def execute(run: Run, options: EvaluateOptions) -> Result:
    """Score every group of predictions and print one table."""
    from bnncli.commands.evaluate.curves import check_true_inputs, draw_plots, plan_plots

    skipped: list[SkippedPosterior] = []
    named: dict[str, Any] = {"posteriors": options.posterior, "integrators": options.integrator}
    groups = open_groups(run, **named, layers=options.layers, skipped=skipped)
    has_default_score = not options.score
    options = _choose_default_score(run, options, groups)
    absent = [AbsentPosterior(*one) for one in skipped]
    check_true_inputs(groups, options.settings["true_inputs"])
    assertions = _parse_assertions(run, options)
    check_names(assertions, [row for group in groups for row in _row_names(options, group)], absent)
    is_drawn = options.plot is not None and is_leader()
    plots = plan_plots(run, groups, options.split, Path(str(options.plot))) if is_drawn else []
    warn_of_rare_classes(run, options, groups)
    fidelity = find_fidelity(run, options, groups)
    name = choose_draws_name(run, options, USUAL)
    references = References.of(run, name, [group.posterior_path for group in groups])
    total = Result()
    rows: list[dict[str, Any]] = []
    for group in groups:
        reference = references.for_posterior(group.posterior_path)
        result = _evaluate(run, options, group, reference, fidelity, has_default_score=has_default_score)
        total.add(result)
        own = result.metrics["rows"] if result.metrics else []
        rows += _add_curves(run, options, group, own) if options.curves or plots else own
    if options.needs_features:
        result = evaluate_features(run, options, groups)
        total.add(result)
        rows += result.metrics["rows"] if result.metrics else []
    if not run.write.dry_run:
        used = {one.name: one for one in (references.for_posterior(group.posterior_path) for group in groups)}
        against = [*used, *([fidelity.name] if fidelity is not None else [])]
        total.extra["checks"] = checks = check_assertions(assertions, rows, absent, references=against)
        total.add(draw_plots(run, plots, rows, score=options.curve_score))
        if not options.curves:
            rows = [{key: value for key, value in row.items() if key != "curves"} for row in rows]
        rows = add_class_counts(rows, groups) if options.per_class else [drop_class_values(row) for row in rows]
        rows = _select_rows(run, options, rows)
        notes = [
            *legend(rows, options, options.shown_scores, options.bootstrap),
            *(text for one in used.values() for text in one.doubts()),
        ]
        total.summary.append(f"all scores and their definitions are in {run.folder.root / 'metrics'}")
        total.tables.append(
            score_table(
                rows,
                ["; ".join(notes)],
                chosen=options.metric,
                scores=options.shown_scores,
                intervals=options.intervals,
            )
        )
        of_classes = class_table(rows) if options.per_class else None
        total.tables += [of_classes] if of_classes is not None else []
        failed = failure_text(checks)
        total.failure = CheckFailed(failed, code="assertion_failed") if failed else None
    else:
        total.add(draw_plots(run, plots, [], score=options.curve_score))
    total.extra["rows"] = rows
    return total


@dataclass(frozen=True)
class Reference:
    """The draws that distances are measured to, opened when first needed.

    Args:
        name: name of the posterior.
        path: its file; None where the run has none.
        measured: posterior file to its distances, which all its integrators share.
    """

    name: str
    path: Path | None
    measured: dict[Path, list[Row]] = field(default_factory=dict)

    @cached_property
    def header(self) -> Header:
        assert self.path is not None
        return read_header(self.path)

    @cached_property
    def draws(self) -> WeightDraws:
        """Return all draws and their effective number."""
        assert self.path is not None
        posterior, header = open_posterior(self.path)
        return WeightDraws(posterior.draws, num_independent=read_effective_size(header))

    def doubts(self) -> list[str]:
        """Return a warning where the reference has not converged."""
        if self.path is None:
            return []
        metrics = self.header.meta.get("metrics", {})
        r_hat, lowest = deciding_numbers(metrics).r_hat, metrics.get("lowest_chain_acceptance")
        if (r_hat is None or r_hat <= GOOD_RHAT) and (lowest is None or lowest >= STUCK_ACCEPTANCE):
            return []
        shown = "undefined" if r_hat is None else f"{r_hat:.3f}"
        return [f"{self.name} has not converged (R-hat {shown}): do not trust its row or distances to it"]


@dataclass(frozen=True)
class References:
    """The requested reference and, where that is the usual one, the run's references over other layers.

    Args:
        asked: the requested reference.
        by_layers: value of --layers to its reference, such as hmc-all.
    """

    asked: Reference
    by_layers: dict[str, Reference]

    @classmethod
    def of(cls, run: Run, name: str, posteriors: Sequence[Path | None]) -> References:
        """Open the references for these posterior files. Raises what `open_reference` raises."""
        found = {}
        for layers in {layers_of(path) for path in posteriors} - {LAST, STATE} if name == USUAL else ():
            path = run.folder.posterior(f"{USUAL}{LayersOptions(layers).layers_suffix}", suffix=".nc")
            if path.is_file() and layers_of(path) == layers:
                found[layers] = open_reference(run, path.stem)
        return cls(open_reference(run, name), found)

    def for_posterior(self, path: Path | None) -> Reference:
        """Return the reference for a posterior file."""
        return self.by_layers.get(layers_of(path), self.asked)


def _choose_default_score(run: Run, options: EvaluateOptions, groups: list[PredictionGroup]) -> EvaluateOptions:
    """Return the options with a detection score that all predictions have, where none was named."""
    if options.score:
        return options
    headers = [header for group in groups for header in group.headers]
    name = default_score(list_arrays(header.path) for header in headers)
    if name != DEFAULT_SCORE and any(header.meta.get("is_ood") for header in headers):
        has_both = {"train", "val"} <= {*run.folder.splits()}
        adds = f"to add it run {run.suggest('predict')}" if has_both else "it needs the splits train and val"
        run.console.info(f"detection by {name}: some predictions lack the {DEFAULT_SCORE} score; {adds}")
    return replace(options, score=[name])


def _parse_assertions(run: Run, options: EvaluateOptions) -> list[Assertion]:
    """Return the assertions. Those without a posterior are about auto's recommendation, unless posteriors were selected."""
    every = [one for one in options.assertions if is_of_every(one)]
    if not every or options.posterior or options.integrator or options.layers is not None:
        return [*options.assertions]
    found = open_recommendation(run)
    if found is None:
        return [*options.assertions]
    run.console.info(
        f"checking {every[0]} for {found.posterior} ({found.integrator}), which auto recommends; write "
        f"POSTERIOR.{every[0]} to check another posterior"
    )
    return bind_assertions(options.assertions, found.posterior, found.integrator)


def _row_names(options: EvaluateOptions, group: PredictionGroup) -> list[dict[str, Any]]:
    """Return the names of a group's rows, and of the rows of its features, before they are scored."""
    names = {"name": group.name, "posterior": group.posterior, "integrator": group.integrator, "variant": group.variant}
    splits = list(group.splits(is_ood=False))
    own = [{**names, "split": split} for split in splits]
    return own + [row_name(split) for split in splits if options.needs_features]


@dataclass(frozen=True)
class FidelityReference:
    """Predictions to compare with, by split.

    Args:
        name: name in rows: that of the predictions, such as hmc.mc, or of the file.
        group: group of the reference's own predictions; "" for a file.
        places: split to its predictions, as `open_given` takes them.
        why_not: why other splits have none.
        sources: split to its source.
        opened: split to the predictions read, which all posteriors share.
    """

    name: str
    group: str
    places: Mapping[str, str]
    why_not: str
    sources: Mapping[str, Source]
    opened: dict[str, GivenPredictions] = field(default_factory=dict)

    def to_params(self) -> dict[str, Any]:
        """Return what a metrics file records of the reference."""
        return {"fidelity": {"reference": self.name, "splits": sorted(self.places)}}

    def rows(self, run: Run, options: EvaluateOptions, group: PredictionGroup, split: PredictedSplit) -> list[Row]:
        """Compare the predictions of a split with the reference's. Undefined rows give the reason."""
        if group.name == self.group or split.name not in self.places:
            reason = "this is the reference itself" if group.name == self.group else self.why_not
            return undefined_fidelity(fidelities(), reference=self.name, reason=reason)
        return rows_against(
            self._ours(split),
            self._opened(split.name),
            name=self.name,
            bootstrap=bootstrap_of(run, options, split),
            tell=run.console.info,
        )

    def check(self, group: PredictionGroup) -> None:
        """Check that `rows` can compare these predictions, and raise what it raises."""
        for split in map(PredictedSplit, group.splits(is_ood=False).values()):
            if group.name != self.group and split.name in self.places:
                check_against(self._ours(split), self._opened(split.name))

    def _opened(self, name: str) -> GivenPredictions:
        if name not in self.opened:
            self.opened[name] = open_given(self.places[name], PredictionClaims())
        return self.opened[name]

    def _ours(self, split: PredictedSplit) -> GivenPredictions:
        file = split.file
        arrays = {} if file.mutual_info is None else {"mutual_info": file.mutual_info}
        classes = tuple(file.classes)
        return GivenPredictions(
            split.name,
            split.header.path,
            file.probs,
            file.labels,
            classes,
            True,
            file.is_exclusive,
            arrays,
            file=file,
            groups=split.groups,
        )


def find_fidelity(run: Run, options: EvaluateOptions, groups: Sequence[PredictionGroup]) -> FidelityReference | None:
    """Find the predictions that \0reference\0 names; None where it is not given.

    Raises:
        MissingInput: it names neither a posterior of the run nor a file.
        UsageError: it names predictions by several integrators.
    """
    place = options.reference
    if place is None:
        return None
    known = {path.stem for path in run.folder.posteriors()} | {
        path.parent.name for path in run.folder.prediction_files()
    }
    if place in known:
        return _open_reference_posterior(run, place)
    path, _ = split_prediction_place(place)
    if not path.exists():
        raise MissingInput(
            f"--reference: {place!r} is neither a posterior of the run (have: {', '.join(sorted(known))}) nor a file",
            hint=run.suggest("hmc") if place == "hmc" else run.suggest("status"),
        )
    return _open_reference_file(place, path, options, groups)


def _open_reference_posterior(run: Run, name: str) -> FidelityReference:
    try:
        found = open_groups(run, posteriors=[name])
    except MissingInput as error:
        run.console.warn(f"{name} has no predictions, so nothing is compared with it{error.advice}")
        return FidelityReference(name, name, {}, f"no predictions of {name}{error.advice}", {})
    named = [group for group in found if group.name == name or f"{group.posterior}.{group.variant}" == name]
    chosen = named or [group for group in found if group.variant == "mc"] or found
    if len(chosen) > 1:
        choices = ", ".join(group.name for group in chosen)
        raise UsageError(f"--reference: {name} is ambiguous; name one of {choices}")
    group = chosen[0]
    headers = group.splits(is_ood=False)
    sources = {split: Source(f"reference.{split}", one.path, one.content_digest) for split, one in headers.items()}
    hint = run.suggest("predict", posterior=group.posterior, integrator=group.integrator)
    places = {split: str(one.path) for split, one in headers.items()}
    return FidelityReference(group.name, group.name, places, f"{group.name} has no predictions; run: {hint}", sources)


def _open_reference_file(
    place: str, path: Path, options: EvaluateOptions, groups: Sequence[PredictionGroup]
) -> FidelityReference:
    """Use a file of predictions as the reference for the requested splits, or for test."""
    with open_regular(path) as stream:
        digest = f"sha256:{file_sha256(stream)}"
    known = list(dict.fromkeys(name for group in groups for name in group.splits(is_ood=False)))
    splits = options.split or (["test"] if "test" in known else known[:1])
    column = split_prediction_place(place)[1].get("")
    name = path.name + ("" if column is None else f".{column}")
    source = Source("reference", path, digest, is_artifact=False)
    why = f"{name} is used as the reference for split {', '.join(splits)} (add \0split\0)"
    return FidelityReference(name, "", dict.fromkeys(splits, place), why, dict.fromkeys(splits, source))


def choose_draws_name(run: Run, options: EvaluateOptions, usual: str) -> str:
    """The posterior whose draws distances are measured to: the reference where it has draws, else the usual one."""
    for name in (options.reference or usual, (options.reference or usual).partition(".")[0]):
        if run.folder.posterior(name, suffix=".nc").is_file():
            return name
    return usual


def open_reference(run: Run, name: str) -> Reference:
    """Open the reference. Without hmc draws in the run, return one without a file, so that rows give the reason.

    Raises:
        MissingInput: a reference other than hmc was named and does not exist.
    """
    path = run.folder.posterior(name, suffix=".nc")
    if path.is_file():
        header = read_header(path)
        try:
            run.use(header)
            require_draws(run, header, num_used=0)
        except (DataError, DeviceError) as error:
            if error.code not in ("stale_input", "out_of_memory"):  # damaged: what else was made of it is no truer
                raise
            run.console.warn(f"skipping MMD^2: {error.message}{error.advice}")
            return Reference(name, None)
        return Reference(name, path)
    if name != USUAL:
        raise MissingInput(f"--reference: no draws {path}", hint=run.suggest("hmc", name=name), path=path)
    return Reference(name, None)


def _evaluate(
    run: Run,
    options: EvaluateOptions,
    group: PredictionGroup,
    reference: Reference,
    fidelity: FidelityReference | None,
    *,
    has_default_score: bool,
) -> Result:
    from bnncli.commands.evaluate.curves import has_density, is_latent

    sources = [
        Source(f"predictions.{header.meta['split']}", header.path, header.content_digest) for header in group.headers
    ]
    posterior = group.posterior_path
    is_thinned = has_density(posterior)
    if reference.path is not None and posterior is not None:
        sources.append(Source("reference", reference.path, reference.header.content_digest))
    if posterior is not None and (reference.path is not None or is_thinned):
        sources.append(Source("posterior", posterior, read_header(posterior).content_digest))
    decisions = ScoredDecisions(run, options, group)
    sources += decisions.sources
    beside: list[Callable[[PredictedSplit], list[dict[str, Any]]]] = [decisions.rows]
    if fidelity is not None:
        splits = group.splits(is_ood=False) if group.name != fidelity.group else {}
        sources += dict.fromkeys(fidelity.sources[split] for split in splits if split in fidelity.sources)
        beside.append(partial(fidelity.rows, run, options, group))
    params = {**options.params(), "score": options.prediction_scores, "seed": run.compute.seed}
    params["reference"] = reference.name
    params |= fidelity.to_params() if fidelity is not None else {}
    if further := unplaced_scores():
        params["further_scores"] = further
    target = run.folder.metrics(group.name)
    checkpoint = group.headers[0].provenance.get("checkpoint")
    request = Request(
        target, "metrics", f"metrics.{group.name}", params, _revisions.EVALUATE, sources, checkpoint, lambda: 1 << 18,
        why_anew=partial(_explain_recomputation if has_default_score else explain_recomputation, params),
    )  # fmt: skip

    def compute() -> ComputationOutput:
        distance = measure_distance_rows(run, reference, posterior)
        rows = [
            {**row, "metrics": row["metrics"] + distance}
            for row in spell_options(group_rows(run, options, group, beside))
        ]
        if is_thinned and posterior is not None:
            from bnncli.commands.evaluate.curves import compute_density_metrics, compute_selection_metrics

            density, histograms = compute_density_metrics(run, posterior, group.integrator)
            density += (
                compute_selection_metrics(posterior, options.settings["true_inputs"]) if is_latent(posterior) else []
            )
            rows = [{**row, "metrics": row["metrics"] + density, "inclusion": histograms} for row in rows]
        predictions = [
            _describe_scored_file(group, header, source.to_json(target.parent)["path"])
            for header, source in zip(group.headers, sources, strict=False)
        ]

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_metrics(
                target, rows=rows, predictions=predictions, provenance=provenance, may_replace=may_replace
            )

        return ComputationOutput(publish, {"rows": rows})

    try:
        return produce(run, request, compute, when_fresh=_read_rows)
    except OutputExists:
        if fidelity is not None:
            fidelity.check(group)  # a bad --reference is reported before the existing file
        raise


def _explain_recomputation(asked: dict[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """Return why scores are computed again, as `explain_recomputation`, also where the default detection score changed."""
    usual = {DEFAULT_SCORE, *FALLBACK_SCORES}
    is_other = asked["score"] != recorded.get("score") and usual >= {*(recorded.get("score") or [])}
    if is_other and all(asked.get(name) == recorded.get(name) for name in {*asked, *recorded} - {"score"}):
        return f"detection now uses {asked['score'][0]} by default"
    return explain_recomputation(asked, recorded)


def explain_recomputation(asked: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """Return why scores are computed again without --force: only the reference changed. None for any other change."""
    names = {name for name in {*asked, *recorded} if asked.get(name) != recorded.get(name)}
    if "fidelity" not in names or not names <= {"fidelity", "reference"}:
        return None
    then, now = (params.get("fidelity") or {} for params in (recorded, asked))
    with_splits = then.get("reference") == now.get("reference")
    before, after = (_describe(one, with_splits=with_splits) for one in (then, now))
    return f"created {before}, now {after}"


def _describe(recorded: Mapping[str, Any], *, with_splits: bool) -> str:
    """Describe a recorded reference in terms of the option."""
    if not recorded:
        return "without \0reference\0"
    splits = f" for {', '.join(recorded['splits']) or 'no split'}" if with_splits else ""
    return f"with \0reference\0 {recorded['reference']}{splits}"


def measure_distance_rows(run: Run, reference: Reference, posterior: Path | None) -> list[Row]:
    """Return the distances of one posterior to the reference. Undefined rows give the reason."""
    if reference.path is None or posterior is None:
        return reference_rows(
            None, None, distances(), reference=reference.name, generator=run.stream("evaluate/permutation")
        )
    if posterior not in reference.measured:
        reference.measured[posterior] = _measure(run, reference, posterior)
    return reference.measured[posterior]


def _measure(run: Run, reference: Reference, posterior: Path) -> list[Row]:
    """Measure all distances of one posterior to the reference."""
    own, header = open_posterior(posterior)
    if header.meta.get("layers") != reference.header.meta.get("layers"):
        why = f"the draws of {reference.name} are over other layers"
        return undefined_rows(distances(), reference=reference.name, reason=why)
    theirs, ours = read_recorded_prior(reference.header), read_recorded_prior(header)
    if ours is not None and theirs is not None and not ours.is_close(theirs):
        run.console.warn(
            f"{posterior.stem} has prior precision {ours}, but {reference.name} has {theirs}: MMD^2 and other "
            "distances compare different targets"
        )
    return reference_rows(
        _draws(run, own, header),
        reference.draws,
        distances(),
        reference=reference.name,
        generator=run.stream("evaluate/permutation"),
        device=run.device,
    )


def _draws(run: Run, posterior: Any, header: Header) -> WeightDraws:
    """Return all draws of chains, or seeded draws of another posterior, with the exact mean where that is its centre.

    A latent binary network has no exact mean: its centre is the median probability model.
    """
    if header.kind == "samples":
        return WeightDraws(posterior.draws, num_independent=read_effective_size(header))
    wanted = num_distance_draws(posterior.layout.num_params)
    count = min(wanted, getattr(posterior, "num_stored", wanted))
    mean: Tensor | None = None if hasattr(posterior, "mean_theta") else getattr(posterior, "center", None)
    with torch.no_grad():
        draws = draw(posterior.to(run.device), count, run.stream("evaluate/mmd")).cpu()
    return WeightDraws(draws, mean=mean)


def read_effective_size(header: Header) -> int:
    """Return the smallest effective sample size over the parameters that hmc records; 0 where it is unknown."""
    metrics = header.meta.get("metrics", {})
    sizes = [metrics.get(name) for name in ("min_ess_bulk", "min_ess_tail")]
    return min((int(size) for size in sizes if size is not None), default=0)


def _describe_scored_file(group: PredictionGroup, header: Header, path: str) -> dict[str, Any]:
    """Return what a metrics file records of the predictions it scores."""
    return {
        "path": path,
        "content_digest": header.content_digest,
        "posterior": group.posterior,
        "integrator": group.integrator,
        "variant": group.variant,
        "split": header.meta["split"],
        "n": header.meta["num_examples"],
    }


def _add_curves(
    run: Run, options: EvaluateOptions, group: PredictionGroup, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Add curves to the rows of the requested splits."""
    from bnncli.commands.evaluate.curves import compute_curves

    found = compute_curves(run, group, options.split, score=options.curve_score, num_bins=options.settings["bins"])
    return [{**row, "curves": found[row["split"]]} if row["split"] in found else row for row in rows]


_INTEGRATOR = "none"
_GROUP = f"{FEATURES_NAME}.{_INTEGRATOR}"  # name of the metrics file


def evaluate_features(run: Run, options: EvaluateOptions, groups: Sequence[PredictionGroup]) -> Result:
    """Score detection by every feature score, between the splits that have predictions.

    Raises:
        MissingInput: the features of one of these splits, or of train, do not exist.
    """
    inside, outside = (
        list(dict.fromkeys(name for group in groups for name in group.splits(is_ood=is_ood)))
        for is_ood in (False, True)
    )
    if not outside:
        run.console.warn("--score: no out-of-distribution split to detect with features")
        return Result()
    train = load_split(run, "train")
    splits = {name: load_split(run, name) for name in [*inside, *outside]}
    sources = list(dict.fromkeys([train.source, *(split.source for split in splits.values())]))
    params: dict[str, Any] = {"score": feature_detectors(), **options.detector_settings}
    params |= {"bootstrap": options.bootstrap, "level": options.level, "seed": run.compute.seed}
    params |= {"further_scores": further} if (further := unplaced_scores()) else {}
    target = run.folder.metrics(_GROUP)
    request = Request(
        target,
        "metrics",
        f"metrics.{FEATURES_NAME}",
        params,
        _revisions.EVALUATE_FEATURES,
        sources,
        train.checkpoint,
        lambda: 1 << 18,
    )

    def compute() -> ComputationOutput:
        scores, choices = _compute_scores(run, options, train, splits)
        rows = [
            _row(run, options, scores, splits, name, outside) for name in sorted(inside, key=lambda n: (n != "test", n))
        ]
        for metric in (metric for row in rows for metric in row["metrics"]):
            metric |= choices[metric["score"]]

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_metrics(target, rows=rows, predictions=[], provenance=provenance, may_replace=may_replace)

        return ComputationOutput(publish, {"rows": rows})

    return produce(run, request, compute, when_fresh=_read_rows)


Scores = dict[str, NDArray | str]


def _compute_scores(
    run: Run, options: EvaluateOptions, train: Split, splits: dict[str, Split]
) -> tuple[dict[str, Scores], dict[str, Mapping[str, int]]]:
    """Return the scores (N,) of each split's examples, or the reason there are none, and the choices that define each score."""
    labels = train.content.labels
    several = (
        {"no_classes": "multilabel examples have no single class"} if labels is not None and labels.ndim == 2 else {}
    )
    given = TrainingFeatures(
        torch.from_numpy(train.content.features),
        None if labels is None or several else torch.from_numpy(labels),
        run.device,
        run.stream,
        options.detector_settings,
        **several,
    )
    fitted = {
        name: _fit(detector, given) for name, detector in all_detectors().items() if detector.of_features is not None
    }
    for note in (note for one in fitted.values() if isinstance(one, FittedDetector) for note in one.notes):
        run.console.warn(note)
    makers = {name: fitted[all_detectors()[name].computed_by or name] for name in feature_detectors()}
    found: dict[str, Scores] = {}
    task = run.console.task("feature scores", len(splits))
    for name, split in splits.items():
        rows = torch.from_numpy(split.content.features)
        values = {maker: one if isinstance(one, str) else one.scores(rows) for maker, one in fitted.items()}
        own = {score: values[all_detectors()[score].computed_by or score] for score in feature_detectors()}
        found[name] = {score: one if isinstance(one, str) else one[score].numpy() for score, one in own.items()}
        task.advance()
    return found, {score: {} if isinstance(one, str) else one.choices for score, one in makers.items()}


def _fit(detector: Detector, train: TrainingFeatures) -> FittedDetector | str:
    """Fit a detector, or return why it cannot be fitted."""
    assert detector.of_features is not None
    try:
        return detector.of_features(train)
    except DataError as error:
        return error.message


def _row(
    run: Run,
    options: EvaluateOptions,
    scores: dict[str, Scores],
    splits: Mapping[str, Split],
    name: str,
    outside: Sequence[str],
) -> dict[str, Any]:
    """Return the row of one in-distribution split: detection of each out-of-distribution split by each score."""
    metrics = []
    for other in outside:
        bootstrap = bootstrap_of(run, options, splits[name], splits[other])
        metrics += detection_rows(
            scores[name], scores[other], detection_forms(), split=name, ood=other, bootstrap=bootstrap
        )
        run.console.poll()
    return {**row_name(name), "settings": {}, "samples": None, "metrics": metrics}


def row_name(split: str) -> dict[str, Any]:
    """Return the names of a split's row."""
    own = {"name": _GROUP, "posterior": FEATURES_NAME, "integrator": _INTEGRATOR, "variant": _INTEGRATOR}
    return {**own, "split": split}


def _read_rows(header: Header) -> ComputationOutput:
    return ComputationOutput(
        lambda provenance, may_replace: header.content_digest, {"rows": header.meta.get("rows") or []}
    )


def _select_rows(run: Run, options: EvaluateOptions, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the requested splits with the requested scores. Raises MissingInput for a split without rows."""
    known = list(dict.fromkeys(row["split"] for row in rows))
    for name in options.split:
        if name not in known:
            raise MissingInput(
                f"--split: no predictions for an in-distribution split {name!r} (have: {', '.join(known) or 'none'})",
                hint=run.suggest("predict", split=name),
            )
    chosen = [row for row in rows if not options.split or row["split"] in options.split]
    return select_metrics(chosen, options.metric, options.shown_scores) if options.metric else chosen
