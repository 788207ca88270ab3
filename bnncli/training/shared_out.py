"""Independent trainings, shared among the workers of a command.

Each worker runs its own trainings one after the other, with random streams that belong to the trainings. After every
round of a training all workers meet: they exchange progress and errors, and from time to time the first worker receives
all states to store. A worker without trainings left keeps meeting until all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from bnncli.errors import BnnError, Exit, Interrupted, machine_error
from bnncli.lazy import torch
from bnncli.progress import Progress, Task
from bnncli.system.signals import raise_if_received
from bnncli.system.workers import LOST, Team
from bnncli.training.loop import State

if TYPE_CHECKING:
    from torch import Tensor


class StoredStates(NamedTuple):
    """Stored states, for resuming.

    Args:
        states: of this worker's trainings begun in an earlier run, by number; replaced by newer ones.
        is_due: returns whether to store states now; asked on the first worker.
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
    stored: StoredStates | None = None,
) -> list[dict[str, Tensor]]:
    """Return the result of each training, in order, on the CPU, the same on every worker.

    Args:
        labels: of the trainings, for people.
        work: runs the training of a number, reporting steps and rounds to its seat.
        what: name of all of them.
        num_steps: per training.
        progress: advances once per step of any of them.
        stored: states to continue from; nothing is stored without it.

    Raises:
        BnnError: the error of one worker ends all; the first one raises it.
    """
    task = progress.task(what, len(labels) * num_steps)
    meetings = _Meetings(team, task, warn=progress.warn, stored=stored)
    own: dict[str, Tensor] = {}
    try:
        for number in team.share(len(labels)):
            own |= number_tensors({number: work(number, Seat(meetings, number, labels[number]))})
        while not meetings.meet(is_done=True):
            pass
    except (BnnError, OSError, MemoryError, RuntimeError) as error:
        meetings.fail(error)
    found = split_by_number(*team.gather_named(own))
    meetings.pass_warnings_on()
    return [found[number] for number in range(len(labels))]


class Seat:
    """The progress report of one training, and the state it continues from.

    Attributes:
        state: None to start from the beginning.
    """

    def __init__(self, meetings: _Meetings, number: int, label: str) -> None:
        self._meetings, self._number, self._label = meetings, number, label
        self.state = meetings.states.get(number)

    def save(self, state: State, is_last: bool) -> None:
        """Keep the state of a round, and meet the others. On early end it has already been kept."""
        if not is_last:
            self._meetings.states[self._number] = state
            self._meetings.meet()

    def task(self, name: str, total: int) -> Seat:
        """Return this seat: the training's steps count among those of all."""
        return self

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Report steps. Raises Interrupted after a signal to any worker."""
        self._meetings.advance(amount, f"{self._label}, {note}" if note else "")
        raise_if_received()

    def warn(self, text: str) -> None:
        """Pass a warning to the user, from any worker."""
        self._meetings.warn(text)


class _Meetings:
    """Exchanges the progress of this worker's trainings with the others.

    Attributes:
        states: of this worker's trainings begun so far.
    """

    def __init__(self, team: Team, task: Task, *, warn: Callable[[str], None], stored: StoredStates | None) -> None:
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
        """Return whether all workers are done. Raises the error of any of them."""
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
        """Raise this worker's error after informing the others, or an earlier error of another."""
        known = error if isinstance(error, BnnError) else machine_error(error)
        if known is None or known.code == LOST or self._is_over:
            raise error
        self.meet(error=known)
        raise known

    def _end(self, rank: int, error: BnnError | None) -> NoReturn:
        """Raise that worker's error; the first worker reports it, with all states on interruption."""
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
        given = self._team.gather_named(number_tensors(self.states), to_all=False)
        if any(given):
            self._stored.store(split_by_number(*given))

    def pass_warnings_on(self) -> None:
        """Collect the warnings of all workers; the first shows each once."""
        for texts in self._team.gather_objects(self._warnings):
            for text in texts:
                self._warn(text)


def number_tensors(trainings: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of several trainings under numbered names."""
    return {f"{number}/{name}": tensor for number, one in trainings.items() for name, tensor in one.items()}


def split_by_number(*parts: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Invert `numbered`, for one or several of its results."""
    found: dict[int, dict[str, Tensor]] = {}
    for part in parts:
        for key, tensor in part.items():
            number, _, name = key.partition("/")
            found.setdefault(int(number), {})[name] = tensor
    return found
