"""Which posterior is recommended: never one that is worse on val than one temperature, and none is said to pay by chance."""

from __future__ import annotations

import numpy as np
import pytest

from bnncli.evaluation.excess import Scored
from bnncli.evaluation.recommendation import Predictive, recommend

NOISE = np.random.default_rng(0)
LOSSES = NOISE.exponential(size=400)


def candidate(
    name: str, change: float, *, rung: int = 1, is_good: bool = True, noise: float = 0.02, seed: int = 1
) -> Predictive:
    """Losses that differ from the baseline's by `change` on average."""
    own = np.random.default_rng(seed).normal(size=400) * noise
    posterior, _, integrator = name.partition(".")
    return Predictive(posterior, integrator or "mc", rung, is_good, Scored(name, LOSSES + change + own - own.mean()))


BASELINE = Scored("temperature", LOSSES)


@pytest.mark.parametrize(
    ("candidates", "chosen", "pays"),
    [
        ([], None, False),
        ([candidate("laplace", 0.001)], None, False),
        ([candidate("laplace", -0.001)], "laplace", False),
        ([candidate("laplace", -0.05), candidate("hmc", -0.0501, rung=3)], "laplace", True),
        ([candidate("laplace", -0.05, is_good=False), candidate("hmc", -0.04, rung=3, noise=0.5)], "hmc", True),
        ([candidate("laplace", -0.001), candidate("hmc", -0.05, rung=3, seed=2)], "hmc", True),
        ([candidate("laplace", 0.01), candidate("refine", -0.001, rung=2, is_good=False)], "refine", False),
        ([candidate("laplace.mc", 0.001), candidate("laplace.plug-in", -0.001)], "laplace", False),
    ],
    ids=[
        "none",
        "worse",
        "as-good",
        "simplest",
        "only-good",
        "better-beyond-chance",
        "none-good",
        "by-another-integrator",
    ],
)
def test_the_recommended(candidates: list[Predictive], chosen: str | None, pays: bool) -> None:
    found = recommend(candidates, BASELINE)
    assert (found.chosen.posterior if found.chosen else None, found.pays) == (chosen, pays)


def test_nothing_recommended_is_worse_on_val_than_the_baseline_and_bayes_is_rarely_said_to_pay_where_it_does_not() -> (
    None
):
    generator, num, paid = np.random.default_rng(3), 600, 0
    for _ in range(num):
        losses = generator.exponential(size=150)
        scored = [Scored(str(place), losses + generator.normal(scale=0.3, size=150)) for place in range(6)]
        candidates = [Predictive("p", one.name, 1, bool(generator.integers(2)), one) for one in scored]
        found = recommend(candidates, Scored("temperature", losses))
        paid += found.pays
        assert found.chosen is None or found.chosen.scored.nll <= losses.mean()
    assert paid / num < 0.05 + 3 * (0.05 * 0.95 / num) ** 0.5
    assert paid > 0
