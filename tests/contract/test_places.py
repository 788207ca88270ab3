"""Paths: any name works, and what is read is never written."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.cli.commands import find_command, own_commands
from bnncli.cli.places import place_advice
from bnncli.options.command import CommandLine

NAMES = [
    "a b", "it's", 'say "hi"', "two\nlines", "-dash", "é", os.fsdecode(b"\xff\xfe"), "x" * 250, "$(touch x)", "a;b", "%s",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_file_name_works(cli: Cli, finished_run: Path, tmp_path: Path, name: str) -> None:
    run, npz = tmp_path / name, tmp_path / f"{name[:200]}.npz"
    with np.load(finished_run.with_name("features.npz")) as arrays:
        np.savez(npz, **{key: arrays[key] for key in arrays if key.endswith(("_train", "_test", "_weight", "_bias"))})
    cli("extract-features", run, "--from-npz", npz, "-q").expect(0)
    fit = cli("fit-laplace", run, "--prior-precision", 10, "--json", "--log-file", tmp_path / "log")
    assert fit.json["outputs"][0]["path"].startswith(str(tmp_path))
    cli("predict", run, "--samples", 2).expect(0)
    cli("status", run, "--check").expect(0)
    cli("verify", *run.parent.glob("*.bnn/posteriors/*")).expect(0)
    assert not (tmp_path / "x").exists() or name == "x"


@pytest.mark.parametrize("name", ["mon ‹modele›", "‹seed›"])
def test_names_like_placeholders_are_printed_as_they_are(cli: Cli, small_run: Path, name: str) -> None:
    run = small_run.parent / name / "small"
    run.parent.mkdir()
    shutil.move(small_run.with_name("small.bnn"), run.with_name("small.bnn"))
    words = ("fit-laplace", run, "--prior-precision", 10, "--name", "again")
    (planned,) = cli(*words, "--dry-run", "--json").json["outputs"]
    (path,) = cli(*words).stdout.splitlines()
    (output,) = cli(*words, "--json").json["outputs"]
    assert path == output["path"] == planned["path"]
    assert Path(path).is_file()
    error = cli("fit-temperature", run, "--base", "none", "--json").json["error"]
    assert str(run.with_name("small.bnn") / "posteriors" / "none") in error["message"]
    told = cli("fit-laplace", run, "--prior-precision", 9, "--name", "again")
    assert (told.code, f"{path} already exists" in told.stderr, "add --force" in told.stderr) == (73, True, True)
    Path(path).write_bytes(Path(path).read_bytes()[:99])
    invalid = next(one for one in cli("status", run, "--json").json["artifacts"] if one["path"] == path)
    assert path in invalid["why"]


def test_leading_dash_works_after_two_dashes(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run.parent)
    shutil.move("small.bnn", "-s.bnn")
    cli("status", "--check", "--", "-s").expect(0)
    assert cli("predict", "--posterior", "none", "--json", "--", "-s").json["error"]["hint"] == "bnncli status ./-s"


def test_hints_can_be_pasted_for_any_name(cli: Cli, tmp_path: Path) -> None:
    import shlex

    (tmp_path / "it's a b").touch()
    hint = cli("fit-laplace", tmp_path / "it's a b", "--json").json["error"]["hint"]
    assert shlex.split(hint)[:3] == ["bnncli", "extract-features", str(tmp_path / "it's a b")]


def test_a_linked_checkpoint_has_its_run_beside_the_link(cli: Cli, tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    torch.save(network.state_dict(), tmp_path / "real.pt")
    (tmp_path / "net.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))\n"
    )
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).random((9, 1, 2, 2), np.float32), y=np.arange(9) % 3)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "ckpt.pt"
    link.symlink_to(tmp_path / "real.pt")
    words = ("--model", f"{tmp_path}/net.py:make", "--data", f"train=npz:{tmp_path}/d.npz")
    cli("extract-features", link, *words).expect(0)
    assert (tmp_path / "links" / "ckpt.pt.bnn" / "features" / "train.h5").is_file()
    torch.save({name: value + 1 for name, value in network.state_dict().items()}, tmp_path / "real.pt")
    done = cli("fit-laplace", link, "--prior-precision", 1, "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "wrong_checkpoint")


def test_the_same_weights_saved_again_or_converted_are_the_same_checkpoint(cli: Cli, tmp_path: Path) -> None:
    torch.save({"state_dict": {"module.w": torch.ones(2)}}, tmp_path / "a.pt")
    cli("convert", tmp_path / "a.pt", tmp_path / "b.safetensors").expect(0)
    digests = [cli("inspect", tmp_path / name, "--json").json["weights_digest"] for name in ("a.pt", "b.safetensors")]
    assert digests[0] == digests[1]


def test_convert_never_replaces_a_foreign_file_or_its_input(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "notes.txt").write_text("precious")
    cli("convert", tmp_path / "a.pt", tmp_path / "a.pt", "--force").expect(2)
    cli("convert", tmp_path / "a.pt", tmp_path / "notes.txt", "--force").expect(73)
    assert (tmp_path / "notes.txt").read_text() == "precious"
    cli("convert", tmp_path / "a.pt", tmp_path / "out").expect(0)
    cli("convert", tmp_path / "a.pt", tmp_path / "out").expect(73)
    cli("convert", tmp_path / "a.pt", tmp_path / "out", "--force").expect(0)


OVERWRITTEN = {  # in the folder of a run that was made from train.npz, of which hard.npz is a hard link
    "a table": (
        ("predict", "net", "--data", "n=npz:train.npz:x,y", "--table", "train.npz"),
        "--data n=npz:train.npz:x,y",
    ),
    "what the run was made from": (
        ("report", "net", "--out", "hard.npz"),
        "net.bnn/features/train.h5 was made from it",
    ),
    "another artifact": (("report", "net", "--out", "net.bnn/features/test.h5"), "net.bnn/features/test.h5 of the run"),
    "a figure": (("score", "p.svg", "--plot", "./p.svg"), "FILE p.svg"),
    "labels": (("score", "p.npz", "--labels", "l.csv:y", "--log-file", "l.csv"), "--labels l.csv:y"),
    "a shard": (("inspect", "s.safetensors.index.json", "--log-file", "s-00001-of-00001.safetensors"), "FILE s.safe"),
    "an image": (
        ("train", "n.safetensors", "--data", "train=images:im", "--log-file", "im/a/1.png"),
        "--data train=im",
    ),
    "the configuration": (("status", "net", "--config", "c.toml", "--log-file", "c.toml"), "--config c.toml"),
    "a line of a grid": (("grid", "g.toml", "--log-file", "g.toml"), "FILE g.toml"),
    "a checkpoint": (("convert", "a.pt", "link.pt"), "SOURCE a.pt"),
}


@pytest.mark.parametrize("case", OVERWRITTEN)
def test_output_is_never_an_input(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    words, told = OVERWRITTEN[case]
    monkeypatch.chdir(small_run.parent)
    Path("features.npz").rename("train.npz")
    cli("extract-features", "net", "--from-npz", "train.npz").expect(0)
    Path("hard.npz").hardlink_to("train.npz")
    Path("im/a").mkdir(parents=True)
    for name in ("p.svg", "p.npz", "l.csv", "c.toml", "g.toml", "a.pt", "s-00001-of-00001.safetensors", "im/a/1.png"):
        Path(name).touch()
    Path("link.pt").symlink_to("a.pt")
    Path("s.safetensors.index.json").write_text('{"weight_map": {"w": "s-00001-of-00001.safetensors"}}')
    output = Path(words[-1])
    before = output.read_bytes()
    has_force = "--force" in cli(words[0], "--help").stdout
    cli(*words, *["--force"][: int(has_force)]).expect(
        2, f"{words[-1]} is also an input ({told}", "hint: choose another file"
    )
    assert output.read_bytes() == before


def test_an_output_beside_inputs_is_made_again(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run.parent)
    for _ in range(2):
        for words in (("fit-temperature", "--out", "mine/t.safetensors"), ("predict", "--table", "mine/t.csv")):
            cli(words[0], "small", *words[1:], "--log-file", "small.bnn/log").expect(0)


@pytest.mark.parametrize("is_there", [True, False])
def test_convert_removes_what_a_dead_one_left_even_where_it_refuses(cli: Cli, tmp_path: Path, is_there: bool) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.pt")
    left = tmp_path / f".b.safetensors.{2**22 + 7}.0123abcd.tmp"
    left.write_bytes(b"half")
    if is_there:
        (tmp_path / "b.safetensors").write_bytes(b"")
    words = ("convert", tmp_path / "a.pt", tmp_path / "b.safetensors")
    cli(*words, "--dry-run")
    assert left.exists()
    cli(*words).expect(73 if is_there else 0)
    assert not left.exists()


@pytest.mark.parametrize("is_fresh", [True, False])
def test_leftovers_beside_out_are_removed(cli: Cli, small_run: Path, tmp_path: Path, is_fresh: bool) -> None:
    words = ("fit-laplace", small_run, "--prior-precision", 3, "--out", tmp_path / "else" / "a.safetensors")
    if is_fresh:
        cli(*words).expect(0)
    left = tmp_path / "else" / f".a.safetensors.{2**22 + 7}.0123abcd.tmp"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half")
    assert cli(*words, "--json").json["action"] == ("up_to_date" if is_fresh else "computed")
    assert not left.exists()


def test_convert_runs_the_code_of_a_pickle_only_when_trusted(cli: Cli, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(torch.nn.Linear(2, 3), tmp_path / "whole.pt")
    cli("convert", tmp_path / "whole.pt", tmp_path / "out").expect(77, "--trust-pickle")
    cli("convert", tmp_path / "whole.pt", tmp_path / "out", "--trust-pickle").expect(0)
    arrays = cli("inspect", tmp_path / "out", "--json").json["arrays"]
    assert arrays == {"bias": "float32 (3,)", "weight": "float32 (3, 2)"}


def test_a_read_only_place_is_refused_before_the_work(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this process may not mount a file system")
    try:
        shutil.copytree(small_run.with_name("small.bnn"), mount / "small.bnn")
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        done = cli("fit-laplace", mount / "small", "--name", "x", "--prior-precision", 1, "--json")
        assert (done.code, done.json["error"]["code"]) == (73, "not_writable")
        assert "--run-dir" in done.json["error"]["hint"]
        cli("status", mount / "small", "--check").expect(0)
        out = tmp_path / "out.safetensors"
        cli("fit-laplace", mount / "small", "--out", out, "--prior-precision", 1).expect(0)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_read_only_run_is_fresh(cli: Cli, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.artifacts.atomic.os.access", lambda *words: False)
    for command in ("predict", "evaluate"):
        done = cli(command, small_run, "--json")
        assert (done.code, done.json["action"]) == (0, "up_to_date")
    cli("evaluate", small_run, "--bins", 7).expect(73)
    for words, flag in ((("--name", "x"), "--run-dir"), (("--table", tmp_path / "t.csv"), "--table")):
        done = cli("predict", small_run, "--posterior", "laplace", *words, "--json")
        assert (done.code, done.json["error"]["code"]) == (73, "not_writable")
        assert flag in done.json["error"]["hint"]
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize("part", ["posteriors", ".locks"])
def test_links_in_place_of_run_folders_are_not_followed(cli: Cli, small_run: Path, part: str) -> None:
    inside, outside = small_run.with_name("small.bnn") / part, small_run.with_name("outside")
    inside.rename(outside)
    inside.symlink_to(outside)
    before = sorted(outside.iterdir())
    done = cli("fit-laplace", small_run, "--name", "new", "--json")
    assert (done.code, done.json["error"]["code"]) == (73, "not_writable"), done.stderr
    cli("rm", small_run, "hmc", "--json").expect(73)
    assert sorted(outside.iterdir()) == before


def test_a_linked_run_folder_is_one(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    folder.rename(small_run.with_name("elsewhere"))
    folder.symlink_to(small_run.with_name("elsewhere"))
    cli("fit-laplace", small_run, "--name", "new").expect(0)


LAPLACE = ("--posterior", "laplace")
NOWHERE = [  # a folder that not even root can make files in
    (("predict", *LAPLACE, "--split", "test", "--table", "/proc/t.csv"), "--table"),
    (("predict", *LAPLACE, "--split", "test", "--table", "/proc/deep/t.csv"), "--table"),
    (("predict", *LAPLACE, "--integrator", "mc", "--split", "test", "--out", "/proc/t.h5"), "--out"),
    (("acquire", *LAPLACE, "--pool", "test", "--batch", "3", "--table", "/proc/t.csv"), "--table"),
    (("evaluate", *LAPLACE, "--bootstrap", "20", "--split", "test", "--plot", "/proc/plots"), "--plot"),
    (
        ("export", *LAPLACE, "--integrator", "probit", "--head-only", "--format", "torch", "--out", "/proc/t.st"),
        "--out",
    ),
    (("fit-temperature", "--out", "/proc/t.safetensors"), "--out"),
]


@pytest.mark.parametrize(("words", "flag"), NOWHERE, ids=lambda value: value[0] if isinstance(value, tuple) else value)
def test_the_option_that_named_the_place_is_named(cli: Cli, small_run: Path, words: tuple[str, ...], flag: str) -> None:
    done = cli(words[0], small_run, *words[1:])
    assert done.code in (73, 74), done.stderr
    assert done.stderr.rstrip().endswith(f"hint: choose another place with {flag}")


def line_of(name: str, *words: str) -> tuple[str, str | None]:
    """The advice to a command with these words about `here/x`, and about a place that no word names."""
    command = find_command([name])
    assert command is not None
    line = CommandLine.parse(name, ["ckpt.pt", *words], command.groups)
    return place_advice(command, line, "here/x"), place_advice(command, line, "there/x")


@pytest.mark.parametrize(
    ("words", "of_here"),
    [
        (("predict", "--table", "here/x"), "--table"),
        (("predict", "--table", "x", "--run-dir", "here"), "--run-dir"),
        (("compare", "--plot", "here"), "--plot"),
        (("predict", "--table", "here/.locks/x"), "--run-dir or --out"),
    ],
)
def test_the_place_may_be_a_file_or_a_folder_of_it(words: tuple[str, ...], of_here: str) -> None:
    assert line_of(*words)[0] == f"choose another place with {of_here}"


def test_a_lock_lies_beside_what_is_locked() -> None:
    command = find_command(["predict"])
    line = CommandLine.parse("predict", ["ckpt.pt", "--table", "here/x"], getattr(command, "groups", ()))
    assert place_advice(command, line, "here/.locks/x") == "choose another place with --table"


@pytest.mark.parametrize("command", own_commands(), ids=lambda command: command.name)
def test_no_option_is_named_that_the_command_has_not(cli: Cli, command: object) -> None:
    name = getattr(command, "name", "")
    said = place_advice(find_command(name.split("-", 1) if name == "config-show" else [name]), None, "there/x")
    help_text = cli(*(name.split("-", 1) if name == "config-show" else [name]), "--help").stdout
    assert all(flag in help_text for flag in said.split() if flag.startswith("--"))
