"""A job in a process of its own, forked from this one: its CPU seconds, the memory that it takes, and what it returns."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from network_parts._bench import Failed


class Measured(NamedTuple):
    """A job that ran.

    Args:
        value: what it returned.
        seconds: of the CPU, which other work on the machine does not change.
        mib: the process's peak less what it began with.
    """

    value: Any
    seconds: float
    mib: float


def measured(job: Callable[[], Any]) -> Measured:
    """The job's result. torch must have one thread, from before its first work. Raises Failed where the job does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(job, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, _, usage = os.wait4(child, 0)
    if not answer:
        raise Failed("the process of a job was ended")
    value, failure, seconds, before = pickle.loads(answer)
    if failure:
        raise Failed(failure)
    return Measured(value, seconds, usage.ru_maxrss / 1024 - before / 2**20)


def _answer(job: Callable[[], Any], writer: int) -> None:
    """Runs the job in the child, which ends here."""
    before, start = _resident_bytes(), time.process_time()
    value, failure = None, ""
    try:
        value = job()
    except Exception as error:  # the parent raises it
        failure = f"{type(error).__name__}: {error}"
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(pickle.dumps((value, failure, time.process_time() - start, before)))
    os._exit(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
