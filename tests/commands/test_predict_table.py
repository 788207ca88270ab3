"""Tables of predictions, of splits and of new data; names of rows; features that are kept; arrivals."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from kills import run_to_files, start
from PIL import Image
from problems.command_line import SCRIPT, Cli, Invocation, new_run
from problems.image_runs import draw, make_run, rows
from problems.outputs import table_rows
from scipy import stats

from bnncli.artifacts import hdf5
from bnncli.artifacts.features import encode_names, read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.outputs import TableBlock, is_table, unescape_formula, write_table
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.predict import table as predict_table
from bnncli.commands.predict.new_data import Arrivals, continue_table
from bnncli.commands.predict.table import parse_merges
from bnncli.data.splits import load_split
from bnncli.errors import DataError, OutputExists, UsageError

BRIDGE = ("--posterior", "laplace", "--integrator", "bridge", "--integrator", "mc")
CLASSES = ["cat", "dog", "9", "car; red"]


def make(cli: Cli, run: Path, name: str, *words: object) -> Path:
    path = run.with_name(name)
    assert cli("predict", run, *words, "--table", path, "--json").expect(0).json["outputs"][-1]["path"] == str(path)
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
        scores = {name: getattr(content, name) for name in ("entropy", "energy", "max_logit", "combined")}
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


def test_names_are_no_formulas_and_are_read_back(cli: Cli, tmp_path: Path) -> None:
    names = ["=1+1", "-1", "@b", "'=c", "plain"]
    numbers = np.arange(5)
    columns = {"sample_id": numbers, "predicted": numbers, "probability": np.full(5, 0.8), "label": numbers}
    columns["probabilities"] = np.full((5, 5), 0.05) + 0.75 * np.eye(5)
    columns["name"] = np.array([b"-a.png", b"b.png", b"+c", b"", b"\xc3\xa9"])
    write_table(tmp_path / "t.csv", [TableBlock(("test", "laplace", "mc"), columns)], names)
    rows = table_rows(tmp_path / "t.csv")
    assert [row["label"] for row in rows] == ["'=1+1", "-1", "'@b", "''=c", "plain"]
    assert [row["name"] for row in rows] == ["'-a.png", "b.png", "'+c", "", "é"]
    assert [unescape_formula(row["label"]) for row in rows] == names
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
def test_conflicting_options_are_refused(cli: Cli, small_run: Path, words: tuple[object, ...], message: str) -> None:
    cli("predict", small_run, *words).expect(2, message)


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
    cli("predict", small_run, *words, "--table", small_run.with_name("features.npz")).expect(2)


def test_a_dry_run_plans_the_table_and_an_output_is_no_table(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("t.csv")
    words = ("--posterior", "map", "--split", "test", "--table", path)
    done = cli("predict", small_run, *words, "--dry-run", "--json")
    assert (done.json["outputs"][-1]["planned"], path.exists()) == ("compute", False)
    cli("predict", small_run, *words, "--out", path).expect(2)


NEW = Path("net.pt.bnn/features/new.h5")
DATA = ("--data", "new=npz:test.npz")
KEPT = ("--table", "kept.csv", "--keep-features")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, request: pytest.FixtureRequest) -> Path:
    """A run of a network on images of 4 x 4, in the working folder."""
    monkeypatch.chdir(tmp_path)
    make_run(cli, *getattr(request, "param", ()))
    return tmp_path


def predict(cli: Cli, *words: object, code: int = 0) -> Invocation:
    return cli("predict", "net.pt", "--posterior", "laplace", "--samples", 20, *words).expect(code)


def kept(name: str) -> list[str]:
    """Rows of a table, in one order."""
    return sorted(str(row) for row in rows(name))


HALVES = ("--dtype", "float16", "--mean", "0.5")


@pytest.mark.parametrize("folder", [(), HALVES], indirect=True, ids=["float32", "float16"])
def test_kept_features_give_the_same_table(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.commands.predict.new_data.BLOCK", 256)  # and so another one of 300
    predict(cli, *DATA, "--table", "streamed.csv")
    done = predict(cli, *DATA, *KEPT, "--json").json
    assert [output["role"] for output in done["outputs"]] == ["features.new", "table"]
    predict(cli, "--split", "new", "--table", "split.csv")
    assert kept("kept.csv") == kept("streamed.csv") == kept("split.csv")


@pytest.mark.parametrize("folder", [(), HALVES], indirect=True, ids=["float32", "float16"])
def test_the_split_is_the_one_that_extract_features_writes(folder: Path, cli: Cli) -> None:
    predict(cli, *DATA, *KEPT)
    by_predict = read_header(NEW)
    options = HALVES if by_predict.provenance["params"]["mean"] else ()
    extract = ("extract-features", "net.pt", "--model", "mlp", *options, *DATA)
    assert cli(*extract, "--json").json["action"] == "up_to_date"
    NEW.unlink()
    cli(*extract).expect(0)
    by_extract = read_header(NEW)
    assert by_predict.content_digest == by_extract.content_digest
    for name in ("params", "params_hash", "checkpoint", "inputs", "source"):
        assert by_predict.provenance.get(name) == by_extract.provenance.get(name), name
    assert sorted(by_predict.provenance["command"]) == sorted(by_extract.provenance["command"])


def test_features_that_are_there_are_not_made_again(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    predict(cli, *DATA, *KEPT)
    before = NEW.read_bytes()
    monkeypatch.setattr("bnncli.session.network.Network.features", None)
    assert f"{NEW}: up to date" in predict(cli, *DATA, *KEPT).stderr
    assert NEW.read_bytes() == before


def test_data_of_other_classes_are_kept_without_their_labels(folder: Path, cli: Cli) -> None:
    np.savez("odd.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 3]))
    refused = predict(cli, "--data", "new=npz:odd.npz", *KEPT, code=65)
    assert "pass data with other classes as --ood" in refused.stderr
    assert not NEW.exists()
    predict(cli, "--ood", "new=npz:odd.npz", "--table", "streamed.csv")
    predict(cli, "--ood", "new=npz:odd.npz", *KEPT)
    assert {row["label"] for row in rows("kept.csv")} == {""}
    assert kept("kept.csv") == kept("streamed.csv")
    assert read_header(NEW).meta["is_ood"]


def test_a_split_of_other_data_is_never_replaced(folder: Path, cli: Cli) -> None:
    before = Path("net.pt.bnn/features/train.h5").read_bytes()
    for more in ((), ("--force",), ("--dry-run",)):
        done = predict(cli, "--data", "train=npz:test.npz", *KEPT, *more, code=73)
        assert "the run already has a split 'train' with other data" in done.stderr
        assert "give the new data another name" in done.stderr
    assert Path("net.pt.bnn/features/train.h5").read_bytes() == before
    assert not Path("kept.csv").exists()
    assert not list(Path("net.pt.bnn/features").glob(".*newer-request*"))


def test_a_dry_run_says_what_is_kept_and_keeps_nothing(folder: Path, cli: Cli) -> None:
    done = predict(cli, *DATA, *KEPT, "--dry-run")
    assert f"compute: {NEW}" in done.stdout
    assert "write: kept.csv (300 of new)" in done.stdout
    assert not NEW.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep-features",), "--keep-features applies to new data: add --data SPLIT=SPEC"),
        (("--data", "new=-", *KEPT), "cannot read stdin again"),
        (("--follow", "in", *KEPT), "use extract-features --data SPLIT=images:in"),
        (
            ("--ood", "new=npz:test.npz", "--follow", "in", "--table", "t.csv"),
            "--ood and --follow are mutually exclusive",
        ),
        (("--ood", "new=py:code.py:make", *KEPT), "--ood: 'py:code.py:make' is code"),
        (("--ood", "new=npz:test.npz", *DATA, *KEPT), "--ood: two splits have the same name"),
    ],
)
def test_what_cannot_be_a_split_is_refused(folder: Path, cli: Cli, words: tuple[str, ...], message: str) -> None:
    assert message in " ".join(predict(cli, *words, code=2).stderr.split())
    assert not NEW.exists()


def test_image_files_keep_their_names_and_code_is_run_where_it_is_trusted(folder: Path, cli: Cli) -> None:
    Path("net.py").write_text(
        "from bnncli.models.architectures.mlp import build\ndef make():\n    return build(inputs=16, hidden=(6,), classes=3)\n"
    )
    shutil.copy("net.pt", "own.pt")
    named = ("--model", "net.py:make", "--data", "train=npz:train.npz")
    cli("extract-features", "own.pt", *named).expect(0)
    for seed in range(3):
        draw(Path("seen") / f"{seed}.png", seed)
    asked = ("predict", "own.pt", "--posterior", "map", "--data", "new=images:seen", *KEPT)
    cli(*asked).expect(77, "--trust-code")
    cli(*asked, "--trust-code").expect(0)
    cli("predict", "own.pt", "--posterior", "map", "--split", "new", "--table", "split.csv").expect(0)
    assert kept("split.csv") == kept("kept.csv")
    assert [row["name"] for row in rows("kept.csv")] == ["0.png", "1.png", "2.png"]


@pytest.mark.parametrize("task", ["multiclass", "binary", "multilabel"])
def test_raw_inputs_and_labels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, task: str) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, count in (("train", 40), ("new", 9)):
        x = random.normal(size=(count, 3)).astype(np.float32)
        np.savez(f"{name}.npz", x=x, y=(x > 0).astype(np.uint8) if task == "multilabel" else (x[:, 0] > 0).astype(int))
    raw = ("extract-features", "raw", "--model", "flatten", "--task", task)
    cli(*raw, "--data", "train=npz:train.npz").expect(0)
    cli("fit-laplace", "raw", "--prior-precision", 1).expect(0)
    one = ("predict", "raw", "--posterior", "laplace", "--samples", 20)
    cli(*one, "--data", "new=npz:new.npz", *KEPT).expect(0)
    cli(*one, "--split", "new", "--table", "split.csv").expect(0)
    assert kept("kept.csv") == kept("split.csv")
    assert cli(*raw, "--data", "new=npz:new.npz", "--json").json["action"] == "up_to_date"


Arrays = dict[str, np.ndarray]
ODD = ['a, "b".png', "ü 猫.png", "two\nlines.png", os.fsdecode(b"not-utf8-\xff.png"), "=1+1;.png"]


def draw_images(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(names):
        pixels = np.full((3, 3), (40 * place + len(folder.name)) % 256, np.uint8)
        Image.fromarray(pixels).save(folder / name, format="png")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a network on images: class folders for train, a flat folder with odd names for new."""
    from bnncli.cli.execute import run_command_line

    tmp_path = tmp_path_factory.mktemp("names")
    for name in ("cat", "dog; big", "owl"):
        draw_images(tmp_path / "train" / name, [f"{number}.png" for number in range(4)])
    draw_images(tmp_path / "new", ODD)
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).random((6, 9), dtype=np.float32))
    specs = {"train": f"images:{tmp_path}/train", "new": f"images:{tmp_path}/new", "rows": f"npz:{tmp_path}/rows.npz"}
    words = [word for split, spec in specs.items() for word in ("--data", f"{split}={spec}")]
    run = str(tmp_path / "run")
    first = ["extract-features", run, "--model", "flatten", *words, "--hold-out", "val=train:3"]
    for argv in (first, ["fit-laplace", run, "--prior-precision", "1"]):
        assert run_command_line(argv, io.StringIO()) == 0
    return tmp_path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def test_the_names_of_image_files_stand_in_the_table(cli: Cli, run: Path) -> None:
    cli("predict", run, "--table", run.with_name("t.csv"), "--split", "new", "--split", "val").expect(0)
    rows = table_rows(run.with_name("t.csv"))
    new = [row["name"] for row in rows if row["split"] == "new"]
    names = [name.encode("utf-8", "backslashreplace").decode() for name in sorted(ODD)]
    assert new == [f"'{name}" if name[0] in "=+-@" else name for name in names]  # no formulas
    files = sorted(str(path.relative_to(run.with_name("train"))) for path in run.with_name("train").rglob("*.png"))
    val = [row for row in rows if row["split"] == "val"]
    assert len(val) == 3
    assert [row["name"] for row in val] == [files[int(row["sample_id"])] for row in val]
    assert {row["name"].split("/")[0] for row in val} == {row["label"] for row in val}
    assert is_table(run.with_name("t.csv"))


