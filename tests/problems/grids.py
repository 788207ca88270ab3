"""Grids for tests: files of them, and a stand-in for bnncli whose lines take no time and say what they saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bnncli.commands.grid.plan import Job, plan_jobs, read_grid

# What a line does: it notes that it began, does what `acts.json` says of it, leaves a file, notes that it ended, prints a document.
_LINE = """
import json, os, signal, sys, time
from pathlib import Path

words = sys.argv[1:]
name = words[words.index("--name") + 1] if "--name" in words else words[0]
act = json.loads(Path("acts.json").read_text()).get(name, {})


def note(what):
    with open("notes", "a") as file:
        names = [one for one in os.environ if one in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "BNNCLI_GPUS", "MAKELEVEL")]
        seen = {one: os.environ[one] for one in names}
        file.write(json.dumps({"name": name, "what": what, "words": words, "environment": seen, "pid": os.getpid()}) + "\\n")


def finish(code, **said):
    print(json.dumps(said))
    note("ended")
    sys.exit(code)


def told(number, frame):
    note("told")
    finish(128 + number, ok=False, error={"code": "interrupted", "message": "interrupted", "hint": None})


signal.signal(signal.SIGTERM, told)
note("began")
print("said by", name, file=sys.stderr)
if "kill" in act:
    os.kill(os.getpid(), act["kill"])
until = time.monotonic() + 20
while "together" in act and time.monotonic() < until:  # until others have begun
    notes = [json.loads(line) for line in Path("notes").read_text().splitlines()]
    if {one["name"] for one in notes} >= set(act["together"]):
        break
    time.sleep(0.005)
if "tell" in act:  # the grid
    os.kill(act["pid"], act["tell"])
    time.sleep(act.get("seconds", 20))
elif "seconds" in act:
    time.sleep(act["seconds"])
if "exit" in act:
    finish(act["exit"], ok=False, error={"code": "x", "message": f"{name} went wrong", "hint": "bnncli mend it"})
if words[0] in ("diagnose", "compare", "status"):
    finish(0, ok=True, warnings=[])
made = Path("made", name)
action = "up_to_date" if made.exists() else "computed"
made.parent.mkdir(exist_ok=True)
made.touch()
finish(0, ok=True, action=action, outputs=[{"path": str(made)}], warnings=["oh"] * act.get("warnings", 0))
"""


class Stage:
    """A folder with a grid, whose lines are the stand-in's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "line.py").write_text(_LINE)
        self.acts({})

    @property
    def program(self) -> list[str]:
        """The words that run the stand-in."""
        return [sys.executable, "-I", "-S", str(self.folder / "line.py")]

    def acts(self, acts: dict[str, Any]) -> None:
        """What lines do, by the names of their results, or their commands."""
        (self.folder / "acts.json").write_text(json.dumps(acts))

    def notes(self) -> list[dict[str, Any]]:
        """What lines have noted since the last time."""
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    def began(self) -> list[str]:
        """Names of the lines that have begun since the last time, in their order."""
        return [one["name"] for one in self.notes() if one["what"] == "began"]


def write_grid(folder: Path, text: str) -> Path:
    """The file of a grid on the run `small` where it says nothing else, made in the folder with that run."""
    (folder / "small.bnn").mkdir(exist_ok=True)
    whole = text if "checkpoints" in text else f'checkpoints = "small"\n{text}'
    path = folder / "grid.toml"
    path.write_text(whole)
    return path


def jobs_of(folder: Path, text: str) -> list[Job]:
    """The lines of a grid; paths begin in the folder where the test is."""
    return plan_jobs(read_grid(write_grid(folder, text)))


def lines_of(folder: Path, text: str) -> list[str]:
    """The same, as they are pasted, without `bnncli`."""
    return [job.line.pasted().removeprefix("bnncli ") for job in jobs_of(folder, text)]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A folder where grids run the stand-in."""
    from bnncli.commands.grid import running

    found = Stage(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(running, "program", lambda: found.program)
    monkeypatch.setattr(running, "_POLL", 0.005)
    return found
