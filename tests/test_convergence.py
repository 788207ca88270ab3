"""Convergence against ArviZ on the same draws, and chains whose verdict is known."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.convergence import convergence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz


def chains(*shape: int, correlation: float = 0.0, seed: int = 0) -> NDArray:
    """Autoregressive chains (C, T, P) with standard normal margins."""
    noise = np.random.default_rng(seed).normal(size=shape)
    draws = noise.copy()
    for t in range(1, shape[1]):
        draws[:, t] = correlation * draws[:, t - 1] + np.sqrt(1 - correlation**2) * noise[:, t]
    return draws


@pytest.mark.parametrize("num_params", [1, 3, 70])
@pytest.mark.parametrize(("num_chains", "num_draws"), [(4, 50), (2, 31)])
def test_the_worst_values_are_those_of_arviz(num_chains: int, num_draws: int, num_params: int) -> None:
    draws = chains(num_chains, num_draws, num_params, correlation=0.5)
    each = [np.ascontiguousarray(draws[:, :, p]) for p in range(num_params)]
    result = convergence(draws)
    r_hat = [float(arviz.rhat(one)) for one in each]
    assert result.r_hat == pytest.approx(max(r_hat), rel=1e-10)
    assert result.worst_parameter == int(np.argmax(r_hat))
    assert result.ess_bulk == pytest.approx(min(float(arviz.ess(one)) for one in each), rel=1e-10)
    tails = [float(arviz.ess(one, method="tail")) for one in each]
    assert result.ess_tail == pytest.approx(min(tails), rel=1e-10)
    assert result.undefined is None


def test_the_one_parameter_that_does_not_mix_decides() -> None:
    draws = chains(4, 200, 30)
    draws[0, :, 17] += 5
    result = convergence(draws)
    assert result.worst_parameter == 17
    assert result.r_hat is not None
    assert result.ess_bulk is not None
    assert result.r_hat > 1.5
    assert result.ess_bulk < 20


def test_independent_draws_have_r_hat_one_and_full_sample_size() -> None:
    result = convergence(chains(4, 2000, 1))
    assert result.r_hat == pytest.approx(1, abs=0.005)
    # The spread of the estimate at 8,000 independent draws is a few percent.
    assert result.ess_bulk == pytest.approx(8000, rel=0.15)


def test_correlated_draws_count_as_the_autoregression_says() -> None:
    correlation = 0.8
    result = convergence(chains(8, 5000, 1, correlation=correlation))
    assert result.ess_bulk == pytest.approx(40_000 * (1 - correlation) / (1 + correlation), rel=0.15)


def test_one_chain_has_sample_sizes_but_no_r_hat() -> None:
    draws = chains(1, 300, 4)
    draws[:, :, 2] = chains(1, 300, 1, correlation=0.95, seed=1)[:, :, 0]
    result = convergence(draws)
    assert result.r_hat is None
    assert result.undefined == "R-hat needs at least two chains, got 1"
    assert result.worst_parameter == 2
    assert result.ess_bulk == pytest.approx(float(arviz.ess(draws[:, :, 2])), rel=1e-10)


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
        (np.ones((4, 20, 3)), r"parameter 0 does not move within any half-chain (3 such)"),
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
    assert result.r_hat is not None
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
