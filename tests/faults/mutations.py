"""Damaged inputs: flipped bytes, truncations, another file in the place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path


def mutations(path: Path, count: int, generator: random.Random, *, swaps: bool) -> Iterator[tuple[str, bytes]]:
    """So many of each kind: what was done, and the content."""
    content = path.read_bytes()
    for _ in range(count):
        at = generator.randrange(len(content))
        bit = 1 << generator.randrange(8)
        yield f"flipped at {at}", content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
    for _ in range(count):
        at = generator.randrange(len(content))
        yield f"truncated at {at}", content[:at]
    # Posteriors may be called anything, and are what they say they are; what the user's own files hold cannot be told.
    others = sorted(other for other in path.parent.glob(f"*{path.suffix}") if other.name != path.name)
    for other in generator.sample(others, min(count, len(others))) if swaps and path.parent.name == "features" else ():
        if other.read_bytes() != content:
            yield f"swapped with {other.name}", other.read_bytes()
