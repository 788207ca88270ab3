"""Fits that can be killed and continued: the resume state of one artifact, as a stage uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from bnncli.errors import Interrupted
from bnncli.stages._checkpoint import resume_command
from bnncli.stages._produce import Request
from bnncli.stages._run import Run
from bnncli.storage.resume import SaveClock, identity_of, read_state, remove_state, state_path, write_state


class Resumable:
    """The state of the work on one artifact.

    Args:
        run, request: what the work is for; a state of another request is refused.
        resume: whether a state that is there is to be continued.
        save_every: seconds between states; 0 saves every one that is offered.
    """

    def __init__(self, run: Run, request: Request, *, resume: bool, save_every: float) -> None:
        self._run, self._resume, self._clock = run, resume, SaveClock(save_every)
        self._path = state_path(request.target)
        self._identity = identity_of(
            request.params,
            algo_rev=request.algo_rev,
            seed=run.compute.seed,
            sources=request.sources,
            weights_digest=request.checkpoint["weights_digest"] if request.checkpoint else None,
        )

    def restore(self) -> dict[str, Tensor] | None:
        """The state to continue from, with --resume; without it a state that is there is reported and left."""
        console = self._run.console
        if not self._resume:
            if self._path.exists():
                console.info(f"{self._path}: an interrupted run can be continued with --resume; this one starts afresh")
            return None
        state = read_state(self._path, self._identity)
        console.info("resuming" if state else f"nothing to resume (no {self._path.name}): starting afresh")
        return state

    def save(self, state: Mapping[str, Tensor], is_last: bool) -> None:
        """Store the state when it is due, or when the work is about to end early."""
        if is_last or self._clock.is_due():
            write_state(self._path, state, self._identity)

    def remove(self) -> None:
        """The artifact is published: the state is not needed."""
        remove_state(self._path)

    @contextmanager
    def hint(self) -> Iterator[None]:
        """An interruption inside the block says how to go on."""
        try:
            yield
        except Interrupted as error:
            if self._path.exists():
                error.hint = f"continue with: {resume_command(self._run.argv)}"
            raise
