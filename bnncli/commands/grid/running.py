"""Run the lines of a grid: in which order, in processes of their own, with a journal to continue from."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.files import read_header
from bnncli.artifacts.run_folder import RunFolder
from bnncli.commands.grid.plan import JOB, GridFile, Job, LinePlace
from bnncli.errors import NOT_OF_CONTENT, BnnError, ConfigError, DataError, Exit, Interrupted, MissingInput
from bnncli.names import count_noun, printable
from bnncli.numerics.digests import json_sha256
from bnncli.options.command import COMPUTE, CommandLine, InputOptions, NameOptions
from bnncli.options.declaration import flag_of, settings_of
from bnncli.session.run import Run
from bnncli.system.input_files import read_object


def _build_state_path(folder: Path) -> Path:
    return folder / "state.json"


DONE, UP_TO_DATE, FAILED, SKIPPED = "done", "up_to_date", "failed", "skipped"


@dataclass(frozen=True)
class LineEnd:
    """End of a line.

    Args:
        state: done, up_to_date, failed or skipped.
        exit: its exit code; None where it did not begin.
        seconds: that it took.
        why: it failed, or was skipped.
        outputs: paths of what it made, or found up to date.
        warnings: how many it gave.
        seen: for a line that makes no artifact, a digest of what it could see when it began; None where that is not known.
    """

    state: str
    exit: int | None
    seconds: float = 0.0
    why: str = ""
    outputs: tuple[str, ...] = ()
    warnings: int = 0
    seen: str | None = None

    @property
    def is_good(self) -> bool:
        """Return whether lines that wait for it may begin."""
        return self.state in (DONE, UP_TO_DATE)


def _read_end(entry: dict[str, Any]) -> LineEnd:
    found = LineEnd(**{**entry, "outputs": tuple(entry["outputs"])})
    if not all(isinstance(one, str) for one in (found.state, found.why, *found.outputs)):
        raise TypeError(entry)
    return found


@dataclass(frozen=True)
class Observation:
    """State of the files that a line depends on, at one time.

    Args:
        artifacts: digests of the contents of those of the run, by their paths.
        settings: what sets options beside the line itself.
    """

    artifacts: Mapping[Path, str]
    settings: Mapping[str, object]

    def digest(self, *, apart_from: Collection[Path]) -> str:
        """Return the digest of all that is there except the artifacts of lines that it does not wait for."""
        others = {path.resolve() for path in apart_from}
        found = {str(path): text for path, text in self.artifacts.items() if path.resolve() not in others}
        return json_sha256({"artifacts": found, **self.settings})


SCHEMA = "bnncli.grid/1"
WRITTEN = ("plot", "table", "dense", "out")  # options of a file or folder, which no two lines may share


@dataclass
class Journal:
    """The state of a grid, in a folder of its own.

    Args:
        known: by the keys of jobs, how they ended the last time.
    """

    folder: Path
    known: dict[str, LineEnd] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, run: Run) -> Journal:
        """The state that is there; an empty one where there is none, or it is damaged, which costs no result."""
        path = _build_state_path(folder)
        if not path.is_file():
            return cls(folder)
        try:
            document = read_object(path)
            if document["schema"] != SCHEMA:
                raise ValueError(document["schema"])
            entries = {key: _read_end(entry) for key, entry in document["jobs"].items()}
        except NOT_OF_CONTENT:
            raise
        except (BnnError, LookupError, TypeError, ValueError, AttributeError):
            run.console.warn(f"{path} is damaged: checking every line again")
            return cls(folder)
        return cls(folder, entries)

    @property
    def logs(self) -> Path:
        """Return the folder of logs and documents of the lines."""
        return self.folder / "logs"

    def log(self, job: Job) -> Path:
        """Return the path of the log of a line, from all times that it ran."""
        return self.logs / f"{job.stem}.log"

    def document(self, job: Job) -> Path:
        """The line's JSON document, of the last time that it ran."""
        return self.logs / f"{job.stem}.json"

    def add(self, job: Job, ended: LineEnd) -> None:
        """Keep how a job ended. Raises OutputExists, WriteError."""
        self.known[job.key] = ended
        self._publish()

    def _publish(self) -> None:
        entries = {key: vars(one) for key, one in self.known.items()}
        document = {"schema": SCHEMA, "jobs": entries}
        publish_bytes(
            _build_state_path(self.folder), json.dumps(document, indent=1).encode(), may_replace=True, poll=False
        )

    def beside(self, job: Job, jobs: list[Job]) -> set[Path]:
        """Return the artifacts of the lines for which this one does not wait, directly or through others."""
        waited, ahead = {job.number}, [job]
        while ahead:
            more = set(ahead.pop().after) - waited
            waited |= more
            ahead += [jobs[number] for number in more]
        known = (self.known.get(other.key) for other in jobs if other.number not in waited)
        return {Path(path) for ended in known if ended is not None for path in ended.outputs}

    def saw(self, jobs: list[Job], seen: Mapping[int, Observation]) -> None:
        """Keep what lines have seen, by number, as it is known when all have ended what was not for them. Raises OutputExists, WriteError."""
        for number, one in seen.items():
            job = jobs[number]
            known = self.known.get(job.key)
            if known is not None and known.is_good:
                self.known[job.key] = replace(known, seen=one.digest(apart_from=self.beside(job, jobs)))
        if seen:
            self._publish()

    def done(self, job: Job, jobs: list[Job], seen: Observation | None) -> LineEnd | None:
        """Return the end of a line that makes no artifact, if it ended well with the same inputs and its outputs are there; else None."""
        known = self.known.get(job.key)
        if known is None or not known.is_good or seen is None or known.seen is None:
            return None
        if known.seen != seen.digest(apart_from=self.beside(job, jobs)):
            return None
        written = [self.document(job), *(Path(job.given[option]) for option in WRITTEN if option in job.given)]
        return known if all(path.exists() for path in written) else None


