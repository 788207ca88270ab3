"""Sums of shards: the same bits for any number of workers, whatever the number of shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from bnncli.system.workers import Team, shares
from bnncli.targets.blocks import FeatureBlocks, gathered, node_places, row_slices, shard_rows, summed


@dataclass(frozen=True)
class Together(Team):
    """A worker whose others have done their part already: what each has sent is known."""

    sent: tuple[torch.Tensor, ...] = ()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.equal(self.sent[self.rank])
        return [one.clone() for one in self.sent]


def packed(values: list[torch.Tensor], part: range, most: int) -> torch.Tensor:
    """What a worker sends of its shards' values."""
    nodes = summed((shard, (values[shard].clone(),)) for shard in part).nodes
    found = torch.zeros(most, *values[0].shape, dtype=torch.float64)
    for row, (_, _, sums) in enumerate(nodes):
        found[row] = sums[0]
    return found


@pytest.mark.parametrize("num_shards", [1, 2, 5, 7, 13, 64])
def test_any_number_of_workers_comes_to_the_same_bits(num_shards: int) -> None:
    generator = torch.Generator().manual_seed(num_shards)
    scales = torch.logspace(-8, 8, num_shards, dtype=torch.float64)
    values = [torch.randn(3, generator=generator, dtype=torch.float64) * scale for scale in scales]
    alone = summed((shard, (value.clone(),)) for shard, value in enumerate(values)).total()[0]
    for size in (1, 2, 3, 4, 5, 8, 64, 70):
        parts = shares(num_shards, size)
        most = max(len(node_places(part)) for part in parts)
        sent = tuple(packed(values, part, most) for part in parts)
        for rank in {0, size // 2, size - 1}:
            own = summed((shard, (values[shard].clone(),)) for shard in parts[rank])
            (found,) = gathered(own, (values[0],), num_shards, Together(rank, size, num_shards, sent=sent))
            assert found.equal(alone), (size, rank)
    exact = torch.tensor([math.fsum(float(value[i]) for value in values) for i in range(3)], dtype=torch.float64)
    torch.testing.assert_close(alone, exact, rtol=1e-13, atol=0)


def test_a_worker_sends_few_sums_of_many_shards() -> None:
    assert [len(node_places(part)) for part in shares(64, 4)] == [1] * 4
    assert max(len(node_places(part)) for part in shares(64, 3)) <= 6
    assert node_places(range(3, 8)) == [(0, 3), (2, 1)]


@pytest.mark.parametrize(("num_rows", "num_shards", "count"), [(10, 64, 10), (640, 64, 64), (101, 7, 7), (0, 64, 0)])
def test_shards_are_all_rows_in_order_and_none_is_empty(num_rows: int, num_shards: int, count: int) -> None:
    rows = shard_rows(num_rows, num_shards)
    assert len(rows) == count
    assert [row for part in rows for row in range(part.start, part.stop)] == list(range(num_rows))
    assert all(part.stop > part.start for part in rows)


@pytest.mark.parametrize("num_rows", [1, 63, 1000])
def test_sums_of_features_are_those_of_one_process_but_for_rounding(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(1))
    blocks = FeatureBlocks(features, torch.device("cpu"))
    seen: list[tuple[int, int]] = []

    def work(rows: slice, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append((rows.start, rows.stop))
        assert block.equal(features[rows])
        return block.double().sum(dim=0), torch.tensor(len(block))

    alone = blocks.sum(work, columns=4, dtype=torch.float32)
    seen.clear()
    monkeypatch.setattr("bnncli.system.workers._team", [Team(0, 1, 64)])
    sharded = blocks.sum(work, columns=4, dtype=torch.float32)
    assert len(seen) == min(64, num_rows)
    torch.testing.assert_close(sharded[0], alone[0], rtol=0, atol=1e-12)
    assert int(sharded[1]) == num_rows


@pytest.mark.parametrize(("num_rows", "count"), [(0, 1), (1, 1), (512, 1), (513, 2), (10_000, 20), (60_000, 64)])
def test_rows_are_cut_alike_for_any_number_of_workers(num_rows: int, count: int) -> None:
    assert row_slices(num_rows, most=512, team=None) == [slice(0, num_rows)]
    one, *others = (row_slices(num_rows, most=512, team=Team(0, size)) for size in (1, 2, 3, 100))
    assert others == [one] * 3
    assert [row for part in one for row in range(part.start, part.stop)] == list(range(num_rows))
    assert len(one) == count
    sizes = [part.stop - part.start for part in one]
    assert max(sizes) - min(sizes) <= 1
