"""Figure of a monitor: the evidence for a change after each example, with its alarm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bnncli.figures.style import BLUE, GREY, PAGE_WIDTH, VERMILION, plain_axes
from bnncli.lazy import np

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from bnncli.evaluation.monitoring import Alarm

_MOST_POINTS = 2000
_WORDS = {"inputs": "inputs", "errors": "errors, of labelled examples"}


class ControlChart(NamedTuple):
    """The path of one test.

    Attributes:
        test: inputs or errors.
        path: (T,), log10 of the e-value after each example.
        threshold: log10 of the e-value at which there is an alarm.
        alarm: None without one.
    """

    test: str
    path: NDArray
    threshold: float
    alarm: Alarm | None


def thin_path(path: NDArray) -> tuple[NDArray, NDArray]:
    """Return steps and values of at most about 2,000 points: the highest and the last of each stretch of a longer path."""
    path = np.concatenate([[0.0], path])
    steps = np.arange(len(path))
    if len(path) > _MOST_POINTS:
        stretches = np.array_split(steps, _MOST_POINTS // 2)
        steps = np.unique([step for one in stretches for step in (one[np.argmax(path[one])], one[-1])])
    return steps, path[steps]


def draw_control_charts(charts: Sequence[ControlChart]) -> Figure:
    """Draw the path of each test, the threshold, the first alarm and the estimated change."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.4 * PAGE_WIDTH, 2.9 * len(charts)), layout="constrained")
    for place, chart in enumerate(charts):
        axes = figure.add_subplot(len(charts), 1, place + 1)
        steps, values = thin_path(chart.path)
        axes.plot(steps, values, color=BLUE, linewidth=1.2, label="evidence for a change")
        label = f"alarm at {chart.threshold:.2f}"
        axes.axhline(chart.threshold, color=VERMILION, linewidth=1, linestyle="--", label=label)
        if chart.alarm is not None:
            at, change = chart.alarm.step, chart.alarm.change
            axes.plot(at, chart.path[at - 1], "o", color=VERMILION, markersize=6, label=f"first alarm: example {at:,}")
            axes.axvline(change, color=GREY, linewidth=1, linestyle=":", label=f"estimated change: after {change:,}")
        axes.set_xlabel(f"examples ({_WORDS[chart.test]})")
        axes.set_ylabel("log10 e-value")
        plain_axes(axes)
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize="small", loc="best")
    return figure
