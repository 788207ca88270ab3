"""A permutation drawn without PyTorch, against PyTorch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bnncli.numerics import random as shuffled
from bnncli.numerics.random import permutation, stream_seed

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, *(stream_seed(seed, "extract-features/hold-out") for seed in range(3)))


def expected(num_items: int, seed: int) -> np.ndarray:
    return np.asarray(torch.randperm(num_items, generator=torch.Generator().manual_seed(seed)))


# 624 is the length of the generator's state, of which all is made anew when it is used up.
@pytest.mark.parametrize("num_items", [0, 1, 2, 10, 624, 625, 1000, 60000])
def test_a_permutation_is_torch_s_of_the_same_seed(num_items: int) -> None:
    for seed in SEEDS if num_items < 60000 else SEEDS[-2:]:
        found = permutation(num_items, seed)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, expected(num_items, seed))


def test_a_long_permutation_is_the_same_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    short = permutation(50, 3)
    monkeypatch.setattr(shuffled, "_LONG", 50)
    np.testing.assert_array_equal(permutation(50, 3), short)
