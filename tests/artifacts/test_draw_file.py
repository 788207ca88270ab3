"""Raw draws on disk: they come back as they were, continue where they should, and fail in one line."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bnncli.artifacts import resume
from bnncli.artifacts.resume import DrawFile
from bnncli.errors import DataError, OutputExists, WriteError
from bnncli.numerics.digests import tensor_digest


def records(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(3, 5, generator=generator) for _ in range(count)]


def open_file(folder: Path, **options: Any) -> DrawFile:
    return DrawFile(folder / "hmc.nc", num_chains=3, num_params=5, **options)


def digest_of(draws: list[torch.Tensor]) -> bytes:
    return hashlib.sha256(torch.stack(draws).numpy().tobytes()).digest()


@pytest.mark.parametrize("buffer_bytes", [1, 130, 1 << 20])
def test_draws_come_back_with_the_chain_axis_first(tmp_path: Path, buffer_bytes: int) -> None:
    store, expected = open_file(tmp_path, buffer_bytes=buffer_bytes), records(7)
    for record in expected:
        store.append(record)
    assert torch.equal(store.draws(), torch.stack(expected, dim=1))
    store.remove()
    assert list(tmp_path.iterdir()) == []


def slow_writer(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    """Have `before` called by the writer's thread ahead of each batch."""
    plain = resume._Writer._write
    monkeypatch.setattr(resume._Writer, "_write", lambda self, batch: (before(), plain(self, batch)))


def test_memory_holds_no_more_than_a_few_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, taken = threading.Semaphore(0), []
    slow_writer(monkeypatch, gate.acquire)
    store, expected = open_file(tmp_path, buffer_bytes=1), records(9)
    chains = threading.Thread(target=lambda: [(store.append(record), taken.append(1)) for record in expected])
    chains.start()
    for at_work in range(3):
        chains.join(timeout=0.1)
        assert len(taken) == resume.QUEUED + 1 + at_work  # one with the writer, the others wait
        gate.release()
    gate.release(10)
    chains.join()
    assert torch.equal(store.draws(), torch.stack(expected, dim=1))
    store.remove()


def test_after_a_flush_every_draw_is_on_disk_and_in_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, int]] = []
    slow_writer(monkeypatch, lambda: time.sleep(0.005))
    monkeypatch.setattr(resume, "sync", lambda path: synced.append((path, path.stat().st_size)))
    store, expected = open_file(tmp_path, buffer_bytes=1), records(8)
    for record in expected[:6]:
        store.append(record)
    assert synced == []
    store.flush()
    assert synced == [(store.path, 6 * 60)]  # once, and of all of them
    assert store.digest == digest_of(expected[:6])
    assert store.path.read_bytes() == torch.stack(expected[:6]).numpy().tobytes()
    store.append(expected[6])
    store.close()
    assert len(synced) == 1
    assert [thread.name for thread in threading.enumerate()].count("draws") == 0


def test_the_writer_waits_for_a_copy_before_it_reads_it(tmp_path: Path) -> None:
    expected = records(4)
    late = [torch.full((3, 5), torch.nan) for _ in expected]

    class Arrival:
        def __init__(self, place: int) -> None:
            self.place = place

        def synchronize(self) -> None:
            late[self.place].copy_(expected[self.place])

    store = open_file(tmp_path)
    for place, record in enumerate(late):
        store._send().put(resume._Pending([record], Arrival(place)))
    store.flush()
    assert store.digest == digest_of(expected)
    store.remove()


def test_nothing_is_written_before_the_first_flush_and_then_an_old_state_goes(tmp_path: Path) -> None:
    state = tmp_path / ".hmc.resume.safetensors"
    state.write_bytes(b"old")
    store = open_file(tmp_path)
    store.append(records(1)[0])
    assert state.exists()
    store.flush()
    assert not state.exists()
    store.remove()


def test_draws_that_were_changed_are_refused_and_the_digest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "BUFFER_BYTES", 70)  # read again in several pieces
    first, expected = open_file(tmp_path), records(5)
    for record in expected[:4]:
        first.append(record)
    first.flush()
    assert first.digest == digest_of(expected[:4])
    second = open_file(tmp_path)
    second.continue_from(3, digest_of(expected[:3]))
    second.append(expected[4])
    second.flush()
    assert second.digest == digest_of([*expected[:3], expected[4]])
    content = bytearray(second.path.read_bytes())
    content[100] ^= 1
    second.path.write_bytes(content)
    with pytest.raises(DataError, match="are damaged"):
        open_file(tmp_path).continue_from(4, second.digest)
    first.close()
    second.remove()


def test_a_disk_that_is_full_when_it_is_synced_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resume, "sync", fail)
    store = open_file(tmp_path)
    store.append(records(1)[0])
    with pytest.raises(WriteError, match="No space left on device"):
        store.flush()
    store.remove()


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(1000))
    store = open_file(tmp_path)
    store.path.symlink_to(victim)
    with pytest.raises(OutputExists, match="is a symbolic link"):
        store.continue_from(2, b"")
    store.append(records(1)[0])
    store.flush()
    assert victim.read_bytes() == bytes(1000)
    assert not store.path.is_symlink()
    assert torch.equal(store.draws()[:, 0], records(1)[0])
    store.remove()


def test_digests_do_not_depend_on_the_order_in_memory() -> None:
    draws = torch.stack(records(4)).numpy()
    swapped = draws.transpose(1, 0, 2)
    assert not swapped.flags.c_contiguous
    assert tensor_digest({"x": swapped}) == tensor_digest({"x": swapped.copy()})
    assert tensor_digest({"x": swapped}) != tensor_digest({"x": draws})
