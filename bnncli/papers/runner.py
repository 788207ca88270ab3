"""Run what recipes are made of: studies, which are grids of commands, and experiments, which may read what studies have written.

Each part runs once, also if several recipes read it. What is up to date is not run again: a command keeps its artifacts, and an
experiment's measurements are kept beside the recipe's results.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import bnncli
from bnncli import registry
from bnncli.artifacts.atomic import publish_bytes
from bnncli.commands.demo import fixture_path
from bnncli.commands.grid.plan import Job, list_options, plan_jobs, read_grid
from bnncli.errors import BnnError, Interrupted, MissingInput, ReadError, WriteError
from bnncli.evaluation.comparison import Estimate
from bnncli.names import count_noun
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.options import command
from bnncli.options.command import CommandLine, CommonOptions
from bnncli.options.declaration import build_options, declaration, spell_options
from bnncli.papers.numbers import Replicates, Unmeasured
from bnncli.papers.recipe import (  # fmt: skip
    FILES,
    Files,
    Measurements,
    Needs,
    PaperRecipe,
    Part,
    Place,
    Reading,
    Settings,
    Step,
    Study,
)
from bnncli.progress import Progress
from bnncli.session.run import Run, Voice
from bnncli.system.input_files import read_object

if TYPE_CHECKING:
    from bnncli.commands.reproduce import ReproduceOptions

MEASURED = "measured.npz"  # in a recipe's folder
_FIXTURES = "fixtures"
_HEAD, _ARRAY = "head", "array "  # in that file: name of the head, prefix of what is drawn
_WAIT = 60.0  # seconds for a lock: processes of a reproduction that was killed may still be saving their states
_OF_RUNS: dict[type, str] = {
    **{command.RunOptions: "run_options", command.WriteOptions: "write", command.ComputeOptions: "compute"},
    **{command.NameOptions: "naming", command.LockOptions: "lock", command.InputOptions: "inputs"},
    **{command.RecordOptions: "record", command.TrackOptions: "track"},
}


@dataclass(frozen=True)
class Places:
    """Folders by the first part of a file's key in FILES; None if it was not given."""

    folders: Mapping[str, Path | None]

    @classmethod
    def of(cls, options: ReproduceOptions) -> Places:
        """Return those that the options name. Raises MissingInput if one is not a folder."""
        found = {}
        for place, given in (("data", options.data), ("checkpoints", options.checkpoints)):
            found[place] = None if given is None else Path(given)
            if given is not None and not Path(given).is_dir():
                raise MissingInput(f"--{place}: expected a folder; {given} is not one", path=given)
        return cls(found)

    def find(self, file: str) -> Path | None:
        """Return the path of a file, such as `data/fmnist-train.npz`; None if it is missing."""
        place, _, name = file.partition("/")
        if place == _FIXTURES:
            try:
                return fixture_path(name)
            except BnnError:
                return None
        folder = self.folders[place]
        return folder / name if folder is not None and (folder / name).exists() else None

    def found(self, needs: Needs) -> dict[str, Path]:
        """Return the files that are there, by the names that their user has for them."""
        every = {**needs.required, **needs.optional}
        return {name: path for name, file in every.items() if (path := self.find(file)) is not None}

    def missing(self, files: Iterable[str]) -> str:
        """Say in one line what to give for the missing files; empty if all are there."""
        lacking = [file for file in files if self.find(file) is None]
        if len(lacking) < 2:
            return "".join(f"needs {self._missing(file, FILES[file].partition(':')[0])}" for file in lacking)
        names = f"needs {lacking[0].partition('/')[2]} and {count_noun(len(lacking) - 1, 'other file')}"
        places = {file.partition("/")[0] for file in lacking}
        used = {place: folder for place, folder in self.folders.items() if place in places}
        if asked := [f"--{place} DIR" for place, folder in used.items() if folder is None]:
            return f"{names}: give {' and '.join(asked)}"
        return f"{names}, which are not in {' and '.join(map(str, used.values()))}"

    def missing_each(self, files: Iterable[str]) -> list[str]:
        """Say of each missing file what it is and what to give."""
        return [self._missing(file, FILES[file]) for file in files if self.find(file) is None]

    def _missing(self, file: str, described: str) -> str:
        place, _, name = file.partition("/")
        what = f"{name} ({described})"
        if place == _FIXTURES:
            return f"{what}, which this installation lacks"
        folder = self.folders[place]
        return f"{what}: give --{place} DIR" if folder is None else f"{what}, which is not in {folder}"


