"""Into what large matrices are cut: panels, some consecutive columns each, between whose products a signal is heard."""

from __future__ import annotations

_WIDTH = {"cpu": 256, "cuda": 1024}  # products of so many columns have nearly the speed of larger ones
_LARGE = 1024  # rows of a matrix from which on panels are quicker than a factor and a solve (measured on one core)


def panel_width(kind: str) -> int:
    """Columns of a panel on a device of this kind."""
    return _WIDTH.get(kind, _WIDTH["cpu"])


def is_large(size: int) -> bool:
    """Whether a matrix of so many rows is worth panels."""
    return size > _LARGE
