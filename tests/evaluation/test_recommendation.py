"""Gains of refinement, of layers, and the verdict on them."""

from __future__ import annotations

import math
from dataclasses import replace
from math import isclose, lgamma, log
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from problems.command_line import Cli
from problems.seeds import seeded
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from bnncli.evaluation.comparison import sample_skewness
from bnncli.evaluation.recommendation import (
    LayerGain,
    Predictive,
    Quality,
    ScoredPredictive,
    accuracy_interval,
    layer_gains,
    loses_accuracy,
    mean_interval,
    p_value,
    recommend,
    recommendation_sentence,
)
from bnncli.evaluation.verdict import (
    ERROR_RATE,
    LOOKS,
    NEGLIGIBLE_NATS,
    VERDICTS,
    Commands,
    PosteriorFacts,
    Verdict,
    give_verdict,
    judge_gain,
    reach,
    reasons_against,
)
from bnncli.flows.affine import Affine
from bnncli.inference import elbo as module
from bnncli.inference.elbo import elbo, measure_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.stacking import stacking_weights
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget

NUM_REPEATS = 1000


@pytest.mark.parametrize(
    ("gain", "error", "verdict"),
    [
        (5.0, 1.0, "helped"),
        (-5.0, 1.0, "hurt"),
        (0.6, 0.15, "helped"),
        (0.0, 0.0, "negligible"),
        (0.1, 0.1, "negligible"),
        (-0.1, 0.1, "negligible"),
        (0.4, 0.01, "negligible"),  # a gain for certain, and for certain one that does not matter
        (0.1, 0.15, None),
        (18.25, 7.68, None),  # absence of evidence
        (-18.25, 7.68, None),
        (0.45, 0.05, None),  # a gain for certain, and whether it matters more draws will tell
        (-0.45, 0.05, None),
    ],
)
def test_a_verdict_needs_evidence(gain: float, error: float, verdict: str | None) -> None:
    assert judge_gain(gain, error, 10_000, is_last=False) == verdict


