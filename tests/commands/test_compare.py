"""compare: what it shows, marks and refuses, for one checkpoint and for several; other draws; the figure."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from problems.arrays import make_arrays
from problems.command_line import STEPS, Cli, new_run
from scipy import stats

from bnncli.commands.compare.measure import Column, Entry
from bnncli.commands.compare.output import Comparison, Name, build_table, format_latex, format_markdown
from bnncli.errors import WriteError
from bnncli.evaluation.bootstrap import Bootstrap, DrawGroups, integration_errors
from bnncli.evaluation.comparison import Difference, Sample, Standing, confidence_set, integration
from bnncli.figures.scores import Line, ScorePanel, draw_comparison


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs of one experiment, with predictions of map and laplace."""
    from bnncli.cli.execute import run_command_line

    folder = tmp_path_factory.mktemp("seeds")
    names = []
    for seed in range(3):
        arrays = make_arrays()
        noise = np.random.default_rng(100 + seed).normal(size=arrays["head_weight"].shape)
        arrays["head_weight"] = (arrays["head_weight"] + 0.3 * noise).astype(np.float32)
        np.savez(folder / "features.npz", **arrays)
        name = folder / f"seed-{seed}"
        for words in (["extract-features", name, "--from-npz", folder / "features.npz", "--ood", "far"], [STEPS[0][0], name, *STEPS[0][1:]], ["predict", name, "--split", "test", "--split", "far", "--samples", 100]):  # fmt: skip
            assert run_command_line([str(word) for word in words], io.StringIO()) == 0
        names.append(name)
    return names


def scores_of(document: dict[str, Any], posterior: str) -> dict[str, dict[str, Any]]:
    (row,) = [row for row in document["rows"] if row["posterior"] == posterior]
    return {score["form"]: score for score in row["scores"]}


def values_of(rows: list[dict[str, Any]], posterior: str) -> dict[str, dict[str, Any]]:
    """The scores of evaluate in their usual forms."""
    (row,) = [row for row in rows if row["posterior"] == posterior and row["split"] == "test"]
    usual = {"strategy": "equal-width", "score": "max_prob", "positive": "in", "norm": "l1"}
    kept = [m for m in row["metrics"] if all(m.get(key, value) == value for key, value in usual.items())]
    return {metric["name"]: metric for metric in kept}


@pytest.mark.sure_scores
def test_one_checkpoint_has_the_scores_and_standard_errors_of_evaluate(cli: Cli, small_run: Path) -> None:
    document = cli("compare", small_run, "--json", "--metric", "nll", "--metric", "ece", "--metric", "accuracy").json
    assert {row["posterior"] for row in document["rows"]} == {"map", "laplace", "refine", "hmc"}
    rows = cli("evaluate", small_run, "--force", "--json").json["rows"]
    for posterior in ("map", "laplace", "hmc"):
        expected = values_of(rows, posterior)
        for name, score in scores_of(document, posterior).items():
            assert score["value"] == pytest.approx(expected[name]["value"], rel=1e-12)
            both = np.hypot(expected[name]["standard_error"], score["integration_error"])
            assert score["standard_error"] == pytest.approx(both, rel=1e-9)
            assert (score["integration_error"] > 0) == (posterior != "map")
    assert {row["posterior"]: row["draws"] for row in document["rows"]} == {"map": None, "laplace": 1000, "refine": 1000, "hmc": 128}  # fmt: skip
    assert (document["num_checkpoints"], document["replicates"], document["alpha"]) == (1, 1000, 0.05)


def test_the_default_scores_are_shown_and_the_best_are_marked(cli: Cli, small_run: Path) -> None:
    done = cli("compare", small_run)
    head = [cell.strip() for cell in done.stdout.splitlines()[0].split("|")]
    assert head == ["posterior", "integrator", "draws", "accuracy", "NLL", "Brier", "ECE", "AUROC far", "FPR95 far"]
    document = cli("compare", small_run, "--json").json
    for place in range(6):
        column = [row["scores"][place] for row in document["rows"]]
        best = [score for score in column if score["is_best"]]
        sign = 1 if best[0]["higher_is_better"] else -1
        assert len(best) == 1
        assert best[0]["value"] == max((score["value"] for score in column), key=lambda value: sign * value)
        for score in column:
            assert score["is_close"] == (score["p_adjusted"] > 0.05)
            assert score["is_close"] or not score["is_best"]
    stars = [cell.strip().startswith("*") for cell in done.stdout.splitlines()[2].split("|")[3:]]
    columns = [[row["scores"][place] for row in document["rows"]] for place in range(len(stars))]
    untold = [all(score["is_close"] for score in column if score["value"] is not None) for column in columns]
    assert stars == [column[0]["is_close"] and not is_untold for column, is_untold in zip(columns, untold, strict=True)]


