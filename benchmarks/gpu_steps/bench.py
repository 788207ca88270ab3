"""What every step is given: the device, the ledger that takes its checks, and a clock that knows the floor of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_steps.device import Gpu
from gpu_steps.floors import explained, is_held, rates_of
from gpu_steps.ledger import Ledger
from machine import Work, best_of

GRACE = 30.0  # seconds that the last item of a step may take beyond the step's own


@dataclass(frozen=True)
class Bench:
    """A step's surroundings.

    Args:
        folder: for temporary runs.
        data, checkpoints: folders with real data and networks, or None: the embedded case is used.
    """

    gpu: Gpu
    ledger: Ledger
    folder: Path
    is_quick: bool
    data: Path | None = None
    checkpoints: Path | None = None

    def clock(self) -> Clock:
        """A clock for the device; what it times is judged on the cards that the limits are for."""
        name = str(self.gpu.facts()["GPU"])
        rates, kind = rates_of(self.gpu.device, name, is_quick=self.is_quick or self.gpu.is_pretend)
        self.ledger.note(f"{kind} peaks of {name}", f"{rates.flops32:.3g} float32 flops, {rates.flops64:.3g} float64 flops, "
                         f"{rates.bytes:.3g} bytes, {rates.exponentials:.3g} exponentials a second")  # fmt: skip
        return Clock(self, rates, is_held(name) and not self.is_quick)


@dataclass(frozen=True)
class Clock:
    """Times jobs and judges them.

    Args:
        limits_hold: whether a time above its limit is missed.
    """

    bench: Bench
    rates: Any
    limits_hold: bool

    @property
    def device(self) -> Any:
        """Of the jobs."""
        return self.bench.gpu.device

    def job(self, what: str, work: Work, run: Callable[[], Any], *, most: float | None, repeats: int = 3) -> Any:
        """Return the job's result; its best time is to be at most `most` seconds."""
        seconds, result = best_of(run, self.device, repeats=1 if self.bench.is_quick else repeats)
        self.tell(what, seconds, work, most=most)
        return result

    def tell(self, what: str, seconds: float, work: Work, *, most: float | None, **facts: Any) -> None:
        """Record a time that was taken, beside its floor: the seconds that the GPU needs at its peaks."""
        floor = work.seconds(self.rates)
        facts = {
            "floor": floor,
            "times_floor": seconds / floor if floor else 0.0,
            "of": explained(work, self.rates),
            **facts,
        }
        self.judge(f"{what}, seconds", seconds, most, **facts)

    def judge(self, what: str, value: float, most: float | None, **facts: Any) -> None:
        """Check a number where it has a limit that holds on this card; note it otherwise."""
        if most is not None and self.limits_hold:
            self.bench.ledger.check(what, value, most, **facts)
            return
        limit = "no limit" if most is None else f"limit {most:g} on an H100, not judged here"
        self.bench.ledger.note(what, f"{value:.4g} ({limit})", value=value, **facts)
