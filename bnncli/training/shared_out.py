"""Trainings that are apart from each other, shared out among the workers of a command.

Each worker does its own, one after the other, with random streams that belong to the trainings. After every round of one all
workers meet: they say how far they are and whether one of them has to end, and from time to time the first is given the states of
all, to store them. Who has no training left goes on meeting until nobody has any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from bnncli.errors import BnnError, Exit, Interrupted, machine_error
from bnncli.lazy import torch
from bnncli.progress import Progress, Task
from bnncli.system.signals import raise_if_received
from bnncli.system.workers import Team
from bnncli.training.loop import State

if TYPE_CHECKING:
    from torch import Tensor

LOST = "worker_lost"  # what ends a worker that has nothing to say of it


class Stored(NamedTuple):
    """Where states lie between two runs of a command.

    Args:
        states: of this worker's trainings that an earlier run had begun, by their numbers; new ones take their places.
        is_due: whether the states are to be stored now; the first worker is asked.
        store: stores them, on the first worker.
    """

    states: dict[int, State]
    is_due: Callable[[], bool]
    store: Callable[[Mapping[int, State]], object]


def share_out(
    team: Team,
    labels: Sequence[str],
    work: Callable[[int, Seat], Mapping[str, Tensor]],
    *,
    what: str,
    num_steps: int,
    progress: Progress,
    stored: Stored | None = None,
) -> list[dict[str, Tensor]]:
    """What each training gave, in their order, on the CPU: on every worker the same.

    Args:
        labels: of the trainings, for people.
        work: does the one of that number, and tells its place of every step and round.
        what: the name of all of them. num_steps: of each.
        progress: advanced once a step of any of them.
        stored: what to go on from; nothing is stored without it.

    Raises:
        BnnError: what ends one worker ends all of them; the first one says it.
    """
    task = progress.task(what, len(labels) * num_steps)
    meetings = _Meetings(team, task, warn=progress.warn, stored=stored)
    own: dict[str, Tensor] = {}
    try:
        for number in team.share(len(labels)):
            own |= numbered({number: work(number, Seat(meetings, number, labels[number]))})
        while not meetings.meet(is_done=True):
            pass
    except (BnnError, OSError, MemoryError, RuntimeError) as error:
        meetings.fail(error)
    found = by_number(*team.gather_named(own))
    meetings.pass_warnings_on()
    return [found[number] for number in range(len(labels))]


class Seat:
    """Where one of the trainings reports, as any to a Progress, and what it goes on from.

    Attributes:
        state: None for a fresh start.
    """

    def __init__(self, meetings: _Meetings, number: int, label: str) -> None:
        self._meetings, self._number, self._label = meetings, number, label
        self.state = meetings.states.get(number)

    def save(self, state: State, is_last: bool) -> None:
        """Keep the state of a round, and meet the others. One that is to end early has it kept already."""
        if not is_last:
            self._meetings.states[self._number] = state
            self._meetings.meet()

    def task(self, name: str, total: int) -> Seat:
        """The training, whose steps are among those of all."""
        return self

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Steps done. Raises Interrupted after a signal, whichever worker it came to."""
        self._meetings.advance(amount, f"{self._label}, {note}" if note else "")
        raise_if_received()

    def warn(self, text: str) -> None:
        """Something that the user should know, whichever worker it is of."""
        self._meetings.warn(text)


class _Meetings:
    """What this worker says of its own trainings, and hears of the others'.

    Attributes:
        states: of this worker's trainings as far as they have begun.
    """

    def __init__(self, team: Team, task: Task, *, warn: Callable[[str], None], stored: Stored | None) -> None:
        self._team, self._task, self._warn, self._stored = team, task, warn, stored
        self.states: dict[int, State] = {} if stored is None else stored.states
        self._num_unsaid = 0  # steps since the last meeting
        self._warnings: list[str] = []
        self._is_over = False

    def advance(self, amount: int, note: str) -> None:
        self._num_unsaid += amount
        self._task.advance(amount, note=note)

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._warn(text)

    def meet(self, *, is_done: bool = False, error: BnnError | None = None) -> bool:
        """Whether all workers are done. Raises what has ended one of them."""
        team, own = self._team, self._num_unsaid
        is_due = team.is_leader and error is None and self._stored is not None and self._stored.is_due()
        said = torch.tensor([own, is_done, error is not None, is_due])
        heard = torch.stack(team.gather(said))
        self._num_unsaid = 0
        if (failed := heard[:, 2].nonzero().flatten().tolist()) != []:
            self._end(failed[0], error)
        if heard[0, 3]:
            self._store()
        if others := int(heard[:, 0].sum()) - own:
            self._task.advance(others)
        return bool(heard[:, 1].all())

    def fail(self, error: Exception) -> NoReturn:
        """Raise what ends this worker, when the others know, or what has ended another before."""
        known = error if isinstance(error, BnnError) else machine_error(error)
        if known is None or known.code == LOST or self._is_over:
            raise error
        self.meet(error=known)
        raise known

    def _end(self, rank: int, error: BnnError | None) -> NoReturn:
        """Raise the error of that worker. The first one says it, and has the states of all where they were interrupted."""
        self._is_over = True
        told: BnnError = self._team.told_by(rank, error)
        if isinstance(told, Interrupted):
            self._store()
        if not self._team.is_leader:
            told.code = LOST
        elif rank > 0 and told.exit in (Exit.DEVICE, Exit.IO):
            told.message = f"worker {rank}: {told.message}"
        raise told

    def _store(self) -> None:
        if self._stored is None:
            return
        given = self._team.gather_named(numbered(self.states), to_all=False)
        if any(given):
            self._stored.store(by_number(*given))

    def pass_warnings_on(self) -> None:
        """Every worker has the warnings of all: the first shows them, once each."""
        for rank in range(self._team.size):
            for text in self._team.told_by(rank, self._warnings):
                self._warn(text)


def numbered(trainings: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of several trainings under names that have their numbers."""
    return {f"{number}/{name}": tensor for number, one in trainings.items() for name, tensor in one.items()}


def by_number(*parts: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """The inverse of `numbered`, of one or several of its results."""
    found: dict[int, dict[str, Tensor]] = {}
    for part in parts:
        for key, tensor in part.items():
            number, _, name = key.partition("/")
            found.setdefault(int(number), {})[name] = tensor
    return found
