"""compare: the scores of posteriors side by side, with standard errors and tests of which differences are real."""

from __future__ import annotations

from contextlib import suppress

from bnncli.artifacts.files import read_header
from bnncli.artifacts.provenance import Source
from bnncli.errors import DataError, UsageError
from bnncli.options.command import READ, Argument, Command, InputOptions, WriteOptions
from bnncli.options.compare import CompareOptions
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import Result, Run, Table, each_checkpoint, source_json
from bnncli.session.val_report import gain_table
from bnncli.stages.compare.comparing import compared, compared_groups
from bnncli.stages.compare.plot import draw_plot, planned_plot, planned_result
from bnncli.stages.compare.power import power_warnings
from bnncli.stages.compare.tables import Comparison, as_csv, as_json, as_latex, as_markdown, as_table

COMMAND = Command(
    "Compare the scores of posteriors, with standard errors and tests.",
    "With one checkpoint, bootstraps over examples; with several (seeds of one experiment), tests over "
    "checkpoints. Marks the best score in each column and those that are not significantly worse (family-wise "
    "--alpha per column). With --baseline, tests each posterior against the baseline (Holm).",
    (CompareOptions, InputOptions, WriteOptions, *READ),
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

_FORMATS = {"csv": as_csv, "markdown": as_markdown, "latex": as_latex}


def run(run: Run, options: CompareOptions) -> Result:
    """Measure, test and print; only --plot writes."""
    if run.console.options.json and options.format != "text":
        raise UsageError(f"give only one of --format {options.format} and --json")
    runs = each_checkpoint(run)
    groups = compared_groups(runs, options)
    plot = None if options.plot is None else planned_plot(run, options.plot, options.split)
    if run.write.dry_run:
        return Result("planned") if plot is None else planned_result(plot)
    comparison = compared(runs, options, groups)
    for text in power_warnings(runs[0], options, comparison, [own[0] for own in groups.values()]):
        run.console.warn(text)
    recommended = [] if comparison.recommendation is None else [f"auto: {comparison.recommendation}"]
    result = Result(
        extra=as_json(comparison) | {"inputs": _inputs(groups)},
        tables=[as_table(comparison), *_gains(runs, comparison)] if options.format == "text" else [],
        lines=recommended if options.format == "text" else _FORMATS[options.format](comparison),
        summary=comparison.unknown_errors(),
    )
    if plot is not None:
        result.add(draw_plot(run, plot, comparison))
    return result


def _gains(runs: list[Run], comparison: Comparison) -> list[Table]:
    """What the gains of the posteriors come from; of one checkpoint."""
    if len(runs) > 1:
        return []
    names, headers = {name.posterior for name in comparison.names}, {}
    for path in runs[0].folder.posteriors():
        if path.stem in names:
            with suppress(DataError):  # a damaged file is no posterior that is compared: its predictions are
                headers[path.stem] = read_header(path)
    return gain_table(headers)


def _inputs(groups: dict[str, list[PredictionGroup]]) -> list[dict[str, str]]:
    return [
        source_json(Source(f"predictions.{label}.{header.meta['split']}", header.path, header.content_digest))
        for label, own in groups.items()
        for group in own
        for header in group.headers
    ]
