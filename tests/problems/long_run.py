"""What the long run has and the default suite has not: cases that cost much and differ little from those that stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(names: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test: all names, those but the kept ones in the long run alone."""
    found = list(names)
    assert set(kept) < set(found)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.long) for name in found]
