"""What INT, TERM and HUP do: set a flag that long loops poll; the second one ends the process at once. A deadline ends loops likewise.

Nothing is saved from inside a handler: the loop that sees the flag raises Interrupted, and clean-up happens on the way out.
A long call into a library is polled from beside it (bnncli/interruptible.py), and left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from bnncli.errors import Interrupted
from bnncli.machine.team import STOPS as _received
from bnncli.machine.team import is_leader

_abandoned: list[threading.Thread] = []
_deadline: float | None = None  # of time.monotonic()


class BudgetSpent(Interrupted):
    """The time that was given is over: raised where long loops poll, as a signal is."""

    default_code = "budget_spent"

    def __init__(self) -> None:
        super().__init__(signal.SIGALRM, "the time budget is used up")


def install_handlers() -> None:
    """Catch INT, TERM and HUP; a HUP that was ignored on entry (nohup) stays ignored."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(name) is signal.SIG_IGN and name is signal.SIGHUP:
            continue
        with contextlib.suppress(ValueError):  # only the main thread may install handlers
            signal.signal(name, _handle)


def forget_received() -> None:
    """Start the next command of the same process as if no signal had come."""
    _received.clear()


@contextlib.contextmanager
def ending_at(deadline: float | None) -> Iterator[None]:
    """Within, whatever polls raises BudgetSpent once time.monotonic() is past the deadline; None for no limit."""
    global _deadline
    outer, _deadline = _deadline, deadline
    try:
        yield
    finally:
        _deadline = outer


def _handle(signum: int, frame: FrameType | None) -> None:
    if _received and is_leader():
        os._exit(128 + signum)
    _received.append(signum)


def has_come() -> bool:
    """Whether a signal has asked the command to stop."""
    return bool(_received)


def raise_if_interrupted(where: str = "") -> None:
    """Raise Interrupted when a signal has come, BudgetSpent past a deadline; `where` says how far the work was.

    Of workers that share a command the first alone stops: the others follow it to where that is, and end with it.
    """
    if is_leader():
        raise_if_received(where)
        if _deadline is not None and time.monotonic() > _deadline:
            raise BudgetSpent


def raise_if_received(where: str = "") -> None:
    """The same of any worker: for what tells the others that it stops."""
    if _received:
        name = signal.Signals(_received[0]).name
        raise Interrupted(_received[0], f"interrupted by {name}" + (f" at {where}" if where else ""))


def abandon(thread: threading.Thread) -> None:
    """A daemon thread that nobody waits for any more, in a call that cannot be stopped; an ordinary exit waits for it.

    An interpreter that is taken apart under such a call aborts. The command leaves by os._exit instead.
    """
    _abandoned.append(thread)
    atexit.register(thread.join)


def has_abandoned_work() -> bool:
    """Whether such a thread still runs."""
    return any(thread.is_alive() for thread in _abandoned)
