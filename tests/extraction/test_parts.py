"""Batches that go through a network in parts: the numbers of the whole batch, in a bounded part of the memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bnncli.data.splits import Inputs
from bnncli.errors import DataError
from bnncli.models import features as parts
from bnncli.models.features import InParts
from bnncli.parameters.tensor_bytes import peak_bytes

CPU = torch.device("cpu")


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(0))


class Counted:
    """Features and output of a small network, and how many examples came at once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.sizes: list[int] = []

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        values = inputs["x"] if isinstance(inputs, dict) else inputs
        self.sizes.append(len(values))
        with torch.inference_mode():
            features = self.network(values)
        return features, features.sum(dim=1)


@pytest.mark.parametrize("is_named", [False, True])
def test_parts_give_what_the_batch_gives_with_bounded_activations(
    is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, batch = Counted(), images(50)
    expected = read(batch)
    room = peak_bytes(lambda: read(batch)) // 5
    monkeypatch.setattr(parts, "_CPU_BYTES", room)
    in_parts = InParts(read, CPU)
    inputs: Inputs = {"x": batch} if is_named else batch
    read.sizes.clear()
    found = in_parts(inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    measured, *sizes = read.sizes
    assert (measured, sum(sizes)) == (2, 50)
    assert all(2 <= size <= 10 for size in sizes)
    assert peak_bytes(lambda: in_parts(inputs)) < 1.3 * room
    read.sizes.clear()
    in_parts(inputs)
    assert read.sizes == sizes  # measured once


def test_batches_that_have_room_go_through_as_they_are() -> None:
    read = Counted()
    InParts(read, CPU)(images(50))
    assert read.sizes == [50]


def test_a_network_of_one_batch_size_gets_that(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counted()

    def fixed(inputs: Inputs) -> tuple[Tensor, Tensor]:
        if len(inputs) != 50:
            raise DataError("the network takes 50 inputs")
        return read(inputs)

    monkeypatch.setattr(parts, "_CPU_BYTES", 1000)
    InParts(fixed, CPU)(images(50))
    assert read.sizes == [50]
