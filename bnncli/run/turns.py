"""Features of a split from several processes: each computes every so many batches, and the first has all, in the order of the rows.

Batches are those of one process, whatever the number of workers, and so are the features of each, on CPUs of one kind. The first
process runs the command. The others have opened the same network and data, compute their turns of the split that it names, and
send them as they are asked for: it holds one batch of another worker at a time, they hold the one that waits and the one that they
work on. What fails in a batch comes in that one's place, so that the first process meets it where it would by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bnncli.data.splits import InputSplit
from bnncli.errors import BnnError, DataError, Exit, machine_error
from bnncli.models.features import Extracted
from bnncli.system.workers import Sending, Team, of_worker


class Order(NamedTuple):
    """What the first process asks of the others: the batches of a split, each worker its turns.

    Attributes:
        split: its name. outline: its outline_digest, which must be everybody's.
        weights: digest of the network's, which must be everybody's.
        first_row, num_logits: see `extract`.
    """

    split: str
    outline: str
    weights: str | None
    first_row: int
    num_logits: int

    @classmethod
    def of(cls, split: InputSplit, record: Mapping[str, Any] | None, *, first_row: int, num_logits: int) -> Order:
        """The order for a split, with a network of this record."""
        return cls(split.name, split.outline_digest, weights_of(record), first_row, num_logits)

    def check(self, split: InputSplit, record: Mapping[str, Any] | None) -> None:
        """Pass where a worker has opened the same. Raises DataError where it has not."""
        hint = "give all workers the same files, and run the command again"
        if split.outline_digest != self.outline:
            raise DataError(
                f"{split.spec} has different examples here and on worker 0", code="input_replaced", hint=hint
            )
        if weights_of(record) != self.weights:
            raise DataError("the network has different weights here and on worker 0", code="input_replaced", hint=hint)


def weights_of(record: Mapping[str, Any] | None) -> str | None:
    """Digest of the weights that a record is of."""
    return None if record is None else str(record["weights_digest"])


def begin(crew: Team) -> None:
    """Tell the others that there is work, which takes the network."""
    crew.told_by_leader(True)


def end(crew: Team) -> None:
    """Tell the others that there is no more work."""
    crew.told_by_leader(None)


def has_begun(crew: Team) -> bool:
    """Whether there is work: what the first process tells, once it knows."""
    return crew.told_by_leader(None) is not None


def orders(crew: Team) -> Iterator[Order]:
    """What the first process asks for, one order after another, once work has begun."""
    while (order := crew.told_by_leader(None)) is not None:
        yield order


def in_turns(
    batches: Callable[..., Iterator[Extracted]], crew: Team, order: Order, num_batches: int
) -> Iterator[Extracted]:
    """All batches of an order, as the first process has them: its own, and those that the others send.

    Args:
        batches: gives those of some `turns`.
        num_batches: of all workers.

    Raises:
        BnnError: what one of them raises, the first in the order of the rows; a worker has ended.
    """
    crew.told_by_leader(order)
    own = batches(turns=slice(crew.rank, None, crew.size))
    for number in range(num_batches):
        turn = number % crew.size
        found = next(own) if turn == crew.rank else crew.receive(turn)
        if isinstance(found, BnnError):
            raise found
        yield found


def lend(batches: Callable[..., Iterator[Extracted]], crew: Team) -> None:
    """Compute this worker's turns of an order, and send them to the first process; what fails ends them, and is sent.

    Args:
        batches: as for `in_turns`.
    """
    sending: Sending | None = None
    for found in _or_error(batches(turns=slice(crew.rank, None, crew.size)), crew.rank):
        if sending is not None:
            sending.wait()
        sending = crew.send(found, 0)
    if sending is not None:
        sending.wait()


def _or_error(batches: Iterator[Extracted], rank: int) -> Iterator[Extracted | BnnError]:
    """The batches, and what an expected error ends them with. What the machine lacks names the worker."""
    try:
        yield from batches
    except Exception as error:
        known = error if isinstance(error, BnnError) else machine_error(error)
        if known is None:
            raise
        yield of_worker(rank, known) if known.exit in (Exit.DEVICE, Exit.IO) else known
