"""Holes of the heap go back to the system between blocks of work, and signals stop it there."""

from __future__ import annotations

import pytest

from bnncli.machine import between_blocks as module
from bnncli.machine.between_blocks import MOST_HOLES, between_blocks


def test_holes_are_looked_for_once_for_each_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    trims: list[int] = []
    monkeypatch.setattr(module, "resident_bytes", lambda: sizes[-1])
    monkeypatch.setattr(module, "_heap", module._Heap())

    def trim() -> None:
        trims.append(sizes[-1])
        sizes.append(sizes[-1] - freed)

    monkeypatch.setattr(module, "give_back_freed", trim)
    start, freed = 2**28, 0
    for grown in (0, 0.5, 1, 1.5, 1.5, 2.4, 2.6):  # 1.5 and 2.6 are more than one above what was there last
        sizes.append(start + int(grown * MOST_HOLES))
        between_blocks("a test")
    assert [(size - start) / MOST_HOLES for size in trims] == pytest.approx([1.5, 2.6])
    freed = 3 * MOST_HOLES  # the level falls with what was freed
    sizes.append(start + 4 * MOST_HOLES)
    between_blocks("a test")
    sizes.append(start + int(2.5 * MOST_HOLES))
    freed = 0
    between_blocks("a test")
    assert [(size - start) / MOST_HOLES for size in trims] == pytest.approx([1.5, 2.6, 4, 2.5])
    sizes.append(start)  # and where memory is given back elsewhere
    between_blocks("a test")
    sizes.append(start + int(1.1 * MOST_HOLES))
    between_blocks("a test")
    assert len(trims) == 5
