"""Results of workers in order, and what they send each other."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from bnncli.errors import DataError
from bnncli.models.features import ExtractedFeatures, PrecisionLoss
from bnncli.system import workers
from bnncli.system.workers import Parts, Team


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


def test_features_are_sent_without_what_they_are_a_part_of() -> None:
    whole = torch.arange(40_000, dtype=torch.float16).reshape(100, 400)
    sent = ExtractedFeatures(whole[::2, 1:3], None, torch.arange(500)[:50], 3, PrecisionLoss(2, 0.1, 0.2, 1))
    packed = pickle.dumps(sent.detached())
    assert len(packed) < 50 * (2 * 2 + 8) + 2000
    found = pickle.loads(packed)
    assert torch.equal(found.features, sent.features)
    assert torch.equal(found.labels, sent.labels)
    assert found[3:] == sent[3:]


def test_an_error_arrives_with_all_that_it_says() -> None:
    found = pickle.loads(pickle.dumps(DataError("row 3", hint="look", code="bad_labels", path="a.npz")))
    assert isinstance(found, DataError)
    assert (found.message, found.hint, found.code, found.path, found.exit) == ("row 3", "look", "bad_labels", "a.npz", 65)  # fmt: skip
