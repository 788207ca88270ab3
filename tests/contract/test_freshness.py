"""Running again, and removing."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands.test_auto import separable
from conftest import run_all
from contract.test_corruption import refuse
from kills import is_stopped, run_stopped_once, start
from problems.command_line import Cli

import bnncli
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import BnnWarning, DataError
from bnncli.numerics import random as seeds
from bnncli.session import revisions as _revisions

REQUESTS = {
    "extract-features": ("--from-npz", "features.npz", "--ood", "far"),
    "fit-laplace": ("--prior-precision", "10"),
    "refine": ("--epochs", 1, "--length", 2),
    "hmc": ("--chains", 8, "--warmup", 8, "--draws", 16),
    "predict": (),
    "evaluate": ("--posterior", "map"),
}


def ask(cli: Cli, run: Path, name: str, *more: object) -> Any:
    words = [run.with_name(word) if word == "features.npz" else word for word in REQUESTS[name]]
    return cli(name, run, *words, *more, "--json")


def identity(run: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in run.with_name("small.bnn").rglob("*") if path.is_file() and path.parent.name != ".locks"]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def digests(document: dict[str, Any]) -> dict[str, str]:
    return {output["path"]: output["content_digest"] for output in document["outputs"]}


def change_training_data(run: Path) -> None:
    """Other features for every split: what a new checkpoint would give."""
    with np.load(run.with_name("features.npz")) as arrays:
        changed = {name: array + 0.25 if name.startswith("features") else array for name, array in arrays.items()}
    np.savez(run.with_name("features.npz"), **changed)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_same_request_does_nothing(cli: Cli, small_run: Path, name: str) -> None:
    before = identity(small_run)
    done = ask(cli, small_run, name)
    assert (done.code, done.json["action"]) == (0, "up_to_date")
    assert "up to date" in done.stderr
    assert identity(small_run) == before


@pytest.mark.parametrize("name", REQUESTS)
def test_force_computes_the_same_content_again(cli: Cli, small_run: Path, name: str) -> None:
    before, old = identity(small_run), ask(cli, small_run, name).json
    new = ask(cli, small_run, name, "--force").json
    assert new["action"] == "replaced"
    assert digests(new) == digests(old)
    after = identity(small_run)
    assert all(after[path][0] != before[path][0] for path in digests(new))
    assert after.keys() == before.keys()


def test_another_seed_gives_other_draws_and_the_same_seed_the_same(cli: Cli, small_run: Path) -> None:
    by_seed = [
        ask(cli, small_run, "hmc", "--seed", seed, "--name", f"s{seed}-{n}").json["outputs"][0]["content_digest"]
        for n, seed in enumerate((3, 3, 4))
    ]
    assert by_seed[0] == by_seed[1] != by_seed[2]


@pytest.mark.parametrize(
    ("name", "words", "field"),
    [
        ("fit-laplace", ("--prior-precision", "3"), "prior_precision"),
        ("fit-laplace", ("--structure", "diag"), "structure"),
        ("refine", ("--length", 3), "length: existing=2, requested=3"),
        ("refine", ("--seed", 1), "seed: existing=0, requested=1"),
        ("hmc", ("--draws", 17), "draws"),
        ("predict", ("--samples", 7), "samples"),
        ("evaluate", ("--bins", 5), "bins: existing=15, requested=5"),
        ("extract-features", ("--dtype", "float16"), "dtype"),
    ],
)
def test_other_options_are_named(cli: Cli, small_run: Path, name: str, words: tuple[object, ...], field: str) -> None:
    before = identity(small_run)
    done = ask(cli, small_run, name, *words)
    assert (done.code, done.json["error"]["code"]) == (73, "exists")
    assert field in done.json["error"]["message"]
    assert "--force" in done.json["error"]["hint"]
    assert identity(small_run) == before


@pytest.mark.parametrize("words", [("--threads", 1), ("--device", "cpu"), ("-q",), ("--progress", "none")])
def test_options_without_effect_on_numbers_are_ignored(cli: Cli, small_run: Path, words: tuple[object, ...]) -> None:
    assert ask(cli, small_run, "refine", *words).json["action"] == "up_to_date"


def test_a_name_keeps_both(cli: Cli, small_run: Path) -> None:
    before = identity(small_run)
    cli("fit-laplace", small_run, "--structure", "diag", "--name", "diag", "--prior-precision", "10").expect(0)
    after = identity(small_run)
    assert {Path(path).name for path in after.keys() - before.keys()} == {"diag.safetensors"}
    assert before.items() <= after.items()


def test_out_is_exactly_that_file(cli: Cli, small_run: Path) -> None:
    out = small_run.with_name("elsewhere") / "x.safetensors"
    assert cli("fit-laplace", small_run, "--out", out, "--prior-precision", "10").stdout == f"{out}\n"
    cli("verify", out).expect(0)
    cli("predict", small_run, "--posterior", out, "--split", "test", "--samples", 5).expect(0)


def test_stale_inputs_are_refused_with_the_command_and_then_replaced(cli: Cli, small_run: Path) -> None:
    change_training_data(small_run)
    again = ask(cli, small_run, "extract-features")
    assert again.json["action"] == "replaced"
    assert "data.train has changed" in again.stderr
    done = ask(cli, small_run, "refine")
    assert (done.code, done.json["error"]["code"]) == (65, "stale_input")
    assert done.json["error"]["hint"].startswith("bnncli fit-laplace ")
    redone = ask(cli, small_run, "fit-laplace")
    assert redone.json["action"] == "replaced"
    assert "features.train has changed" in redone.stderr
    assert ask(cli, small_run, "refine").json["action"] == "replaced"


def test_hints_lead_from_a_stale_run_back_to_a_fresh_one(cli: Cli, small_run: Path) -> None:
    import shlex

    change_training_data(small_run)
    ask(cli, small_run, "extract-features")
    words: list[object] = ["predict", small_run, "--posterior", "refine"]
    steps = 0
    while (done := cli(*words, "--json")).code != 0:
        steps += 1
        assert steps < 6
        hint = shlex.split(done.json["error"]["hint"])
        while (repaired := cli(*hint[1:], "--json")).code != 0:
            hint = shlex.split(repaired.json["error"]["hint"])
    assert steps > 0


def test_stale_posteriors_are_skipped_unless_named(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", "9", "--force").expect(0)
    done = ask(cli, small_run, "predict")
    assert done.code == 0
    assert any("skipping refine" in warning for warning in done.json["warnings"])
    assert "WARNING predict skipping refine" in done.stderr
    assert {output["role"].split(".")[1] for output in done.json["outputs"]} == {"map", "laplace"}
    named = cli("predict", small_run, "--posterior", "refine")
    assert (named.code, named.stderr.splitlines()[0].endswith("base (laplace.safetensors) has changed")) == (65, True)
    assert "WARNING" not in named.stderr


@pytest.mark.parametrize("name", REQUESTS)
def test_a_dry_run_says_what_it_would_do_and_writes_nothing(cli: Cli, small_run: Path, name: str) -> None:
    shutil.rmtree(small_run.with_name("small.bnn") / ".locks")
    before = identity(small_run)
    skipped = ask(cli, small_run, name, "--dry-run").json
    replaced = ask(cli, small_run, name, "--dry-run", "--force").json
    assert {output["planned"] for output in skipped["outputs"]} == {"skip"}
    assert {output["planned"] for output in replaced["outputs"]} == {"replace"}
    assert skipped["action"] == replaced["action"] == "planned"
    assert identity(small_run) == before
    assert not (small_run.with_name("small.bnn") / ".locks").exists()


def test_a_dry_run_ends_with_the_code_of_the_real_run(cli: Cli, small_run: Path) -> None:
    for words in (("fit-laplace", small_run, "--prior-precision", "3"), ("hmc", small_run, "--base", "none")):
        code = cli(*words).code
        assert code in (66, 73)
        cli(*words, "--dry-run").expect(code)


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_foreign_files_are_never_replaced(cli: Cli, small_run: Path, force: tuple[str, ...]) -> None:
    thesis = small_run.with_name("bnncli-thesis.tex")
    thesis.write_text("bnncli is the subject of this thesis")
    arrays = shutil.copy(small_run.with_name("features.npz"), small_run.with_name("arrays.npz"))
    for out in (thesis, arrays):
        content = out.read_bytes()
        cli("fit-laplace", small_run, "--prior-precision", "10", "--out", out, *force).expect(73)
        assert out.read_bytes() == content


def test_a_run_that_was_moved_is_still_fresh(cli: Cli, small_run: Path) -> None:
    moved = small_run.with_name("elsewhere") / "small"
    moved.parent.mkdir()
    shutil.move(small_run.with_name("small.bnn"), moved.with_name("small.bnn"))
    cli("status", moved, "--check").expect(0)
    assert cli("refine", moved, *REQUESTS["refine"], "--json").json["action"] == "up_to_date"


def test_the_run_folder_can_be_anywhere(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = small_run.with_name("scratch disk")
    shutil.move(small_run.with_name("small.bnn"), other)
    cli("status", small_run, "--check", "--run-dir", other).expect(0)
    hint = cli("predict", small_run, "--run-dir", other, "--posterior", "none", "--json").json["error"]["hint"]
    assert hint.endswith(f"--run-dir '{other}'")
    monkeypatch.setenv("BNNCLI_RUN_DIR", str(other))
    cli("status", small_run, "--check").expect(0)


def test_of_two_at_once_one_waits_or_leaves(cli: Cli, small_run: Path) -> None:
    words = ["refine", str(small_run), "--name", "two", "--epochs", "4", "--elbo-draws", "2", "-q", "--save-every", "0"]
    words += ["--threads", "1"]  # sums by another number of threads differ in their last bits
    first = start(run_stopped_once, words)
    while not is_stopped(first.pid):
        assert first.is_alive()
        time.sleep(0.01)
    try:
        refused = cli(*words)
        other = cli("fit-laplace", small_run, "--name", "other", "--prior-precision", "10")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert (refused.code, f"pid {first.pid}" in refused.stderr) == (75, True)
    assert other.code == 0
    waited = cli(*words, "--wait", 60, "--json")
    first.join(timeout=60)
    assert first.exitcode == 0
    assert (waited.code, waited.json["action"]) == (0, "up_to_date")
    here = cli(*words, "--force", "--json").json
    assert (here["action"], digests(here)) == ("replaced", digests(waited.json))


ANOTHER = "made by another revision of the algorithm"


@pytest.mark.parametrize("name", REQUESTS)
def test_status_tells_what_is_stale(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """For a newer revision of the algorithm, as for another input."""
    cli("status", small_run, "--check").expect(0)
    number, function = name.upper().replace("-", "_"), f"of_{name.rpartition('-')[2]}"
    if hasattr(_revisions, number):
        monkeypatch.setattr(_revisions, number, 99)
    else:
        monkeypatch.setattr(_revisions, function, lambda *_, **__: 99)
    told = cli("status", small_run, "--check", "--json").expect(3)
    stale = [entry for entry in told.json["artifacts"] if entry["state"] == "stale"]
    assert all(entry["why"].endswith(ANOTHER) for entry in stale)
    assert {entry["remake"].split()[1] for entry in stale if entry["why"] == ANOTHER} == {name}
    assert ask(cli, small_run, name).json["action"] == "replaced"


def test_stale_artifacts_need_allow_stale(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a newer revision of the algorithm, of a posterior and of the one that it was made from."""
    monkeypatch.setattr(_revisions, "of_laplace", lambda *_, **__: 99)
    entries = [one for one in cli("status", small_run, "--json").json["artifacts"] if "posteriors" in one["name"]]
    assert {one["state"] for one in entries} == {"fresh", "stale"}
    for entry in entries:
        words = ("predict", small_run, "--posterior", entry["path"], "--name", "again", "--force", "--json")
        done = cli(*words).expect({"fresh": 0, "stale": 65}[entry["state"]])
        if done.code:
            error = done.json["error"]
            assert (error["code"], error["message"]) == ("stale_input", f"{entry['path']} is stale: {entry['why']}")
            assert error["hint"] == entry["remake"]
            allowed = cli(*words, "--allow-stale")
            assert (allowed.code, entry["why"] in allowed.json["warnings"][0]) == (0, True)


