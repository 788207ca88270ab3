"""Random rows of a test set whose rows are sorted, as two splits: one to tune on, one to test on, the same for every copy of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.experiments import Inputs, Settings

_SEED = 0


def prepare(inputs: Inputs, settings: Settings) -> Mapping[str, NDArray[Any]]:
    """x_val, y_val, x_test, y_test: num_val and num_test rows of the arrays x and y, drawn without replacement.

    Args:
        inputs: test, an NPZ file of x (N, ...) and y (N,).

    Raises:
        DataError: it has too few rows.
    """
    with np.load(inputs["test"]) as arrays:
        images, labels = arrays["x"], arrays["y"]
    num_val, num_test = int(settings["num_val"]), int(settings["num_test"])
    if len(labels) < num_val + num_test:
        raise DataError(f"{inputs['test']}: expected at least {num_val + num_test} rows, got {len(labels)}")
    order = np.random.default_rng(_SEED).permutation(len(labels))
    val, test = np.sort(order[:num_val]), np.sort(order[num_val : num_val + num_test])
    return {"x_val": images[val], "y_val": labels[val], "x_test": images[test], "y_test": labels[test]}
