"""The figure of the search for the prior precision, and the contract of --plot."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from PIL import Image
from problems.command_line import Cli
from problems.long_run import long_but
from problems.outputs import figure_texts

from bnncli.commands import fit_laplace
from bnncli.errors import WriteError
from bnncli.figures import render
from bnncli.figures.fits import EDGE_TEXT, LABELS, draw_prior_precision

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


@pytest.mark.parametrize("criterion", LABELS)
@pytest.mark.parametrize("at_edge", [False, True])
def test_the_axes_say_criterion_and_unit_and_the_warning_stands_when_due(criterion: str, at_edge: bool) -> None:
    figure = draw_prior_precision(CURVE, criterion=criterion, at_edge=at_edge)
    assert LABELS[criterion] in figure_texts(figure)
    assert "nats" in LABELS[criterion]
    assert "network" not in figure_texts(figure)
    assert (EDGE_TEXT in figure_texts(figure)) == at_edge


def test_a_single_candidate_can_be_drawn() -> None:
    assert len(draw_prior_precision(CURVE[:1], criterion="val", at_edge=True).axes) == 1


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


def test_plot_of_an_up_to_date_artifact_draws_the_stored_curve_without_fitting(
    cli: Cli, name: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = cli("fit-laplace", name, *words)
    assert done.code == 2
    assert "error: --plot" in done.stderr
    assert not name.with_name("small.bnn").joinpath("posteriors", "laplace.safetensors").exists()


def test_a_foreign_file_is_refused_before_the_work_and_replaced_with_force(
    cli: Cli, name: Path, tmp_path: Path
) -> None:
    path = tmp_path / "holiday.png"
    path.write_bytes(b"a photograph")
    done = cli("fit-laplace", name, "--plot", path)
    assert (done.code, done.stdout, path.read_bytes()) == (73, "", b"a photograph")
    assert "add --force" in done.stderr
    assert not name.with_name("small.bnn").joinpath("posteriors", "laplace.safetensors").exists()
    assert cli("fit-laplace", name, "--plot", path, "--force").code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_figure_never_replaces_what_the_command_reads_or_writes(cli: Cli, name: Path, tmp_path: Path) -> None:
    link = tmp_path / "train.png"
    link.symlink_to(name.with_name("small.bnn") / "features" / "train.h5")
    assert cli("fit-laplace", name, "--plot", link, "--force").code == 2
    out = tmp_path / "out.png"
    assert cli("fit-laplace", name, "--out", out, "--plot", out).code == 2


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


def test_a_plot_that_cannot_be_written_says_that_the_fit_is_complete(
    cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [patch.get_label() for patch in one[3].patches] == ["layer 0", "layer 1"]
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
