"""Formulas and rules: values, standard errors, what chance leaves open."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from bnncli.evaluation.agreement import LEVEL, Estimate
from bnncli.stages.reproduce.formulas import Unmeasured, constants, decided, estimate, is_rule, names_in

NUMBERS = {
    "a": (Estimate(2.0, 0.3),),
    "b": (Estimate(3.0, 0.4),),
    "exact": (Estimate(3.0),),
    "constant": (Estimate(1.0, 0.0),),
    "alike": (Estimate(1.0, 0.5),) * 3,
    "same": (Estimate(1.0),) * 3,
    "seeds": tuple(Estimate(value, 0.5) for value in (1.0, 2.0, 6.0)),
    "others": tuple(Estimate(value, 0.5) for value in (0.5, 1.4, 5.6)),
}


@pytest.mark.parametrize(
    ("text", "value", "error"),
    [
        ("a", 2, 0.3),
        ("b - a", 1, 0.5),
        ("-2 * a", -4, 0.6),
        ("mean(a, b)", 2.5, 0.25),
        ("a * b", 6, math.hypot(0.9, 0.8)),
        ("abs(a - 2)", 0, 0.3),  # where it bends, up and down are one change
        ("min(a, 2)", 2, 0.3),
        ("log(exp(a)) + sqrt(4) ** 2", 6, 0.3),
        ("max(a, 0) + min(1, 2) + abs(-1) / 1", 4, 0.3),
        ("exact", 3, None),
    ],
)
def test_standard_errors_of_parts_are_those_of_independent_ones(text: str, value: float, error: float | None) -> None:
    found = estimate(text, NUMBERS)
    assert found.value == pytest.approx(value)
    assert found.standard_error == (None if error is None else pytest.approx(error))


def test_numbers_of_several_checkpoints_are_paired_and_have_their_spread() -> None:
    found = estimate("seeds - others", NUMBERS)
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
        ("0 < a < 10", True),
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
    assert decided(rule, NUMBERS) is holds


def test_numbers_without_spread_are_named() -> None:
    assert sorted(constants("constant + a < alike and seeds > exact / same", NUMBERS)) == ["constant", "same"]


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("a > 0 and b > 0 and c > 0 and d > 0", False),  # one of four is enough to refute it
        ("a > 0 or b > 0 or c > 0 or d > 0", True),
        ("a < 0 < b < 0 < c", False),
        ("a > 0 and (b > 0 or c < 0)", False),
    ],
)
def test_a_rule_of_numbers_that_are_zero_is_decided_no_more_often_than_the_level(rule: str, told: bool) -> None:
    generator, trials, wrong = np.random.default_rng(2), 2000, 0
    for _ in range(trials):
        numbers = {name: (Estimate(generator.standard_normal(), 1.0),) for name in "abcd"}
        wrong += decided(rule, numbers) is told
    assert wrong / trials <= LEVEL / 2 + 3 * math.sqrt(LEVEL / 2 / trials)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a == b", "expected numbers"),
        ("a.b", "expected numbers"),
        ("open('x')", "expected numbers"),
        ("(a < b) + 1", "a comparison cannot be part of"),
        ("a and b", "expected comparisons"),
        ("True", "expected numbers"),
        ("[a]", "expected numbers"),
    ],
)
def test_nothing_but_arithmetic_is_a_formula(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        names_in(text)


def test_names_are_found_without_functions() -> None:
    assert sorted(names_in("max(a, b) - a < log(c)")) == ["a", "b", "c"]
    assert is_rule("a < 1")
    assert not is_rule("a - 1")


def test_a_formula_without_a_finite_value_is_unmeasured() -> None:
    for text in ("1 / (exact - 3)", "log(0 * a)", "exp(1000 * exact)"):
        with pytest.raises(Unmeasured, match="no finite value"):
            estimate(text, NUMBERS)
    with pytest.raises(Unmeasured, match="of 2 and of 3 checkpoints"):
        estimate("seeds - two", NUMBERS | {"two": NUMBERS["seeds"][:2]})


def pair(first: str, second: str, value: float) -> dict[tuple[str, str], float]:
    return {(first, second): value}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("b - a", 0.5 * math.sqrt(1 - 2 * 0.9 * 0.3 * 0.4 / 0.25)),  # variances 0.09 and 0.16, correlation 0.9
        ("a + b", 0.5 * math.sqrt(1 + 2 * 0.9 * 0.3 * 0.4 / 0.25)),
        ("abs(a - b)", 0.5 * math.sqrt(1 - 2 * 0.9 * 0.3 * 0.4 / 0.25)),
        ("abs(a - b + 1)", 0.5 * math.sqrt(1 - 2 * 0.9 * 0.3 * 0.4 / 0.25)),  # at its bend
        ("a - exact", 0.3),
        ("max(a, b) - a", 0.5),  # which is larger is chance: as if they were independent
    ],
)
def test_parts_that_are_correlated_move_together(text: str, error: float) -> None:
    for correlations in (pair("a", "b", 0.9), pair("b", "a", 0.9)):
        assert estimate(text, NUMBERS, correlations).standard_error == pytest.approx(error)


def test_correlations_of_none_change_nothing() -> None:
    for text in ("b - a", "abs(b - a) * a", "mean(a, b)"):
        expected = estimate(text, NUMBERS).standard_error
        assert estimate(text, NUMBERS, pair("a", "b", 0.0)).standard_error == pytest.approx(expected, rel=1e-3)


def scored(losses: np.ndarray, generator: np.random.Generator, replicates: int) -> tuple[np.ndarray, np.ndarray]:
    """Standard errors and correlations of mean losses (N, K), from a bootstrap that draws the same examples for all."""
    weights = generator.multinomial(len(losses), np.full(len(losses), 1 / len(losses)), replicates) / len(losses)
    return np.std(weights @ losses, axis=0, ddof=1), np.corrcoef((weights @ losses).T)


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.long) for rule in ("a < b", "a > b", "abs(a - b) < 0.05", "2 * a < b + c")],
)
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
        wrong += decided(rule, numbers, known) is True
    assert wrong / trials <= LEVEL / 2 + 3 * math.sqrt(LEVEL / 2 / trials)


def test_a_difference_that_is_open_alone_is_decided_in_pairs() -> None:
    numbers = {"a": (Estimate(0.40, 0.02),), "b": (Estimate(0.41, 0.02),)}
    assert decided("a < b", numbers) is None
    assert decided("a < b", numbers, pair("a", "b", 0.99)) is True
