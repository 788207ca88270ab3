"""What only large problems take, on a pretend GPU: one device throughout, and no wait in an inner loop."""

from __future__ import annotations

import pretend_cuda
import pytest
import torch
from problems.seeds import seeded
from torch import nn

from bnncli.covariances._roots import inverse_root
from bnncli.inference.hmc import Workers, sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.models import features as parts
from bnncli.models.features import InParts
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.system import memory
from bnncli.system.workers import Team
from bnncli.targets.last_layer import LastLayerTarget

GPU = torch.device("cuda:0")
LAYOUT = HeadLayout(3, 6)


def root_of(num_panels: int) -> tuple[int, torch.Tensor]:
    with pretend_cuda.pretend() as gpu:
        size = 7 * num_panels
        matrix = torch.randn(size, size + 2, generator=seeded(), dtype=torch.float64)
        root, _ = inverse_root((matrix @ matrix.T).to(GPU))
        assert root.is_cuda
        found = root.cpu()
    assert gpu.problems() == []
    return gpu.num_syncs, found @ found.T @ (matrix @ matrix.T)


def test_panels_wait_no_more_for_more_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_WIDTH", {"cpu": 7, "cuda": 7})
    monkeypatch.setattr(memory, "_LARGE", 3)
    (few, one), (many, other) = (root_of(count) for count in (3, 6))
    assert few == many
    for found in (one, other):
        torch.testing.assert_close(found, torch.eye(len(found), dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("workers", [None, Workers(Team(0, 1), 2)])
def test_modes_and_chains_in_single_precision_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, workers: Workers | None, structure: str
) -> None:
    monkeypatch.setattr("bnncli.inference.hmc._LARGE", 1)
    monkeypatch.setattr("bnncli.inference.mode.MAX_FULL_PRECONDITIONER", 1)
    for name, value in {"_MANY": 1, "_FAR": 0.1}.items():
        monkeypatch.setattr(f"bnncli.inference.mode.{name}", value)
    for name, value in {"_LARGE": 1, "_PRODUCT_WIDTH": 5}.items():
        monkeypatch.setattr(f"bnncli.covariances.full.{name}", value)
    features, labels = torch.randn(80, 6, generator=seeded()), torch.arange(80) % 3
    with pretend_cuda.pretend() as gpu:
        target = LastLayerTarget(features.to(GPU), labels.to(GPU), LAYOUT, Prior(2.0))
        base = fit_gaussian(target, structure=structure, start=torch.zeros(LAYOUT.num_params)).gaussian
        options = {"num_chains": 4, "num_warmup": 6, "num_draws": 4, "workers": workers}
        drawn = sample_hmc(target, mode=base.mean, covariance=base.covariance, generator=seeded(), **options)
    assert gpu.problems() == []
    assert torch.isfinite(drawn.draws).all()


def test_a_batch_in_parts_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "budget", lambda device: 100_000)
    with pretend_cuda.pretend() as gpu:
        network = nn.Linear(200, 5).to(GPU)
        sizes: list[int] = []

        def read(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            sizes.append(len(inputs))
            with torch.inference_mode():
                wide = torch.cat([inputs] * 20, dim=1)
                return wide[:, :3], network(inputs)

        features, output = InParts(read, GPU)(torch.randn(30, 200, generator=seeded()).to(GPU))  # type: ignore[arg-type]
        assert features.is_cuda
        assert output.is_cuda
    assert gpu.problems() == []
    assert (len(features), sum(sizes[1:])) == (30, 30)
    assert max(sizes) < 10
