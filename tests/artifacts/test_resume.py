"""Resume states: they come back as they were written, and only for the request they were saved for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts.provenance import Source
from bnncli.artifacts.resume import SaveClock, identity_of, read_state, remove_state, state_path, write_state
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import BnnError, DataError
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
    signals._received.append(signal.SIGTERM)
    try:
        write_state(tmp_path / "s", state(), identity())
    finally:
        signals.forget_received()
    assert read_state(tmp_path / "s", identity()) is not None


def test_a_state_is_no_artifact(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_state(path, state(), identity())
    assert cli("inspect", path).code == 65


def test_states_are_due_after_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100, 100, 159, 160, 219, 221])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    clock = SaveClock(60)
    assert [clock.is_due() for _ in range(5)] == [False, False, True, False, True]
    monkeypatch.undo()
    assert SaveClock(0).is_due()


@pytest.mark.parametrize(("artifact", "beside"), [("posteriors/hmc.nc", "draws"), ("features/train.h5", "rows")])
def test_status_names_states_and_clean_removes_them_unless_in_use(
    cli: Cli, small_run: Path, artifact: str, beside: str
) -> None:
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
