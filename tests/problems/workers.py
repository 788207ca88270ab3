"""One command in several processes, as torchrun starts them; those that end well may be forked with all imports done."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kills import SERVER

from problems.command_line import Invocation


def free_port() -> int:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _environments(size: int) -> list[dict[str, str]]:
    """What torchrun says to each, by its rank; on one thread each."""
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def start_workers(
    size: int, words: Sequence[object], *, cwd: Path, elsewhere: Path | None = None
) -> list[subprocess.Popen[str]]:
    """The processes, by their rank, on the CPU.

    Args:
        cwd: where they run. elsewhere: where the last one does, if not there.
    """
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bnncli", *map(str, words)],
            env={name: value for name, value in environment.items() if name != "TORCH_CPP_LOG_LEVEL"},  # theirs to set
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=elsewhere if elsewhere is not None and rank == size - 1 else cwd,
        )
        for rank, environment in enumerate(_environments(size))
    ]


def ended(started: Sequence[subprocess.Popen[str]], *, seconds: float = 120) -> list[Invocation]:
    """What each gave back."""
    said = [one.communicate(timeout=seconds) for one in started]
    return [Invocation(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]


def run_processes(size: int, *words: object, cwd: Path) -> list[Invocation]:
    """Start them and wait for all: tests of how workers end need the interpreter's own end."""
    return ended(start_workers(size, words, cwd=cwd))


def run_workers(size: int, *words: object, cwd: Path, before: str = "", seconds: float = 120) -> list[Invocation]:
    """The same of workers that end well, forked: to import PyTorch takes each two to three CPU seconds.

    Args:
        before: code that each runs before the command.
    """
    places = [Path(tempfile.mkdtemp(prefix="worker-", dir=cwd)) for _ in range(size)]
    argv = [str(word) for word in words]
    started = [
        SERVER.Process(target=work, args=(argv, cwd, said, environment, before))
        for said, environment in zip(places, _environments(size), strict=True)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join(seconds)
        assert one.exitcode is not None
    return [
        Invocation(one.exitcode, (said / "out").read_text(), (said / "err").read_text())
        for one, said in zip(started, places, strict=True)
    ]


def work(argv: Sequence[str], folder: Path, said: Path, environment: dict[str, str], before: str) -> None:
    """In the child: the command, as the worker that the environment says it is."""
    import torch

    from bnncli.__main__ import main

    os.environ.clear()  # it is that of the process that all are forked from
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read when torch was imported
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["bnncli", *argv]
    exec(before, {})
    main()
