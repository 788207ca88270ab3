"""Which rows of a reference are the examples of a split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.artifacts.predictions import PredictionFile
from bnncli.errors import DataError
from bnncli.session.prediction_files import GivenPredictions, MatchedForecasts, matching_rows

IDS = np.array([7, 2, 5])  # rows of its data that a split holds


def ours(sample_id: np.ndarray | None = IDS, labels: np.ndarray | None = None) -> MatchedForecasts:
    return MatchedForecasts("test", np.full((3, 2), 0.5), labels, None, sample_id)


def reference(size: int, *, ids: list[int] | None = None, labels: np.ndarray | None = None) -> GivenPredictions:
    probs = np.full((size, 2), 0.5)
    file = None if ids is None else PredictionFile(probs, probs[:, 0], None, None, np.array(ids), ["a", "b"])
    return GivenPredictions("test", Path("ref"), probs, labels, ("a", "b"), False, file=file)


def rows_of(theirs: GivenPredictions, of: MatchedForecasts | None = None) -> tuple[list[int] | None, list[str]]:
    told: list[str] = []
    rows = matching_rows(of or ours(), theirs, tell=told.append)
    return None if rows is None else rows.tolist(), told


def test_as_many_rows_stand_in_the_order_of_the_split() -> None:
    assert rows_of(reference(3)) == (None, [])


def test_of_the_whole_data_those_that_the_split_holds_are_taken_and_told() -> None:
    rows, told = rows_of(reference(9))
    assert rows == [7, 2, 5]
    assert told == ["reference 'ref': using the 3 of its 9 rows that belong to split 'test'"]


def test_a_reference_that_knows_its_own_rows_is_matched_by_them() -> None:
    assert rows_of(reference(5, ids=[5, 1, 7, 2, 4])) == ([2, 3, 0], [])
    assert rows_of(reference(3, ids=[7, 2, 5])) == (None, [])


@pytest.mark.parametrize(
    ("theirs", "of", "said"),
    [
        (reference(5), None, "has 5 rows, but split 'test' has 3"),  # and row 7 is asked for
        (reference(9), ours(None), "has 9 rows, but split 'test' has 3"),
        (reference(2), None, "has 2 rows, but split 'test' has 3"),
        (reference(3, ids=[7, 2, 4]), None, "lacks some examples of split 'test'"),
        (reference(4, ids=[7, 2, 5, 5]), None, "lacks some examples of split 'test'"),
    ],
)
def test_other_rows_are_refused(theirs: GivenPredictions, of: MatchedForecasts | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rows_of(theirs, of)


def test_labels_are_compared_in_the_rows_that_are_taken() -> None:
    labels = np.arange(9) % 2
    assert rows_of(reference(9, labels=labels), ours(labels=labels[IDS]))[0] == [7, 2, 5]
    with pytest.raises(DataError, match="and split 'test' have different labels in 1 of 3 rows"):
        rows_of(reference(9, labels=labels), ours(labels=np.array([1, 0, 0])))
