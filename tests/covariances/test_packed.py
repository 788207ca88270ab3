"""A large triangle that is laid out for many products gives those of the dense one, and stays away where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems.seeds import seeded

from bnncli.covariances import _packed, root_for_many
from bnncli.covariances._packed import PackedTriangle
from bnncli.covariances.full import Full

CPU = torch.device("cpu")
needs_layouts = pytest.mark.skipif(not _packed.has_layouts(), reason="this PyTorch has no such layouts")


def triangle(size: int) -> torch.Tensor:
    return torch.randn(size, size, generator=seeded(), dtype=torch.float64).tril()


@needs_layouts
@pytest.mark.parametrize("size", [1, 8, 19, 24])
@pytest.mark.parametrize("num_vectors", [1, 4, 16])
def test_products_are_those_of_the_dense_triangle(monkeypatch: pytest.MonkeyPatch, size: int, num_vectors: int) -> None:
    monkeypatch.setattr(_packed, "_WIDTH", 8)
    root = triangle(size)
    packed = PackedTriangle.of(root)
    assert packed is not None
    vectors = torch.randn(num_vectors, size, generator=seeded(1), dtype=torch.float64)
    assert packed.unwhiten(vectors).dtype == torch.float32
    torch.testing.assert_close(packed.unwhiten(vectors).double(), vectors @ root.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.pull_back(vectors).double(), vectors @ root, rtol=1e-5, atol=1e-5)


@needs_layouts
def test_the_upper_half_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """But within a part, which is a square."""
    monkeypatch.setattr(_packed, "_WIDTH", 8)
    root = triangle(24)
    packed = PackedTriangle.of(root + torch.ones(24, 24).triu(16))
    assert packed is not None
    vectors = torch.randn(3, 24, generator=seeded(1))
    torch.testing.assert_close(packed.unwhiten(vectors).double(), vectors.double() @ root.T, rtol=1e-5, atol=1e-5)


@needs_layouts
def test_only_large_float32_roots_on_a_cpu_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.covariances.full._LARGE", 20)
    large, small = Full(triangle(24)), Full(triangle(20))
    assert isinstance(root_for_many(large, CPU, torch.float32), PackedTriangle)
    for covariance, dtype in ((large, None), (large, torch.float64), (small, torch.float32)):
        found = root_for_many(covariance, CPU, dtype)
        assert isinstance(found, Full)
        assert found.scale_tril.dtype == (dtype or torch.float64)
    assert isinstance(root_for_many(Full(triangle(24).to("meta")), torch.device("meta"), torch.float32), Full)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError])
def test_without_the_kernels_the_covariance_multiplies_itself(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def kernels() -> Any:
        raise error("no such operator")

    monkeypatch.setattr("bnncli.covariances.full._LARGE", 20)
    monkeypatch.setattr(_packed, "_kernels", kernels)
    _packed.has_layouts.cache_clear()
    covariance = Full(triangle(24))
    found = root_for_many(covariance, CPU, torch.float32)
    vectors = torch.randn(2, 24, generator=seeded(1))
    torch.testing.assert_close(found.unwhiten(vectors), (vectors.double() @ covariance.scale_tril.T).float())
    _packed.has_layouts.cache_clear()
