"""What to do where a learning rate that was given is too high for a fit that can choose one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bnncli.errors import NumericError

LEAVE_OUT = "omit \0learning_rate\0 to let bnncli choose one"


@contextmanager
def chosen_instead(learning_rate: float | None) -> Iterator[None]:
    """A training inside the block that runs away says so, where a rate was given: no bound is known of one that is too high."""
    try:
        yield
    except NumericError as error:
        if learning_rate is not None:
            error.hint = LEAVE_OUT
        raise
