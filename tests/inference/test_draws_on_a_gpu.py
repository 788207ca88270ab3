"""Chains, their draws and what is said of them on a pretend GPU: what travels, where the host waits, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pretend_cuda
import pytest
import torch
from interrupted import StopAt
from problems.seeds import seeded
from torch import Tensor

from bnncli.artifacts.resume import DrawFile
from bnncli.curvature import ggn
from bnncli.errors import Interrupted
from bnncli.evaluation.convergence import convergence, held_out_convergence
from bnncli.inference.dynamics import DrawStore, MemoryDraws
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.numerics import random
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import standard_normal
from bnncli.targets import blocks
from bnncli.targets.last_layer import LastLayerTarget

LAYOUT = HeadLayout(3, 6)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[pretend_cuda.Pretend]:
    with pretend_cuda.pretend() as found:
        yield found
    assert found.problems() == []


def make_target(num_examples: int = 100) -> LastLayerTarget:
    features = torch.randn(num_examples, 6, generator=seeded())
    return LastLayerTarget(features.to(CUDA), (3 * features[:, :3]).argmax(dim=1).to(CUDA), LAYOUT, Prior(1.0))


def sample(target: LastLayerTarget, store: DrawStore, stop: StopAt | None = None) -> HmcRun:
    base = fit_gaussian(target, start=torch.zeros(21, dtype=torch.float64, device=CUDA)).gaussian
    words = {"num_chains": 4, "num_warmup": 10, "num_draws": 12, "store": store, "resume": stop or StopAt()}
    return sample_hmc(target, mode=base.mean, covariance=base.covariance, generator=seeded(1), **words)


@pytest.mark.parametrize("large", [1, 1000])
def test_chains_wait_for_the_gpu_once_a_warm_up_transition_and_draws_never(
    gpu: pretend_cuda.Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(random, "LARGE", large)
    target, store = make_target(), DrawFile(tmp_path / "hmc.nc", num_chains=4, num_params=21, buffer_bytes=1)
    fit_gaussian(target, start=torch.zeros(21, dtype=torch.float64, device=CUDA))
    gpu.clear()
    sample(target, store)
    assert sum(count for place, count in gpu.syncs.items() if "step_size.py" in place) == 10
    kept = [count for place, count in gpu.syncs.items() if "inference/hmc.py" in place and "step_size.py" not in place]
    assert sum(kept) == 1  # whether all diverged, at the end
    assert not any("draw_file" in place for place in gpu.syncs)
    travelled = sum(gpu.uploads.values())
    assert (travelled < 23 * 8 * 4 + 1) == (large == 1)  # what is compared with acceptances alone; else momenta as well
    store.remove()


def test_long_draws_are_made_on_the_gpu_from_the_streams_seed(
    gpu: pretend_cuda.Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "LARGE", 10)
    stream_ = seeded()
    first, second = (standard_normal(3, 11, stream_, CUDA) for _ in range(2))
    assert (first.device, first.dtype, gpu.uploads.total()) == (CUDA, torch.float64, 0)
    assert not torch.equal(first, second)
    assert torch.equal(standard_normal(3, 11, seeded(), CUDA), first)


def test_a_run_of_long_draws_goes_on_to_the_same_bits(
    gpu: pretend_cuda.Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "LARGE", 1)
    target, cut, store = make_target(), StopAt(17), MemoryDraws()
    whole = sample(target, MemoryDraws())
    with pytest.raises(Interrupted):
        sample(target, store, cut)
    assert torch.equal(sample(target, store, StopAt(stored=cut.stored)).draws, whole.draws)


def test_draws_leave_the_gpu_without_a_wait_and_arrive(gpu: pretend_cuda.Pretend, tmp_path: Path) -> None:
    expected = list(torch.randn(7, 3, 5, generator=seeded()))
    on_gpu = [record.to(CUDA) for record in expected]
    gpu.clear()
    store = DrawFile(tmp_path / "hmc.nc", num_chains=3, num_params=5, buffer_bytes=130)
    for record in on_gpu:
        store.append(record)
    assert (gpu.num_syncs, gpu.downloads.total()) == (0, 6 * 60)
    assert torch.equal(store.draws(), torch.stack(expected, dim=1))
    store.remove()


def test_convergence_is_judged_on_the_gpu_to_the_numbers_of_the_cpu(gpu: pretend_cuda.Pretend) -> None:
    draws = np.random.default_rng(0).normal(size=(30, 4, 21)).astype(np.float32).transpose(1, 0, 2)
    features, labels = torch.randn(9, 6, generator=seeded()), torch.arange(9) % 3
    expected = convergence(draws), held_out_convergence(torch.from_numpy(draws), features, labels, layout=LAYOUT)
    assert gpu.num_kernels == 0
    words = {"layout": LAYOUT, "device": CUDA}
    got = convergence(draws, device=CUDA), held_out_convergence(torch.from_numpy(draws), features, labels, **words)
    assert got == expected
    assert gpu.num_kernels > 200
    gpu.largest_tensor = 8 * 4 * 30 * 9 - 1  # the log probabilities, then, are made on the CPU
    assert held_out_convergence(torch.from_numpy(draws), features, labels, **words) == expected[1]


def test_features_beside_the_gpu_give_the_bits_of_features_on_it(
    gpu: pretend_cuda.Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cuda", 1000)
    monkeypatch.setattr(blocks, "TRANSFER_BYTES", 310 * 24)
    on_it = make_target(1001)
    beside = LastLayerTarget(on_it.features.cpu(), on_it.labels, LAYOUT, on_it.prior)
    theta = torch.randn(5, 21, generator=seeded(2)).to(CUDA)

    def everything(target: LastLayerTarget) -> list[Tensor]:
        hessians = [part for name in ("full", "kron", "diag") for part in ggn(target, theta[0], name).values()]
        return [*hessians, *target.log_joint_and_grad(theta), target.hessian_vector_product(theta[0], theta)]

    for ours, theirs in zip(everything(beside), everything(on_it), strict=True):
        assert torch.equal(ours, theirs)
    assert gpu.uploads.total() > 1001 * 24
