"""Cells and claims of a recipe, judged by the numbers that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bnncli.evaluation.agreement import Agreement, Estimate, agreement
from bnncli.options.reproduce import BOTH
from bnncli.stages.reproduce.formulas import (
    Correlations,
    Replicates,
    Unmeasured,
    constants,
    decided,
    estimate,
    names_in,
)
from bnncli.stages.reproduce.recipe import Cell, Claim, PaperRecipe

REPRODUCED, DIFFERS, NOT_RUN = "reproduced", "differs", "not runnable here"
SHOWN = "shown"  # measured, and not judged
HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
_OF_SEVERAL = {DIFFERS: "differ", HOLDS: "hold", FAILS: "do not hold"}


@dataclass(frozen=True)
class Numbers:
    """What was measured, and why the rest was not.

    Args:
        found: by name. why: by the names of others. otherwise: of all that are in neither; empty where there is no such reason.
        correlations: of pairs that were measured on the same examples.
    """

    found: Mapping[str, Replicates]
    why: Mapping[str, str]
    otherwise: str = ""
    correlations: Correlations = field(default_factory=dict)

    def estimate(self, formula: str) -> Estimate:
        """The value of a formula. Raises Unmeasured where a part of it was not measured, or it has no finite value."""
        self.check(formula)
        return estimate(formula, self.found, self.correlations)

    def check(self, formula: str) -> None:
        """Pass where all that a formula names was measured. Raises Unmeasured otherwise."""
        for name in names_in(formula):
            if name not in self.found:
                raise Unmeasured(self.why.get(name, self.otherwise or f"the experiment does not return {name}"))


@dataclass(frozen=True)
class JudgedCell:
    """A cell by one definition.

    Args:
        definition: published or right; empty where there is one.
        ours: None where it could not be measured. judged: None there, and at a scale where ours is of something else. why: that is.
    """

    cell: Cell
    definition: str
    ours: Estimate | None
    judged: Agreement | None
    why: str

    @property
    def status(self) -> str:
        """reproduced, differs, shown or not runnable here."""
        if self.judged is None:
            return NOT_RUN if self.ours is None else SHOWN
        return REPRODUCED if self.judged.is_within else DIFFERS

    def to_json(self) -> dict[str, Any]:
        """As results have it."""
        judged = self.judged
        return {
            "row": self.cell.row,
            "column": self.cell.column,
            "definition": self.definition or None,
            "formula": self.cell.formulas.get(self.definition),
            "published": _json(self.cell.published),
            "ours": None if self.ours is None else _json(self.ours),
            "tolerance": self.cell.tolerance,
            "because": self.cell.because,
            "factor": None if judged is None else judged.factor,
            "distance": None if judged is None else judged.distance,
            "allowed": None if judged is None else judged.allowed,
            "status": self.status,
            "why": self.why or None,
        }


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict.

    Args:
        verdict: holds, does not hold, open, shown or not runnable here. why: in the last two cases, and where a standard error of 0 leaves it open.
        numbers: that decided.
    """

    claim: Claim
    verdict: str
    numbers: Mapping[str, Estimate]
    why: str

    def to_json(self) -> dict[str, Any]:
        """As results have it."""
        return {
            "id": self.claim.name,
            "text": self.claim.text,
            "where": self.claim.where,
            "rule": self.claim.rule,
            "verdict": self.verdict,
            "numbers": {name: _json(one) for name, one in self.numbers.items()},
            "why": self.why or None,
        }


def counts_said(counts: Mapping[str, int]) -> str:
    """How many there are of each verdict: 3 hold, 1 does not hold."""
    return ", ".join(
        f"{count} {verdict if count == 1 else _OF_SEVERAL.get(verdict, verdict)}" for verdict, count in counts.items()
    )


def judged_cells(
    recipe: PaperRecipe, numbers: Numbers, *, scale: str, definitions: str, absent: Mapping[str, str]
) -> list[JudgedCell]:
    """Every cell, by each of the definitions that were asked for.

    Args:
        absent: optional files that are not there, by name, with what to give.
    """
    found: list[JudgedCell] = []
    for cell in recipe.cells:
        if cell.unavailable is not None:
            found.append(JudgedCell(cell, "", None, None, cell.unavailable))
        asked = [one for one in cell.formulas if one in ("", definitions) or definitions == BOTH]
        not_judged = cell.not_at.get(scale)
        found += [_judged(cell, one, numbers, absent=absent, not_judged=not_judged) for one in asked]
    return found


def _judged(
    cell: Cell, definition: str, numbers: Numbers, *, absent: Mapping[str, str], not_judged: str | None
) -> JudgedCell:
    if lacking := [absent[name] for name in cell.needs if name in absent]:
        return JudgedCell(cell, definition, None, None, "; ".join(lacking))
    try:
        ours = numbers.estimate(cell.formulas[definition])
    except Unmeasured as error:
        return JudgedCell(cell, definition, None, None, error.message)
    if not_judged is not None:
        return JudgedCell(cell, definition, ours, None, not_judged)
    judged = agreement(ours, cell.published, cell.tolerance)
    if cell.is_coarse and judged.is_within:
        why = f"the tolerance ({cell.tolerance:g}) is as large as the number, so a match would mean nothing"
        return JudgedCell(cell, definition, ours, None, why)
    return JudgedCell(cell, definition, ours, judged, "")


def judged_claims(recipe: PaperRecipe, numbers: Numbers, *, scale: str, absent: Mapping[str, str]) -> list[JudgedClaim]:
    """Every claim of the recipe; absent as of judged_cells."""
    return list(_claims(recipe, numbers, scale, absent))


def _claims(recipe: PaperRecipe, numbers: Numbers, scale: str, absent: Mapping[str, str]) -> Iterator[JudgedClaim]:
    for claim in recipe.claims:
        if lacking := [absent[name] for name in claim.needs if name in absent]:
            yield JudgedClaim(claim, NOT_RUN, {}, "; ".join(lacking))
            continue
        try:
            numbers.check(claim.rule)
            holds = decided(claim.rule, numbers.found, numbers.correlations)
        except Unmeasured as error:
            yield JudgedClaim(claim, NOT_RUN, {}, error.message)
            continue
        verdict = OPEN if holds is None else HOLDS if holds else FAILS
        known = {name: estimate(name, numbers.found) for name in names_in(claim.rule)}
        if (not_judged := claim.not_at.get(scale)) is not None:
            yield JudgedClaim(claim, SHOWN, known, not_judged)
            continue
        constant = constants(claim.rule, numbers.found) if holds is None else []
        why = f"the standard error of {', '.join(constant)} is 0, so chance cannot be judged" if constant else ""
        yield JudgedClaim(claim, verdict, known, why)


def _json(one: Estimate) -> dict[str, Any]:
    return {"value": one.value, "standard_error": one.standard_error, "count": one.count or None}
