"""The least time that a GPU could need: bytes over bandwidth or flops over the peak, as its maker states them."""

from __future__ import annotations

import torch
from machine import Rates, Work, best_of, measure_rates

from bnncli.system.devices import has_coarse_products, tf32_products

# Dense float32 and float64 flops (the latter by tensor cores), bytes of its memory and exponentials a second: data sheets of
# NVIDIA; exponentials are 16 a clock and multiprocessor.
STATED = {
    "H200": Rates(67e12, 67e12, 4.8e12, 4.2e12),
    "H100 NVL": Rates(60e12, 60e12, 3.9e12, 3.8e12),
    "H100 PCIe": Rates(51e12, 51e12, 2.0e12, 3.2e12),
    "H100": Rates(67e12, 67e12, 3.35e12, 4.2e12),
    "A100": Rates(19.5e12, 19.5e12, 2.04e12, 2.4e12),
}
BUS = 55e9  # bytes a second, of 64 that PCIe 5 x16 states, to the GPU
HELD = ("H200", "H100")  # what the limits are for: the H200 they were measured on, and one with the same arithmetic


def stated_rates(name: str) -> Rates | None:
    """The stated peaks of the GPU called `name`; None for one that is not listed."""
    return next((rates for known, rates in STATED.items() if all(word in name for word in known.split())), None)


def rates_of(device: torch.device, name: str, *, is_quick: bool) -> tuple[Rates, str]:
    """Peaks, and whether they are stated or measured."""
    stated = stated_rates(name)
    if stated is not None:
        return stated, "stated"
    return measure_rates(device, size=256 if is_quick else None), "measured"


def product_rates(device: torch.device, rates: Rates, *, is_quick: bool) -> dict[str, float]:
    """Flops a second of TF32 and bfloat16 products, measured: of square matrices, where the device has such products."""
    if not has_coarse_products(device):
        return {"tf32": rates.flops32, "bfloat16": rates.flops32}
    size = 256 if is_quick else 8192
    left, right = (torch.rand(size, size, device=device) for _ in range(2))
    halves = left.bfloat16(), right.bfloat16()

    def multiply() -> torch.Tensor:
        with tf32_products():
            return left @ right

    runs = {"tf32": multiply, "bfloat16": lambda: torch.mm(*halves, out_dtype=torch.float32)}
    return {name: 2 * size**3 / best_of(run, device, repeats=5)[0] for name, run in runs.items()}


def is_held(name: str) -> bool:
    """Whether the limits are for a GPU called so."""
    return any(known in name for known in HELD)


def explained(work: Work, rates: Rates) -> str:
    """The floor's parts: what the arithmetic takes, and what the traffic takes."""
    arithmetic = work.flops32 / rates.flops32 + work.flops64 / rates.flops64 + work.exponentials / rates.exponentials
    return (
        f"{work.flops32 + work.flops64:.2g} flops {1e3 * arithmetic:.3g} ms, "
        f"{work.bytes:.2g} bytes {1e3 * work.bytes / rates.bytes:.3g} ms"
    )
