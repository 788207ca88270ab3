"""Bad arrays, values and files are refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import threading
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli
from problems.long_run import long_but

from bnncli import registry
from bnncli.data import arrays as _arrays

Arrays = dict[str, np.ndarray]


def good_arrays() -> Arrays:
    generator = np.random.default_rng(0)
    arrays = {f"features_{name}": generator.normal(size=(40, 3)).astype(np.float32) for name in ("train", "test")}
    arrays |= {f"labels_{name}": np.arange(40) % 4 for name in ("train", "test")}
    return arrays | {"head_weight": generator.normal(size=(4, 3)), "head_bias": np.zeros(4)}


def extract(cli: Cli, folder: Path, arrays: Arrays, *words: object) -> Any:
    np.savez(folder / "f.npz", **arrays)
    return cli("extract-features", folder / "run", "--from-npz", folder / "f.npz", *words)


def with_(name: str, change: Any) -> Arrays:
    arrays = good_arrays()
    arrays[name] = change(arrays[name].copy())
    return arrays


def put(row: int, value: float) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array[row] = value
        return array

    return change


BAD_ARRAYS = {
    "NaN in features": (with_("features_test", put(7, np.nan)), "row 7"),
    "infinity in features": (with_("features_train", put(3, np.inf)), "row 3"),
    "NaN in the head": (with_("head_weight", put(0, np.nan)), "finite"),
    "negative label": (with_("labels_test", put(5, -1)), "5"),
    "label beyond the classes": (with_("labels_train", put(9, 4)), "9"),
    "labels as fractions": (with_("labels_train", lambda labels: labels + 0.5), "integers"),
    "one-hot labels": (with_("labels_train", lambda labels: np.eye(4)[labels]), "labels_train"),
    "column of labels": (with_("labels_train", lambda labels: labels[:, None]), "labels_train"),
    "fewer labels than rows": (with_("labels_train", lambda labels: labels[:-1]), "39"),
    "empty split": (with_("features_test", lambda features: features[:0]), "test"),
    "head of another width": (with_("head_weight", lambda weight: weight[:, :2]), "head_weight"),
    "bias of another length": (with_("head_bias", lambda bias: bias[:3]), "head_bias"),
    "features as a cube": (with_("features_train", lambda features: features[:, :, None]), "features_train"),
    "features as text": (with_("features_train", lambda features: features.astype(str)), "features_train"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused_and_nothing_is_written(cli: Cli, tmp_path: Path, case: str) -> None:
    arrays, said = BAD_ARRAYS[case]
    done = extract(cli, tmp_path, arrays)
    assert done.code == 65, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))


def test_pickled_objects_in_an_npz_are_not_loaded(cli: Cli, tmp_path: Path) -> None:
    arrays = good_arrays() | {"features_train": np.array([{"a": 1}] * 40, dtype=object)}
    done = extract(cli, tmp_path, arrays)
    assert done.code in (65, 77)
    assert "Traceback" not in done.stderr


def pipeline(cli: Cli, folder: Path, arrays: Arrays, *fit: object) -> Any:
    assert extract(cli, folder, arrays).code == 0
    done = cli("fit-laplace", folder / "run", "--prior-precision", 1, *fit)
    if done.code == 0:
        done = cli("predict", folder / "run")
    return cli("evaluate", folder / "run", "--json") if done.code == 0 else done


def one_example(arrays: Arrays) -> Arrays:
    return {
        name: array[:1] if name.split("_")[0] in ("features", "labels") else array for name, array in arrays.items()
    }


@pytest.mark.parametrize("structure", long_but(registry.names("curvature"), "full", "kron"))
@pytest.mark.parametrize(
    "arrays",
    [
        one_example(good_arrays()),
        with_("labels_train", lambda labels: labels * 0),
        with_("features_train", lambda features: features * 0),
        with_("features_train", lambda features: features * 0 + 1),
        {name: array for name, array in good_arrays().items() if name != "head_bias"},
    ],
    ids=["one example", "one class", "all zero", "constant", "no bias"],
)
def test_degenerate_data_go_through(cli: Cli, tmp_path: Path, arrays: Arrays, structure: str) -> None:
    done = pipeline(cli, tmp_path, arrays, "--structure", structure)
    assert done.code == 0, done.stderr
    for row in done.json["rows"]:
        for metric in row["metrics"]:
            assert metric["value"] is not None or metric["undefined"]


def test_huge_features_are_a_clear_failure_and_never_nan(cli: Cli, tmp_path: Path) -> None:
    done = pipeline(cli, tmp_path, with_("features_train", lambda features: features * np.float32(1e30)))
    assert done.code in (0, 65, 70)
    assert "Traceback" not in done.stderr


def test_scores_without_labels_are_null_with_a_reason(cli: Cli, tmp_path: Path) -> None:
    arrays = good_arrays()
    del arrays["labels_test"]
    rows = pipeline(cli, tmp_path, arrays).json["rows"]
    accuracy = next(metric for metric in rows[0]["metrics"] if metric["name"] == "accuracy")
    assert (accuracy["value"], bool(accuracy["undefined"])) == (None, True)


def test_a_training_split_without_labels_is_refused_by_fits(cli: Cli, tmp_path: Path) -> None:
    arrays = good_arrays()
    del arrays["labels_train"]
    extract(cli, tmp_path, arrays)
    cli("fit-laplace", tmp_path / "run", "--prior-precision", 1).expect(65, "has no labels")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("predict", "--split", "tset"), 66, "have: train, far, test, val"),
        (("predict", "--posterior", "none"), 66, "available: map, laplace, refine, hmc"),
        (("evaluate", "--split", "far2"), 66, "have:"),
        (("evaluate", "--posterior", "none"), 66, "have:"),
        (("refine", "--base", "hmc", "--name", "x"), 65, "expected a gaussian posterior"),
        (("refine", "--base", "none"), 66, "available: map"),
        (("hmc", "--base", "map", "--name", "x"), 65, "no prior precision"),
        (
            ("predict", "--posterior", "refine", "--integrator", "probit", "--name", "x"),
            2,
            "for a flow posterior: importance, mc",
        ),
        (("extract-features", "--model", "lenet5"), 2, "--data"),
        (("extract-features", "--model", "lenet5", "--data", "train=npz:none.npz"), 66, "none.npz"),
        (("extract-features", "--model", "lenet5", "--data", "train"), 2, "SPLIT=SPEC"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_unknown_names_list_choices(cli: Cli, small_run: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = cli(words[0], small_run, *words[1:])
    assert (done.code, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stderr


def permuted_rows(file: h5py.File) -> None:
    file["features"][:] = file["features"][()][::-1]


def other_head(file: h5py.File) -> None:
    file["head/weight"][:] = file["head/weight"][:] + 1


def external_features(file: h5py.File) -> None:
    del file["features"]
    file["features"] = h5py.ExternalLink("/etc/hostname", "x")


def huge_features(file: h5py.File) -> None:
    del file["features"]
    file.create_dataset("features", (10**9, 1000), "f4")


def future_schema(file: h5py.File) -> None:
    file.attrs["bnncli_schema"] = "2.0"


@pytest.mark.parametrize(
    ("attack", "code"),
    [(permuted_rows, 65), (other_head, 65), (external_features, 77), (huge_features, 65), (future_schema, 65)],
)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_tampered_features_are_refused(cli: Cli, small_run: Path, attack: Any, code: int, is_sealed: bool) -> None:
    from bnncli.artifacts.hdf5 import make_seal

    path = small_run.with_name("small.bnn") / "features" / "train.h5"
    with h5py.File(path, "r+") as file:
        attack(file)
    if is_sealed:
        with open(path, "r+b") as stream:
            seal = make_seal(stream, [])
            stream.write(seal)
    for words in (("fit-laplace", small_run, "--name", "x"), ("verify", path), ("inspect", path)):
        done = cli(*words)
        reads_data = words[0] != "inspect" or attack in (external_features, huge_features, future_schema)
        assert done.code == (code if reads_data or not is_sealed else 0), (words, done.stderr)
        assert "Traceback" not in done.stderr


def test_predictions_that_are_no_probabilities_are_refused(cli: Cli, small_run: Path) -> None:
    from bnncli.artifacts.files import read_header
    from bnncli.artifacts.predictions import read_predictions, write_predictions

    path = small_run.with_name("small.bnn") / "predictions" / "map.plug-in" / "test.h5"
    content, header = read_predictions(path), read_header(path)
    content.probs[:] = np.log(content.probs)
    write_predictions(path, content, meta=header.meta, provenance=header.provenance, may_replace=True)
    cli("verify", path).expect(65, "log-probabilities")
    cli("evaluate", small_run, "--force").expect(65)


BAD_CHECKPOINTS = {
    "empty": (b"", 65, "empty"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 65, "git-LFS"),
    "web page": (b"<!DOCTYPE html><html>", 65, "web page"),
    "raw pickle": (b"\x80\x04cposix\nsystem\n.", 77, "posix.system"),
    "text": (b"hello", 65, "neither"),
    "zip": (b"PK\x05\x06" + bytes(18), 65, "zip"),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_what_is_no_checkpoint_is_named(cli: Cli, tmp_path: Path, case: str) -> None:
    content, code, said = BAD_CHECKPOINTS[case]
    path = tmp_path / "ckpt.pt"
    path.write_bytes(content)
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1, 28, 28), np.float32), y=np.zeros(2, np.int64))
    for words in (
        ("inspect", path),
        ("convert", path, tmp_path / "out"),
        ("extract-features", path, "--model", "lenet5", "--data", f"train=npz:{tmp_path}/d.npz"),
    ):
        done = cli(*words)
        assert (done.code, "Traceback" in done.stderr) == (code, False), done.stderr
        assert said in done.stderr


def test_a_checkpoint_that_is_a_folder_a_pipe_or_a_device_is_missing(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/stdin", tmp_path / "none", tmp_path / "none" / ""):
        for words in (("inspect", path), ("fit-laplace", path), ("convert", path, tmp_path / "out")):
            done = cli(*words)
            assert (done.code, "Traceback" in done.stderr) == (66, False), (words, done.stderr)


def test_an_artifact_given_as_the_checkpoint_is_refused(cli: Cli, small_run: Path) -> None:
    cli("refine", small_run.with_name("small.bnn") / "posteriors" / "laplace.safetensors").expect(
        66, "is inside a run folder"
    )


@pytest.mark.parametrize("value", ["1e150", "1e31", "1e-31", "5e-324"])
def test_a_precision_whose_square_leaves_the_numbers_is_refused(cli: Cli, small_run: Path, value: str) -> None:
    for flag in ("--prior-precision", "--bias-precision"):
        done = cli("fit-laplace", small_run, flag, value, "--name", "new").expect(2)
        assert done.stderr == f"error: {flag}: expected a number from 1e-30 to 1e+30; got '{value}'\n"


@pytest.mark.parametrize("value", ["1e30", "1e-30"])
@pytest.mark.parametrize("structure", long_but(["full", "block", "kron", "diag"], "full"))
def test_extreme_precisions_are_fitted(cli: Cli, small_run: Path, value: str, structure: str) -> None:
    cli("fit-laplace", small_run, "--prior-precision", value, "--structure", structure, "-q", "--force").expect(0)


@pytest.mark.parametrize("out", [".", "..", "some/..", "/"])
def test_an_output_without_a_name_is_refused(cli: Cli, small_run: Path, out: str) -> None:
    cli("fit-laplace", small_run, "--out", out).expect(2, f"--out: expected a file; got '{out}'")


def test_more_threads_than_any_machine_has_are_refused(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--threads", 100_000).expect(2, "--threads")


def test_features_without_columns_are_refused_before_anything_is_written(cli: Cli, tmp_path: Path) -> None:
    arrays = {name: part[:, :0] if part.ndim == 2 else part for name, part in make_arrays().items()}
    np.savez(tmp_path / "f.npz", **arrays)
    cli("extract-features", tmp_path / "run", "--from-npz", tmp_path / "f.npz").expect(
        65, "expected (N, D) with N > 0 and D > 0"
    )
    assert not (tmp_path / "run.bnn").exists()


@pytest.mark.parametrize("header", [b"'''((((", b"{((((((", b"{'descr': ("])
def test_a_damaged_header_in_an_npz_file_is_called_damaged(cli: Cli, tmp_path: Path, header: bytes) -> None:
    np.savez(tmp_path / "good.npz", **make_arrays())
    with zipfile.ZipFile(tmp_path / "good.npz") as good, zipfile.ZipFile(tmp_path / "f.npz", "w") as bad:
        for name in good.namelist():
            content = bytearray(good.read(name))
            if name == "features_train.npy":
                place = content.index(b"{")
                content[place : place + len(header)] = header
            bad.writestr(name, io.BytesIO(content).getvalue())
    cli("extract-features", tmp_path / "run", "--from-npz", tmp_path / "f.npz").expect(
        65, "array 'features_train' is truncated or damaged"
    )


def test_a_configuration_without_end_is_refused_and_a_pipe_is_read(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    cli("fit-laplace", small_run, "--config", "/dev/zero").expect(78, "expected a TOML file of at most")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("[fit-laplace]\nprior-precision = 3\n",))
    writer.start()
    done = cli("fit-laplace", small_run, "--config", pipe, "--name", "piped", "--json")
    writer.join()
    assert done.json["metrics"]["prior_precision"] == 3


N = 20
PROBS = np.random.default_rng(0).dirichlet(np.ones(3), size=N)
LABELS = PROBS.argmax(axis=1)
LOG = np.log(PROBS)


def with_value(value: float) -> np.ndarray:
    found = PROBS.copy()
    found[4, 1] = value
    return found


def text(header: str, *rows: str) -> Callable[[Path], object]:
    return lambda path: path.write_text("\n".join([header, *rows]) + "\n")


def cut(path: Path, keep: float, **arrays: np.ndarray) -> None:
    np.savez(path, **arrays)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


ARRAYS: dict[str, tuple[dict[str, Any], tuple[str, ...], int, str]] = {
    "rows off one": ({"probs": PROBS * 0.9}, (), 65, "expected rows that sum to 1 within 1e-4, got a row that is off by 0.1"),
    "rows off one, unnamed": ({"a": PROBS * 0.9}, (), 65, "rows of per-class sigmoid outputs"),
    "negative": ({"probs": with_value(-0.2)}, (), 65, "got -0.2 to"),
    "NaN": ({"probs": with_value(np.nan)}, (), 65, "row 4 has NaN or infinity"),
    "NaN, said": ({"probs": with_value(np.nan)}, ("--probabilities",), 65, "expected finite values"),
    "NaN among logits": ({"logits": with_value(np.inf)}, ("--logits",), 65, "row 4 has NaN or infinity"),
    "log-probabilities as probabilities": ({"probs": LOG}, (), 65, "got log-probabilities down to"),
    "log-probabilities, unnamed": ({"a": LOG}, (), 65, "expected probabilities or logits; got log-probabilities; add --logits"),
    "log of zero": ({"probs": np.where(np.eye(3)[LABELS] == 1, 0, -np.inf)}, (), 65, "add --logits"),
    "logits as probabilities": ({"probs": LOG + 3}, (), 65, "if they are logits"),
    "percentages": ({"probs": PROBS * 100}, (), 65, "divide by 100"),
    "neither": ({"a": PROBS * 7}, (), 65, "cannot tell whether these are probabilities or logits"),
    "called logits": ({"logits": PROBS}, (), 65, "is named as logits, but its rows are probabilities; add --probabilities or"),
    "label out of range": ({"probs": PROBS, "y": np.where(LABELS == 2, 7, LABELS)}, (), 65, "has label 7; expected 0 to 2"),
    "counted from 1": ({"probs": PROBS, "y": LABELS + 1}, (), 65, "subtract 1: classes count from 0"),
    "negative label": ({"probs": PROBS, "y": LABELS - 1}, (), 65, "has -1"),
    "float labels": ({"probs": PROBS, "y": LABELS.astype(float)}, (), 65, "got float64; save labels.astype('int64')"),
    "one-hot labels": ({"probs": PROBS, "y": np.eye(3)[LABELS]}, (), 65, "(one-hot?); save labels.argmax(1)"),
    "soft labels": ({"probs": PROBS, "y": PROBS}, (), 65, "probabilities (soft labels)"),
    "fewer labels": ({"probs": PROBS, "y": LABELS[:-1]}, (), 65, "has 19 labels"),
    "names of no known classes": ({"probs": PROBS, "y": np.array(["cat"] * N)}, (), 65, "labels are names, such as 'cat'"),
    "several arrays": ({"hmc": PROBS, "human": PROBS}, (), 65, "several arrays could be the predictions: 'hmc', 'human'; choose one: FILE:probs=hmc"),
    "several labels": ({"probs": PROBS, "y": LABELS, "label": LABELS}, (), 65, "several arrays could be the labels"),
    "no predictions": ({"x": np.zeros((2, 3, 4)), "y": LABELS}, (), 65, "no arrays of probabilities or logits"),
    "draws": ({"probs": np.stack([PROBS, PROBS])}, (), 65, "for draws, save their mean"),
    "no rows": ({"probs": PROBS[:0]}, (), 65, "has no rows"),
    "objects": ({"probs": np.array([{}, 1], dtype=object)}, (), 65, "no arrays of probabilities"),
    "both": ({"probs": PROBS}, ("--logits", "--probabilities"), 2, "mutually exclusive"),
    "a task of other columns": ({"probs": PROBS}, ("--task", "binary"), 65, "--task binary needs one or two columns; got 3"),
    "a task of other labels": ({"probs": PROBS, "y": LABELS}, ("--task", "multilabel"), 65, "zeros and ones of shape (N, L)"),
    "no such group": ({"probs": PROBS}, ("--groups", "site"), 65, "has no array 'site'; it has 'probs'; name one of these, or a column of another file: FILE:COLUMN"),
    "undefined by name": ({"probs": PROBS}, ("--metric", "nll"), 65, "--metric nll is undefined on split 'test': no labels"),
    "itself outside": ({"probs": PROBS}, ("--ood", "out=p.npz"), 65, "has the same predictions"),
    "no such file outside": ({"probs": PROBS}, ("--ood", "out=q.npz"), 66, "no file 'q.npz'"),
    "no intervals": ({"probs": PROBS}, ("--bootstrap", "0", "--intervals"), 2, "--bootstrap 0 computes no intervals"),
}  # fmt: skip


def one_line(stderr: str) -> str:
    """What was said, the hint behind it."""
    lines = stderr.strip().splitlines()
    assert len(lines) <= 2, stderr
    assert "Traceback" not in stderr
    assert lines[0].startswith("error: ")
    return "; ".join(line.removeprefix("error: ").removeprefix("hint: ") for line in lines)


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_are_no_predictions(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    arrays, words, code, said = ARRAYS[case]
    monkeypatch.chdir(tmp_path)
    np.savez("p.npz", **arrays)
    done = cli("score", "p.npz", "-q", *words)
    assert (done.code, said in one_line(done.stderr)) == (code, True), done.stderr


FILES: dict[str, tuple[Callable[[Path], object], str, int, str]] = {
    "nothing": (lambda path: None, "", 66, "no file"),
    "empty": (lambda path: path.write_bytes(b""), "", 65, "is empty"),
    "half an npz": (lambda path: cut(path, 0.5, probs=PROBS), "", 65, "is not an npz file"),
    "half a parquet file": (lambda path: path.write_bytes(b"PAR1" + bytes(50)), "", 65, "is not a complete parquet file"),
    "half a prediction file": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90)), "", 65, "truncated, or not an HDF5 file"),
    "half an npy": (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr"), "", 65, "is truncated or damaged"),
    "something else": (lambda path: path.write_bytes(bytes(range(64))), "", 65, "has an unknown format; expected npz, npy, csv, Parquet"),
    "a folder": (lambda path: path.mkdir(), "", 66, "is a folder"),
    "no such array": (lambda path: np.savez(path, probs=PROBS, y=LABELS, n=np.array(["a"])), ":hmc", 65, "has no array 'hmc'; it has 'probs', 'y', 'n'"),
    "another form": (lambda path: np.savez(path, probs=PROBS), ":colour=a", 2, "expected FILE[:probs=COLUMN,label=COLUMN,group=COLUMN]"),
    "no known columns": (text("a,b,c", "0.2,0.3,0.5"), "", 65, "no columns of probabilities"),
    "no such column": (text("p_a,p_b", "0.2,0.8"), ":probs=p_a+p_c", 65, "has no column 'p_c'; it has 'p_a', 'p_b'"),
    "no number": (text("p_a,p_b", *["0.2,0.8"] * 3, "0.2,?"), ":probs=p_*", 65, "row 3, column 'p_b': expected a number, got '?'"),
    "a cell of many": (text("p_a,p_b,p_c", *["0.2,0.7,0.1"] * 3, "0.2,?,0.1", "x,0.7,0.1"), "", 65, "row 3, column 'p_b': expected a number, got '?'"),
    "texts by such a name": (text("p_a,p_b,p_name,y", "0.2,0.8,Ann,x"), "", 65, "row 0 has 'x', which is not a class"),
    "a field too few": (text("p_a,p_b", "0.2,0.8", "0.2"), "", 65, "row 1 (line 3) has 1 field, expected 2"),
    "a label of no class": (text("p_a,p_b,y", "0.2,0.8,c", "0.3,0.7,b"), "", 65, "row 0 has 'c', which is not a class"),
    "a label missing": (text("p_a,p_b,y", "0.2,0.8,a", "0.3,0.7,"), "", 65, "row 1 has no label"),
    "two kinds of columns": (text("p_a,p_b,prob_a,prob_b", "0.2,0.8,0.2,0.8"), "", 65, "several columns could be the predictions"),
    "no header": (text("0.2,0.8", "0.3,0.7"), "", 65, "no columns of probabilities"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_predictions(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    write, column, code, said = FILES[case]
    monkeypatch.chdir(tmp_path)
    write(Path("p.npz"))
    done = cli("score", f"p.npz{column}", "-q")
    assert (done.code, said in one_line(done.stderr)) == (code, True), done.stderr


OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fewer classes": ({"probs": np.full((9, 2), 0.5)}, "--ood", "has 3 classes, but 'q.npz' has 2"),
    "other classes": ({"probs": np.full((9, 3), 1 / 3), "classes": np.array(["cat", "dog", "elk"])}, "--ood", "has other classes than"),
    "classes in a different order": ({"probs": np.full((9, 3), 1 / 3), "classes": np.array(["b", "a", "c"])}, "--ood", "the same classes in a different order"),
    "another reference": ({"probs": np.full((9, 3), 1 / 3)}, "--reference", "has 9 rows, but split 'test' has 20"),
    "a reference of fewer classes": ({"probs": np.full((20, 2), 0.5)}, "--reference", "has 3 classes, but 'q.npz' has 2"),
    "no labels": ({"a": PROBS, "b": LABELS}, "--labels", "no label array; its arrays: 'a', 'b'"),
    "labels of other rows": ({"y": LABELS[:5]}, "--labels", "has 5 labels, but 'p.npz' has 20 predictions"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_files_that_do_not_go_together(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    arrays, option, said = OTHERS[case]
    monkeypatch.chdir(tmp_path)
    np.savez("p.npz", probs=PROBS, classes=np.array(["a", "b", "c"]))
    np.savez("q.npz", **arrays)
    done = cli("score", "p.npz", "-q", option, "q.npz")
    assert (done.code, said in one_line(done.stderr)) == (65, True), done.stderr


def test_features_are_no_predictions(cli: Cli, small_run: Path) -> None:
    cli("score", f"{small_run}.bnn/features/test.h5").expect(65, "expected predictions, got features")


def test_a_pickle_in_an_npz_file_is_not_read(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", probs=PROBS, y=np.array([None] * N))
    done = cli("score", tmp_path / "p.npz")
    assert (done.code, "holds Python objects" in one_line(done.stderr)) == (77, True)


ZEROS = 1 << 25  # of which gzip makes 33 kB
MOST = 1 << 22  # that refusing may take


def idx(*shape: int, code: int = 8) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, code, len(shape), *shape)


def zipped(header: bytes, size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    block = bytes(1 << 20)
    return packer.compress(header) + b"".join(packer.compress(block) for _ in range(size >> 20)) + packer.flush()


def npy(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def npz(path: Path, content: bytes, compression: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", content)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def extract_file(cli: Cli, folder: Path, spec: str) -> Any:
    words = ("extract-features", folder / "run", "--model", "flatten", "--data", f"train={spec}", "--json")
    tracemalloc.start()
    done = cli(*words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "Traceback" not in done.stderr
    assert not (folder / "run.bnn").exists()
    assert peak < 4 * MOST
    return done


IDX = {
    "expands beyond its header": (idx(10, 28, 28), ZEROS, "there are more"),
    "a size that its bytes cannot hold": (idx(60_000, 28, 28), 0, "compressed"),
    "sizes whose product is absurd": (idx(*[(1 << 32) - 1] * 8), ZEROS, "compressed"),
    "axes without end": (idx(*[1] * 200), 0, "its header has 200 axes"),
}


@pytest.mark.parametrize("case", IDX)
def test_a_gzipped_idx_file_is_read_no_further_than_its_header_says(cli: Cli, tmp_path: Path, case: str) -> None:
    header, size, said = IDX[case]
    (tmp_path / "a.gz").write_bytes(zipped(header, size))
    done = extract_file(cli, tmp_path, f"idx:{tmp_path}/a.gz")
    assert (done.code, said in done.json["error"]["message"]) == (65, True), done.stderr


def test_an_idx_file_without_gzip_is_judged_by_its_size(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(idx(1 << 31, 4) + bytes(100))
    done = extract_file(cli, tmp_path, f"idx:{tmp_path}/a")
    assert (done.code, "there are 100" in done.json["error"]["message"]) == (65, True)


NPZ = {
    "a shape beyond the bytes": (npy((1 << 40, 4)) + bytes(64), "does not match"),
    "negative sizes": (npy((-4, -4)) + bytes(64), "damaged"),
    "a type of absurd width": (npy((2, 2), "<U99999999") + bytes(64), "does not match"),
    "a header without end": (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(64), "damaged"),
    "more axes than an array has": (npy((1,) * 200) + bytes(4), "damaged"),
}


@pytest.mark.parametrize("case", NPZ)
def test_an_npz_file_with_an_absurd_header_is_refused(cli: Cli, tmp_path: Path, case: str) -> None:
    content, said = NPZ[case]
    npz(tmp_path / "a.npz", content)
    done = extract_file(cli, tmp_path, f"npz:{tmp_path}/a.npz")
    assert (done.code, said in done.json["error"]["message"]) == (65, True), done.stderr


@pytest.mark.parametrize("form", ["npz", "idx"])
def test_array_beyond_memory_is_69(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(_arrays, "available_memory", lambda device: 1 << 20)
    if form == "npz":
        npz(tmp_path / "a", npy((1 << 20, 4)) + bytes(1 << 24))
    else:
        (tmp_path / "a").write_bytes(zipped(idx(1 << 24, 1), 1 << 24))
    done = extract_file(cli, tmp_path, f"{form}:{tmp_path}/a")
    assert (done.code, done.json["error"]["code"]) == (69, "out_of_memory")
    assert "1 MiB of memory are free" in done.json["error"]["message"]


@pytest.mark.parametrize("size", [(60_000, 60_000), (1 << 31, 1), (0, 0)])
def test_image_of_absurd_size_is_refused(cli: Cli, tmp_path: Path, size: tuple[int, int]) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png(*size))
    done = extract_file(cli, tmp_path, f"images:{tmp_path}/images")
    assert (done.code, "cannot decode 'a.png'" in done.json["error"]["message"]) == (65, True), done.stderr


HEADERS = {
    "a length beyond the file": struct.pack("<Q", 1 << 60) + b"{}",
    "nothing but a length": struct.pack("<Q", 90_000_000) + b"{" + bytes(100),
    "an absurd shape": json.dumps(
        {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}
    ).encode(),
    "a negative size": json.dumps({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode(),
    "offsets backwards": json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}).encode(),
    "an offset beyond every number": json.dumps(
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**400]}}
    ).encode(),
    "no offsets": json.dumps({"x": {"dtype": "F32", "shape": [1]}}).encode(),
    "an unknown type": json.dumps({"x": {"dtype": "F999", "shape": [1], "data_offsets": [0, 4]}}).encode(),
    "lists in lists": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_safetensors_file_with_an_absurd_header_is_refused(cli: Cli, tmp_path: Path, case: str) -> None:
    header = HEADERS[case]
    if header.startswith(b"{"):
        header = struct.pack("<Q", len(header)) + header
    (tmp_path / "a.pt").write_bytes(header + bytes(4))
    for command in ("inspect", "verify"):
        assert len(cli(command, tmp_path / "a.pt", "--json").expect(65).stderr) < 1000


def test_a_tensor_that_one_number_stands_for_is_no_checkpoint(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(10**12)}, tmp_path / "a.pt")
    done = cli("inspect", tmp_path / "a.pt", "--json")
    assert (done.code, "claim" in done.json["error"]["message"]) == (65, True), done.stderr
    torch.save({"w": torch.zeros(1).expand(10**5), "v": torch.ones(10**5)}, tmp_path / "a.pt")
    cli("inspect", tmp_path / "a.pt").expect(0)


def test_gzip_that_is_cut_off_or_has_a_wrong_checksum_is_refused(cli: Cli, tmp_path: Path) -> None:
    whole = gzip.compress(idx(10, 10) + bytes(range(100)))
    for content in (whole[:-12], whole[:-6] + bytes(6)):
        (tmp_path / "a.gz").write_bytes(content)
        assert extract_file(cli, tmp_path, f"idx:{tmp_path}/a.gz").code == 65


def test_an_npz_file_that_lost_its_end_inside_an_array(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, probs=PROBS)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    done = cli("score", path)
    assert (done.code, "truncated or damaged" in one_line(done.stderr)) == (65, True), done.stderr
