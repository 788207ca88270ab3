"""Figures: of prior searches, in pages, and as data."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree as Tree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from PIL import Image
from problems.command_line import Cli
from problems.long_run import long_but
from problems.shown_figures import shown_figures

import bnncli.figures as room
from bnncli.commands import fit_laplace
from bnncli.commands.report import FIGURE_FORMATS
from bnncli.errors import WriteError
from bnncli.figures import render
from bnncli.figures import svg as inline
from bnncli.figures.chains import ChainTraces, Trace
from bnncli.figures.fits import draw_prior_precision
from bnncli.figures.posteriors import Weights, WeightSpread
from bnncli.figures.predictions import ReliabilityDiagrams
from bnncli.figures.style import DARK, FigureContent, figure_file
from bnncli.figures.svg import inline_svg

pytestmark = pytest.mark.core


CURVE = [(0.1, 0.9), (1.0, 0.5), (4.0, 0.31), (10.0, 0.3), (30.0, 0.32), (100.0, 0.6)]


@pytest.fixture
def name(small_run: Path) -> Path:
    """A run whose laplace comes from a search."""
    small_run.with_name("small.bnn").joinpath("posteriors", "laplace.safetensors").unlink()
    return small_run


def test_every_candidate_is_drawn_and_the_lowest_is_marked() -> None:
    figure = draw_prior_precision(CURVE, criterion="val", at_edge=False, network=0.4)
    whole, near = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in whole.lines}
    assert lines["candidates"] == [list(point) for point in CURVE]
    assert lines["chosen: 10, 0.3"] == [[10.0, 0.3]]
    assert [y for _, y in lines["network as trained: 0.4000"]] == [0.4, 0.4]
    assert near.lines[0].get_xydata().tolist() == [list(point) for point in CURVE if 4 <= point[0] <= 30]
    assert (whole.get_xscale(), near.get_xscale()) == ("log", "log")


@pytest.mark.parametrize("form", long_but(["png", "svg", "pdf"], "svg"))
def test_the_same_numbers_give_the_same_bytes(form: str) -> None:
    first, second = (render(draw_prior_precision(CURVE[:1], criterion="val", at_edge=False), form) for _ in range(2))
    assert first == second


def test_plot_makes_a_png_of_sensible_size_and_lists_it(cli: Cli, name: Path, tmp_path: Path) -> None:
    path = tmp_path / "plots" / "curve.PNG"
    done = cli("fit-laplace", name, "--plot", path)
    assert (done.code, done.stdout.splitlines()[1:]) == (0, [str(path)])
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    assert 600 <= pixels.shape[1] <= 2000
    assert 400 <= pixels.shape[0] <= 1200
    assert 0.005 < (pixels < 128).mean() < 0.5  # drawn on, and not all over


def test_plot_draws_the_stored_curve(cli: Cli, name: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = cli("fit-laplace", name, "--json").json
    monkeypatch.setattr("bnncli.commands.fit_laplace.last_layer.search", None)
    for _ in range(2):  # the second time over the first figure
        again = cli("fit-laplace", name, "--json", "--plot", tmp_path / "curve.svg").json
        assert again["action"] == "up_to_date"
        assert [output["role"] for output in again["outputs"]] == ["laplace", "laplace.plot"]
        assert again["metrics"] == fitted["metrics"]
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    curve = fitted["metrics"]["prior_precision_curve"]
    assert fitted["metrics"]["prior_precision"] == min(curve, key=lambda point: point[1])[0]


@pytest.mark.parametrize(
    "words", [["--plot", "curve.jpg"], ["--plot", "curve"], ["--plot", "c.png", "--prior-precision", "3"]]
)
def test_another_suffix_or_nothing_to_draw_is_a_usage_error(cli: Cli, name: Path, words: list[str]) -> None:
    cli("fit-laplace", name, *words).expect(2, "error: --plot")
    assert not name.with_name("small.bnn").joinpath("posteriors", "laplace.safetensors").exists()


def test_foreign_file_is_replaced_only_with_force(cli: Cli, name: Path, tmp_path: Path) -> None:
    path = tmp_path / "holiday.png"
    path.write_bytes(b"a photograph")
    done = cli("fit-laplace", name, "--plot", path)
    assert (done.code, done.stdout, path.read_bytes()) == (73, "", b"a photograph")
    assert "add --force" in done.stderr
    assert not name.with_name("small.bnn").joinpath("posteriors", "laplace.safetensors").exists()
    cli("fit-laplace", name, "--plot", path, "--force").expect(0)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_figure_never_replaces_what_the_command_reads_or_writes(cli: Cli, name: Path, tmp_path: Path) -> None:
    link = tmp_path / "train.png"
    link.symlink_to(name.with_name("small.bnn") / "features" / "train.h5")
    cli("fit-laplace", name, "--plot", link, "--force").expect(2)
    out = tmp_path / "out.png"
    cli("fit-laplace", name, "--out", out, "--plot", out).expect(2)


def test_a_dry_run_names_the_figure_and_draws_nothing(cli: Cli, name: Path, tmp_path: Path) -> None:
    done = cli("fit-laplace", name, "--plot", tmp_path / "curve.png", "--dry-run")
    assert (done.code, f"draw: {tmp_path / 'curve.png'}" in done.stdout) == (0, True)
    assert not (tmp_path / "curve.png").exists()


def test_without_plot_matplotlib_is_not_imported(name: Path) -> None:
    with patch.dict(sys.modules):  # as it was, afterwards
        for module in [each for each in sys.modules if each.split(".")[0] in ("bnncli", "matplotlib")]:
            del sys.modules[module]
        from bnncli.cli.execute import run_command_line

        for command, *words in (["evaluate", "--curves", "--posterior", "map"], ["fit-laplace"]):
            assert run_command_line([command, str(name), *words], io.StringIO()) == 0
        assert "bnncli.commands.fit_laplace" in sys.modules
        assert "matplotlib" not in sys.modules


def test_unwritable_plot_after_fit(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> str:
        raise WriteError("disk full; nothing was changed")

    monkeypatch.setattr(fit_laplace, "write_figure", fail)
    done = cli("fit-laplace", small_run, "--name", "kept", "--plot", tmp_path / "curve.png")
    artifact = small_run.with_name("small.bnn") / "posteriors" / "kept.safetensors"
    assert (done.code, artifact.exists()) == (74, True)
    assert f"; {artifact} is complete" in done.stderr
    assert "nothing was changed" not in done.stderr


def test_inclusions_of_several_networks_are_pooled_over_layers_in_their_own_colours() -> None:
    from bnncli.figures import posteriors

    edges = [0.0, 0.5, 1.0]
    layers = [{"layer": "0", "edges": edges, "counts": [3, 1]}, {"layer": "1", "edges": edges, "counts": [1, 5]}]
    scores = {"density": [1.0, 0.1, 0.0], "accuracy": [0.9, 0.8, 0.1], "nll": [0.3, 0.4, 2.0], "ece": [0.1, 0.1, 0.0]}
    one = posteriors.draw_density({"a": scores}, {"a": layers}, medians={"a": 0.1}, split="test").axes
    assert [part.get_label() for part in one[3].patches] == ["layer 0", "layer 1"]
    np.testing.assert_allclose(one[3].patches[0].get_data().values, [3 / 4, 1 / 4])
    several = posteriors.draw_density(
        {"a": scores, "b": scores}, {"a": layers, "b": layers}, medians={"a": 0.1, "b": 0}, split="test"
    ).axes
    np.testing.assert_allclose(several[3].patches[1].get_data().values, [4 / 10, 6 / 10])
    curves = [line for line in several[0].lines if line.get_label() in ("a", "b")]
    edge_colors = [patch.get_edgecolor() for patch in several[3].patches]
    assert edge_colors == [to_rgba(line.get_color()) for line in curves]
    assert all(min(line.get_xdata()) > 0 for line in curves)  # no weights at all have no place on a logarithmic axis
    dotted = [line.get_xdata()[0] for line in several[0].lines if line.get_linestyle() == ":"]
    assert dotted == [0.1]


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
        for shape in axes.patches:
            if isinstance(shape, StepPatch):
                values, edges, _ = shape.get_data()
                found += list(zip(edges[:-1], edges[1:], values, strict=True))
            elif isinstance(shape, Rectangle):
                found.append((shape.get_x(), shape.get_x() + shape.get_width(), shape.get_height()))
    return {rounded(one) for one in found}


def rounded(numbers: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(round(float(number), 9) for number in numbers)


@pytest.mark.parametrize("name", [*POINTS, *STEPS])
def test_what_the_table_says_is_what_is_drawn(name: str) -> None:
    figure, told = FIGURES[name], (POINTS | STEPS)[name]
    expected = {rounded(one) for row in figure.numbers.rows for one in told(list(row))}
    assert expected
    assert expected <= drawn(figure.draw())


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
