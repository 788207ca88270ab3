"""One command in several processes, as torchrun starts them, but with all imports done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kills import SERVER

from problems.command_line import Invocation


class Worker:
    """A process with the methods that tests use of subprocess.Popen's; what it says goes to files."""

    def __init__(self, words: Sequence[str], folder: Path, environment: dict[str, str], before: str) -> None:
        self._said = Path(tempfile.mkdtemp(prefix="worker-", dir=folder))
        self._process = SERVER.Process(target=work, args=(words, folder, self._said, environment, before))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative where a signal ended it; None before."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """A signal, where it has not ended."""
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it said on stdout and stderr until its end. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return (self._said / "out").read_text(), (self._said / "err").read_text()


def work(words: Sequence[str], folder: Path, said: Path, environment: dict[str, str], before: str) -> None:
    """In the child: the command, as the worker that the environment says it is."""
    import torch

    from bnncli.__main__ import main

    os.environ.clear()  # it is that of the process that all are forked from
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read when torch was imported
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["bnncli", *words]
    exec(before, {})
    main()


def free_port() -> int:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_workers(
    size: int, words: Sequence[object], *, cwd: Path, elsewhere: Path | None = None, before: str = ""
) -> list[Worker]:
    """The processes, by their rank, on the CPU and on one thread each.

    Args:
        cwd: where they run. elsewhere: where the last one does, if not there.
        before: code that each runs before the command.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    return [
        Worker(
            [str(word) for word in words],
            elsewhere if elsewhere is not None and rank == size - 1 else cwd,
            {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            before,
        )
        for rank in range(size)
    ]


def ended(started: Sequence[Worker], *, seconds: float = 120) -> list[Invocation]:
    """What each gave back."""
    said = [one.communicate(timeout=seconds) for one in started]
    return [Invocation(one.returncode or 0, *texts) for one, texts in zip(started, said, strict=True)]


def run_workers(size: int, *words: object, cwd: Path, before: str = "") -> list[Invocation]:
    """Start them and wait for all."""
    return ended(start_workers(size, words, cwd=cwd, before=before))
