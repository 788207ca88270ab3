"""What is known of the lines of a grid: how each ended, and what it left; on disk after each, so that a kill loses none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import publish_bytes
from bnncli.errors import NOT_OF_CONTENT, BnnError
from bnncli.session.run import Run
from bnncli.stages.grid.apart import WRITTEN
from bnncli.stages.grid.plan import Job
from bnncli.stages.grid.seen import Seen
from bnncli.system.input_files import read_object

SCHEMA = "bnncli.grid/1"
DONE, UP_TO_DATE, FAILED, SKIPPED = "done", "up_to_date", "failed", "skipped"


@dataclass(frozen=True)
class Ended:
    """How a line ended.

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
        """Whether lines that wait for it may begin."""
        return self.state in (DONE, UP_TO_DATE)


@dataclass
class Journal:
    """The state of a grid, in a folder of its own.

    Args:
        known: by the keys of jobs, how they ended the last time.
    """

    folder: Path
    known: dict[str, Ended] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, run: Run) -> Journal:
        """The state that is there; an empty one where there is none, or it is damaged, which costs no result."""
        path = _state_of(folder)
        if not path.is_file():
            return cls(folder)
        try:
            document = read_object(path)
            if document["schema"] != SCHEMA:
                raise ValueError(document["schema"])
            entries = {key: _ended(entry) for key, entry in document["jobs"].items()}
        except NOT_OF_CONTENT:
            raise
        except (BnnError, LookupError, TypeError, ValueError, AttributeError):
            run.console.warn(f"{path} is damaged: checking every line again")
            return cls(folder)
        return cls(folder, entries)

    @property
    def logs(self) -> Path:
        """Where logs and documents of the lines lie."""
        return self.folder / "logs"

    def log(self, job: Job) -> Path:
        """What the line has said, of all times that it ran."""
        return self.logs / f"{job.stem}.log"

    def document(self, job: Job) -> Path:
        """The line's JSON document, of the last time that it ran."""
        return self.logs / f"{job.stem}.json"

    def add(self, job: Job, ended: Ended) -> None:
        """Keep how a job ended. Raises OutputExists, WriteError."""
        self.known[job.key] = ended
        self._publish()

    def _publish(self) -> None:
        entries = {key: vars(one) for key, one in self.known.items()}
        document = {"schema": SCHEMA, "jobs": entries}
        publish_bytes(_state_of(self.folder), json.dumps(document, indent=1).encode(), may_replace=True, poll=False)

    def beside(self, job: Job, jobs: list[Job]) -> set[Path]:
        """What the other lines of a grid have left but those for which this one waits, itself or through others."""
        waited, ahead = {job.number}, [job]
        while ahead:
            more = set(ahead.pop().after) - waited
            waited |= more
            ahead += [jobs[number] for number in more]
        known = (self.known.get(other.key) for other in jobs if other.number not in waited)
        return {Path(path) for ended in known if ended is not None for path in ended.outputs}

    def saw(self, jobs: list[Job], seen: Mapping[int, Seen]) -> None:
        """Keep what lines have seen, by number, as it is known when all have ended what was not for them. Raises OutputExists, WriteError."""
        for number, one in seen.items():
            job = jobs[number]
            known = self.known.get(job.key)
            if known is not None and known.is_good:
                self.known[job.key] = replace(known, seen=one.digest(apart_from=self.beside(job, jobs)))
        if seen:
            self._publish()

    def done(self, job: Job, jobs: list[Job], seen: Seen | None) -> Ended | None:
        """How a line that makes no artifact has ended well, with the same to see as now and what it wrote still there; else None."""
        known = self.known.get(job.key)
        if known is None or not known.is_good or seen is None or known.seen is None:
            return None
        if known.seen != seen.digest(apart_from=self.beside(job, jobs)):
            return None
        written = [self.document(job), *(Path(job.given[option]) for option in WRITTEN if option in job.given)]
        return known if all(path.exists() for path in written) else None


def _state_of(folder: Path) -> Path:
    return folder / "state.json"


def _ended(entry: dict[str, Any]) -> Ended:
    found = Ended(**{**entry, "outputs": tuple(entry["outputs"])})
    if not all(isinstance(one, str) for one in (found.state, found.why, *found.outputs)):
        raise TypeError(entry)
    return found
