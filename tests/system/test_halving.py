"""Work that a GPU has no memory for is done again in halves."""

from __future__ import annotations

import pytest
import torch

from bnncli.system.memory import halving


def test_rows_without_room_are_worked_on_in_halves_in_order() -> None:
    def work(rows: slice) -> range:
        if rows.stop - rows.start > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return range(rows.start, rows.stop)

    most = 3
    found = halving(work, slice(2, 13))
    assert [row for part in found for row in part] == [*range(2, 13)]
    assert [len(part) for part in found] == [2, 3, 3, 3]
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        halving(work, slice(2, 13))