@pytest.mark.parametrize(
    ("gain", "error", "verdict"),
    [
        (18.25, 7.68, "undecided"),
        (-18.25, 7.68, "undecided"),
        (0.1, 0.15, "undecided"),
        (0.45, 0.05, "helped"),
        (-0.45, 0.05, "hurt"),
        (5.0, 1.0, "helped"),
        (0.1, 0.1, "negligible"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_the_last_look_says_what_is_known(gain: float, error: float, verdict: str) -> None:
    assert judge_gain(gain, error, 10_000, is_last=True) == verdict
    assert verdict in VERDICTS


def test_three_standard_errors_are_more_where_few_draws_tell_them() -> None:
    assert reach(10**6) == pytest.approx(3, abs=1e-4)
    for num_draws in (2, 8, 256):
        assert stats.t.sf(reach(num_draws), num_draws - 1) == pytest.approx(stats.norm.sf(3))
    assert judge_gain(4.0, 1.0, 8, is_last=True) == "undecided"
    assert judge_gain(4.0, 1.0, 256, is_last=True) == "helped"


def drawn_verdicts(differences: NDArray[np.float64], first: int) -> list[str]:
    """The verdict on each row of differences (R, first 2^(LOOKS - 1)), taken look by look until there is one."""
    found = []
    counts = [first * 2**look for look in range(LOOKS)]
    means = np.stack([differences[:, :count].mean(axis=1) for count in counts])
    errors = np.stack([differences[:, :count].std(axis=1, ddof=1) / math.sqrt(count) for count in counts])
    for row in range(len(differences)):
        looks = (
            judge_gain(
                means[k, row],
                errors[k, row],
                count,
                is_last=k == LOOKS - 1,
                skewness=sample_skewness(differences[row, :count]),
            )
            for k, count in enumerate(counts)
        )
        found.append(next(verdict for verdict in looks if verdict is not None))
    return found


SHAPES = {
    "normal": lambda generator, size: generator.standard_normal(size),
    "skewed": lambda generator, size: generator.gamma(1, size=size) - 1,
    "heavy": lambda generator, size: (generator.lognormal(size=size) - math.exp(0.5)) / 2.1612,
}


@pytest.mark.parametrize("shape", ["normal", "skewed", pytest.param("heavy", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("gain", "spread", "wrong"),
    [
        (0.0, 3.0, "helped hurt"),  # a spread at which looks go on to the end, or nearly
        (0.0, 30.0, "helped hurt"),
        (1.0, 3.0, "negligible hurt"),
        (-1.0, 3.0, "negligible helped"),
        (NEGLIGIBLE_NATS, 2.0, "negligible"),  # the worst case
        (-NEGLIGIBLE_NATS, 2.0, "negligible"),
    ],
)
def test_no_verdict_is_wrong_more_often_than_stated(shape: str, gain: float, spread: float, wrong: str) -> None:
    first = 64 if shape == "normal" else 256  # as many as refine draws first
    noise = SHAPES[shape](np.random.default_rng(0), (NUM_REPEATS, first * 2 ** (LOOKS - 1)))
    verdicts = drawn_verdicts(gain + spread * noise, first)
    allowed = ERROR_RATE + 3 * math.sqrt(ERROR_RATE * (1 - ERROR_RATE) / NUM_REPEATS)
    assert all(verdicts.count(one) / len(verdicts) <= allowed for one in wrong.split())


@pytest.mark.parametrize(
    ("gain", "spread", "right"), [(10.0, 10.0, "helped"), (-10.0, 10.0, "hurt"), (0.0, 1.0, "negligible")]
)
def test_what_is_plain_is_said(gain: float, spread: float, right: str) -> None:
    noise = np.random.default_rng(0).standard_normal((200, 64 * 2 ** (LOOKS - 1)))
    assert drawn_verdicts(gain + spread * noise, 64).count(right) >= 198


def make_case(shift: float) -> tuple[LastLayerTarget, Gaussian, Flow]:
    """A posterior that is exactly Gaussian, its Gaussian moved by three deviations, and a flow that moves it back by `shift`."""
    layout = HeadLayout(1, 1)
    features = torch.randn(12, 1, generator=seeded(), dtype=torch.float64)
    target = LastLayerTarget(features, (features[:, 0] > 0).long(), layout, Prior(0.3), 0.0)
    mode = fit_gaussian(target, start=torch.zeros(2)).gaussian
    direction = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    base = Gaussian(mode.mean + mode.covariance.unwhiten(3 * direction)[0], mode.covariance, layout, mode.prior)
    layer = Affine(layout, seeded()).requires_grad_(False).double()
    layer.shift -= shift * direction[0]
    return target, base, Flow(base, (layer,), "affine", "whitened")


def test_the_gain_is_that_of_a_closed_form_with_the_paired_error() -> None:
    target, base, flow = make_case(1.0)
    found = measure_gain(target, base, flow, generator=seeded(), num_samples=256)
    # Away by 3, then by 2: the divergence falls by (9 - 4) / 2. Draw by draw the gain is 2.5 + z, the weights -3 z and -2 z.
    assert found.value == pytest.approx(2.5, abs=4 * found.standard_error)
    gains = found.after.log_weights - found.before.log_weights
    assert found.standard_error == pytest.approx(float(gains.std()) / 16, rel=1e-9)
    assert found.standard_error == pytest.approx(1 / 16, rel=0.2)
    assert found.before.standard_error == pytest.approx(3 / 16, rel=0.2)
    assert found.standard_error < 0.5 * math.hypot(found.before.standard_error, found.after.standard_error)
    assert found.verdict == "helped"


def test_draws_go_on_until_they_decide_and_begin_as_they_did() -> None:
    target, base, flow = make_case(1.0)
    counted = [
        len(measure_gain(target, base, flow, generator=seeded(1), num_samples=count).before.log_weights)
        for count in (4, 64)
    ]
    assert counted[1] == 64
    assert counted[0] in (8, 16, 32, 64)
    once = elbo(target, base, generator=seeded(1), num_samples=4).log_weights
    more = measure_gain(target, base, flow, generator=seeded(1), num_samples=4).before.log_weights
    assert torch.equal(more[:4], once)


def test_drawing_ends_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    target, base, flow = make_case(1.0)
    generator = seeded(3)
    monkeypatch.setattr(
        module, "log_weights", lambda target, posterior, noise, _: 1e3 * torch.randn(len(noise), generator=generator)
    )
    found = measure_gain(target, base, flow, generator=seeded(), num_samples=8)
    assert (found.verdict, len(found.before.log_weights)) == ("undecided", 8 * 2 ** (LOOKS - 1))


def test_weights_that_are_not_finite_end_the_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, base, flow = make_case(1.0)
    monkeypatch.setattr(module, "log_weights", lambda target, posterior, noise, _: torch.full((len(noise),), math.nan))
    assert len(measure_gain(target, base, flow, generator=seeded(), num_samples=8).before.log_weights) == 8


def test_the_report_gives_the_paired_error(cli: Cli, small_run: Path) -> None:
    words = ("refine", small_run, "--flow", "radial", "--length", 2, "--epochs", 1, "--name", "again", "--json")
    metrics = cli(*words).json["metrics"]
    paired = metrics["elbo_gain"]["standard_error"]
    assert 0 < paired < 0.5 * math.hypot(*(metrics[f"elbo_{side}"]["standard_error"] for side in ("before", "after")))
    assert metrics["verdict"] in VERDICTS
    assert metrics["elbo_draws"] in [256 * 2**look for look in range(LOOKS)]


SETS, SIZE = 500, 300
SLACK = 3 * np.sqrt(0.05 * 0.95 / SETS)  # three standard errors of a share of 5 %


def losses(rng: np.random.Generator, shift: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Losses of two predictives, the first sure and now and then wrong, so that differences are skewed; their true means differ by `shift`."""
    theirs = rng.gamma(0.5, 0.6, size=SIZE)
    is_wrong = rng.random(SIZE) < 0.1
    return theirs + np.where(is_wrong, 0.18, -0.02) * rng.gamma(2.0, 0.5, size=SIZE) + shift, theirs


def gain(own: NDArray[np.float64], theirs: NDArray[np.float64]) -> LayerGain:
    return layer_gains({"all": own}, {"all": ("last", theirs)})[0]


def test_where_nothing_differs_a_difference_is_told_five_times_in_a_hundred_and_the_interval_covers() -> None:
    rng = np.random.default_rng(0)
    found = [gain(*losses(rng, 0.0)) for _ in range(SETS)]
    told = np.mean([one.finding in ("better", "worse") for one in found])
    covered = np.mean([one.low is not None and one.low <= 0 <= (one.high or 0) for one in found])
    assert told <= 0.05 + SLACK
    assert covered >= 0.95 - SLACK


def test_the_last_layer_is_rarely_as_good_where_the_others_gain_the_margin() -> None:
    rng = np.random.default_rng(1)
    found = [gain(*losses(rng, -0.003)) for _ in range(SETS)]  # a hundredth of the mean loss, 0.3
    assert np.mean([one.finding == "as good" for one in found]) <= 0.05 + SLACK


@pytest.mark.long
def test_many_posteriors_are_told_together() -> None:
    rng = np.random.default_rng(2)
    told = []
    for _ in range(120):
        pairs = {str(place): losses(rng, 0.0) for place in range(5)}
        found = layer_gains({n: own for n, (own, _) in pairs.items()}, {n: ("last", t) for n, (_, t) in pairs.items()})
        told.append(any(one.finding in ("better", "worse") for one in found))
    assert np.mean(told) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 120)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_ends_where_the_p_value_is_a_fortieth(seed: int) -> None:
    values = np.subtract(*losses(np.random.default_rng(seed), 0.0))
    low, high = mean_interval(values) or (np.nan, np.nan)
    assert p_value(values - low) == pytest.approx(0.025, rel=1e-6)
    assert p_value(high - values) == pytest.approx(0.025, rel=1e-6)


@pytest.mark.parametrize(
    ("differences", "finding", "words"),
    [
        (np.tile([-0.2, -0.1], 50), "better", "all predicts better than the last-layer posterior last"),
        (np.tile([0.2, 0.1], 50), "worse", "the last-layer posterior last predicts better than all"),
        (np.tile([1e-4, -1e-4], 50), "as good", "the last-layer posterior last predicts as well as all"),
        (np.zeros(100), "as good", "val NLL +0.0000 (no interval, p 1, paired)"),
        (np.tile([1.0, -1.0], 10), "untold", "val is too small to distinguish all from"),
    ],
)
def test_what_is_found_is_said_plainly(differences: NDArray[np.float64], finding: str, words: str) -> None:
    theirs = np.full(len(differences), 0.5)
    found = gain(theirs + differences, theirs)
    assert found.finding == finding
    assert words in found.sentence


def test_the_p_of_several_says_that_it_allows_for_them_all() -> None:
    theirs = np.full(100, 0.5)
    both = {"one": theirs + np.tile([-0.2, 0.1], 50), "two": theirs + np.tile([-0.1, 0.1], 50)}
    found = layer_gains(both, dict.fromkeys(both, ("last", theirs)))
    assert [one.to_json()["num_compared"] for one in found] == [2, 2]
    assert all("after Holm correction for 2 posteriors, paired)" in one.sentence for one in found)


COMMANDS = Commands(
    predict=lambda name: f"<predict {name}>",
    sample=lambda judged: f"<sample {judged.target}>",
    fit="<fit>",
    tune="<tune>",
)
POINT = PosteriorFacts("map", "point")
GAUSSIAN = PosteriorFacts(
    "laplace", "gaussian", Prior(10.0), elbo=-100.0, elbo_error=0.05, log_weight_sd=0.8, pareto_k=0.3
)
FLOW = replace(GAUSSIAN, name="refine", type="flow", elbo=-99.9)
CHAINS = PosteriorFacts(
    "hmc", "samples", Prior(10.0), r_hat=1.004, ess_bulk=1500.0, ess_tail=900.0, divergences=0, lowest_acceptance=0.7,
    lowest_bfmi=0.9,
)  # fmt: skip
FAR = replace(GAUSSIAN, log_weight_sd=14.0, pareto_k=1.2, elbo=-130.0)
FAR_FLOW = replace(FLOW, log_weight_sd=9.0, pareto_k=1.1, elbo=-120.0)
BAD_CHAINS = replace(CHAINS, r_hat=1.3)


def judge(*posteriors: PosteriorFacts) -> Verdict:
    return give_verdict(posteriors, COMMANDS, "predict with map")


@pytest.mark.parametrize(
    ("judged", "changes", "doubt"),
    [
        (GAUSSIAN, {}, None),
        (GAUSSIAN, {"log_weight_sd": 2.1}, "log-weight sd 2.1 (above 2)"),
        (GAUSSIAN, {"pareto_k": 0.65, "k_threshold": 0.63}, "Pareto k 0.65 (above 0.63)"),
        (GAUSSIAN, {"pareto_k": 0.62, "k_threshold": 0.63}, None),
        (GAUSSIAN, {"pareto_k": None}, "Pareto k unknown"),
        (GAUSSIAN, {"pareto_k": None, "log_weight_sd": 0.0}, None),
        (GAUSSIAN, {"shortfall": 2.04}, "its ELBO is about 2.04 nats below its maximum"),
        (FLOW, {"log_weight_sd": None, "pareto_k": None}, "its importance weights are undefined"),
        (CHAINS, {}, None),
        (CHAINS, {"r_hat": 1.06}, "R-hat 1.060 (above 1.05)"),
        (CHAINS, {"r_hat": None}, "R-hat undefined"),
        (CHAINS, {"ess_tail": 399.0}, "ESS 399 (below 400)"),
        (CHAINS, {"divergences": 1}, "1 divergence"),
        (CHAINS, {"divergences": 2}, "2 divergences"),
        (CHAINS, {"lowest_acceptance": 0.01}, "a chain accepts only 1.0% of its moves"),
        (CHAINS, {"lowest_bfmi": 0.2}, "E-BFMI 0.20 (below 0.3)"),
        (CHAINS, {"lowest_bfmi": None, "divergences": None, "lowest_acceptance": None}, None),
        (POINT, {}, "a point posterior is a single point, not a distribution"),
    ],
)
def test_good_is_defined_by_these_bounds(judged: PosteriorFacts, changes: dict[str, float], doubt: str | None) -> None:
    assert reasons_against(replace(judged, **changes)) == ([] if doubt is None else [doubt])


@pytest.mark.parametrize(
    ("posteriors", "use", "run"),
    [
        ([POINT, GAUSSIAN, FLOW, CHAINS], "laplace", "<predict laplace>"),
        ([replace(GAUSSIAN, elbo=-102.0), FLOW, CHAINS], "refine", "<predict refine>"),
        ([replace(GAUSSIAN, elbo=-102.0, elbo_error=1.0), FLOW], "laplace", "<predict laplace>"),
        ([FAR, FLOW, CHAINS], "refine", "<predict refine>"),
        ([FAR, FAR_FLOW, CHAINS], "hmc", "<predict hmc>"),
        ([CHAINS, replace(CHAINS, name="longer", ess_bulk=9000.0)], "longer", "<predict longer>"),
        ([FAR, FAR_FLOW], None, "<sample 10>"),
        ([FAR, BAD_CHAINS], None, "<sample 10>"),
        ([POINT], None, "<fit>"),
    ],
)
def test_the_simplest_good_posterior_is_used(posteriors: list[PosteriorFacts], use: str | None, run: str) -> None:
    verdict = judge(*posteriors)
    assert (verdict.use, verdict.run, verdict.is_good) == (use, run, use is not None)
    assert (use or run) in verdict.sentence
    assert verdict.sentence.endswith("; predict with map")


@pytest.mark.parametrize(
    ("posteriors", "words"),
    [
        ([GAUSSIAN], "laplace matches the exact posterior closely (log-weight sd 0.80, Pareto k 0.30); predict"),
        ([replace(GAUSSIAN, reference="hmc", mmd2=1e-4, mmd_p=0.4)], "matches the exact posterior as closely as draws can show"),
        ([replace(GAUSSIAN, reference="hmc", mmd2=1e-2, mmd_p=0.001)], "matches the exact posterior closely (log-weight sd 0.80"),
        ([FAR, FAR_FLOW, CHAINS], "no Gaussian or flow matches the exact posterior (best: refine, log-weight sd 9.00, Pareto k 1.10); hmc has converged"),
        ([CHAINS], "hmc has converged to the exact posterior (R-hat 1.004, ESS 1500 bulk, 900 tail"),
        ([FAR], "(best: laplace, log-weight sd 14.00, Pareto k 1.20): run <sample 10>"),
        ([BAD_CHAINS], "hmc has not converged (R-hat 1.300 (above 1.05)): run <sample 10>"),
    ],
)  # fmt: skip
def test_the_sentence_says_why(posteriors: list[PosteriorFacts], words: str) -> None:
    assert words in judge(*posteriors).sentence


def test_elbos_of_different_targets_are_not_compared() -> None:
    other = replace(GAUSSIAN, name="weak", target=Prior(1.0), elbo=-50.0)
    verdict = judge(GAUSSIAN, other)
    assert (verdict.use, verdict.target) == ("laplace", Prior(10.0))
    assert verdict.sentence.startswith("at prior precision 10, laplace")
    assert judge(FAR, other).use == "weak"  # good for its own target, where no posterior is for the first
    assert judge(FAR, other, CHAINS).use == "hmc"


@pytest.mark.parametrize(
    ("is_worse", "is_tuned", "is_warned"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_good_fit_that_predicts_worse_than_the_network_may_have_a_bad_prior(
    is_worse: bool, is_tuned: bool, is_warned: bool
) -> None:
    found = judge(POINT, replace(CHAINS, is_worse=is_worse, is_tuned=is_tuned))
    assert found.use == "hmc"
    assert ("choose its prior on val (<tune>)" in found.sentence) == is_warned


NUM_EXAMPLES = 400
LOSSES = np.random.default_rng(0).exponential(size=NUM_EXAMPLES)
RIGHT = np.arange(NUM_EXAMPLES) % 5 > 0  # 80 %
BASELINE = ScoredPredictive("temperature", LOSSES, 0.02, RIGHT)


def candidate(name: str, change: float, *, noise: float = 0.02, seed: int = 1, num_lost: int = 0) -> Predictive:
    """Losses that differ from the baseline's by `change` on average; so many predictions that only the baseline gets right."""
    own = np.random.default_rng(seed).normal(size=NUM_EXAMPLES) * noise
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
        ScoredPredictive("p", LOSSES, None, np.full(NUM_EXAMPLES, 0.5)),
        ScoredPredictive("t", LOSSES, None, np.full(NUM_EXAMPLES, 0.75)),
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
