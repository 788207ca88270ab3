"""compare: scores of posteriors side by side, with standard errors and tests of which differences are real."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.provenance import Source
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.evaluation.comparison import Sample, Standing, fewest_replicates, standings
from bnncli.evaluation.detectors import prediction_detectors
from bnncli.evaluation.scores import all_scores
from bnncli.options.command import READ, Argument, Command, InputOptions, TrackOptions, WriteOptions
from bnncli.options.declaration import CheckedOptions, declare_option_group, option
from bnncli.options.scoring import Quantity, declare_comparison_options, parse_score
from bnncli.options.shared import check_variant, chosen_layers_option
from bnncli.session.costs import TotalCost, total_cost
from bnncli.session.predictions import PredictionGroup, open_groups
from bnncli.session.recommendation import open_recommendation
from bnncli.session.run import Result, Run, Table, each_checkpoint, source_json
from bnncli.session.score_rows import PredictedSplit, num_draws
from bnncli.session.val_report import gain_table

if TYPE_CHECKING:
    from bnncli.commands.compare.measure import Column
    from bnncli.commands.compare.output import Comparison, Name


def list_paired_scores() -> tuple[str, ...]:
    """Return the scores that can be paired."""
    return tuple(name for name, score in all_scores().items() if score.is_paired)


def _list_default_metrics() -> list[str]:
    return [name for name in list_paired_scores() if all_scores()[name].is_shown]


def _metric_help() -> str:
    names = ", ".join(_list_default_metrics())
    return f"Score to compare: METRIC[:CHOICE...], such as ece:equal-mass or auroc:mnist. Default: {names}."


@dataclass(frozen=True)
class CompareOptions(CheckedOptions):
    """Options of compare. `settings` holds the options that scores declare."""

    metric: list[str] = option([], _metric_help, metavar="SCORE", group="What to compare")
    posterior: list[str] = option(
        [], "Compare only this posterior's predictions.", metavar="NAME", group="What to compare"
    )
    layers: str | None = chosen_layers_option("What to compare", is_recorded=False)
    integrator: list[str] = option(
        [],
        "Compare only this integrator's predictions: a name (mc), or a name with settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        group="What to compare",
    )
    split: str = option("test", "Split to compare on.", metavar="SPLIT", group="What to compare")
    baseline: str | None = option(
        None,
        "Show differences from this posterior (POSTERIOR or POSTERIOR.INTEGRATOR), with intervals and p-values.",
        metavar="NAME",
        group="Tests",
    )
    alpha: float = option(
        0.05,
        "Family-wise significance level for the tests in each column. The intervals have level 1 - alpha.",
        minimum=1e-6,
        maximum=0.5,
        group="Tests",
    )
    bootstrap: int = option(
        1000,
        "Number of bootstrap replicates over examples, or groups of them, used with a single checkpoint.",
        minimum=100,
        group="Tests",
        is_rare=True,
    )
    settings: dict[str, Any] = declare_option_group(declare_comparison_options)
    plot: str | None = option(
        None, "Draw the comparison as compare-SPLIT.png in this folder.", metavar="DIR", writes=True, group="Output"
    )
    by: str | None = option(
        None,
        "cost sorts the rows by how many gradient passes over the training data each posterior took, cheapest first.",
        choices=("cost",),
        group="Output",
    )
    format: str = option(
        "text", "Output format of the table.", choices=("text", "csv", "markdown", "latex"), group="Output"
    )
    seed: int = option(0, "Seed of the bootstrap.", minimum=0, env_common=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.scores  # raises for bad values before any work
        if len(set(self.metric)) < len(self.metric):
            raise UsageError("\0metric\0: the same score is given twice")

    @property
    def scores(self) -> list[Quantity]:
        """Return the scores of --metric."""
        return [
            parse_score(text, "\0metric\0", list_paired_scores()) for text in self.metric or _list_default_metrics()
        ]


COMMAND = Command(
    "Compare the scores of posteriors, with standard errors and tests.",
    "With one checkpoint, bootstraps over examples, or groups of them; with several (seeds of one experiment), tests over "
    "checkpoints. Marks the best score in each column and those that are not significantly worse (family-wise "
    "--alpha per column). With --baseline, tests each posterior against the baseline (Holm).",
    (CompareOptions, InputOptions, WriteOptions, TrackOptions, *READ),
    (
        "bnncli compare ckpt.pt",
        "bnncli compare ckpt.pt --baseline map --metric nll --metric ece:equal-mass",
        "bnncli compare seed-1.pt seed-2.pt seed-3.pt --format latex > table.tex",
        "bnncli compare seed-*.pt --plot figures",
        "bnncli compare ckpt.pt --by cost",
    ),
    (
        Argument(
            "ckpt",
            "Checkpoints to compare. If you give several, they are treated as different seeds of one experiment.",
            is_many=True,
        ),
    ),
    section="Judge",
    place=20,
)


def execute(run: Run, options: CompareOptions) -> Result:
    """Measure, test and print. Only --plot writes a file."""
    from bnncli.commands.compare.output import (
        build_dry_run_result,
        build_json,
        build_table,
        draw_plot,
        format_csv,
        format_latex,
        format_markdown,
        plan_plot,
    )

    if run.console.options.json and options.format != "text":
        raise UsageError(f"give only one of --format {options.format} and --json")
    runs = each_checkpoint(run)
    groups = find_common_groups(runs, options)
    plot = None if options.plot is None else plan_plot(run, options.plot, options.split)
    if run.write.dry_run:
        return Result("planned") if plot is None else build_dry_run_result(plot)
    comparison = compare_groups(runs, options, groups)
    formats = {"csv": format_csv, "markdown": format_markdown, "latex": format_latex}
    for text in list_power_warnings(runs[0], options, comparison, [own[0] for own in groups.values()]):
        run.console.warn(text)
    recommended = [] if comparison.recommendation is None else [f"auto: {comparison.recommendation}"]
    result = Result(
        extra=build_json(comparison) | {"inputs": _inputs(groups)},
        tables=[build_table(comparison), *_describe_gains(runs, comparison)] if options.format == "text" else [],
        lines=recommended if options.format == "text" else formats[options.format](comparison),
        summary=comparison.unknown_errors(),
    )
    if plot is not None:
        result.add(draw_plot(run, plot, comparison))
    return result


Groups = dict[str, list[PredictionGroup]]  # by name, one for each checkpoint


def find_common_groups(runs: Sequence[Run], options: CompareOptions, *, leave_out: Collection[Path] = ()) -> Groups:
    """Return the predictions to compare, which every checkpoint has.

    Args:
        leave_out: files to skip.

    Raises:
        MissingInput, DataError: there are no predictions, or none of the baseline.
        UsageError: the baseline is ambiguous.
    """
    named: dict[str, Any] = {"posteriors": options.posterior, "integrators": options.integrator}
    beside = [] if options.baseline is None else [options.baseline]
    found = [open_groups(one, **named, layers=options.layers, beside=beside, leave_out=leave_out) for one in runs]
    groups = _find_shared_groups(runs, found, options.split)
    if options.by == "cost":
        groups = dict(sorted(groups.items(), key=lambda entry: _cost(entry[1]).rank))
    _ = _find_baseline(runs[0], options, [own[0] for own in groups.values()])
    _check_same_examples(runs, options, groups)
    return groups


def _find_shared_groups(
    runs: Sequence[Run], found: Sequence[Sequence[PredictionGroup]], split: str
) -> dict[str, list[PredictionGroup]]:
    """Return the groups with predictions of the split that every run has: name to one group per run."""
    labels = {(group.name, group.posterior, group.variant): None for groups in found for group in groups}
    shared: dict[str, list[PredictionGroup]] = {}
    left_out: dict[str, list[str]] = {}  # by the checkpoints that lack them
    maker = runs[0]
    for label in labels:
        own = [
            next(
                (g for g in groups if (g.name, g.posterior, g.variant) == label and split in g.splits(is_ood=False)),
                None,
            )
            for groups in found
        ]
        lacking = [one for one, group in zip(runs, own, strict=True) if group is None]
        if lacking:
            left_out.setdefault(", ".join(str(one.checkpoint_path) for one in lacking), []).append(label[0])
            maker = lacking[0]
            continue
        shared.setdefault(label[0], []).extend(group for group in own if group is not None)
    if shared or len(runs) > 1:
        for where, names in left_out.items():
            runs[0].console.warn(f"skipping {', '.join(names)}: no predictions for split {split!r} of {where}")
    if not shared:
        inside, outside = (
            list(dict.fromkeys(name for groups in found for group in groups for name in group.splits(is_ood=is_ood)))
            for is_ood in (False, True)
        )
        raise MissingInput(
            f"--split: no posterior has predictions of an in-distribution split {split!r}"
            + (" for every checkpoint" if len(runs) > 1 else "")
            + f" (have: {', '.join(inside) or 'none'})",
            hint=None if split in outside else maker.suggest("predict", split=split),
        )
    return shared


def _check_same_examples(
    runs: Sequence[Run], options: CompareOptions, groups: dict[str, list[PredictionGroup]]
) -> None:
    """Raise DataError unless all posteriors of a checkpoint predict the same examples; warn where checkpoints differ."""
    identities: dict[str, set[Any]] = {}
    for place in range(len(next(iter(groups.values())))):
        first: dict[str, tuple[str, Any]] = {}
        for label, own in groups.items():
            chosen = own[place].splits(is_ood=True) | {options.split: own[place].splits(is_ood=False)[options.split]}
            for name, header in chosen.items():
                identity = (header.meta.get("order_digest"), header.meta["num_examples"])
                other, expected = first.setdefault(name, (label, identity))
                identities.setdefault(name, set()).add(identity)
                if identity != expected:
                    raise DataError(
                        f"{header.path}: split {name!r} holds different examples for {label} and for {other}, so "
                        "their scores cannot be paired",
                        code="different_examples",
                        hint=runs[0].suggest("predict", force=True) if len(runs) == 1 else None,
                        path=header.path,
                    )
    for name, found in identities.items():
        if len(found) > 1:
            runs[0].console.warn(f"split {name!r} does not hold the same examples for all checkpoints")


def compare_groups(runs: Sequence[Run], options: CompareOptions, groups: Groups) -> Comparison:
    """Score the groups and compare them. Raises UsageError or DataError for a requested score that does not exist."""
    from bnncli.commands.compare.measure import measure

    columns = measure(runs[0], options, groups)
    firsts = [own[0] for own in groups.values()]
    _check_wanted(options, columns, firsts)
    found = _compare(options, groups, columns, _find_baseline(runs[0], options, firsts))
    return replace(found, recommendation=_read_recommendation(runs[0])) if len(runs) == 1 else found


def _check_wanted(options: CompareOptions, columns: Sequence[Column], groups: Sequence[PredictionGroup]) -> None:
    """Raise where a requested score does not exist, or is undefined for every posterior."""
    for text, wanted in zip(options.metric, options.scores, strict=False):
        own = [column for column in columns if column.answers(wanted)]
        if not own:
            raise UsageError(
                f"--metric {text}: no posterior has this score{_list_alternatives(wanted, columns, groups)}"
            )
        if all(entry.samples is None for column in own for entry in column.entries):
            reason = own[0].entries[0].undefined
            raise DataError(
                f"--metric {text} is undefined on split {options.split!r}: {reason}", code="undefined_metric"
            )


def _list_alternatives(wanted: Quantity, columns: Sequence[Column], groups: Sequence[PredictionGroup]) -> str:
    """List the alternatives in brackets: the columns of the metric, or the splits and scores of a detection."""
    from bnncli.commands.compare.measure import OF_TWO_SPLITS

    there = [column.form for column in columns if column.row["name"] == wanted.metric]
    if there:
        return f" (have: {', '.join(there)})"
    if wanted.metric not in OF_TWO_SPLITS:
        return ""
    splits = dict.fromkeys(name for group in groups for name in group.splits(is_ood=True))
    return f" (out-of-distribution splits: {', '.join(splits) or 'none'}; scores: {', '.join(prediction_detectors())})"


def _compare(
    options: CompareOptions, groups: dict[str, list[PredictionGroup]], columns: Sequence[Column], baseline: int | None
) -> Comparison:
    from bnncli.commands.compare.output import Comparison

    judged = [
        standings(
            [entry.samples for entry in column.entries],
            higher_is_better=column.row["higher_is_better"],
            alpha=options.alpha,
            baseline=baseline,
        )
        for column in columns
    ]
    firsts = [own[0] for own in groups.values()]
    num_checkpoints = len(next(iter(groups.values())))
    row_groups = PredictedSplit(firsts[0].splits(is_ood=False)[options.split]).groups if num_checkpoints == 1 else None
    return Comparison(
        names=[_name(own, options.split) for own in groups.values()],
        columns=list(columns),
        standings=judged,
        split=options.split,
        num_examples=firsts[0].splits(is_ood=False)[options.split].meta["num_examples"],
        num_checkpoints=num_checkpoints,
        replicates=options.bootstrap,
        alpha=options.alpha,
        baseline=baseline,
        num_groups=None if row_groups is None else len(row_groups),
        shows_cost=options.by == "cost",
    )


def _name(groups: Sequence[PredictionGroup], split: str) -> Name:
    """Return the name of one posterior's predictions, over all checkpoints."""
    from bnncli.commands.compare.output import Name

    draws = {num_draws(group, group.splits(is_ood=False)[split]) for group in groups}
    own = groups[0]
    return Name(
        own.name, own.posterior, own.integrator, own.variant, draws.pop() if len(draws) == 1 else None, _cost(groups)
    )


