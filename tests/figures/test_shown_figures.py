"""Figures of reports: as data, as files, as SVG inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Tree

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from PIL import Image
from problems.long_run import long_but
from problems.shown_figures import shown_figures

import bnncli.figures as room
from bnncli.commands.report import FIGURE_FORMATS
from bnncli.figures import svg as inline
from bnncli.figures.chains import ChainTraces, Trace
from bnncli.figures.posteriors import Weights, WeightSpread
from bnncli.figures.predictions import ReliabilityDiagrams
from bnncli.figures.style import DARK, FigureContent, figure_file
from bnncli.figures.svg import inline_svg

pytestmark = pytest.mark.core

FIGURES = {figure.name: figure for figure in shown_figures()}
FILES = {type(figure).__module__ for figure in FIGURES.values()}
named = pytest.mark.parametrize("figure", FIGURES.values(), ids=list(FIGURES))


@pytest.fixture(scope="module")
def svgs() -> dict[str, str]:
    return {name: inline_svg(figure) for name, figure in FIGURES.items()}


@named
def test_a_figure_says_what_it_is_and_has_its_numbers(figure: FigureContent) -> None:
    assert re.fullmatch(r"[A-Za-z0-9.-]+", figure.name)
    assert figure.title
    assert figure.description.endswith(".")
    assert figure.numbers.rows
    assert {len(row) for row in figure.numbers.rows} == {len(figure.numbers.columns)}


@named
def test_inside_a_page_it_is_told_and_refers_to_nothing_outside(figure: FigureContent, svgs: dict[str, str]) -> None:
    svg = svgs[figure.name]
    root = Tree.fromstring(svg)
    assert root.tag == "svg"
    assert (root.attrib["role"], root[0].text, root[1].text) == ("img", figure.title, figure.description)
    assert root.attrib["aria-labelledby"].split() == [root[0].attrib["id"], root[1].attrib["id"]]
    assert not re.search(r"https?:|xmlns|xlink|<!|<\?|<style|<metadata|font-family", svg)
    names = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(names) == len(set(names))
    assert all(name.startswith(f"{figure.name}:") for name in names)  # which is no other figure's name
    used = re.findall(r"url\(#([^)]+)\)", svg) + [e.attrib["href"][1:] for e in root.iter() if "href" in e.attrib]
    assert set(used) <= set(names)


@named
def test_every_colour_turns_with_the_page(figure: FigureContent, svgs: dict[str, str]) -> None:
    svg = svgs[figure.name]
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", svg)
    assert {f"#{ink}" for ink in re.findall(r"var\(--ink-([0-9a-f]{6})\)", svg)} <= DARK.keys()


def test_a_name_with_a_control_character_is_written_out() -> None:
    figure = WeightSpread([Weights("a\x01<b>", 0.4, 0.7, 0.9)], 2.0)
    titled = ChainTraces("h\x1bmc", [Trace("x", [1], [1, 2], [[0.0, 1.0]])], 1)
    letters = [element.text for element in Tree.fromstring(inline_svg(figure)).iter("text")]
    assert "a\\x01<b>" in letters
    assert Tree.fromstring(inline_svg(titled))[0].text == "Chains of h\\x1bmc"
    assert b"Chains of h\\x1bmc" in figure_file(titled, "svg")


def test_every_figure_as_data_is_among_these() -> None:
    folder = Path(room.__file__).parent
    files = {f"bnncli.figures.{path.stem}" for path in folder.glob("[!_]*.py") if "def numbers" in path.read_text()}
    assert files - {"bnncli.figures.style", "bnncli.figures.pages"} == FILES


def test_an_own_style_of_matplotlib_changes_nothing() -> None:
    figure = FIGURES["pareto-k"]
    plain = inline_svg(figure)
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "svg.fonttype": "path"}):
        assert inline_svg(figure) == plain


@pytest.mark.parametrize("form", long_but(list(FIGURE_FORMATS), "svg", mark=pytest.mark.nightly))
def test_files_say_what_they_show_and_are_the_same_again(form: str) -> None:
    figure = FIGURES["scores-test"]
    content = figure_file(figure, form)
    assert content == figure_file(figure, form)
    assert figure.title.encode() in content
    if form == "png":
        with Image.open(io.BytesIO(content)) as image:
            assert image.info["Description"] == figure.description


@pytest.mark.parametrize(
    "style",
    [
        "font-size: 10px; font-family: 'DejaVu Sans', sans-serif; text-anchor: end; fill: #5b5b5b",
        "font: 10px 'DejaVu Sans', sans-serif; text-anchor: end; fill: #5b5b5b",
    ],
)
def test_letters_have_the_font_of_the_page_whatever_release_of_matplotlib_drew_them(style: str) -> None:
    assert inline._compact("style", style) == "font-size: 10px; text-anchor: end; fill: var(--ink-5b5b5b)"


def test_numbers_of_lines_have_the_ends_of_their_bands_where_there_are_any() -> None:
    from bnncli.figures.fits import LinePanel, LinePanels, Series

    lines = [Series("a", [1.0], [2.0], ([1.5], [2.5])), Series("b", [1.0], [3.0])]
    numbers = LinePanels("x", "X", "What.", [LinePanel("p", "epoch", "loss", lines)]).numbers
    assert numbers.columns == ["panel", "line", "epoch", "loss", "low", "high"]
    assert numbers.rows == [["p", "a", 1.0, 2.0, 1.5, 2.5], ["p", "b", 1.0, 3.0, None, None]]


# By figure: the points of lines, and the steps or bars (from, to, height), that a row of its numbers says are drawn.
POINTS: dict[str, Callable[[list[Any]], list[tuple[Any, ...]]]] = {
    "risk-coverage-test": lambda row: [(row[1], row[2])],
    "roc-test-mnist": lambda row: [(row[1], row[2])],
    "prior-precision-laplace": lambda row: [(row[0], row[1])],
    "elbo": lambda row: [(row[2], row[3])],
    "traces-hmc": lambda row: [(row[1], mean) for mean in row[2:]],
    "marginals": lambda row: [(row[1], density) for density in row[2:] if density is not None],
    "pareto-k": lambda row: [(row[1], PLACES[row[0]]), (row[3], PLACES[row[0]])] if row[1] is not None else [],
    "scores-test": lambda row: [(value, 0.0) for value in row[2:] if value is not None],
}
PLACES = {"laplace": 0.0, "diag": 1.0}
STEPS: dict[str, Callable[[list[Any]], list[tuple[Any, ...]]]] = {
    "reliability-test": lambda row: [(row[1], row[2], row[5]), (row[1], row[2], row[3])],
    "confidence-test": lambda row: [(row[2], row[3], row[5])],
    "mixing-hmc": lambda row: [(row[1], row[2], row[3])],
    "ranks-hmc": lambda row: [(place / 3, (place + 1) / 3, count) for place, count in enumerate(row[1:])],
}


def drawn(figure: Figure) -> set[tuple[float, ...]]:
    """Points of lines, and (from, to, height) of steps and bars, rounded."""
    found: list[tuple[Any, ...]] = []
    for axes in figure.axes:
        found += [tuple(point) for line in axes.lines for point in zip(*line.get_data(), strict=True)]
        for patch in axes.patches:
            if isinstance(patch, StepPatch):
                values, edges, _ = patch.get_data()
                found += list(zip(edges[:-1], edges[1:], values, strict=True))
            elif isinstance(patch, Rectangle):
                found.append((patch.get_x(), patch.get_x() + patch.get_width(), patch.get_height()))
    return {rounded(one) for one in found}


def rounded(numbers: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(round(float(number), 9) for number in numbers)


@pytest.mark.parametrize("name", [*POINTS, *STEPS])
def test_what_the_table_says_is_what_is_drawn(name: str) -> None:
    figure, told = FIGURES[name], (POINTS | STEPS)[name]
    expected = {rounded(one) for row in figure.numbers.rows for one in told(list(row))}
    assert expected
    assert expected <= drawn(figure.draw())


def test_pareto_k_stands_left_of_the_spread_of_weights() -> None:
    figure = FIGURES["pareto-k"]
    left, right = ({x for line in axes.lines for x in line.get_xdata()} for axes in figure.draw().axes)
    assert ["diag", 3.2, 0.7, 90.0] in [list(row) for row in figure.numbers.rows]
    assert (3.2 in left, 0.7 in left, 90.0 in right) == (True, True, True)


def test_every_figure_but_a_matrix_is_held_against_its_table() -> None:
    assert FIGURES.keys() - POINTS.keys() - STEPS.keys() == {"mmd"}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_legend_of_reliability_diagrams_is_inside_the_figure(count: int) -> None:
    bins = {"edges": [0.0, 0.5, 1.0], "count": [4, 30], "confidence": [0.4, 0.9], "accuracy": [0.5, 0.8]}
    figure = ReliabilityDiagrams(
        {f"p{n}": bins for n in range(count)}, "test", {f"p{n}": 0.03 for n in range(count)}
    ).draw()
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert (box.x0 >= 0, box.x1 <= figure.bbox.width) == (True, True)
