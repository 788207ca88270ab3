"""verify on posteriors of every kind: what a command published is valid, and a layout that does not fit is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from problems.command_line import Cli

from bnncli.artifacts.posteriors import read_posterior, write_posterior


@pytest.mark.parametrize("hidden", [(), ("--hidden", "4")], ids=["head", "hidden"])
def test_latent_and_sparse_posteriors_are_valid(cli: Cli, small_run: Path, hidden: tuple[str, ...]) -> None:
    assert cli("fit-lbbnn", small_run, *hidden, "--epochs", 1, "-q").code == 0
    assert cli("prune", small_run, "-q").code == 0
    done = cli("verify", small_run.with_name("small.bnn"), "--json")
    assert [entry["problem"] for entry in done.json["files"] if not entry["is_valid"]] == []
    assert {"lbbnn", "lbbnn-sparse"} <= {Path(entry["path"]).stem for entry in done.json["files"]}


@pytest.mark.parametrize("wrong", ["offset", "missing", "text"])
def test_a_layout_that_does_not_fit_the_tensors_is_bad(cli: Cli, small_run: Path, wrong: str) -> None:
    assert cli("fit-lbbnn", small_run, "--epochs", 1, "-q").code == 0
    path = small_run.with_name("small.bnn") / "posteriors" / "lbbnn.safetensors"
    tensors, header = read_posterior(path)
    stated = header.meta["param_layout"]
    stated = {"offset": [{**stated[0], "offset": 1}, stated[1]], "missing": stated[:1], "text": "?"}[wrong]
    write_posterior(
        path, tensors, meta={**header.meta, "param_layout": stated}, provenance=header.provenance, may_replace=True
    )
    done = cli("verify", path)
    assert done.code == 65
    said = "'param_layout' is invalid" if wrong == "text" else "its tensors do not match its layout"
    assert said in done.stderr


def test_the_checkpoint_of_a_run_is_told_from_a_damaged_artifact(cli: Cli, small_run: Path) -> None:
    small_run.write_bytes(b"a checkpoint")
    done = cli("verify", small_run)
    assert (done.code, f"bnncli verify {small_run}.bnn" in done.stderr) == (65, True)
