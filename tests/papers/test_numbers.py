"""Formulas and rules: values, standard errors, what chance leaves open."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from bnncli.evaluation.comparison import LEVEL, Estimate
from bnncli.papers.numbers import Numbers, Unmeasured, list_names, mean, require_all, require_any

FOUND = {
    "a": (Estimate(2.0, 0.3),),
    "b": (Estimate(3.0, 0.4),),
    "exact": (Estimate(3.0),),
    "constant": (Estimate(1.0, 0.0),),
    "alike": (Estimate(1.0, 0.5),) * 3,
    "same": (Estimate(1.0),) * 3,
    "seeds": tuple(Estimate(value, 0.5) for value in (1.0, 2.0, 6.0)),
    "others": tuple(Estimate(value, 0.5) for value in (0.5, 1.4, 5.6)),
}


def estimate(formula: str, correlations: dict[tuple[str, str], float] | None = None) -> Estimate:
    return Numbers(FOUND, correlations=correlations or {}).estimate(formula)


@pytest.mark.parametrize(
    ("formula", "value", "error"),
    [
        ("a", 2, 0.3),
        ("b - a", 1, 0.5),
        ("-a * 2", -4, 0.6),
        ("mean(a, b)", 2.5, 0.25),
        ("a * b", 6, math.hypot(0.9, 0.8)),
        ("abs(a - 2)", 0, 0.3),  # where it bends, up and down are one change
        ("abs(a - 2.1)", 0.1, 0.3),  # the larger of both
        ("min(a, b) / 2", 1, math.hypot(0.15, 0)),
        ("exact", 3, None),
    ],
)
def test_standard_errors_of_parts_are_those_of_independent_ones(
    formula: str, value: float, error: float | None
) -> None:
    found = estimate(formula)
    assert found.value == pytest.approx(value)
    assert found.standard_error == (None if error is None else pytest.approx(error))


def test_numbers_of_several_checkpoints_are_paired_and_have_their_spread() -> None:
    found = estimate("seeds - others")
    differences = [0.5, 0.6, 0.4]
    assert found.value == pytest.approx(statistics.fmean(differences))
    assert found.standard_error == pytest.approx(statistics.stdev(differences) / math.sqrt(3))
    assert found.count == 3


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ("exact > 2", True),
        ("exact < 2", False),
        ("a < b", None),  # 1 +- .5
        ("a < b + 2", True),
        ("a > b + 2", False),
        ("abs(a - 2) < 0.1", None),  # 2 +- .3
        ("abs(a - 2) < 1", True),
        ("constant < 2", None),  # all of them were 1: of another sample they need not be
        ("a + 10 > constant", None),
        ("exact > 2 or constant > 2", True),
        ("alike < 2", None),  # as one of them
        ("alike < 3", True),
        ("same < 2", None),
        ("seeds < seeds + 1", None),
        ("exact < 2 and a < b", False),
        ("exact > 2 and a < b", None),
        ("exact > 2 or a < b", True),
        ("exact < 2 or a < b", None),
        ("seeds > others", None),
        ("seeds + 1 > others", True),
    ],
)
def test_rules_hold_fail_or_stay_open(rule: str, holds: bool | None) -> None:
    assert Numbers(FOUND).decide(rule) is holds


def test_numbers_without_spread_are_named() -> None:
    rule = "constant + a < alike and seeds > exact / same"
    assert sorted(Numbers(FOUND).constants(rule)) == ["constant", "same"]


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("a > 0 and b > 0 and c > 0 and d > 0", False),  # one of four is enough to refute it
        ("a > 0 or b > 0 or c > 0 or d > 0", True),
    ],
)
def test_a_rule_of_numbers_that_are_zero_is_decided_no_more_often_than_the_level(rule: str, told: bool) -> None:
    generator, trials, wrong = np.random.default_rng(2), 2000, 0
    for _ in range(trials):
        numbers = {name: (Estimate(generator.standard_normal(), 1.0),) for name in "abcd"}
        wrong += Numbers(numbers).decide(rule) is told
    assert wrong / trials <= LEVEL / 2 + 3 * math.sqrt(LEVEL / 2 / trials)


def test_rules_are_joined_and_their_names_are_found_outermost_first() -> None:
    assert require_all("{0} < {0}_x", "a", "b") == "a < a_x and b < b_x"
    assert require_any("{} < 1", "a", "b") == "a < 1 or b < 1"
    assert list_names(f"{mean('a', 'b')} - a < c and c > d") == ("c", "d", "a", "b")


@pytest.mark.parametrize("rule", ["0 < a < 1", "a", "a < b and b < c or c < 1", "a == b", "not a < b"])
def test_a_rule_of_another_form_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="expected comparisons of two sides"):
        Numbers(FOUND | {"c": FOUND["a"]}).decide(rule)


def test_a_formula_without_a_finite_value_is_unmeasured() -> None:
    for formula in ("a / (exact - 3)", "a * 1e400"):
        with pytest.raises(Unmeasured, match="no finite value"):
            estimate(formula)
    numbers = Numbers(FOUND | {"two": FOUND["seeds"][:2]}, {})
    with pytest.raises(Unmeasured, match="of 2 and of 3 checkpoints"):
        numbers.estimate("seeds - two")


def test_what_was_not_measured_has_its_own_reason_or_the_one_of_all() -> None:
    numbers = Numbers({}, {"a": "a failed"}, otherwise="nothing ran")
    for formula, why in (("a + 1", "a failed"), ("b + 1", "nothing ran")):
        with pytest.raises(Unmeasured, match=why):
            numbers.estimate(formula)
    with pytest.raises(Unmeasured, match="the experiment does not return b"):
        Numbers({}).estimate("b + 1")


@pytest.mark.parametrize(
    ("formula", "error"),
    [
        ("b - a", 0.5 * math.sqrt(1 - 2 * 0.9 * 0.3 * 0.4 / 0.25)),  # variances 0.09 and 0.16, correlation 0.9
        ("a + b", 0.5 * math.sqrt(1 + 2 * 0.9 * 0.3 * 0.4 / 0.25)),
        ("abs(a - b)", 0.5 * math.sqrt(1 - 2 * 0.9 * 0.3 * 0.4 / 0.25)),
        ("abs(a - b + 1)", 0.5 * math.sqrt(1 - 2 * 0.9 * 0.3 * 0.4 / 0.25)),  # at its bend
        ("a - exact", 0.3),
        ("min(-a, -b) + a", 0.5),  # which is smaller is chance: as if they were independent
    ],
)
def test_parts_that_are_correlated_move_together(formula: str, error: float) -> None:
    for correlations in ({("a", "b"): 0.9}, {("b", "a"): 0.9}):
        assert estimate(formula, correlations).standard_error == pytest.approx(error)


def test_correlations_of_none_change_nothing() -> None:
    for formula in ("b - a", "abs(b - a) * a", "mean(a, b)"):
        expected = estimate(formula).standard_error
        assert estimate(formula, {("a", "b"): 0.0}).standard_error == pytest.approx(expected, rel=1e-3)


def scored(losses: np.ndarray, generator: np.random.Generator, replicates: int) -> tuple[np.ndarray, np.ndarray]:
    """Standard errors and correlations of mean losses (N, K), from a bootstrap that draws the same examples for all."""
    weights = generator.multinomial(len(losses), np.full(len(losses), 1 / len(losses)), replicates) / len(losses)
    return np.std(weights @ losses, axis=0, ddof=1), np.corrcoef((weights @ losses).T)


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["a < b", "a > b", "abs(a - b) < 0.05", "2 * a < b + c"])
def test_rules_of_pairs_are_decided_falsely_no_more_often_than_the_level(rule: str) -> None:
    generator, trials, wrong = np.random.default_rng(7), 1500, 0
    for _ in range(trials):
        easy = generator.exponential(0.3, 600)
        own = [easy + 0.05 * generator.exponential(1.0, 600) for _ in range(3)]  # one mean, correlated above 0.9
        losses = np.stack([own[0], own[1] + 0.05 * ("abs" in rule), own[2]], axis=1)  # of abs, at its border
        errors, correlations = scored(losses, generator, 200)
        names = dict(zip("abc", range(3), strict=True))
        numbers = {name: (Estimate(losses[:, k].mean(), errors[k]),) for name, k in names.items()}
        known = {(x, y): correlations[i, j] for x, i in names.items() for y, j in names.items() if i < j}
        wrong += Numbers(numbers, correlations=known).decide(rule) is True
    assert wrong / trials <= LEVEL / 2 + 3 * math.sqrt(LEVEL / 2 / trials)


def test_a_difference_that_is_open_alone_is_decided_in_pairs() -> None:
    numbers = {"a": (Estimate(0.40, 0.02),), "b": (Estimate(0.41, 0.02),)}
    assert Numbers(numbers).decide("a < b") is None
    assert Numbers(numbers, correlations={("a", "b"): 0.99}).decide("a < b") is True
