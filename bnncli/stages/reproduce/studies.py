"""Studies: the lines of a grid, made from a recipe's steps, run where their files are there; what each step has said, by checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bnncli import registry
from bnncli.artifacts.atomic import publish_bytes
from bnncli.evaluation.agreement import Estimate
from bnncli.session.run import Run
from bnncli.stages.grid.apart import check_apart
from bnncli.stages.grid.plan import Job, plan_jobs
from bnncli.stages.grid.reader import read_grid
from bnncli.stages.reproduce.filled import filled_settings, filled_steps, grid_text
from bnncli.stages.reproduce.formulas import Replicates, Unmeasured
from bnncli.stages.reproduce.lines import Done, run_lines
from bnncli.stages.reproduce.paths import number_at, object_at
from bnncli.stages.reproduce.places import Places
from bnncli.stages.reproduce.recipe import Reading, Study

FOLDER = "folder"  # the name that steps have for that of the study


@dataclass(frozen=True)
class StudyRun:
    """What came of a study.

    Args:
        folder: of it at its scale.
        lines: how each ended, by checkpoint and name.
        why: nothing ran; None where it ran.
    """

    study: Study
    folder: Path
    lines: Mapping[str, Mapping[str, Done]]
    why: str | None

    def replicates(self, measure: Reading) -> Replicates:
        """A number, of each checkpoint. Raises Unmeasured where one has none."""
        if self.why is not None:
            raise Unmeasured(self.why)
        return tuple(self._of_one(measure, lines) for lines in self.lines.values())

    def correlations(self, measures: Mapping[str, Reading]) -> dict[tuple[str, str], float]:
        """Of pairs of these measures, by their names, where they are of the same kind, the one checkpoint and the same examples."""
        if len(self.lines) != 1:  # several are paired by checkpoint
            return {}
        found: dict[tuple[str, str], float] = {}
        (lines,) = self.lines.values()
        for name, measure in measures.items():
            if measure.pairs is None:
                continue
            try:
                known = object_at(_document(measure, lines), measure.pairs)
            except Unmeasured:
                continue
            for other, beside in measures.items():
                value = known.get(beside.called) if beside.kind == measure.kind and other != name else None
                if isinstance(value, int | float) and (other, name) not in found:
                    found[name, other] = float(value)
        return found

    def _of_one(self, measure: Reading, lines: Mapping[str, Done]) -> Estimate:
        document = _document(measure, lines)
        paths = (measure.value, measure.error, measure.count)
        value, error, count = (None if path is None else number_at(document, path) for path in paths)
        assert value is not None
        if measure.trials is not None:
            return Estimate.of_share(
                value, int(number_at(_document(measure, lines, measure.trials_step), measure.trials))
            )
        return Estimate(value, error, 0 if count is None else int(count))

    @property
    def posteriors(self) -> Path | None:
        """The folder of the first checkpoint's; None where nothing ran."""
        return self.folder / "runs" / next(iter(self.lines)) / "posteriors" if self.lines else None

    @property
    def ended(self) -> list[Done]:
        """Every line."""
        return [done for lines in self.lines.values() for done in lines.values()]


def _document(measure: Reading, lines: Mapping[str, Done], step: str | None = None) -> dict[str, Any]:
    """What the step of a measure, or another one, has said. Raises Unmeasured where it said nothing."""
    step = measure.step if step is None else step
    done = lines.get(step)
    if done is None:
        raise Unmeasured(f"no step {step!r} (have: {', '.join(lines)})")
    if done.document is None:
        raise Unmeasured(f"{step} failed: {done.why}")
    return done.document


def run_study(run: Run, study: Study, scale: str, places: Places, *, folder: Path, force: bool = False) -> StudyRun:
    """Run the steps on every checkpoint; what is there already is up to date.

    Args:
        folder: of the study at this scale. force: make all of it anew.

    Raises:
        ConfigError: a step that its command refuses.
        WriteError, OutputExists: the folder cannot be written.
    """
    needs = study.needs[scale]
    if why := places.missing(needs.required.values()):
        return StudyRun(study, folder, {}, why)
    jobs = _planned(study, scale, places, folder)
    ended = run_lines(run, jobs, folder / "documents", what=study.name, force=force)
    by_checkpoint: dict[str, dict[str, Done]] = {}
    for job in jobs:
        by_checkpoint.setdefault(job.called, {})[job.name] = ended[job.number]
    return StudyRun(study, folder, by_checkpoint, None)


def _planned(study: Study, scale: str, places: Places, folder: Path) -> list[Job]:
    """The lines, after the grid that says them was written, which `bnncli grid` runs as well."""
    needs = study.needs[scale]
    files = places.found(needs)
    absent = [name for name in needs.optional if name not in files]
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    settings = filled_settings({FOLDER: str(folder), **study.settings[scale]}, files, absent=absent)
    for one in study.prepared:
        prepare = registry.load_module("experiments", one.experiment).prepare
        settings[one.name] = str(_prepared(folder / f"{one.name}.npz", prepare(files, settings)))
    steps = filled_steps(study.steps, settings, scale, absent=absent)
    said = f"{study.name}, {scale}: {study.title}. Written by reproduce; bnncli grid runs it on several devices."
    text = grid_text(settings["checkpoints"], steps, run_dir=f"{folder}/runs/{{checkpoint}}", said=said)
    publish_bytes(folder / "grid.toml", text.encode(), may_replace=True)
    grid = read_grid(folder / "grid.toml")
    jobs = plan_jobs(grid)
    check_apart(grid, jobs)
    return jobs


def _prepared(target: Path, arrays: Mapping[str, Any]) -> Path:
    """The NPZ file of these arrays; the same ones leave it as it is."""
    content = io.BytesIO()
    np.savez(content, **arrays)
    if not target.is_file() or target.read_bytes() != content.getvalue():
        publish_bytes(target, content.getvalue(), may_replace=True)
    return target
