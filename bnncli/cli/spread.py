"""Run commands in several processes under torchrun: roles, devices and output."""

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
from bnncli.errors import BnnError, DeviceError, Exit, UsageError, bug, left_by, machine_error
from bnncli.lazy import torch
from bnncli.names import count_noun
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
    """Return whether this process is a torchrun worker other than worker 0."""
    found = workers.rank_and_size()
    return found is not None and found[0] > 0


def own_device(options: ComputeOptions) -> ComputeOptions:
    """Return the options with this worker's own GPU, if the device is not fixed."""
    found = workers.rank_and_size()
    if found is None or options.device not in ("auto", "cuda") or device_name(options.device) == "cpu":
        return options
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    here = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if here > count:  # all workers raise; worker 0 reports
        raise UsageError(
            f"torchrun started {here} workers on this machine, which has {count_noun(count, 'GPU')}",
            hint=f"start {count} with --nproc-per-node {count}, or use \0device\0 cpu",
        )
    return replace(options, device=f"cuda:{local}")


@contextmanager
def join_workers(command: str, own: object, options: ComputeOptions, console: Console) -> Iterator[bool]:
    """Join the other workers inside the context; yields whether this process has work.

    Worker 0 alone runs a command that is not parallel. An error that ends a worker is sent to worker 0, which reports
    it.

    Args:
        own: the command's own options.

    Raises:
        DeviceError: the other workers do not connect, one was killed, or worker 0 reports this worker's error.
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
        workers.leave_team()


def _part(error: BaseException, joined: workers.Team, console: Console) -> None:
    """Send the error that ends this process to the others. Raises DeviceError if worker 0 is to report.

    torchrun stops all workers as soon as one exits, so the others wait for worker 0 to finish its report.
    """
    known = left_by(error) if isinstance(error, SystemExit) else error if isinstance(error, BnnError) else None
    known = known or machine_error(error) or bug(error)  # type: ignore[arg-type]
    workers.disconnect(known)
    if joined.is_leader:
        return
    if known.exit == Exit.BUG:
        console.traceback(error)
    while (code := workers.leader_exit()) is None and not signals.is_interrupted():
        time.sleep(0.05)
    told: BnnError = DeviceError("worker 0 reports why", code=LOST)
    told.exit = known.exit if code is None else code
    raise told from error


@contextmanager
def redirect_prints() -> Iterator[None]:
    """Redirect stdout of libraries and user factories to stderr, to keep results clean; discard it on followers."""
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


def silence_options(options: CommonOptions) -> CommonOptions:
    """Return quiet options for a follower, and silence PyTorch's log."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    return replace(options, quiet=True, verbose=0, progress="none", log_file=None)
