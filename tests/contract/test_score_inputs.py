"""Predictions that are not what score takes: one line that says what came and what to do, and the right exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli

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
    "several arrays": ({"hmc": PROBS, "human": PROBS}, (), 65, "'hmc' (20, 3), 'human' (20, 3); choose one: FILE:hmc"),
    "several labels": ({"probs": PROBS, "y": LABELS, "label": LABELS}, (), 65, "several columns could be the labels"),
    "no predictions": ({"x": np.zeros((2, 3, 4)), "y": LABELS}, (), 65, "no array (N, C) of probabilities or logits"),
    "draws": ({"probs": np.stack([PROBS, PROBS])}, (), 65, "for draws, save their mean"),
    "no rows": ({"probs": PROBS[:0]}, (), 65, "has no rows"),
    "objects": ({"probs": np.array([{}, 1], dtype=object)}, (), 65, "no array (N, C)"),
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
    "another form": (lambda path: np.savez(path, probs=PROBS), ":colour=a", 2, "expected FILE[:probs=COLUMN,label=COLUMN]"),
    "no known columns": (text("a,b,c", "0.2,0.3,0.5"), "", 65, "no columns of probabilities"),
    "no such column": (text("p_a,p_b", "0.2,0.8"), ":probs=p_a+p_c", 65, "has no column 'p_c'; it has 'p_a', 'p_b'"),
    "no number": (text("p_a,p_b", *["0.2,0.8"] * 3, "0.2,?"), ":probs=p_*", 65, "row 3, column 'p_b': expected a number, got '?'"),
    "a cell of many": (text("p_a,p_b,p_c", *["0.2,0.7,0.1"] * 3, "0.2,?,0.1", "x,0.7,0.1"), "", 65, "row 3, column 'p_b': expected a number, got '?'"),
    "texts by such a name": (text("p_a,p_b,p_name,y", "0.2,0.8,Ann,x"), "", 65, "row 0 has 'x', which is not a class"),
    "a field too few": (text("p_a,p_b", "0.2,0.8", "0.2"), "", 65, "row 1 (line 3) has 1 fields, expected 2"),
    "a label of no class": (text("p_a,p_b,y", "0.2,0.8,c", "0.3,0.7,b"), "", 65, "row 0 has 'c', which is not a class"),
    "a label missing": (text("p_a,p_b,y", "0.2,0.8,a", "0.3,0.7,"), "", 65, "row 1 has no label"),
    "two kinds of columns": (text("p_a,p_b,prob_a,prob_b", "0.2,0.8,0.2,0.8"), "", 65, "several columns could be the predictions"),
    "no header": (text("0.2,0.8", "0.3,0.7"), "", 65, "no columns of probabilities"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_predictions(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    if "parquet" in case:
        pytest.importorskip("pyarrow")
    write, column, code, said = FILES[case]
    monkeypatch.chdir(tmp_path)
    write(Path("p.npz"))
    done = cli("score", f"p.npz{column}", "-q")
    assert (done.code, said in one_line(done.stderr)) == (code, True), done.stderr


def test_an_npz_file_that_lost_its_end_inside_an_array(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, probs=PROBS)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    done = cli("score", path)
    assert (done.code, "truncated or damaged" in one_line(done.stderr)) == (65, True), done.stderr


OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fewer classes": ({"probs": np.full((9, 2), 0.5)}, "--ood", "has 3 classes, but 'q.npz' has 2"),
    "other classes": ({"probs": np.full((9, 3), 1 / 3), "classes": np.array(["cat", "dog", "elk"])}, "--ood", "has other classes than"),
    "classes in a different order": ({"probs": np.full((9, 3), 1 / 3), "classes": np.array(["b", "a", "c"])}, "--ood", "the same classes in a different order"),
    "another reference": ({"probs": np.full((9, 3), 1 / 3)}, "--reference", "has 9 rows, but split 'test' has 20"),
    "a reference of fewer classes": ({"probs": np.full((20, 2), 0.5)}, "--reference", "has 3 classes, but 'q.npz' has 2"),
    "no labels": ({"a": PROBS, "b": LABELS}, "--labels", "no label column; its columns: 'a', 'b'"),
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
    done = cli("score", f"{small_run}.bnn/features/test.h5")
    assert (done.code, "expected predictions, got features" in done.stderr) == (65, True)


def test_a_pickle_in_an_npz_file_is_not_read(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", probs=PROBS, y=np.array([None] * N))
    done = cli("score", tmp_path / "p.npz")
    assert (done.code, "holds Python objects" in one_line(done.stderr)) == (77, True)
