"""The verdict on tables of cases: what is good, what to use, what to run, and prediction kept apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bnncli.evaluation.verdict import Commands, Judged, Verdict, doubts, give_verdict
from bnncli.parameters.prior import Prior

COMMANDS = Commands(
    predict=lambda name: f"<predict {name}>",
    sample=lambda judged: f"<sample {judged.target}>",
    fit="<fit>",
    tune="<tune>",
)
POINT = Judged("map", "point")
GAUSSIAN = Judged("laplace", "gaussian", Prior(10.0), elbo=-100.0, elbo_error=0.05, log_weight_sd=0.8, pareto_k=0.3)
FLOW = replace(GAUSSIAN, name="refine", type="flow", elbo=-99.9)
CHAINS = Judged(
    "hmc", "samples", Prior(10.0), r_hat=1.004, ess_bulk=1500.0, ess_tail=900.0, divergences=0, lowest_acceptance=0.7,
    lowest_bfmi=0.9,
)  # fmt: skip
FAR = replace(GAUSSIAN, log_weight_sd=14.0, pareto_k=1.2, elbo=-130.0)
FAR_FLOW = replace(FLOW, log_weight_sd=9.0, pareto_k=1.1, elbo=-120.0)
BAD_CHAINS = replace(CHAINS, r_hat=1.3)


def judge(*posteriors: Judged) -> Verdict:
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
def test_good_is_defined_by_these_bounds(judged: Judged, changes: dict[str, float], doubt: str | None) -> None:
    assert doubts(replace(judged, **changes)) == ([] if doubt is None else [doubt])


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
def test_the_simplest_good_posterior_is_used(posteriors: list[Judged], use: str | None, run: str) -> None:
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
def test_the_sentence_says_why(posteriors: list[Judged], words: str) -> None:
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
