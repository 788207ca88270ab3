"""Verdicts by numbers of a test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from problems.recipes import RECIPE

from bnncli.evaluation.agreement import Estimate
from bnncli.stages.reproduce.formulas import Unmeasured
from bnncli.stages.reproduce.judged import Numbers, counts_said, judged_cells, judged_claims
from bnncli.stages.reproduce.reader import read_recipe
from bnncli.stages.reproduce.written import reason

Recipes = Callable[..., Path]
TABLE = "test/table-1"


def test_a_standard_error_of_zero_leaves_a_claim_open_and_is_said(recipes: Recipes) -> None:
    recipes()
    found = {"nll_map": (Estimate(1.0, 0.0),), "nll_g": (Estimate(2.0, 0.1),)}
    (first, second) = judged_claims(read_recipe(TABLE), Numbers(found, {}), scale="quick", absent={})
    assert (first.verdict, second.verdict) == ("open", "open")
    assert "the standard error of nll_map is 0, so chance cannot be judged" in reason(first)
    assert "nll_map 1 ± 0" in reason(first)


@pytest.mark.parametrize(
    ("published", "status"), [(2.95, "reproduced"), (0.1, "shown"), (0.0, "reproduced"), (-0.1, "differs")]
)
def test_within_a_tolerance_as_large_as_the_number_nothing_is_reproduced(
    recipes: Recipes, published: float, status: str
) -> None:
    recipes(recipe=RECIPE.replace("published = 100.0, error = 0.1, count = 5", f"published = {published}"))
    ours = 3.0 if published > 1 else 0.05
    numbers = Numbers({"nll_map": (Estimate(ours),), "nll_g": (Estimate(2.0),)}, {})
    first = judged_cells(read_recipe(TABLE), numbers, scale="quick", definitions="both", absent={})[0]
    assert first.status == status
    assert first.ours == Estimate(ours)
    assert first.why.startswith("the tolerance (0.1) is as large" if status == "shown" else "")


def test_counts_are_in_the_plural_but_of_one() -> None:
    assert counts_said({"holds": 3, "does not hold": 1, "open": 2}) == "3 hold, 1 does not hold, 2 open"
    assert counts_said({"differs": 2, "reproduced": 1, "holds": 1, "does not hold": 4}) == (
        "2 differ, 1 reproduced, 1 holds, 4 do not hold"
    )


def test_what_was_not_measured_has_its_own_reason_or_the_one_of_all() -> None:
    numbers = Numbers({}, {"a": "a failed"}, otherwise="nothing ran")
    with pytest.raises(Unmeasured, match="a failed"):
        numbers.check("a + 1")
    with pytest.raises(Unmeasured, match="nothing ran"):
        numbers.check("b + 1")
    with pytest.raises(Unmeasured, match="the experiment does not return b"):
        Numbers({}, {}).check("b + 1")


def test_a_claim_is_shown_and_not_judged_at_a_scale_that_cannot_tell(recipes: Recipes) -> None:
    recipes(recipe=RECIPE.replace('rule = "nll_map < -1"', 'rule = "nll_map < -1"\nnot_at = { quick = "too few" }'))
    numbers = Numbers({"nll_map": (Estimate(2.0, 0.1),), "nll_g": (Estimate(2.0, 0.1),)}, {})
    claim = judged_claims(read_recipe(TABLE), numbers, scale="quick", absent={})[1]
    assert (claim.verdict, claim.why, reason(claim)) == ("shown", "too few", "nll_map 2 ± 0.1; too few")
    assert judged_claims(read_recipe(TABLE), numbers, scale="paper", absent={})[1].verdict == "does not hold"
    absent = judged_claims(read_recipe(TABLE), Numbers({}, {}, otherwise="no file"), scale="quick", absent={})[1]
    assert (absent.verdict, absent.why) == ("not runnable here", "no file")


def test_a_claim_that_takes_an_optional_file_says_what_to_give(recipes: Recipes) -> None:
    recipes(recipe=RECIPE.replace('rule = "nll_map < -1"', 'rule = "nll_map < -1"\nneeds = ["more"]'))
    numbers = Numbers({"nll_map": (Estimate(2.0, 0.1),), "nll_g": (Estimate(2.0, 0.1),)}, {})
    absent = {"more": "needs more.npz (more features): give --data DIR"}
    claims = judged_claims(read_recipe(TABLE), numbers, scale="quick", absent=absent)
    assert [claim.verdict for claim in claims] == ["holds", "not runnable here"]
    assert claims[1].why == absent["more"]