# Lines of a study, one after the other in this process.


class _Aside:
    """The voice of a step: its progress is shown, its warnings are kept for the results, and the rest is for -v."""

    def __init__(self, voice: Voice) -> None:
        self.options, self.debug, self.poll, self.task = voice.options, voice.debug, voice.poll, voice.task
        self.warnings: list[str] = []

    def info(self, text: str) -> None:
        self.debug(str(spell_options(text)))

    def warn(self, text: str) -> None:
        text = str(spell_options(text))
        self.warnings += [text] if text not in self.warnings else []


@dataclass(frozen=True)
class FinishedLine:
    """A line as it can be typed again, its metrics and results, or why it failed or was left out."""

    line: str
    document: dict[str, Any] | None
    why: str | None = None
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()


def _run_line(run: Run, job: Job, target: Path, *, force: bool) -> FinishedLine:
    line = job.line
    for name, value in run.compute.given().items():  # seed, device and threads, where the line takes them and says none
        if name in list_options(line.groups) and not line.gives(name):
            line = line.having(name, value)
    aside, start, document, why = _Aside(run.console), time.monotonic(), None, None
    try:
        result = _run_command(run, line, job, aside, force=force)
        said = {"metrics": result.metrics, **result.extra} if result.metrics else result.extra
        document = json.loads(json.dumps(spell_options(said), allow_nan=False))
        if result.action == "up_to_date" and target.is_file():  # what it printed when it was made says more
            document = {**read_object(target), **document}
        publish_bytes(target, json.dumps(document).encode(), may_replace=True)
    except (Interrupted, ReadError, WriteError):
        raise
    except BnnError as error:
        document, why = None, str(spell_options(error.message + error.advice))
    return FinishedLine(line.pasted(), document, why, round(time.monotonic() - start, 3), tuple(aside.warnings))


def _run_command(run: Run, line: CommandLine, job: Job, aside: _Aside, *, force: bool) -> Any:
    """Run the line's command as the command line would; --force is not part of what it records."""
    values = line.values() | ({"force": True} if force else {})
    options = {group: build_options(group, values) for group in line.groups}
    own = next((one for group, one in options.items() if group not in (*_OF_RUNS, CommonOptions)), None)
    parts: dict[str, Any] = {name: options.get(group, group()) for group, name in _OF_RUNS.items()}
    parts["lock"] = replace(parts["lock"], wait=max(parts["lock"].wait, _WAIT))
    argument = declaration("commands", line.command, "COMMAND").arguments[0]
    arguments = {argument.name: [Path(job.checkpoint)] if argument.is_many else Path(job.checkpoint)}
    # fmt: off
    own_run = replace(
        run, command=line.command, line=line, arguments=arguments, console=aside, started=time.monotonic(), heads={}, followed={},
        is_named=False, has_device=False, **parts,
    )
    # fmt: on
    return registry.load_module("commands", line.command).execute(own_run, own)


# Studies.


