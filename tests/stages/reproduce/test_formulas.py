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
    generator, trials, wrong = np.random.default_rng(2), 4000, 0
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
        ("(a < b) + 1", "a comparison stands within"),
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
