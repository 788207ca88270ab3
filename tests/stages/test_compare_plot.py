"""The figure of compare --plot: what it draws, and where it may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from problems.command_line import Cli
from scipy import stats

from bnncli.errors import WriteError
from bnncli.evaluation.comparison import Sample, integration
from bnncli.figures.scores import Line, ScorePanel, draw_comparison

LINES = [
    Line((0.30, 0.32), 0.31, (0.28, 0.34), False),
    Line((0.27, 0.29), 0.28, (0.25, 0.31), True),
    Line((), None, None, False),
]


def figure_of(panels: int = 1, zero: str | None = None) -> Any:
    names = ["map", "laplace", "hmc"]
    shown = [ScorePanel(f"score {place}", LINES) for place in range(panels)]
    return draw_comparison(shown, names, title="t", marked="best", plain="worse", tests="tests", zero=zero)


def test_every_seed_is_a_dot_and_means_stand_on_their_intervals() -> None:
    (axes,) = figure_of().axes
    drawn = [(line.get_xdata(), line.get_marker()) for line in axes.lines]
    assert [list(x) for x, marker in drawn if marker == "o" and len(x) == 2] == [[0.30, 0.32], [0.27, 0.29]]
    assert [list(x) for x, marker in drawn if marker == "None"] == [[0.28, 0.34], [0.25, 0.31]]
    assert [(list(x), marker) for x, marker in drawn if len(x) == 1] == [([0.31], "o"), ([0.28], "D")]
    assert [text.get_text() for text in axes.texts] == ["undefined"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["map", "laplace", "hmc"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top


def test_marked_ones_are_told_apart_by_shape_filling_and_dash() -> None:
    (axes,) = figure_of().axes
    plain, marked = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert plain.get_markerfacecolor() == "white"
    assert marked.get_markerfacecolor() != "white"
    dashed, solid = [line for line in axes.lines if line.get_marker() == "None"]
    assert (dashed.is_dashed(), solid.is_dashed()) == (True, False)


@pytest.mark.parametrize(("panels", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3))])
def test_panels_stand_in_up_to_three_columns(panels: int, shape: tuple[int, int]) -> None:
    axes = figure_of(panels).axes
    assert axes[0].get_gridspec().get_geometry() == shape
    assert sum(one.get_visible() for one in axes) == panels


def test_differences_have_a_line_at_zero() -> None:
    assert any(list(line.get_xdata()) == [0, 0] for line in figure_of(zero="map").axes[0].lines)
    assert not any(list(line.get_xdata()) == [0, 0] for line in figure_of().axes[0].lines)


def test_the_interval_of_a_mean_is_students_and_that_of_one_checkpoint_its_replicates_with_the_draws() -> None:
    values = np.random.default_rng(0).normal(size=5)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert Sample(values).interval(0.9) == pytest.approx((expected.low, expected.high))
    drawn = 2 + np.random.default_rng(1).normal(size=20_000)
    one = Sample(np.array([2.0]), drawn, integration(1.0, 200.0, size=20_000, seed=2))
    assert one.interval(0.95) == pytest.approx((2 - 1.96 * 2**0.5, 2 + 1.96 * 2**0.5), abs=0.06)
    assert Sample(np.array([2.0])).interval(0.95) is None


@pytest.mark.parametrize("words", [[], ["--baseline", "map"]], ids=["best", "baseline"])
def test_plot_writes_a_png_and_lists_it_among_the_outputs(
    cli: Cli, small_run: Path, tmp_path: Path, words: list[str]
) -> None:
    for _ in range(1 if words else 2):  # the second time over the first figure
        done = cli("compare", small_run, "--metric", "nll", "--json", "--plot", tmp_path / "figures", *words)
        (output,) = done.json["outputs"]
        assert (output["role"], output["path"]) == ("plot.compare-test", str(tmp_path / "figures" / "compare-test.png"))
        assert output["content_digest"].startswith("sha256:")
        assert [row["posterior"] for row in done.json["rows"]] == ["map", "laplace", "refine", "hmc"]
    with Image.open(output["path"]) as image:
        pixels = np.asarray(image.convert("L"))
    assert 0.005 < (pixels < 128).mean() < 0.5  # drawn on, and not all over
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["compare-test.png"]


def test_a_foreign_file_is_refused_before_the_work_and_replaced_with_force(
    cli: Cli, small_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "compare-test.png"
    path.write_bytes(b"a photograph")
    words = ("compare", small_run, "--metric", "nll", "--plot", tmp_path)
    done = cli(*words)
    assert (done.code, done.stdout, path.read_bytes()) == (73, "", b"a photograph")
    assert "add --force" in done.stderr
    assert cli(*words, "--force").code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_says_what_would_be_drawn_and_draws_nothing(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    done = cli("compare", small_run, "--metric", "nll", "--plot", tmp_path / "figures", "--dry-run")
    assert (done.code, done.stdout.strip()) == (0, f"draw: {tmp_path / 'figures' / 'compare-test.png'}")
    assert not (tmp_path / "figures").exists()


def test_a_figure_that_cannot_be_written_is_an_error_with_its_name(
    cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: bytes) -> str:
        raise WriteError("disk full", hint="free some space")

    monkeypatch.setattr("bnncli.commands.compare.output.write_figure", fail)
    done = cli("compare", small_run, "--metric", "nll", "--plot", tmp_path)
    assert (done.code, "cannot write " in done.stderr) == (74, True)