_POLL = 0.05  # seconds between looks at what runs


@dataclass
class Running:
    """A line that runs.

    Args:
        journal: where its document and log lie.
        started: when, by the monotonic clock.
    """

    job: Job
    journal: Journal
    process: subprocess.Popen[bytes]
    started: float

    @classmethod
    def start(cls, job: Job, place: LinePlace, journal: Journal, *, config: str | None) -> Running:
        """The line, begun in a process group of its own: what a terminal tells all processes is for the grid to pass on."""
        words = [*program(), *build_run_line(job, config).words()[1:], "--json", "--progress", "log"]
        environment = {name: value for name, value in os.environ.items() if not _is_of_torchrun(name)}
        document = journal.document(job)
        document.unlink(missing_ok=True)  # a line of a grid that was killed may still be writing its own
        with open(document, "wb") as results, open(journal.log(job), "ab") as said:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=results,
                stderr=said,
                env=environment | dict(place.environment),
                process_group=0,
                preexec_fn=partial(die_with, os.getpid()),
            )
        return cls(job, journal, process, time.monotonic())

    def ended(self) -> LineEnd | None:
        """Return its end; None while it runs. Raises ReadError if its log cannot be read."""
        code = self.process.poll()
        if code is None:
            return None
        code = 128 - code if code < 0 else code
        told, seconds = self._told(), round(time.monotonic() - self.started, 3)
        outputs = tuple(str(one["path"]) for one in told.get("outputs", []) if isinstance(one, dict) and "path" in one)
        warnings = len(told.get("warnings", []))
        if code == Exit.OK and told:
            state = UP_TO_DATE if told.get("action") == "up_to_date" else DONE
            return LineEnd(state, code, seconds, outputs=outputs, warnings=warnings)
        return LineEnd(FAILED, code, seconds, self._why(told, code), outputs, warnings)

    def _told(self) -> dict[str, Any]:
        """Its document; nothing where it ended before it wrote one. Raises ReadError where the disk does not give it."""
        try:
            return read_object(self.journal.document(self.job))
        except (MissingInput, DataError):
            return {}

    def _why(self, told: dict[str, Any], code: int) -> str:
        """Return why it failed, in one line, and what to do."""
        error = told.get("error")
        if isinstance(error, dict) and error.get("message"):
            return printable(str(error["message"]) + BnnError("", hint=error.get("hint")).advice)
        if code == 128 + signal.SIGKILL:
            return "killed by SIGKILL, probably because the system ran out of memory"
        if code > 128:
            return f"ended by {_signal_name(code - 128)}"
        try:
            lines = self.journal.log(self.job).read_bytes().decode(errors="replace").strip().splitlines()
        except OSError as error:
            return f"cannot read its log: {os.strerror(error.errno or 0)}"
        return printable(lines[-1])[:300] if lines else "it printed nothing"


