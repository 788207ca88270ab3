"""demo --files-only: the embedded checkpoint and data as files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bnncli.cli.execute import run_command_line
from bnncli.commands.demo import fixture_path


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_files_only_writes_the_embedded_files_and_stops(tmp_path: Path, how: tuple[str, ...]) -> None:
    results, folder = io.StringIO(), tmp_path / "files"
    assert run_command_line(["demo", "--files-only", "--dir", str(folder), "-q", *how], results) == 0
    names = ["lenet5-fmnist.pt", "train.npz", "val.npz", "test.npz", "mnist.npz"]
    assert sorted(one.name for one in folder.iterdir()) == sorted(names)
    assert all((folder / name).read_bytes() == fixture_path(name).read_bytes() for name in names)
    if not how:
        assert results.getvalue().split() == [str(folder / name) for name in names]


def test_files_only_replaces_no_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "train.npz").write_text("mine")
    assert run_command_line(["demo", "--files-only", "--dir", str(tmp_path), "-q"], io.StringIO()) == 73
    assert [one.name for one in tmp_path.iterdir()] == ["train.npz"]
    assert (tmp_path / "train.npz").read_text() == "mine"
