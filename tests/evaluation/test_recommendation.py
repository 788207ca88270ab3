"""Which predictive is recommended: accuracy is kept, a gain is beyond chance and the margin, and equals give way to the simplest."""

from __future__ import annotations

from dataclasses import replace
from math import isclose, lgamma, log

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from bnncli.evaluation.recommendation import (
    Predictive,
    Quality,
    ScoredPredictive,
    accuracy_interval,
    loses_accuracy,
    mean_interval,
    recommend,
    recommendation_sentence,
)
from bnncli.inference.temperature import stacking_weights

SIZE = 400
LOSSES = np.random.default_rng(0).exponential(size=SIZE)
RIGHT = np.arange(SIZE) % 5 > 0  # 80 %
BASELINE = ScoredPredictive("temperature", LOSSES, 0.02, RIGHT)


def candidate(name: str, change: float, *, noise: float = 0.02, seed: int = 1, num_lost: int = 0) -> Predictive:
    """Losses that differ from the baseline's by `change` on average; so many predictions that only the baseline gets right."""
    own = np.random.default_rng(seed).normal(size=SIZE) * noise
    right = RIGHT.copy()
    right[np.flatnonzero(RIGHT)[:num_lost]] = False
    posterior, _, integrator = name.partition(".")
    return Predictive(
        posterior, integrator or "mc", ScoredPredictive(name, LOSSES + change + own - own.mean(), 0.01, right)
    )


@pytest.mark.parametrize(
    ("candidates", "chosen", "pays"),
    [
        ([], None, False),
        ([candidate("laplace", 0.05)], None, False),
        ([candidate("laplace", -0.05)], "laplace", True),
        ([candidate("laplace", -0.005)], None, False),  # beyond chance, and half a percent of the NLL
        ([candidate("laplace", -0.05, noise=5.0)], None, False),
        ([candidate("laplace", -0.05), candidate("hmc", -0.0501, seed=2)], "laplace", True),
        ([candidate("laplace", -0.05), candidate("hmc", -0.09, seed=2)], "hmc", True),
        ([candidate("laplace", -0.005), candidate("hmc", -0.05, seed=2)], "hmc", True),
        ([candidate("laplace", -0.05, num_lost=30)], None, False),
        ([candidate("laplace", -0.05, num_lost=2)], "laplace", True),
        ([candidate("laplace", -0.09, num_lost=30), candidate("hmc", -0.05, seed=2)], "hmc", True),
    ],
    ids=[
        "none", "worse", "better", "within-the-margin", "chance", "simplest", "better-than-the-simplest", "only-one-better",
        "loses-accuracy", "loses-accuracy-by-chance", "keeps-accuracy",
    ],
)  # fmt: skip
def test_the_recommended(candidates: list[Predictive], chosen: str | None, pays: bool) -> None:
    found = recommend(candidates, BASELINE)
    assert (found.chosen.posterior if found.chosen else None, found.pays) == (chosen, pays)
    assert ("predict with temperature" in recommendation_sentence(found, BASELINE, "temperature")) == (chosen is None)


def test_accuracy_may_be_given_up_where_that_is_asked_for() -> None:
    losing = candidate("laplace", -0.05, num_lost=30)
    found = recommend([losing], BASELINE, keep_accuracy=False)
    assert found.chosen is losing
    assert "without losing accuracy (laplace lost some)" in recommend([losing], BASELINE).why


def test_features_without_a_network_have_the_simplest_that_none_beats() -> None:
    near, far = candidate("laplace", 0.0), candidate("hmc", -0.001, seed=2)
    assert recommend([near, far], None).chosen is near
    assert recommend([near, candidate("hmc", -0.1, seed=2)], None).chosen is not near


def test_bayes_is_rarely_said_to_pay_where_it_does_not() -> None:
    generator, num, paid = np.random.default_rng(3), 600, 0
    for _ in range(num):
        truth = 2 * generator.normal(size=150)
        signs = np.where(generator.random(150) < 1 / (1 + np.exp(-truth)), 1, -1)
        noisy = truth + generator.normal(scale=0.5, size=(7, 150))  # of equal quality
        losses, *others = np.logaddexp(0, -signs * noisy)
        scored = [ScoredPredictive(str(place), other) for place, other in enumerate(others)]
        found = recommend([Predictive("p", one.name, one) for one in scored], ScoredPredictive("temperature", losses))
        paid += found.pays
    assert paid / num < 0.025 + 3 * (0.025 * 0.975 / num) ** 0.5
    assert paid > 0


def test_a_quality_is_better_or_worse_where_its_interval_leaves_out_zero() -> None:
    findings = [
        Quality("nll", 0.4, 0.5, *ends, higher_is_better).finding
        for higher_is_better in (False, True)
        for ends in ((-0.2, -0.1), (0.1, 0.2), (-0.1, 0.1), (None, None))
    ]
    none = "no significant difference"
    assert findings == ["better", "worse", none, none, "worse", "better", none, none]
    shown = Quality("accuracy", 0.862, 0.8725, -0.019, -0.0026, True).cells
    assert shown == ["accuracy", "0.8620", "0.8725", "-0.0105", "-0.0190 to -0.0026", "worse"]


