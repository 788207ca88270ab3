"""Make parts of recipes in parallel processes, which share the cores and end with this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from bnncli.artifacts.known_files import remember_checks
from bnncli.console import Console
from bnncli.errors import BnnError, DeviceError
from bnncli.names import count_noun
from bnncli.options.command import CommonOptions
from bnncli.papers.recipe import Part, Study
from bnncli.papers.runner import MadePart, Workshop
from bnncli.progress import Task
from bnncli.system import signals
from bnncli.system.devices import configure_torch

_POLL = 0.2  # seconds between looks whether a signal has come


@dataclass
class _Worker:
    """A process. part: what it makes; None while it waits for one."""

    process: BaseProcess
    link: Connection
    part: Part | None = None

    def take_answer(self) -> tuple[Part, MadePart | None, list[str], BnnError | None]:
        """Return the part, what came of it, warnings, and why nothing did. Raises DeviceError if it ended without an answer."""
        part, self.part = self.part, None
        assert part is not None
        try:
            return part, *self.link.recv()
        except (EOFError, OSError):
            self.process.join(signals.GRACE)
            code = self.process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit {code}"
            raise DeviceError(
                f"the process for {part.name} ended unexpectedly, with {how}",
                hint="\0jobs\0 1 runs one part at a time and needs less memory",
                code="process_lost",
            ) from None


@dataclass
class JobPool:
    """Workers, and the parts that nobody has begun, the longest first."""

    workshop: Workshop
    workers: list[_Worker]
    ahead: list[Part]
    task: Task

    def finished(self, recipes: Mapping[str, Sequence[Part]]) -> Iterator[str]:
        """Yield the name of each recipe as soon as its parts are made. Raises Interrupted, and whatever a part raises."""
        ahead = dict(recipes)
        while ahead:
            whole = [name for name, parts in ahead.items() if self.workshop.made.keys() >= {*parts}]
            self._go_on(timeout=0.0 if whole else _POLL)
            for name in whole[:1]:  # while it is written, all workers have work
                del ahead[name]
                yield name

    def _go_on(self, *, timeout: float) -> None:
        """Hand out work, and take what is done within so many seconds."""
        self._hand_out()
        busy = {worker.link: worker for worker in self.workers if worker.part is not None}
        self.task.advance(0, note=", ".join(worker.part.name for worker in busy.values() if worker.part)[:60])
        for link in wait(list(busy), timeout=timeout) if busy else ():
            part, made, warnings, error = busy[link].take_answer()  # type: ignore[index]  # all that it waits for are connections
            for text in warnings:
                self.workshop.run.console.warn(text)
            if error is not None:
                raise error
            assert made is not None
            self.workshop.made[part] = made
            self.task.advance()
        self._hand_out()

    def _hand_out(self) -> None:
        """Give parts whose studies are made to workers that have none."""
        studies = {part.name: (part, made) for part, made in self.workshop.made.items() if isinstance(part, Study)}
        for worker in self.workers:
            ready = next((part for part in self.ahead if studies.keys() >= part.after), None)
            if worker.part is None and ready is not None:
                self.ahead.remove(ready)
                worker.part = ready
                with contextlib.suppress(OSError):  # it is gone, as its answer will say
                    worker.link.send((ready, dict(studies[name] for name in ready.after)))

    def stop(self) -> None:
        """End the workers; unfinished work is saved as after any signal."""
        busy = [worker for worker in self.workers if worker.part is not None]
        if busy:
            self.workshop.run.console.info(
                f"stopping {count_noun(len(busy), 'part')}; resumable parts save their state"
            )
        for worker in busy:
            worker.process.terminate()
        for worker in self.workers:
            worker.link.close()  # a worker that waits ends then
        deadline = time.monotonic() + signals.GRACE
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextlib.contextmanager
def open_job_pool(
    workshop: Workshop, parts: Sequence[Part], *, jobs: int, environment: Mapping[str, str]
) -> Iterator[JobPool]:
    """Start workers for these parts, which end with the block.

    Args:
        environment: variables that each worker has beside those of this process.
    """
    scale = workshop.options.scale
    ahead = sorted(parts, key=lambda part: -part.seconds.get(scale, 0.0))
    found = JobPool(workshop, [], ahead, workshop.run.console.task("parts", len(ahead)))
    before = {name: os.environ.get(name) for name in environment}
    try:
        try:
            os.environ.update(environment)
            for _ in range(jobs):
                found.workers.append(_start(workshop))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        yield found
    finally:
        found.stop()


def _start(workshop: Workshop) -> _Worker:
    context = multiprocessing.get_context("spawn")  # a copy of this process might hold its locks
    ours, theirs = context.Pipe()
    run = replace(workshop.run, console=None, heads={}, followed={})  # type: ignore[arg-type]  # a console stays here
    given = (theirs, replace(workshop, run=run, made={}), workshop.run.console.options, os.getpid())
    process = context.Process(target=_work, args=given, daemon=False)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _work(link: Connection, workshop: Workshop, common: CommonOptions, parent: int) -> None:
    """Make the parts that are asked for, until the link closes."""
    os.setpgid(0, 0)  # signals of the terminal are for the first process to pass on
    signals.install_handlers()
    signals.die_with(parent)
    run = workshop.run
    configure_torch(threads=run.compute.threads, deterministic=run.compute.deterministic)
    with remember_checks(), contextlib.suppress(EOFError, OSError):
        while True:
            part, known = link.recv()
            console = Console(run.command, replace(common, quiet=True, progress="none", log_file=None))
            own = replace(workshop, run=replace(run, console=console), made=dict(known))
            try:
                own.make(part)
            except BnnError as error:
                link.send((None, console.warnings, error))
            else:
                link.send((own.made[part], console.warnings, None))
    if signals.has_abandoned_work():
        os._exit(0)
