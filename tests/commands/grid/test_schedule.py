"""How grids run: order, failures, signals, kills, and the same results as by hand."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from problems.command_line import Cli
from problems.grids import Stage, jobs_of, stage, write_grid

from bnncli.artifacts.files import read_header
from bnncli.artifacts.run_folder import RunFolder
from bnncli.commands.grid import GridOptions
from bnncli.commands.grid import plan as places
from bnncli.commands.grid.running import Journal, LineEnd, Observation, Running, read_seen, stop
from bnncli.errors import DeviceError, UsageError

__all__ = ["stage"]

TWO = '[[step]]\ncommand = "fit-laplace"\nstructure = ["full", "kron"]\n'
HMC = '[[step]]\ncommand = "hmc"\nbase = "{laplace}"\nseed = [1, 2]\n'
MERGE = '[[step]]\ncommand = "merge"\nposterior = ["{hmc*}"]\nname = "joined"\n'
LAST = '[[step]]\ncommand = "diagnose"\n'
NAMES = ["laplace-full", "laplace-kron"]
NAMES += [f"hmc-{structure}-seed{seed}" for seed in (1, 2) for structure in ("full", "kron")]
NAMES += ["joined-full", "joined-kron", "diagnose"]


def test_no_line_begins_before_what_it_waits_for_and_so_many_run_at_once(cli: Cli, stage: Stage) -> None:
    stage.acts({"laplace-full": {"together": NAMES[:2], "seconds": 0.3}, "hmc-kron-seed1": {"seconds": 0.1}})
    path = write_grid(stage.folder, TWO + HMC + MERGE + LAST)
    done = cli("grid", path.name, "--jobs", 2).expect(0)
    notes = stage.notes()
    order = [(one["name"], one["what"]) for one in notes]
    assert sorted({name for name, _ in order}) == sorted(NAMES)
    for job in jobs_of(stage.folder, path.read_text()):
        for number in job.after:
            assert order.index((NAMES[number], "ended")) < order.index((NAMES[job.number], "began"))
    running = [sum(1 if what == "began" else -1 for _, what in order[:end]) for end in range(len(order))]
    assert max(running) == 2
    assert done.stdout.splitlines()[:-1] == [f"made/{name}" for name in NAMES[:-1]]
    assert Path(done.stdout.splitlines()[-1]).is_relative_to("grid.toml.grid/logs")  # what diagnose has said


def test_one_line_runs_at_a_time_where_nothing_is_said(cli: Cli, stage: Stage) -> None:
    cli("grid", write_grid(stage.folder, TWO + LAST).name).expect(0)
    order = [(one["name"], one["what"]) for one in stage.notes()]
    assert order == [(name, what) for name in (*NAMES[:2], "diagnose") for what in ("began", "ended")]


def test_a_failed_line_leaves_out_those_that_wait_for_it_and_no_others(cli: Cli, stage: Stage) -> None:
    stage.acts({"laplace-full": {"exit": 70}, "laplace-kron": {"warnings": 2}})
    path = write_grid(stage.folder, TWO + HMC + MERGE + LAST)
    done = cli("grid", path.name, "--json")
    assert (done.code, done.json["error"]["code"]) == (3, "jobs_failed")
    assert done.json["counts"] == {"failed": 1, "done": 4, "skipped": 4}
    jobs = {one["name"]: one for one in done.json["jobs"]}
    assert list(jobs) == NAMES
    skipped = [one for one in jobs.values() if one["state"] == "skipped"]
    assert [one["name"] for one in skipped] == ["hmc-full-seed1", "hmc-full-seed2", "joined-full", "diagnose"]
    assert {one["why"] for one in skipped} == {"it depends on small: laplace-full"}
    assert {one["log"] for one in skipped} == {None}
    failed = jobs["laplace-full"]
    assert (failed["exit"], failed["why"]) == (70, "laplace-full went wrong; run: bnncli mend it")
    assert Path(failed["log"]).read_text() == "said by laplace-full\n"
    assert json.loads(Path(failed["document"]).read_text())["error"]["code"] == "x"
    assert (jobs["laplace-kron"]["warnings"], jobs["laplace-kron"]["outputs"]) == (2, ["made/laplace-kron"])
    assert "1 of 9 lines failed, and 4 that depend on them were skipped" in done.stderr
    assert "laplace-kron: done, 2 warnings" in done.stderr
    assert "1 failed, 4 done, 4 skipped, 1 with warnings" in done.stderr


def test_the_table_tells_why_and_has_each_failed_line_to_be_pasted(cli: Cli, stage: Stage) -> None:
    stage.acts({"laplace-full": {"exit": 65}, "laplace-kron": {"kill": 9}})
    done = cli("grid", write_grid(stage.folder, TWO + LAST).name).expect(3)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["checkpoint", "job", "exit", "why"],
        ["small", "laplace-full", "65", "laplace-full went wrong; run: bnncli mend it"],
        ["small", "laplace-kron", "137", "killed by SIGKILL, probably because the system ran out of memory"],
        ["small", "diagnose", "-", "it depends on small: laplace-full"],
    ]
    assert done.stdout.splitlines()[-2:] == [
        "bnncli fit-laplace small --structure full --name laplace-full",
        "bnncli fit-laplace small --structure kron --name laplace-kron",
    ]
    assert "run the grid again to complete it: bnncli grid grid.toml" in done.stderr


def test_only_failed_lines_run_again(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.acts({"laplace-kron": {"exit": 70}})
    path = write_grid(stage.folder, TWO + LAST + '[[step]]\ncommand = "status"\nafter = []\n')
    words = ("grid", path.name, "--json")
    cli(*words).expect(3)
    assert stage.began() == ["laplace-full", "laplace-kron", "status"]
    stage.acts({})
    assert cli(*words).json["counts"] == {"up_to_date": 2, "done": 2}
    assert stage.began() == ["laplace-full", "laplace-kron", "diagnose"]
    again = cli(*words).json
    assert again["counts"] == {"up_to_date": 4}
    assert stage.began() == NAMES[:2]  # which say themselves that they are up to date
    Path(again["jobs"][2]["document"]).unlink()  # what it has said is gone
    cli(*words).expect(0)
    assert stage.began() == [*NAMES[:2], "diagnose"]
    monkeypatch.setenv("BNNCLI_DIAGNOSE_SEED", "3")  # with which it may say something else
    cli(*words).expect(0)
    assert stage.began() == [*NAMES[:2], "diagnose", "status"]


def test_changed_inputs_rerun_a_line(cli: Cli, stage: Stage, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnose, laplace = jobs_of(
        stage.folder, LAST + '[[step]]\ncommand = "fit-laplace"\n'
    )  # of the run that is small_run
    known: list[str] = []

    def digest(config: str | None = None) -> str:
        seen = read_seen(diagnose, config)
        assert seen is not None
        return seen.digest(apart_from=[])

    known.append(digest())
    assert digest() == known[0]
    assert read_seen(laplace, None) is None  # it tells itself
    cli("fit-laplace", small_run, "--prior-precision", 3, "--force").expect(0)
    known.append(digest())
    monkeypatch.setenv("BNNCLI_DIAGNOSE_SEED", "3")
    known.append(digest())
    Path("bnncli.toml").write_text("[diagnose]\nseed = 4\n")
    known.append(digest())
    Path("other.toml").write_text("[diagnose]\nseed = 5\n")
    known.append(digest("other.toml"))
    monkeypatch.setenv("BNNCLI_RUN_DIR", str(stage.folder / "elsewhere"))
    known.append(digest())
    shutil.copytree(small_run.with_name("small.bnn"), "elsewhere")
    known.append(digest())
    assert len(set(known)) == len(known) == 7
    Path("bnncli.toml").write_text("[common]\nrun-dir = 'x'\n")
    assert read_seen(diagnose, None) is None  # what it sees is not known


def test_what_lines_beside_it_leave_is_no_concern_of_a_line_that_does_not_wait_for_them() -> None:
    own, other = Path("posteriors/a.safetensors"), Path("predictions/b.h5")
    before, after = (Observation({own: "1", **more}, {}) for more in ({}, {other: "2"}))
    assert before.digest(apart_from=[other]) == after.digest(apart_from=[Path.cwd() / other])
    assert before.digest(apart_from=[]) != after.digest(apart_from=[])
    assert before.digest(apart_from=[other]) != Observation({own: "3"}, {}).digest(apart_from=[other])


def test_lines_beside_one_are_all_but_those_that_it_waits_for(stage: Stage) -> None:
    jobs = jobs_of(stage.folder, TWO + HMC + MERGE + LAST.replace("]]\n", ']]\nafter = ["joined"]\n'))
    left = {job.key: LineEnd("done", 0, outputs=(job.name,)) for job in jobs[:-1]}
    journal = Journal(stage.folder, left)
    assert journal.beside(jobs[-1], jobs) == set()  # through merge it waits for all
    assert {path.name for path in journal.beside(jobs[-2], jobs)} == {name for name in NAMES[:-1] if "full" in name}


def test_a_dry_run_prints_what_is_to_begin_and_writes_nothing(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO + LAST)
    lines = [job.line.pasted() for job in jobs_of(stage.folder, path.read_text())]
    done = cli("grid", path.name, "-n")
    assert (done.code, done.stdout.splitlines()) == (0, lines)
    assert "3 lines, 3 to start\n" in done.stderr
    assert not Path("grid.toml.grid").exists()
    cli("grid", path.name).expect(0)
    again = cli("grid", path.name, "--dry-run", "--json")
    assert again.json["lines"] == lines[:2]
    assert "3 lines, 2 to start; 2 of these finished before" in again.stderr
    assert stage.began() == [*NAMES[:2], "diagnose"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_grid_and_says_how_to_go_on(cli: Cli, stage: Stage, number: signal.Signals) -> None:
    stage.acts({"laplace-full": {"together": NAMES[:2], "tell": number}, "laplace-kron": {"seconds": 20}})
    path = write_grid(stage.folder, TWO + LAST)
    done = cli("grid", path.name, "--jobs", 2, "--json")
    assert (done.code, done.json["error"]["code"]) == (128 + number, "interrupted")
    assert "continue with: bnncli grid grid.toml --jobs 2" in done.stderr
    assert sorted(one["name"] for one in stage.notes() if one["what"] == "told") == NAMES[:2]  # and not killed
    stage.acts({})
    cli("grid", path.name, "--jobs", 2).expect(0)
    assert stage.began()[-1] == "diagnose"


def test_lines_that_do_not_end_are_killed_after_a_while(stage: Stage) -> None:
    journal = Journal(stage.folder / "state")
    journal.logs.mkdir(parents=True)
    (job,) = jobs_of(stage.folder, '[[step]]\ncommand = "hmc"\n')
    stage.acts({"hmc": {"seconds": 20}})
    line = Running.start(job, places.LinePlace("here", {}), journal, config=None)
    while not Path("notes").exists():
        time.sleep(0.005)
    os.kill(line.process.pid, signal.SIGSTOP)  # deaf, as in a call that takes minutes
    stop([line], grace=0.05)
    ended = line.ended()
    assert ended is not None
    assert (ended.exit, ended.state) == (137, "failed")


def test_a_second_grid_of_the_same_file_is_75(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name).expect(0)
    with open("grid.toml.grid/.lock", "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = cli("grid", path.name).expect(75, "error: another bnncli process runs this grid (pid")
        assert "--wait" not in done.stderr
        cli("grid", path.name, "--dir", "other").expect(0)
    cli("grid", path.name).expect(0)


def test_a_damaged_state_costs_no_result(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name).expect(0)
    state = Path("grid.toml.grid/state.json")
    for text in ("{", '{"schema": "bnncli.grid/1", "jobs": {"a": {"state": 3}}}'):
        state.write_text(text)
        done = cli("grid", path.name, "--json")
        assert (done.code, done.json["counts"]) == (0, {"up_to_date": 2})
        assert [text for text in done.json["warnings"] if "state.json is damaged" in text]


def test_what_cannot_be_written_is_told_before_anything_runs(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO)
    Path("file").touch()
    cli("grid", path.name, "--dir", "file/x").expect(73, "hint: choose another place with --dir")
    assert stage.began() == []


def test_parallel_lines_share_cores_and_see_no_gpu(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "count_cores", lambda: 8)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name, "--jobs", 3).expect(0)
    seen = [one["environment"] for one in stage.notes()]
    assert seen == [{"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}] * 4
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert [dict(place.environment) for place in places.list_places(GridOptions(jobs=2), [])] == [
        {"CUDA_VISIBLE_DEVICES": ""}
    ] * 2
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="torchrun started 2 copies of it: run it without torchrun"):
        places.list_places(GridOptions(jobs=2), [])


def test_each_line_sees_the_gpu_of_its_place(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "device_name", lambda name: "cuda:0")
    monkeypatch.setattr(places, "torch", type("Torch", (), {"cuda": type("Cuda", (), {"device_count": lambda: 3})}))
    stage.acts({NAMES[0]: {"together": NAMES[:2]}, NAMES[1]: {"together": NAMES[:2]}})
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name, "--devices", "2,cpu").expect(0)
    assert {one["environment"]["CUDA_VISIBLE_DEVICES"] for one in stage.notes()} == {"2", ""}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b, GPU-c")
    cli("grid", path.name, "--devices", "2,0").expect(0)
    assert {one["environment"]["CUDA_VISIBLE_DEVICES"] for one in stage.notes()} == {"GPU-c", "GPU-a"}
    with pytest.raises(DeviceError, match="no GPU 3: have 3, numbered from 0"):
        places.list_places(GridOptions(devices="3"), [])


def test_a_gpu_that_is_not_there_is_69(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "device_name", lambda name: "cpu")
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name, "--devices", "cpu,0").expect(69, "--devices: no GPU 0: PyTorch finds no GPU")
    cli("grid", path.name, "--devices", "cpu").expect(0)


def test_lines_have_the_configuration_of_the_grid_and_wait_for_locks(cli: Cli, stage: Stage) -> None:
    Path("c.toml").write_text("[hmc]\ndraws = 20\n")
    path = write_grid(stage.folder, TWO + '[[step]]\ncommand = "hmc"\nwait = 5\n' + LAST)
    cli("grid", path.name, "--config", "c.toml").expect(0)
    words = {one["name"]: one["words"] for one in stage.notes()}
    ending = ["--json", "--progress", "log"]
    assert words["laplace-full"][6:] == ["--config", "c.toml", "--wait", "60", *ending]
    assert words["hmc"] == ["hmc", "small", "--wait", "5", "--resume", "--config", "c.toml", *ending]
    assert words["diagnose"] == ["diagnose", "small", "--config", "c.toml", *ending]


SCRIPT = """
checkpoints = ["it's one", "two"]
[[step]]
command = "fit-laplace"
structure = ["full", "kron"]
[[step]]
command = "refine"
base = "{laplace}"
"""


def tasks(stage: Stage, script: str, number: object) -> subprocess.CompletedProcess[str]:
    """A task of the array job, as SLURM runs it: somewhere else."""
    (stage.folder / "job.sh").write_text(script)
    environment: dict[str, Any] = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
    return subprocess.run(["bash", stage.folder / "job.sh"], env=environment, cwd="/", capture_output=True, text=True)


def test_tasks_of_slurm_run_every_line_once_in_the_order_that_they_wait(cli: Cli, stage: Stage) -> None:
    for name in ("it's one.bnn", "two.bnn"):
        (stage.folder / name).mkdir()
    path = write_grid(stage.folder, SCRIPT)
    script = cli("grid", path.name, "--slurm").stdout
    assert script.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=grid\n#SBATCH --array=0-3\n")
    lines = []
    for number in range(4):
        assert tasks(stage, script, number).returncode == 0
        notes = [one for one in stage.notes() if one["what"] == "began"]
        assert [one["words"][0] for one in notes] == ["fit-laplace", "refine"]
        lines += [one["words"] for one in notes]
    jobs = jobs_of(stage.folder, SCRIPT)
    assert sorted(lines) == sorted([*job.line.words()[1:], "--wait", "60"] for job in jobs)
    assert tasks(stage, script, 4).returncode == 2
    document = cli("grid", path.name, "--slurm", "--json").json
    assert document["script"] == script
    assert document["lines"] == [job.line.pasted() for job in jobs]


def test_slurm_task_leaves_out_lines_behind_a_failed_one(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO + HMC + MERGE + LAST)
    script = cli("grid", path.name, "--slurm").stdout
    stage.acts({"hmc-full-seed1": {"exit": 70}, "laplace-kron": {"exit": 3}})
    done = tasks(stage, script, 0)
    assert done.returncode == 3
    assert stage.began() == ["laplace-full", "laplace-kron", "hmc-full-seed1", "hmc-full-seed2"]
    assert "line 2 failed: bnncli hmc small --base laplace-full --seed 1" in done.stderr
    assert done.stderr.count("left out, as line ") == 5
    stage.acts({"laplace-full": {"tell": signal.SIGTERM, "seconds": 0.2}})
    assert tasks(stage, script, 0).returncode == 143
    assert stage.began() == ["laplace-full"]


def test_more_parts_than_slurm_has_tasks_share_them(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("bnncli.commands.grid"), "MAX_TASKS", 2)
    path = write_grid(stage.folder, '[[step]]\ncommand = "fit-laplace"\nprior-precision = [1, 2, 3]\n')
    script = cli("grid", path.name, "--slurm").stdout
    assert "--array=0-1\n" in script
    for number, names in enumerate((["1", "3"], ["2"])):
        assert tasks(stage, script, number).returncode == 0
        assert stage.began() == [f"laplace-prior-precision{name}" for name in names]


FEW = """
[[step]]
command = "fit-laplace"
name = "k"
structure = "kron"
prior-precision = 3
threads = 1
[[step]]
command = "predict"
posterior = "{k}"
split = "test"
threads = 1
"""
CHAINS = """
[[step]]
command = "fit-laplace"
name = "g"
structure = STRUCTURES
prior-precision = 3
threads = 1
[[step]]
command = "hmc"
base = "{g}"
chains = 4
warmup = 20
draws = 500
seed = [1, 2]
save-every = 0
threads = 1
[[step]]
command = "merge"
name = "joined"
posterior = ["{hmc*}"]
threads = 1
[[step]]
command = "predict"
posterior = "{joined}"
split = "test"
threads = 1
[[step]]
command = "evaluate"
posterior = "{joined}"
bootstrap = 0
threads = 1
"""
SIX = CHAINS.replace("STRUCTURES", '"kron"')  # lines
TWELVE = CHAINS.replace("STRUCTURES", '["full", "kron"]')


def digests(run: Path) -> dict[str, str]:
    """Of the contents of all artifacts of a run."""
    folder = RunFolder.of(run, None, is_name=True)
    paths = [*folder.posteriors(), *folder.prediction_files(), *folder.metrics_files()]
    return {str(path.relative_to(folder.root)): read_header(path).content_digest for path in paths}


def by_hand(cli: Cli, path: Path, lines: list[str]) -> dict[str, str]:
    """What the lines leave in a copy of the run, one after the other."""
    copy = path.with_name("hand") / "small"
    shutil.copytree(path.with_name("small.bnn"), copy.with_name("small.bnn"))
    for line in lines:
        program, command, checkpoint, *words = shlex.split(line)
        assert (program, checkpoint) == ("bnncli", "small")
        cli(command, copy, *words).expect(0)
    return digests(copy)


@pytest.mark.long
def test_a_grid_leaves_what_its_lines_leave_by_hand(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run.parent)
    path = write_grid(small_run.parent, FEW)
    lines = cli("grid", path.name, "-n").stdout.splitlines()
    expected = by_hand(cli, path, lines)
    done = cli("grid", path.name, "--jobs", 2, "--json")
    assert (done.code, done.json["counts"]) == (0, {"done": 2}), done.stdout
    assert digests(small_run) == expected
    assert [path for job in done.json["jobs"] for path in job["outputs"]] == [
        "small.bnn/posteriors/k.safetensors",
        "small.bnn/predictions/k.mc/test.h5",
    ]


def begin(path: Path, *words: str) -> subprocess.Popen[str]:
    """A grid in a process of its own, two lines at a time."""
    argv = [sys.executable, "-m", "bnncli", "grid", path.name, "--jobs", "2", *words]
    return subprocess.Popen(argv, cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_running(folder: Path) -> dict[str, int]:
    """Processes of lines in a folder, by the names of their results."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().decode().split("\0")
            if "--name" in words and Path(os.readlink(place / "cwd")) == folder:
                found[words[words.index("--name") + 1]] = int(place.name)
    return found


