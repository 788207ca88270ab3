"""report: what the page holds, that it is one file which asks for nothing, and what it says where something is missing."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli, new_run
from problems.pages import Node, check_is_self_contained, check_names, read_page

from bnncli.artifacts.predictions import read_predictions
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.cli.execute import run_command_line
from bnncli.commands.report.subject import Damaged
from bnncli.figures.pages import MOST_BYTES
from bnncli.names import percent

SECTIONS = (
    "verdict", "scores", "calibration", "confidence", "decisions", "posteriors", "chains", "fits", "fidelity", "inputs", "origins",
    "terms",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report; nothing changes it."""
    name = tmp_path_factory.mktemp("reported") / "small"
    shutil.copytree(finished_run.with_name("small.bnn"), name.with_name("small.bnn"))
    assert run_command_line(["report", str(name), "-q"], io.StringIO()) == 0
    return name


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    return run.with_name("small.bnn") / "report.html"


@pytest.fixture(scope="module")
def page(report: Path) -> Node:
    return read_page(report)


def test_the_page_is_one_small_file_that_asks_for_nothing(report: Path, page: Node) -> None:
    check_is_self_contained(page, report.read_text())
    check_names(page)
    assert report.stat().st_size < MOST_BYTES // 2
    policy = page.all("meta", http_equiv="Content-Security-Policy")[0].attributes["content"] or ""
    assert policy.startswith("default-src 'none';")
    assert page.all("html")[0].attributes["lang"] == "en"


def test_sections_stand_in_the_order_that_they_are_read_in_the_verdict_first(page: Node) -> None:
    found = [node.attributes["id"] for node in page.all("section")]
    assert tuple(found) == SECTIONS
    assert [link.attributes["href"] for link in page.all("nav")[0].all("a")] == [f"#{name}" for name in SECTIONS]


def test_the_verdict_is_that_of_diagnose(cli: Cli, run: Path, page: Node) -> None:
    sentence = cli("diagnose", run, "--json").json["verdict"]["sentence"]
    (quoted,) = page.one("verdict").all("q")
    assert quoted.text == sentence


def test_the_numbers_of_the_verdict_are_those_of_evaluate_and_diagnose(cli: Cli, run: Path, page: Node) -> None:
    verdict = cli("diagnose", run, "--json").json["verdict"]
    text = page.one("verdict").text
    focus = verdict["predict"]["posterior"]
    kept = {"temperature": "Keep temperature scaling.", "map": "Keep the network as trained."}
    assert text.startswith(f"Verdict{kept.get(focus, f'Use {focus}')}")
    assert verdict["predict"]["sentence"].removeprefix("predict") in text
    for row in cli("evaluate", run, "--split", "test", "--json").json["rows"]:
        if row["posterior"] in (focus, "map"):
            (error,) = [m for m in row["metrics"] if m["name"] == "ece"][:1]
            assert f"{percent(error['value'])} ({row['posterior']})" in text
            (area,) = [m for m in row["metrics"] if m["name"] == "auroc" and m["score"] == "combined"]
            assert f"far {area['value']:.3f}" in text


def test_what_pays_is_what_compare_measures(cli: Cli, run: Path, page: Node) -> None:
    """NLL, accuracy and detection by the largest probability of the recommended predictions and of the network's."""
    focus = cli("diagnose", run, "--json").json["verdict"]["predict"]["posterior"]
    shown = {row["score"]: row for row in page.one("pays").rows()}
    other = next(name for name in shown["NLL"] if name not in ("score", focus, "difference", "95% interval", "finding"))
    for row in cli("compare", run, "--split", "test", "--json").json["rows"]:
        if row["posterior"] in (focus, other):
            (nll,) = [one["value"] for one in row["scores"] if one["name"] == "nll"]
            (area,) = [one["value"] for one in row["scores"] if one["name"] == "auroc"]
            assert shown["NLL"][row["posterior"]] == f"{nll:.4f}"
            assert shown["AUROC far, by largest probability"][row["posterior"]] == f"{area:.4f}"


def test_terms_of_the_verdict_lead_to_their_explanations(page: Node) -> None:
    links = [link for link in page.one("verdict").all("a") if str(link.attributes["href"]).startswith("#term-")]
    assert {"NLL", "ECE"} <= {link.text for link in links}
    for link in links:
        assert page.one(str(link.attributes["href"])[1:]).text == link.text


