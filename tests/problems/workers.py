"""One command in several processes, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from problems.command_line import Invocation


def free_port() -> int:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_workers(
    size: int, words: Sequence[object], *, cwd: Path, elsewhere: Path | None = None, before: str | None = None
) -> list[subprocess.Popen[str]]:
    """The processes, by their rank, on the CPU and on one thread each.

    Args:
        cwd: where they run. elsewhere: where the last one does, if not there.
        before: code that each runs before the command.
    """
    program = ["-m", "bnncli"] if before is None else ["-c", f"{before}\nfrom bnncli.__main__ import main\nmain()"]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, *program, *map(str, words)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=elsewhere if elsewhere is not None and rank == size - 1 else cwd,
        )
        for rank in range(size)
    ]


def ended(started: Sequence[subprocess.Popen[str]], *, seconds: float = 120) -> list[Invocation]:
    """What each gave back."""
    said = [one.communicate(timeout=seconds) for one in started]
    return [Invocation(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]


def run_workers(size: int, *words: object, cwd: Path, before: str | None = None) -> list[Invocation]:
    """Start them and wait for all."""
    return ended(start_workers(size, words, cwd=cwd, before=before))