@pytest.mark.parametrize(("won", "lost", "size"), [(40, 20, 160), (0, 5, 60), (3, 0, 1000), (7, 7, 30)])
def test_ends_of_the_accuracy_interval_are_those_that_the_score_test_just_rejects(
    won: int, lost: int, size: int
) -> None:
    own, other = np.zeros(size), np.zeros(size)
    own[:won], other[won : won + lost] = 1, 1
    found = accuracy_interval(own, other)
    assert found is not None
    for end in found:

        def loss(p: float, difference: float = end) -> float:
            """Minus the log likelihood of discordant shares p + difference and p."""
            shares = (p + difference, p, 1 - 2 * p - difference)
            counts = (won, lost, size - won - lost)
            return -sum(n * log(max(share, 1e-300)) for n, share in zip(counts, shares, strict=True))

        lowest, highest = max(0.0, -end), (1 - end) / 2
        p = float(minimize_scalar(loss, bounds=(lowest, highest), method="bounded", options={"xatol": 1e-12}).x)
        statistic = (won - lost - size * end) / (size * (2 * p + end - end**2)) ** 0.5
        assert isclose(abs(statistic), 1.959964, rel_tol=2e-3)


def test_the_accuracy_interval_covers_and_accuracy_is_rarely_called_lost_where_it_is_not() -> None:
    size = 60
    found = {}
    for won in range(31):
        for lost in range(31):
            own, other = np.zeros(size), np.zeros(size)
            own[:won], other[won : won + lost] = 1, 1
            found[won, lost] = accuracy_interval(own, other)
    for gain, loss in ((0.1, 0.1), (0.05, 0.05), (0.1, 0.02), (0.02, 0.12)):
        covered = lost_wrongly = 0.0
        for (won, lost), ends in found.items():
            rest = size - won - lost
            logs = lgamma(size + 1) - lgamma(won + 1) - lgamma(lost + 1) - lgamma(rest + 1)
            weight = np.exp(logs + won * log(gain) + lost * log(loss) + rest * log(1 - gain - loss))
            assert ends is not None
            covered += weight * (ends[0] <= gain - loss <= ends[1])
            lost_wrongly += weight * (ends[1] < 0)
        assert covered > 0.93, (gain, loss, covered)
        if gain >= loss:
            assert lost_wrongly < 0.03


def test_shares_of_right_labels_have_the_interval_of_a_mean() -> None:
    generator = np.random.default_rng(2)
    own, other = generator.integers(0, 5, size=(2, 80)) / 4
    assert accuracy_interval(own, other) == mean_interval(own - other)
    halves = (
        ScoredPredictive("p", LOSSES, None, np.full(SIZE, 0.5)),
        ScoredPredictive("t", LOSSES, None, np.full(SIZE, 0.75)),
    )
    assert not loses_accuracy(*halves)  # all differ alike: no variance, and so no interval


@pytest.mark.parametrize(
    ("candidates", "chosen", "pays"),
    [
        ([candidate("stack", -0.005)], "stack", False),
        ([candidate("stack", 0.005)], None, False),
        ([candidate("stack", -0.005, num_lost=30)], None, False),
        ([candidate("stack", -0.05)], "stack", True),
        ([candidate("stack", -0.005), candidate("hmc", -0.05, seed=2)], "hmc", True),
        ([candidate("stack", -0.03), candidate("hmc", -0.0301, seed=2)], "stack", True),
    ],
    ids=["lower", "higher", "loses-accuracy", "beyond-chance", "beaten", "simplest"],
)
def test_a_stack_is_taken_where_its_nll_is_lower_at_all(
    candidates: list[Predictive], chosen: str | None, pays: bool
) -> None:
    candidates = [replace(one, has_network=one.posterior == "stack") for one in candidates]
    found = recommend(candidates, BASELINE)
    assert (found.chosen.posterior if found.chosen else None, found.pays) == (chosen, pays)


@pytest.mark.long
@pytest.mark.parametrize("rows", [100, 400])
def test_a_stack_of_what_is_no_better_than_the_network_costs_little(rows: int) -> None:
    """The network is right, others are it with noise: what val chooses, scored on other rows."""
    generator, costs = np.random.default_rng(0), []

    def scores(size: int) -> np.ndarray:
        """Log probabilities (N, 4) of labels drawn from the first."""
        logits = generator.normal(size=(size, 1, 3)) * 1.5
        labels = (logits[:, 0] + generator.gumbel(size=(size, 3))).argmax(axis=1)
        noisy = logits + 0.7 * generator.normal(size=(size, 4, 3)) * np.array([0, 1, 1, 1])[:, None]
        return log_softmax(noisy, axis=2)[np.arange(size), :, labels]

    for _ in range(40):
        val, test = scores(rows), scores(20_000)
        weights = stacking_weights(torch.from_numpy(val)).numpy()
        folds = np.arange(rows) % 5
        held = np.empty(rows)
        for fold in range(5):
            own = stacking_weights(torch.from_numpy(val[folds != fold])).numpy()
            held[folds == fold] = np.log(np.exp(val[folds == fold]) @ own)
        network = ScoredPredictive("temperature", -val[:, 0], None, None)
        found = recommend(
            [Predictive("stack", "mc", ScoredPredictive("stack", -held, None, None), has_network=True)], network
        )
        own = -np.log(np.exp(test) @ weights) if found.chosen else -test[:, 0]
        costs.append((own + test[:, 0]).mean())
    assert np.mean(costs) < 1 / rows
    assert max(costs) < 8 / rows
