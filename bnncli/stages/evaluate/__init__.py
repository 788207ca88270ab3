"""evaluate: predictions in, scores out: one metrics file for each posterior and integrator, one table for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header, write_metrics
from bnncli.artifacts.headers import Header
from bnncli.artifacts.predictions import stored_arrays
from bnncli.artifacts.provenance import Source
from bnncli.errors import CheckFailed, MissingInput, OutputExists
from bnncli.evaluation.detectors import DEFAULT_SCORE, FALLBACK_SCORES, default_score
from bnncli.evaluation.scores import further_names
from bnncli.options.command import COMPUTE, Command, InputOptions
from bnncli.options.declaration import spelled
from bnncli.options.scoring import Assertion, EvaluateOptions
from bnncli.session import revisions as _revisions
from bnncli.session.decisions import ScoredDecisions
from bnncli.session.predictions import PredictionGroup, Skipped, open_groups
from bnncli.session.produce import Computed, Request, produce
from bnncli.session.recommendation import recommended
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import (
    Absent,
    PredictedSplit,
    about,
    check_names,
    failure_text,
    group_rows,
    hold_against,
    is_of_every,
    warn_of_rare_classes,
)
from bnncli.session.score_tables import class_table, legend, score_table, with_classes, with_metrics, without_classes
from bnncli.stages.evaluate.curves import curves_of, draw_plots, planned_plots
from bnncli.stages.evaluate.features import evaluate_features, row_name
from bnncli.stages.evaluate.fidelity import FidelityReference, draws_name, find_fidelity, why_anew
from bnncli.stages.evaluate.reference import USUAL, Reference, References
from bnncli.stages.evaluate.thinned import check_true_inputs, has_density, is_latent
from bnncli.system.workers import is_leader

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


def run(run: Run, options: EvaluateOptions) -> Result:
    """Score every group of predictions and print one table."""
    skipped: list[Skipped] = []
    named: dict[str, Any] = {"posteriors": options.posterior, "integrators": options.integrator}
    groups = open_groups(run, **named, layers=options.layers, skipped=skipped)
    is_usual = not options.score
    options = _with_default_score(run, options, groups)
    absent = [Absent(*one) for one in skipped]
    check_true_inputs(groups, options.settings["true_inputs"])
    assertions = _assertions(run, options)
    check_names(assertions, [row for group in groups for row in _row_names(options, group)], absent)
    is_drawn = options.plot is not None and is_leader()
    plots = planned_plots(run, groups, options.split, Path(str(options.plot))) if is_drawn else []
    warn_of_rare_classes(run, options, groups)
    fidelity = find_fidelity(run, options, groups)
    name = draws_name(run, options, USUAL)
    references = References.of(run, name, [group.posterior_path for group in groups])
    total = Result()
    rows: list[dict[str, Any]] = []
    for group in groups:
        reference = references.for_posterior(group.posterior_path)
        result = _evaluate(run, options, group, reference, fidelity, is_usual=is_usual)
        total.add(result)
        own = result.metrics["rows"] if result.metrics else []
        rows += _with_curves(run, options, group, own) if options.curves or plots else own
    if options.needs_features:
        result = evaluate_features(run, options, groups)
        total.add(result)
        rows += result.metrics["rows"] if result.metrics else []
    if not run.write.dry_run:
        used = {one.name: one for one in (references.for_posterior(group.posterior_path) for group in groups)}
        against = [*used, *([fidelity.name] if fidelity is not None else [])]
        total.extra["checks"] = checks = hold_against(assertions, rows, absent, references=against)
        total.add(draw_plots(run, plots, rows, score=options.curve_score))
        if not options.curves:
            rows = [{key: value for key, value in row.items() if key != "curves"} for row in rows]
        rows = with_classes(rows, groups) if options.per_class else [without_classes(row) for row in rows]
        rows = _shown(run, options, rows)
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


def _with_default_score(run: Run, options: EvaluateOptions, groups: list[PredictionGroup]) -> EvaluateOptions:
    """The options with a score to detect by, which all predictions have, where none was named."""
    if options.score:
        return options
    headers = [header for group in groups for header in group.headers]
    name = default_score(stored_arrays(header.path) for header in headers)
    if name != DEFAULT_SCORE and any(header.meta.get("is_ood") for header in headers):
        has_both = {"train", "val"} <= {*run.folder.splits()}
        adds = f"to add it run {run.suggest('predict')}" if has_both else "it needs the splits train and val"
        run.console.info(f"detection by {name}: some predictions lack the {DEFAULT_SCORE} score; {adds}")
    return replace(options, score=[name])


def _assertions(run: Run, options: EvaluateOptions) -> list[Assertion]:
    """The assertions, those without a posterior about the one that auto recommends, where none were selected."""
    every = [one for one in options.assertions if is_of_every(one)]
    if not every or options.posterior or options.integrator or options.layers is not None:
        return [*options.assertions]
    found = recommended(run)
    if found is None:
        return [*options.assertions]
    run.console.info(
        f"checking {every[0]} for {found.posterior} ({found.integrator}), which auto recommends; write "
        f"POSTERIOR.{every[0]} to check another posterior"
    )
    return about(options.assertions, found.posterior, found.integrator)


def _with_curves(
    run: Run, options: EvaluateOptions, group: PredictionGroup, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of a group with their curves; those of splits that were not asked for as they are."""
    found = curves_of(run, group, options.split, score=options.curve_score, num_bins=options.settings["bins"])
    return [{**row, "curves": found[row["split"]]} if row["split"] in found else row for row in rows]


