"""Freed blocks: kept for the next ones where features are worked on, given back where networks are; by the pages that come anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnncli.machine import memory

BLOCK, TIMES, PAGE = 2**23, 20, 2**12
# Takes and frees a block of 8 MB, and prints how many pages that took anew after the first ones.
PROGRAM = f"""
import resource, sys
import torch
from bnncli.machine import memory
getattr(memory, sys.argv[1])()
def work():
    for _ in range({TIMES}):
        torch.zeros({BLOCK // 4}).add_(1)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_anew(policy: str, **environment: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, policy],
        capture_output=True,
        text=True,
        check=True,
        env=kept | environment | {"OMP_NUM_THREADS": "1"},
    )
    return int(done.stdout)


@pytest.mark.skipif(not Path("/lib/x86_64-linux-gnu/libc.so.6").exists(), reason="another C library")
def test_kept_blocks_need_no_new_pages_and_returned_ones_do() -> None:
    assert pages_anew("keep_freed_blocks") < BLOCK / PAGE
    assert pages_anew("return_large_blocks") > TIMES * BLOCK / PAGE / 2
    assert pages_anew("keep_freed_blocks", MALLOC_MMAP_THRESHOLD_="1000000") > TIMES * BLOCK / PAGE / 2


class Library:
    """A C library that hears numbers and values."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def mallopt(self, number: int, value: int) -> int:
        self.heard.append((number, value))
        return 1


def test_what_the_environment_says_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    memory.keep_freed_blocks()
    assert library.heard == [(-3, 2**27), (-1, 2**30)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    memory.keep_freed_blocks()
    assert library.heard[2:] == [(-3, 2**27)]
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    memory.return_large_blocks()
    assert library.heard[3:] == []


def test_a_c_library_without_these_numbers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    memory.keep_freed_blocks()
    memory.return_large_blocks()
