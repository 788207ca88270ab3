"""The grammar of --until."""

from __future__ import annotations

import pytest

from bnncli.errors import UsageError
from bnncli.options.shared import parse_until, unmet


def test_conditions_are_parsed_and_written_back() -> None:
    found = parse_until(" rhat <= 1.01,ess>=4e2 , ess-tail>=150.5", "--until")
    assert [str(condition) for condition in found] == ["rhat<=1.01", "ess>=400", "ess-tail>=150.5"]


@pytest.mark.parametrize(
    "text",
    ["", "rhat", "rhat<1.01", "rhat>=1.01", "ess<=400", "ess>=", "ess>=400,", "ess>=1,ess>=2", "acc>=1", "ess>=-1"],
)
def test_anything_else_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(UsageError, match="expected rhat<=NUMBER, ess>=NUMBER, ess-tail>=NUMBER"):
        parse_until(text, "--until")


@pytest.mark.parametrize("text", ["rhat<=1", "rhat<=0.5", "ess>=0", "ess>=1e999"])
def test_bounds_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be above"):
        parse_until(text, "--until")


def test_bounds_are_inclusive_and_undefined_values_meet_none() -> None:
    conditions = parse_until("rhat<=1.01,ess>=400", "--until")
    assert unmet(conditions, {"rhat": 1.01, "ess": 400.0}) == []
    assert unmet(conditions, {"rhat": 1.011, "ess": 401.0}) == [conditions[0]]
    assert unmet(conditions, {"rhat": 1.0, "ess": 399.9}) == [conditions[1]]
    assert unmet(conditions, {"rhat": None, "ess": None}) == list(conditions)