def test_a_split_without_names_has_empty_ones_beside_others_and_no_column_alone(cli: Cli, run: Path) -> None:
    cli("predict", run, "--table", run.with_name("t.csv")).expect(0)
    assert {row["name"] for row in table_rows(run.with_name("t.csv")) if row["split"] == "rows"} == {""}
    cli("predict", run, "--table", run.with_name("t.csv"), "--split", "rows").expect(0)
    assert "name" not in table_rows(run.with_name("t.csv"))[0]


def test_every_class_has_its_probability_in_both_kinds_of_table(cli: Cli, run: Path) -> None:
    words = ("predict", run, "--probabilities", "--merge", "some=cat,owl", "--raw-text", "--table")
    assert cli(*words, run.with_name("t.csv")).code == cli(*words, run.with_name("t.npz")).code == 0
    rows = table_rows(run.with_name("t.csv"))
    texts = np.array([[row[f"p_{name}"] for name in ("cat", "dog; big", "owl")] for row in rows], dtype=np.float32)
    with np.load(run.with_name("t.npz"), allow_pickle=False) as file:
        table = dict(file)
    assert np.array_equal(table["probabilities"], texts)
    assert table["name"].tolist() == [row["name"] for row in rows]
    stored = [read_predictions(run.with_name("run.bnn") / f"predictions/laplace.mc/{split}.h5").probs
              for split in dict.fromkeys(row["split"] for row in rows)]  # fmt: skip
    assert np.array_equal(texts, np.concatenate(stored))
    np.testing.assert_allclose([float(row["some"]) for row in rows], texts[:, 0] + texts[:, 2], rtol=1e-6)


