"""clean --stale and rm: what is stale or named goes with what was made from it, and what stays is still true."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest
from contract.test_unreadable_inputs import refuse
from problems.command_line import Cli, new_run
from stages.test_auto import separable

import bnncli
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import BnnWarning, DataError


def states(cli: Cli, run: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in cli("status", run, "--json").json["artifacts"]}


def files(run: Path) -> set[str]:
    folder = run.with_name(f"{run.name}.bnn")
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".locks" not in path.parts
    }


@pytest.fixture
def left_over(cli: Cli, tmp_path: Path) -> Path:
    """A run with stale predictions of a posterior that auto does not recommend."""
    arrays = separable(2000, 4, scale=6.0)
    arrays["head_weight"][0] *= 0.2  # which no temperature mends
    run = new_run(cli, tmp_path / "run", arrays)
    weak = ("--prior-precision", 500)
    for words in (
        ("auto", run),
        ("predict", run, "--posterior", "laplace", "--integrator", "mc"),
        ("evaluate", run, "--bootstrap", "0"),
        ("auto", run, *weak),
    ):
        assert cli(*words).code == 0
    assert cli("fit-laplace", run, *weak, "--force").code == 0
    return run


def test_hints_remake_exactly_the_stale_predictions_whatever_auto_recommends_now(cli: Cli, left_over: Path) -> None:
    hint = f"bnncli predict {left_over} --posterior laplace --integrator mc"
    entries = {one["name"]: one for one in cli("status", left_over, "--json").json["artifacts"]}
    assert entries["predictions/laplace.mc/test.h5"]["remake"] == hint
    refused = cli("evaluate", left_over, "--json").json["error"]
    assert (refused["code"], refused["hint"]) == ("stale_input", hint)
    with (
        pytest.raises(DataError, match="all metrics files of the run are stale") as caught,
        pytest.warns(BnnWarning, match="skipping"),
    ):
        bnncli.open(left_over).metrics()
    for one in (hint, caught.value.hint):
        assert cli(*shlex.split(str(one))[1:]).code == 0
    assert cli("status", left_over, "--check").code == 0
    assert bnncli.open(left_over).metrics()


def test_what_is_stale_is_removed_and_nothing_else(cli: Cli, left_over: Path) -> None:
    before = files(left_over)
    stale = {name for name, state in states(cli, left_over).items() if state == "stale"}
    assert len(stale) == 3
    planned = cli("clean", left_over, "--stale", "--dry-run", "--json")
    assert (files(left_over), planned.json["action"]) == (before, "planned")
    assert cli("clean", left_over, "--stale", "--json").json["removed"] == planned.json["removed"]
    assert files(left_over) == before - stale
    assert cli("status", left_over, "--check").code == 0


def test_what_cannot_be_read_is_neither_stale_nor_removed(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(small_run)
    with monkeypatch.context() as patch:
        refuse(patch, small_run.with_name("small.bnn") / "posteriors" / "laplace.safetensors", errno.EACCES)
        told = states(cli, small_run)
        done = cli("clean", small_run, "--stale", "--json")
    assert told["predictions/laplace.mc/test.h5"] == told["posteriors/laplace.safetensors"] == "unknown"
    assert "stale" not in told.values()
    assert (done.code, done.json["removed"], files(small_run)) == (0, [], before)
    assert "laplace.safetensors" in done.json["warnings"][0]


def test_what_was_made_from_a_posterior_goes_with_it_but_other_posteriors_have_to_be_named(
    cli: Cli, small_run: Path
) -> None:
    before = files(small_run)
    refused = cli("rm", small_run, "laplace", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "has_dependents")
    assert "refine" in refused.json["error"]["message"]
    planned = cli("rm", small_run, "laplace", "--dependents", "--dry-run", "--json").json["removed"]
    assert files(small_run) == before
    done = cli("rm", small_run, "laplace", "refine", "hmc", "--json")
    assert set(done.json["removed"]) == set(planned)
    left = files(small_run)
    assert left == {name for name in before if str(small_run.with_name("small.bnn") / name) not in planned}
    assert {Path(name).name for name in left if name.startswith("posteriors")} == {"map.safetensors"}
    assert cli("status", small_run, "--check").code == 0


def test_predictions_are_removed_by_their_own_name_with_their_scores(cli: Cli, small_run: Path) -> None:
    before = files(small_run)
    assert cli("rm", small_run, "map.plug-in").code == 0
    gone = before - files(small_run)
    assert {Path(name).parts[0] for name in gone} == {"predictions", "metrics"}
    assert all("map.plug-in" in name for name in gone)
    assert not (small_run.with_name("small.bnn") / "predictions" / "map.plug-in").exists()
    unknown = cli("rm", small_run, "laplac", "--json")
    assert (unknown.code, unknown.json["error"]["hint"]) == (66, "did you mean 'laplace' or 'laplace.mc'?")


def test_nothing_is_removed_that_another_process_writes(cli: Cli, small_run: Path) -> None:
    before = files(small_run)
    lock = small_run.with_name("small.bnn") / ".locks" / "predictions-map.plug-in-test.h5"
    with artifact_lock(lock, wait=0, poll=lambda: None):
        assert cli("rm", small_run, "map.plug-in").code == 75
    assert files(small_run) == before


@pytest.mark.parametrize("place", range(0, 20, 3))
def test_a_removal_that_is_cut_short_leaves_nothing_stale(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    calls, unlink = iter(range(1000)), os.unlink

    def cut(path: str, **words: int) -> None:
        if next(calls) >= place:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path, **words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", cut)
        assert cli("rm", small_run, "laplace", "--dependents").code == 74
    assert cli("status", small_run, "--check").code == 0
    assert cli("rm", small_run, "laplace", "--dependents").code == 0
    assert cli("status", small_run, "--check").code == 0
