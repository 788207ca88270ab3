"""Where the lines of a grid run: so many side by side on the CPU, or one on each GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bnncli.errors import DeviceError, UsageError
from bnncli.lazy import torch
from bnncli.options.grid import GridOptions
from bnncli.stages.grid.plan import Job
from bnncli.system import workers as team
from bnncli.system.devices import device_name

_GPUS, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
CPU = "cpu"
_ANYWHERE = ("auto", CPU)  # devices of a line that is told where it runs


@dataclass(frozen=True)
class LinePlace:
    """Where one line at a time runs.

    Args:
        name: for people.
        environment: what a process there has beside this one's.
    """

    name: str
    environment: Mapping[str, str]


def places_of(options: GridOptions, jobs: Sequence[Job]) -> list[LinePlace]:
    """The places that the options ask for.

    Raises:
        UsageError: torchrun has started this beside others, or a line asks for another device itself.
        DeviceError: a GPU is not there.
    """
    workers = team.rank_and_size()
    if workers is not None and workers[1] > 1:
        raise UsageError(
            f"grid starts its own processes, but torchrun started {workers[1]} copies of it: run it without torchrun",
            hint="\0devices\0 0,1,2,3 runs a line on each GPU; \0jobs\0 4 runs four on the CPU",
        )
    if options.jobs is None and options.devices is None:
        return [LinePlace("here", {})]
    for job in jobs:
        if job.given.get("device", CPU) not in _ANYWHERE:
            flag = "\0devices\0" if options.jobs is None else "\0jobs\0"
            where = job.step.keys.get("device", job.step.where)
            raise UsageError(f"{where}: {flag} sets where lines run; omit device or {flag}")
    if options.jobs is not None:
        environment = {_GPUS: "", **shared_threads(options.jobs)}
        return [LinePlace(f"cpu {number}", environment) for number in range(options.jobs)]
    visible = _visible([int(one) for one in options.places if one != CPU])
    threads = shared_threads(len(options.places))
    return [
        LinePlace(CPU if one == CPU else f"cuda:{one}", {_GPUS: "" if one == CPU else visible[int(one)], **threads})
        for one in options.places
    ]


def _visible(numbers: list[int]) -> dict[int, str]:
    """What CUDA calls each of these GPUs, which are counted among those that this process may see."""
    if not numbers:
        return {}
    count = 0 if device_name("auto") == CPU else torch.cuda.device_count()
    missing = [number for number in numbers if number >= count]
    if missing:
        there = f"have {count}, numbered from 0" if count else "PyTorch finds no GPU on this machine"
        raise DeviceError(
            f"\0devices\0: no GPU {missing[0]}: {there}",
            hint="use the CPU with \0jobs\0 N or \0devices\0 cpu",
        )
    names = [one.strip() for one in os.environ.get(_GPUS, "").split(",") if one.strip()]
    return {number: names[number] if names else str(number) for number in numbers}


def shared_threads(count: int) -> dict[str, str]:
    """The threads of each of so many processes, where nobody has said how many, and there are several."""
    if count == 1 or _THREADS in os.environ:
        return {}
    return {_THREADS: str(max(1, cores() // count))}


def cores() -> int:
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
