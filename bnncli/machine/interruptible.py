"""One long call into a numerical library, which signals can end.

Python's signal handlers run between two steps of the main thread, and a factorisation is one step, of minutes perhaps. Here
it runs in a thread of its own, and the main thread waits and polls: LAPACK lets go of the interpreter's lock, the bits
are those of a plain call. What was begun cannot be stopped: it is left behind, and the process that is told to end does
not wait for it (see signals.abandon). Only on the CPU: a GPU's work is queued on the calling thread's stream, and a long
one ends where its result is first read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.machine import signals

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")

_FEWEST_OPERATIONS = 1e9  # less takes a tenth of a second or so, and a thread is not worth its start
_POLL_SECONDS = 0.05


def interruptible(work: Callable[[], Result], *, operations: float, device: torch.device, name: str) -> Result:
    """What `work` returns; raises Interrupted as soon as a signal comes.

    Args:
        work: a call that changes nothing which anything else uses: when a signal comes it goes on in the background.
        operations: about how many it takes, floating-point ones.
        device: where it computes.
        name: what it is, for the person who stopped it.

    Raises:
        Interrupted: a signal has come.
        Exception: what `work` raises.
    """
    if device.type != "cpu" or operations < _FEWEST_OPERATIONS:
        return work()
    signals.raise_if_interrupted(name)
    num_threads, has_grad = torch.get_num_threads(), torch.is_grad_enabled()
    is_inference = torch.is_inference_mode_enabled()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            torch.set_num_threads(num_threads)  # these three are each thread's own
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
                signals.raise_if_interrupted(name)
    finally:
        if thread.is_alive():
            signals.abandon(thread)
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        errors.clear()  # or the error would hold itself, by its traceback, and with it all that the work has made


def eigenvectors(matrix: Tensor, *, what: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues (F,), rising, and eigenvectors (F, F), in columns, of a symmetric matrix.

    Args:
        what: it is a part of, in the plural.

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
