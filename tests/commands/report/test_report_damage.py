"""report on runs that are damaged, or of another checkpoint: what cannot be used is left out and told, and a good page is never lost for an empty one."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from problems.command_line import Cli
from problems.pages import check_names, read_page

pytestmark = pytest.mark.usefixtures("pictures_are_names")
OLD = "<html><head><meta name=generator content=bnncli-page></head>the old report"


def damage(path: Path, how: str) -> None:
    """Cut a file, or change a bit of what it holds, past its header."""
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
        return
    content[-200 if path.suffix == ".safetensors" else len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("posteriors/laplace.safetensors", "cut"),
        *(
            pytest.param(name, how, marks=pytest.mark.nightly)
            for name, how in (
                ("posteriors/laplace.safetensors", "flipped"),
                ("posteriors/hmc.nc", "cut"),
                ("posteriors/hmc.nc", "flipped"),
                ("predictions/laplace.mc/test.h5", "cut"),
                ("predictions/laplace.mc/test.h5", "flipped"),
            )
        ),
    ],
)
def test_damaged_artifact_is_left_out_with_a_hint(cli: Cli, small_run: Path, name: str, how: str) -> None:
    folder = small_run.with_name("small.bnn")
    damage(folder / name, how)
    (warning,) = [line for line in cli("report", small_run).expect(0).stderr.splitlines() if "leaving out" in line]
    assert f"leaving out {name}: " in warning
    page = read_page(folder / "report.html")
    check_names(page)
    (told,) = [one for one in page.one("verdict").all("p") if f"{name} is skipped" in one.text]
    command = told.all("code")[0].text
    assert warning.endswith(f"run: {command}")
    first, _, rest = command.rpartition(" && ")
    if first:
        shutil.move(*shlex.split(first)[1:])
    cli(*shlex.split(rest)[1:]).expect(0)
    assert "leaving out" not in cli("report", small_run).stderr


@pytest.mark.nightly
def test_what_is_left_of_predictions_is_shown(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    damage(folder / "predictions/laplace.mc/test.h5", "flipped")
    cli("report", small_run).expect(0)
    page = read_page(folder / "report.html")
    assert {row["posterior"] for row in page.one("reliability-test").rows()} == {"map", "refine", "hmc"}
    states = {row["artifact"]: row["state"] for row in page.one("artifacts").rows()}
    assert states["predictions/laplace.mc/test.h5"] == "invalid"


def test_a_damaged_posterior_that_was_named_is_an_error(cli: Cli, small_run: Path) -> None:
    damage(small_run.with_name("small.bnn") / "posteriors/laplace.safetensors", "flipped")
    done = cli("report", small_run, "--posterior", "laplace")
    assert (done.code, done.stdout) == (65, "")
    assert "laplace.safetensors: its content does not match its digest" in done.stderr.splitlines()[-2]
    assert done.stderr.splitlines()[-1].startswith("hint: bnncli fit-laplace ")


@pytest.mark.parametrize("split", ["train", "val", "far"])
def test_features_that_are_damaged_end_the_report_and_the_old_one_stays(cli: Cli, small_run: Path, split: str) -> None:
    folder = small_run.with_name("small.bnn")
    (folder / "report.html").write_text(OLD)
    damage(folder / f"features/{split}.h5", "cut")
    done = cli("report", small_run)
    assert (done.code, done.stdout) == (65, "")
    error, hint = done.stderr.splitlines()
    assert f"{split}.h5" in error
    assert hint.startswith(f"hint: bnncli extract-features {small_run} --from-npz")
    assert hint.endswith("--force")
    assert (folder / "report.html").read_text() == OLD


def test_damage_that_leaves_nothing_keeps_the_old_report(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    (folder / "report.html").write_text(OLD)
    for path in [*folder.glob("posteriors/*"), *folder.glob("predictions/*/*")]:
        damage(path, "cut")
    done = cli("report", small_run)
    assert (done.code, done.stdout) == (65, "")
    assert "has nothing left to report on" in done.stderr.splitlines()[-2]
    assert (folder / "report.html").read_text() == OLD


@pytest.fixture
def checkpoint(cli: Cli, tmp_path: Path) -> Path:
    """A checkpoint with features and a report."""
    from bnncli.commands.demo import fixture_path

    path = tmp_path / "net.pt"
    shutil.copy(fixture_path("lenet5-fmnist.pt"), path)
    data = [f"{split}=npz:{fixture_path(f'{split}.npz')}@200" for split in ("train", "val", "test")]
    cli("extract-features", path, "--model", "lenet5", *(w for one in data for w in ("--data", one))).expect(0)
    cli("report", path).expect(0)
    return path


@pytest.mark.parametrize("content", ["other", "cut", "text"])
def test_wrong_or_unreadable_checkpoint_keeps_the_old_report(cli: Cli, checkpoint: Path, content: str) -> None:
    import torch

    page = checkpoint.with_name("net.pt.bnn") / "report.html"
    before = page.read_bytes()
    if content == "other":
        torch.save({name: value + 1 for name, value in torch.load(checkpoint).items()}, checkpoint)
    else:
        checkpoint.write_bytes(checkpoint.read_bytes()[:2000] if content == "cut" else b"no checkpoint")
    done = cli("report", checkpoint)
    assert (done.code, done.stdout) == (65, "")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] in (["error"], ["error", "hint"])
    assert page.read_bytes() == before
    checkpoint.unlink()
    cli("report", checkpoint).expect(66)
    assert page.read_bytes() == before
