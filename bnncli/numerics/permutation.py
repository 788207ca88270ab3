"""torch.randperm without PyTorch, which takes seconds to import: the same rows of a seed, number by number.

PyTorch's generator on the CPU is the Mersenne Twister (MT19937) of Matsumoto and Nishimura, "Mersenne twister", ACM TOMACS 8
(1998), seeded by their `init_genrand` with the low 32 bits of the seed. NumPy has both.
"""

from __future__ import annotations

import numpy as np

from bnncli.lazy import torch

_LOW = 2**32 - 1
# From so many numbers on PyTorch is imported in less time than they are shuffled here (1.5 s). From 2**32 / 20 on it also
# draws 64 bits for each.
_LONG = 2**21


def permutation(num_items: int, seed: int) -> np.ndarray:
    """(num_items,) int64: what torch.randperm gives with a generator on the CPU that was seeded with `seed`.

    Durstenfeld's shuffle ("Algorithm 235", CACM 7, 1964): place i is swapped with place i + (word i modulo n - i).

    Args:
        seed: a whole number from 0 on, of at most 64 bits.
    """
    if num_items >= _LONG:
        return np.asarray(torch.randperm(num_items, generator=torch.Generator().manual_seed(seed)).numpy())
    twister = np.random.MT19937()
    np.random.RandomState(twister).seed(seed & _LOW)  # seeds it as init_genrand does, unlike its own constructor
    words = twister.random_raw(max(0, num_items - 1))
    steps = (words % np.arange(num_items, 1, -1, dtype=np.uint64)).tolist()
    order = list(range(num_items))
    for place, step in enumerate(steps):
        other = place + step
        order[place], order[other] = order[other], order[place]
    return np.array(order, dtype=np.int64)