@dataclass(frozen=True)
class StudyRun:
    """What came of a study: how each line ended, by checkpoint and name, or why nothing ran."""

    study: Study
    folder: Path
    lines: Mapping[str, Mapping[str, FinishedLine]]
    why: str | None

    def replicates(self, reading: Reading) -> Replicates:
        """Return a number of each checkpoint. Raises Unmeasured if one has none."""
        if self.why is not None:
            raise Unmeasured(self.why)
        return tuple(_estimate(reading, lines) for lines in self.lines.values())

    def correlations(self, readings: Mapping[str, Reading]) -> dict[tuple[str, str], float]:
        """Return the correlation of each pair of these numbers, which were found, that are one score of the same examples."""
        if len(self.lines) != 1:  # several checkpoints are paired by checkpoint
            return {}
        (lines,) = self.lines.values()
        scores = {name: reading for name, reading in readings.items() if reading.called}
        found: dict[tuple[str, str], float] = {}
        for name, reading in scores.items():
            known = _follow(_document(reading.step, lines), reading.entry)[1].get("correlations") or {}
            for other, beside in scores.items():
                is_same = (beside.step, beside.entry[2:]) == (reading.step, reading.entry[2:])
                value = known.get(beside.called) if is_same else None
                if isinstance(value, int | float) and other != name and (other, name) not in found:
                    found[name, other] = float(value)
        return found

    @property
    def posteriors(self) -> Path | None:
        """The folder of the first checkpoint's posteriors; None if nothing ran."""
        return self.folder / "runs" / next(iter(self.lines)) / "posteriors" if self.lines else None

    @property
    def ended(self) -> list[FinishedLine]:
        """Every line."""
        return [done for lines in self.lines.values() for done in lines.values()]


def _estimate(reading: Reading, lines: Mapping[str, FinishedLine]) -> Estimate:
    document = _document(reading.step, lines)
    keys = (reading.value, reading.error, reading.count)
    value, error, count = (None if key is None else number_at(document, (*reading.entry, key)) for key in keys)
    assert value is not None
    if reading.trials is not None:
        step, place = reading.trials
        return Estimate.of_share(value, int(number_at(_document(step, lines), place)))
    return Estimate(value, error, 0 if count is None else int(count))


def _document(step: str, lines: Mapping[str, FinishedLine]) -> dict[str, Any]:
    done = lines.get(step)
    if done is None:
        raise Unmeasured(f"no step {step!r} (have: {', '.join(lines)})")
    if done.document is None:
        raise Unmeasured(f"{step} failed: {done.why}")
    return done.document


def number_at(document: Any, place: Place) -> float:
    """Return the number at a place. Raises Unmeasured if there is none, with the reason that the document gives."""
    holder, found = _follow(document, place)
    if found is None and isinstance(holder, dict) and holder.get("undefined"):
        raise Unmeasured(f"undefined: {holder['undefined']}")
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise Unmeasured(f"no number at {_format_place(place)}: {str(found)[:80]}")
    return float(found)


def _follow(document: Any, place: Place) -> tuple[Any, Any]:
    """Return what has the last part of a place, and what is there."""
    holder = at = document
    for part in place:
        holder = at
        if isinstance(part, str):
            if not isinstance(at, dict) or part not in at:
                raise Unmeasured(f"no key {part!r} at {_format_place(place)}")
            at = at[part]
        else:
            entries = [one for one in at if isinstance(one, dict)] if isinstance(at, list) else []
            entries = [one for one in entries if all(str(one.get(key)) == value for key, value in part.items())]
            if len(entries) != 1:
                raise Unmeasured(f"{len(entries)} entries {_format_place((part,))} at {_format_place(place)}")
            at = entries[0]
    return holder, at


def _format_place(place: Place) -> str:
    """Write a place for people: rows[name=la.mc,split=test].metrics[name=nll].value."""
    parts = (
        f".{part}" if isinstance(part, str) else f"[{','.join(f'{key}={value}' for key, value in part.items())}]"
        for part in place
    )
    return "".join(parts).removeprefix(".")


