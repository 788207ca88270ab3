"""Commands in processes of their own that begin with all imports done: killed midway, stopped, or watched from outside."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

# One process a session imports torch and is forked for every kill: it has no threads, and no GPU in use.
SERVER = multiprocessing.get_context("forkserver")
COMMANDS = [f"bnncli.commands.{name}" for name in ("refine", "fit_lbbnn", "fit_laplace.last_layer", "hmc", "predict")]
COMMANDS += ["bnncli.commands.extract_features.network"]
# Scores and levels import sklearn and scipy.
LATE = ["torch", "sklearn.metrics", "scipy.stats", "scipy.optimize"]
SERVER.set_forkserver_preload(["pytest", "bnncli.cli.execute", *LATE, *COMMANDS])


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
    from bnncli.session import produce

    write, left = produce.write_state, [saves]

    def counted(*words: Any) -> None:
        write(*words)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    produce.write_state = counted
    run_command_line(argv, io.StringIO())


def start(work: Any, *words: Any) -> Any:
    """A process that calls `work(*words)`; `work` is a function of this module."""
    process = SERVER.Process(target=work, args=words)
    process.start()
    return process


def run_to_files(argv: list[str], folder: Path) -> None:
    """In the child: the installed command in `folder`, its stdout and stderr in the files `out` and `err` there."""
    from bnncli.__main__ import main

    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["bnncli", *argv]
    main()


def run_python(words: list[str]) -> None:
    """In the child: what `python -c CODE ...` or `python -m MODULE ...` does, without the imports."""
    sys.argv = words[1:]
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def run_stopped_once(argv: list[str]) -> None:
    """In the child: a fit that stops itself where it saves its state first; SIGCONT lets it go on."""
    from bnncli.cli.execute import run_command_line
    from bnncli.session import produce

    write = produce.write_state

    def stop(*words: Any) -> None:
        produce.write_state = write
        os.kill(os.getpid(), signal.SIGSTOP)
        write(*words)

    produce.write_state = stop
    sys.exit(run_command_line(argv, io.StringIO()))


def is_stopped(pid: int) -> bool:
    """Whether a process waits for SIGCONT."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def run_killed_at(argv: list[str], module: str, name: str, after: int = 0) -> None:
    """In the child: the command, killed where it calls a function of a module, after so many calls that went well."""
    from bnncli.cli.execute import run_command_line

    home, left = importlib.import_module(module), [after]
    plain = getattr(home, name)

    def call(*words: Any, **names: Any) -> Any:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return plain(*words, **names)

    setattr(home, name, call)
    run_command_line(argv, io.StringIO())


def run_signalled_in(argv: list[str], folder: Path, name: str) -> None:
    """In the child: as run_to_files, with a SIGTERM where torch.linalg's function is called; the file `signalled` says when."""
    import torch

    plain = getattr(torch.linalg, name)

    def signalled(*words: Any) -> Any:
        (folder / "signalled").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*words)

    setattr(torch.linalg, name, signalled)
    run_to_files(argv, folder)
