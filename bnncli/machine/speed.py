"""How fast a device is, from what it says of itself: not measured, so that what is chosen by it is the same on a busy machine."""

from __future__ import annotations

from typing import NamedTuple

from bnncli.lazy import torch

# Of one CPU core, measured: products of float32, factors of float64, one number at a time.
_CORE = (3e10, 1.2e10, 3e9)
# Of a GPU: operations of a multiprocessor in a cycle, float32 and float64, by its compute capability (CUDA C++ Programming
# Guide, arithmetic instructions; a multiply-add is two). Where float64 is an eighth or less of that, it is a games card.
_PER_CYCLE = {(6, 0): (128, 64), (7, 0): (128, 64), (8, 0): (128, 64), (9, 0): (256, 128), (10, 0): (256, 128)}
_PER_CYCLE_OF_OTHERS = (256, 4)
_CYCLES = 1.4e9  # a second, sustained
_SHARE_OF_PRODUCTS, _SHARE_OF_FACTORS = 0.5, 0.3  # of its peak that large products and factors reach


class Speed(NamedTuple):
    """Operations a second.

    Args:
        products: of matrix products over the examples, float32.
        factors: of factors in float64.
        elementwise: one number at a time.
    """

    products: float
    factors: float
    elementwise: float


def speed_of(device: torch.device | str, *, threads: int | None = None) -> Speed:
    """What the device does in a second, right to a factor of about three.

    Args:
        threads: of the CPU; those that this process has by default.
    """
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return Speed(*((threads or torch.get_num_threads()) * one for one in _CORE))
    single, double = _PER_CYCLE.get(torch.cuda.get_device_capability(chosen), _PER_CYCLE_OF_OTHERS)
    cycles = _CYCLES * torch.cuda.get_device_properties(chosen).multi_processor_count
    products = _SHARE_OF_PRODUCTS * single * cycles
    return Speed(products, _SHARE_OF_FACTORS * double * cycles, products / 20)