def test_several_checkpoints_have_means_and_the_t_tests_of_scipy(cli: Cli, seeds: list[Path]) -> None:
    words = ("--metric", "nll", "--metric", "auroc", "--baseline", "map", "--alpha", "0.1")
    done = cli("compare", *seeds, *words, "--json")
    document = done.json
    assert (document["num_checkpoints"], document["baseline"]) == (3, "map.plug-in")
    evaluated = [
        cli("evaluate", seed, "--bootstrap", 0, "--score", "max_prob", "--json").json["rows"] for seed in seeds
    ]
    for name in ("nll", "auroc"):
        own, base = (
            np.array([values_of(rows, posterior)[name]["value"] for rows in evaluated])
            for posterior in ("laplace", "map")
        )
        form = "auroc:far" if name == "auroc" else name
        score, other = scores_of(document, "laplace")[form], scores_of(document, "map")[form]
        expected = stats.ttest_rel(own, base)
        assert score["values"] == pytest.approx(own.tolist(), rel=1e-12)
        assert (score["value"], score["standard_error"]) == pytest.approx((own.mean(), stats.sem(own)), rel=1e-9)
        assert score["p_value"] == score["p_adjusted"] == pytest.approx(expected.pvalue, rel=1e-6)
        ends = expected.confidence_interval(0.9)
        assert (score["low"], score["high"]) == pytest.approx((ends.low, ends.high), rel=1e-6)
        assert (other["difference"], other["p_value"]) == (None, None)
    assert "with 3 checkpoints the paired t test" in done.stderr


def test_checkpoints_are_compared_by_what_all_of_them_have(cli: Cli, seeds: list[Path], small_run: Path) -> None:
    done = cli("compare", seeds[0], small_run, "--metric", "nll", "--json")
    assert [row["posterior"] for row in done.json["rows"]] == ["map", "laplace"]
    assert f"skipping refine.mc, hmc.mc: no predictions for split 'test' of {seeds[0]}" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--baseline", "nobody"], 66, "posterior 'nobody' is not compared here"),
        (["--baseline", "map", "--posterior", "map"], 2, "no other posterior"),
        (["--posterior", "nobody"], 66, "no predictions of posterior 'nobody'"),
        (["--split", "far"], 66, "no posterior has predictions of an in-distribution split 'far' (have: test, val)"),
        (["--metric", "mmd2"], 2, "unknown metric 'mmd2'"),
        (["--metric", "map.nll"], 2, "expected METRIC"),
        (
            ["--metric", "nll", "--metric", "auroc:near"],
            2,
            "no posterior has this score (out-of-distribution splits: far; scores: combined, max_prob, ",
        ),
        (
            ["--metric", "nll", "--metric", "ece:equal-mess"],
            2,
            "--metric ece:equal-mess: no posterior has this score\n",
        ),
        (["--metric", "nll", "--metric", "nll"], 2, "given twice"),
        (["--format", "latex", "--json"], 2, "give only one of --format latex and --json"),
        (["--format", "html"], 2, "expected one of text, csv, markdown, latex"),
        (["--alpha", "0"], 2, "--alpha: expected"),
    ],
)
def test_wrong_comparisons_are_refused(cli: Cli, small_run: Path, words: list[str], code: int, why: str) -> None:
    done = cli("compare", small_run, *words)
    assert (done.code, "Traceback" in done.stderr, done.stderr.count("error:")) == (code, False, 1)
    assert why in done.stderr


def test_predictions_under_a_name_of_their_own_are_compared_by_it(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "laplace", "--name", "more", "--samples", 200, "--split", "test")
    done = cli("compare", small_run, "--posterior", "laplace", "--metric", "nll", "--baseline", "more")
    assert [line.split("|")[0].strip() for line in done.stdout.splitlines()[2:4]] == ["laplace", "laplace (more)"]
    cli("compare", small_run, "--metric", "nll", "--baseline", "laplace").expect(
        2, "--baseline: laplace is ambiguous; name one of laplace.mc, more"
    )


