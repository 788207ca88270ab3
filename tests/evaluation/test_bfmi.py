"""E-BFMI against its definition, and of chains whose energy is independent, or a slow walk."""

from __future__ import annotations

import numpy as np
import pytest

from bnncli.evaluation.verdict import LOW_BFMI, bfmi, lowest_bfmi

pytestmark = pytest.mark.core


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
