"""The next day's data: replaced whatever their size; and features of older data are never used in silence."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from kills import run_killed_at, start
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import leave_note, note_path, request_digest
from bnncli.artifacts.hdf5 import write_hdf5
from bnncli.artifacts.provenance import Source, params_hash
from bnncli.numerics.digests import canonical_json


def features(run: Path, split: str = "new") -> Path:
    return run.with_name(run.name + ".bnn") / "features" / f"{split}.h5"


def batch(folder: Path, *, rows: int = 20, seed: int = 1) -> None:
    """The day's data: another seed is another day."""
    generator = np.random.default_rng(seed)
    np.savez(folder / "batch.npz", x=generator.normal(size=(rows, 3)).astype(np.float32))


def extract(cli: Cli, run: Path, *words: object, spec: str = "batch.npz") -> Any:
    new = f"new=npz:{run.with_name(spec)}"
    return cli("extract-features", run, "--model", "flatten", "--data", new, *words, "--json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a network, fitted and predicted, with a split `new` that is unlabelled."""
    from bnncli.cli.execute import run_command_line

    folder = tmp_path_factory.mktemp("daily")
    run, generator = folder / "daily", np.random.default_rng(0)
    labels = generator.integers(3, size=60)
    rows = (generator.normal(size=(60, 3)) + 2 * np.eye(3)[labels]).astype(np.float32)
    np.savez(folder / "train.npz", x=rows, y=labels)
    batch(folder)
    data = [word for split in ("new=npz:batch", "train=npz:train") for word in ("--data", f"{split}.npz")]
    with contextlib.chdir(folder):
        for words in (
            ["extract-features", run, "--model", "flatten", *data],
            ["fit-laplace", run, "--prior-precision", 1],
            ["predict", run, "--table", folder / "t.csv"],
        ):
            assert run_command_line([str(word) for word in words], io.StringIO()) == 0
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run that a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)  # the recorded command names its data from there
    return tmp_path / "daily"


@pytest.mark.parametrize("rows", [20, 31, 7])
def test_the_next_batch_replaces_the_last_whatever_its_size(cli: Cli, run: Path, rows: int) -> None:
    batch(run.parent, rows=rows, seed=2)
    done = extract(cli, run)
    assert (done.code, done.json["action"]) == (0, "replaced")
    assert "data.new has changed" in done.stderr
    assert cli("predict", run).code == 0
    assert cli("status", run, "--check").code == 0
    assert not note_path(features(run)).exists()


def test_the_rows_asked_for_are_a_parameter(cli: Cli, run: Path) -> None:
    done = extract(cli, run, spec="batch.npz@5")
    assert (done.code, done.json["error"]["code"]) == (73, "exists")
    assert "first_rows: existing=none, requested=5" in done.json["error"]["message"]


@pytest.mark.parametrize("spec", ["batch.npz", "batch.npz@5"])
def test_features_of_a_version_that_counted_rows_as_a_parameter_are_up_to_date(cli: Cli, run: Path, spec: str) -> None:
    assert extract(cli, run, "--force", spec=spec).code == 0
    path = features(run)
    header = read_header(path)
    with h5py.File(path) as file:
        arrays = {name: file[name][()] for name in ("features", "sample_id")}
        texts = {"classes": file["classes"].asstr()[()].tolist(), "preprocess": file["preprocess"].asstr()[()]}
    params = {name: value for name, value in header.provenance["params"].items() if name != "first_rows"}
    params["num_examples"] = len(arrays["features"])
    provenance = {**header.provenance, "params": params, "params_hash": params_hash(params)}
    write_hdf5(path, arrays, texts, kind="features", meta=header.meta, provenance=provenance, may_replace=True)
    assert extract(cli, run, spec=spec).json["action"] == "up_to_date"


def refuse(cli: Cli, run: Path) -> Any:
    """A request for new data with other options, which is refused."""
    batch(run.parent, rows=25, seed=2)
    done = extract(cli, run, "--dtype", "float16")
    assert done.code == 73
    return done


def test_after_a_refusal_of_newer_data_nothing_is_made_of_the_older(cli: Cli, run: Path) -> None:
    table = run.with_name("t.csv")
    before = table.read_bytes()
    refuse(cli, run)
    done = cli("predict", run, "--table", table, "--json")
    assert (done.code, done.json["error"]["code"], table.read_bytes()) == (65, "stale_input", before)
    assert "the last extract-features, for other data, failed (" in done.json["error"]["message"]
    assert "dtype: existing='float32', requested='float16'" in done.json["error"]["message"]
    assert cli("evaluate", run).code == 65
    stale = {one["name"] for one in cli("status", run, "--json").json["artifacts"] if one["state"] == "stale"}
    assert stale == {"features/new.h5", "predictions/laplace.mc/new.h5"}
    assert cli("status", run, "--check").code == 3
    allowed = cli("predict", run, "--table", table, "--allow-stale", "--json")
    assert allowed.code == 0
    assert any("using it anyway" in text for text in allowed.json["warnings"])
    assert cli("predict", run, "--split", "train").code == 0


