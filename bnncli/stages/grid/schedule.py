"""The lines of a grid as they run: each where there is a place and all that it waits for has ended well."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bnncli.errors import Interrupted
from bnncli.names import counted
from bnncli.session.run import Run
from bnncli.stages.grid.journal import FAILED, SKIPPED, UP_TO_DATE, Ended, Journal
from bnncli.stages.grid.places import LinePlace
from bnncli.stages.grid.plan import Job
from bnncli.stages.grid.running import Running, stop
from bnncli.stages.grid.seen import Seen, seen_by

_POLL = 0.05  # seconds between looks at what runs


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
    ended: dict[int, Ended] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)

    def work(self) -> Mapping[int, Ended]:
        """How each job ended, by its number.

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
                self.ended[job.number] = Ended(SKIPPED, None, why=f"it depends on {self._cause(bad[0]).label}")
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
        seen = seen_by(job, config)
        if (known := self.journal.done(job, self.jobs, seen)) is not None:
            self._note(job, replace(known, state=UP_TO_DATE, seconds=0.0))
            return
        self.run.console.debug(f"{place.name}: {job.line.pasted()}")
        if seen is not None:
            self.seen[job.number] = seen
        self.running[place.name] = Running.start(job, place, self.journal, config=config)

    def _note(self, job: Job, ended: Ended) -> None:
        """Keep how a job ended, and say it."""
        if ended.is_good and job.number in self.seen:
            ended = replace(ended, seen=self.seen[job.number].digest(apart_from=self.journal.beside(job, self.jobs)))
        self.ended[job.number] = ended
        self.journal.add(job, ended)
        said = ended.state.replace("_", " ") + (f", {counted(ended.warnings, 'warning')}" if ended.warnings else "")
        if ended.state == FAILED:
            said = f"failed, exit {ended.exit}: {ended.why}"
        self.run.console.info(f"{job.label}: {said} ({ended.seconds:.1f} s)")

    def _stop(self) -> None:
        """End what still runs; of what has come to its end meanwhile it is known."""
        running = list(self.running.values())
        if running:
            self.run.console.info(f"ending {counted(len(running), 'line')}; those that can continue save their state")
            stop(running)
        for one in running:
            ended = one.ended()
            if ended is not None and ended.is_good:
                self.journal.add(one.job, ended)
        self.journal.saw(self.jobs, self.seen)
