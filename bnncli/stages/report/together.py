"""Several checkpoints compared: means over them with standard errors and paired tests, as compare has them."""

from __future__ import annotations

from collections.abc import Sequence

from bnncli.figures.score_intervals import ScoreIntervals
from bnncli.options import CompareOptions
from bnncli.pages.blocks import Block, Missing
from bnncli.pages.markup import Markup, bullets, element, joined, paragraph, strong
from bnncli.run.session import Run
from bnncli.stages.compare.comparing import compared, compared_groups
from bnncli.stages.compare.plot import labels, score_panels
from bnncli.stages.compare.tables import Comparison, as_table
from bnncli.stages.report.scores import data_table
from bnncli.stages.report.subject import MOST_DRAWN, Subject, tried
from bnncli.stages.report.words import listed_in_words


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
        f"Means over {len(runs)} checkpoints on {comparison.split} with 95 % intervals",
        "Small dots are single checkpoints. Marks by paired tests, all of a panel together; intervals of each alone.",
        "best, or not significantly worse",
        "significantly worse than another",
        f"paired tests at level {comparison.alpha:g}",
    )
    named = listed_in_words([subject.name for subject in subjects])
    return [
        _verdict(comparison, subjects),
        paragraph(
            f"Each posterior was fitted to {named}: what differs between its numbers there is chance of training."
        ),
        data_table(table, "comparison-table", f"Scores on {comparison.split} over {len(runs)} checkpoints, by compare"),
        figure,
    ]


def _verdict(comparison: Comparison, subjects: Sequence[Subject]) -> Markup:
    """Which posteriors are best over all checkpoints, and which diagnose would use of each."""
    best, size = _best(comparison), len(subjects)
    names = labels(comparison)
    first = "No NLL is known of every checkpoint."
    if best:
        verb = "has the lowest NLL" if len(best) == 1 else "have the lowest NLL, and cannot be told apart"
        first = f"On {comparison.split} {listed_in_words([names[place] for place in best])} {verb}, over {size} checkpoints."
    used: dict[str, list[str]] = {}
    for subject in subjects:
        use = None if isinstance(subject.judgement, Missing) else subject.judgement.verdict.use
        used.setdefault(use or "none yet", []).append(subject.name)
    told = "; ".join(f"{use} for {listed_in_words(checkpoints)}" for use, checkpoints in used.items())
    words = bullets([joined(strong("True to the target: "), f"{told}.")])
    return element("div", paragraph(first), words, class_="verdict")


def _best(comparison: Comparison) -> list[int]:
    """The rows that are marked in the column of the NLL."""
    place = next((place for place, one in enumerate(comparison.columns) if one.row["name"] == "nll"), None)
    if place is None:
        return []
    return [row for row in range(len(comparison.names)) if comparison.is_marked(place, row)]
