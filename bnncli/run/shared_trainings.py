"""The states of trainings that workers share out, in the one resume state of their artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bnncli.run.resumable import Resumable
from bnncli.run.session import Run
from bnncli.system.workers import Team
from bnncli.training.loop import State
from bnncli.training.shared_out import Stored, by_number, numbered

if TYPE_CHECKING:
    from torch import Tensor


def say_who_works(run: Run, team: Team, num_batches: int) -> None:
    """Say it where some workers have nothing to train."""
    if team.size > num_batches:
        batches = f"{num_batches} {'batch' if num_batches == 1 else 'batches'}"
        run.console.info(
            f"{batches} of networks for {team.size} workers: {team.size - num_batches} of the workers wait"
        )


def begun_before(state: dict[str, Tensor] | None) -> dict[int, State]:
    """The state of each training that had begun, by its number; the whole one is emptied, so that each is in memory as long as it is used."""
    begun: dict[int, State] = {**by_number(state or {})}
    if state is not None:
        state.clear()
    return begun


def stored_in(resumable: Resumable, begun: dict[int, State], team: Team, num_trainings: int) -> Stored:
    """Where this worker's trainings go on from, and where the first one stores all; what others go on from is let go."""

    def store(states: Mapping[int, State]) -> None:
        resumable.save(numbered(states), True)

    own = {number: begun[number] for number in team.share(num_trainings) if number in begun}
    begun.clear()
    return Stored(own, resumable.is_due, store)
