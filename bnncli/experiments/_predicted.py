"""Entropies out of the table that `bnncli predict --table FILE.npz` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError

_COLUMNS = ("posterior", "variant", "split", "sample_id", "entropy")


def entropies(path: Path, posterior: str, split: str, *, variant: str = "mc") -> NDArray[np.float64]:
    """Entropies (N,) of the class probabilities of a split by one posterior, nats, in the split's order.

    Raises:
        DataError: the file is no such table, or has none of them.
    """
    try:
        with np.load(path) as table:
            columns = {name: table[name] for name in _COLUMNS}
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: expected a table written by predict: {error}") from None
    wanted = {"posterior": posterior, "variant": variant, "split": split}
    chosen = np.all([columns[name] == value for name, value in wanted.items()], axis=0)
    if not chosen.any():
        raise DataError(f"{path}: no rows of {posterior}, {variant}, split {split!r}")
    order = np.argsort(columns["sample_id"][chosen], kind="stable")
    return np.asarray(columns["entropy"][chosen][order], dtype=np.float64)
