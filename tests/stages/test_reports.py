"""What reports tell people: the advice after a refinement, which pairs of posteriors are shown."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from bnncli.commands.diagnose.diagnosis import MAX_PAIRS, diagnosis_tables
from bnncli.commands.refine import summary


def refined(**changes: Any) -> dict[str, Any]:
    """Metrics of a refinement that helped and is still far from the target."""
    estimate = {"value": -1.0, "standard_error": 0.1}
    return {
        "elbo_before": estimate,
        "elbo_after": estimate,
        "elbo_gain": estimate,
        "elbo_draws": 8,
        "log_weight_sd_before": 30.0,
        "log_weight_sd_after": 20.0,
        "verdict": "helped",
        "ended_early": False,
        "epochs": 20,
        "epochs_run": 20,
        "flow": "radial",
        "settings": {},
    } | changes


@pytest.mark.parametrize("verdict", ["helped", "negligible"])
@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "try --flow affine, or hmc"),
        ({"flow": "affine", "settings": {"scale": "kron"}}, "try --scale block, a longer --length, or hmc"),
        ({"flow": "affine", "settings": {"scale": "block"}}, "try more --epochs, or hmc"),
    ],
)
def test_a_refinement_that_is_far_off_advises_the_next_better_flow(
    verdict: str, changes: dict[str, Any], advice: str
) -> None:
    assert summary(refined(verdict=verdict, **changes))[-1].endswith(advice)


def test_a_refinement_that_is_close_advises_nothing() -> None:
    assert not any("try" in line for line in summary(refined(log_weight_sd_after=1.0)))


def test_a_gain_that_draws_do_not_tell_is_no_difference_to_speak_of() -> None:
    gain = {"value": 18.25, "standard_error": 7.68}
    line = summary(refined(verdict="undecided", elbo_gain=gain, elbo_draws=4096))[-1]
    assert line.startswith("undecided after 4096 draws: the gain is between -4.80 and +41.30 nats")
    assert line.endswith("try --flow affine, or hmc; or use more --elbo-draws")
    assert not any("no difference" in line for line in summary(refined(verdict="undecided")))


@pytest.mark.parametrize(("value", "is_small"), [(0.3, True), (30.0, False)])
def test_a_small_help_is_called_small(value: float, is_small: bool) -> None:
    lines = summary(refined(elbo_gain={"value": value, "standard_error": 0.01}))
    assert any("but by less than 0.5 nats" in line for line in lines) == is_small


def test_a_refinement_that_predicts_worse_than_its_base_is_not_called_a_help() -> None:
    excess = {"base": {"value": 0.1, "is_worse": True}, "network": {"value": -0.1, "is_worse": False}}
    (line,) = [line for line in summary(refined(val_excess=excess)) if "closer to the target" in line]
    assert "helped" not in line
    assert "but predicts val worse than its base" in line
    assert "network" not in line
    assert "--prior-precision" not in line
    assert "not the approximation" not in line  # log importance weights of standard deviation 20: it may well be
    (close,) = [line for line in summary(refined(val_excess=excess, log_weight_sd_after=1.0)) if "closer" in line]
    assert close.endswith("the model and its prior cause this, not the approximation")
    of_network = summary(refined(val_excess=excess, over_layers="all"))
    assert any("--prior-precision that the network was trained with" in line for line in of_network)


def test_a_refinement_that_predicts_worse_than_the_network_is_not_called_a_help() -> None:
    excess = {"network": {"value": 0.1, "is_worse": True}, "temperature": {"value": 0.2, "is_worse": True}}
    (line,) = [line for line in summary(refined(val_excess=excess)) if "closer to the target" in line]
    assert "helped" not in line
    assert "worse than the network at its best temperature and the network as trained" in line


def test_draws_that_are_there_are_not_advised_to_be_made() -> None:
    lines = summary(refined(), has_draws=True)
    assert lines[-1].endswith("try --flow affine, or the run's hmc draws")


def test_an_early_end_is_told() -> None:
    lines = summary(refined(ended_early=True, epochs_run=12))
    assert "stopped after 12 of 20 epochs because the ELBO no longer improved" in lines


def pair(first: str, second: str) -> dict[str, Any]:
    numbers = {"unbiased": 0.0, "biased": 0.0, "p_value": 0.5, "permutations": 999}
    return {"posteriors": [first, second], "is_same_target": True, "bandwidth_of": "hmc", **numbers}


@pytest.mark.parametrize(("count", "shown"), [(6, 15), (8, 7)])
def test_many_pairs_are_shown_against_the_draws_alone(count: int, shown: int) -> None:
    names = ["hmc", *(f"flow{i}" for i in range(count - 1))]
    pairs = [pair(*both) for both in combinations(names, 2)]
    (table,) = diagnosis_tables({}, pairs)
    assert len(table.rows) == shown
    assert any("more pairs without hmc" in note for note in table.notes) == (len(pairs) > MAX_PAIRS)


def test_a_refinement_that_hurt_says_what_to_do() -> None:
    line = summary(refined(verdict="hurt"))[-1]
    assert line.startswith("refinement made the posterior worse: use the base, or try --flow affine")