def test_probabilities_need_a_table_and_their_columns_are_taken(cli: Cli, run: Path) -> None:
    assert "add --table FILE" in cli("predict", run, "--probabilities").stderr
    words = ("predict", run, "--table", run.with_name("t.csv"), "--merge", "p_cat=owl,cat")
    assert "already has a column 'p_cat'" in cli(*words, "--probabilities").stderr
    cli(*words).expect(0)


@pytest.mark.parametrize("limit", [hdf5.IN_MEMORY_LIMIT, 0])
def test_names_are_texts_and_are_sealed(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(hdf5, "IN_MEMORY_LIMIT", limit)
    words = ("extract-features", run, "--model", "flatten", "--data", f"new=images:{run.with_name('new')}", "--force")
    cli(*words).expect(0)
    path = run.with_name("run.bnn") / "features" / "new.h5"
    with h5py.File(path) as file:
        assert h5py.check_string_dtype(file["sample_name"].dtype).encoding == "utf-8"
        stored = file["sample_name"].asstr()[()].tolist()
        offset = file["sample_name"].id.get_offset()
    split = read_features(path, is_full_check=True)
    assert split.names is not None
    assert [name.decode() for name in split.names.tolist()] == stored
    assert encode_names(sorted(ODD)).tolist() == split.names.tolist()  # type: ignore[union-attr]
    cli("verify", path).expect(0)
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    cli("verify", path).expect(65)


def test_the_order_digest_of_images_is_what_it_was(tmp_path: Path) -> None:
    draw_images(tmp_path / "images", ["b.png", "a.png"])
    assert load_split(f"images:{tmp_path}/images").names == ["a.png", "b.png"]
    expected = "bnn-sha256/1:fb2bdd588a7f465bedeba3c38c5d9e26dd38a14eafa6b00b444869b897dfa9e2"  # before names were kept
    assert load_split(f"images:{tmp_path}/images").content_digest() == expected


def test_names_of_ready_features_travel_too(cli: Cli, arrays: Arrays, tmp_path: Path) -> None:
    names = np.array([f"row {number}" for number in range(120)])
    run = new_run(cli, tmp_path / "run", {**arrays, "names_test": names}, "--hold-out", "more=test:7")
    cli("predict", run, "--table", tmp_path / "t.csv", "--split", "more", "--split", "test").expect(0)
    rows = table_rows(tmp_path / "t.csv")
    assert [row["name"] for row in rows] == [f"row {row['sample_id']}" for row in rows]
    np.savez(tmp_path / "b.npz", **arrays, names_test=np.arange(120))
    cli("extract-features", tmp_path / "other", "--from-npz", tmp_path / "b.npz").expect(
        65, "expected strings of shape (120,)"
    )


def test_a_dataset_of_yours_may_name_its_examples(tmp_path: Path) -> None:
    code = (
        "import torch\nclass Rows:\n    names = ['x', 'y']\n    def __len__(self):\n        return {count}\n"
        "    def __getitem__(self, i):\n        return torch.ones(3)\n"
    )
    (tmp_path / "two_rows.py").write_text(code.format(count=2))
    assert load_split(f"py:{tmp_path}/two_rows.py:Rows").names == ["x", "y"]
    (tmp_path / "three_rows.py").write_text(code.format(count=3))
    with pytest.raises(DataError, match="has 2 names, but there are 3 examples"):
        load_split(f"py:{tmp_path}/three_rows.py:Rows")


@pytest.fixture
def folder_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """A run of a network on images of 4 x 4, in the working folder."""
    monkeypatch.chdir(tmp_path)
    make_run(cli)
    return tmp_path


def predict_new(cli: Cli, *words: object, code: int = 0) -> Invocation:
    return cli("predict", "net.pt", "--posterior", "laplace", *words).expect(code)


def test_one_command_gives_what_two_give(folder_new: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.commands.predict.new_data.BLOCK", 256)  # and so another split of 300
    integrators = (
        "--integrator",
        "mc",
        "--integrator",
        "probit",
        "--samples",
        30,
        "--probabilities",
        "--merge",
        "ab=0,1",
    )
    predict_new(cli, *integrators, "--split", "test", "--table", "two.csv")
    before = sorted(Path("net.pt.bnn").rglob("*"))
    done = predict_new(cli, *integrators, "--data", "test=npz:test.npz", "--table", "one.csv", "--json").json
    key = lambda row: (row["variant"], int(row["sample_id"]))  # noqa: E731
    assert sorted(rows("one.csv"), key=key) == sorted(rows("two.csv"), key=key)
    assert (done["metrics"]["examples"], len(rows("one.csv"))) == (300, 600)
    assert sorted(Path("net.pt.bnn").rglob("*")) == before


def test_a_posterior_over_all_layers_predicts_new_data_as_a_split(folder_new: Path, cli: Cli) -> None:
    laplace = (
        "fit-laplace",
        "net.pt",
        "--layers",
        "all",
        "--structure",
        "diag",
        "--prior-precision",
        5,
        "--name",
        "whole",
    )
    cli(*laplace).expect(0)
    asked = ("predict", "net.pt", "--posterior", "whole", "--samples", 20)
    cli(*asked, "--split", "test", "--table", "two.npz").expect(0)
    cli(*asked, "--data", "test=npz:test.npz", "--table", "one.npz").expect(0)
    with np.load("one.npz") as one, np.load("two.npz") as two:
        assert np.allclose(one["entropy"], two["entropy"], atol=1e-6)
        assert np.array_equal(one["label"], two["label"])


def test_files_named_on_stdin_are_named_in_table(folder_new: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ['b, "1".png', "a.png"]
    for seed, name in enumerate(names):
        draw(Path("seen") / name, seed)
    words = ("--data", "new=-", "--table", "t.csv")
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"seen/{name}\n" for name in names)))
    predict_new(cli, *words)
    assert [row["name"] for row in rows("t.csv")] == [f"seen/{name}" for name in names]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "stdin" in predict_new(cli, *words, "--force", code=2).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "new=npz:test.npz"), "--data writes a table: add --table FILE"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--split", "test"), "--split names a split of the run"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--follow", "d"), "mutually exclusive"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--keep-samples"), "--keep-samples is for splits"),
        (("--data", "new=npz:test.npz", "--table", "t.csv", "--name", "n"), "--name and --out"),
        (("--follow", ".", "--table", "t.npz"), "appends to a .csv table"),
        (("--idle", "3", "--table", "t.csv"), "add --follow DIR"),
        (("--data", "new=py:code.py:make", "--table", "t.csv"), "add --trust-code"),
        (("--data", "a=npz:test.npz", "--data", "a=npz:test.npz", "--table", "t.csv"), "two splits have the same name"),
    ],
)
def test_what_does_not_go_together_is_refused(folder_new: Path, cli: Cli, words: tuple[str, ...], message: str) -> None:
    done = predict_new(cli, *words, code=2)
    assert message in done.stderr
    assert not Path("t.csv").exists()


