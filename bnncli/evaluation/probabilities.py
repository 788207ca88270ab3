"""Read class probabilities (N, C) in blocks of rows, so that arrays in files may exceed memory, and check them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError

ROW_SUM_TOLERANCE = 1e-4  # float32 rows of 1,000 classes stay within 1e-5
BLOCK_VALUES = 1 << 20  # probabilities held at once
_HINT_LOG = "these look like log-probabilities; exponentiate them first"


def row_blocks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Return consecutive slices of range(num_rows) with at most BLOCK_VALUES values each, for rows of `row_size`."""
    size = max(1, BLOCK_VALUES // max(1, row_size))
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def check_probabilities(probs: NDArray, num_classes: int, *, is_exclusive: bool = True) -> None:
    """Raise DataError unless probs (N, C) are probabilities of `num_classes` classes.

    Args:
        is_exclusive: whether classes are mutually exclusive; if not, each is a label of its own.

    Raises:
        DataError: wrong shape, values not finite or outside [0, 1], or, for exclusive classes, rows that do not sum to
            1 within 1e-4; the hint names the likely cause.
    """
    for _ in checked_blocks(probs, num_classes, is_exclusive=is_exclusive):
        pass


def checked_blocks(probs: NDArray, num_classes: int, *, is_exclusive: bool = True) -> Iterator[tuple[slice, NDArray]]:
    """Yield the rows and values of blocks of probs (N, C), checked as in check_probabilities."""
    if probs.ndim != 2 or probs.shape[1] != num_classes:
        raise DataError(f"probs: expected shape (N, {num_classes}), got {probs.shape}")
    for rows in row_blocks(*probs.shape):
        block = np.asarray(probs[rows])
        _check_values(block, is_exclusive=is_exclusive)
        yield rows, block


def _check_values(probs: NDArray, *, is_exclusive: bool) -> None:
    if probs.size == 0:
        return
    if not np.isfinite(probs).all():
        known = probs[~np.isnan(probs)]
        if known.size and known.max() <= 0:
            raise DataError("probs: expected finite values in [0, 1], got log-probabilities", hint=_HINT_LOG)
        raise DataError("probs: expected finite values, got NaN or infinity", hint="the fit or the checkpoint diverged")
    smallest, largest = float(probs.min()), float(probs.max())
    worst = float(np.abs(probs.sum(axis=1, dtype=np.float64) - 1).max())
    if largest <= 0 and smallest < 0:
        raise DataError(f"probs: expected values in [0, 1], got log-probabilities down to {smallest:g}", hint=_HINT_LOG)
    if smallest < -ROW_SUM_TOLERANCE or largest > 1 + ROW_SUM_TOLERANCE:
        hint = "these look like logits; apply the softmax first"
        if smallest >= 0 and largest <= 100:
            are_percentages = np.abs(probs.sum(axis=1, dtype=np.float64) - 100).max() < 2
            hint = (
                "these look like percentages; divide by 100"
                if are_percentages
                else "rows of probabilities must sum to 1"
            )
        raise DataError(f"probs: expected values in [0, 1], got {smallest:g} to {largest:g}", hint=hint)
    if is_exclusive and worst > ROW_SUM_TOLERANCE:
        hint = "rows of per-class sigmoid outputs, or rows with a missing class, do not sum to 1"
        raise DataError(
            f"probs: expected rows that sum to 1 within 1e-4, got a row that is off by {worst:g}", hint=hint
        )
