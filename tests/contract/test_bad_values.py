"""Values and files that ended in tracebacks: each is one clear line with the right code, and nothing is written."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from problems.arrays import make_arrays
from problems.command_line import Cli
from problems.long_run import long_but


@pytest.mark.parametrize("value", ["1e150", "1e31", "1e-31", "5e-324"])
def test_a_precision_whose_square_leaves_the_numbers_is_refused(cli: Cli, small_run: Path, value: str) -> None:
    for flag in ("--prior-precision", "--bias-precision"):
        done = cli("fit-laplace", small_run, flag, value, "--name", "new")
        assert done.code == 2
        assert done.stderr == f"error: {flag}: expected a number from 1e-30 to 1e+30; got '{value}'\n"


@pytest.mark.parametrize("value", ["1e30", "1e-30"])
@pytest.mark.parametrize("structure", long_but(["full", "block", "kron", "diag"], "full"))
def test_the_largest_and_the_smallest_precision_are_fitted(
    cli: Cli, small_run: Path, value: str, structure: str
) -> None:
    assert (
        cli("fit-laplace", small_run, "--prior-precision", value, "--structure", structure, "-q", "--force").code == 0
    )


@pytest.mark.parametrize("out", [".", "..", "some/..", "/"])
def test_an_output_without_a_name_is_refused(cli: Cli, small_run: Path, out: str) -> None:
    done = cli("fit-laplace", small_run, "--out", out)
    assert done.code == 2
    assert f"--out: expected a file; got '{out}'" in done.stderr


def test_more_threads_than_any_machine_has_are_refused(cli: Cli, small_run: Path) -> None:
    done = cli("fit-laplace", small_run, "--threads", 100_000)
    assert done.code == 2
    assert "--threads" in done.stderr


def test_features_without_columns_are_refused_before_anything_is_written(cli: Cli, tmp_path: Path) -> None:
    arrays = {name: part[:, :0] if part.ndim == 2 else part for name, part in make_arrays().items()}
    np.savez(tmp_path / "f.npz", **arrays)
    done = cli("extract-features", tmp_path / "run", "--from-npz", tmp_path / "f.npz")
    assert done.code == 65
    assert "expected (N, D) with N > 0 and D > 0" in done.stderr
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
    done = cli("extract-features", tmp_path / "run", "--from-npz", tmp_path / "f.npz")
    assert done.code == 65
    assert "array 'features_train' is truncated or damaged" in done.stderr


def test_a_configuration_without_end_is_refused_and_a_pipe_is_read(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    done = cli("fit-laplace", small_run, "--config", "/dev/zero")
    assert done.code == 78
    assert "expected a TOML file of at most" in done.stderr
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("[fit-laplace]\nprior-precision = 3\n",))
    writer.start()
    done = cli("fit-laplace", small_run, "--config", pipe, "--name", "piped", "--json")
    writer.join()
    assert done.json["metrics"]["prior_precision"] == 3