def run_study(run: Run, study: Study, scale: str, places: Places, *, folder: Path, force: bool = False) -> StudyRun:
    """Run the steps on every checkpoint; what is there already is up to date, unless `force` runs all of it again.

    Raises:
        ConfigError: a command refuses a step.
        WriteError, OutputExists: the folder cannot be written.
        Interrupted: a signal has come.
    """
    needs = study.needs[scale]
    if why := places.missing(needs.required.values()):
        return StudyRun(study, folder, {}, why)
    jobs = _plan(study, scale, places, folder)
    task = run.console.task(study.name, len(jobs))
    ended: dict[int, FinishedLine] = {}
    for job in jobs:
        failed = next((number for number in job.after if ended[number].why is not None), None)
        if failed is not None:
            said = f"it needs {jobs[failed].name}, which failed: {ended[failed].why}"
            ended[job.number] = FinishedLine(job.line.pasted(), None, said)
        else:
            ended[job.number] = _run_line(run, job, folder / "documents" / f"{job.stem}.json", force=force)
        task.advance(note=job.name[:60])
    by_checkpoint: dict[str, dict[str, FinishedLine]] = {}
    for job in jobs:
        by_checkpoint.setdefault(job.called, {})[job.name] = ended[job.number]
    return StudyRun(study, folder, by_checkpoint, None)


def _plan(study: Study, scale: str, places: Places, folder: Path) -> list[Job]:
    """Write the study's grid, which `bnncli grid` runs as well, and return its lines."""
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    files = {"folder": folder, **places.found(study.needs[scale])}
    if study.prepare is not None:
        content = io.BytesIO()
        np.savez(content, **study.prepare(scale, files))  # type: ignore[arg-type]  # keyword arguments are arrays
        files["arrays"] = folder / "arrays.npz"
        if not files["arrays"].is_file() or files["arrays"].read_bytes() != content.getvalue():
            publish_bytes(files["arrays"], content.getvalue(), may_replace=True)
    said = f"{study.name}, {scale}: {study.title}. Written by reproduce; bnncli grid runs it on several devices."
    text = grid_text(*study.declared(scale, files), run_dir=f"{folder}/runs/{{checkpoint}}", said=said)
    publish_bytes(folder / "grid.toml", text.encode(), may_replace=True)
    return plan_jobs(read_grid(folder / "grid.toml"))


def grid_text(checkpoints: Sequence[str], steps: Sequence[Step], *, run_dir: str, said: str) -> str:
    """Return a grid's TOML file, which says first what it is; `run_dir` is that of every step."""

    def toml(value: Any) -> str:  # a text, number, boolean or list, which TOML writes as JSON does
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    lines = [f"# {said}", f"checkpoints = {toml(list(checkpoints))}"]
    for step in steps:
        lines += ["", "[[step]]", *(f"{key} = {toml(value)}" for key, value in {**step, "run-dir": run_dir}.items())]
    return "\n".join(lines) + "\n"


# Experiments, and what they measured before.


@dataclass(frozen=True)
class ExperimentRun:
    """What came of a recipe's experiment, or why it, or a part of it, did not run."""

    settings: Settings
    measured: Measurements | None
    why: str | None


def digest_request(name: str, settings: Settings, files: Files, *, seed: int, progress: Progress) -> str:
    """Return the digest of all that the numbers of an experiment depend on: of a file its content, not its place."""
    inputs = {called: file_sha256(path, progress) for called, path in files.items()}
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]  # may change without the version
    asked = {"recipe": name, "settings": dict(settings), "inputs": inputs, "seed": seed, "version": bnncli.__version__}
    return json_sha256(asked | {"experiments": hashlib.sha256(b"\0".join(texts)).hexdigest()})


def write_measurements(path: Path, request: str, measured: Measurements) -> None:
    """Write what was measured. Raises WriteError, OutputExists."""
    head = {"request": request, "values": {name: asdict(one) for name, one in measured.values.items()}}
    content = io.BytesIO()
    parts: dict[str, Any] = {f"{_ARRAY}{name}": np.asarray(one) for name, one in measured.arrays.items()}
    parts[_HEAD] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez_compressed(content, **parts)
    publish_bytes(path, content.getvalue(), may_replace=True)