@pytest.mark.usefixtures("pictures_are_names")
@pytest.mark.long
def test_another_split_is_shown_where_it_is_named(cli: Cli, run: Path, tmp_path: Path) -> None:
    cli("report", run, "--split", "val", "--out", tmp_path / "val.html").expect(0)
    rows = read_page(tmp_path / "val.html").one("reliability-val").rows()
    file = read_predictions(run.with_name("small.bnn") / "predictions/laplace.mc/val.h5")
    assert sum(int(row["examples"]) for row in rows if row["posterior"] == "laplace") == len(file.probs)


def test_the_table_has_the_scores_of_evaluate_and_needs_no_script(cli: Cli, run: Path, page: Node) -> None:
    rows = cli("evaluate", run, "--split", "test", "--json").json["rows"]
    shown = {row["posterior"]: row for row in page.one("score-table").rows()}
    assert shown.keys() == {row["posterior"] for row in rows}
    for row in rows:
        (nll,) = [metric for metric in row["metrics"] if metric["name"] == "nll"]
        cell = shown[row["posterior"]]["NLL"]
        ends = nll["interval"]
        assert cell == f"{nll['value']:.4f}[{ends['low']:.4f}, {ends['high']:.4f}]"
    assert all(node.attributes["scope"] for node in page.one("score-table").all("th"))


def test_every_figure_has_a_title_a_description_and_its_numbers(page: Node) -> None:
    figures = page.all("figure")
    assert {str(one.attributes["id"]) for one in figures} >= {
        "reliability-test", "risk-coverage-test", "confidence-test", "roc-test-far", "scores-test", "pareto-k", "mmd", "marginals",
        "traces-hmc",
    }  # fmt: skip
    for one in figures:
        (svg,) = one.all("svg")
        assert svg.attributes["role"] == "img"
        named = [one.one(name).text for name in str(svg.attributes["aria-labelledby"]).split()]
        assert all(named)
        assert one.all("figcaption")[0].text == " ".join(named)
        assert one.all("details")[0].rows()


def test_reliability_is_what_the_predictions_say(run: Path, page: Node) -> None:
    file = read_predictions(run.with_name("small.bnn") / "predictions/laplace.mc/test.h5")
    assert file.labels is not None
    confidence, right = file.probs.max(axis=1), file.probs.argmax(axis=1) == file.labels
    rows = [row for row in page.one("reliability-test").rows() if row["posterior"] == "laplace"]
    assert sum(int(row["examples"]) for row in rows) == len(confidence)
    for row in rows:
        low, high = float(row["from"]), float(row["to"])
        inside = (confidence > low + 1e-5) & (confidence <= high + 1e-5)
        assert int(row["examples"]) == inside.sum()
        assert float(row["accuracy"]) == pytest.approx(right[inside].mean(), rel=1e-3)
        assert float(row["mean confidence"]) == pytest.approx(confidence[inside].mean(), rel=1e-3)


@pytest.mark.long
def test_the_same_artifacts_give_the_same_bytes(cli: Cli, run: Path, tmp_path: Path) -> None:
    cli("report", run, "--out", tmp_path / "first.html").expect(0)
    first = (tmp_path / "first.html").read_bytes()
    again = cli("report", run, "--out", tmp_path / "again.html", "--json").json
    assert (tmp_path / "again.html").read_bytes() == first
    (output,) = again["outputs"]
    assert (output["role"], output["bytes"], output["path"]) == ("report", len(first), str(tmp_path / "again.html"))
    third = cli("report", run, "--out", tmp_path / "again.html", "--json").json
    assert (again["action"], third["action"], third["outputs"]) == ("computed", "up_to_date", again["outputs"])


@pytest.mark.usefixtures("pictures_are_names")
def test_a_page_of_other_options_is_not_replaced_without_force(cli: Cli, run: Path, tmp_path: Path) -> None:
    words = ("--out", tmp_path / "page.html", "--posterior", "map")
    cli("report", run, *words).expect(0)
    before = (tmp_path / "page.html").read_bytes()
    done = cli("report", run, *words, "--examples", 1)
    assert (done.code, done.stdout, (tmp_path / "page.html").read_bytes()) == (73, "", before)
    assert done.stderr.splitlines() == [
        f"error: {tmp_path / 'page.html'} already exists with other options (examples: existing=6, requested=1)",
        "hint: add --force to replace it, or --out FILE to keep both",
    ]
    assert cli("report", run, *words, "--examples", 1, "--force", "--json").json["action"] == "replaced"


