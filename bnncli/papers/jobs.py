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
from typing import NamedTuple

from bnncli.artifacts.known_files import remember_checks
from bnncli.commands.grid.running import GRACE, die_with
from bnncli.console import Console
from bnncli.errors import BnnError, DeviceError
from bnncli.names import count_noun
from bnncli.options.command import CommonOptions
from bnncli.papers.runner import MadePart, RecipePart, Workshop
from bnncli.progress import Task
from bnncli.system import signals
from bnncli.system.devices import configure_torch

_POLL = 0.2  # seconds between looks whether a signal has come


class _Request(NamedTuple):
    """A part to make, and the parts that it reads."""

    part: RecipePart
    known: dict[RecipePart, MadePart]


class _Answer(NamedTuple):
    """The part with its warnings, or why there is none."""

    made: MadePart | None
    warnings: list[str]
    error: BnnError | None


@dataclass
class _Worker:
    """A process. part: what it makes; None while it waits for one."""

    process: BaseProcess
    link: Connection
    part: RecipePart | None = None

    def hand(self, request: _Request) -> None:
        self.part = request.part
        with contextlib.suppress(OSError):  # it is gone, as its answer will say
            self.link.send(request)

    def answer(self) -> _Answer:
        """Return what it has made. Raises DeviceError if it ended without an answer."""
        assert self.part is not None
        try:
            answer: _Answer = self.link.recv()
        except (EOFError, OSError):
            self.process.join(GRACE)
            code = self.process.exitcode
            raise DeviceError(
                f"the process for {self.part.name} ended unexpectedly, with "
                f"{f'signal {-code}' if code is not None and code < 0 else f'exit {code}'}",
                hint="\0jobs\0 1 runs one part at a time and needs less memory",
                code="process_lost",
            ) from None
        self.part = None
        return answer


@dataclass
class JobPool:
    """Workers, and the parts that nobody has begun, the longest first."""

    workshop: Workshop
    workers: list[_Worker]
    ahead: list[RecipePart]
    task: Task

    def finished(self, recipes: Mapping[str, Sequence[RecipePart]]) -> Iterator[str]:
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
        if not busy:
            return
        names = [worker.part.name for worker in busy.values() if worker.part is not None]
        self.task.advance(0, note=", ".join(names)[:60])
        for link in wait(list(busy), timeout=timeout):
            self._take(busy[link])  # type: ignore[index]  # all that it waits for are connections
        self._hand_out()

    def _hand_out(self) -> None:
        """Give parts whose studies are made to workers that have none."""
        studies = {part.name: (part, made) for part, made in self.workshop.made.items() if part.is_study}
        for worker in self.workers:
            ready = next((part for part in self.ahead if studies.keys() >= {*part.after}), None)
            if worker.part is None and ready is not None:
                self.ahead.remove(ready)
                worker.hand(_Request(ready, dict(studies[name] for name in ready.after)))

    def _take(self, worker: _Worker) -> None:
        part = worker.part
        made, warnings, error = worker.answer()
        for text in warnings:
            self.workshop.run.console.warn(text)
        if error is not None:
            raise error
        assert part is not None
        assert made is not None
        self.workshop.made[part] = made
        self.task.advance()

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
        deadline = time.monotonic() + GRACE
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextlib.contextmanager
def open_job_pool(
    workshop: Workshop, parts: Sequence[RecipePart], *, jobs: int, environment: Mapping[str, str]
) -> Iterator[JobPool]:
    """Start workers for these parts, which end with the block.

    Args:
        environment: variables that each worker has beside those of this process.
    """
    ahead = sorted(parts, key=lambda part: -part.seconds)
    found = JobPool(workshop, [], ahead, workshop.run.console.task("parts", len(ahead)))
    try:
        with _environment(environment):
            for _ in range(jobs):
                found.workers.append(_start(workshop))
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


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for processes that start inside the block."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(link: Connection, workshop: Workshop, common: CommonOptions, parent: int) -> None:
    """Make the parts that are asked for, until the link closes."""
    os.setpgid(0, 0)  # signals of the terminal are for the first process to pass on
    signals.install_handlers()
    die_with(parent)
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
                link.send(_Answer(None, console.warnings, error))
            else:
                link.send(_Answer(own.made[part], console.warnings, None))
    if signals.has_abandoned_work():
        os._exit(0)
