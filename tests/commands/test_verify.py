"""verify, and records of checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_posterior, write_posterior
from bnncli.models import checkpoints as load


@pytest.mark.parametrize("hidden", [(), ("--hidden", "4")], ids=["head", "hidden"])
def test_latent_and_sparse_posteriors_are_valid(cli: Cli, small_run: Path, hidden: tuple[str, ...]) -> None:
    cli("fit-lbbnn", small_run, *hidden, "--epochs", 1, "-q").expect(0)
    cli("prune", small_run, "-q").expect(0)
    done = cli("verify", small_run.with_name("small.bnn"), "--json")
    assert [entry["problem"] for entry in done.json["files"] if not entry["is_valid"]] == []
    assert {"lbbnn", "lbbnn-sparse"} <= {Path(entry["path"]).stem for entry in done.json["files"]}


@pytest.mark.parametrize("wrong", ["offset", "missing", "text"])
def test_a_layout_that_does_not_fit_the_tensors_is_bad(cli: Cli, small_run: Path, wrong: str) -> None:
    cli("fit-lbbnn", small_run, "--epochs", 1, "-q").expect(0)
    path = small_run.with_name("small.bnn") / "posteriors" / "lbbnn.safetensors"
    tensors, header = read_posterior(path)
    stated = header.meta["param_layout"]
    stated = {"offset": [{**stated[0], "offset": 1}, stated[1]], "missing": stated[:1], "text": "?"}[wrong]
    write_posterior(
        path, tensors, meta={**header.meta, "param_layout": stated}, provenance=header.provenance, may_replace=True
    )
    done = cli("verify", path).expect(65)
    said = "'param_layout' is invalid" if wrong == "text" else "its tensors do not match its layout"
    assert said in done.stderr


def test_the_checkpoint_of_a_run_is_told_from_a_damaged_artifact(cli: Cli, small_run: Path) -> None:
    small_run.write_bytes(b"a checkpoint")
    cli("verify", small_run).expect(65, f"bnncli verify {small_run}.bnn")


STATE = {"weight": torch.arange(12.0).reshape(3, 4) / 7, "bias": torch.zeros(3)}
WORDS = ("net.pt", "--model", "net.py:make", "--data", "train=npz:data.npz")
TRAIN = Path("net.pt.bnn/features/train.h5")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and a checkpoint in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.random((20, 4), dtype=np.float32), y=rng.integers(3, size=20))
    Path("net.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(4, 3)\n")
    torch.save({"state_dict": {f"module.{name}": value for name, value in STATE.items()}}, "net.pt")


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints that are parsed from now on."""
    found: list[Path] = []
    whole = load.select_state
    monkeypatch.setattr(load, "select_state", lambda *given: found.append(Path()) or whole(*given))
    return found


def test_what_is_made_with_the_record_is_what_was_made_with_the_file(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("extract-features", *WORDS).expect(0)
    first = read_header(TRAIN)
    assert first.provenance["checkpoint"]["stripped_prefixes"] == ["module."]
    parses = parsed(monkeypatch)
    assert "up to date" in cli("extract-features", *WORDS).stderr
    assert not parses
    shutil.move("net.pt.bnn", "moved.bnn")
    shutil.copy("net.pt", "moved.pt")
    cli("extract-features", "moved.pt", "--run-dir", "moved.bnn", *WORDS[1:], "--force").expect(0)
    assert len(parses) == 1
    again = read_header(Path("moved.bnn/features/train.h5"))
    assert again.content_digest == first.content_digest
    assert again.provenance["checkpoint"] == first.provenance["checkpoint"] | {"path": "moved.pt"}


def test_another_file_with_the_same_weights_is_parsed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("extract-features", *WORDS).expect(0)
    torch.save(STATE, "net.pt")
    parses = parsed(monkeypatch)
    assert "up to date" in cli("extract-features", *WORDS).stderr
    torch.save({name: value + 1 for name, value in STATE.items()}, "net.pt")
    assert "the checkpoint has changed" in cli("extract-features", *WORDS).stderr
    assert len(parses) == 2


def test_a_warning_about_the_checkpoint_is_said_each_time(cli: Cli) -> None:
    torch.save({"state_dict_ema": STATE, "state_dict": {name: value + 1 for name, value in STATE.items()}}, "net.pt")
    for _ in range(2):
        done = cli("extract-features", *WORDS)
        assert "using the averaged weights 'state_dict_ema'" in done.stderr
    assert "up to date" in done.stderr


def test_other_revision_parses_the_checkpoint_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("extract-features", *WORDS).expect(0)
    monkeypatch.setattr("bnncli.session.revisions.EXTRACT_FEATURES", 99)
    parses = parsed(monkeypatch)
    cli("extract-features", *WORDS, "--dry-run").expect(0)
    assert len(parses) == 1


def test_a_checkpoint_that_is_replaced_meanwhile_is_an_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("extract-features", *WORDS).expect(0)
    before = read_features(TRAIN).head_weight
    whole = load.load_checkpoint

    def replaced(path: Path, **options: object) -> load.Checkpoint:
        torch.save({name: value + 1 for name, value in STATE.items()}, path)
        return whole(path)

    monkeypatch.setattr("bnncli.session.network.load_checkpoint", replaced)
    cli("extract-features", *WORDS, "--force").expect(65, "was replaced while this command ran")
    np.testing.assert_array_equal(read_features(TRAIN).head_weight, before)


def test_a_checkpoint_and_a_network_that_are_both_gone(cli: Cli) -> None:
    Path("net.pt").unlink()
    words = ("net.pt", "--model", "absent.py:make", *WORDS[3:])
    for more in ((), ("--model-arg", "odd")):
        assert "no file 'net.pt'" in cli("extract-features", *words, *more).stderr


def test_what_is_there_refuses_before_a_network_that_is_gone_is_missed(cli: Cli) -> None:
    cli("extract-features", *WORDS).expect(0)
    torch.save(STATE, "net.pt")
    words = ("net.pt", "--model", "absent.py:make", *WORDS[3:])
    assert "already exists with other options" in cli("extract-features", *words).stderr
    gone = cli("extract-features", *words, "--force").stderr
    assert "replacing it (--force)" in gone
    assert "no file 'absent.py'" in gone
    cli("extract-features", *words, "--force", "--dry-run").expect(0)
    cli("extract-features", *words, "--force", "--model-arg", "odd").expect(2, "expected KEY=VALUE")
