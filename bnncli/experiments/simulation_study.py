"""The data of the logistic simulation study, as the commands take them.

Skaaret-Lund (2022), section 5.2; example 3 of github.com/aliaksah/EMJMCMC2016. Columns 7 to 20 are standardised, as in the published
fit with normalizing flows; the first six are the binary ones. The split `test` is a part of the same rows: what is scored is the selection
of inputs, which no prediction changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.experiments import Inputs, Settings

_SHAPE = (2000, 20)
_NUM_BINARY = 6
_NUM_TEST = 200


def prepare(inputs: Inputs, settings: Settings) -> Mapping[str, NDArray[Any]]:
    """Features, labels and a head of one logit, for extract-features.

    Args:
        inputs: columns and response, files of numbers.

    Raises:
        DataError: they are not those 2,000 rows of 20 columns with a response of 0 and 1.
    """
    try:
        columns = np.loadtxt(inputs["columns"], delimiter=",", ndmin=2)
        labels = np.loadtxt(inputs["response"]).astype(np.int64)
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{inputs['columns']}: expected comma-separated numbers: {error}") from None
    if columns.shape != _SHAPE or labels.shape != _SHAPE[:1] or not np.isin(labels, (0, 1)).all():
        said = f"{columns.shape} columns, {labels.shape} responses"
        raise DataError(
            f"{inputs['columns']}: expected {_SHAPE} columns and one response of 0 or 1 per row; got {said}"
        )
    scaled = columns.copy()
    scaled[:, _NUM_BINARY:] -= columns[:, _NUM_BINARY:].mean(axis=0)
    scaled[:, _NUM_BINARY:] /= columns[:, _NUM_BINARY:].std(axis=0, ddof=1)
    features = scaled.astype(np.float32)
    return {
        "features_train": features,
        "labels_train": labels,
        "features_test": features[:_NUM_TEST],
        "labels_test": labels[:_NUM_TEST],
        "head_weight": np.zeros((1, _SHAPE[1]), dtype=np.float32),
        "head_bias": np.zeros(1, dtype=np.float32),
    }
