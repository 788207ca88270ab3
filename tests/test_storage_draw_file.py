"""Raw draws on disk: they come back as they were, continue where they should, and fail in one line."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from bnncli.digests import tensor_digest
from bnncli.errors import DataError, OutputExists, WriteError
from bnncli.storage import draw_file
from bnncli.storage.draw_file import DrawFile


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


def test_memory_holds_no_more_than_the_buffer(tmp_path: Path) -> None:
    store = open_file(tmp_path, buffer_bytes=150)
    sizes = []
    for record in records(6):
        store.append(record)
        sizes.append(store.path.stat().st_size if store.path.exists() else 0)
    store.remove()
    assert sizes == [0, 0, 180, 180, 180, 360]


def test_nothing_is_written_before_the_first_flush_and_then_an_old_state_goes(tmp_path: Path) -> None:
    state = tmp_path / ".hmc.resume.safetensors"
    state.write_bytes(b"old")
    store = open_file(tmp_path)
    store.append(records(1)[0])
    assert state.exists()
    store.flush()
    assert not state.exists()
    store.remove()


def test_what_came_after_the_state_is_dropped(tmp_path: Path) -> None:
    first, expected = open_file(tmp_path), records(6)
    for record in expected[:4]:
        first.append(record)
    first.flush()
    second = open_file(tmp_path)
    second.continue_from(3, digest_of(expected[:3]))
    for record in expected[4:]:
        second.append(record)
    assert torch.equal(second.draws(), torch.stack([*expected[:3], *expected[4:]], dim=1))
    first.remove()
    second.remove()


def test_a_file_shorter_than_its_state_is_refused(tmp_path: Path) -> None:
    first, second = open_file(tmp_path), open_file(tmp_path)
    with pytest.raises(DataError, match="are gone"):
        second.continue_from(1, b"")
    first.append(records(1)[0])
    first.flush()
    with pytest.raises(DataError, match="are truncated"):
        second.continue_from(2, b"")
    first.remove()
    second.remove()


def test_draws_that_were_changed_are_refused_and_the_digest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_file, "BUFFER_BYTES", 70)  # read again in several pieces
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


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(draw_file, "sync", fail)
    store = open_file(tmp_path, buffer_bytes=1)
    with pytest.raises(WriteError, match="No space left on device"):
        store.append(records(1)[0])
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
