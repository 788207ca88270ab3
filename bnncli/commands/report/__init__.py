"""report: one self-contained HTML file about a run or several, the verdict first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import check_takes_files, check_writable
from bnncli.artifacts.outputs import check_figure_path, check_page_path, write_figure, write_page
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import Interrupted, MissingInput, UsageError, WriteError
from bnncli.figures.style import FigureContent, figure_file
from bnncli.names import count_noun
from bnncli.numerics.digests import json_sha256
from bnncli.options.command import (
    READ,
    Argument,
    Command,
    ComputeOptions,
    InputOptions,
    LockOptions,
    TrackOptions,
    WriteOptions,
    accept_poor_network_option,
)
from bnncli.options.declaration import CheckedOptions, option
from bnncli.options.shared import trust_code_option
from bnncli.session.network_fit import check_network_fits
from bnncli.session.run import Result, Run, each_checkpoint
from bnncli.system.input_files import convert_read_errors

FIGURE_FORMATS = ("png", "pdf", "svg")  # the first is what is taken where none is named


@dataclass(frozen=True)
class ReportOptions(CheckedOptions):
    """Options of report."""

    out: str | None = option(
        None,
        "Write to this file. Default: report.html (or comparison.html) in the first run folder.",
        short="-o",
        metavar="FILE",
        writes=True,
    )
    posterior: list[str] = option([], "Report only this posterior. Default: all posteriors in the run.", metavar="NAME")
    split: str | None = option(
        None,
        "In-distribution split to report. Default: test, else the first.",
        metavar="SPLIT",
    )
    examples: int = option(
        6,
        "Show this many of the most certain inputs, and as many of the least certain. 0 keeps your data out of "
        "the file.",
        minimum=0,
        maximum=24,
    )
    figures: str | None = option(None, "Also write the figures to this folder.", metavar="DIR", writes=True)
    figure_format: list[str] = option(
        [], "Format of the figure files. Default: png.", choices=FIGURE_FORMATS, metavar="png|pdf|svg"
    )
    model_card: str | None = option(
        None,
        "Also write a section on the run, and its scores as metadata, into this Hugging Face model card. "
        "Everything else in the file stays; a missing file is created.",
        metavar="FILE",
        writes=True,
    )
    trust_code: bool = trust_code_option(is_recorded=False)
    accept_poor_network: bool = accept_poor_network_option(is_recorded=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.figure_format and self.figures is None:
            raise UsageError("\0figure_format\0 needs a folder for the figures: add \0figures\0 DIR")
        for name, value in (("out", self.out), ("model_card", self.model_card)):
            if value is not None and Path(value).name in ("", ".."):
                hint = f"add a file name: \0{name}\0 FOLDER/NAME"
                raise UsageError(f"\0{name}\0: expected a file; got {value!r}", hint=hint)

    @property
    def forms(self) -> list[str]:
        """Return the formats of the figures, each once."""
        return list(dict.fromkeys(self.figure_format)) or [FIGURE_FORMATS[0]]


COMMAND = Command(
    "Write an HTML report of a run: verdict, scores, figures, example inputs.",
    "The file is self-contained and reproducible byte for byte. It shows the verdict of diagnose and the scores "
    "of evaluate (run evaluate first), with a table behind each figure. If you give several checkpoints, it "
    "compares them.",
    (ReportOptions, InputOptions, ComputeOptions, WriteOptions, LockOptions, TrackOptions, *READ),
    (
        "bnncli report ckpt.pt",
        "bnncli report ckpt.pt --out report.html --figures figures --figure-format pdf",
        "bnncli report ckpt.pt --model-card README.md",
        "bnncli report seed-1.pt seed-2.pt seed-3.pt",
    ),
    (Argument("ckpt", "Checkpoints to report on. If you give several, they are compared.", is_many=True),),
    section="Judge",
    place=40,
)


UNWRITTEN = "no report was written"  # where a signal has come before it was


def execute(run: Run, options: ReportOptions) -> Result:
    """Check the inputs and the output path, then gather, draw and write."""
    runs = each_checkpoint(run)
    for one in runs:
        check_folder(one)
    path = check_page(run, runs, options)
    with report_interruption(UNWRITTEN):
        from bnncli.commands.report.subject import check_run  # slow to import, like the work

        for one in runs:
            check_run(one)
            check_network_fits(one, ("train", "val", options.split or "test"), is_accepted=options.accept_poor_network)
    if run.write.dry_run:
        return build_dry_run_result(path, options)
    with lock_page(run, runs, path):
        check_page(run, runs, options)  # who had the lock may have written it
        return _write_page(run, runs, path, options)


def check_folder(run: Run) -> None:
    """Raise MissingInput unless there is a run folder with features."""
    if not run.folder.root.is_dir():
        raise run.no_run()
    if not run.folder.splits():
        raise MissingInput(
            f"{run.folder.root} has no features",
            hint=run.suggest("extract-features", model="MODEL", data=["train=SPEC", "test=SPEC"]),
            path=run.folder.root,
        )


_FLAG = "--out"


def check_page(run: Run, runs: Sequence[Run], options: ReportOptions) -> Path:
    """Return the path of the page, after checking that it may be written, and the folder of figures.

    Raises:
        UsageError, OutputExists: as in check_page_path.
    """
    path = page_path(runs, options)
    others = [one.checkpoint_path for one in runs]
    check_page_path(path, _FLAG, collect_options(runs, options), force=run.write.force, others=others)
    if options.figures is not None:  # their names are known only after the work
        check_writable(Path(options.figures), hint="choose another place with --figures")
    if options.model_card is not None:
        if len(runs) > 1:
            raise UsageError(f"\0model_card\0 needs one checkpoint; got {len(runs)}")
        from bnncli.commands.report.card import check_card  # slow to import, like the work

        check_card(run, Path(options.model_card), [path, *others])
    return path


_NAMES = ("report.html", "comparison.html")  # of one checkpoint, of several


def page_path(runs: Sequence[Run], options: ReportOptions) -> Path:
    """Return the path of the page: as named, or in the run folder of the first checkpoint."""
    if options.out is not None:
        return Path(options.out)
    return runs[0].folder.root / _NAMES[len(runs) > 1]


_SIZE = 1 << 20


def build_dry_run_result(path: Path, options: ReportOptions) -> Result:
    """Return the result of --dry-run."""
    output: list[dict[str, Any]] = [
        {"role": "report", "path": str(path), "planned": "compute", "estimated_bytes": _SIZE}
    ]
    lines = [f"write: {path}"]
    if options.figures is not None:
        lines.append(f"draw: figures into {options.figures}, as {', '.join(options.forms)}")
    if options.model_card is not None:
        output.append({"role": "model-card", "path": options.model_card, "planned": "compute"})
        lines.append(f"write: {options.model_card}")
    return Result("planned", output, lines=lines)


@contextmanager
def lock_page(run: Run, runs: Sequence[Run], path: Path) -> Iterator[None]:
    """Hold the lock of the page, after checking that its folder is writable.

    Raises:
        Locked: another process writes it.
        OutputExists: its folder is not writable.
    """
    check_takes_files(path, hint=f"choose another place with {_FLAG}")
    with artifact_lock(runs[0].folder.lock(path), wait=run.lock.wait, poll=run.console.poll):
        yield


def _write_page(run: Run, runs: list[Run], path: Path, options: ReportOptions) -> Result:
    from bnncli.commands.report import whole
    from bnncli.commands.report.card import build_card

    with report_interruption(UNWRITTEN):
        subjects = whole.open_subjects(runs, options)
        sections, summaries = whole.build_sections(runs, subjects)
        figures = [figure for section in sections for figure in section.figures]
        paths = figure_paths(run, figures, path, options)
        content = whole.build_page(runs, sections, collect_options(runs, options))
        card = None if options.model_card is None else build_card(subjects[0], Path(options.model_card))
    result = write_files(run, (path, content), figures, paths)
    if card is not None:
        with report_interruption("the report was written, but not the model card"):
            result.add(_publish_file("model-card", Path(options.model_card or ""), card, _write_behind_link))
    result.summary = [*summaries, count_noun(len(figures), "figure")]
    result.extra = {"verdicts": summaries, "figures": [figure.name for figure in figures]}
    return result


def _write_behind_link(target: Path, content: bytes) -> str:
    """Publish a file of the user's where it lies: a link to it stays one."""
    return write_page(target.resolve(), content)


