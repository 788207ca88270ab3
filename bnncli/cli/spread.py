"""Commands that torchrun starts in several processes: who works, on which device, and who talks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bnncli.console import Console
from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.machine import team
from bnncli.machine.devices import device_name
from bnncli.options import CommonOptions, ComputeOptions

SPREAD = ("fit-laplace", "refine", "hmc", "fit-vi", "fit-swag", "fit-sghmc", "fit-temperature")
NUM_SHARDS = 64


def is_follower() -> bool:
    """Whether torchrun has started this process beside another one that talks."""
    found = team.rank_and_size()
    return found is not None and found[0] > 0


def own_device(options: ComputeOptions) -> ComputeOptions:
    """The options with this worker's own GPU, where it may choose."""
    found = team.rank_and_size()
    if found is None or options.device not in ("auto", "cuda") or device_name(options.device) == "cpu":
        return options
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        raise UsageError(
            f"torchrun: {local + 1} workers or more on this machine, and {count} GPUs",
            hint=f"start {count} with --nproc-per-node {count}, or use \0device\0 cpu",
        )
    return replace(options, device=f"cuda:{local}")


@contextmanager
def workers_joined(command: str, options: ComputeOptions, console: Console) -> Iterator[bool]:
    """Inside, this process works with the others; gives whether it has work at all.

    A command whose work is not shared out is done by the first worker alone.

    Raises:
        DeviceError: the others do not come.
    """
    started = team.rank_and_size()
    rank, size = started or (0, 1)
    if started is None and options.shards is None:
        yield True
        return
    if size > 1 and command not in SPREAD:
        if rank == 0:
            console.warn(f"{command} is not shared out among workers: the first of {size} does all of it")
        yield rank == 0
        return
    if size > 1:
        console.info(f"the first of {size} workers, as torchrun has it (unset WORLD_SIZE to work alone)")
    team.join(team.Team(rank, size, options.shards or NUM_SHARDS), torch.device(device_name(options.device)))
    try:
        yield True
    finally:
        if size > 1:
            console.debug(f"sent {team.bytes_sent()} bytes to other workers")
        team.leave()


def quiet(options: CommonOptions) -> CommonOptions:
    """The options of a worker whose lines nobody wants: the first says the same."""
    return replace(options, quiet=True, verbose=0, progress="none", log_file=None)
