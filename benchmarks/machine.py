"""The device under the clock: how to time on it, what it can do at best, and the work that a job cannot avoid.

Work is counted for the formula, not for an implementation: the multiply-adds that the job's definition needs, and each
input read once. Exponentials are counted apart, because on a CPU they cost as much as the products around them.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

import torch

from bnncli.parameters.layouts import HeadLayout

T = TypeVar("T")
_PACKAGES = ("torch", "numpy", "pyro-ppl", "laplace-torch", "bnncli")


class Rates(NamedTuple):
    """What the device does a second, measured.

    Args:
        flops32, flops64: of a large matrix product in float32 and float64.
        bytes: read and written by a copy.
        exponentials: float32, of an array that stays in cache.
    """

    flops32: float
    flops64: float
    bytes: float
    exponentials: float


class Work(NamedTuple):
    """What a job must do; fields as in Rates."""

    flops32: float = 0.0
    flops64: float = 0.0
    bytes: float = 0.0
    exponentials: float = 0.0

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> Work:
        """The same, `count` times."""
        return Work(*(count * value for value in self))

    def seconds(self, rates: Rates) -> float:
        """The floor: arithmetic at the measured rates, or the traffic, whichever takes longer."""
        arithmetic = self.flops32 / rates.flops32 + self.flops64 / rates.flops64
        return max(arithmetic + self.exponentials / rates.exponentials, self.bytes / rates.bytes)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Wall-clock seconds of one call, and what it returned."""
    synchronize(device)
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return time.perf_counter() - start, result


def best_of(
    function: Callable[[], T], device: torch.device, *, repeats: int = 3, short: float = 20.0
) -> tuple[float, T]:
    """The shortest of `repeats` calls, after one to warm up on a GPU; a call longer than `short` seconds is not repeated."""
    if device.type == "cuda":
        function()
    seconds, result = timed(function, device)
    for _ in range(repeats - 1):
        if seconds > short:
            break
        again, result = timed(function, device)
        seconds = min(seconds, again)
    return seconds, result


def median_of(
    function: Callable[[], T], device: torch.device, *, repeats: int = 3, short: float = 3.0
) -> tuple[float, T]:
    """The median time of `repeats` calls after one to warm up; a call longer than `short` seconds is its own warm-up."""
    seconds, result = timed(function, device)
    if seconds > short:
        return seconds, result
    times = []
    for _ in range(repeats):
        seconds, result = timed(function, device)
        times.append(seconds)
    return statistics.median(times), result


def measure_rates(device: torch.device, *, size: int | None = None) -> Rates:
    """The device's rates, from products of `size` x `size` matrices (2,048 on a CPU, 8,192 on a GPU)."""
    size = size or (8192 if device.type == "cuda" else 2048)
    flops = []
    for dtype, length in ((torch.float32, size), (torch.float64, size // 2)):
        a, b = (torch.rand(length, length, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty_like(a)

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(a, b, out=out)

        flops.append(2 * length**3 / best_of(multiply, device, repeats=5)[0])
    big = torch.rand(2**28 if device.type == "cuda" else 2**25, device=device)
    copy = torch.empty_like(big)
    copied = 2 * big.nbytes / best_of(lambda: copy.copy_(big), device, repeats=5)[0]
    cached = big[: 2**26 if device.type == "cuda" else 2**18]
    place = torch.empty_like(cached)
    rounds = 20
    exponentials = (
        rounds
        * cached.numel()
        / best_of(lambda: [torch.exp(cached, out=place) for _ in range(rounds)], device, repeats=5)[0]
    )
    return Rates(flops[0], flops[1], copied, exponentials)


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, for the record."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": str(device),
        "gpu": gpu,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
    }


def gradient_work(num_examples: int, layout: HeadLayout, *, draws: int = 1, is_double: bool = False) -> Work:
    """One value and gradient: logits and the sums of the residuals, 2 N F K multiply-adds a draw, and N K exponentials."""
    size = layout.num_features + layout.has_bias
    flops = 4 * num_examples * size * layout.num_outputs * draws
    exponentials = num_examples * layout.num_outputs * draws
    reads = 4 * num_examples * layout.num_features
    if is_double:
        return Work(flops64=flops, exponentials=exponentials, bytes=reads)
    return Work(flops32=flops, exponentials=exponentials, bytes=reads)


def curvature_work(structure: str, num_examples: int, layout: HeadLayout) -> Work:
    """The Hessian's sums over the examples, and the probabilities that they need.

    full: x x^T (its upper half) weighted for each of the K (K - 1) / 2 pairs of outputs; kron: the upper halves of x x^T
    and of the outputs' factor; diag: x^2 weighted for each output.
    """
    n, k, f = num_examples, layout.num_outputs, layout.num_features + layout.has_bias
    half, pairs = f * (f + 1) / 2, max(1.0, k * (k - 1) / 2)
    sums = {"full": half * (2 * pairs + 1), "kron": 2 * half + k * (k + 1), "diag": 2 * f * k + f}[structure]
    return Work(n * (2 * f * k + sums), 0.0, 4 * n * layout.num_features, n * k)


def covariance_work(structure: str, layout: HeadLayout) -> Work:
    """From the Hessian to the covariance's root: Cholesky and a triangular inverse, or two symmetric eigenproblems."""
    p, k, f = layout.num_params, layout.num_outputs, layout.num_features + layout.has_bias
    flops = {"full": 2 / 3 * p**3, "kron": 9.0 * (f**3 + k**3), "diag": 2.0 * p}[structure]
    size = {"full": 8.0 * p**2, "kron": 8.0 * (f**2 + k**2), "diag": 8.0 * p}[structure]
    return Work(flops64=flops, bytes=2 * size)


def root_product_work(structure: str, layout: HeadLayout, *, draws: int, is_double: bool) -> Work:
    """L z for some draws: a triangle, two factors, or a diagonal."""
    p, k, f = layout.num_params, layout.num_outputs, layout.num_features + layout.has_bias
    flops = draws * {"full": p**2, "kron": 2.0 * k * f * (k + f), "diag": 2.0 * p}[structure]
    return Work(flops64=flops) if is_double else Work(flops32=flops)
