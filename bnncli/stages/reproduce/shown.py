"""Results of recipes as tables for people: of one its numbers and claims, of several a line for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bnncli.evaluation.agreement import LEVEL
from bnncli.names import counted
from bnncli.session.run import Table
from bnncli.stages.reproduce.judged import NOT_RUN, JudgedCell, counts_said
from bnncli.stages.reproduce.outcome import Outcome
from bnncli.stages.reproduce.written import CLAIM_RULE, reason, said


def tables_of(outcomes: Sequence[Outcome]) -> list[Table]:
    """At least one table."""
    if len(outcomes) == 1:
        return _of_one(outcomes[0])
    rows = []
    for one in outcomes:
        counts = one.counts()
        told = [counts_said(counts[kind]) or "none" for kind in ("cells", "claims")]
        rows.append([one.recipe.name, *told, f"{one.seconds:.1f}"])
    return [Table(["recipe", "numbers", "claims", "seconds"], rows)]


def _of_one(outcome: Outcome) -> list[Table]:
    recipe = outcome.recipe
    found = []
    if outcome.cells:
        notes = [
            f"k: with probability {LEVEL:g}, two estimates of one number differ by more than the tolerance plus "
            "k standard errors"
        ]
        columns = ["row", "column", "published", "ours", "tolerance", "k", "verdict"]
        rows = [_row(one) for one in outcome.cells if one.ours is not None]
        why = _reasons([one.why for one in outcome.cells if one.ours is None], "number")
        title = f"{recipe.title} ({recipe.where})"
        found.append(Table(columns, rows, title, [*notes, *why]) if rows else _of_none(why, title))
    if outcome.claims:
        rows = [[one.verdict, one.claim.text, reason(one)] for one in outcome.claims if one.verdict != NOT_RUN]
        why = _reasons([one.why for one in outcome.claims if one.verdict == NOT_RUN], "claim")
        columns, notes = ["claim", "claim", "by"], [CLAIM_RULE, *why]
        found.append(Table(columns, rows, notes=notes) if rows else _of_none(why, ""))
    return found or [Table(["recipe"], [[recipe.name]], notes=["no numbers and no claims"])]


def _of_none(why: list[str], title: str) -> Table:
    """In the place of a table without a row."""
    return Table(["nothing ran"], [[one] for one in why], title)


def _reasons(why: Sequence[str], what: str) -> list[str]:
    """Why cells or claims could not run, each reason once."""
    return [f"{NOT_RUN}, {counted(count, what)}: {reason}" for reason, count in Counter(why).items()]


def _row(one: JudgedCell) -> list[str]:
    column = f"{one.cell.column}, {one.definition}" if one.definition else one.cell.column
    assert one.ours is not None
    factor = "" if one.judged is None else f"{one.judged.factor:.2f}"
    verdict = f"{one.status}: {one.why}" if one.why else one.status
    return [one.cell.row, column, said(one.cell.published), said(one.ours), f"{one.cell.tolerance:g}", factor, verdict]