@dataclass
class Schedule:
    """One run of a grid.

    Args:
        ended: how jobs have ended, by their numbers.
        running: by the names of places.
        seen: by numbers of jobs that make no artifact, what there was to see when they began.
    """

    run: Run
    jobs: list[Job]
    places: list[LinePlace]
    journal: Journal
    ended: dict[int, LineEnd] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    seen: dict[int, Observation] = field(default_factory=dict)

    def work(self) -> Mapping[int, LineEnd]:
        """Run all jobs and return the end of each, by its number.

        Raises:
            Interrupted: a signal has come; what ran has been ended, and goes on when the grid is run again.
        """
        task = self.run.console.task("grid", len(self.jobs))
        try:
            while len(self.ended) < len(self.jobs):
                before = len(self.ended)
                self._look()
                self._begin()
                new = len(self.ended) - before
                task.advance(new, note=", ".join(one.job.name for one in self.running.values())[:60])
                if not new:
                    time.sleep(_POLL)
        except Interrupted as error:
            error.hint = f"continue with: {self.run.line.pasted()}"
            raise
        finally:
            self._stop()
        return self.ended

    def _look(self) -> None:
        """Take note of what has ended."""
        for name, one in list(self.running.items()):
            if (ended := one.ended()) is not None:
                del self.running[name]
                self._note(one.job, ended)

    def _begin(self) -> None:
        """Begin what can begin, and leave out what never can."""
        under_way = {one.job.number for one in self.running.values()}
        for job in self.jobs:
            if job.number in self.ended or job.number in under_way:
                continue
            waited = [self.ended.get(number) for number in job.after]
            bad = [number for number, one in zip(job.after, waited, strict=True) if one is not None and not one.is_good]
            if bad:
                self.ended[job.number] = LineEnd(SKIPPED, None, why=f"it depends on {self._cause(bad[0]).label}")
            elif all(waited):
                free = [place for place in self.places if place.name not in self.running]
                if not free:
                    return
                self._start(job, free[0])

    def _cause(self, number: int) -> Job:
        """The job that failed, for which one that is left out waits, itself or through others."""
        job = self.jobs[number]
        while self.ended[job.number].state == SKIPPED:
            job = next(self.jobs[other] for other in job.after if other in self.ended and not self.ended[other].is_good)
        return job

    def _start(self, job: Job, place: LinePlace) -> None:
        """Begin a job, unless it is known to be done."""
        config = self.run.console.options.config
        seen = read_seen(job, config)
        if (known := self.journal.done(job, self.jobs, seen)) is not None:
            self._note(job, replace(known, state=UP_TO_DATE, seconds=0.0))
            return
        self.run.console.debug(f"{place.name}: {job.line.pasted()}")
        if seen is not None:
            self.seen[job.number] = seen
        self.running[place.name] = Running.start(job, place, self.journal, config=config)

    def _note(self, job: Job, ended: LineEnd) -> None:
        """Keep how a job ended, and say it."""
        if ended.is_good and job.number in self.seen:
            ended = replace(ended, seen=self.seen[job.number].digest(apart_from=self.journal.beside(job, self.jobs)))
        self.ended[job.number] = ended
        self.journal.add(job, ended)
        said = ended.state.replace("_", " ") + (f", {count_noun(ended.warnings, 'warning')}" if ended.warnings else "")
        if ended.state == FAILED:
            said = f"failed, exit {ended.exit}: {ended.why}"
        self.run.console.info(f"{job.label}: {said} ({ended.seconds:.1f} s)")

    def _stop(self) -> None:
        """End what still runs; of what has come to its end meanwhile it is known."""
        running = list(self.running.values())
        if running:
            self.run.console.info(
                f"ending {count_noun(len(running), 'line')}; those that can continue save their state"
            )
            stop(running)
        for one in running:
            ended = one.ended()
            if ended is not None and ended.is_good:
                self.journal.add(one.job, ended)
        self.journal.saw(self.jobs, self.seen)


