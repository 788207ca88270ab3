"""States of unfinished runs and their draws: whole, or refused in one line."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from problems.command_line import Cli
from problems.streams import before_writes

from bnncli.artifacts import resume
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.resume import DrawFile, SaveClock, identity_of, read_state, remove_state, state_path, write_state
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import BnnError, DataError, OutputExists
from bnncli.numerics.digests import tensor_digest
from bnncli.system import signals


def identity(**changes: Any) -> dict[str, Any]:
    request = {"params": {"draws": 9}, "algo_rev": 1, "seed": 0, "weights_digest": "w"}
    request |= {"sources": [Source("features.train", Path("train.h5"), "digest")]} | changes
    return identity_of(request.pop("params"), **request)


def state() -> dict[str, torch.Tensor]:
    return {
        "z": torch.randn(3, 2, dtype=torch.float64),
        "rng": torch.Generator().manual_seed(3).get_state(),
        "iteration": torch.tensor(7),
        "worst": torch.tensor([float("inf"), float("nan")]),
    }


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = state_path(tmp_path / "hmc.nc")
    written = state()
    write_state(path, written, identity())
    again = read_state(path, identity())
    assert again is not None
    assert again.keys() == written.keys()
    assert all(again[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in written.items())
    assert path.name == ".hmc.resume.safetensors"


def test_a_later_state_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    for iteration in (1, 2):
        write_state(tmp_path / "s", {"iteration": torch.tensor(iteration)}, identity())
    again = read_state(tmp_path / "s", identity())
    assert again is not None
    assert int(again["iteration"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_there_may_be_none(tmp_path: Path) -> None:
    remove_state(tmp_path / "s")
    assert read_state(tmp_path / "s", identity()) is None
    write_state(tmp_path / "s", state(), identity())
    remove_state(tmp_path / "s")
    assert read_state(tmp_path / "s", identity()) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"params": {"draws": 8}}, "other options"),
        ({"seed": 1}, "another seed"),
        ({"algo_rev": 2}, "another revision of the algorithm"),
        ({"weights_digest": None}, "another checkpoint"),
        ({"sources": [Source("features.train", Path("train.h5"), "new")]}, "another features.train"),
        ({"sources": []}, "another features.train"),
    ],
    ids=str,
)
def test_a_state_of_another_request_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "a state"
    write_state(path, state(), identity())
    with pytest.raises(DataError, match=f"it was saved with {words}$") as caught:
        read_state(path, identity(**changes))
    assert (caught.value.exit, caught.value.code) == (65, "resume_mismatch")
    assert f"rm '{path}'" in str(caught.value.hint)


def test_every_damaged_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write_state(path, state(), identity())
    whole = path.read_bytes()
    step = max(1, len(whole) // 40)
    damaged = [whole[:end] for end in range(0, len(whole), step)]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), step)]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(BnnError, match="cannot resume from") as caught:
            read_state(path, identity())
        assert caught.value.exit == 65


def test_a_state_is_saved_although_a_signal_has_come(tmp_path: Path) -> None:
    signals.install_handlers()
    signal.raise_signal(signal.SIGTERM)
    try:
        write_state(tmp_path / "s", state(), identity())
    finally:
        signals.forget_received()
    assert read_state(tmp_path / "s", identity()) is not None


def test_states_are_due_after_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100, 100, 159, 160, 219, 221])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    clock = SaveClock(60)
    assert [clock.is_due() for _ in range(5)] == [False, False, True, False, True]
    monkeypatch.undo()
    assert SaveClock(0).is_due()


@pytest.mark.parametrize(("artifact", "beside"), [("posteriors/hmc.nc", "draws"), ("features/train.h5", "rows")])
def test_status_names_states_and_clean_removes_them(cli: Cli, small_run: Path, artifact: str, beside: str) -> None:
    folder = small_run.with_name("small.bnn")
    path = state_path(folder / artifact)
    write_state(path, state(), identity())
    draws = path.with_name(f".{Path(artifact).stem}.resume.{beside}")
    draws.write_bytes(b"1234")
    assert cli("status", small_run, "--json").json["resume_states"] == [str(draws), str(path)]
    with artifact_lock(folder / ".locks" / artifact.replace("/", "-"), wait=0, poll=lambda: None):
        assert cli("clean", small_run, "--json").json["removed"] == []
    assert cli("clean", small_run, "--json").json["removed"] == [str(draws), str(path)]
    assert not path.exists()


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


def test_memory_holds_no_more_than_a_few_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, taken = threading.Semaphore(0), []
    before_writes(monkeypatch, gate.acquire)
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
    before_writes(monkeypatch, lambda: time.sleep(0.005))
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


def test_changed_draws_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
