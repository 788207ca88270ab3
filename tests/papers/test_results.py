"""What is read from documents, verdicts, and densities of single weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli
from problems.recipes import SMALL, TABLE, WORK, Recipes, small_recipe, small_study

from bnncli.evaluation.comparison import Estimate
from bnncli.numerics import random as seeds
from bnncli.papers.numbers import Numbers, Unmeasured
from bnncli.papers.recipe import Cell, Claim, MarginalFigure, PaperRecipe, Results, Row, step
from bnncli.papers.results import JudgedClaim, format_counts, judge_cell, judge_claim, marginals, read_rows
from bnncli.papers.runner import ExperimentRun, FinishedLine, StudyRun, number_at
from bnncli.session.inputs import open_posterior

DOCUMENT = {
    "metrics": {"elbo": {"value": -3.5}},
    "rows": [
        {
            "name": "la.mc",
            "split": "test",
            "metrics": [{"name": "nll", "value": 0.3}, {"name": "ece", "bins": 15, "value": 0.1}],
        },
        {"name": "hmc.mc", "split": "test", "metrics": [{"name": "mmd2", "value": None, "undefined": "the reference"}]},
    ],
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("metrics", "elbo", "value"), -3.5),
        (("rows", {"name": "la.mc", "split": "test"}, "metrics", {"name": "nll"}, "value"), 0.3),
        (("rows", {"name": "la.mc"}, "metrics", {"bins": "15"}, "bins"), 15),
    ],
)
def test_a_place_has_a_number(place: tuple[Any, ...], value: float) -> None:
    assert number_at(DOCUMENT, place) == value


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (("rows", {"name": "no"}, "value"), r"0 entries \[name=no\] at rows\[name=no\].value"),
        (("rows", {"split": "test"}, "name"), r"2 entries \[split=test\]"),
        (("metrics", "no"), "no key 'no' at metrics.no"),
        (("rows", {"name": "la.mc"}, "name"), "no number at"),
        (("rows", {"name": "hmc.mc"}, "metrics", {"name": "mmd2"}, "value"), "undefined: the reference"),
    ],
)
def test_without_a_number_it_is_said_why(place: tuple[Any, ...], match: str) -> None:
    with pytest.raises(Unmeasured, match=match):
        number_at(DOCUMENT, place)


def test_scores_of_the_same_examples_have_their_correlation() -> None:
    @WORK.recipe("pairs", title="pairs", where="ours", studies=(SMALL,))
    def pairs(results: Results) -> Iterator[Row]:
        results.compare("nll", SMALL, "nll", {"map": "map.plug-in", "g": "g.mc"})
        results.compare("ece", SMALL, "ece", {"g": "g.mc"})
        yield Claim("lower", "The NLL is lower.", "nll_g < nll_map")
        yield Claim("smaller", "The ECE is smaller.", "ece_g < nll_map")

    def row(name: str, nll: float, other: str) -> dict[str, Any]:
        score = {"form": "nll", "value": nll, "standard_error": 0.02, "correlations": {other: 0.99}}
        return {"name": name, "scores": [score, {"form": "ece", "value": 0.1, "standard_error": 0.02}]}

    document = {"rows": [row("map.plug-in", 0.41, "g.mc"), row("g.mc", 0.40, "map.plug-in")]}
    lines = {"compare": FinishedLine("bnncli compare", document)}
    run = StudyRun(SMALL, Path("small"), {"one": lines}, None)
    (lower, _), found = read_rows(pairs, [run], ExperimentRun({}, None, None))
    assert found.correlations == {("nll_map", "nll_g"): 0.99}
    assert isinstance(lower, Claim)
    assert judge_claim(lower, found, scale="quick", absent={}).verdict == "holds"
    _, two = read_rows(pairs, [replace(run, lines={"one": lines, "two": lines})], ExperimentRun({}, None, None))
    assert two.correlations == {}


def rows_of(recipe: PaperRecipe) -> tuple[list[Cell], list[Claim]]:
    rows = list(recipe.declared(Results()))
    return [row for row in rows if isinstance(row, Cell)], [row for row in rows if isinstance(row, Claim)]


def numbers(nll_map: Estimate, nll_g: Estimate) -> Numbers:
    return Numbers({"nll_map": (nll_map,), "nll_g": (nll_g,)})


def claims(
    found: Numbers, *, scale: str = "quick", absent: dict[str, str] | None = None, **claimed: Any
) -> list[JudgedClaim]:
    return [judge_claim(one, found, scale=scale, absent=absent or {}) for one in rows_of(small_recipe(**claimed))[1]]


def test_a_standard_error_of_zero_leaves_a_claim_open_and_is_said() -> None:
    first, second = claims(numbers(Estimate(1.0, 0.0), Estimate(2.0, 0.1)))
    assert (first.verdict, second.verdict) == ("open", "open")
    assert "the standard error of nll_map is 0, so chance cannot be judged" in first.reason
    assert "nll_map 1 ± 0" in first.reason


@pytest.mark.parametrize(
    ("published", "status"), [(2.95, "reproduced"), (0.1, "shown"), (0.0, "reproduced"), (-0.1, "differs")]
)
def test_within_a_tolerance_as_large_as_the_number_nothing_is_reproduced(published: float, status: str) -> None:
    ours = Estimate(3.0 if published > 1 else 0.05)
    cell = rows_of(small_recipe(published=published))[0][0]
    (first,) = judge_cell(cell, numbers(ours, Estimate(2.0)), scale="quick", definitions="both", absent={})
    assert (first.status, first.ours) == (status, ours)
    assert first.why.startswith("the tolerance (0.1) is as large" if status == "shown" else "")


def test_counts_are_in_the_plural_but_of_one() -> None:
    assert format_counts({"holds": 3, "does not hold": 1, "open": 2}) == "3 hold, 1 does not hold, 2 open"
    assert format_counts({"differs": 2, "reproduced": 1, "holds": 1, "does not hold": 4}) == (
        "2 differ, 1 reproduced, 1 holds, 4 do not hold"
    )


def test_a_claim_is_shown_and_not_judged_at_a_scale_that_cannot_tell() -> None:
    not_at, found = {"quick": "too few"}, numbers(Estimate(2.0, 0.1), Estimate(2.0, 0.1))
    claim = claims(found, not_at=not_at)[1]
    assert (claim.verdict, claim.why, claim.reason) == ("shown", "too few", "nll_map 2 ± 0.1; too few")
    assert claims(found, scale="paper", not_at=not_at)[1].verdict == "does not hold"
    absent = claims(Numbers({}, {}, otherwise="no file"), not_at=not_at)[1]
    assert (absent.verdict, absent.why) == ("not runnable here", "no file")


def test_a_claim_that_takes_an_optional_file_says_what_to_give() -> None:
    absent = {"more": "needs more.npz (more features): give --data DIR"}
    found = claims(numbers(Estimate(2.0, 0.1), Estimate(2.0, 0.1)), absent=absent, needs=("more",))
    assert [claim.verdict for claim in found] == ["holds", "not runnable here"]
    assert found[1].why == absent["more"]


@pytest.fixture
def posteriors(recipes: Recipes, data: Path, out: Path, cli: Cli) -> Path:
    """The folder of those that the recipe has made, with its figure."""
    diagonal = step("fit-laplace", "d", structure="diag", prior_precision=30)
    study = small_study(more=(diagonal,))
    figure = MarginalFigure("densities", study, {"kron": "g", "diagonal": "d", "network": "map"})
    recipes(small_recipe(study=study, more=(figure,)))
    done = cli("reproduce", TABLE, "--data", data, "--out", out, "--json")
    assert done.code == 0, done.stderr
    assert "densities.png" in done.json["recipes"][0]["figures"]
    return out / "quick/studies/small/runs/one/posteriors"


def test_curves_are_the_densities_of_the_posteriors(posteriors: Path) -> None:
    figure = MarginalFigure("densities", SMALL, {"kron": "g", "diagonal": "d", "network": "map"})
    found = marginals(figure, posteriors, seed=0)
    assert found is not None
    assert found.reference == "kron"
    gaussian = open_posterior(posteriors / "g.safetensors")[0]
    for panel in found.marginals:
        index = int(panel.title.split(",")[0].removeprefix("weight "))
        grid, curve = np.array(panel.grid), np.array(panel.densities["kron"])
        spacing, sd = grid[1] - grid[0], float(gaussian.sample(4000, seeds.stream(1, "test"))[:, index].std())
        assert curve.sum() * spacing == pytest.approx(1, abs=0.02)
        mean = float((grid * curve).sum() * spacing)
        assert mean == pytest.approx(float(gaussian.center[index]), abs=5 * sd / 2000**0.5)
        assert list(panel.points) == ["network"]
    lacking = MarginalFigure("densities", SMALL, {"kron": "g", "refined": "absent"})
    assert marginals(lacking, posteriors, seed=0) is None
