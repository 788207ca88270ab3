"""Curves against scikit-learn and brute force; the figures drawn of them; evaluate --curves and --plot."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from problems.command_line import Cli, new_run
from problems.outputs import figure_texts
from sklearn import metrics

from bnncli.evaluation import curves
from bnncli.evaluation.calibration import calibration_scores
from bnncli.evaluation.curves import MAX_POINTS, reliability_curve, risk_coverage_curve, roc_curve
from bnncli.evaluation.statistics import compute_example_statistics
from bnncli.figures import predictions, render


@pytest.fixture
def scores() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(1, 1, size=3000).round(1), generator.normal(size=2000).round(1)  # with ties


def test_the_roc_curve_is_that_of_scikit_learn(scores: tuple[np.ndarray, np.ndarray]) -> None:
    found = roc_curve(*scores)
    is_in = np.repeat([1, 0], [3000, 2000])
    fpr, tpr, _ = metrics.roc_curve(is_in, np.concatenate(scores), drop_intermediate=False)
    np.testing.assert_allclose(found["fpr"], fpr, atol=1e-6)
    np.testing.assert_allclose(found["tpr"], tpr, atol=1e-6)


def test_a_thinned_roc_curve_keeps_its_ends_and_its_area() -> None:
    generator = np.random.default_rng(1)
    inside, outside = generator.normal(1, 1, size=5000), generator.normal(size=5000)
    found = roc_curve(inside, outside)
    assert len(found["fpr"]) == len(found["tpr"]) <= MAX_POINTS
    assert [(found["fpr"][end], found["tpr"][end]) for end in (0, -1)] == [(0, 0), (1, 1)]
    assert (np.diff(found["fpr"]) >= 0).all()
    area = metrics.roc_auc_score(np.repeat([1, 0], 5000), np.concatenate([inside, outside]))
    assert metrics.auc(found["fpr"], found["tpr"]) == pytest.approx(area, abs=2e-4)
    kept = set(zip(found["fpr"], found["tpr"], strict=True))
    every = metrics.roc_curve(np.repeat([1, 0], 5000), np.concatenate([inside, outside]), drop_intermediate=False)
    assert kept <= set(zip(every[0].round(6).tolist(), every[1].round(6).tolist(), strict=True))


def test_risk_is_the_share_of_errors_above_each_confidence() -> None:
    generator = np.random.default_rng(2)
    confidence = generator.integers(1, 30, size=400) / 30
    is_right = generator.random(400) < confidence
    found = risk_coverage_curve(confidence, is_right)
    expected = [
        (np.mean(confidence >= level), np.mean(~is_right[confidence >= level]))
        for level in sorted(set(confidence), reverse=True)
    ]
    np.testing.assert_allclose(np.stack([found["coverage"], found["risk"]], axis=1), expected, atol=1e-6)


def test_the_order_of_the_examples_and_thinning_leave_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    confidence, is_right = generator.random(999), generator.random(999) < 0.8
    order = generator.permutation(999)
    found = risk_coverage_curve(confidence, is_right)
    assert found == risk_coverage_curve(confidence[order], is_right[order])
    assert len(found["risk"]) <= MAX_POINTS
    assert (found["coverage"][0], found["coverage"][-1]) == (round(1 / 999, 6), 1.0)
    assert found["risk"][-1] == pytest.approx(np.mean(~is_right), abs=1e-6)
    monkeypatch.setattr(curves, "MAX_POINTS", 2000)
    assert len(risk_coverage_curve(confidence, is_right)["risk"]) == 999


def test_a_single_example_and_equal_scores_have_curves() -> None:
    assert risk_coverage_curve(np.array([0.5]), np.array([False])) == {"coverage": [1.0], "risk": [1.0]}
    assert roc_curve(np.ones(3), np.ones(2)) == {"fpr": [0.0, 1.0], "tpr": [0.0, 1.0]}


def test_the_ece_can_be_computed_from_the_reliability_curve() -> None:
    generator = np.random.default_rng(4)
    probs = generator.dirichlet(np.ones(3), size=500)
    examples = compute_example_statistics(probs, generator.integers(3, size=500))
    found = reliability_curve(examples, num_bins=12)
    assert (len(found["edges"]), sum(found["count"])) == (13, 500)
    assert [c is None for c in found["confidence"]] == [count == 0 for count in found["count"]]
    assert None in found["accuracy"]  # below 1 / 3
    gaps = [
        n * abs(a - c) for n, a, c in zip(*(found[k] for k in ("count", "accuracy", "confidence")), strict=True) if n
    ]
    expected = calibration_scores(examples, num_bins=12)[0].statistic(np.ones((1, 500)))[0, 0]  # type: ignore[misc]
    assert sum(gaps) / 500 == pytest.approx(expected, rel=1e-9)


BINS = {"edges": [0, 0.25, 0.5, 0.75, 1], "count": [0, 3, 40, 500], "confidence": [None, 0.4, 0.6, 0.95], "accuracy": [None, 0.5, 0.5, 0.9]}  # fmt: skip


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_reliability_diagram_has_two_axes_for_each_posterior_and_its_ece(count: int) -> None:
    names = [f"posterior-{place}" for place in range(count)]
    errors = {name: 0.01 * place for place, name in enumerate(names)}
    figure = predictions.draw_reliability(dict.fromkeys(names, BINS), split="test", errors=errors)
    assert len(figure.axes) == 2 * count
    assert all(f"{name}\nECE {errors[name]:.4f}" in figure_texts(figure) for name in names)
    upper, lower = figure.axes[:2]
    heights = [bar.get_height() for bar in upper.patches]
    assert heights == pytest.approx([0, 0.5, 0.5, 0.9, 0, -0.1, 0.1, 0.05])  # accuracies, then gaps to the confidence
    assert [bar.get_height() for bar in lower.patches] == BINS["count"]
    assert lower.get_yscale() == "log"


@pytest.mark.parametrize(
    "count", [8, 9, pytest.param(30, marks=pytest.mark.long)]
)  # the most inside the axes, the fewest beside them, many
def test_nothing_is_cut_off_by_the_edge_of_a_figure(count: int) -> None:
    names = [f"posterior-{place} (bridge-none-normalize)" for place in range(count)]
    line = {"coverage": [0.1, 1.0], "risk": [0.0, 0.2], "fpr": [0.0, 1.0], "tpr": [0.0, 1.0]}
    areas = dict.fromkeys(names, 0.75)
    for figure in (
        predictions.draw_risk_coverage(dict.fromkeys(names, line), split="test", areas=areas),
        predictions.draw_roc(dict.fromkeys(names, line), areas, split="test", ood="far", score="combined"),
    ):
        with Image.open(io.BytesIO(render(figure, "png"))) as image:
            pixels = np.asarray(image.convert("L"))
        assert all((edge == 255).all() for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]))
        assert count <= 8 or figure.legends[0].get_window_extent().x0 >= figure.axes[0].get_window_extent().x1


def test_curves_are_in_the_rows_when_asked_for_and_only_then(cli: Cli, small_run: Path) -> None:
    assert all("curves" not in row for row in cli("evaluate", small_run, "--json").json["rows"])
    rows = cli("evaluate", small_run, "--json", "--curves").json["rows"]
    for row in rows:
        values = {(m["name"], m.get("strategy", m.get("score"))): m["value"] for m in row["metrics"]}
        drawn = row["curves"]["roc"]["far"]
        assert metrics.auc(drawn["fpr"], drawn["tpr"]) == pytest.approx(values["auroc", "combined"], abs=1e-5)
        assert row["curves"]["risk_coverage"]["risk"][-1] == pytest.approx(1 - values["accuracy", None], abs=1e-6)
        assert len(row["curves"]["reliability"]["edges"]) == 16
    assert len(cli("evaluate", small_run, "--json", "--curves", "--split", "val").json["rows"]) == len(rows) // 2


def test_unlabelled_split_has_curves_without_labels(cli: Cli, tmp_path: Path, arrays: dict[str, Any]) -> None:
    del arrays["labels_test"]
    new_run(cli, tmp_path / "a", arrays, "--ood", "far")
    cli("predict", tmp_path / "a", "--split", "test", "--split", "far")
    done = cli("evaluate", tmp_path / "a", "--json", "--curves", "--plot", tmp_path / "plots")
    assert done.json["rows"][0]["curves"]["reliability"] is None
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["roc-test-far.png"]


KINDS = ("reliability", "risk_coverage", "roc")


def draw_blanks(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Lets figures be blank sheets, which take no time; what each would show is in the dictionary, by its module."""
    drawn: dict[str, dict[str, Any]] = {}
    for name in KINDS:

        def draw(curves: dict[str, Any], *_: Any, name: str = name, **__: Any) -> Figure:
            drawn[name] = curves
            return Figure()

        monkeypatch.setattr(predictions, f"draw_{name}", draw)
    return drawn