def _cost(groups: Sequence[PredictionGroup]) -> TotalCost:
    """Return the cost of the first checkpoint's posterior; unknown where its file is gone or was replaced."""
    path = groups[0].posterior_path
    digests = {entry["content_digest"] for entry in groups[0].headers[0].inputs if entry["role"] == "posterior"}
    header = read_header(path) if path is not None and path.is_file() else None
    return total_cost(header if header is not None and header.content_digest in digests else None)


def _find_baseline(run: Run, options: CompareOptions, groups: list[PredictionGroup]) -> int | None:
    """Return the index of the posterior that --baseline names. Raises MissingInput or UsageError unless it names one."""
    name = options.baseline
    if name is None:
        return None
    labels = [group.name for group in groups]
    found = [place for place, group in enumerate(groups) if group.is_named([name], [])]
    if not found:
        raise MissingInput(
            f"--baseline: posterior {name!r} is not compared here (have: {', '.join(labels)})",
            hint=run.suggest("predict", posterior=name.partition(".")[0]),
        )
    if len(found) > 1:
        raise UsageError(f"--baseline: {name} is ambiguous; name one of {', '.join(labels[place] for place in found)}")
    if len(labels) == 1:
        raise UsageError(f"--baseline: there is no other posterior to compare {labels[0]} with")
    return found[0]


