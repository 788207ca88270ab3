"""What is no probability is refused with its likely cause, in whichever block of rows it lies."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation import statistics
from bnncli.evaluation.statistics import check_probabilities, row_blocks


def some_probs(num_classes: int = 7, *, count: int = 200) -> NDArray:
    return np.random.default_rng(0).dirichlet(np.full(num_classes, 0.5), size=count).astype(np.float32)


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        (np.log([0.9, 0.1]), "got log-probabilities down to -2.3", "exponentiate"),
        ([0.0, -np.inf], "got log-probabilities", "exponentiate"),
        ([np.nan, 0.5], "got NaN or infinity", "diverged"),
        ([np.nan, np.nan], "got NaN or infinity", "diverged"),
        ([2.5, -1.5], r"expected values in \[0, 1\], got -1.5 to 2.5", "softmax"),
        ([70.0, 30.0], "got 30 to 70", "percentages"),
        ([1.2, 0.1], "got 0.1 to 1.2", "sum to 1"),
        ([0.9, 0.3], "sum to 1 within 1e-4, got a row that is off by 0.2", "sigmoid"),
        ([0.5, 0.4998], "off by 0.0002", "sigmoid"),
        ([0.2, 0.3, 0.5], r"expected shape \(N, 2\), got \(1, 3\)", None),
    ],
)
def test_what_is_no_probability_is_refused_with_its_likely_cause(
    row: list[float], message: str, hint: str | None
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_probabilities(np.array([row]), 2)
    assert hint is None or hint in str(caught.value.hint)


@pytest.mark.parametrize("probs", [some_probs(), np.empty((0, 7)), np.eye(7), np.full((1, 7), 1.00005 / 7)])
def test_probabilities_pass_and_the_same_rows_a_little_too_large_do_not(probs: NDArray) -> None:
    check_probabilities(probs, 7)
    if len(probs):
        with pytest.raises(DataError, match=r"sum to 1|values in"):
            check_probabilities(probs * 1.0003, 7)


def test_a_bad_row_is_found_in_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 7 * 9)
    probs = some_probs()
    check_probabilities(probs, 7)
    probs[-1] = 0.2
    with pytest.raises(DataError, match=r"off by 0\.4"):
        check_probabilities(probs, 7)


@pytest.mark.parametrize(("num_rows", "row_size"), [(0, 3), (10, 3), (10, 1000), (24, 4)])
def test_blocks_cover_every_row_once_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, row_size: int
) -> None:
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 16)
    blocks = [range(num_rows)[rows] for rows in row_blocks(num_rows, row_size)]
    assert [row for block in blocks for row in block] == list(range(num_rows))
    assert all(len(block) == 1 or len(block) * row_size <= 16 for block in blocks)
