"""compare: what it shows, marks and refuses, for one checkpoint and for several."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.arrays import make_arrays
from problems.command_line import STEPS, Cli, new_run
from scipy import stats

from bnncli.commands.compare.measure import Column, Entry
from bnncli.commands.compare.output import Comparison, Name, build_table, format_csv, format_latex, format_markdown
from bnncli.evaluation.comparison import Difference, Sample, Standing


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


def test_scores_are_titled_as_they_were_asked_for_and_by_what_tells_them_apart(cli: Cli, small_run: Path) -> None:
    words = [
        word
        for name in ("ece:class-wise", "fpr95", "mean_entropy", "ece", "auroc:entropy")
        for word in ("--metric", name)
    ]
    done = cli("compare", small_run, *words)
    head = [cell.strip() for cell in done.stdout.splitlines()[0].split("|")[3:]]
    assert head == ["ECE class-wise", "FPR95 far", "entropy", "ECE", "AUROC entropy far"]
    assert all(line.split("|")[5].strip()[0] != "*" for line in done.stdout.splitlines()[2:6])  # no entropy is best


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


def test_the_baseline_is_shown_and_the_others_as_differences(cli: Cli, small_run: Path) -> None:
    done = cli("compare", small_run, "--baseline", "laplace.mc", "--metric", "nll")
    rows = {line.split("|")[0].strip(): line.split("|")[3].strip() for line in done.stdout.splitlines()[2:6]}
    assert " +- " in rows["laplace"]
    for name in ("map", "refine", "hmc"):
        assert rows[name].lstrip("* ")[0] in "+-"
        assert "p=" in rows[name]
    assert "for laplace.mc; for the others, the difference from it with a 95% interval" in done.stdout


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
def test_what_cannot_be_compared_is_told_in_one_line(
    cli: Cli, small_run: Path, words: list[str], code: int, why: str
) -> None:
    done = cli("compare", small_run, *words)
    assert (done.code, "Traceback" in done.stderr, done.stderr.count("error:")) == (code, False, 1)
    assert why in done.stderr


def test_predictions_under_a_name_of_their_own_are_compared_by_it(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "laplace", "--name", "more", "--samples", 200, "--split", "test")
    done = cli("compare", small_run, "--posterior", "laplace", "--metric", "nll", "--baseline", "more")
    assert [line.split("|")[0].strip() for line in done.stdout.splitlines()[2:4]] == ["laplace", "laplace (more)"]
    done = cli("compare", small_run, "--metric", "nll", "--baseline", "laplace")
    assert (done.code, "--baseline: laplace is ambiguous; name one of laplace.mc, more" in done.stderr) == (2, True)


def test_a_checkpoint_given_twice_is_no_second_seed(cli: Cli, small_run: Path) -> None:
    done = cli("compare", small_run, small_run.parent / "." / small_run.name)
    assert (done.code, "is given twice" in done.stderr) == (2, True)
    done = cli("compare", small_run, small_run.with_name("other"), "--run-dir", small_run.with_name("small.bnn"))
    assert (done.code, "--run-dir names the run folder of one checkpoint" in done.stderr) == (2, True)
    assert cli("compare", small_run, "--metric", "nll", "--run-dir", small_run.with_name("small.bnn")).code == 0


def test_unlabelled_scores_that_are_named_are_an_error_and_not_shown_otherwise(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    del arrays["labels_test"]
    new_run(cli, tmp_path / "a", arrays, "--ood", "far")
    cli("predict", tmp_path / "a", "--split", "test", "--split", "far")
    done = cli("compare", tmp_path / "a", "--metric", "nll")
    assert (done.code, "undefined on split 'test': no labels" in done.stderr) == (65, True)
    head, _, row = cli("compare", tmp_path / "a").stdout.splitlines()[:3]
    assert "NLL" not in head
    assert row.split("|")[2].strip()[0] == "*"


def test_posteriors_of_different_examples_are_refused(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bnncli.commands import compare
    from bnncli.session.predictions import open_groups

    def changed(*words: Any, **names: Any) -> Any:
        groups = open_groups(*words, **names)
        for header in groups[1].headers:
            if header.meta["split"] == "test":
                header.meta["order_digest"] = "other"
        return groups

    monkeypatch.setattr(compare, "open_groups", changed)
    done = cli("compare", small_run)
    assert (done.code, "holds different examples for laplace.mc and for map.plug-in" in done.stderr) == (65, True)
    assert f"bnncli predict {small_run} --force" in done.stderr


def test_stale_predictions_are_left_out_with_a_warning(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", "9", "--force")
    done = cli("compare", small_run, "--metric", "nll")
    assert done.code == 0
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


def test_markdown_escapes_pipes_and_marks_in_bold() -> None:
    lines = format_markdown(comparison())
    assert lines[:4] == [
        "| posterior | integrator | draws | NLL | AUROC a_b |", "| --- | --- | ---: | ---: | ---: |",
        "| a_1 | mc | 20 | **0.2500 ± 0.0141** | - |", r"| b\|2 | mc-qmc | - | - | **0.2500 ± 0.0141** |",
    ]  # fmt: skip
    assert lines[-1].startswith("Split test, value ± standard error over 10 examples; bold: best, or not")


def test_text_marks_with_stars_and_csv_leaves_undefined_empty() -> None:
    table = build_table(comparison())
    assert table.rows[0] == ["a_1", "mc", "20", "* 0.2500 +- 0.0141", "  -"]
    assert [part.columns[3] for part in table.narrow] == ["NLL", "AUROC a_b"]
    assert format_csv(comparison())[2] == "a_1,mc,20,test,auroc:a_b,,,,false,false,,,,,,"


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


def test_the_same_seed_gives_the_same_document(cli: Cli, small_run: Path) -> None:
    def document(*words: object) -> dict[str, Any]:
        found = cli("compare", small_run, "--metric", "ece", "--bootstrap", 100, "--json", *words).json
        del found["seconds"]
        return json.loads(json.dumps(found))

    first = document()
    assert first == document()
    assert first != document("--seed", 1)


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
