"""How a part runs bnncli's commands: in a folder of its own, timed, and once only.

A command that is up to date keeps the cost of the run that made its artifacts (`costs.json` in the part's folder), so
that a script that was stopped goes on where it was, and its tables still say what everything cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class LeftOut(Exception):
    """A part cannot be run here: what it says is printed in its place."""


class Failed(Exception):
    """A command failed: its words, exit code and last lines."""


class Cost(NamedTuple):
    """What a process took; other work on the machine lengthens the first alone."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


@dataclass(frozen=True)
class Done:
    """A command that ran.

    Args:
        document: what --json printed.
        cost: wall-clock seconds, CPU seconds, and the process's largest resident size in MiB, of the run that computed.
        errors: what it said on stderr this time.
    """

    document: dict[str, Any]
    cost: Cost
    errors: str

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the artifact."""
        found: dict[str, Any] = self.document.get("metrics") or {}
        return found


@dataclass(frozen=True)
class Folder:
    """The folder in which a part's commands run; the run's name is their first argument."""

    path: Path
    run: str

    def bnncli(self, command: str, *words: object) -> Done:
        """`bnncli COMMAND RUN WORDS --json` in the folder. Raises Failed when its exit code is none of 0 and 3 (a verdict)."""
        call = [command, self.run, *map(str, words)]
        done, cost = _timed([sys.executable, "-m", "bnncli", *call, "--json", "--progress", "none"], self.path)
        print(
            f"  bnncli {' '.join(call)}  # {cost.seconds:.1f} s, CPU {cost.cpu_seconds:.1f} s, {cost.peak_mib:.0f} MiB",
            file=sys.stderr,
            flush=True,
        )
        if done.returncode not in (0, 3):
            raise Failed(f"bnncli {' '.join(call)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        document = json.loads(done.stdout)
        kept = self.path / "costs.json"
        known = json.loads(kept.read_text()) if kept.exists() else {}
        key = " ".join(call)
        if document.get("action") == "up_to_date" and key in known:
            cost = Cost(*known[key])
        else:
            known[key] = cost
            kept.write_text(json.dumps(known, indent=1) + "\n")
        return Done(document, cost, done.stderr)

    def said(self, command: str, *words: object) -> list[str]:
        """The lines that `bnncli COMMAND RUN WORDS` prints for people."""
        call = [sys.executable, "-m", "bnncli", command, self.run, *map(str, words), "--progress", "none"]
        done, cost = _timed(call, self.path)
        print(f"  bnncli {' '.join(call[3:])}  # {cost.seconds:.1f} s", file=sys.stderr, flush=True)
        if done.returncode not in (0, 3):
            raise Failed(f"bnncli {' '.join(call[3:])} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout.splitlines()


@dataclass(frozen=True)
class Bench:
    """What a part is given.

    Args:
        data_folder: npz files (x, y), named as `fmnist-train.npz`.
        checkpoint_folder: trained networks, or None.
        out: where folders of the parts are made.
        is_quick: a little of everything, to try the script.
    """

    data_folder: Path
    checkpoint_folder: Path | None
    out: Path
    is_quick: bool

    def data(self, name: str) -> Path:
        """The file of that name among the data. Raises LeftOut when there is none."""
        return _existing(self.data_folder / name, "--data")

    def checkpoint(self, name: str) -> Path:
        """The trained network of that name, a file or a folder. Raises LeftOut when there is none."""
        if self.checkpoint_folder is None:
            raise LeftOut(f"needs --checkpoints, a folder with {name}")
        return _existing(self.checkpoint_folder / name, "--checkpoints")

    def folder(self, part: str, run: str) -> Folder:
        """A part's folder, made where it is not there."""
        path = self.out / part
        path.mkdir(parents=True, exist_ok=True)
        return Folder(path, run)

    def rows(self, whole: int, few: int = 400) -> int:
        """How many rows of a split of `whole` to read."""
        return min(whole, few) if self.is_quick else whole


def _existing(path: Path, flag: str) -> Path:
    if not path.exists():
        raise LeftOut(f"{path.name} is not in the folder of {flag}")
    return path.resolve()


def _timed(call: list[str], folder: Path) -> tuple[subprocess.CompletedProcess[str], Cost]:
    """What ran, and what it cost."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(call, stdout=out, stderr=errors, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)  # or Popen waits for it again
        seconds = time.perf_counter() - start
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read())
    cost = Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
    return subprocess.CompletedProcess(call, code, *texts), cost
