"""Handle INT, TERM and HUP.

The first signal sets a flag that long loops poll; the second one ends the process. `interruptible` runs one long call
into a numerical library so that a signal can still end the command.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from bnncli.errors import Interrupted, NumericError
from bnncli.lazy import torch
from bnncli.system.workers import is_leader

if TYPE_CHECKING:
    from torch import Tensor


_received: list[int] = []  # signals that asked this process to stop
_abandoned: list[threading.Thread] = []
_deadline: float | None = None  # of time.monotonic()


class BudgetSpent(Interrupted):
    """The time budget is used up: raised where long loops poll for signals."""

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


GRACE = 60.0  # seconds that processes have to save their states, before they are killed
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: a process that was just forked looks for nothing


def die_with(parent: int) -> None:
    """Make a new process stop when the process that began it is gone, however that went."""
    if _PRCTL is not None:  # Linux; elsewhere what a killed process began ends by itself
        _PRCTL(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # gone before it could be asked for
        os._exit(128 + signal.SIGTERM)


def forget_received() -> None:
    """Forget signals that were received, for the next command of the same process."""
    _received.clear()


@contextlib.contextmanager
def time_limit(deadline: float | None) -> Iterator[None]:
    """Make polling raise BudgetSpent inside the block once time.monotonic() is past the deadline; None for no limit."""
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


def is_interrupted() -> bool:
    """Return whether a signal has asked the command to stop."""
    return bool(_received)


def raise_if_interrupted(where: str = "") -> None:
    """Raise Interrupted after a signal, BudgetSpent past a deadline; `where` describes the progress of the work.

    Of workers that share a command only the leader stops: the others follow it to that point and end with it.
    """
    if is_leader():
        raise_if_received(where)
        if _deadline is not None and time.monotonic() > _deadline:
            raise BudgetSpent


def raise_if_received(where: str = "") -> None:
    """Raise likewise in any worker, for code that tells the others."""
    if _received:
        name = signal.Signals(_received[0]).name
        raise Interrupted(_received[0], f"interrupted by {name}" + (f" at {where}" if where else ""))


def abandon(thread: threading.Thread) -> None:
    """Register a daemon thread that nobody waits for any more, in a call that cannot be stopped; an ordinary exit waits for it.

    Finalising the interpreter under such a call aborts. The command leaves by os._exit instead.
    """
    _abandoned.append(thread)
    atexit.register(thread.join)


def has_abandoned_work() -> bool:
    """Return whether an abandoned thread still runs."""
    return any(thread.is_alive() for thread in _abandoned)


Result = TypeVar("Result")

_FEWEST_OPERATIONS = 1e9  # fewer take about a tenth of a second, which does not justify a thread
_POLL_SECONDS = 0.05


def interruptible(work: Callable[[], Result], *, operations: float, device: torch.device, name: str) -> Result:
    """Run `work` in a thread and return its result; raise Interrupted as soon as a signal comes.

    Args:
        work: a call that changes no shared state: after a signal it goes on in the background.
        operations: approximate number of floating-point operations.
        device: where it computes.
        name: description for the user who stopped it.

    Raises:
        Interrupted: a signal has come.
        Exception: what `work` raises.
    """
    if device.type != "cpu" or operations < _FEWEST_OPERATIONS:
        return work()
    raise_if_interrupted(name)
    num_threads, has_grad = torch.get_num_threads(), torch.is_grad_enabled()
    is_inference = torch.is_inference_mode_enabled()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            torch.set_num_threads(num_threads)  # these three settings are thread-local
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"bnncli: {name}", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if thread.is_alive():
                raise_if_interrupted(name)
    finally:
        if thread.is_alive():
            abandon(thread)
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        errors.clear()  # the error's traceback holds this list, and with it all that the work has allocated


def eigenvectors(matrix: Tensor, *, what: str) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (F,), ascending, and eigenvectors (F, F), in columns, of a symmetric matrix.

    Args:
        what: what it belongs to, in the plural, for messages.

    Raises:
        NumericError: it is not finite.
    """
    if not torch.isfinite(matrix).all():
        raise NumericError(f"{what} are not finite", hint="check the features")
    operations = 10 * float(matrix.shape[0]) ** 3
    values, vectors = interruptible(
        lambda: torch.linalg.eigh(matrix), operations=operations, device=matrix.device, name="eigenvectors"
    )
    return values, vectors
