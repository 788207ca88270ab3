"""One recipe, run: its numbers, what they say of each cell and claim, and its figures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.experiments import Measurements
from bnncli.stages.reproduce.formulas import Replicates, Unmeasured
from bnncli.stages.reproduce.judged import (
    DIFFERS,
    FAILS,
    NOT_RUN,
    JudgedCell,
    JudgedClaim,
    Numbers,
    judged_cells,
    judged_claims,
)
from bnncli.stages.reproduce.marginals import marginals
from bnncli.stages.reproduce.parts import Experiment, RecipePart, Workshop, parts_of
from bnncli.stages.reproduce.places import Places
from bnncli.stages.reproduce.recipe import Needs, PaperRecipe
from bnncli.stages.reproduce.studies import StudyRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Outcome:
    """What came of a recipe.

    Args:
        studies: that it read. measured: by its experiment, None where it has none or it did not run.
        settings: of the experiment.
        lacking: files without which a part of it did not run, and what to give, in a line; empty where all are there.
        missing: every file that is not there, optional ones as well, with what it is and what to give.
    """

    recipe: PaperRecipe
    numbers: Numbers
    cells: list[JudgedCell]
    claims: list[JudgedClaim]
    studies: list[StudyRun]
    measured: Measurements | None
    settings: Mapping[str, Any]
    lacking: str
    missing: list[str]
    seconds: float
    seed: int

    @property
    def differs(self) -> list[str]:
        """Cells that differ and claims that do not hold, in words."""
        cells = [f"{one.cell.row} / {one.cell.column}" for one in self.cells if one.status == DIFFERS]
        return [*cells, *(one.claim.name for one in self.claims if one.verdict == FAILS)]

    @property
    def did_run(self) -> bool:
        """Whether anything could be measured."""
        return any(one.ours is not None for one in self.cells) or any(one.verdict != NOT_RUN for one in self.claims)

    @property
    def failed(self) -> list[str]:
        """Lines of its studies that failed, with why."""
        return [f"{done.line}: {done.why}" for study in self.studies for done in study.ended if done.why is not None]

    def counts(self) -> dict[str, dict[str, int]]:
        """How many cells and claims there are of each verdict."""
        return {
            "cells": dict(Counter(one.status for one in self.cells)),
            "claims": dict(Counter(one.verdict for one in self.claims)),
        }

    def figures(self) -> dict[str, Figure]:
        """By name: published numbers beside ours, the lines that the recipe asks for, and what its experiment draws."""
        from bnncli.stages.reproduce import drawn  # matplotlib is slow to import

        found = drawn.of_recipe(self.recipe, self.cells, self.numbers)
        if self.measured is not None:
            assert self.recipe.experiment is not None
            module = registry.load_module("experiments", self.recipe.experiment)
            found |= module.draw(self.measured, self.settings) if hasattr(module, "draw") else {}
        for figure in self.recipe.marginals:
            folder = next(one for one in self.studies if one.study.name == figure.study).posteriors
            if folder is not None and (shown := marginals(figure, folder, seed=self.seed)) is not None:
                found[figure.name] = shown.draw()
        return found


@dataclass
class Reproduction:
    """Recipes at one scale, whose parts may be shared.

    Args:
        workshop: has the parts.
        counted: parts whose seconds a recipe has.
    """

    workshop: Workshop
    counted: set[RecipePart] = field(default_factory=set)

    def outcome(self, recipe: PaperRecipe) -> Outcome:
        """Judge a recipe whose parts were made."""
        workshop, options, places = self.workshop, self.workshop.options, self.workshop.places
        scale, parts = options.scale, parts_of(recipe, options.scale)
        start = time.monotonic()
        studies, experiment = workshop.studies(recipe), workshop.experiment(recipe)
        numbers = _numbers(recipe, studies, experiment)
        needs = [recipe.needs[scale], *(one.study.needs[scale] for one in studies)]
        absent = _absent(needs, places)
        cells = judged_cells(recipe, numbers, scale=scale, definitions=options.definitions, absent=absent)
        claims = judged_claims(recipe, numbers, scale=scale, absent=absent)
        lacks = [study.why for study in studies] + [places.missing(recipe.needs[scale].required.values())]
        files = dict.fromkeys(file for one in needs for part in (one.required, one.optional) for file in part.values())
        took = sum(workshop.made[part].seconds for part in parts if part not in self.counted)
        self.counted |= {*parts}
        return Outcome(
            recipe=recipe,
            numbers=numbers,
            cells=cells,
            claims=claims,
            studies=studies,
            measured=experiment.measured,
            settings=experiment.settings,
            lacking="; ".join(dict.fromkeys(one for one in lacks if one)),
            missing=places.missing_each(files),
            seconds=round(took + time.monotonic() - start, 2),
            seed=workshop.run.compute.seed,
        )


def _numbers(recipe: PaperRecipe, studies: list[StudyRun], experiment: Experiment) -> Numbers:
    """What the recipe's studies and its experiment have measured."""
    found: dict[str, Replicates] = {}
    why: dict[str, str] = {}
    for name, measure in recipe.measures.items():
        try:
            found[name] = next(one for one in studies if one.study.name == measure.study).replicates(measure)
        except Unmeasured as error:
            why[name] = error.message
    correlations: dict[tuple[str, str], float] = {}
    for study in studies:
        own = {name: one for name, one in recipe.measures.items() if one.study == study.study.name and name in found}
        correlations |= study.correlations(own)
    if experiment.measured is not None:
        found |= {name: (value,) for name, value in experiment.measured.values.items()}
    return Numbers(found, why, otherwise=experiment.why or "", correlations=correlations)


def _absent(needs: list[Needs], places: Places) -> dict[str, str]:
    """Optional files that are not there, with what to give."""
    optional = {name: file for one in needs for name, file in one.optional.items()}
    return {name: said for name, file in optional.items() if (said := places.missing([file]))}
