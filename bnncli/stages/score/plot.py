"""The figure of score --plot: reliability of the predictions, and of each group of their examples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.data.prediction_files import divide
from bnncli.errors import DataError, WriteError
from bnncli.names import quoted
from bnncli.options.scoring import Quantity, ScoreOptions
from bnncli.session.prediction_files import GivenPredictions
from bnncli.session.score_rows import find_metric

_MOST_GROUPS = 11  # with all of them together three rows of panels


class Panel(NamedTuple):
    """Predictions with what they are called, and their scores."""

    title: str
    predictions: GivenPredictions
    metrics: list[dict[str, Any]]


def check_plot(options: ScoreOptions, place: str) -> None:
    """Pass where the figure may be written. Raises UsageError or OutputExists as check_figure_path does."""
    if options.plot is None:
        return
    ood = [part for text in options.ood for part in (text, text.partition("=")[2]) if part]
    texts = [place, *ood, *(one for one in (options.labels, options.groups, options.reference) if one is not None)]
    files = [divide(text)[0] for text in texts]
    check_figure_path(Path(options.plot), "--plot", force=options.force, others=files)


def check_labelled(options: ScoreOptions, given: GivenPredictions) -> None:
    """Raise DataError where a figure is asked for and there are no labels."""
    if options.plot is not None and given.labels is None:
        raise DataError(
            f"--plot: {quoted(given.path, limit=300)} has no labels, which reliability needs", code="no_labels",
            hint="add \0labels\0 FILE[:COLUMN]",
        )  # fmt: skip


def draw_plot(path: Path, whole: Panel, groups: Iterable[Panel], *, num_bins: int) -> tuple[dict[str, Any], str]:
    """Draw and publish the figure; what it is as an output, and what it shows in words.

    The largest groups are shown where there are more than eleven, in the order that they are given in.

    Raises:
        WriteError: it could not be written.
    """
    from bnncli.evaluation.curves import reliability_of
    from bnncli.figures import render
    from bnncli.figures.predictions import draw_reliability

    every = list(groups)
    largest = sorted(every, key=lambda panel: -len(panel.predictions.probs))[:_MOST_GROUPS]
    panels = [whole, *(panel for panel in every if any(panel is one for one in largest))]
    curves, errors = {}, {}
    for title, own, metrics in panels:
        curve = reliability_of(own.probs, own.examples, num_bins=num_bins)
        assert curve is not None  # there are labels, and rows
        curves[title], errors[title] = curve, float(find_metric(metrics, Quantity("ece"))[0]["value"])
    figure = draw_reliability(curves, split=whole.predictions.name, errors=errors)
    try:
        digest = write_figure(path, render(figure, path.suffix[1:].lower()))
    except WriteError as error:
        raise WriteError(f"--plot: cannot write {path}", hint=error.hint, path=path) from None
    shown = f" (the {len(largest)} largest of {len(every)} groups)" if len(largest) < len(every) else ""
    return {"role": "score.plot", "path": str(path), "content_digest": digest}, f"figure: {path}{shown}"