def read_measurements(path: Path, request: str) -> Measurements | None:
    """Return what was measured for the same request; None if there is no whole file of it."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            head = json.loads(stored[_HEAD].tobytes())
            if head["request"] != request:
                return None
            arrays = {name.removeprefix(_ARRAY): stored[name] for name in stored.files if name != _HEAD}
            return Measurements({name: Estimate(**one) for name, one in head["values"].items()}, arrays)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


# Parts of recipes.


@dataclass(frozen=True)
class MadePart:
    """A part that was made, and the seconds that it took."""

    result: StudyRun | ExperimentRun
    seconds: float


@dataclass
class Workshop:
    """Where parts are made, at one scale, in its folder; `made` are those that there are, `counted` those whose seconds a recipe has."""

    run: Run
    options: ReproduceOptions
    places: Places
    folder: Path
    made: dict[Part, MadePart] = field(default_factory=dict)
    counted: set[Part] = field(default_factory=set)

    def missing(self, part: Part) -> str:
        """Say what to give for files without which nothing of a part runs; empty if all are there."""
        return self.places.missing(part.needs[self.options.scale].required.values())

    def make(self, part: Part) -> None:
        """Make a part; those that it reads are there. Raises as run_study does."""
        start = time.monotonic()
        found: StudyRun | ExperimentRun
        if isinstance(part, PaperRecipe):
            found = self._run_experiment(part)
        else:
            assert isinstance(part, Study)
            folder, options = self.folder / "studies" / part.name, self.options
            found = run_study(self.run, part, options.scale, self.places, folder=folder, force=options.force)
        self.made[part] = MadePart(found, time.monotonic() - start)

    def study(self, study: Study) -> StudyRun:
        """Return a study that was made."""
        result = self.made[study].result
        assert isinstance(result, StudyRun)
        return result

    def experiment(self, recipe: PaperRecipe) -> ExperimentRun:
        """Return the experiment of a recipe, which was made if there is one."""
        if recipe.experiment is None:
            return ExperimentRun({}, None, None)
        result = self.made[recipe].result
        assert isinstance(result, ExperimentRun)
        return result

    def _run_experiment(self, recipe: PaperRecipe) -> ExperimentRun:
        assert recipe.experiment is not None
        if said := self.missing(recipe):
            return ExperimentRun({}, None, said)
        files, said = self._files(recipe)
        if said and not any(name in files for name in recipe.reads):
            return ExperimentRun({}, None, said)
        asked = recipe.settings[self.options.scale]
        settings = {**{name: str(path) for name, path in files.items()}, **asked}
        progress, place = self.run.console, self.folder / recipe.name / MEASURED
        request = digest_request(recipe.name, asked, files, seed=self.run.compute.seed, progress=progress)
        if not self.options.force and (measured := read_measurements(place, request)) is not None:
            progress.info(f"{recipe.name}: up to date (same settings and inputs); --force measures again")
            return ExperimentRun(settings, measured, said or None)
        generator = self.run.stream(f"reproduce/{recipe.name}")
        try:
            measured = recipe.experiment.find("measure")(settings, files, generator=generator, progress=progress)
        except (Interrupted, ReadError, WriteError):
            raise
        except BnnError as error:
            return ExperimentRun(settings, None, f"{recipe.experiment.name} failed: {error.message}")
        write_measurements(place, request, measured)
        return ExperimentRun(settings, measured, said or None)

    def _files(self, recipe: PaperRecipe) -> tuple[dict[str, Path], str]:
        """Return what the experiment reads, by its names, and why it lacks what studies have not written."""
        files, why = self.places.found(recipe.needs[self.options.scale]), []
        studies = {study.name: self.study(study) for study in recipe.studies if study.name in recipe.after}
        for name, file in recipe.reads.items():
            study = studies[file.partition("/")[0]]
            path = study.folder / file.partition("/")[2]
            if study.why is None and path.is_file():
                files[name] = path
            else:
                failed = next((done.why for done in study.ended if done.why is not None), f"{file} was not written")
                why.append(study.why or failed)
        return files, "; ".join(dict.fromkeys(why))
