"""How workers hear of one another: results in order, last words, heartbeats, and messages."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from bnncli.errors import DataError, DeviceError
from bnncli.models.features import ExtractedFeatures, PrecisionLoss
from bnncli.system import workers
from bnncli.system.workers import LOST, SILENCE, ErrorBoard, Heartbeats, Parts, Team, pack, unpack


@dataclass(frozen=True)
class Heard(Team):
    """A worker whose others have sent already; it notes what it sends itself."""

    sent: dict[int, torch.Tensor] = field(default_factory=dict)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sent[self.rank] = tensor
        return [self.sent.get(rank, tensor) for rank in range(self.size)]


def results(parts: Parts, sizes: list[int]) -> np.ndarray:
    """What this worker has of all: of part p the numbers 100 p, 100 p + 1, ..., two in a row."""
    own = [100 * part + np.arange(sizes[part], dtype=np.float32) for part in parts.own]
    found = np.concatenate([np.empty(0, dtype=np.float32), *own])
    return parts.of_all(np.stack([found, -found], axis=1), sizes)


@pytest.mark.parametrize("sizes", [[3], [4, 0], [2, 5, 1, 0, 3], [1] * 9, [0, 0, 7]])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_worker_has_all_results_in_their_order(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], size: int
) -> None:
    alone, parts, sent = results(Parts(len(sizes)), sizes), Parts(len(sizes)), dict[int, torch.Tensor]()
    for _ in range(2):  # the second time all have sent
        shares: list[int] = []
        for rank in range(size):
            worker = Heard(rank, size, sent=sent)
            monkeypatch.setattr(workers, "team", lambda worker=worker: worker)
            found = results(parts, sizes)
            shares += parts.own
    assert (found.dtype, len(sent)) == (np.float32, size if len(sizes) >= size > 1 else 0)
    np.testing.assert_array_equal(found, alone)
    assert sorted(shares) == sorted([*range(len(sizes))] * (1 if sent or size == 1 else size))


class Store(dict[str, bytes]):
    """In memory, as torch's is."""

    def set(self, key: str, value: str | bytes) -> None:
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str, default: object = None) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def words(store: Store, size: int = 3) -> list[ErrorBoard]:
    return [ErrorBoard(store, rank, size) for rank in range(size)]


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
    assert told.message.startswith("worker 2 stopped without an error")
    store.set("process/2", f"another machine/{ended.pid}")
    assert first.killed() is None


def test_the_first_looks_at_all_and_the_others_at_the_first() -> None:
    marks, ended = Store({f"beat/{rank}": b"0" for rank in range(3)}), list[int]()
    first, last = (Heartbeats(marks, rank, 3, ended.append) for rank in (0, 2))
    for now in (0.0, SILENCE - 1):
        assert (first.silent(now), last.silent(now)) == (None, None)
    marks["beat/0"] = marks["beat/1"] = b"1"
    assert (first.silent(SILENCE + 1), last.silent(SILENCE + 1)) == (2, None)
    marks["beat/2"] = b"1"
    assert first.silent(SILENCE + 2) is None
    assert (first.silent(2 * SILENCE), last.silent(2 * SILENCE + 2)) == (None, 0)


def test_features_arrive_without_what_they_are_a_part_of() -> None:
    whole = torch.arange(40_000, dtype=torch.float16).reshape(100, 400)
    sent = ExtractedFeatures(whole[::2, 1:3], None, torch.arange(50), 3, PrecisionLoss(2, 0.1, 0.2, 1))
    packed = pack(sent)
    assert len(packed) < 50 * (2 * 2 + 8) + 1000
    found = unpack(packed)
    assert found.features.dtype == torch.float16
    assert torch.equal(found.features, sent.features)
    assert torch.equal(found.labels, sent.labels)
    assert found[3:] == sent[3:]
    found.features.add_(1)  # it may be written to


def test_an_error_arrives_with_all_that_it_says() -> None:
    found = unpack(pack(DataError("row 3", hint="look", code="bad_labels", path="a.npz")))
    assert isinstance(found, DataError)
    assert (found.message, found.hint, found.code, found.path, found.exit) == ("row 3", "look", "bad_labels", "a.npz", 65)  # fmt: skip