def test_a_label_that_is_no_class_and_a_missing_file_are_refused(folder_new: Path, cli: Cli) -> None:
    np.savez("odd.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 3]))
    assert (
        "the head has classes 0 to 2" in predict_new(cli, "--data", "a=npz:odd.npz", "--table", "t.csv", code=65).stderr
    )
    predict_new(cli, "--data", "a=npz:absent.npz", "--table", "t.csv", code=66)
    assert not Path("t.csv").exists()


@pytest.mark.parametrize("keep", [(), ("--keep-features",)], ids=["streamed", "kept"])
def test_hints_for_new_data_name_no_other_option(folder_new: Path, cli: Cli, keep: tuple[str, ...]) -> None:
    np.savez("wide.npz", x=np.zeros((2, 9, 9), np.uint8))
    np.savez("nan.npz", x=np.full((2, 4, 4), np.nan, np.float32))
    for name in ("wide", "nan"):
        done = predict_new(cli, "--data", f"a=npz:{name}.npz", "--table", "t.csv", *keep, code=65)
        assert "hint: new data use the run's network, preprocessing and task" in done.stderr, name
    os.mkdir("seen")
    done = predict_new(cli, "--data", "a=seen", "--table", "t.csv", *keep, code=2)
    assert "hint: did you mean images:seen?" in done.stderr


def follow(cli: Cli, *words: object, code: int = 0) -> Invocation:
    return predict_new(cli, "--follow", "in", "--table", "t.csv", "--idle", 0, *words, code=code)


def test_each_arrival_has_one_row_and_a_later_start_goes_on(folder_new: Path, cli: Cli) -> None:
    for number in range(3):
        draw(Path("in") / f"{number}.png", number)
    (Path("in") / "broken.png").write_bytes(b"no image")
    (Path("in") / ".hidden.png").write_bytes(b"half")
    first = follow(cli, "--json").json
    assert (first["metrics"]["new"], first["metrics"]["unreadable"]) == (3, 1)
    assert "skipping 'broken.png': cannot decode 'broken.png' in in: unknown image format" in first["warnings"]
    kept = Path("t.csv").read_bytes()
    draw(Path("in") / "3.png", 3)
    draw(Path("in") / "broken.png", 4)
    assert follow(cli, "--json").json["metrics"] == {"examples": 5, "new": 2, "unreadable": 0}
    assert Path("t.csv").read_bytes().startswith(kept)
    assert sorted(row["name"] for row in rows("t.csv")) == ["0.png", "1.png", "2.png", "3.png", "broken.png"]
    assert predict_new(cli, "--data", "followed=images:in", "--table", "u.csv").code == 0
    by_name = {row["name"]: row for row in rows("u.csv")}
    for row in rows("t.csv"):
        assert float(row["probability"]) == pytest.approx(float(by_name[row["name"]]["probability"]), abs=1e-6)


def test_names_of_any_bytes_folders_and_loops_of_links_do_not_stop_it(folder_new: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    os.rename(b"in/0.png", b"in/caf\xe9.png")
    (Path("in") / "folder.png").mkdir()
    (Path("in") / "loop.png").symlink_to("loop.png")
    assert follow(cli, "--json").json["metrics"] == {"examples": 1, "new": 1, "unreadable": 0}
    assert follow(cli, "--json").json["metrics"]["new"] == 0
    assert [row["name"] for row in rows("t.csv")] == [r"caf\udce9.png"]


@pytest.mark.parametrize(("words", "name"), [((), "'=1.png"), (("--raw-text",), "=1.png")])
def test_formula_as_file_name(folder_new: Path, cli: Cli, words: tuple[str, ...], name: str) -> None:
    draw(Path("in") / "=1.png", 0)
    assert follow(cli, *words, "--json").json["metrics"]["new"] == 1
    assert follow(cli, *words, "--json").json["metrics"]["new"] == 0
    assert [row["name"] for row in rows("t.csv")] == [name]


@pytest.mark.parametrize("cut", [1, 2, 5, 40])
def test_half_a_row_is_cut_off_and_its_file_done_again(folder_new: Path, cli: Cli, cut: int) -> None:
    for number in range(4):
        draw(Path("in") / f"a, {number}.png", number)
    follow(cli)
    whole = Path("t.csv").read_bytes()
    before = rows("t.csv")
    Path("t.csv").write_bytes(whole[:-cut])
    follow(cli)
    kept = whole[: whole.rindex(b"\r\n", 0, -2)]
    assert Path("t.csv").read_bytes().startswith(kept)
    again = rows("t.csv")
    assert [(row["sample_id"], row["name"], row["predicted"]) for row in again] == [
        (row["sample_id"], row["name"], row["predicted"]) for row in before
    ]
    assert float(again[-1]["entropy"]) == pytest.approx(float(before[-1]["entropy"]), rel=1e-5)  # alone in a product


def test_of_a_file_with_rows_by_one_posterior_of_two_both_are_written(folder_new: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    draw(Path("in") / "1.png", 1)
    two = ("--posterior", "map")
    follow(cli, *two)
    whole = Path("t.csv").read_bytes()
    assert len(rows("t.csv")) == 4
    lines = whole.splitlines(keepends=True)
    Path("t.csv").write_bytes(b"".join(lines[:-1]))
    follow(cli, *two)
    assert len(rows("t.csv")) == 4
    assert len({(row["name"], row["posterior"]) for row in rows("t.csv")}) == 4


def test_a_table_of_others_is_not_continued(folder_new: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    Path("t.csv").write_text("a,b\r\n1,2\r\n")
    assert "not a table of bnncli" in follow(cli, code=73).stderr
    follow(cli, "--force")
    before = Path("t.csv").read_bytes()
    assert "differ from those this command writes" in follow(cli, "--probabilities", code=73).stderr
    assert "has rows of laplace (mc)" in follow(cli, "--integrator", "probit", code=73).stderr
    assert Path("t.csv").read_bytes() == before
    with pytest.raises(OutputExists):
        continue_table(Path("in"), b"", set(), force=False, is_raw=False)


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    arrivals, path = Arrivals(tmp_path), tmp_path / "a.png"
    path.write_bytes(b"h")
    assert (arrivals.ready(set()), arrivals.num_waiting) == ([], 1)
    path.write_bytes(b"half")
    assert (arrivals.ready(set()), arrivals.num_waiting) == ([], 1)
    assert (arrivals.ready(set()), arrivals.num_waiting) == (["a.png"], 0)
    path.write_bytes(b"other")
    os.utime(path, (1, 1))
    assert arrivals.ready(set()) == ["a.png"]  # left alone for long
    assert arrivals.ready({"a.png"}) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_kills_at_any_time_lose_no_file_and_do_none_twice(folder_new: Path, name: str) -> None:
    random = np.random.default_rng(0)
    command = [SCRIPT, "predict", "net.pt", "--posterior", "laplace", "--follow", "in", "--table", "t.csv"]
    draw(Path("in") / "first.png", 0)
    count = 0
    for _ in range(6):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        end = time.monotonic() + float(random.uniform(1.5, 4))
        while time.monotonic() < end:
            draw(Path("in") / f"{count}.png", count)
            count += 1
            time.sleep(0.02)
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=30)
        assert name == "SIGKILL" or (process.returncode == 143 and b"Traceback" not in said), said
    done = subprocess.run([*command, "--idle", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(row["name"] for row in rows("t.csv")) == sorted(["first.png", *(f"{n}.png" for n in range(count))])


def test_two_commands_do_not_follow_into_one_table(folder_new: Path, cli: Cli) -> None:
    draw(Path("in") / "0.png", 0)
    argv = ["predict", "net.pt", "--posterior", "laplace", "--follow", "in", "--table", "t.csv"]
    first = start(run_to_files, argv, folder_new)
    try:
        end = time.monotonic() + 60
        while not (Path("t.csv").exists() and len(rows("t.csv")) == 1):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert "another bnncli process is following into this table" in follow(cli, code=75).stderr
    finally:
        first.terminate()
        first.join(timeout=30)


@pytest.mark.parametrize("is_link", [False, True])
def test_replaced_table_is_left(folder_new: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, is_link: bool) -> None:
    from bnncli.commands.predict.new_data import NewData

    draw(Path("in") / "0.png", 0)
    Path("other").write_text("of somebody else")
    blocks = NewData.blocks

    def replaced(self: NewData, *words: Any, **options: Any) -> Any:
        Path("t.csv").unlink()
        (os.symlink if is_link else os.link)("other", "t.csv")
        return blocks(self, *words, **options)

    monkeypatch.setattr(NewData, "blocks", replaced)
    assert "t.csv was replaced while bnncli wrote to it" in follow(cli, code=74).stderr
    assert Path("other").read_text() == "of somebody else"


def test_a_full_disk_leaves_whole_rows_and_says_so(folder_new: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(Path("in") / "0.png", 0)
    follow(cli)
    before, write = Path("t.csv").read_bytes(), os.write
    draw(Path("in") / "1.png", 1)
    calls = []

    def full(descriptor: int, text: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(folder_new / "t.csv"):
            return write(descriptor, text)
        calls.append(len(text))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, text[:10])

    monkeypatch.setattr("os.write", full)
    done = follow(cli, code=74)
    assert "No space left" in done.stderr
    assert Path("t.csv").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.chdir(folder_new)
    follow(cli)
    assert [row["name"] for row in rows("t.csv")] == ["0.png", "1.png"]


@pytest.mark.parametrize("score", ["entropy", "combined"])
def test_rules_of_calibrate_decide_on_new_data_as_on_a_split(folder_new: Path, cli: Cli, score: str) -> None:
    asked = (
        "extract-features",
        "net.pt",
        "--model",
        "mlp",
        "--data",
        "calib=npz:test.npz@200",
        "--data",
        "new=npz:labelled.npz",
        "--data",
        "val=npz:labelled.npz",
    )
    cli(*asked).expect(0)
    predict_new(cli, "--split", "calib")
    rules = ("--sets", "aps", "--risk", 0.9, "--false-alarm", 0.1, "--score", score, "--shift-level", 0.05)
    done = cli("calibrate", "net.pt", "--split", "calib", "--posterior", "laplace", *rules)
    assert done.code in (0, 3), done.stderr
    two = predict_new(cli, "--split", "new", "--table", "two.csv", "--json").json
    one = predict_new(cli, "--data", "new=npz:labelled.npz", "--table", "one.csv", "--json").json
    assert {"set", "set_size", "accept", "ood"} <= {*rows("one.csv")[0]}
    assert rows("one.csv") == rows("two.csv")
    alarm = next(row for row in two["decisions"] if row["kind"] == "shift")
    assert one["decisions"] == [{**alarm}]
    draw(Path("in") / "0.png", 0)
    follow(cli)
    draw(Path("in") / "1.png", 1)
    follow(cli)
    assert [row["ood"] in ("0", "1") for row in rows("t.csv")] == [True, True]
    predict_new(cli, "--data", "new=npz:labelled.npz", "--table", "none.csv", "--decide", "none")
    assert "ood" not in rows("none.csv")[0]
    done = predict_new(cli, "--data", "new=npz:labelled.npz", "--table", "x.csv", "--decide", "absent", code=66)
    assert "laplace.mc has no rule 'absent' (have: ood, risk, sets, shift)" in done.stderr
    assert "hint: bnncli calibrate net.pt --posterior laplace --integrator mc --sets lac" in done.stderr


def test_intervals_of_few_draws_are_announced_for_new_data_and_for_a_folder(folder_new: Path, cli: Cli) -> None:
    few = ("--integrator", "mc", "--samples", 8)
    said = "laplace.mc: too few draws for 95% intervals; using 78% intervals; use more --samples"
    assert said in predict_new(cli, *few, "--data", "new=npz:test.npz", "--table", "few.csv").stderr
    assert {row["level"] for row in rows("few.csv")} == {"0.777777778"}
    Path("in").mkdir()
    draw(Path("in") / "1.png", 1)
    assert said in predict_new(cli, *few, "--follow", "in", "--idle", 0, "--table", "followed.csv").stderr
    many = predict_new(cli, "--integrator", "mc", "--samples", 39, "--data", "new=npz:test.npz", "--table", "many.csv")
    assert "too few draws" not in many.stderr


def test_wide_tables_are_written_some_rows_at_a_time(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("predict", run, "--probabilities", "--table")
    cli(*words, run.with_name("a.csv")).expect(0)
    monkeypatch.setattr("bnncli.artifacts.outputs._CELLS", 40)
    cli(*words, run.with_name("b.csv")).expect(0)
    assert run.with_name("a.csv").read_bytes() == run.with_name("b.csv").read_bytes()