def _read_recommendation(run: Run) -> str | None:
    """Return auto's recommendation for the run; None where there is none that can be used."""
    try:
        found = open_recommendation(run)
    except DataError as error:
        run.console.warn(f"{error.message}{error.advice}")
        return None
    return None if found is None else found.sentence


def list_power_warnings(
    run: Run, options: CompareOptions, comparison: Comparison, groups: Sequence[PredictionGroup]
) -> list[str]:
    """Return warnings, one line each.

    Args:
        groups: the first checkpoint's group of each posterior.
    """
    if comparison.num_checkpoints > 3:
        return []
    if comparison.num_checkpoints > 1:
        return [
            f"with {comparison.num_checkpoints} checkpoints the paired t test detects only differences that "
            "hardly vary between them"
        ]
    others = len(comparison.names) - 1
    fewest = fewest_replicates(others, alpha=options.alpha, has_baseline=comparison.baseline is not None)
    found = []
    if options.bootstrap < fewest:
        found.append(
            f"--bootstrap {options.bootstrap} is too few replicates for {others} comparisons at --alpha "
            f"{options.alpha:g}: nothing can be significant; use at least {fewest}"
        )
    for place, group in enumerate(groups):
        ratios = {
            column.form: ratio
            for column, standings in zip(comparison.columns, comparison.standings, strict=True)
            if (ratio := _compute_ratio(place, [entry.samples for entry in column.entries], standings)) > 1
        }
        if ratios:
            found.append(_format_draws_warning(run, group, comparison.names[place].draws, ratios))
    return found