def wait_for(condition: Any, seconds: float = 120) -> Any:
    """What the condition gives, once it is true of something."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    assert found
    return found


def expected_of(cli: Cli, path: Path) -> dict[str, str]:
    """What the lines of a grid leave by hand."""
    return by_hand(cli, path, cli("grid", path.name, "-n").stdout.splitlines())


@pytest.mark.long
@pytest.mark.sure_scores
def test_grid_of_all_steps_equals_lines_by_hand(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run.parent)
    path = write_grid(small_run.parent, TWELVE + '[[step]]\ncommand = "diagnose"\nposterior = ["{joined}"]\n')
    expected = expected_of(cli, path)
    done = cli("grid", path.name, "--jobs", 2, "--json")
    assert (done.code, done.json["counts"]) == (0, {"done": 14}), done.stdout
    assert digests(small_run) == expected
    again = cli("grid", path.name, "--jobs", 2, "--json").json
    assert again["counts"] == {"up_to_date": 14}, [job for job in again["jobs"] if job["state"] != "up_to_date"]


@pytest.mark.long
@pytest.mark.sure_scores
@pytest.mark.parametrize(("what", "code"), [("the grid", -9), ("a line", 3), ("the grid in an orderly way", 143)])
def test_after_a_kill_it_goes_on_to_the_same_content(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, what: str, code: int
) -> None:
    folder = small_run.parent
    monkeypatch.chdir(folder)
    path = write_grid(folder, SIX)
    expected = expected_of(cli, path)
    process = begin(path)
    posteriors = folder / "small.bnn" / "posteriors"
    name = wait_for(lambda: [found.name.split(".")[1] for found in posteriors.glob(".hmc-*.resume.safetensors")])[0]
    if what == "a line":
        os.kill(lines_running(folder)[name], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGKILL if what == "the grid" else signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert ("killed by SIGKILL" in out) == (what == "a line")
    wait_for(lambda: not lines_running(folder))  # which have been told to end, whatever ended the grid
    (log,) = (folder / "grid.toml.grid" / "logs").glob(f"small.{name}.*.log")
    assert ("interrupted by SIGTERM" in log.read_text()) == (what != "a line")
    there = {one.stem: one.stat().st_mtime_ns for one in posteriors.iterdir() if one.name[0] != "."}
    again = cli("grid", path.name, "--jobs", 2, "--json").expect(0)
    assert digests(small_run) == expected
    made = {
        one["name"]: one["state"] for one in again.json["jobs"] if Path(one["outputs"][0]).parent.name == "posteriors"
    }
    assert made == {one: "up_to_date" if one in there else "done" for one in ("g", "hmc-seed1", "hmc-seed2", "joined")}
    assert all(one.stat().st_mtime_ns == there[one.stem] for one in posteriors.iterdir() if one.stem in there)
    assert "INFO hmc resuming" in log.read_text()
    assert not list(posteriors.glob(".*.resume.*"))


@pytest.mark.long
@pytest.mark.sure_scores
def test_slurm_tasks_give_what_lines_by_hand_give(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run.parent)
    path = write_grid(small_run.parent, SIX)
    expected = expected_of(cli, path)
    script = path.with_name("job.sh")
    script.write_text(cli("grid", path.name, "--slurm").stdout)
    assert "--array=0-0\n" in script.read_text()
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(["bash", script], env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert digests(small_run) == expected