@pytest.mark.parametrize("way", ["force", "old request", "hint"])
def test_a_refusal_is_settled_by_force_or_by_asking_as_before(cli: Cli, run: Path, way: str) -> None:
    old = run.with_name("batch.npz").read_bytes()
    refuse(cli, run)
    if way == "force":
        assert extract(cli, run, "--dtype", "float16", "--force").code == 0
    elif way == "old request":
        run.with_name("batch.npz").write_bytes(old)
        assert extract(cli, run).json["action"] == "up_to_date"
    else:
        hint = cli("predict", run, "--json").json["error"]["hint"]
        assert cli(*shlex.split(hint)[1:]).code == 0
    assert not note_path(features(run)).exists()
    assert cli("predict", run).code == 0


def test_a_refusal_of_the_same_data_does_not_make_the_features_stale(cli: Cli, run: Path) -> None:
    assert extract(cli, run, "--dtype", "float16").code == 73
    assert cli("predict", run).code == 0
    assert cli("status", run, "--check").code == 0


BAD = {
    "labels": {"x": np.ones((4, 3), np.float32), "y": np.full(4, 0.5)},
    "no such array": {"z": np.ones(3)},
}


@pytest.mark.parametrize("kind", [*BAD, "missing", "garbage"])
def test_data_that_cannot_be_read_change_nothing(cli: Cli, run: Path, kind: str) -> None:
    path = run.with_name("batch.npz")
    if kind in BAD:
        np.savez(path, **BAD[kind])
    elif kind == "garbage":
        path.write_bytes(b"<html>")
    else:
        path.unlink()
    assert extract(cli, run).code in (65, 66)
    assert not note_path(features(run)).exists()
    assert cli("predict", run).code == 0
    assert cli("status", run, "--check").code == 0


def test_newer_data_that_are_refused_while_they_are_worked_on_make_the_features_stale(cli: Cli, run: Path) -> None:
    np.savez(run.with_name("batch.npz"), x=np.full((4, 3), np.nan, np.float32))
    assert extract(cli, run).code == 65
    done = cli("predict", run, "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "stale_input")
    batch(run.parent, rows=9, seed=3)
    assert extract(cli, run).json["action"] == "replaced"
    assert cli("predict", run).code == 0


def test_a_file_name_with_a_typo_changes_nothing(cli: Cli, run: Path) -> None:
    data = ("--data", f"train=npz:{run.with_name('trian.npz')}")
    assert cli("extract-features", run, "--model", "flatten", *data).code == 66
    assert cli("fit-laplace", run, "--prior-precision", 1).code == 0
    table = run.with_name("again.csv")
    assert cli("predict", run, "--posterior", "laplace", "--data", f"again=npz:{run.with_name('batch.npz')}", "--table", table).code == 0  # fmt: skip


def test_a_dry_run_or_a_wrong_option_leaves_no_note(cli: Cli, run: Path) -> None:
    batch(run.parent, rows=25, seed=2)
    assert extract(cli, run, "--dtype", "float16", "--dry-run").code == 73
    assert extract(cli, run, "--hold-out", "val=none:3").code == 2
    assert not note_path(features(run)).exists()


def test_a_split_behind_one_that_fails_is_noted_too(cli: Cli, run: Path) -> None:
    batch(run.parent, rows=25, seed=2)
    train = f"train=npz:{run.with_name('train.npz')}@30"
    assert extract(cli, run, "--data", train).code == 73
    assert note_path(features(run)).exists()
    assert cli("predict", run).code == 65


def test_a_killed_extraction_leaves_the_note(cli: Cli, run: Path) -> None:
    batch(run.parent, rows=25, seed=2)
    words = ["extract-features", run, "--model", "flatten", "--data", f"new=npz:{run.with_name('batch.npz')}"]
    process = start(
        run_killed_at, [str(word) for word in words], "bnncli.commands.extract_features.splits", "write_features"
    )
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    killed = cli("predict", run, "--json")
    assert (killed.code, killed.json["error"]["code"]) == (65, "stale_input")
    assert extract(cli, run).json["action"] == "replaced"
    assert cli("predict", run).code == 0


def test_a_note_about_the_request_that_was_published_says_nothing(cli: Cli, run: Path) -> None:
    header = read_header(features(run))
    digests = {one["role"]: one["content_digest"] for one in header.inputs}
    sources = [Source(role, Path("x"), digest) for role, digest in digests.items()]
    own = request_digest(header.provenance["params"], sources)
    leave_note(features(run), reason="killed", request=own)
    assert cli("predict", run).code == 0
    leave_note(features(run), reason="killed", request=None)
    assert cli("predict", run).code == 65
    note_path(features(run)).write_text("{")
    assert cli("predict", run).code == 65
    note_path(features(run)).write_text(canonical_json([1]))
    assert cli("predict", run).code == 65
    assert extract(cli, run).json["action"] == "up_to_date"
    assert cli("predict", run).code == 0


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_broken_file_of_ready_features_changes_nothing(cli: Cli, small_run: Path, is_readable: bool) -> None:
    path = small_run.with_name("features.npz")
    with np.load(path) as file:
        arrays = dict(file)
    if is_readable:
        np.savez(path, features_test=np.full_like(arrays["features_test"], np.nan))
    else:
        path.write_bytes(b"")
    assert cli("extract-features", small_run, "--from-npz", path).code == 65
    assert cli("predict", small_run).code == 0


def test_the_whole_run_can_still_be_copied(cli: Cli, run: Path, tmp_path: Path) -> None:
    refuse(cli, run)
    shutil.copytree(run.with_name("daily.bnn"), tmp_path / "copy.bnn")
    assert cli("predict", tmp_path / "copy").code == 65