@pytest.mark.long
def test_plot_lists_each_figure(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "plots"
    done = cli("evaluate", small_run, "--plot", folder, "--split", "test", "--metric", "nll", "--json")
    names = ["reliability-test.png", "risk-coverage-test.png", "roc-test-far.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    listed = {output["role"]: output for output in done.json["outputs"]}
    assert listed["plot.roc-test-far"]["path"] == str(folder / names[2])
    assert "curves" not in done.json["rows"][0]
    for name in names:
        with Image.open(folder / name) as image:
            pixels = np.asarray(image.convert("L"))
        assert min(pixels.shape) >= 500
        assert 0.005 < (pixels < 128).mean() < 0.5
    draw_blanks(monkeypatch)
    cli("evaluate", small_run, "--plot", folder, "--posterior", "map").expect(0, "6 figures in")


def test_files_in_the_way_of_plots(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_blanks(monkeypatch)
    stored = small_run.with_name("small.bnn") / "metrics"
    for path in stored.iterdir():
        path.unlink()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "roc-test-far.png").write_text("mine")
    for folder, why in (
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "plots", "is not a figure created by bnncli"),
    ):
        done = cli("evaluate", small_run, "--plot", folder)
        assert (done.code, why in done.stderr, list(stored.iterdir())) == (73, True, [])
    words = ("--force", "--posterior", "map", "--split", "test")
    cli("evaluate", small_run, "--plot", tmp_path / "plots", *words).expect(0)


def test_a_dry_run_names_the_figures_and_draws_none(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    done = cli("evaluate", small_run, "--plot", tmp_path / "plots", "--dry-run")
    assert f"draw: {tmp_path / 'plots' / 'reliability-test.png'}" in done.stdout
    assert not (tmp_path / "plots").exists()


def test_plot_leaves_out_features(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw_blanks(monkeypatch)
    words = ("--split", "test", "--score", "knn", "--posterior", "map")
    cli("evaluate", small_run, "--plot", tmp_path / "plots", *words).expect(0)
    assert len(list((tmp_path / "plots").iterdir())) == 3
    assert {key: list(curves) for key, curves in drawn.items()} == {key: ["map (plug-in)"] for key in KINDS}
    assert all(curves["map (plug-in)"] for curves in drawn.values())
