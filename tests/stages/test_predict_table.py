"""The table of predict: what stands in it, against the prediction files; merged classes; where it may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli
from problems.outputs import table_rows
from scipy import stats

from bnncli.artifacts.outputs import TableBlock, as_it_was, write_table
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.predict import table as predict_table
from bnncli.commands.predict.table import parse_merges
from bnncli.errors import UsageError

BRIDGE = ("--posterior", "laplace", "--integrator", "bridge", "--integrator", "mc")
CLASSES = ["cat", "dog", "9", "car; red"]


def make(cli: Cli, run: Path, name: str, *words: object) -> Path:
    path = run.with_name(name)
    done = cli("predict", run, *words, "--table", path, "--json")
    assert done.code == 0, done.stdout
    assert done.json["outputs"][-1]["path"] == str(path)
    return path


def prediction(run: Path, name: str, split: str) -> Any:
    return read_predictions(run.with_name("small.bnn") / "predictions" / name / f"{split}.h5")


def test_a_csv_table_has_every_prediction_of_the_command(cli: Cli, small_run: Path) -> None:
    words = ("--top-k", "best", "--merge", "ab=0,1", "--split", "test", "--split", "far")
    rows = table_rows(make(cli, small_run, "t.csv", *BRIDGE, *words))
    assert len(rows) == 2 * (120 + 60)
    for variant in ("bridge", "mc"):
        content = prediction(small_run, f"laplace.{variant}", "test")
        own = [row for row in rows if (row["split"], row["variant"]) == ("test", variant)]
        predicted = content.probs.argmax(axis=1)
        assert [row["predicted"] for row in own] == [content.classes[k] for k in predicted]
        assert [row["label"] for row in own] == [content.classes[k] for k in content.labels]
        assert [int(row["sample_id"]) for row in own] == content.sample_id.tolist()
        scores = {"entropy": content.entropy, "energy": content.energy, "max_logit": content.max_logit}
        for name, values in {"probability": content.probs.max(axis=1), **scores}.items():
            assert np.array_equal(np.array([row[name] for row in own], dtype=np.float32), values)
        union = content.probs[:, :2].sum(axis=1, dtype=np.float64)
        np.testing.assert_allclose([float(row["ab"]) for row in own], union, rtol=1e-8)
        assert (own[0]["top_k"] == "", own[0]["ab_low"] == "") == (variant == "mc", variant == "mc")
    assert {row["label"] for row in rows if row["split"] == "far"} == {""}


def test_an_npz_table_says_the_same_as_the_csv_one(cli: Cli, small_run: Path) -> None:
    words = (*BRIDGE, "--top-k", "neighbor", "--merge", "ab=0,2", "--split", "test", "--split", "far")
    rows = table_rows(make(cli, small_run, "t.csv", *words))
    with np.load(make(cli, small_run, "t.npz", *words), allow_pickle=False) as file:
        table = dict(file)
    classes = [*table["classes"].tolist(), ""]
    for name in ("split", "posterior", "variant"):
        assert table[name].tolist() == [row[name] for row in rows]
    for name in ("predicted", "label"):
        assert [classes[k] for k in table[name]] == [row[name] for row in rows]
    for name in (
        "sample_id",
        "probability",
        "entropy",
        "mutual_info",
        "low",
        "high",
        "level",
        "ab",
        "ab_low",
        "ab_high",
    ):
        texts = np.array([row[name] or "nan" for row in rows], dtype=np.float64)
        np.testing.assert_allclose(table[name], texts, rtol=1e-7)
    assert [";".join(classes[k] for k in row if k >= 0) for row in table["top_k"]] == [row["top_k"] for row in rows]


@pytest.mark.parametrize("members", [[0, 2], [1]], ids=str)
def test_the_interval_of_a_union_is_that_of_its_beta(cli: Cli, small_run: Path, members: list[int]) -> None:
    words = (*BRIDGE[:4], "--split", "test", "--merge", f"some={','.join(map(str, members))}")
    rows = table_rows(make(cli, small_run, "t.csv", *words))
    alpha = np.exp(prediction(small_run, "laplace.bridge", "test").log_concentration.astype(np.float64))
    union = alpha[:, members].sum(axis=1)
    for name, level in (("some_low", 0.025), ("some_high", 0.975)):
        expected = stats.beta(union, alpha.sum(axis=1) - union).ppf(level)
        np.testing.assert_allclose([float(row[name]) for row in rows], expected, rtol=1e-6, atol=1e-12)


def test_a_table_says_what_its_intervals_hold(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--integrator", "mc", "--samples", 20, "--name", "few")
    path = small_run.with_name("few.csv")
    done = cli("predict", small_run, *words, "--table", path, "--json")
    assert {row["level"] for row in table_rows(path)} == {format(19 / 21, ".9g")}
    output = done.json["outputs"][0]
    assert (output["draws"], output["interval_level"]) == (20, pytest.approx(19 / 21))
    again = cli("predict", small_run, *words)
    assert "draws: few 20" in again.stderr
    assert "few: too few draws for 95% intervals; using 90% intervals" in again.stderr


def test_blocks_do_not_change_a_table(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*BRIDGE, "--top-k", "best", "--merge", "ab=0,1", "--split", "test", "--split", "far")
    whole = [make(cli, small_run, name, *words).read_bytes() for name in ("a.csv", "a.npz")]
    monkeypatch.setattr(predict_table, "BLOCK_PROBABILITIES", 21)
    assert [make(cli, small_run, name, *words).read_bytes() for name in ("b.csv", "b.npz")] == whole


def test_the_ranked_classes_are_the_most_probable_ones(cli: Cli, small_run: Path) -> None:
    rows = table_rows(make(cli, small_run, "t.csv", *BRIDGE[:4], "--split", "test", "--top-k", "best"))
    content = prediction(small_run, "laplace.bridge", "test")
    assert content.header.meta["top_k"] == {"rule": "best", "threshold": 0.05, "cap": 10}
    assert len(set(content.top_k.tolist())) > 1
    for row, probs, length in zip(rows, content.probs, content.top_k, strict=True):
        order = sorted(range(3), key=lambda k: -probs[k])[:length]
        assert row["top_k"] == ";".join(content.classes[k] for k in order)


def test_texts_are_quoted_so_that_they_come_back(tmp_path: Path) -> None:
    names = ['plain', 'with, comma', 'with "quotes"', "two\nlines", "a;b"]  # fmt: skip
    numbers = np.arange(5)
    columns = {"sample_id": numbers, "predicted": numbers, "probability": numbers / 8, "entropy": np.full(5, np.nan)}
    block = TableBlock(("test", "laplace", "mc"), {**columns, "top_k": np.array([[0, 4]] * 5)})
    write_table(tmp_path / "t.csv", [block], names)
    rows = table_rows(tmp_path / "t.csv")
    assert [row["predicted"] for row in rows] == names
    assert (rows[0]["top_k"], rows[1]["entropy"], rows[1]["probability"]) == ("plain;a\\;b", "", "0.125")


def test_a_name_is_no_formula_of_a_spreadsheet_unless_asked_for_and_score_reads_it_back(
    cli: Cli, tmp_path: Path
) -> None:
    names = ["=1+1", "-1", "@b", "'=c", "plain"]
    numbers = np.arange(5)
    columns = {"sample_id": numbers, "predicted": numbers, "probability": np.full(5, 0.8), "label": numbers}
    columns["probabilities"] = np.full((5, 5), 0.05) + 0.75 * np.eye(5)
    columns["name"] = np.array([b"-a.png", b"b.png", b"+c", b"", b"\xc3\xa9"])
    write_table(tmp_path / "t.csv", [TableBlock(("test", "laplace", "mc"), columns)], names)
    rows = table_rows(tmp_path / "t.csv")
    assert [row["label"] for row in rows] == ["'=1+1", "-1", "'@b", "''=c", "plain"]
    assert [row["name"] for row in rows] == ["'-a.png", "b.png", "'+c", "", "é"]
    assert [as_it_was(row["label"]) for row in rows] == names
    done = cli("score", tmp_path / "t.csv", "--metric", "accuracy", "--bootstrap", 0, "--json")
    assert done.json["rows"][0]["metrics"][0]["value"] == 1, done.stderr
    write_table(tmp_path / "raw.csv", [TableBlock(("test", "laplace", "mc"), columns, is_raw=True)], names)
    assert [row["label"] for row in table_rows(tmp_path / "raw.csv")] == names


def test_classes_are_merged_by_name_before_index() -> None:
    merges = parse_merges(["pets=cat,dog", "odd=9,3"], CLASSES)
    assert [(merge.name, merge.members) for merge in merges] == [("pets", (0, 1)), ("odd", (2, 3))]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=cow,cat"], "no class 'cow'; classes: cat, dog, 9, car; red"),
        (["a=dgo,cat"], "no class 'dgo'; did you mean 'dog'"),
        (["a=cat,0"], "a class is named twice"),
        (["a=0,1,9,3"], "has probability 1"),
        (["a=0,1", "a=0"], "already has a column 'a'"),
        (["label=0,1"], "already has a column 'label'"),
        (["a=0,4"], "no class '4'"),
    ],
    ids=str,
)
def test_a_union_that_cannot_be_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_merges(texts, CLASSES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--merge", "a=0,1"), "add --table FILE"),
        (("--raw-text",), "--raw-text applies to the table: add --table FILE"),
        (("--table", "t.csv", "--merge", "0,1"), "--merge: expected NAME=CLASS,CLASS"),
        (("--table", "t.csv", "--merge", "a="), "--merge: expected NAME=CLASS,CLASS"),
        (("--table", "t.txt"), "--table: expected a file ending in .csv, .npz"),
        (("--top-k-cap", 3), "add --top-k neighbor or best"),
        (("--top-k", "best", "--top-k-threshold", 1.0), "expected a number between 0 and 1"),
        (("--top-k", "best"), "no Dirichlet; these integrators have one: bridge"),
    ],
    ids=str,
)
def test_options_that_do_not_belong_together_are_refused(
    cli: Cli, small_run: Path, words: tuple[object, ...], message: str
) -> None:
    done = cli("predict", small_run, *words)
    assert done.code == 2
    assert message in done.stderr


def test_a_table_replaces_a_table_but_no_other_file(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "map", "--split", "test")
    for name in ("t.csv", "t.npz"):
        path = make(cli, small_run, name, *words)
        before = path.read_bytes()
        assert make(cli, small_run, name, *words, "--split", "far").read_bytes() != before
        path.write_bytes(b"mine")
        done = cli("predict", small_run, *words, "--table", path, "--json")
        assert (done.code, path.read_bytes()) == (73, b"mine")
        assert "is not a table created by bnncli" in done.json["error"]["message"]
        assert make(cli, small_run, name, *words, "--force").read_bytes() == before
    assert cli("predict", small_run, *words, "--table", small_run.with_name("features.npz")).code == 2


def test_a_dry_run_plans_the_table_and_an_output_is_no_table(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("t.csv")
    words = ("--posterior", "map", "--split", "test", "--table", path)
    done = cli("predict", small_run, *words, "--dry-run", "--json")
    assert (done.json["outputs"][-1]["planned"], path.exists()) == ("compute", False)
    assert cli("predict", small_run, *words, "--out", path).code == 2
