"""Random streams by name: one seed, an independent stream for each purpose.

Adding a random draw to one step does not shift another, since every purpose has its own stream.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


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
