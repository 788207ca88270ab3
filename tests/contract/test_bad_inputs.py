"""Hostile and bad inputs at the command line: the right code, a clear message, no traceback, nothing written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from problems.command_line import Cli
from problems.long_run import long_but

from bnncli import registry

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


def test_good_arrays_are_taken(cli: Cli, tmp_path: Path) -> None:
    assert extract(cli, tmp_path, good_arrays()).code == 0


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
    done = cli("fit-laplace", tmp_path / "run", "--prior-precision", 1)
    assert (done.code, "has no labels" in done.stderr) == (65, True)


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
def test_unknown_and_unfit_names_list_what_there_is(
    cli: Cli, small_run: Path, words: tuple[str, ...], code: int, said: str
) -> None:
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
def test_features_that_were_tampered_with_are_refused(
    cli: Cli, small_run: Path, attack: Any, code: int, is_sealed: bool
) -> None:
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
    done = cli("verify", path)
    assert (done.code, "log-probabilities" in done.stderr) == (65, True)
    assert cli("evaluate", small_run, "--force").code == 65


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
    done = cli("refine", small_run.with_name("small.bnn") / "posteriors" / "laplace.safetensors")
    assert (done.code, "is inside a run folder" in done.stderr) == (66, True)