def test_a_checkpoint_given_twice_is_no_second_seed(cli: Cli, small_run: Path) -> None:
    cli("compare", small_run, small_run.parent / "." / small_run.name).expect(2, "is given twice")
    cli("compare", small_run, small_run.with_name("other"), "--run-dir", small_run.with_name("small.bnn")).expect(
        2, "--run-dir names the run folder of one checkpoint"
    )
    cli("compare", small_run, "--metric", "nll", "--run-dir", small_run.with_name("small.bnn")).expect(0)


def test_unlabelled_scores_that_are_named_are_an_error_and_not_shown_otherwise(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    del arrays["labels_test"]
    new_run(cli, tmp_path / "a", arrays, "--ood", "far")
    cli("predict", tmp_path / "a", "--split", "test", "--split", "far")
    cli("compare", tmp_path / "a", "--metric", "nll").expect(65, "undefined on split 'test': no labels")
    head, _, row = cli("compare", tmp_path / "a").stdout.splitlines()[:3]
    assert "NLL" not in head
    assert row.split("|")[2].strip()[0] == "*"


def test_different_examples_are_refused(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.commands import compare
    from bnncli.session.predictions import open_groups

    def changed(*words: Any, **names: Any) -> Any:
        groups = open_groups(*words, **names)
        for header in groups[1].headers:
            if header.meta["split"] == "test":
                header.meta["order_digest"] = "other"
        return groups

    monkeypatch.setattr(compare, "open_groups", changed)
    cli("compare", small_run).expect(
        65, "holds different examples for laplace.mc and for map.plug-in", f"bnncli predict {small_run} --force"
    )


def test_stale_predictions_are_left_out_with_a_warning(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", "9", "--force")
    done = cli("compare", small_run, "--metric", "nll").expect(0)
    assert "laplace" not in done.stdout
    assert "skipping laplace.mc" in done.stderr


def test_too_few_replicates_for_a_verdict_are_told(cli: Cli, small_run: Path) -> None:
    words = ("--metric", "nll", "--alpha", "0.001", "--bootstrap", 100)
    assert "nothing can be significant; use at least 1001" in cli("compare", small_run, *words).stderr
    done = cli("compare", small_run, *words, "--baseline", "map")
    assert "nothing can be significant; use at least 3001" in done.stderr
    assert "nothing can" not in cli("compare", small_run, "--metric", "nll").stderr


def test_csv_has_every_digit_and_the_same_numbers_as_json(cli: Cli, small_run: Path) -> None:
    words = ("compare", small_run, "--bootstrap", 100)
    lines = list(csv.DictReader(io.StringIO(cli(*words, "--format", "csv").stdout)))
    document = cli(*words, "--json").json
    scores = [(row["posterior"], score) for row in document["rows"] for score in row["scores"]]
    assert len(lines) == len(scores) == 4 * 6
    for line, (posterior, score) in zip(lines, scores, strict=True):
        assert (line["posterior"], line["score"], line["split"]) == (posterior, score["form"], "test")
        assert float(line["value"]) == score["value"]
        assert (line["is_best"], line["p_value"]) == (
            str(score["is_best"]).lower(),
            "" if score["p_value"] is None else repr(score["p_value"]),
        )


def comparison(baseline: int | None = None) -> Comparison:
    """Two posteriors with names that every format must escape."""
    entries = [Entry(Sample(np.array([0.25]), np.array([0.24, 0.26]))), Entry(None, "no labels")]
    standings = [Standing(None, None, True, True), Standing(Difference(-0.01, 0.001, -0.02, -0.005, 0.01), 0.04)]
    columns = [
        Column({"name": "nll", "higher_is_better": False}, "nll", entries),
        Column({"name": "auroc", "ood": "a_b", "higher_is_better": True}, "auroc:a_b", list(reversed(entries))),
    ]
    shown = [standings, [Standing(), standings[0]]]
    return Comparison(
        [Name("a_1.mc", "a_1", "mc", "mc", 20), Name("b|2.mc-qmc", "b|2", "mc", "mc-qmc")],
        columns,
        shown,
        "test",
        10,
        1,
        2,
        0.05,
        baseline,
    )


def test_latex_is_booktabs_with_escaped_names_and_bold_marks() -> None:
    packages, note, *lines = format_latex(comparison())
    assert packages == r"% needs \usepackage{booktabs}"
    assert lines == [
        r"\begin{tabular}{llrrr}", r"\toprule",
        r"posterior & integrator & draws & NLL $\downarrow$ & AUROC a\_b $\uparrow$ \\", r"\midrule",
        r"a\_1 & mc & 20 & $\mathbf{0.2500} \pm 0.0141$ & -- \\",
        r"b|2 & mc-qmc & - & -- & $\mathbf{0.2500} \pm 0.0141$ \\",
        r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    assert note.startswith("% split test, value")


def test_where_no_two_are_told_apart_there_are_no_marks_and_a_note() -> None:
    entries = [Entry(Sample(np.array([value]))) for value in (0.3, 0.29, 0.31)]
    names = [Name(f"{name}.mc", name, "mc", "mc") for name in "abc"]
    columns = [Column({"name": name, "higher_is_better": False}, name, entries) for name in ("nll", "ece")]
    best, close, worse = Standing(None, None, True, True), Standing(None, 0.4, False, True), Standing(None, 0.01)
    shown = Comparison(names, columns, [[close, best, worse], [close, best, close]], "test", 10, 1, 2, 0.05, None)
    table = build_table(shown)
    assert [row[3:] for row in table.rows] == [
        ["* 0.3000", "  0.3000"], ["* 0.2900", "  0.2900"], ["  0.3100", "  0.3100"],
    ]  # fmt: skip
    assert table.notes[-1].endswith("; no significant difference in ECE")
    assert format_markdown(shown)[-1].endswith("; no significant difference in ECE.")


def test_with_a_baseline_what_differs_significantly_is_marked() -> None:
    entries = [Entry(Sample(np.array([value]))) for value in (0.3, 0.29, 0.2999)]
    differences = [Difference(-0.01, 0.001, -0.02, -0.005, 0.01), Difference(-0.0001, 0.001, -0.002, 0.002, 0.9)]
    standings = [Standing(), *(Standing(d, p) for d, p in zip(differences, (0.02, 0.9), strict=True))]
    columns = [Column({"name": "nll", "higher_is_better": False}, "nll", entries)]
    shown = Comparison(
        [Name(f"{name}.mc", name, "mc", "mc") for name in "abc"], columns, [standings], "test", 10, 1, 2, 0.05, 0
    )
    assert [row[3] for row in build_table(shown).rows] == [
        "  0.3000", "* -0.0100 [-0.0200, -0.0050] p=0.01", "  -0.0001 [-0.0020, +0.0020] p=0.9",
    ]  # fmt: skip
    assert format_latex(shown)[-4].endswith(r"& $\mathbf{-0.0100\;[-0.0200, -0.0050]}$ \\")


def test_the_document_has_correlations_that_give_the_standard_errors_of_differences(cli: Cli, small_run: Path) -> None:
    words = ("compare", small_run, "--metric", "nll", "--baseline", "map", "--json")
    scores = {row["name"]: row["scores"][0] for row in cli(*words).json["rows"]}
    base = scores["map.plug-in"]
    assert base["correlations"]["map.plug-in"] == pytest.approx(1)
    for name in set(scores) - {"map.plug-in"}:
        one, known = scores[name], scores[name]["correlations"]["map.plug-in"]
        assert known == base["correlations"][name]
        a, b = one["standard_error"], base["standard_error"]
        expected = one["difference_standard_error"]
        assert math.sqrt(a**2 + b**2 - 2 * known * a * b) == pytest.approx(expected, rel=0.02)


TWO = ("--split", "test", "--split", "far")  # what is compared; val is not


def scores_of_draws(document: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
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


def test_seeds_of_one_posterior_are_all_marked(cli: Cli, small_run: Path) -> None:
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


def test_integration_error_without_draws_and_of_one_draw(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "laplace", "--integrator", "probit", *TWO)
    cli("predict", small_run, "--posterior", "laplace", "--samples", 1, "--name", "one", *TWO)
    done = cli(
        "compare", small_run, "--posterior", "laplace", "--metric", "nll", "--metric", "auroc:mutual_info", "--json"
    )
    nll = {row["name"]: (row["draws"], scores_of_draws(done.json, row["name"])["nll"]) for row in done.json["rows"]}
    assert (nll["laplace.probit"][0], nll["laplace.probit"][1]["integration_error"]) == (None, 0.0)
    assert "integration_unknown" not in nll["laplace.probit"][1]
    assert (nll["one"][0], nll["one"][1]["integration_error"]) == (1, None)
    assert "they have one draw" in nll["one"][1]["integration_unknown"]
    by_draws = scores_of_draws(done.json, "laplace.mc")["auroc:mutual_info:far"]
    assert (by_draws["integration_error"], "class probabilities" in by_draws["integration_unknown"]) == (None, True)
    text = cli("compare", small_run, "--posterior", "laplace", "--metric", "nll").stderr
    assert "integration error unknown and ignored: nll of one (" in text


def test_over_checkpoints_the_spread_contains_the_integration_error(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    new_run(cli, other, make_other(), "--ood", "far")
    cli("fit-laplace", other, "--prior-precision", "3")
    cli("predict", other, *TWO)
    document = cli(
        "compare", small_run, other, "--posterior", "laplace", "--posterior", "map", "--metric", "nll", "--json"
    ).json
    score = scores_of_draws(document, "laplace.mc")["nll"]
    assert (score["integration_error"], "spread over checkpoints" in score["integration_unknown"]) == (None, True)


def make_other() -> dict[str, np.ndarray]:
    from problems.arrays import make_arrays

    return make_arrays()


def test_two_splits_of_other_draws_have_no_integration_error_of_a_detection(cli: Cli, small_run: Path) -> None:
    for split, seed in (("test", 0), ("far", 5)):
        cli("predict", small_run, "--posterior", "laplace", "--seed", seed, "--split", split, "--name", "mixed")
    document = cli("compare", small_run, "--posterior", "mixed", "--metric", "auroc", "--metric", "nll", "--json").json
    found = scores_of_draws(document, "mixed")
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


def test_the_interval_of_a_mean_is_students_and_that_of_one_checkpoint_its_replicates_with_the_draws() -> None:
    values = np.random.default_rng(0).normal(size=5)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert Sample(values).interval(0.9) == pytest.approx((expected.low, expected.high))
    drawn = 2 + np.random.default_rng(1).normal(size=20_000)
    one = Sample(np.array([2.0]), drawn, integration(1.0, 200.0, size=20_000, seed=2))
    assert one.interval(0.95) == pytest.approx((2 - 1.96 * 2**0.5, 2 + 1.96 * 2**0.5), abs=0.06)
    assert Sample(np.array([2.0])).interval(0.95) is None


@pytest.mark.parametrize("words", [[], ["--baseline", "map"]], ids=["best", "baseline"])
def test_plot_writes_a_png_and_lists_it(cli: Cli, small_run: Path, tmp_path: Path, words: list[str]) -> None:
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


def test_foreign_file_is_replaced_only_with_force(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "compare-test.png"
    path.write_bytes(b"a photograph")
    words = ("compare", small_run, "--metric", "nll", "--plot", tmp_path)
    done = cli(*words)
    assert (done.code, done.stdout, path.read_bytes()) == (73, "", b"a photograph")
    assert "add --force" in done.stderr
    cli(*words, "--force").expect(0)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_says_what_would_be_drawn_and_draws_nothing(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    done = cli("compare", small_run, "--metric", "nll", "--plot", tmp_path / "figures", "--dry-run")
    assert (done.code, done.stdout.strip()) == (0, f"draw: {tmp_path / 'figures' / 'compare-test.png'}")
    assert not (tmp_path / "figures").exists()


def test_unwritable_figure_is_named(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> str:
        raise WriteError("disk full", hint="free some space")

    monkeypatch.setattr("bnncli.commands.compare.output.write_figure", fail)
    cli("compare", small_run, "--metric", "nll", "--plot", tmp_path).expect(74, "cannot write ")


@pytest.mark.parametrize(("panels", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (7, (3, 3))])
def test_panels_stand_in_up_to_three_columns(panels: int, shape: tuple[int, int]) -> None:
    axes = figure_of(panels).axes
    assert axes[0].get_gridspec().get_geometry() == shape
    assert sum(one.get_visible() for one in axes) == panels


def test_marked_ones_are_told_apart_by_shape_filling_and_dash() -> None:
    (axes,) = figure_of().axes
    plain, marked = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert plain.get_markerfacecolor() == "white"
    assert marked.get_markerfacecolor() != "white"
    dashed, solid = [line for line in axes.lines if line.get_marker() == "None"]
    assert (dashed.is_dashed(), solid.is_dashed()) == (True, False)


def test_differences_have_a_line_at_zero() -> None:
    assert any(list(line.get_xdata()) == [0, 0] for line in figure_of(zero="map").axes[0].lines)
    assert not any(list(line.get_xdata()) == [0, 0] for line in figure_of().axes[0].lines)
