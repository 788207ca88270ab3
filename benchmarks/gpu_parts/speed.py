"""Part *speed*: times of the work that users wait for, against limits set on an H200, beside floors from bytes and flops.

Work in this process, after a warm-up: what is timed is not the start of Python. Each figure comes with the time that its
arithmetic and its traffic need at the GPU's stated peaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import Rates, Work, best_of

from bnncli.machine.devices import configure_torch
from gpu_parts import speed_large, speed_lenet
from gpu_parts.floors import explained, is_held, rates_of
from gpu_parts.ledger import Ledger


class Sizes(NamedTuple):
    """Of the data that is made.

    Args:
        lenet: examples of the LeNet-5 head, the embedded case's repeated.
        wide: examples and features of the binary head; resnet, imagenet: N, D, K.
        images: examples of the latent binary network's epoch; network: its layers.
    """

    lenet: int
    wide: tuple[int, int]
    resnet: tuple[int, int, int]
    imagenet: tuple[int, int, int]
    images: int
    network: tuple[int, ...]


WHOLE = Sizes(60_000, (60_000, 2048), (50_000, 2048, 1000), (1_281_167, 2048, 1000), 60_000, (784, 400, 600, 10))
QUICK = Sizes(600, (200, 20), (300, 20, 5), (400, 20, 5), 400, (20, 10, 3))


@dataclass(frozen=True)
class Clock:
    """Times jobs and judges them.

    Args:
        limits_hold: whether what is too slow is missed.
        is_quick: whether each job is done once.
    """

    ledger: Ledger
    device: torch.device
    rates: Rates
    limits_hold: bool
    is_quick: bool

    def job(self, what: str, work: Work, run: Callable[[], Any], *, most: float | None, repeats: int = 3) -> Any:
        """The job's result; its best time is to be `most` seconds, where that is given and limits hold."""
        seconds, result = best_of(run, self.device, repeats=1 if self.is_quick else repeats)
        self.tell(what, seconds, work, most=most)
        return result

    def tell(self, what: str, seconds: float, work: Work, *, most: float | None) -> None:
        """A time that was taken, beside its floor."""
        floor = work.seconds(self.rates)
        facts: dict[str, Any] = {
            "floor": floor,
            "times_floor": seconds / floor if floor else 0.0,
            "of": explained(work, self.rates),
        }
        if most is None or not self.limits_hold:
            limit = "no limit" if most is None else f"{most:g} s on an H200, not judged here"
            known = ", ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in facts.items()
            )
            self.ledger.note(what, f"{seconds:.4g} s ({limit}; {known})", seconds=seconds, **facts)
        else:
            self.ledger.check(f"{what}, seconds", seconds, most, **facts)


def run(gpu: Any, ledger: Ledger, folder: Path, *, is_quick: bool) -> None:
    """All of it on the GPU; `folder` takes the features of the embedded case."""
    measure(gpu.device, str(gpu.facts()["GPU"]), ledger, folder, is_quick=is_quick)


def measure(device: torch.device, name: str, ledger: Ledger, folder: Path, *, is_quick: bool) -> None:
    """All of it on a device that is called so."""
    configure_torch(threads=None, deterministic=False)
    rates, kind = rates_of(device, name, is_quick=is_quick)
    ledger.note(f"{kind} peaks of {name}", f"{rates.flops32:.3g} float32 flops, {rates.flops64:.3g} float64 flops, "
                f"{rates.bytes:.3g} bytes, {rates.exponentials:.3g} exponentials a second")  # fmt: skip
    if not is_held(name):
        ledger.note("limits are an H200's", f"they are told and not judged on {name}")
    sizes = QUICK if is_quick else WHOLE
    clock = Clock(ledger, device, rates, is_held(name), is_quick)
    speed_lenet.measure(clock, folder, sizes.lenet)
    ledger.item("lrt epoch", speed_lenet.measure_network, clock, sizes.network, sizes.images)
    for outputs in (1, 2):
        ledger.item(f"wide Hessian, {outputs} outputs", speed_large.measure_wide, clock, *sizes.wide, outputs)
    speed_large.measure_resnet(clock, *sizes.resnet)
    ledger.item("ImageNet head", speed_large.measure_imagenet, clock, *sizes.imagenet)
