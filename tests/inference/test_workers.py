"""Modes and covariances that workers share out."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from problems.heads import at_random, head_target
from problems.long_run import long_but
from problems.threads import in_threads

from bnncli.inference import memory, mode
from bnncli.inference.mode import LocalCovariance, covariance_at, find_mode
from bnncli.parameters.layouts import HeadLayout
from bnncli.structures.full import Full
from bnncli.system import memory as panels
from bnncli.system.workers import Team
from bnncli.targets import last_layer
from bnncli.targets.last_layer import LastLayerTarget, ProbabilityCache

local = threading.local()


@pytest.mark.parametrize("size", long_but([2, 3], 3))
def test_the_mode_is_that_of_one_worker(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("bnncli.targets.blocks", "bnncli.inference.mode"):
        monkeypatch.setattr(f"{place}.team", lambda: getattr(local, "team", None))
    monkeypatch.setattr(last_layer, "rough_multiply", lambda device: last_layer._multiply_and_round)
    monkeypatch.setattr(mode, "_MANY", 20)
    room = ProbabilityCache.room

    def empty_room(
        self: ProbabilityCache, theta: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Rows of others, read by mistake, are not to be mistaken for numbers."""
        found = room(self, theta, shape, dtype)
        return None if found is None else found.fill_(torch.nan)

    monkeypatch.setattr(ProbabilityCache, "room", empty_room)

    targets = [
        head_target(HeadLayout(4, 6), 131, labels=at_random, prior=2.0, dtype=torch.float32) for _ in range(size)
    ]

    def mode_of(team: Team) -> torch.Tensor:
        local.team = team
        return find_mode(targets[team.rank], torch.linspace(-3, 3, 28, dtype=torch.float64)).theta

    (alone,) = in_threads(1, mode_of)
    assert isinstance(alone, torch.Tensor)
    for found in in_threads(size, mode_of):
        assert isinstance(found, torch.Tensor), found
        assert torch.equal(found, alone)


LAYOUT = HeadLayout(4, 6)


@pytest.fixture(autouse=True)
def _each_thread_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "_WIDTH", {"cpu": 5})
    monkeypatch.setattr(panels, "_LARGE", 10)
    for place in (
        "bnncli.inference.mode",
        "bnncli.structures.factorisation",
        "bnncli.targets.blocks",
        "bnncli.inference.memory",
    ):
        monkeypatch.setattr(f"{place}.team", lambda: getattr(local, "team", None))


def covariance_of(team: Team, target: LastLayerTarget) -> LocalCovariance:
    local.team = team
    return covariance_at(target, torch.linspace(-1, 1, LAYOUT.num_params, dtype=torch.float64), "full")


@pytest.mark.parametrize("size", [2, 3])
def test_the_covariance_is_that_of_one_worker_with_room(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = []

    def has_room(layout: HeadLayout, device: torch.device) -> bool:
        rooms.append(layout)
        return False

    monkeypatch.setattr(memory, "has_room_whole", has_room)
    target = head_target(LAYOUT, 57, labels=at_random, prior=2.0)
    (whole,) = in_threads(1, partial(covariance_of, target=target))
    assert (rooms, whole.hessian["hessian.full"].dtype) == ([], torch.float64)
    for found in in_threads(size, partial(covariance_of, target=target)):
        assert isinstance(found.covariance, Full)
        assert torch.equal(found.covariance.scale_tril, whole.covariance.scale_tril)
        assert torch.equal(found.hessian["hessian.full"], whole.hessian["hessian.full"].float())
    assert len(rooms) == size


def test_several_workers_have_room_where_one_has_none() -> None:
    layout = HeadLayout(100, 256)
    (alone,) = in_threads(1, lambda team: memory.fit_bytes("full", layout))

    def bytes_of(team: Team) -> int:
        local.team = team
        return memory.fit_bytes("full", layout)

    assert all(found < 0.7 * alone for found in in_threads(2, bytes_of))
