"""All sections of a report, in the order that they are read in, and the page of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from bnncli import __version__
from bnncli.errors import MissingInput
from bnncli.names import counted
from bnncli.options import ReportOptions
from bnncli.pages.blocks import Block, Missing, Section
from bnncli.pages.page import MOST_BYTES, page
from bnncli.run.session import Run
from bnncli.stages.report.calibration import calibration
from bnncli.stages.report.chains import chains
from bnncli.stages.report.decisions import decisions
from bnncli.stages.report.detection import detection
from bnncli.stages.report.fidelity import fidelity
from bnncli.stages.report.fits import fits
from bnncli.stages.report.inputs import inputs
from bnncli.stages.report.origins import origins
from bnncli.stages.report.posteriors import posteriors
from bnncli.stages.report.scores import scores
from bnncli.stages.report.subject import Subject, tried
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
    ReportPart("origins", "What was fitted from what", origins),
    ReportPart("scores", "Scores", scores),
    ReportPart("calibration", "Calibration", calibration),
    ReportPart("confidence", "Confidence, in and out of distribution", detection),
    ReportPart("decisions", "Decisions with guarantees", decisions),
    ReportPart("posteriors", "Posteriors against their target", posteriors),
    ReportPart("chains", "Chains", chains),
    ReportPart("fits", "How they were fitted", fits),
    ReportPart("fidelity", "Fidelity to a reference", fidelity),
    ReportPart("inputs", "The most and the least certain inputs", inputs),
)
# Of several checkpoints each has less: the rest is in reports of one.
_OF_EACH = ("verdict", "origins", "scores", "calibration", "posteriors")
_OF_MANY = ("verdict",)
_FEW = 3  # checkpoints, up to which that is all of _OF_EACH


def sections_of(runs: Sequence[Run], options: ReportOptions) -> tuple[list[Section], list[str]]:
    """The sections, and what is to be said on a terminal.

    Raises:
        MissingInput: a checkpoint has no run folder, or nothing of a name that was given.
    """
    for run in runs:
        if not run.folder.root.is_dir():
            raise MissingInput(
                f"{run.checkpoint_path} has no run folder (looked for {run.folder.root})",
                hint="bnncli extract-features --help",
                path=run.folder.root,
            )
    many = len(runs) > 1
    subjects = [Subject(run, options, f"c{place}-" if many else "") for place, run in enumerate(runs, start=1)]
    for subject in subjects:
        subject.check_named()
    if not many:
        return [_made(part, subjects[0]) for part in PARTS], [summary_of(subjects[0])]
    names = _OF_EACH if len(runs) <= _FEW else _OF_MANY
    parts = [part for part in PARTS if part.name in names]
    found = [Section("comparison", "The checkpoints together", together(runs, subjects))]
    found += [_made(part, subject) for subject in subjects for part in parts]
    return found, [f"{one.name}: {summary_of(one)}" for one in subjects]


def page_of(runs: Sequence[Run], sections: Sequence[Section]) -> bytes:
    """The file."""
    names = [run.checkpoint_path.name for run in runs]
    what = listed_in_words(names) if len(names) <= 3 else counted(len(names), "checkpoint")
    lead = "Calibrated probabilities, what they are worth, and how sure one can be of that."
    made_by = f"Written by bnncli {__version__}. This file needs no network, and holds aggregates, not the data, but for the inputs that it shows."
    content = page(f"Report on {what}", lead, sections, made_by=made_by)
    if len(content) > MOST_BYTES:
        runs[0].console.warn(
            f"the report has {len(content):,} bytes: fewer of --posterior or --examples make it smaller"
        )
    return content


def _made(part: ReportPart, subject: Subject) -> Section:
    """A section; of several checkpoints with this one's name in its title. What cannot be shown says why."""
    subject.run.console.poll(f"report on {subject.name}: {part.name}")
    blocks = tried(partial(part.make, subject))
    title = f"{subject.name}: {part.title[:1].lower()}{part.title[1:]}" if subject.key else part.title
    return Section(f"{subject.key}{part.name}", title, [blocks] if isinstance(blocks, Missing) else blocks)