_ROUNDING = (
    1e-7  # of a score: the draws of a single network differ by as much in float32, and more of them change nothing
)


def _compute_ratio(place: int, samples: Sequence[Sample | None], standings: Sequence[Standing]) -> float:
    """Return the squared integration error of a posterior over the sampling variance of its difference from the reference.

    For the reference itself, return the smallest ratio over all others; 0 where there is nothing to compare.
    """
    own = samples[place]
    reference = [
        s for s, standing in zip(samples, standings, strict=True) if s is not None and standing.against is None
    ]
    if own is None or len(reference) != 1 or own.integration_variance < _ROUNDING**2:
        return 0.0
    ratios = []
    for sample, standing in zip(samples, standings, strict=True):
        if standing.against is None or standing.against.standard_error is None or sample is None:
            continue
        sampling = standing.against.standard_error**2 - sample.integration_variance - reference[0].integration_variance
        ratio = own.integration_variance / sampling if sampling > 0 else math.inf
        if sample is own:
            return ratio
        ratios.append(ratio)
    return min(ratios, default=0.0)


_MOST_DRAWS = 10_000  # suggested: where more would be needed the posteriors hardly differ but for the draws


def _format_draws_warning(run: Run, group: PredictionGroup, draws: int | None, ratios: dict[str, float]) -> str:
    """Return the warning that draws limit a comparison, with the number that would halve their error relative to the examples'."""
    header = group.headers[0]
    text = (
        f"{group.name}: the integration error of its {draws} draws exceeds the sampling error of its difference "
        f"in {', '.join(ratios)}"
    )
    if draws is None or header.meta["samples"] is None:
        return f"{text}; only more draws from the posterior itself would help"
    needed = draws * min(4 * max(ratios.values()), _MOST_DRAWS)
    wanted = max(2 * draws, min(_MOST_DRAWS, _round_up(needed)))
    command = run.suggest(
        "predict",
        posterior=group.posterior,
        integrator=group.integrator,
        samples=wanted,
        qmc=bool(header.meta.get("settings", {}).get("qmc")),
        name=group.name if group.name != f"{group.posterior}.{group.variant}" else None,
        force=True,
    )
    return f"{text}; for a sharper test, run: {command}"


def _round_up(number: float) -> int:
    """Round up to one significant digit."""
    unit = 10 ** math.floor(math.log10(number))
    return math.ceil(number / unit) * unit


def _inputs(groups: dict[str, list[PredictionGroup]]) -> list[dict[str, str]]:
    return [
        source_json(Source(f"predictions.{label}.{header.meta['split']}", header.path, header.content_digest))
        for label, own in groups.items()
        for group in own
        for header in group.headers
    ]


def _describe_gains(runs: list[Run], comparison: Comparison) -> list[Table]:
    """Describe where the gains of the posteriors come from, for a single checkpoint."""
    if len(runs) > 1:
        return []
    names, headers = {name.posterior for name in comparison.names}, {}
    for path in runs[0].folder.posteriors():
        if path.stem in names:
            with suppress(DataError):  # a damaged file is no posterior that is compared: its predictions are
                headers[path.stem] = read_header(path)
    return gain_table(headers)
