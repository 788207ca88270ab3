"""report: one self-contained HTML file of all that is known of a run, or of several, the verdict first."""

from __future__ import annotations

from pathlib import Path

from bnncli.names import counted
from bnncli.options.command import READ, Argument, Command, ComputeOptions, InputOptions, LockOptions, WriteOptions
from bnncli.options.report import ReportOptions
from bnncli.session.network_fit import check_network_fits
from bnncli.session.run import Result, Run, each_checkpoint
from bnncli.stages.report.files import (
    UNWRITTEN,
    check_folder,
    check_page,
    figure_paths,
    locked,
    planned,
    recorded_options,
    said_when_interrupted,
    write_files,
)

COMMAND = Command(
    "Write an HTML report of a run: verdict, scores, figures, example inputs.",
    "The file is self-contained and reproducible byte for byte. It shows the verdict of diagnose and the scores "
    "of evaluate (run evaluate first), with a table behind each figure. If you give several checkpoints, it "
    "compares them.",
    (ReportOptions, InputOptions, ComputeOptions, WriteOptions, LockOptions, *READ),
    (
        "bnncli report ckpt.pt",
        "bnncli report ckpt.pt --out report.html --figures figures --figure-format pdf",
        "bnncli report seed-1.pt seed-2.pt seed-3.pt",
    ),
    (Argument("ckpt", "Checkpoints to report on. If you give several, they are compared.", is_many=True),),
    section="Judge",
    place=40,
)


def run(run: Run, options: ReportOptions) -> Result:
    """Gather, draw and write, once it is known what of, and where to."""
    runs = each_checkpoint(run)
    for one in runs:
        check_folder(one)
    path = check_page(run, runs, options)
    with said_when_interrupted(UNWRITTEN):
        from bnncli.stages.report.intact import check_run  # slow to import, like the work

        for one in runs:
            check_run(one)
            check_network_fits(one, ("train", "val", options.split or "test"), is_accepted=options.accept_poor_network)
    if run.write.dry_run:
        return planned(path, options)
    with locked(run, runs, path):
        check_page(run, runs, options)  # who had the lock may have written it
        return _written(run, runs, path, options)


def _written(run: Run, runs: list[Run], path: Path, options: ReportOptions) -> Result:
    from bnncli.stages.report import whole

    with said_when_interrupted(UNWRITTEN):
        sections, summaries = whole.sections_of(runs, options)
        figures = [figure for section in sections for figure in section.figures]
        paths = figure_paths(run, figures, path, options)
        content = whole.page_of(runs, sections, recorded_options(runs, options))
    result = write_files(run, (path, content), figures, paths)
    result.summary = [*summaries, counted(len(figures), "figure")]
    result.extra = {"verdicts": summaries, "figures": [figure.name for figure in figures]}
    return result
