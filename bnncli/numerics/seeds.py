"""Random streams by name: one seed, an independent stream for each purpose.

Adding a random draw to one step does not shift another, since every purpose has its own stream.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from bnncli.lazy import torch

# Numbers of one draw up to which it is made on the CPU, in float64, whatever the device, so that draws agree between
# devices. Longer ones took six times as long to make and to move as the gradient they were for (P of 2 million).
LARGE = 2**15


@lru_cache(maxsize=256)
def stream_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the stream `name` (such as "refine/shuffle") under the user's seed."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for the stream `name`; on the CPU unless told, so that draws agree between devices."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, name))


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator where the draws are needed: on a GPU one seeded from the given one, since draws must not travel."""
    if device.type != "cuda" or generator.device.type == "cuda":
        return generator
    seed = int(torch.randint(2**62, (1,), generator=generator))
    return torch.Generator(device).manual_seed(seed)


def source_of(generator: torch.Generator, num_numbers: int, device: torch.device) -> torch.Generator:
    """What makes draws of so many numbers each: the given generator up to LARGE, above it one where they are needed.

    The one place that decides it. One on a GPU is seeded anew by the given one at every call, so that the given one's state
    is all that a run has to store of its stream.
    """
    return on_device(generator, device) if num_numbers > LARGE else generator
