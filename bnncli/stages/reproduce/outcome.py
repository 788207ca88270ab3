"""One recipe, run: its numbers, what they say of each cell and claim, and its figures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.errors import BnnError, Interrupted, ReadError, WriteError
from bnncli.experiments import Measurements
from bnncli.options import ReproduceOptions
from bnncli.run.session import Run
from bnncli.stages.reproduce.filled import filled_settings
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
from bnncli.stages.reproduce.kept import NAME, keep, kept, request_of
from bnncli.stages.reproduce.marginals import marginals
from bnncli.stages.reproduce.places import Places
from bnncli.stages.reproduce.reader import read_study
from bnncli.stages.reproduce.recipe import Needs, PaperRecipe
from bnncli.stages.reproduce.studies import StudyRun, run_study

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
    """Recipes run at one scale, each study once.

    Args:
        folder: of this scale. done: studies, by name.
    """

    run: Run
    options: ReproduceOptions
    places: Places
    folder: Path
    done: dict[str, StudyRun] = field(default_factory=dict)

    def outcome(self, recipe: PaperRecipe) -> Outcome:
        """Run a recipe, and judge it. Raises Interrupted after a signal, and as run_study does."""
        scale, start = self.options.scale, time.monotonic()
        studies = [self._study(name) for name in recipe.studies]
        found: dict[str, Replicates] = {}
        why: dict[str, str] = {}
        for name, measure in recipe.measures.items():
            try:
                found[name] = next(one for one in studies if one.study.name == measure.study).replicates(measure)
            except Unmeasured as error:
                why[name] = error.message
        correlations: dict[tuple[str, str], float] = {}
        for study in studies:
            own = {
                name: one for name, one in recipe.measures.items() if one.study == study.study.name and name in found
            }
            correlations |= study.correlations(own)
        settings, measured, said = self._experiment(recipe, studies)
        if measured is not None:
            found |= {name: (value,) for name, value in measured.values.items()}
        numbers = Numbers(found, why, otherwise=said or "", correlations=correlations)
        needs = [recipe.needs[scale], *(one.study.needs[scale] for one in studies)]
        absent = self._absent(needs)
        cells = judged_cells(recipe, numbers, scale=scale, definitions=self.options.definitions, absent=absent)
        claims = judged_claims(recipe, numbers, scale=scale, absent=absent)
        lacks = [study.why for study in studies] + [self.places.missing(recipe.needs[scale].required.values())]
        lacking = "; ".join(dict.fromkeys(one for one in lacks if one))
        files = dict.fromkeys(file for one in needs for part in (one.required, one.optional) for file in part.values())
        missing, seconds = self.places.missing_each(files), round(time.monotonic() - start, 2)
        seed = self.run.compute.seed
        return Outcome(recipe, numbers, cells, claims, studies, measured, settings, lacking, missing, seconds, seed)

    def _study(self, name: str) -> StudyRun:
        if name not in self.done:
            folder = self.folder / "studies" / name
            self.done[name] = run_study(
                self.run, read_study(name), self.options.scale, self.places, folder=folder, force=self.options.force
            )
        return self.done[name]

    def _experiment(
        self, recipe: PaperRecipe, studies: list[StudyRun]
    ) -> tuple[dict[str, Any], Measurements | None, str | None]:
        """Settings of the recipe's experiment, what it gave, and why it gave nothing."""
        if recipe.experiment is None:
            return {}, None, None
        needs = recipe.needs[self.options.scale]
        if said := self.places.missing(needs.required.values()):
            return {}, None, said
        files, said = self._files(recipe, needs, studies)
        if said and not any(name in files for name in recipe.reads):
            return {}, None, said
        absent = [name for name in needs.optional if name not in files]
        asked = recipe.settings[self.options.scale]
        settings = filled_settings(asked, files, absent=absent)
        progress, place = self.run.console, self.folder / recipe.name / NAME
        request = request_of(recipe.name, asked, files, seed=self.run.compute.seed, progress=progress)
        if not self.options.force and (measured := kept(place, request)) is not None:
            progress.info(f"{recipe.name}: measured before with the same settings and inputs; --force measures anew")
            return settings, measured, said or None
        measure = registry.load_module("experiments", recipe.experiment).measure
        generator = self.run.stream(f"reproduce/{recipe.name}")
        try:
            measured = measure(settings, files, generator=generator, progress=progress)
        except (Interrupted, ReadError, WriteError):
            raise
        except BnnError as error:
            return settings, None, f"{recipe.experiment} failed: {error.message}"
        keep(place, request, measured)
        return settings, measured, said or None

    def _files(self, recipe: PaperRecipe, needs: Needs, studies: list[StudyRun]) -> tuple[dict[str, Path], str]:
        """What the experiment reads, by its names, and why it lacks what studies have not written."""
        files, why = self.places.found(needs), {}
        for name, file in recipe.reads.items():
            study = next(one for one in studies if one.study.name == file.partition("/")[0])
            path = study.folder / file.partition("/")[2]
            if study.why is None and path.is_file():
                files[name] = path
            else:
                failed = next((done.why for done in study.ended if done.why is not None), f"{file} was not written")
                why[name] = study.why or failed
        return files, "; ".join(dict.fromkeys(why.values()))

    def _absent(self, needs: list[Needs]) -> dict[str, str]:
        """Optional files that are not there, with what to give."""
        optional = {name: file for one in needs for name, file in one.optional.items()}
        return {name: said for name, file in optional.items() if (said := self.places.missing([file]))}
