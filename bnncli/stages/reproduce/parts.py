"""What recipes are made of, each made once: studies, and experiments, which may read what studies have written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncli import registry
from bnncli.errors import BnnError, Interrupted, ReadError, WriteError
from bnncli.experiments import Measurements
from bnncli.options.reproduce import ReproduceOptions
from bnncli.session.run import Run
from bnncli.stages.reproduce.filled import filled_settings
from bnncli.stages.reproduce.kept import NAME, keep, kept, request_of
from bnncli.stages.reproduce.places import Places
from bnncli.stages.reproduce.reader import read_study
from bnncli.stages.reproduce.recipe import Needs, PaperRecipe, Study
from bnncli.stages.reproduce.studies import StudyRun, run_study


@dataclass(frozen=True)
class RecipePart:
    """A study, or the experiment of a recipe, at one scale.

    Args:
        name: of the study, or of the recipe.
        source: what its file says.
    """

    name: str
    is_study: bool
    scale: str
    source: Study | PaperRecipe = field(compare=False, repr=False)

    @property
    def after(self) -> tuple[str, ...]:
        """Studies whose files it reads."""
        reads = self.source.reads.values() if isinstance(self.source, PaperRecipe) else ()
        return tuple(dict.fromkeys(file.partition("/")[0] for file in reads))

    @property
    def needs(self) -> tuple[str, ...]:
        """Files without which nothing of it runs."""
        return tuple(self.source.needs[self.scale].required.values())

    @property
    def seconds(self) -> float:
        """That it takes, about; 0 where it was not timed."""
        return self.source.seconds.get(self.scale, 0.0)


@dataclass(frozen=True)
class Experiment:
    """What came of the experiment of a recipe.

    Args:
        measured: None where the recipe has none, or it did not run.
        why: it, or a part of it, did not; None where all of it did.
    """

    settings: Mapping[str, Any]
    measured: Measurements | None
    why: str | None


@dataclass(frozen=True)
class Made:
    """A part that was made.

    Args:
        seconds: that it took.
    """

    result: StudyRun | Experiment
    seconds: float


def parts_of(recipe: PaperRecipe, scale: str) -> list[RecipePart]:
    """The parts of a recipe, in an order in which none reads what a later one writes."""
    studies = [RecipePart(name, True, scale, read_study(name)) for name in recipe.studies]
    return studies if recipe.experiment is None else [*studies, RecipePart(recipe.name, False, scale, recipe)]


@dataclass
class Workshop:
    """Where parts are made, at one scale.

    Args:
        folder: of this scale.
        made: what there is.
    """

    run: Run
    options: ReproduceOptions
    places: Places
    folder: Path
    made: dict[RecipePart, Made] = field(default_factory=dict)

    def make(self, part: RecipePart) -> None:
        """Make a part; those that it reads are there.

        Raises:
            Interrupted: a signal has come; and as run_study does.
        """
        start = time.monotonic()
        found: StudyRun | Experiment
        if isinstance(part.source, PaperRecipe):
            found = self._experiment(part.source)
        else:
            folder, force = self.folder / "studies" / part.name, self.options.force
            found = run_study(self.run, part.source, part.scale, self.places, folder=folder, force=force)
        self.made[part] = Made(found, time.monotonic() - start)

    def studies(self, recipe: PaperRecipe) -> list[StudyRun]:
        """Those of a recipe, which were made."""
        return [self._study(name) for name in recipe.studies]

    def experiment(self, recipe: PaperRecipe) -> Experiment:
        """That of a recipe, which was made."""
        found = (one.result for part, one in self.made.items() if part.name == recipe.name and not part.is_study)
        result = next(found, Experiment({}, None, None))
        assert isinstance(result, Experiment)
        return result

    def _study(self, name: str) -> StudyRun:
        result = next(one.result for part, one in self.made.items() if part.name == name and part.is_study)
        assert isinstance(result, StudyRun)
        return result

    def _experiment(self, recipe: PaperRecipe) -> Experiment:
        assert recipe.experiment is not None
        needs = recipe.needs[self.options.scale]
        if said := self.places.missing(needs.required.values()):
            return Experiment({}, None, said)
        files, said = self._files(recipe, needs)
        if said and not any(name in files for name in recipe.reads):
            return Experiment({}, None, said)
        absent = [name for name in needs.optional if name not in files]
        asked = recipe.settings[self.options.scale]
        settings = filled_settings(asked, files, absent=absent)
        progress, place = self.run.console, self.folder / recipe.name / NAME
        request = request_of(recipe.name, asked, files, seed=self.run.compute.seed, progress=progress)
        if not self.options.force and (measured := kept(place, request)) is not None:
            progress.info(f"{recipe.name}: up to date (same settings and inputs); --force measures again")
            return Experiment(settings, measured, said or None)
        measure = registry.load_module("experiments", recipe.experiment).measure
        generator = self.run.stream(f"reproduce/{recipe.name}")
        try:
            measured = measure(settings, files, generator=generator, progress=progress)
        except (Interrupted, ReadError, WriteError):
            raise
        except BnnError as error:
            return Experiment(settings, None, f"{recipe.experiment} failed: {error.message}")
        keep(place, request, measured)
        return Experiment(settings, measured, said or None)

    def _files(self, recipe: PaperRecipe, needs: Needs) -> tuple[dict[str, Path], str]:
        """What the experiment reads, by its names, and why it lacks what studies have not written."""
        files, why = self.places.found(needs), {}
        for name, file in recipe.reads.items():
            study = self._study(file.partition("/")[0])
            path = study.folder / file.partition("/")[2]
            if study.why is None and path.is_file():
                files[name] = path
            else:
                failed = next((done.why for done in study.ended if done.why is not None), f"{file} was not written")
                why[name] = study.why or failed
        return files, "; ".join(dict.fromkeys(why.values()))