def test_draws_of_another_stream_are_made_anew(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run from before they had one: what is drawn of a Gaussian or by chains, and nothing else."""
    assert ask(cli, small_run, "hmc").json["action"] == "up_to_date"
    monkeypatch.setattr(seeds, "LARGE", 1)
    told = {Path(entry["path"]).stem: entry["state"] for entry in cli("status", small_run, "--json").json["artifacts"]}
    assert (told["hmc"], told["laplace"]) == ("stale", "fresh")
    assert ask(cli, small_run, "hmc").json["action"] == "replaced"
    words = ("predict", small_run, "--posterior", "laplace", "--json", "--name", "drawn", "--integrator")
    assert cli(*words, "mc").json["action"] == "computed"
    monkeypatch.undo()
    assert cli(*words, "mc").json["action"] == "replaced"
    assert ask(cli, small_run, "hmc").json["action"] == "replaced"


def states(cli: Cli, run: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in cli("status", run, "--json").json["artifacts"]}


def files(run: Path) -> set[str]:
    folder = run.with_name(f"{run.name}.bnn")
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".locks" not in path.parts
    }


@pytest.fixture(scope="module")
def made_left_over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with stale predictions of a posterior that auto does not recommend."""
    folder = tmp_path_factory.mktemp("left-over")
    arrays = separable(2000, 4, scale=6.0)
    arrays["head_weight"][0] *= 0.2  # which no temperature mends
    np.savez(folder / "run.npz", **arrays)  # type: ignore[arg-type]
    run, weak = folder / "run", ("--prior-precision", 500)
    run_all(
        ("extract-features", run, "--from-npz", folder / "run.npz"),
        ("auto", run),
        ("predict", run, "--posterior", "laplace", "--integrator", "mc"),
        ("evaluate", run, "--bootstrap", "0"),
        ("auto", run, *weak),
        ("fit-laplace", run, *weak, "--force"),
    )
    return folder


@pytest.fixture
def left_over(made_left_over: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(made_left_over, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


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
        cli(*shlex.split(str(one))[1:]).expect(0)
    cli("status", left_over, "--check").expect(0)
    assert bnncli.open(left_over).metrics()


def test_what_is_stale_is_removed_and_nothing_else(cli: Cli, left_over: Path) -> None:
    before = files(left_over)
    stale = {name for name, state in states(cli, left_over).items() if state == "stale"}
    assert len(stale) == 3
    planned = cli("clean", left_over, "--stale", "--dry-run", "--json")
    assert (files(left_over), planned.json["action"]) == (before, "planned")
    assert cli("clean", left_over, "--stale", "--json").json["removed"] == planned.json["removed"]
    assert files(left_over) == before - stale
    cli("status", left_over, "--check").expect(0)


def test_unreadable_is_neither_stale_nor_removed(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(small_run)
    with monkeypatch.context() as patch:
        refuse(patch, small_run.with_name("small.bnn") / "posteriors" / "laplace.safetensors", errno.EACCES)
        told = states(cli, small_run)
        done = cli("clean", small_run, "--stale", "--json")
    assert told["predictions/laplace.mc/test.h5"] == told["posteriors/laplace.safetensors"] == "unknown"
    assert "stale" not in told.values()
    assert (done.code, done.json["removed"], files(small_run)) == (0, [], before)
    assert "laplace.safetensors" in done.json["warnings"][0]


def test_rm_takes_dependents_but_posteriors_are_named(cli: Cli, small_run: Path) -> None:
    before = files(small_run)
    refused = cli("rm", small_run, "laplace", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "has_dependents")
    assert "refine" in refused.json["error"]["message"]
    planned = cli("rm", small_run, "laplace", "--dependents", "--dry-run", "--json").json["removed"]
    assert files(small_run) == before
    assert set(cli("rm", small_run, "laplace", "refine", "hmc", "--json").json["removed"]) == set(planned)
    left = files(small_run)
    assert left == {name for name in before if str(small_run.with_name("small.bnn") / name) not in planned}
    assert {Path(name).name for name in left if name.startswith("posteriors")} == {"map.safetensors"}
    cli("status", small_run, "--check").expect(0)


def test_predictions_are_removed_by_their_own_name_with_their_scores(cli: Cli, small_run: Path) -> None:
    before = files(small_run)
    cli("rm", small_run, "map.plug-in").expect(0)
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
        cli("rm", small_run, "map.plug-in").expect(75)
    assert files(small_run) == before


@pytest.mark.parametrize("place", range(0, 20, 6))
def test_cut_removal_is_consistent(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    calls, unlink = iter(range(1000)), os.unlink

    def cut(path: str, **words: int) -> None:
        if next(calls) >= place:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path, **words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", cut)
        cli("rm", small_run, "laplace", "--dependents").expect(74)
    cli("status", small_run, "--check").expect(0)
    cli("rm", small_run, "laplace", "--dependents").expect(0)
    cli("status", small_run, "--check").expect(0)