def figure_paths(run: Run, figures: Sequence[FigureContent], page: Path, options: ReportOptions) -> list[Path]:
    """Return the paths of the figures, format by format, after checking them. Raises OutputExists, UsageError."""
    if options.figures is None:
        return []
    paths = [Path(options.figures) / f"{figure.name}.{form}" for form in options.forms for figure in figures]
    for path in paths:
        check_figure_path(path, "--figures", force=run.write.force, others=[page])
    return paths


_MOST_RECORDED = 1 << 13  # letters of a request that stand in the page itself, not as their digest


def collect_options(runs: Sequence[Run], options: ReportOptions) -> dict[str, Any]:
    """Return the options that change the page, as JSON. The page records them, and a page with other options is not replaced.

    --trust-code is not among them: a page says itself where code would have to be trusted.
    """
    found = {
        "checkpoints": [run.checkpoint_path.name for run in runs],
        "examples": options.examples,
        "posterior": list(dict.fromkeys(options.posterior)),
        "seed": runs[0].compute.seed,
        "split": options.split,
    }
    return found if len(str(found)) <= _MOST_RECORDED else {"request": json_sha256(found)}


def write_files(run: Run, page: tuple[Path, bytes], figures: Sequence[FigureContent], paths: Sequence[Path]) -> Result:
    """Publish the page and the figures, and leave identical existing files untouched.

    Raises:
        WriteError: a file could not be written. Those before it are complete.
    """
    path, content = page
    with report_interruption(UNWRITTEN):
        result = _publish_file("report", path, content, write_page)
    result.outputs[0]["bytes"] = len(content)
    names = {figure.name: figure for figure in figures}
    with report_interruption("the report was written, but not all of its figures"):
        for target in paths:
            run.console.poll(f"draw {target.name}")
            drawn = figure_file(names[target.stem], target.suffix[1:])
            try:
                result.add(_publish_file(f"figure.{target.stem}", target, drawn, write_figure))
            except WriteError as error:
                message = f"--figures: {target} could not be written; the report is complete"
                raise WriteError(message, hint=error.hint, path=target) from None
    return result


@contextmanager
def report_interruption(how_far: str) -> Iterator[None]:
    """Report a signal inside the block with what exists of the report, instead of the step it interrupted."""
    try:
        yield
    except Interrupted as error:
        raise Interrupted(error.exit - 128, f"{error.message.partition(' at ')[0]}; {how_far}") from None


def _publish_file(role: str, path: Path, content: bytes, write: Callable[[Path, bytes], str]) -> Result:
    """Publish one file and return its output entry."""
    with convert_read_errors(path):
        there = path.read_bytes() if path.is_file() else None
    output: dict[str, Any] = {"role": role, "path": str(path)}
    if there == content:
        return Result("up_to_date", [output | {"content_digest": f"sha256:{hashlib.sha256(content).hexdigest()}"}])
    digest = write(path, content)
    return Result("computed" if there is None else "replaced", [output | {"content_digest": digest}])
