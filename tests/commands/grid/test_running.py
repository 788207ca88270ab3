"""How grids run: order, failures, signals, kills, and the same results as by hand."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
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
from bnncli.commands.grid import GridOptions, running
from bnncli.errors import DeviceError
from bnncli.system import devices

__all__ = ["stage"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

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
    assert Path(done.stdout.splitlines()[-1]).is_relative_to("grid.toml.grid/diagnose")  # what it has said


def test_one_line_runs_at_a_time_where_nothing_is_said(cli: Cli, stage: Stage) -> None:
    cli("grid", write_grid(stage.folder, TWO + LAST).name).expect(0)
    order = [(one["name"], one["what"]) for one in stage.notes()]
    assert order == [(name, what) for name in (*NAMES[:2], "diagnose") for what in ("began", "ended")]


def test_a_makefile_in_the_folder_stays_and_names_need_not_be_utf8(cli: Cli, stage: Stage) -> None:
    Path("Makefile").write_text("all:\n")
    config = Path(os.fsdecode(b"caf\xe9.toml"))
    config.touch()
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name, "--dir", ".", "--config", str(config)).expect(0)
    assert Path("Makefile").read_text() == "all:\n"
    assert f"--config {shlex.quote(str(config))}".encode("utf-8", "surrogateescape") in Path("grid.mk").read_bytes()


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
    assert "laplace-full: failed: laplace-full went wrong; run: bnncli mend it" in done.stderr
    assert "laplace-kron: done, 2 warnings" in done.stderr
    assert "1 failed, 4 done, 4 skipped, 1 with warnings" in done.stderr


def test_the_table_tells_why_and_has_each_failed_line_to_be_pasted(cli: Cli, stage: Stage) -> None:
    stage.acts({"laplace-full": {"exit": 65}, "laplace-kron": {"kill": 9}})
    done = cli("grid", write_grid(stage.folder, TWO + LAST).name).expect(3)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["checkpoint", "job", "exit", "why"],
        ["small", "laplace-full", "65", "laplace-full went wrong; run: bnncli mend it"],
        ["small", "laplace-kron", "-", "killed, probably because the system ran out of memory"],
        ["small", "diagnose", "-", "it depends on small: laplace-full"],
    ]
    assert done.stdout.splitlines()[-2:] == [
        "bnncli fit-laplace small --structure full --name laplace-full",
        "bnncli fit-laplace small --structure kron --name laplace-kron",
    ]
    assert "run the grid again to complete it: bnncli grid grid.toml" in done.stderr


def test_what_has_succeeded_runs_again_only_if_something_it_depends_on_changed(cli: Cli, stage: Stage) -> None:
    Path("net.pt").touch()
    stage.acts({"laplace-kron": {"exit": 70}})
    text = "checkpoints = 'net.pt'\n" + TWO + LAST + '[[step]]\ncommand = "status"\nafter = []\n'
    words = ("grid", write_grid(stage.folder, text).name, "--json")
    cli(*words).expect(3)
    assert stage.began() == ["laplace-full", "laplace-kron", "status"]
    stage.acts({})
    assert cli(*words).json["counts"] == {"up_to_date": 2, "done": 2}
    assert stage.began() == ["laplace-kron", "diagnose"]
    again = cli(*words).json
    assert (again["counts"], again["jobs"][0]["outputs"]) == ({"up_to_date": 4}, ["made/laplace-full"])
    assert stage.began() == []
    Path("made/laplace-kron").unlink()
    cli(*words).expect(0)
    assert stage.began() == ["laplace-kron", "diagnose"]
    Path(again["jobs"][3]["document"]).unlink()  # what it has said is gone
    cli(*words).expect(0)
    assert stage.began() == ["status"]
    for change in (lambda: Path("net.pt").touch(), lambda: Path("bnncli.toml").write_text("[hmc]\ndraws = 20\n")):
        change()
        assert cli(*words).json["counts"] == {"up_to_date": 2, "done": 2}  # as the fits tell themselves
        assert stage.began() == [*NAMES[:2], "diagnose", "status"]


def test_a_line_runs_again_where_an_input_is_newer(cli: Cli, stage: Stage) -> None:
    words = ("grid", write_grid(stage.folder, TWO).name)
    cli(*words).expect(0)
    stage.notes()
    (document,) = Path("grid.toml.grid/laplace").glob("*kron*.json")
    document.write_text(json.dumps({**json.loads(document.read_text()), "inputs": [{"path": "data.npz"}]}))
    cli(*words).expect(0)
    assert stage.began() == []
    Path("data.npz").touch()
    cli(*words).expect(0)
    assert stage.began() == ["laplace-kron"]


def test_a_dry_run_prints_what_is_to_begin_and_writes_nothing(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO + LAST)
    lines = [job.line.pasted() for job in jobs_of(stage.folder, path.read_text())]
    done = cli("grid", path.name, "-n")
    assert (done.code, done.stdout.splitlines()) == (0, lines)
    assert "3 lines, 3 to run\n" in done.stderr
    assert not Path("grid.toml.grid").exists()
    cli("grid", path.name).expect(0)
    Path("made/laplace-kron").unlink()
    assert cli("grid", path.name, "--dry-run", "--json").json["lines"] == lines[1:]
    assert stage.began() == [*NAMES[:2], "diagnose"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_grid_and_says_how_to_go_on(cli: Cli, stage: Stage, number: signal.Signals) -> None:
    stage.acts(
        {"laplace-full": {"together": NAMES[:2], "tell": number, "pid": os.getpid()}, "laplace-kron": {"seconds": 20}}
    )
    path = write_grid(stage.folder, TWO + LAST)
    done = cli("grid", path.name, "--jobs", 2, "--json")
    assert (done.code, done.json["error"]["code"]) == (128 + number, "interrupted")
    assert "continue with: bnncli grid grid.toml --jobs 2" in done.stderr
    assert sorted(one["name"] for one in stage.notes() if one["what"] == "told") == NAMES[:2]  # and not killed
    stage.acts({})
    cli("grid", path.name, "--jobs", 2).expect(0)
    assert stage.began()[-1] == "diagnose"


def test_lines_that_do_not_end_are_killed_after_a_while(stage: Stage) -> None:
    line = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    Path("Makefile").write_text(f"all: ; @exec {sys.executable} -c {shlex.quote(line)}\n")
    process = subprocess.Popen(["make"], process_group=0, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"deaf\n"
        running.stop(process, grace=0.1)
        assert process.returncode == -signal.SIGKILL
        assert select.select([process.stdout], [], [], 20)[0]  # its end: no process is left to write


def test_a_second_grid_of_the_same_file_is_75(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name).expect(0)
    with open("grid.toml.grid/.lock", "r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = cli("grid", path.name).expect(75, "error: another bnncli process runs this grid (pid")
        assert "--wait" not in done.stderr
        cli("grid", path.name, "--dir", "other").expect(0)
    cli("grid", path.name).expect(0)


def test_what_cannot_be_written_is_told_before_anything_runs(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO)
    Path("file").touch()
    cli("grid", path.name, "--dir", "file/x").expect(73, "hint: choose another place with --dir")
    assert stage.began() == []


def test_without_make_two_ways_out_are_told(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_grid(stage.folder, TWO)
    monkeypatch.setenv("PATH", str(stage.folder))
    done = cli("grid", path.name).expect(69, "error: grid runs its lines with make, which is not installed")
    assert "hint: install make, or run the lines with Snakemake: bnncli grid FILE --snakefile" in done.stderr
    for words in ("--dry-run", "--makefile", "--snakefile"):
        cli("grid", path.name, words).expect(0)


def test_parallel_lines_share_cores_and_see_no_gpu(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_cores", lambda: 8)
    for name, value in {"MAKEFLAGS": "n", "MAKELEVEL": "3"}.items():  # of a make that runs the grid
        monkeypatch.setenv(name, value)
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name, "--jobs", 3).expect(0)
    seen = [one["environment"] for one in stage.notes()]
    assert seen == [{"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "MAKELEVEL": "1"}] * 4
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert running.choose_places(GridOptions(jobs=2), []) == (2, {"CUDA_VISIBLE_DEVICES": ""})
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    cli("grid", path.name, "--jobs", 2).expect(2, "grid starts its own processes: run it without torchrun")


def test_lines_share_out_the_named_gpus(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "device_name", lambda name: "cuda:0")
    monkeypatch.setattr(running, "torch", type("Torch", (), {"cuda": type("Cuda", (), {"device_count": lambda: 3})}))
    stage.acts({NAMES[0]: {"together": NAMES[:2]}, NAMES[1]: {"together": NAMES[:2]}})
    cli("grid", write_grid(stage.folder, TWO).name, "--devices", "2,cpu").expect(0)
    assert {one["environment"]["BNNCLI_GPUS"] for one in stage.notes()} == {"2,cpu"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b, GPU-c")
    assert running.choose_places(GridOptions(devices="2,0"), [])[1]["BNNCLI_GPUS"] == "GPU-c,GPU-a"
    with pytest.raises(DeviceError, match="no GPU 3: have 3, numbered from 0"):
        running.choose_places(GridOptions(devices="3"), [])


def test_a_gpu_that_is_not_there_is_69(cli: Cli, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "device_name", lambda name: "cpu")
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


ODD = """
checkpoints = ["it's one", "two"]
[[step]]
command = "fit-laplace"
plot = '$HOME #1 \\ {checkpoint} {0}.png'
[[step]]
command = "refine"
base = "{laplace}"
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("makefile", ["make", "-k", "-j", "2", "-f"]),
        pytest.param("snakefile", ["snakemake", "--cores", "2", "--snakefile"], marks=pytest.mark.libraries),
    ],
)
def test_what_is_printed_runs_every_line_as_it_is(cli: Cli, stage: Stage, kind: str, words: list[str]) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}")
    for name in ("it's one.bnn", "two.bnn", "a b"):
        (stage.folder / name).mkdir()
    path = write_grid(stage.folder, ODD)
    told = ("grid", path.name, "--dir", "a b/c")
    script = cli(*told, f"--{kind}").stdout
    Path("script").write_text(script)
    done = subprocess.run([*words, "script"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    jobs = jobs_of(stage.folder, ODD)
    begun = [one["words"] for one in stage.notes() if one["what"] == "began"]
    ending = ["--wait", "60", "--json", "--progress", "log"]
    assert sorted(begun) == sorted([*job.line.words()[1:], *ending] for job in jobs)
    assert cli(*told, f"--{kind}", "--json").json["script"] == script
    assert cli(*told, "--json").json["counts"] == {"up_to_date": 4}


def test_a_folder_that_make_cannot_name_is_told(cli: Cli, stage: Stage) -> None:
    path = write_grid(stage.folder, TWO)
    cli("grid", path.name, "--dir", "a#b").expect(2, "--dir: make needs a folder named by letters, digits")


CHAINS = """
[[step]]
command = "fit-laplace"
name = "g"
structure = "kron"
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
[[step]]
command = "diagnose"
posterior = ["{joined}"]
"""


def digests(run: Path) -> dict[str, str]:
    """Of the contents of all artifacts of a run."""
    folder = RunFolder.of(run, None, is_name=True)
    paths = [*folder.posteriors(), *folder.prediction_files(), *folder.metrics_files()]
    return {str(path.relative_to(folder.root)): read_header(path).content_digest for path in paths}


def by_hand(cli: Cli, path: Path) -> dict[str, str]:
    """What the lines of a grid leave in a copy of the run, one after the other."""
    copy = path.with_name("hand") / "small"
    shutil.copytree(path.with_name("small.bnn"), copy.with_name("small.bnn"))
    for line in cli("grid", path.name, "-n").stdout.splitlines():
        program, command, checkpoint, *words = shlex.split(line)
        assert (program, checkpoint) == ("bnncli", "small")
        cli(command, copy, *words).expect(0)
    return digests(copy)


def begin(path: Path) -> subprocess.Popen[str]:
    """A grid in a process of its own, two lines at a time."""
    argv = [sys.executable, "-m", "bnncli", "grid", path.name, "--jobs", "2"]
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


@pytest.mark.long
@pytest.mark.sure_scores
def test_after_kills_of_a_line_and_of_the_grid_it_leaves_what_its_lines_leave_by_hand(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_run.parent
    monkeypatch.chdir(folder)
    path = write_grid(folder, CHAINS)
    expected = by_hand(cli, path)
    process = begin(path)
    posteriors = folder / "small.bnn" / "posteriors"
    name = wait_for(lambda: [found.name.split(".")[1] for found in posteriors.glob(".hmc-*.resume.safetensors")])[0]
    os.kill(lines_running(folder)[name], signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 3, err
    assert "killed, probably because the system ran out of memory" in out
    process = begin(path)
    (log,) = (folder / "grid.toml.grid" / "hmc").glob(f"small.{name}.*.log")
    wait_for(lambda: "INFO hmc resuming" in log.read_text())
    process.kill()
    process.communicate()
    again = cli("grid", path.name, "--jobs", 2, "--json").expect(0)  # at once, while that line saves its state
    assert again.json["counts"] == {"up_to_date": 2, "done": 5}
    assert "failed" not in again.stderr  # as the make of the killed grid still says
    assert "interrupted by SIGTERM" in log.read_text()
    assert not lines_running(folder)
    assert digests(small_run) == expected
    assert not list(posteriors.glob(".*.resume.*"))
    assert cli("grid", path.name, "--json").json["counts"] == {"up_to_date": 7}
