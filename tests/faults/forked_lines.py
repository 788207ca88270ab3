"""Lines of a grid as processes forked from the grid's own, which has done all imports: each would take seconds for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from bnncli.cli.execute import run_command_line
from bnncli.commands.grid import running
from faults.shim import Shim

_MAX_DESCRIPTOR = 1024


def fork_lines() -> None:
    """From now on grids of this process fork their lines."""
    running.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


class _Forked:
    """What a grid uses of subprocess.Popen."""

    def __init__(
        self, words: Sequence[str], *, stdin: int, stdout: Any, stderr: Any, env: dict[str, str], process_group: int,
        preexec_fn: Callable[[], None],
    ) -> None:  # fmt: skip
        assert stdin == subprocess.DEVNULL
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, process_group)
                preexec_fn()
                os.environ.clear()
                os.environ.update(env)
                for number, file in ((1, stdout), (2, stderr)):
                    os.dup2(file.fileno(), number)
                os._exit(_run(list(words[words.index("bnncli") + 1 :])))
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a line", timeout)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _run(argv: list[str]) -> int:
    """In the child: the command, on which no fault is played and which holds none of the grid's files."""
    Shim.rests = True
    os.closerange(3, _MAX_DESCRIPTOR)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with (
        open(1, "w", encoding="utf-8", closefd=False) as results,
        open(2, "w", encoding="utf-8", closefd=False) as said,
    ):
        sys.stderr = said
        return run_command_line(argv, results)
