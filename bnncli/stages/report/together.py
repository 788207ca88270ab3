"""Several checkpoints compared: means over them with standard errors and paired tests, as compare has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bnncli.figures.pages import Block, Markup, Missing, bullets, element, joined, paragraph, strong
from bnncli.figures.scores import ScoreIntervals
from bnncli.names import counted
from bnncli.options.compare import CompareOptions
from bnncli.session.run import Run
from bnncli.stages.compare.comparing import compared, compared_groups
from bnncli.stages.compare.plot import labels, score_panels
from bnncli.stages.compare.tables import Comparison, as_table
from bnncli.stages.report.alike import what_differs
from bnncli.stages.report.scores import data_table
from bnncli.stages.report.subject import MOST_DRAWN, Subject, tried
from bnncli.stages.report.words import listed_in_words

_MOST_NAMED = 12  # posteriors or checkpoints in one sentence


def together(runs: Sequence[Run], subjects: Sequence[Subject]) -> list[Block]:
    """The section."""
    options = CompareOptions(posterior=subjects[0].options.posterior, split=subjects[0].split)
    comparison = tried(
        lambda: compared(
            runs,
            options,
            compared_groups(runs, options, leave_out=frozenset().union(*(one.left_out for one in subjects))),
        )
    )
    if isinstance(comparison, Missing):
        return [comparison]
    table = as_table(comparison)
    panels = [panel for panel in score_panels(comparison) if any(line.value is not None for line in panel.lines)]
    figure = ScoreIntervals(
        f"scores-of-all-{comparison.split}",
        labels(comparison)[:MOST_DRAWN],
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
        paragraph(what_differs(subjects, posteriors, comparison.split)),
        data_table(
            table, "comparison-table", f"Scores on {comparison.split} over {len(runs)} checkpoints, computed by compare"
        ),
        figure,
    ]


def _verdict(comparison: Comparison, subjects: Sequence[Subject]) -> Markup:
    """Which posteriors are best over all checkpoints, and which diagnose would use of each."""
    first = lowest_in_words(comparison, len(subjects))
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
            joined(strong(title), f"{_of_each(names)}.")
            for title, names in (("Predict: ", predicting), ("Matches the exact posterior: ", used))
        ]
    )
    return element("div", paragraph(first), words, class_="verdict")


def _of_each(found: Mapping[str, list[str]]) -> str:
    """Names, each with the checkpoints that it is for."""
    return "; ".join(f"{name} for {listed_in_words(where, most=_MOST_NAMED)}" for name, where in found.items())


def lowest_in_words(comparison: Comparison, num_checkpoints: int) -> str:
    """Which posteriors have the lowest NLL, as far as tests can tell."""
    place = next((place for place, one in enumerate(comparison.columns) if one.row["name"] == "nll"), None)
    samples = [] if place is None else [entry.samples for entry in comparison.columns[place].entries]
    known = [row for row, sample in enumerate(samples) if sample is not None]
    if place is None or not known:
        return "No posterior has an NLL for every checkpoint."
    names = labels(comparison)
    best = [names[row] for row in known if comparison.is_marked(place, row)]
    where = f"on {comparison.split}, over {counted(num_checkpoints, 'checkpoint')}"
    if len(known) == 1:
        return f"{names[known[0]]} is the only posterior with predictions on {comparison.split} for every checkpoint."
    if len(best) == 1:
        return f"{best[0]} has the lowest NLL {where}."
    named = listed_in_words(best, most=_MOST_NAMED)
    if len(best) == len(known):
        return f"The NLLs of {named} do not differ significantly {where}."
    return f"One of {named} has the lowest NLL {where}; these checkpoints do not show which."
