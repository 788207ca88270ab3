"""The figure of score --plot: what it shows, and where it may be written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from problems.command_line import Cli

from bnncli.errors import WriteError
from bnncli.figures import predictions, render

QUICK = ("--bootstrap", "0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with predictions p.npz of three classes, of groups of 40, 30, ... 2 examples."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    probs = generator.dirichlet(np.ones(3), size=200)
    groups = np.repeat([f"g{k:02}" for k in range(14)], [40, 30, 30, 20, *[8] * 10])
    np.savez("p.npz", probs=probs, label=generator.integers(3, size=200), site=groups)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What is given to the figure."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    draw = predictions.draw_reliability

    def kept(panels: Any, **named: Any) -> Any:
        found.append((dict(panels), named))
        return draw(panels, **named)

    monkeypatch.setattr(predictions, "draw", kept)
    return found


def test_the_diagram_is_that_of_the_scores(cli: Cli, folder: Path, drawn: Any) -> None:
    done = cli("score", "p.npz", "--plot", "r.png", "--bins", 10, *QUICK, "--json")
    (output,) = done.json["outputs"]
    assert (done.code, done.json["action"], output["role"], output["path"]) == (0, "computed", "score.plot", "r.png")
    ((panels, named),) = drawn
    ece = next(m for m in done.json["rows"][0]["metrics"] if (m["name"], m.get("strategy")) == ("ece", "equal-width"))
    assert named == {"split": "test", "errors": {"p": ece["value"]}}
    arrays = np.load("p.npz")
    confidence, is_right = arrays["probs"].max(axis=1), arrays["probs"].argmax(axis=1) == arrays["label"]
    place = np.clip(np.ceil(confidence * 10).astype(int) - 1, 0, 9)
    assert panels["p"]["count"] == [int((place == k).sum()) for k in range(10)]
    for k in np.unique(place):
        assert panels["p"]["accuracy"][k] == pytest.approx(is_right[place == k].mean())
        assert panels["p"]["confidence"][k] == pytest.approx(confidence[place == k].mean())
    with Image.open("r.png") as image:
        pixels = np.asarray(image.convert("L"))
    assert 0.005 < (pixels < 128).mean() < 0.5


def test_the_largest_groups_have_a_panel_each(
    cli: Cli, folder: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.figures.render", lambda figure, form: b"")
    done = cli("score", "p.npz", "--groups", "site", "--metric", "nll", "--plot", "r.svg", *QUICK)
    ((panels, named),) = drawn
    assert list(panels) == list(named["errors"]) == ["test", *(f"g{k:02}" for k in range(11))]
    assert [sum(curve["count"]) for curve in panels.values()] == [200, 40, 30, 30, 20, *[8] * 7]
    assert "figure: r.svg (the 11 largest of 14 groups)" in done.stdout
    values = cli("score", "p.npz", "--groups", "site", *QUICK, "--json").json["groups"]
    own = {row["group"]: next(m["value"] for m in row["metrics"] if m["name"] == "ece") for row in values}
    assert {name: named["errors"][name] for name in own if name in panels} == {
        name: own[name] for name in list(own)[:11]
    }


def test_several_labels_an_example_have_the_diagram_of_all_decisions(cli: Cli, folder: Path, drawn: Any) -> None:
    generator = np.random.default_rng(1)
    probs = generator.random((50, 3))
    np.savez("m.npz", probs=probs, label=(generator.random((50, 3)) < probs).astype(int))
    assert cli("score", "m.npz", "--task", "multilabel", "--plot", "r.pdf", *QUICK).code == 0
    ((panels, _),) = drawn
    assert sum(panels["m"]["count"]) == 150


def test_a_group_may_be_called_as_the_file_is(
    cli: Cli, folder: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.figures.render", lambda figure, form: b"")
    np.savez("p.npz", **{**np.load("p.npz"), "site": np.resize(["p", "q"], 200)})
    assert cli("score", "p.npz", "--groups", "site", "--plot", "r.svg", *QUICK).code == 0
    assert [*drawn[0][0]] == ["test", "p", "q"]


def test_names_in_titles_may_be_anything(recwarn: pytest.WarningsRecorder) -> None:
    curve = {"edges": [0, 0.5, 1], "count": [0, 4], "confidence": [None, 0.75], "accuracy": [None, 0.5]}
    names = ["北京", "$\\frac{x$", "x" * 60, "a\tb"]
    figure = predictions.draw_reliability(dict.fromkeys(names, curve), split="test", errors=dict.fromkeys(names, 0.25))
    texts = set(re.findall("<!-- (.*?) -->", render(figure, "svg").decode(), re.DOTALL))
    assert {"$\\frac{x$", f"{'x' * 31}…", "a\\tb", "ECE 0.2500"} <= {
        line for text in texts for line in text.split("\n")
    }
    assert not [str(one.message) for one in recwarn if "Glyph" in str(one.message)]


REFUSED = {
    "an own file": (("--plot", "p.svg", "--force"), 2, "--plot p.svg is also an input (FILE p.svg)"),
    "a foreign file": (("--plot", "notes.png"), 73, "notes.png exists and is not a figure created by bnncli"),
    "another kind": (("--plot", "r.gif"), 2, "--plot: expected a file ending in .png, .svg, .pdf; got 'r.gif'"),
    "a folder": (("--plot", "d.png", "--force"), 73, "d.png is a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_it_may_not_be_written_nothing_is_read(
    cli: Cli, folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, code, message = REFUSED[case]
    Path("p.npz").rename("p.svg")
    Path("notes.png").write_text("mine")
    Path("d.png").mkdir()
    monkeypatch.setattr("bnncli.commands.score.open_given", None)
    done = cli("score", "p.svg", *words, *QUICK)
    assert (done.code, message in done.stderr) == (code, True), done.stderr
    assert Path("notes.png").read_text() == "mine"


def test_another_file_is_replaced_by_force_and_a_figure_without(cli: Cli, folder: Path) -> None:
    Path("r.png").write_text("mine")
    assert cli("score", "p.npz", "--plot", "r.png", "-f", *QUICK).code == 0
    assert cli("score", "p.npz", "--plot", "r.png", *QUICK).code == 0


def test_without_labels_there_is_nothing_to_draw(cli: Cli, folder: Path) -> None:
    np.save("alone.npy", np.load("p.npz")["probs"])
    done = cli("score", "alone.npy", "--plot", "r.png", *QUICK)
    assert done.code == 65
    assert "--plot: 'alone.npy' has no labels" in done.stderr
    assert "--labels FILE[:COLUMN]" in done.stderr
    assert not Path("r.png").exists()


def test_a_figure_that_cannot_be_written_is_told(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> str:
        raise WriteError("no space left", hint="free some")

    monkeypatch.setattr("bnncli.commands.score.write_figure", full)
    done = cli("score", "p.npz", "--plot", "r.png", *QUICK)
    assert (done.code, "--plot: cannot write r.png" in done.stderr) == (int(WriteError.exit), True), done.stderr
