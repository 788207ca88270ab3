"""compare: other draws of one posterior, and the figure."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from problems.command_line import Cli, new_run
from scipy import stats

from bnncli.errors import WriteError
from bnncli.evaluation.bootstrap import Bootstrap, DrawGroups, integration_errors
from bnncli.evaluation.comparison import Sample, confidence_set, integration
from bnncli.figures.scores import Line, ScorePanel, draw_comparison

TWO = ("--split", "test", "--split", "far")  # what is compared; val is not


def scores_of(document: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    (row,) = [row for row in document["rows"] if row["name"] == name]
    return {score["form"]: score for score in row["scores"]}


def draw_predictions(generator: np.random.Generator, logits: NDArray, num_draws: int) -> DrawGroups:
    """Predictions of fresh draws that all examples (N, 2) share: a shift of their logits, and a scale of them."""
    shift, scale = generator.normal(size=(2, num_draws, 1))
    moved = logits[:, 0] * np.exp(0.5 * scale) + 1.2 * shift
    right = 1 / (1 + np.exp(-moved))  # (S, N)
    groups = right.reshape(10, num_draws // 10, -1).mean(axis=1)
    return DrawGroups(np.stack([groups, 1 - groups], axis=2), np.full(10, 0.1))


def samples_of(generator: np.random.Generator, seeds: int, num_draws: int, weights: NDArray, trial: int) -> list[Any]:
    """NLL and accuracy of one posterior predicted with several seeds, with and without their integration errors."""
    logits = 1.5 * generator.normal(size=(weights.shape[1], 1)) + 1
    labels = generator.random(len(logits)) > 1 / (1 + np.exp(-logits[:, 0]))

    def losses(probs: NDArray) -> NDArray:
        own = np.where(labels, probs[:, 1], probs[:, 0])
        return np.stack([-np.log(own), own > 0.5], axis=1)

    found: list[list[Sample]] = [[], []]
    for place in range(seeds):
        groups = draw_predictions(generator, logits, num_draws)
        errors = integration_errors(lambda probs: losses(probs).mean(axis=0).tolist(), groups)
        columns = losses(groups.mean())
        drawn = weights @ columns / len(columns)
        for score, error in enumerate(errors):
            seed = 1000 * trial + 10 * place + score
            noise = integration(error.standard_error, error.degrees_of_freedom, size=len(drawn), seed=seed)
            found[score].append(Sample(columns.mean(axis=0)[[score]], drawn[:, score], noise))
    return found


def is_any_unmarked(samples: list[Sample], *, higher: bool) -> bool:
    return any(
        p is not None and p <= 0.05 for p in confidence_set(samples, higher_is_better=higher, alpha=0.05).p_values
    )


@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_same_posterior_with_other_draws_differs_in_alpha_of_the_comparisons(seeds: int) -> None:
    generator, trials = np.random.default_rng(0), 120
    weights = np.concatenate([b[0] for b in Bootstrap(199).weights(("test", 400))]).astype(np.float64)
    falsely, without = np.zeros(2), 0
    for trial in range(trials):
        nll, accuracy = samples_of(generator, seeds, 20, weights, trial)
        falsely += [is_any_unmarked(nll, higher=False), is_any_unmarked(accuracy, higher=True)]
        without += is_any_unmarked([replace(sample, integration=None) for sample in nll], higher=False)
    assert (falsely / trials <= 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / trials)).all()
    assert without > trials / 4  # what examples alone would tell


def test_other_seeds_of_one_posterior_are_all_marked_and_the_warning_says_what_to_run(
    cli: Cli, small_run: Path
) -> None:
    for seed in (1, 2, 3):
        cli(
            "predict",
            small_run,
            "--posterior",
            "laplace",
            "--seed",
            seed,
            "--samples",
            20,
            "--name",
            f"seed-{seed}",
            *TWO,
        )
    done = cli("compare", small_run, "--posterior", "laplace", "--metric", "nll", "--metric", "auroc", "--json")
    for row in done.json["rows"]:
        assert row["draws"] == (1000 if row["name"] == "laplace.mc" else 20)
        assert all(score["is_close"] and score["integration_error"] > 0 for score in row["scores"])
    assert "exceeds the sampling error of its difference in " in done.stderr
    assert f"bnncli predict {small_run} --posterior laplace --integrator mc --samples " in done.stderr
    wrong = cli("compare", small_run, "--baseline", "nothing")
    assert f"bnncli predict {small_run} --posterior nothing" in wrong.stderr


def test_a_prediction_without_draws_has_no_integration_error_and_one_draw_an_unknown_one(
    cli: Cli, small_run: Path
) -> None:
    cli("predict", small_run, "--posterior", "laplace", "--integrator", "probit", *TWO)
    cli("predict", small_run, "--posterior", "laplace", "--samples", 1, "--name", "one", *TWO)
    done = cli(
        "compare", small_run, "--posterior", "laplace", "--metric", "nll", "--metric", "auroc:mutual_info", "--json"
    )
    nll = {row["name"]: (row["draws"], scores_of(done.json, row["name"])["nll"]) for row in done.json["rows"]}
    assert (nll["laplace.probit"][0], nll["laplace.probit"][1]["integration_error"]) == (None, 0.0)
    assert "integration_unknown" not in nll["laplace.probit"][1]
    assert (nll["one"][0], nll["one"][1]["integration_error"]) == (1, None)
    assert "they have one draw" in nll["one"][1]["integration_unknown"]
    by_draws = scores_of(done.json, "laplace.mc")["auroc:mutual_info:far"]
    assert (by_draws["integration_error"], "class probabilities" in by_draws["integration_unknown"]) == (None, True)
    text = cli("compare", small_run, "--posterior", "laplace", "--metric", "nll").stderr
    assert "integration error unknown and ignored: nll of one (" in text


def test_one_network_is_not_told_to_be_drawn_more_often(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "map", "--integrator", "mc", *TWO)
    done = cli(
        "compare", small_run, "--posterior", "map", "--metric", "accuracy", "--metric", "nll", "--metric", "auroc"
    )
    assert (done.code, done.stderr) == (0, "")


def test_over_checkpoints_the_spread_contains_the_integration_error(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    new_run(cli, other, make_other(), "--ood", "far")
    cli("fit-laplace", other, "--prior-precision", "3")
    cli("predict", other, *TWO)
    document = cli(
        "compare", small_run, other, "--posterior", "laplace", "--posterior", "map", "--metric", "nll", "--json"
    ).json
    score = scores_of(document, "laplace.mc")["nll"]
    assert (score["integration_error"], "spread over checkpoints" in score["integration_unknown"]) == (None, True)


def make_other() -> dict[str, np.ndarray]:
    from problems.arrays import make_arrays

    return make_arrays()


def test_two_splits_of_other_draws_have_no_integration_error_of_a_detection(cli: Cli, small_run: Path) -> None:
    for split, seed in (("test", 0), ("far", 5)):
        cli("predict", small_run, "--posterior", "laplace", "--seed", seed, "--split", split, "--name", "mixed")
    document = cli("compare", small_run, "--posterior", "mixed", "--metric", "auroc", "--metric", "nll", "--json").json
    found = scores_of(document, "mixed")
    assert found["nll"]["integration_error"] > 0
    assert found["auroc:far"]["integration_error"] is None
    assert "different seeds or numbers of draws" in found["auroc:far"]["integration_unknown"]


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
