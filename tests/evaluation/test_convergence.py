"""Convergence against ArviZ on the same draws, and chains whose verdict is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from arviz_stats.base import array_stats
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation import convergence as module
from bnncli.evaluation.convergence import convergence, rank_statistics
from bnncli.evaluation.verdict import LOW_BFMI, bfmi, lowest_bfmi

pytestmark = pytest.mark.core


def chains(*shape: int, correlation: float = 0.0, seed: int = 0) -> NDArray:
    """Autoregressive chains (C, T, P) with standard normal margins."""
    noise = np.random.default_rng(seed).normal(size=shape)
    draws = noise.copy()
    for t in range(1, shape[1]):
        draws[:, t] = correlation * draws[:, t - 1] + np.sqrt(1 - correlation**2) * noise[:, t]
    return draws


@pytest.mark.parametrize("num_params", [1, 3, 70])
@pytest.mark.parametrize(("num_chains", "num_draws"), [(4, 50), (2, 31)])
def test_the_worst_values_are_those_of_arviz_stats(num_chains: int, num_draws: int, num_params: int) -> None:
    draws = chains(num_chains, num_draws, num_params, correlation=0.5)
    each = np.moveaxis(draws, 2, 0)
    result = convergence(draws)
    r_hat = array_stats.rhat(each, method="rank")
    assert result.r_hat == pytest.approx(r_hat.max(), rel=1e-10)
    assert result.worst_parameter == int(np.argmax(r_hat))
    assert result.ess_bulk == pytest.approx(array_stats.ess(each, method="bulk").min(), rel=1e-10)
    tails = array_stats.ess(each, method="tail", prob=(0.05, 0.95))
    assert result.ess_tail == pytest.approx(tails.min(), rel=1e-10)
    assert result.undefined is None


def test_the_one_parameter_that_does_not_mix_decides() -> None:
    draws = chains(4, 200, 30)
    draws[0, :, 17] += 5
    result = convergence(draws)
    assert result.worst_parameter == 17
    assert result.r_hat > 1.5
    assert result.ess_bulk < 20


def test_one_chain_has_sample_sizes_but_no_r_hat() -> None:
    draws = chains(1, 300, 4)
    draws[:, :, 2] = chains(1, 300, 1, correlation=0.95, seed=1)[:, :, 0]
    result = convergence(draws)
    assert result.r_hat is None
    assert result.undefined == "R-hat needs at least two chains, got 1"
    assert result.worst_parameter == 2
    assert result.ess_bulk == pytest.approx(float(array_stats.ess(draws[:, :, 2], method="bulk")), rel=1e-10)


def stuck(shape: tuple[int, int, int], parameter: int) -> NDArray:
    draws = chains(*shape)
    draws[:, :, parameter] = draws[:, :1, parameter]
    return draws


@pytest.mark.parametrize(
    ("draws", "reason"),
    [
        (chains(4, 3, 2), "needs at least 4 draws per chain, got 3"),
        (chains(4, 0, 2), "needs at least 4 draws per chain, got 0"),
        (stuck((4, 20, 3), 1), "constant draws: parameter 1 does not move"),
        (np.ones((4, 20, 3)), r"parameter 0 does not move within any half-chain (3 such parameters)"),
        (np.ones((4, 20, 0)), "no draws"),
    ],
)
def test_undefined_is_none_with_a_reason(draws: NDArray, reason: str) -> None:
    result = convergence(draws)
    assert result.r_hat is result.ess_bulk is result.ess_tail is result.worst_parameter is None
    assert result.undefined is not None
    assert reason in result.undefined


def test_one_stuck_chain_among_moving_ones_shows_as_a_large_r_hat() -> None:
    draws = chains(4, 50, 2)
    draws[0, :, 1] = 6.0
    result = convergence(draws)
    assert result.worst_parameter == 1
    assert result.r_hat > 1.5


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_draws_that_are_not_finite_are_refused(value: float) -> None:
    draws = chains(2, 10, 2)
    draws[1, 3, 0] = value
    with pytest.raises(DataError, match="got NaN or infinity"):
        convergence(draws)


def test_draws_without_a_chain_axis_are_refused() -> None:
    with pytest.raises(DataError, match=r"expected shape \(C, T, P\), got \(10, 2\)"):
        convergence(chains(2, 10, 2)[0])


def make_ties(draws: NDArray) -> NDArray:
    return np.round(draws)


def make_rejections(draws: NDArray) -> NDArray:
    is_rejected = np.random.default_rng(1).random(draws.shape[:2]) < 0.3
    for t in range(1, draws.shape[1]):
        draws[is_rejected[:, t], t] = draws[is_rejected[:, t], t - 1]
    return draws


def make_a_shifted_chain(draws: NDArray) -> NDArray:
    draws[0] += 3
    return draws


@pytest.mark.parametrize("change", [np.copy, make_ties, make_rejections, make_a_shifted_chain])
@pytest.mark.parametrize("shape", [(4, 50), (2, 31), (1, 40), (3, 4), (2, 5), (7, 120)], ids=str)
@pytest.mark.parametrize("correlation", [-0.7, 0.0, 0.95])
def test_every_statistic_is_that_of_arviz_stats(change: Any, shape: tuple[int, int], correlation: float) -> None:
    draws = change(chains(*shape, 8, correlation=correlation))
    each = np.moveaxis(draws, 2, 0)
    each = np.delete(each, module._stuck(torch.from_numpy(each)), axis=0)
    assert len(each) >= 2
    got = rank_statistics(torch.from_numpy(each))
    expected = array_stats.ess(each, method="bulk"), array_stats.ess(each, method="tail", prob=(0.05, 0.95))
    np.testing.assert_allclose(got.ess_bulk, expected[0], rtol=1e-8)
    np.testing.assert_allclose(got.ess_tail, expected[1], rtol=1e-8)
    if shape[0] > 1:
        with np.errstate(divide="ignore", invalid="ignore"):  # a few ties may leave no variance within any half-chain
            r_hat = array_stats.rhat(each, method="rank")
        is_defined = np.isfinite(r_hat)
        assert is_defined.any()
        np.testing.assert_allclose(got.r_hat[is_defined], r_hat[is_defined], rtol=1e-10)


def test_draws_whose_distances_from_the_median_do_not_vary_have_no_r_hat() -> None:
    draws = np.tile([0.0, 2.0], 4).reshape(2, 4, 1)
    result = convergence(draws)
    assert (result.r_hat, result.worst_parameter) == (None, None)
    assert "parameter 0" in str(result.undefined)


def test_a_gpu_that_is_nearly_full_judges_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, seen = chains(3, 20, 40, correlation=0.5), []
    expected = convergence(draws)

    def tight(part: torch.Tensor) -> Any:
        seen.append((part.device.type, len(part)))
        if len(part) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rank_statistics(part)

    monkeypatch.setattr(module, "rank_statistics", tight)
    monkeypatch.setitem(module._WORK_VALUES, "cpu", 4 * 60)
    with pretend_cuda.pretend() as gpu:
        assert convergence(draws, device=gpu.device) == expected
    assert seen == [("cuda", size) for size in (40, 20, 10, *8 * [5])]
    monkeypatch.setitem(module._WORK_VALUES, "cpu", 1 << 18)
    with pytest.raises(torch.OutOfMemoryError):
        convergence(draws)


@pytest.mark.parametrize("free", [0, 9000, 20_000, 70_000])
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_gpu_that_is_full_leaves_the_rest_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, free: int, is_stuck: bool
) -> None:
    """Blocks that cannot travel, be laid out or be judged there."""
    draws = stuck((3, 20, 40), 17) if is_stuck else chains(3, 20, 40, correlation=0.5)
    monkeypatch.setitem(module._WORK_VALUES, "cpu", 30 * 60)
    expected = convergence(draws)
    with pretend_cuda.pretend(largest_tensor=free) as gpu:
        assert convergence(draws, device=gpu.device) == expected
    assert gpu.problems() == []


@pytest.mark.parametrize(("read", "work"), [(100, 60), (1, 1), (1 << 20, 500)])
def test_parts_of_a_mapped_file_are_judged_like_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int, work: int
) -> None:
    draws = chains(3, 20, 7).astype(np.float32)
    draws[1, :, 4] += 2
    expected = convergence(draws)
    draws.transpose(1, 0, 2).tofile(tmp_path / "draws")
    mapped = np.memmap(tmp_path / "draws", np.float32, "r", shape=(20, 3, 7)).transpose(1, 0, 2)
    monkeypatch.setattr(module, "_READ_VALUES", read)
    monkeypatch.setitem(module._WORK_VALUES, "cpu", work)
    result = convergence(mapped)
    assert result.worst_parameter == expected.worst_parameter == 4
    for name in ("r_hat", "ess_bulk", "ess_tail"):
        assert getattr(result, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_it_is_the_ratio_of_mean_squared_steps_to_the_variance() -> None:
    energy = np.random.default_rng(0).normal(size=(5, 200)).cumsum(axis=1)
    steps = np.diff(energy, axis=1)
    expected = [(s @ s / len(s)) / e.var(ddof=1) for s, e in zip(steps, energy, strict=True)]
    np.testing.assert_allclose(bfmi(energy), expected, rtol=1e-12)


def test_independent_energies_have_two_and_a_slow_walk_is_low() -> None:
    noise = np.random.default_rng(1).normal(size=(2, 20_000))
    np.testing.assert_allclose(bfmi(noise), 2, rtol=0.05)
    assert (bfmi(noise.cumsum(axis=1)) < LOW_BFMI).all()


def test_a_chain_that_stands_still_has_none() -> None:
    energy = np.stack([np.ones(10), np.arange(10.0)])
    assert np.isnan(bfmi(energy)[0])
    assert bfmi(energy)[1] > 0
    assert lowest_bfmi(energy) == 0.0  # it explores nothing
    assert lowest_bfmi(energy[1:]) == bfmi(energy)[1]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_energies_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected shape"):
        bfmi(np.zeros(shape))