def read_seen(job: Job, config: str | None) -> Observation | None:
    """Return the state for a line that makes no artifact: the artifacts of its run by their contents, and what sets options.

    None for a line that makes artifacts, which tells itself whether they are up to date; and where it is not known which run it sees.

    Args:
        config: the configuration file that was named.
    """
    if job.step.makes_artifacts:
        return None
    variables = {name: value for name, value in os.environ.items() if name.startswith("BNNCLI_")}
    path = Path(config or variables.get("BNNCLI_CONFIG") or "bnncli.toml")
    settings = path.read_bytes() if path.is_file() else b""
    if b"run-dir" in settings or b"run_dir" in settings:
        return None
    own = f"BNNCLI_{job.step.command}_RUN_DIR".upper().replace("-", "_")
    run_dir = job.given.get("run_dir", variables.get(own, variables.get("BNNCLI_RUN_DIR")))
    digest = hashlib.sha256(settings).hexdigest()
    return Observation(_artifacts(job, run_dir), {"variables": variables, "config": digest})


def _artifacts(job: Job, run_dir: str | None) -> dict[Path, str]:
    """Digests of the contents of the artifacts in a run folder, by their paths."""
    found: dict[Path, str] = {}
    try:
        folder = RunFolder.of(Path(job.checkpoint), run_dir, is_name=True)
    except BnnError:
        return found
    features = [folder.features(name) for name in folder.splits()]
    for path in [
        *features,
        *folder.posteriors(),
        *folder.prediction_files(),
        *folder.decision_files(),
        *folder.metrics_files(),
    ]:
        try:
            found[path] = read_header(path).content_digest
        except NOT_OF_CONTENT:
            raise
        except BnnError:
            found[path] = "damaged"
    return found


def program() -> list[str]:
    """The words that run bnncli as this process does; like the console script, without the folder where it is run among Python's own."""
    is_safe = os.getcwd() not in sys.path
    return [sys.executable, *(["-P"] if is_safe else []), "-m", "bnncli"]


_WAIT = 60  # seconds for a lock: the lines of a grid that was killed may still be saving their states


def build_run_line(job: Job, config: str | None) -> CommandLine:
    """The line as the grid runs it: with the configuration file that the grid was given, and patient with locks."""
    line = job.line.having("config", config)
    return line.having("wait", _WAIT) if "wait" in job.step.options and not line.gives("wait") else line


# What torchrun tells a process: a line of a grid is no worker of whoever started the grid.
_OF_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


def _is_of_torchrun(name: str) -> bool:
    return name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_")


_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: a process that was just forked looks for nothing


def die_with(parent: int) -> None:
    """Make a new process stop when the process that began it is gone, however that went."""
    if _PRCTL is not None:  # Linux; elsewhere a grid that is killed leaves its lines to end by themselves
        _PRCTL(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # gone before it could be asked for
        os._exit(128 + signal.SIGTERM)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


GRACE = 60.0  # seconds that lines have to save their states, before they are killed


def stop(running: list[Running], *, grace: float = GRACE) -> None:
    """End lines, which save their states; those that have not after a while, in seconds, are killed."""
    for one in running:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
    deadline = time.monotonic() + grace
    for one in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, deadline - time.monotonic()))
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def check_apart(grid: GridFile, jobs: list[Job]) -> None:
    """Pass where no two lines write the same. Raises ConfigError otherwise, naming the step."""
    folders: dict[str, Job] = {}
    lines: dict[str, Job] = {}
    results: dict[tuple[object, ...], Job] = {}
    files: dict[str, Job] = {}
    for job in jobs:
        folder = find_run_folder(job)
        other = folders.setdefault(str(folder), job)
        if os.path.abspath(other.checkpoint) != os.path.abspath(job.checkpoint):
            said = f"{other.checkpoint} and {job.checkpoint} would share the run folder {folder}: put {{checkpoint}} into run-dir"
            raise grid.fault(job.step.keys.get("run_dir", job.step.where), said)
        if (other := lines.setdefault(job.key, job)) is not job:
            raise grid.fault(job.step.where, f"step {other.step.name} has the same line: {job.line.pasted()}")
        for key, said in _results(job):
            if (other := results.setdefault((str(folder), *key), job)) is not job and not _is_same(job, other):
                raise grid.fault(job.step.where, _describe_clash(job, other, said))
        for path, option in _list_written(job):
            if (other := files.setdefault(path, job)) is not job:
                raise _shared_file(grid, job, option)


