"""Where artifacts lie: beside the checkpoint, under names that can be told in advance."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import MissingInput, UsageError


def folder(path: Path | str, run_dir: str | None = None) -> RunFolder:
    return RunFolder.of(Path(path), run_dir)


@pytest.mark.parametrize("name", ["a.pt", "a b'c.pt", "a\nb", "-x.pt", "é.pt", os.fsdecode(b"\xff.pt"), ".hidden"])
def test_the_run_folder_is_the_full_file_name_with_a_suffix(tmp_path: Path, name: str) -> None:
    assert folder(tmp_path / name).root == tmp_path / (name + ".bnn")


def test_two_formats_of_one_checkpoint_have_two_folders() -> None:
    assert folder("a.pt").root != folder("a.safetensors").root


def test_a_name_too_long_for_the_suffix_gets_a_short_one(tmp_path: Path) -> None:
    root = folder(tmp_path / ("x" * 253)).root
    root.mkdir()
    assert root != folder(tmp_path / ("x" * 252 + "y")).root
    assert root.name.endswith(".bnn")
    assert folder(tmp_path / ("x" * 251)).root.name == "x" * 251 + ".bnn"


def test_a_linked_checkpoint_has_its_folder_beside_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.pt").write_bytes(b"")
    (tmp_path / "link.pt").symlink_to(tmp_path / "real" / "a.pt")
    assert folder(tmp_path / "link.pt").root == tmp_path / "link.pt.bnn"


def test_run_dir_is_the_folder_itself(tmp_path: Path) -> None:
    assert folder("a.pt", str(tmp_path)).features("test") == tmp_path / "features" / "test.h5"


def test_a_folder_or_an_artifact_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="is a folder"):
        folder(tmp_path)
    with pytest.raises(MissingInput, match="is inside a run folder"):
        folder(tmp_path / "a.pt.bnn" / "posteriors" / "map.safetensors")


def test_every_artifact_has_its_own_lock(tmp_path: Path) -> None:
    run = folder(tmp_path / "a.pt")
    targets = [run.posterior("refine"), run.posterior("hmc", suffix=".nc"), run.predictions("refine.mc", "test")]
    targets += [run.predictions("refine.mc", "val"), run.metrics("refine.mc"), run.features("test")]
    assert len({run.lock(target) for target in targets}) == len(targets)
    assert all(run.lock(target).parent == run.root / ".locks" for target in targets)


def test_two_runs_that_write_one_file_share_its_lock(tmp_path: Path) -> None:
    out = tmp_path / "out" / "x.safetensors"
    one, other = (
        folder(tmp_path / "a.pt").lock(out),
        folder(tmp_path / "b.pt").lock(tmp_path / "a" / ".." / "out" / out.name),
    )
    assert one == other


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".x", "x" * 101, "a b"])
def test_names_that_are_not_file_names_are_refused(tmp_path: Path, name: str) -> None:
    run = folder(tmp_path / "a.pt")
    with pytest.raises(UsageError, match="got"):
        run.features(name)


def test_a_missing_posterior_names_those_there_and_the_command(small_run: Path) -> None:
    run = folder(small_run)
    with pytest.raises(MissingInput, match="available: map, laplace, refine, hmc") as caught:
        run.find_posterior("diagonal", flag="--base", maker="bnncli fit-laplace x")
    assert caught.value.hint == "bnncli fit-laplace x"
    with pytest.raises(MissingInput, match="laplaze") as near:
        run.find_posterior("laplaze", flag="--base", maker="bnncli fit-laplace x")
    assert near.value.hint == "did you mean 'laplace'?"
    assert run.find_posterior("hmc", flag="--base", maker="").name == "hmc.nc"
