"""What ends one process of several is known to the others, with its number and as the error that it was."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bnncli.errors import DataError, DeviceError
from bnncli.system import workers
from bnncli.system.workers import LOST, LastWords


class Store(dict[str, bytes]):
    """In memory, as torch's is."""

    def set(self, key: str, value: str | bytes) -> None:
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str, default: object = None) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def words(store: Store, size: int = 3) -> list[LastWords]:
    return [LastWords(store, rank, size) for rank in range(size)]


def test_the_first_hears_the_error_of_the_lowest_rank_that_has_one() -> None:
    first, second, third = words(Store())
    assert first.heard() is None
    third.leave(DeviceError("out of memory", code="out_of_memory", hint="use less"))
    second.leave(DataError("row 3 is bad", path="a.npz"))
    told = first.heard()
    assert isinstance(told, DataError)
    assert (told.message, told.exit, told.path) == ("worker 1: row 3 is bad", 65, "a.npz")
    assert second.heard() is None


def test_others_end_with_the_code_of_the_first() -> None:
    first, second, _ = words(Store())
    assert not second.first_has_ended()
    first.leave(DataError("row 3 is bad"))
    assert second.first_has_ended()
    told = second.heard()
    assert told is not None
    assert (told.exit, told.code) == (65, LOST)


def test_the_first_waits_until_the_others_have_heard_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store may end with it."""
    store = Store()
    first, second, third = words(store)
    first.leave(DataError("row 3 is bad"))
    third.leave(DeviceError("out of memory", code="out_of_memory"))  # has a word of its own

    def waited() -> float:
        before = time.monotonic()
        first.wait_until_heard()
        return time.monotonic() - before

    monkeypatch.setattr(workers, "ENDING", 0.3)
    assert waited() >= 0.3
    assert second.first_has_ended()
    assert waited() < 0.2
    store.clear()  # the first is gone
    told = second.heard()
    assert told is not None
    assert told.exit == 65


def test_the_first_waits_for_none_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    first, *_ = words(store, size=2)
    monkeypatch.setattr(workers, "ENDING", 30)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        store.set("process/1", store["process/1"].rpartition(b"/")[0] + f"/{ended.pid}".encode())
        first.wait_until_heard()  # 30 s otherwise
    store.set("process/1", f"another machine/{ended.pid}")
    monkeypatch.setattr(workers, "ENDING", 0.2)
    before = time.monotonic()
    first.wait_until_heard()
    assert time.monotonic() - before >= 0.2


def test_a_process_that_is_no_more_is_told_from_those_that_run() -> None:
    store = Store()
    first, *_ = words(store)
    assert first.killed(patience=0.05) is None
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:  # nobody has asked for its code yet
        store.set("process/2", store["process/2"].rpartition(b"/")[0] + f"/{ended.pid}".encode())
        told = first.killed(patience=30)
    assert told is not None
    assert told.message.startswith("worker 2 stopped without an error")
    store.set("process/2", f"another machine/{ended.pid}")
    assert first.killed() is None
