"""Commands that torchrun starts in several processes: who works, on which device, and who talks."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bnncli.console import Console
from bnncli.errors import BnnError, DeviceError, Exit, Interrupted, UsageError, bug, left_by, machine_error
from bnncli.lazy import torch
from bnncli.names import counted
from bnncli.options.command import CommonOptions, ComputeOptions
from bnncli.system import signals, workers
from bnncli.system.devices import device_name
from bnncli.system.workers import LOST

SPREAD = (
    "fit-laplace",
    "refine",
    "hmc",
    "fit-vi",
    "fit-swag",
    "fit-sghmc",
    "fit-temperature",
    "fit-lbbnn",
    "train",
    "predict",
    "evaluate",
)
NUM_SHARDS = 64


def is_follower() -> bool:
    """Whether torchrun has started this process beside another one that talks."""
    found = workers.rank_and_size()
    return found is not None and found[0] > 0


def own_device(options: ComputeOptions) -> ComputeOptions:
    """The options with this worker's own GPU, where it may choose."""
    found = workers.rank_and_size()
    if found is None or options.device not in ("auto", "cuda") or device_name(options.device) == "cpu":
        return options
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    here = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if here > count:  # all workers know it, and the first says it
        raise UsageError(
            f"torchrun started {here} workers on this machine, which has {counted(count, 'GPU')}",
            hint=f"start {count} with --nproc-per-node {count}, or use \0device\0 cpu",
        )
    return replace(options, device=f"cuda:{local}")


@contextmanager
def workers_joined(command: str, own: object, options: ComputeOptions, console: Console) -> Iterator[bool]:
    """Inside, this process works with the others; gives whether it has work at all.

    A command whose work is not shared out is done by the first worker alone. What ends one of them is told to the first,
    which says it.

    Args:
        own: the command's own options.

    Raises:
        DeviceError: the others do not come; one of them was killed; or, of a worker that has told the first what ends it,
            that it has.
    """
    started = workers.rank_and_size()
    rank, size = started or (0, 1)
    if started is None and options.shards is None:
        yield True
        return
    is_in_step = command in SPREAD or size == 1
    extraction: Any = own if command == "extract-features" else None
    if not is_in_step and (extraction is None or not extraction.has_network):
        what = command if extraction is None else f"{command} without a network"
        if rank == 0:
            console.warn(f"{what} does not run in parallel: worker 0 of {size} does all the work")
        yield rank == 0
        return
    if size > 1:
        console.info(f"worker 0 of {size}, started by torchrun (unset WORLD_SIZE to run alone)")
    joined = workers.Team(rank, size, options.shards or NUM_SHARDS, is_in_step)
    workers.connect(joined, torch.device(device_name(options.device)))
    try:
        yield True
        workers.synchronise()
        workers.disconnect()
    except (Exception, SystemExit) as error:
        _part(error, joined, console)
        raise
    finally:
        if size > 1:
            console.debug(
                f"sent {workers.bytes_sent()} bytes to other workers, received {workers.bytes_received()} of messages"
            )
        workers.leave_team()


def _part(error: BaseException, joined: workers.Team, console: Console) -> None:
    """Tell the others what ends this process. Raises DeviceError where that is one that was killed, or the first says it.

    torchrun ends all when any has gone: none goes before the first, which would be ended in the midst of what it says.
    """
    known = left_by(error) if isinstance(error, SystemExit) else error if isinstance(error, BnnError) else None
    known = known or machine_error(error) or bug(error)  # type: ignore[arg-type]
    killed = workers.find_killed_worker() if isinstance(known, Interrupted) else None
    if killed is not None:  # torchrun ends this process for it
        killed.hint, known = known.hint, killed
    workers.disconnect(known)
    if killed is not None:
        raise killed from error
    if joined.is_leader:
        return
    if known.exit == Exit.BUG:
        console.traceback(error)
    while not workers.leader_has_ended() and not signals.is_interrupted():
        time.sleep(0.05)
    if known.code == LOST:
        known = workers.error_of_others() or known
    told: BnnError = DeviceError("worker 0 reports why", code=LOST)
    told.exit = known.exit
    raise told from error


@contextmanager
def printed_aside() -> Iterator[None]:
    """What a library or a user's factory prints inside goes to stderr: it must not mix with the result. Of a worker that is not the first it goes nowhere."""
    results = sys.stdout
    try:
        if not is_follower():
            sys.stdout = sys.stderr
            yield
            return
        with open(os.devnull, "w", encoding="utf-8") as sys.stdout, warnings.catch_warnings(action="ignore"):
            yield
    finally:
        sys.stdout = results


def quiet(options: CommonOptions) -> CommonOptions:
    """The options of a worker whose lines nobody wants: the first says the same. PyTorch's own, where the first has gone, are less wanted still."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when it is imported
    return replace(options, quiet=True, verbose=0, progress="none", log_file=None)
