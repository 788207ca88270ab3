"""Put together all sections of a report, compare several checkpoints, and make the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli import __version__
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import differences
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.commands.compare import CompareOptions, compare_groups, find_common_groups
from bnncli.commands.compare.output import Comparison, build_table, format_labels, score_panels
from bnncli.commands.report.sections import (
    calibration,
    chains,
    data_table,
    decisions,
    detection,
    fidelity,
    fits,
    posteriors,
    scores,
)
from bnncli.commands.report.subject import (
    MOST_DRAWN,
    Subject,
    check_is_something_left,
    find_damaged,
    inputs,
    origins,
    try_find,
)
from bnncli.commands.report.verdict import SECTION, format_summary, join_names, terms, verdict
from bnncli.figures.pages import (
    MOST_BYTES,
    Block,
    Markup,
    Missing,
    Section,
    bullets,
    element,
    join_markup,
    page,
    paragraph,
    render_fitting_sections,
    strong,
)
from bnncli.figures.scores import ScoreIntervals
from bnncli.names import count_noun
from bnncli.session.run import Run

if TYPE_CHECKING:
    from bnncli.commands.report import ReportOptions


class ReportPart(NamedTuple):
    """A section of a report: its name, its title, and the function that makes its blocks."""

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
_FEW = 3  # checkpoints, up to which that is all of _OF_EACH


def open_subjects(runs: Sequence[Run], options: ReportOptions) -> list[Subject]:
    """Return what there is to report on each checkpoint.

    Raises:
        MissingInput: a checkpoint has nothing of a given name.
        DataError: a named artifact is damaged, or nothing is left to report on.
    """
    many = len(runs) > 1
    subjects = [
        Subject(run, options, f"c{place}-" if many else "", find_damaged(run, options.posterior))
        for place, run in enumerate(runs, start=1)
    ]
    for subject in subjects:
        subject.check_named()
        check_is_something_left(subject)
    return subjects


def build_sections(runs: Sequence[Run], subjects: Sequence[Subject]) -> tuple[list[Section], list[str]]:
    """Return the sections, and the lines for the terminal."""
    explained = Section(SECTION, "What the terms mean", terms())
    if len(runs) == 1:
        return [*(_build_section(part, subjects[0]) for part in PARTS), explained], [format_summary(subjects[0])]
    names = _OF_EACH if len(runs) <= _FEW else _OF_MANY
    parts = [part for part in PARTS if part.name in names]
    found = [Section("comparison", "The checkpoints together", together(runs, subjects))]
    found += [_build_section(part, subject) for subject in subjects for part in parts]
    return [*found, explained], [f"{one.name}: {format_summary(one)}" for one in subjects]


def _build_section(part: ReportPart, subject: Subject) -> Section:
    """Make a section, with the checkpoint in its title if there are several. What cannot be shown gives the reason."""
    subject.run.console.poll(f"report on {subject.name}: {part.name}")
    blocks = try_find(partial(part.make, subject))
    title = f"{subject.name}: {part.title[:1].lower()}{part.title[1:]}" if subject.key else part.title
    return Section(f"{subject.key}{part.name}", title, [blocks] if isinstance(blocks, Missing) else blocks)


def together(runs: Sequence[Run], subjects: Sequence[Subject]) -> list[Block]:
    """Return the section."""
    options = CompareOptions(posterior=subjects[0].options.posterior, split=subjects[0].split)
    comparison = try_find(
        lambda: compare_groups(
            runs,
            options,
            find_common_groups(runs, options, leave_out=frozenset().union(*(one.left_out for one in subjects))),
        )
    )
    if isinstance(comparison, Missing):
        return [comparison]
    table = build_table(comparison)
    panels = [panel for panel in score_panels(comparison) if any(line.value is not None for line in panel.lines)]
    figure = ScoreIntervals(
        f"scores-of-all-{comparison.split}",
        format_labels(comparison)[:MOST_DRAWN],
        [panel._replace(title=panel.title.replace(", ", "\n"), lines=panel.lines[:MOST_DRAWN]) for panel in panels],
        f"Means over {len(runs)} checkpoints on {comparison.split} with 95% intervals",
        "Small dots are single checkpoints. The filled marks come from paired tests over the whole panel, and "
        "the intervals from each posterior separately.",
        "best, or not significantly worse",
        "significantly worse than another",
        f"paired tests at level {comparison.alpha:g}",
    )
    posteriors = [name.posterior for name in comparison.names]
    return [
        _verdict(comparison, subjects),
        paragraph(describe_differences(subjects, posteriors, comparison.split)),
        data_table(
            table, "comparison-table", f"Scores on {comparison.split} over {len(runs)} checkpoints, computed by compare"
        ),
        figure,
    ]


def _verdict(comparison: Comparison, subjects: Sequence[Subject]) -> Markup:
    """Describe which posteriors are best over all checkpoints, and which diagnose recommends for each."""
    first = describe_lowest(comparison, len(subjects))
    used: dict[str, list[str]] = {}
    predicting: dict[str, list[str]] = {}
    for subject in subjects:
        use = None if isinstance(subject.judgement, Missing) else subject.judgement.verdict.use
        used.setdefault(use or "none yet", []).append(subject.name)
        chosen = subject.recommended
        name = "unknown" if chosen is None else f"{chosen.posterior} by {chosen.integrator}"
        predicting.setdefault(name, []).append(subject.name)
    words = bullets(
        [
            join_markup(strong(title), f"{_list_by_name(names)}.")
            for title, names in (("Predict: ", predicting), ("Matches the exact posterior: ", used))
        ]
    )
    return element("div", paragraph(first), words, class_="verdict")


_MOST_NAMED = 12  # checkpoints


def describe_lowest(comparison: Comparison, num_checkpoints: int) -> str:
    """Describe which posteriors have the lowest NLL, as far as tests can tell."""
    place = next((place for place, one in enumerate(comparison.columns) if one.row["name"] == "nll"), None)
    samples = [] if place is None else [entry.samples for entry in comparison.columns[place].entries]
    known = [row for row, sample in enumerate(samples) if sample is not None]
    if place is None or not known:
        return "No posterior has an NLL for every checkpoint."
    names = format_labels(comparison)
    best = [names[row] for row in known if comparison.is_marked(place, row)]
    where = f"on {comparison.split}, over {count_noun(num_checkpoints, 'checkpoint')}"
    if len(known) == 1:
        return f"{names[known[0]]} is the only posterior with predictions on {comparison.split} for every checkpoint."
    if len(best) == 1:
        return f"{best[0]} has the lowest NLL {where}."
    named = join_names(best, most=_MOST_NAMED)
    if len(best) == len(known):
        return f"The NLLs of {named} do not differ significantly {where}."
    return f"One of {named} has the lowest NLL {where}; these checkpoints do not show which."


def _list_by_name(found: Mapping[str, list[str]]) -> str:
    """List names, each with its checkpoints."""
    return "; ".join(f"{name} for {join_names(where, most=_MOST_NAMED)}" for name, where in found.items())


def describe_differences(subjects: Sequence[Subject], posteriors: Sequence[str], split: str) -> str:
    """Describe what makes the numbers of different checkpoints differ, in a sentence or two.

    Args:
        posteriors: names of the posteriors compared.
        split: split they are compared on.
    """
    named = join_names([subject.name for subject in subjects], most=_MOST_NAMED)
    weights = {header.weights_digest for one in subjects if (header := _any_features(one)) is not None}
    if len(weights) == 1 and None not in weights:
        return f"{named} are the same network. Differences between their numbers do not come from training."
    found = [*_examples(subjects, split), *_models(subjects), *_options(subjects, posteriors)]
    if found:
        return (
            f"Each posterior was fitted to {named}, which differ by more than their random training: "
            f"{'; '.join(found)}. Standard errors and tests treat all of these differences as chance."
        )
    if not all(_model(subject) for subject in subjects):
        return (
            f"Each posterior was fitted to {named} with the same options. bnncli cannot tell whether the "
            "examples were the same, because the features were given as arrays. If so, differences between its "
            "numbers come from the random training."
        )
    return (
        f"Each posterior was fitted to {named}, on the same examples with the same options. If the networks were "
        "trained alike, differences between its numbers come from the random training."
    )


_SPLITS = {"train": "training examples", "val": "validation examples"}


def _examples(subjects: Sequence[Subject], shown: str) -> list[str]:
    """Return the splits with different examples. Splits of ready features cannot be compared."""
    found = []
    for split, what in {**_SPLITS, shown: f"examples of {shown}"}.items():
        headers = [_features(subject, split) for subject in subjects if _model(subject)]
        known = [one for one in headers if one is not None]
        sizes = [int(one.meta["num_examples"]) for one in known]
        if len({one.meta.get("order_digest") for one in known}) > 1:
            are = (
                f" ({join_names([f'{size:,}' for size in sizes], most=_MOST_NAMED)} of them)"
                if len(set(sizes)) > 1
                else ""
            )
            found.append(f"their {what} are not the same{are}")
    return found


def _models(subjects: Sequence[Subject]) -> list[str]:
    models = list(dict.fromkeys(str(_model(subject)) for subject in subjects))
    return [f"their networks differ ({join_names(models, most=_MOST_NAMED)})"] if len(models) > 1 else []


_MOST_DIFFERENCES = 4  # posteriors whose options differ


def _options(subjects: Sequence[Subject], posteriors: Sequence[str]) -> list[str]:
    """Return the posteriors that were fitted with different options, with the first difference of each."""
    first, *others = subjects
    found = []
    for name in dict.fromkeys(posteriors):
        for other in others:
            headers = [subject.headers.get(name) for subject in (first, other)]
            params = [_params(header) for header in headers if header is not None]
            if len(params) == 2 and params[0] != params[1]:
                told = differences(*params, labels=(first.name, other.name))
                found.append(f"options of {name} ({told})")
                break
    rest = len(found) - _MOST_DIFFERENCES
    return found[:_MOST_DIFFERENCES] + ([f"options of {rest} more"] if rest > 0 else [])


def _params(header: Header) -> dict[str, Any]:
    """Return the options that define a posterior, except for the seed."""
    with convert_lookup_errors(header.path):
        return {name: value for name, value in header.provenance["params"].items() if name != "seed"}


def _model(subject: Subject) -> Any:
    """Return the model that computed features; None for ready features."""
    header = _any_features(subject)
    if header is None:
        return None
    with convert_lookup_errors(header.path):
        return header.provenance["params"].get("model")


def _any_features(subject: Subject) -> Header | None:
    return next((one for name in subject.run.folder.splits() if (one := _features(subject, name)) is not None), None)


def _features(subject: Subject, split: str) -> Header | None:
    header = try_find(partial(read_header, subject.run.folder.features(split)))
    return header if isinstance(header, Header) else None


def build_page(runs: Sequence[Run], sections: Sequence[Section], made_with: Mapping[str, Any]) -> bytes:
    """Return the page, of at most MOST_BYTES. If it would be larger, leave out the least important sections and say so."""
    names = [run.checkpoint_path.name for run in runs]
    what = join_names(names) if len(names) <= 3 else count_noun(len(names), "checkpoint")
    lead = f"bnncli {__version__}, results of {_find_newest(runs)}"
    made_by = "This file opens without a network connection. It holds aggregates, not the data, except for the inputs it shows."

    def whole_page(kept: Sequence[Section], ready: dict[str, Markup]) -> bytes:
        return page(f"Report on {what}", lead, kept, made_by=made_by, options=made_with, ready=ready)

    found = render_fitting_sections(
        sections, importance=_importance, page_of=whole_page, note=_note, most_bytes=MOST_BYTES
    )
    if found.left_out:
        runs[0].console.warn(
            f"the report is limited to {MOST_BYTES:,} bytes: {_titles(found.left_out)} omitted; use fewer "
            "--posterior or --examples"
        )
    return found.content


def _find_newest(runs: Sequence[Run]) -> str:
    """Return the time of the newest readable posterior or prediction, to the minute."""
    found = []
    for run in runs:
        for path in (*run.folder.posteriors(), *run.folder.prediction_files()):
            header = try_find(partial(read_header, path))
            found += [] if isinstance(header, Missing) else [str(header.provenance.get("created_at", ""))]
    newest = max(found, default="")
    return f"{newest[:10]} {newest[11:16]} UTC" if newest else "an unknown date"


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


def _importance(section: Section) -> float:
    """Return a section's importance. The lowest is left out first of a page that is too large."""
    name = section.name.rpartition("-")[2]
    return _LEAST.index(name) if name in _LEAST else len(_LEAST)


def _note(gone: Sequence[Section]) -> Block:
    return Missing(
        f"To keep the page below {MOST_BYTES:,} bytes, {_titles(gone)} omitted. Use fewer --posterior or "
        "--examples; --figures writes all figures as files."
    )


_MOST_TOLD = 12  # sections that are left out


def _titles(gone: Sequence[Section]) -> str:
    """Return the sections left out, some by title, as the subject of a sentence with its verb."""
    titles = [f"\N{LEFT DOUBLE QUOTATION MARK}{section.title}\N{RIGHT DOUBLE QUOTATION MARK}" for section in gone]
    rest = len(titles) - _MOST_TOLD
    shown = titles[:_MOST_TOLD] + ([count_noun(rest, "more part")] if rest > 0 else [])
    return f"{join_names(shown)} {'is' if len(gone) == 1 else 'are'}"