def find_run_folder(job: Job) -> Path:
    """Return the folder of the job's run, as far as its line says."""
    return Path(os.path.abspath(RunFolder.of(Path(job.checkpoint), job.given.get("run_dir"), is_name=True).root))


# Of commands whose results are not named by --name: the options that say what is written.
_CHOOSING = {
    "train": (),
    "extract-features": ("data", "ood", "hold_out", "from_npz"),
    "predict": ("posterior", "integrator", "layers", "split"),
    "evaluate": ("posterior", "integrator", "layers"),
}


def _results(job: Job) -> Iterator[tuple[tuple[object, ...], str]]:
    """Return what tells the job's results from others', and their names."""
    command = job.step.command
    if "name" in job.given or (job.step.takes_name and "out" not in job.given):
        name = job.given.get("name", job.name)
        yield ("predictions" if command == "predict" else "posterior", name), name
    elif command in _CHOOSING and "out" not in job.given:
        yield (command, *(list_values(job, _list_choosing_options(command)))), ""


def _is_same(job: Job, other: Job) -> bool:
    """Return whether two unnamed results of one place are the same, because their lines differ in nothing that changes numbers."""
    return not job.step.takes_name and not _list_differences(job, other)


def _describe_clash(job: Job, other: Job, name: str) -> str:
    """Describe what two lines would both write, and what helps."""
    if name and job.step is other.step:
        return f"two of its lines create {name!r}: drop a value, or put it in a step with another name"
    if name:
        return f"step {other.step.name} also creates {name!r}: rename one of them"
    shown = " and ".join(flag_of(one)[2:] for one in _list_differences(job, other))
    said = f"lines with different values of {shown} would write the same files"
    if job.step.command == "predict":
        return f"{said}: give the step a name, so that its predictions are named after their values"
    if job.step.command == "train":
        return f"{said} (the checkpoint itself): keep one value, and use a grid with other checkpoints for another"
    return f"{said}: keep one value, or give each its own run folder with run-dir"


_SHARED = {spec.name for group in (*COMPUTE, NameOptions, InputOptions) for spec in fields(group)} - {"seed"}


def _list_differences(job: Job, other: Job) -> list[str]:
    """Options in which two lines of a command differ that change the numbers of what is written there."""
    options, chosen = job.step.options, _list_choosing_options(job.step.command)
    names = {name for name in options if name not in chosen | _SHARED and options[name][0].metadata["numeric"]}
    return sorted(name for name in names if list_values(job, (name,)) != list_values(other, (name,)))


def _list_choosing_options(command: str) -> set[str]:
    return {*_CHOOSING[command], *(settings_of("integrators") if command == "predict" else ())}


def list_values(job: Job, names: Iterable[str]) -> list[tuple[str, str]]:
    """These options of a line with their values, in an order of their own."""
    return sorted((name, value) for name, value in job.line.parts if name is not None and name in names)


def _list_written(job: Job) -> Iterator[tuple[str, str]]:
    """Files and folders that the line names to be written, each with its option."""
    for option in WRITTEN:
        if option in job.given:
            yield os.path.abspath(job.given[option]), option


def _shared_file(grid: GridFile, job: Job, option: str) -> ConfigError:
    flag, path = flag_of(option)[2:], Path(job.given[option])
    instead = path.with_name(f"{path.stem}-{{{JOB}}}{path.suffix}")
    said = f"several lines would write {path}: put {{{JOB}}} into the name, such as {instead}"
    return grid.fault(job.step.keys.get(option, f"{job.step.where} {flag}"), said)
