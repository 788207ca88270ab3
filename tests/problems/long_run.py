"""Parameters that the default run leaves out: slow cases that differ little from those it keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(names: Iterable[Any], *kept: Any, mark: pytest.MarkDecorator = pytest.mark.long) -> list[Any]:
    """Return all names as parameters of a test, with `mark` on all but the kept ones."""
    found = list(names)
    assert set(kept) < set(found)
    return [name if name in kept else pytest.param(name, marks=mark) for name in found]