@pytest.mark.parametrize("place", ["no/such/page.html", "/proc/page.html"])
def test_a_place_that_takes_no_page_is_told_before_any_work(
    cli: Cli, run: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.commands.report.whole.build_sections", None)  # no work is done
    path = tmp_path / place
    done = cli("report", run, "--out", path)
    assert (done.code, done.stdout) == (73, "")
    error, hint = done.stderr.splitlines()
    assert str(path.parent) in error
    assert hint.endswith("choose another place with --out")
    assert not (tmp_path / "no").exists()


def test_a_page_that_another_process_writes_is_left_to_it(cli: Cli, run: Path, tmp_path: Path) -> None:
    lock = tmp_path / ".locks" / "page.html"
    with artifact_lock(lock, wait=0, poll=lambda: None):
        done = cli("report", run, "--out", tmp_path / "page.html")
    assert (done.code, done.stdout) == (75, "")
    assert "another bnncli is writing this artifact" in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.long
def test_figures_go_into_a_folder_by_their_names(cli: Cli, run: Path, tmp_path: Path, page: Node) -> None:
    words = ("--figures", tmp_path / "f", "--figure-format", "svg", "--out", tmp_path / "out.html")
    done = cli("report", run, *words, "--json").json
    names = {str(one.attributes["id"]) for one in page.all("figure")}
    assert {path.name for path in (tmp_path / "f").iterdir()} == {f"{name}.svg" for name in names}
    assert set(done["figures"]) == names
    assert {output["role"] for output in done["outputs"]} == {"report", *(f"figure.{name}" for name in names)}


def test_a_bare_run_says_what_is_missing_and_the_command_that_makes_it(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    for name in ("predictions", "metrics", "posteriors"):
        shutil.rmtree(folder / name)
    cli("report", small_run).expect(0)
    page = read_page(folder / "report.html")
    check_names(page)
    told = {section.attributes["id"]: section.text for section in page.all("section")}
    assert f"bnncli predict {small_run}" in told["calibration"]
    assert f"bnncli fit-laplace {small_run}" in told["verdict"]
    assert f"bnncli hmc {small_run}" in told["chains"]
    assert f"bnncli evaluate {small_run}" in told["scores"]
    assert "There is no verdict" in told["verdict"]


@pytest.mark.usefixtures("pictures_are_names")
@pytest.mark.parametrize("gone", ["hmc.nc", "laplace.safetensors", "map.safetensors"])
def test_a_run_without_one_of_its_posteriors_is_reported_on(cli: Cli, small_run: Path, gone: str) -> None:
    folder = small_run.with_name("small.bnn")
    (folder / "posteriors" / gone).unlink()
    cli("report", small_run).expect(0)
    check_names(read_page(folder / "report.html"))


@pytest.mark.long
def test_posteriors_whose_names_begin_alike_have_figures_of_their_own(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn") / "posteriors"
    shutil.copy(folder / "hmc.nc", folder / "hmc-1.nc")
    cli("report", small_run).expect(0)
    page = read_page(folder.with_name("report.html"))
    check_names(page)
    assert {"traces-hmc", "traces-hmc-1"} <= {one.attributes["id"] for one in page.all("figure")}


@pytest.mark.usefixtures("pictures_are_names")
def test_a_damaged_file_is_told_and_the_rest_is_shown(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    path = folder / "posteriors" / "hmc.nc"
    path.write_bytes(path.read_bytes()[:3000])
    cli("report", small_run).expect(0)
    page = read_page(folder / "report.html")
    assert "truncated" in page.one("origins").text
    assert page.one("reliability-test")


@pytest.mark.usefixtures("pictures_are_names")
def test_only_the_posteriors_that_are_named_are_shown(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "some.html"
    cli("report", run, "--posterior", "map", "--posterior", "laplace", "--out", out).expect(0)
    page = read_page(out)
    assert {row["posterior"] for row in page.one("reliability-test").rows()} == {"map", "laplace"}
    assert {row["posterior"] for row in page.one("score-table").rows()} == {"map", "laplace"}


@pytest.mark.long
def test_several_checkpoints_are_compared_and_have_a_part_each(cli: Cli, small_run: Path) -> None:
    shutil.copytree(small_run.with_name("small.bnn"), small_run.with_name("other.bnn"))
    cli("report", small_run, small_run.with_name("other")).expect(0)
    path = small_run.with_name("small.bnn") / "comparison.html"
    page = read_page(path)
    check_is_self_contained(page, path.read_text())
    check_names(page)
    assert page.all("section")[0].attributes["id"] == "comparison"
    assert {"c1-verdict", "c2-verdict", "c2-calibration"} <= {node.attributes["id"] for node in page.all("section")}
    shown = {row["posterior"]: row for row in page.one("comparison-table").rows()}
    rows = cli("compare", small_run, small_run.with_name("other"), "--json").json["rows"]
    for row in rows:
        (nll,) = [score for score in row["scores"] if score["name"] == "nll"]
        assert f"{nll['value']:.4f}" in shown[row["posterior"]]["NLL"]
        best = page.one("comparison").all("p")[0].text
        assert (row["posterior"] in re.findall(r"[\w-]+", best)) == nll["is_close"]


@pytest.fixture
def two(cli: Cli, tmp_path: Path) -> list[Path]:
    """Two runs of other training examples, fitted with another prior precision each."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("test", 40)):
        images, labels = rng.integers(0, 256, size=(count, 4, 4), dtype=np.uint8), rng.integers(0, 3, size=count)
        images[:, 0, 0] = 120 * labels
        np.savez(tmp_path / f"{split}.npz", x=images, y=labels)
    runs = [tmp_path / "one", tmp_path / "two"]
    for run, size, precision in zip(runs, (60, 30), (1, 100), strict=True):
        data = ("--data", f"train=npz:{tmp_path / 'train.npz'}@{size}", "--data", f"test=npz:{tmp_path / 'test.npz'}")
        cli("extract-features", run, "--model", "flatten", *data).expect(0)
        cli("fit-laplace", run, "--prior-precision", precision).expect(0)
        cli("predict", run, "--integrator", "mc", "--integrator", "probit").expect(0)
    return runs


@pytest.mark.usefixtures("pictures_are_names")
def test_checkpoints_that_differ_are_told_apart(cli: Cli, two: list[Path]) -> None:
    cli("report", *two, "--out", two[0].with_name("both.html")).expect(0)
    section = read_page(two[0].with_name("both.html")).one("comparison")
    text = section.text
    assert (
        "differ by more than their random training: their training examples are not the same (60 and 30 of them)"
        in text
    )
    assert "options of laplace (prior_precision: one=1.0, two=100.0)" in text
    headline = section.all("p")[0].text
    assert (
        headline
        == "The NLLs of laplace (mc) and laplace (probit) do not differ significantly on test, over 2 checkpoints."
    )


@pytest.mark.usefixtures("pictures_are_names")
def test_intervals_over_checkpoints_end_where_scores_do(cli: Cli, two: list[Path]) -> None:
    cli("report", *two, "--out", two[0].with_name("both.html")).expect(0)
    rows = read_page(two[0].with_name("both.html")).one("scores-of-all-test").rows()
    ends = {row["score"].split(",")[0]: (float(row["low"]), float(row["high"])) for row in rows if row["low"] != "–"}
    assert ends["accuracy higher is better"] == (0, 1)
    assert ends["NLL lower is better"][0] == 0


@pytest.mark.usefixtures("pictures_are_names")
@pytest.mark.long
def test_predictions_that_a_checkpoint_lacks_are_told_with_its_own_name(cli: Cli, small_run: Path) -> None:
    shutil.copytree(small_run.with_name("small.bnn"), small_run.with_name("other.bnn"))
    for path in small_run.with_name("other.bnn").glob("predictions/*/test.h5"):
        path.unlink()
    cli("report", small_run, small_run.with_name("other")).expect(0)
    (told,) = read_page(small_run.with_name("small.bnn") / "comparison.html").one("comparison").all("p")
    assert told.text.startswith("No posterior has predictions of ")
    assert told.all("code")[0].text == f"bnncli predict {small_run.with_name('other')} --split test"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--figure-format", "svg"], 2, "--figures"),
        (["--figure-format", "gif"], 2, "gif"),
        (["--out", ".."], 2, "--out"),
        (["--examples", "99"], 2, "--examples"),
        (["--split", "nowhere"], 66, "nowhere"),
        (["--posterior", "nobody"], 66, "nobody"),
    ],
)
def test_wrong_options_are_told_in_a_line(cli: Cli, small_run: Path, words: list[str], code: int, said: str) -> None:
    done = cli("report", small_run, *words)
    assert (done.code, done.stdout) == (code, "")
    assert said in done.stderr.splitlines()[0]
    assert not small_run.with_name("small.bnn").joinpath("report.html").exists()


@pytest.mark.usefixtures("pictures_are_names")
@pytest.mark.long
def test_what_is_no_report_is_not_replaced_without_force(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "letter.html"
    path.write_text("<html>a letter")
    done = cli("report", small_run, "--out", path)
    assert (done.code, path.read_text()) == (73, "<html>a letter")
    assert "add --force" in done.stderr
    cli("report", small_run, "--out", path, "--force").expect(0)
    cli("report", small_run, "--out", path).expect(0)
    cli("report", small_run, "--out", small_run.with_name("small.bnn") / "features" / "test.h5").expect(2)


def test_a_dry_run_says_where_and_writes_nothing(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    done = cli("report", small_run, "--dry-run", "--figures", tmp_path / "f", "--json").json
    path = small_run.with_name("small.bnn") / "report.html"
    assert (done["action"], done["outputs"][0]["path"]) == ("planned", str(path))
    assert not path.exists()
    assert not (tmp_path / "f").exists()


def test_signal_is_told_with_the_report(cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*words: object) -> list[Damaged]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    monkeypatch.setattr("bnncli.commands.report.whole.find_damaged", interrupted)
    done = cli("report", run, "--out", tmp_path / "page.html")
    assert (done.code, done.stderr) == (130, "error: interrupted by SIGINT; no report was written\n")
    assert not (tmp_path / "page.html").exists()


def test_figures_go_into_no_file_which_is_told_before_any_work(cli: Cli, small_run: Path) -> None:
    small_run.with_name("notes.txt").touch()
    done = cli("report", small_run, "--figures", small_run.with_name("notes.txt"), "--dry-run")
    assert (done.code, done.stdout) == (73, "")
    assert "notes.txt is not a folder" in done.stderr


def test_names_that_look_like_markup_are_texts(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hostile = ["<script>alert(1)</script>", "'><img src=x onerror=y>", "a&amp;b $x$ \\frac"]
    for split in ("train", "test"):
        lines = [f"{a},{b},{hostile[row % 3]}" for row, (a, b) in enumerate(rng.normal(size=(60, 2)))]
        (tmp_path / f"{split}.csv").write_text("\n".join(["a,b,label", *lines]))
    run = tmp_path / "<b>run&amp;"
    data = [word for split in ("train", "test") for word in ("--data", f"{split}=csv:{tmp_path / split}.csv:x=a+b")]
    chains = ("--chains", 2, "--warmup", 8, "--draws", 30, "--prior-precision", 1)
    for words in (
        ("extract-features", "--model", "flatten", *data),
        ("hmc", *chains),
        ("predict",),
        ("evaluate",),
        ("report",),
    ):
        cli(words[0], run, *words[1:]).expect(0)
    path = run.with_name(f"{run.name}.bnn") / "report.html"
    page = read_page(path)
    check_is_self_contained(page, path.read_text())
    assert len(page.all("script")) == 1
    assert not page.all("b")
    assert page.all("h1")[0].text == "Report on <b>run&amp;"
    assert "<script>alert(1)" in page.one("inputs").text
    assert "a&amp;b $x$" in page.one("inputs").text


@pytest.mark.long
def test_the_page_does_not_grow_with_the_examples(cli: Cli, tmp_path: Path) -> None:
    rng, sizes = np.random.default_rng(0), []
    head = rng.normal(size=(3, 2)).astype(np.float32)
    for count in (3000, 300_000):
        run = tmp_path / f"rows-{count}"
        arrays = {f"features_{split}": rng.normal(size=(count, 2)).astype(np.float32) for split in ("test", "far")}
        arrays |= {"labels_test": (arrays["features_test"] @ head.T).argmax(axis=1), "head_weight": head}
        assert new_run(cli, run, {**arrays, "head_bias": np.zeros(3, np.float32)}, "--ood", "far")
        for words in (("predict", run), ("report", run)):
            cli(*words).expect(0)
        path = run.with_name(f"{run.name}.bnn") / "report.html"
        check_names(read_page(path))
        sizes.append(path.stat().st_size)
    assert sizes[1] < 1.15 * sizes[0]


@pytest.mark.long
def test_the_largest_page_stays_below_a_megabyte(cli: Cli, small_run: Path) -> None:
    for name in "abcdefg":
        cli("fit-laplace", small_run, "--name", name).expect(0)
    for seed in (1, 2):
        words = ("--chains", 20, "--warmup", 8, "--draws", 40, "--seed", seed, "--name", f"hmc-{seed}")
        cli("hmc", small_run, *words).expect(0)
    cli("predict", small_run, "--posterior", "all").expect(0)
    cli("evaluate", small_run, "--bootstrap", 20, "--reference", "hmc-1", "--force").expect(0)
    done = cli("report", small_run, "--examples", 24, "--json").json
    assert done["outputs"][0]["bytes"] < MOST_BYTES
    assert done["warnings"] == []