def _row_names(options: EvaluateOptions, group: PredictionGroup) -> list[dict[str, Any]]:
    """What the rows of a group, and those of its features, are called, before their scores are known."""
    names = {"name": group.name, "posterior": group.posterior, "integrator": group.integrator, "variant": group.variant}
    splits = list(group.splits(is_ood=False))
    own = [{**names, "split": split} for split in splits]
    return own + [row_name(split) for split in splits if options.needs_features]


def _shown(run: Run, options: EvaluateOptions, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the splits asked for; the files always have all of them. Raises MissingInput for one without rows."""
    there = list(dict.fromkeys(row["split"] for row in rows))
    for name in options.split:
        if name not in there:
            raise MissingInput(
                f"--split: no predictions for an in-distribution split {name!r} (have: {', '.join(there) or 'none'})",
                hint=run.suggest("predict", split=name),
            )
    chosen = [row for row in rows if not options.split or row["split"] in options.split]
    if not options.metric:
        return chosen
    return with_metrics(chosen, options.metric, options.shown_scores)


def _evaluate(
    run: Run,
    options: EvaluateOptions,
    group: PredictionGroup,
    reference: Reference,
    fidelity: FidelityReference | None,
    *,
    is_usual: bool,
) -> Result:
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
    if further := further_names():
        params["further_scores"] = further
    target = run.folder.metrics(group.name)
    checkpoint = group.headers[0].provenance.get("checkpoint")
    request = Request(
        target, "metrics", f"metrics.{group.name}", params, _revisions.EVALUATE, sources, checkpoint, lambda: 1 << 18,
        why_anew=partial(_why_anew if is_usual else why_anew, params),
    )  # fmt: skip

    def compute() -> Computed:
        from bnncli.stages.evaluate.distances import distance_rows

        distance = distance_rows(run, reference, posterior)
        rows = [
            {**row, "metrics": row["metrics"] + distance} for row in spelled(group_rows(run, options, group, beside))
        ]
        if is_thinned and posterior is not None:
            from bnncli.stages.evaluate.density import density_metrics, selection_metrics

            density, histograms = density_metrics(run, posterior, group.integrator)
            density += selection_metrics(posterior, options.settings["true_inputs"]) if is_latent(posterior) else []
            rows = [{**row, "metrics": row["metrics"] + density, "inclusion": histograms} for row in rows]
        predictions = [
            _scored_file(group, header, source.to_json(target.parent)["path"])
            for header, source in zip(group.headers, sources, strict=False)
        ]

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_metrics(
                target, rows=rows, predictions=predictions, provenance=provenance, may_replace=may_replace
            )

        return Computed(publish, {"rows": rows})

    try:
        return produce(run, request, compute, when_fresh=_when_fresh)
    except OutputExists:
        if fidelity is not None:
            fidelity.check(group)  # what is wrong with what was given is told before what is there
        raise


def _why_anew(asked: dict[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """The same where no score was named: scores made by another default are made again."""
    usual = {DEFAULT_SCORE, *FALLBACK_SCORES}
    is_other = asked["score"] != recorded.get("score") and usual >= {*(recorded.get("score") or [])}
    if is_other and all(asked.get(name) == recorded.get(name) for name in {*asked, *recorded} - {"score"}):
        return f"detection now uses {asked['score'][0]} by default"
    return why_anew(asked, recorded)


def _scored_file(group: PredictionGroup, header: Header, path: str) -> dict[str, Any]:
    """What a metrics file says of predictions that it scores."""
    return {
        "path": path,
        "content_digest": header.content_digest,
        "posterior": group.posterior,
        "integrator": group.integrator,
        "variant": group.variant,
        "split": header.meta["split"],
        "n": header.meta["num_examples"],
    }


def _when_fresh(header: Header) -> Computed:
    return Computed(lambda provenance, may_replace: header.content_digest, {"rows": header.meta.get("rows") or []})
