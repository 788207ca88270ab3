"""Freed blocks: kept for the next ones where features are worked on, given back where networks are; by the pages that come anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnncli.system import memory

BLOCK, TIMES, PAGE = 2**23, 20, 2**12
# Takes and frees a block of 8 MB, and prints how many pages that took anew after the first ones.
PROGRAM = f"""
import ctypes, resource, sys
import torch
from bnncli.system import memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages are of 4 KiB
for policy in sys.argv[1].split(","):
    getattr(memory, policy)()
def work():
    for _ in range({TIMES}):
        torch.zeros({BLOCK // 4}).add_(1)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_anew(policy: str, **environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, policy],
        capture_output=True,
        text=True,
        check=True,
        env=kept | environment | {"OMP_NUM_THREADS": "1"},
    )
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not Path("/lib/x86_64-linux-gnu/libc.so.6").exists(), reason="another C library")
def test_kept_blocks_need_no_new_pages_and_returned_ones_do() -> None:
    assert pages_anew("keep_freed_blocks") < BLOCK / PAGE
    assert pages_anew("keep_freed_blocks,return_large_blocks") > TIMES * BLOCK / PAGE / 2
    assert pages_anew("keep_freed_blocks", MALLOC_MMAP_THRESHOLD_="1000000") > TIMES * BLOCK / PAGE / 2


class Library:
    """A C library that hears numbers and values, and takes blocks up to `most`."""

    def __init__(self, most: int = 2**60) -> None:
        self.heard: list[tuple[int, int]] = []
        self.most = most

    def mallopt(self, number: int, value: int) -> int:
        if number == memory._MMAP_THRESHOLD and value > self.most:
            return 0
        self.heard.append((number, value))
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Of a process that has not said whose it is."""
    found = Library()
    monkeypatch.setattr("ctypes.CDLL", lambda name: found)
    monkeypatch.setattr(memory, "_malloc", memory._Malloc())
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_what_the_environment_says_is_heeded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.keep_freed_blocks()
    assert library.heard == [(-3, 2**25), (-1, 2**30)]
    memory.return_large_blocks()
    assert library.heard[2:] == [(-3, 2**21), (-1, 2**17)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    memory.keep_freed_blocks()
    assert library.heard[4:] == [(-3, 2**25)]
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    memory.return_large_blocks()
    assert library.heard[5:] == []


def test_settings_of_a_process_that_is_not_ours_stay(library: Library) -> None:
    memory.return_large_blocks()
    assert library.heard == []


def test_where_one_number_is_refused_the_other_stays_as_it_was(library: Library) -> None:
    """Each of them alone ends the C library's own adjustment of both."""
    library.most = 2**20
    memory.keep_freed_blocks()
    assert library.heard == []


def test_a_c_library_without_these_numbers_is_left_alone(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    memory.keep_freed_blocks()
    memory.return_large_blocks()


def test_what_is_kept_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(memory, "give_back_freed", lambda: order.append("given back"))
    monkeypatch.setattr(memory, "available_memory", lambda device: order.append("looked") or 100)
    assert memory.budget("cpu") == 70
    assert order == ["given back", "looked"]
