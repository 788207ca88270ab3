"""Fits that are killed midway, each in a process of its own that begins with all imports done."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

# One process a session imports torch and is forked for every kill: it has no threads, and no GPU in use.
SERVER = multiprocessing.get_context("forkserver")
STAGES = [f"bnncli.stages.{name}" for name in ("refine", "fit_lbbnn", "hmc")]
SERVER.set_forkserver_preload(["pytest", "torch._dynamo", "bnncli.cli.execute", *STAGES])  # optimizers import _dynamo


def state_of(run: Path, name: str) -> Path:
    """The resume state of a posterior of a run."""
    return run.with_name(f"{run.name}.bnn") / "posteriors" / f".{name}.resume.safetensors"


def kill_midway(run: Path, name: str, command: str, *words: object, saves: int = 2) -> None:
    """A fit of `run` that is killed as soon as it has saved its state so many times."""
    argv = [command, str(run), *map(str, words), "--name", name, "--save-every", "0", "-q", "--threads", "1"]
    process = SERVER.Process(target=fit_until_killed, args=(argv, saves))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert state_of(run, name).exists()


def fit_until_killed(argv: list[str], saves: int) -> None:
    """In the child: the command, and SIGKILL when the state is saved the last time."""
    from bnncli.cli.execute import run_command_line
    from bnncli.stages import _resumable

    write, left = _resumable.write_state, [saves]

    def counted(*words: Any) -> None:
        write(*words)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _resumable.write_state = counted
    run_command_line(argv, io.StringIO())
