"""Fits that can be killed and continued: the resume state of one artifact, as a stage uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from bnncli.artifacts.resume import DrawFile, SaveClock, identity_of, read_state, remove_state, state_path, write_state
from bnncli.errors import Interrupted, WriteError
from bnncli.lazy import torch
from bnncli.run.produce import Request
from bnncli.run.session import Run
from bnncli.system.workers import rank_and_size, team

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "Mapping[str, Tensor]"


_DIGEST = "draws_digest"  # of the draws in the file beside the state


class Resumable:
    """The state of the work on one artifact.

    Args:
        run, request: what the work is for; a state of another request is refused.
        resume: whether a state that is there is to be continued.
        save_every: seconds between states; 0 saves every one that is offered.
        also: what else must be as it was, by name: choices that the machine made and not the request.
    """

    def __init__(
        self, run: Run, request: Request, *, resume: bool, save_every: float, also: Mapping[str, Any] | None = None
    ) -> None:
        self._run, self._resume, self._clock = run, resume, SaveClock(save_every)
        self._path = state_path(request.target)
        identity = identity_of(
            request.params,
            algo_rev=request.algo_rev,
            seed=run.compute.seed,
            sources=request.sources,
            weights_digest=request.checkpoint["weights_digest"] if request.checkpoint else None,
        )
        self._identity = {**identity, **(also or {})}
        self._is_ours = False  # whether the state is of this run, and not one that nobody asked to continue
        self._newest: Callable[[], State] | None = (
            None  # that was offered, for an interruption after the loop that offers them
        )

    @property
    def is_stored(self) -> bool:
        """Whether there is a state to continue from."""
        return self._path.exists()

    def restore(self, where: Callable[[State], str] = lambda state: "") -> dict[str, Tensor] | None:
        """The state to continue from, with --resume; without it a state that is there is reported and left.

        Args:
            where: says how far the work is, for people.
        """
        console = self._run.console
        if not self._resume:
            if self.is_stored:
                console.info(
                    f"{self._path}: found an interrupted run; starting from scratch (\0resume\0 would continue it)"
                )
            return None
        state = read_state(self._path, self._identity)
        if state is None:
            console.info(f"nothing to resume (no {self._path.name}); starting from scratch")
        else:
            console.info(f"resuming{where(state)}")
            self._is_ours = True
        return state

    def offer(self, state: Callable[[], State], *, is_last: bool = False) -> None:
        """Make the state and store it when it is due, or when the work is about to end early."""
        self._newest = None if is_last else state
        if is_last or self.is_due():
            write_state(self._path, state(), self._identity)
            self._is_ours = True

    def is_due(self) -> bool:
        """Whether a state is to be stored now; the clock starts again where it is."""
        return self._clock.is_due()

    def save(self, state: State, is_last: bool) -> None:
        """The same for a state that is made already."""
        self.offer(lambda: state, is_last=is_last)

    def remove(self) -> None:
        """The artifact is published: the state is not needed."""
        remove_state(self._path)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around the publication of the artifact, after which the state is not needed."""
        yield
        self.remove()

    @contextmanager
    def hint(self) -> Iterator[None]:
        """An interruption inside the block, or a failure to write, says how to go on; the newest state is stored first."""
        try:
            yield
        except (Interrupted, WriteError) as error:
            if isinstance(error, Interrupted) and self._newest is not None:
                self.offer(self._newest, is_last=True)
            if self._is_ours and self.is_stored:
                first = f"{error.hint}, then " if error.hint else ""
                error.hint = f"{first}continue with: {_started()}{self._run.line.having('resume', True).pasted()}"
            raise


def _started() -> str:
    """What starts a command that torchrun has started again."""
    others = team()
    return "" if others is None or rank_and_size() is None else f"torchrun --nproc-per-node {others.num_here} -m "


def resumable_training(
    run: Run, request: Request, *, resume: bool, save_every: float, also: Mapping[str, Any] | None = None
) -> Resumable:
    """The state of a training (bnncli.training.loop), which goes on where its random state is of one kind: on a CPU or a GPU."""
    also = {"device": run.device.type, **(also or {})}
    return Resumable(run, request, resume=resume, save_every=save_every, also=also)


class ResumableDraws:
    """The state of a sampler, whose draws lie in a file of their own.

    Args:
        resumable: the state.
        store: the draws; on disk before the state that counts them.
    """

    def __init__(self, resumable: Resumable, store: DrawFile) -> None:
        self._resumable, self._store = resumable, store

    def restore(self) -> dict[str, Tensor] | None:
        """The state to continue from, the store cut to its draws; None to start afresh."""
        state = self._resumable.restore(lambda state: f" after {int(state['num_done'])} transitions")
        if state is not None:
            digest = bytes(state.pop(_DIGEST, torch.empty(0, dtype=torch.uint8)).tolist())
            self._store.continue_from(len(state["num_steps"]), digest)
        return state

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Store the state when it is due, or when the run is about to end early; draws first."""

        def state() -> State:
            self._store.flush()
            return {**tensors(), _DIGEST: torch.frombuffer(bytearray(self._store.digest), dtype=torch.uint8)}

        self._resumable.offer(state, is_last=is_last)

    def close(self) -> None:
        """No more draws come: keep their file as long as a state needs it, and not otherwise."""
        self._store.close()
        if not self._resumable.is_stored:
            self._store.remove()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around the publication of the complete run, after which neither state nor raw draws are needed."""
        with self._resumable.hint():
            yield
        self._resumable.remove()
        self._store.remove()
