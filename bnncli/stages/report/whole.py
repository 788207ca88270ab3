"""All sections of a report, in the order that they are read in, and the page of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from bnncli import __version__
from bnncli.artifacts.files import read_header
from bnncli.figures.pages import MOST_BYTES, Block, Markup, Missing, Section, fitted, page
from bnncli.names import counted
from bnncli.options.report import ReportOptions
from bnncli.session.run import Run
from bnncli.stages.report.calibration import calibration
from bnncli.stages.report.chains import chains
from bnncli.stages.report.decisions import decisions
from bnncli.stages.report.detection import detection
from bnncli.stages.report.fidelity import fidelity
from bnncli.stages.report.fits import fits
from bnncli.stages.report.inputs import inputs
from bnncli.stages.report.intact import check_is_something_left, damaged
from bnncli.stages.report.origins import origins
from bnncli.stages.report.posteriors import posteriors
from bnncli.stages.report.scores import scores
from bnncli.stages.report.subject import Subject, tried
from bnncli.stages.report.terms import SECTION, terms
from bnncli.stages.report.together import together
from bnncli.stages.report.verdict import summary_of, verdict
from bnncli.stages.report.words import listed_in_words


class ReportPart(NamedTuple):
    """A section as a report has it: its name and title, and what makes its blocks."""

    name: str
    title: str
    make: Callable[[Subject], list[Block]]


PARTS = (
    ReportPart("verdict", "Verdict", verdict),
    ReportPart("scores", "Scores", scores),
    ReportPart("calibration", "Calibration", calibration),
    ReportPart("confidence", "Confidence and out-of-distribution detection", detection),
    ReportPart("decisions", "Decisions with guarantees", decisions),
    ReportPart("posteriors", "Posteriors against the exact posterior", posteriors),
    ReportPart("chains", "Chains", chains),
    ReportPart("fits", "Fits", fits),
    ReportPart("fidelity", "Distance to a reference", fidelity),
    ReportPart("inputs", "Most and least certain inputs", inputs),
    ReportPart("origins", "Commands and files", origins),
)
# Of several checkpoints each has less: the rest is in reports of one.
_OF_EACH = ("verdict", "origins", "scores", "calibration", "posteriors")
_OF_MANY = ("verdict",)
# What is left out of a page that would be too large, the first first.
_LEAST = (
    "inputs",
    "fits",
    "chains",
    "fidelity",
    "confidence",
    "posteriors",
    "calibration",
    "origins",
    "scores",
    "verdict",
)
_MOST_TOLD = 12  # sections that are left out
_FEW = 3  # checkpoints, up to which that is all of _OF_EACH


def sections_of(runs: Sequence[Run], options: ReportOptions) -> tuple[list[Section], list[str]]:
    """The sections, and what is to be said on a terminal.

    Raises:
        MissingInput: a checkpoint has nothing of a name that was given.
        DataError: what was named is damaged, or nothing is left to report on.
    """
    many = len(runs) > 1
    subjects = [
        Subject(run, options, f"c{place}-" if many else "", damaged(run, options.posterior))
        for place, run in enumerate(runs, start=1)
    ]
    for subject in subjects:
        subject.check_named()
        check_is_something_left(subject)
    explained = Section(SECTION, "What the terms mean", terms())
    if not many:
        return [*(_made(part, subjects[0]) for part in PARTS), explained], [summary_of(subjects[0])]
    names = _OF_EACH if len(runs) <= _FEW else _OF_MANY
    parts = [part for part in PARTS if part.name in names]
    found = [Section("comparison", "The checkpoints together", together(runs, subjects))]
    found += [_made(part, subject) for subject in subjects for part in parts]
    return [*found, explained], [f"{one.name}: {summary_of(one)}" for one in subjects]


def page_of(runs: Sequence[Run], sections: Sequence[Section], made_with: Mapping[str, Any]) -> bytes:
    """The file, of at most MOST_BYTES: where all would be more, the least important sections are left out, and it says so."""
    names = [run.checkpoint_path.name for run in runs]
    what = listed_in_words(names) if len(names) <= 3 else counted(len(names), "checkpoint")
    lead = f"bnncli {__version__}, results of {_newest(runs)}"
    made_by = "This file opens without a network connection. It holds aggregates, not the data, except for the inputs it shows."

    def whole_page(kept: Sequence[Section], ready: dict[str, Markup]) -> bytes:
        return page(f"Report on {what}", lead, kept, made_by=made_by, options=made_with, ready=ready)

    found = fitted(sections, importance=_importance, page_of=whole_page, note=_note, most_bytes=MOST_BYTES)
    if found.left_out:
        runs[0].console.warn(
            f"the report is limited to {MOST_BYTES:,} bytes: {_titles(found.left_out)} omitted; use fewer "
            "--posterior or --examples"
        )
    return found.content


def _newest(runs: Sequence[Run]) -> str:
    """When the newest posterior or prediction that can be read was made, to the minute."""
    found = []
    for run in runs:
        for path in (*run.folder.posteriors(), *run.folder.prediction_files()):
            header = tried(partial(read_header, path))
            found += [] if isinstance(header, Missing) else [str(header.provenance.get("created_at", ""))]
    newest = max(found, default="")
    return f"{newest[:10]} {newest[11:16]} UTC" if newest else "an unknown date"


def _importance(section: Section) -> float:
    """The place of a section among those that are left out of a page that is too large: the lowest goes first."""
    name = section.name.rpartition("-")[2]
    return _LEAST.index(name) if name in _LEAST else len(_LEAST)


def _note(gone: Sequence[Section]) -> Block:
    return Missing(
        f"To keep the page below {MOST_BYTES:,} bytes, {_titles(gone)} omitted. Use fewer --posterior or "
        "--examples; --figures writes all figures as files."
    )


def _titles(gone: Sequence[Section]) -> str:
    """The sections that are left out, some by their titles, as the subject of a sentence, with its verb."""
    titles = [f"\N{LEFT DOUBLE QUOTATION MARK}{section.title}\N{RIGHT DOUBLE QUOTATION MARK}" for section in gone]
    rest = len(titles) - _MOST_TOLD
    shown = titles[:_MOST_TOLD] + ([counted(rest, "more part")] if rest > 0 else [])
    return f"{listed_in_words(shown)} {'is' if len(gone) == 1 else 'are'}"


def _made(part: ReportPart, subject: Subject) -> Section:
    """A section; of several checkpoints with this one's name in its title. What cannot be shown says why."""
    subject.run.console.poll(f"report on {subject.name}: {part.name}")
    blocks = tried(partial(part.make, subject))
    title = f"{subject.name}: {part.title[:1].lower()}{part.title[1:]}" if subject.key else part.title
    return Section(f"{subject.key}{part.name}", title, [blocks] if isinstance(blocks, Missing) else blocks)
