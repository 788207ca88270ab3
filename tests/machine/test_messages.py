"""Values that go to another process arrive as they were, and no more of a tensor than is shown."""

from __future__ import annotations

import torch

from bnncli.errors import DataError
from bnncli.models.features import Extracted, PrecisionLoss
from bnncli.system.workers import pack, unpack


def test_features_arrive_without_what_they_are_a_part_of() -> None:
    whole = torch.arange(40_000, dtype=torch.float16).reshape(100, 400)
    sent = Extracted(whole[::2, 1:3], None, torch.arange(50), 3, PrecisionLoss(2, 0.1, 0.2, 1))
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
