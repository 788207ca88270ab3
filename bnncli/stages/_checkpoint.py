"""Where a running sampler is kept between transitions, so that --resume can continue it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bnncli.console import Console
from bnncli.storage.draw_file import DrawFile
from bnncli.storage.resume import SaveClock, read_state, remove_state, state_path, write_state


class FileCheckpoint:
    """The resume state of one artifact, with its raw draws.

    Args:
        artifact: what the run makes.
        identity: what the state belongs to.
        store: the run's draws.
        save_every: seconds between states.
        resume: whether a state that is there is to be continued.
    """

    def __init__(
        self,
        artifact: Path,
        identity: dict[str, Any],
        *,
        store: DrawFile,
        save_every: float,
        resume: bool,
        console: Console,
    ) -> None:
        self._path, self._identity, self._store = state_path(artifact), identity, store
        self._clock, self._resume, self._console = SaveClock(save_every), resume, console

    def restore(self) -> dict[str, Tensor] | None:
        """The state to continue from, with --resume; without it a state that is there is reported."""
        if not self._resume:
            if self._path.exists():
                self._console.info(
                    f"{self._path}: an interrupted run can be continued with --resume; this one starts afresh"
                )
            return None
        tensors = read_state(self._path, self._identity)
        if tensors is None:
            self._console.info(f"nothing to resume (no {self._path.name}): starting afresh")
            return None
        self._store.continue_from(len(tensors["num_steps"]))
        self._console.info(f"resuming after {int(tensors['num_done'])} transitions")
        return tensors

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Store the state when it is due, or when the run is about to end early; draws first."""
        if is_last or self._clock.is_due():
            self._store.flush()
            write_state(self._path, tensors(), self._identity)

    def close(self) -> None:
        """No more draws come: keep their file as long as a state needs it, and not otherwise."""
        self._store.close()
        if not self._path.exists():
            self._store.remove()

    def remove(self) -> None:
        """The run is complete: neither state nor raw draws are needed."""
        remove_state(self._path)
        self._store.remove()


def resume_command(argv: Sequence[str]) -> str:
    """The command that continues an interrupted one."""
    return shlex.join(["bnncli", *argv, *([] if "--resume" in argv else ["--resume"])])
