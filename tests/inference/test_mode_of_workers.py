"""The mode of a large head that workers share out: each keeps the probabilities of its own rows alone, and all find the same bits."""

from __future__ import annotations

import threading

import pytest
import torch
from problems.heads import at_random, head_target
from problems.threads import in_threads

from bnncli.inference import mode as mode_module
from bnncli.inference.mode import find_mode
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.workers import Team
from bnncli.targets import last_layer
from bnncli.targets import last_layer as products
from bnncli.targets.last_layer import KeptProbabilities

local = threading.local()


@pytest.mark.parametrize("size", [2, 3])
def test_the_mode_is_that_of_one_worker(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("bnncli.targets.blocks", "bnncli.inference.mode"):
        monkeypatch.setattr(f"{place}.team", lambda: getattr(local, "team", None))
    monkeypatch.setattr(last_layer, "rough_multiply", lambda device: products._multiply_and_round)
    monkeypatch.setattr(mode_module, "_MANY", 20)
    room = KeptProbabilities.room

    def empty_room(
        self: KeptProbabilities, theta: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Rows of others, read by mistake, are not to be mistaken for numbers."""
        found = room(self, theta, shape, dtype)
        return None if found is None else found.fill_(torch.nan)

    monkeypatch.setattr(KeptProbabilities, "room", empty_room)

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
