"""Holes of the heap go back to the system between blocks of work, and not what each block takes anew."""

from __future__ import annotations

import pytest

from bnncli.system import signals as module
from bnncli.system.signals import FEW_BLOCKS, MOST_HOLES, between_blocks

START = 2**28


class Process:
    """Has START and so many times MOST_HOLES; what is given back it loses.

    Args:
        sizes: that it had, MOST_HOLES above START.
        trims: where holes were given back.
        freed: by giving back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[float] = [0.0]
        self.trims: list[float] = []
        self.freed = 0.0
        monkeypatch.setattr(module, "_heap", module._Heap())
        monkeypatch.setattr(module, "resident_bytes", lambda: START + int(self.sizes[-1] * MOST_HOLES))
        monkeypatch.setattr(module, "give_back_freed", self._give_back)

    def block(self, size: float, times: int = 1) -> None:
        """Blocks of work that end with so much."""
        for _ in range(times):
            self.sizes.append(size)
            between_blocks("a test")

    def _give_back(self) -> None:
        self.trims.append(self.sizes[-1])
        self.sizes.append(self.sizes[-1] - self.freed)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_holes_are_looked_for_once_for_each_growth(process: Process) -> None:
    for size in (0, 0.5, 1, 1.5, 1.5, 2.4, 2.6):  # 1.5 and 2.6 are more than one above what was there last
        process.block(size, times=FEW_BLOCKS)
    assert process.trims == [1.5, 2.6]
    process.freed = 3  # the level falls with what was freed
    process.block(4)
    process.freed = 0
    process.block(1.2, times=FEW_BLOCKS)
    process.block(2.5)
    assert process.trims == [1.5, 2.6, 4, 2.5]
    process.block(0, times=FEW_BLOCKS)  # and where memory is given back elsewhere
    process.block(1.1)
    assert process.trims == [1.5, 2.6, 4, 2.5, 1.1]


def test_what_each_block_takes_anew_is_given_back_no_more(process: Process) -> None:
    process.block(0, times=FEW_BLOCKS)
    process.freed = 3
    process.block(3, times=100)
    assert len(process.trims) <= 3  # one, two, four times MOST_HOLES are left alone
    process.block(4.5)  # holes beside it
    assert process.trims[-1] == 4.5


def test_growth_in_use_is_no_reason_to_allow_more(process: Process) -> None:
    for size in (0, 1.1, 2.2, 3.3, 4.4):
        process.block(size)
    process.freed = 1
    process.block(5.5)
    assert process.trims == [1.1, 2.2, 3.3, 4.4, 5.5]
