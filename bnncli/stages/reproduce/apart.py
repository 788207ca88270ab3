"""Parts of recipes made side by side, in processes that share out the cores and end with this one; each makes one part after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from bnncli.artifacts.known_files import checks_remembered
from bnncli.console import Console
from bnncli.errors import BnnError, DeviceError
from bnncli.names import counted
from bnncli.options.command import CommonOptions
from bnncli.options.reproduce import ReproduceOptions
from bnncli.progress import Task
from bnncli.session.run import Run
from bnncli.stages.grid.running import GRACE, die_with
from bnncli.stages.reproduce.parts import Made, RecipePart, Workshop
from bnncli.stages.reproduce.places import Places
from bnncli.system import signals
from bnncli.system.devices import configure_torch

_POLL = 0.2  # seconds between looks whether a signal has come


class PartRequest(NamedTuple):
    """What a process is asked for: a part, and the parts that it reads."""

    part: RecipePart
    known: dict[RecipePart, Made]


class Told(NamedTuple):
    """What it answers: the part with its warnings, or why there is none."""

    made: Made | None
    warnings: list[str]
    error: BnnError | None


@dataclass
class Worker:
    """A process.

    Args:
        part: that it makes; None where it waits for one.
    """

    process: BaseProcess
    link: Connection
    part: RecipePart | None = None

    def hand(self, part: RecipePart, known: dict[RecipePart, Made]) -> None:
        """Have it make a part."""
        self.part = part
        with contextlib.suppress(OSError):  # it is gone, which its answer tells
            self.link.send(PartRequest(part, known))

    def answer(self) -> Told:
        """What it has made. Raises DeviceError where it has ended without."""
        assert self.part is not None
        try:
            told: Told = self.link.recv()
        except (EOFError, OSError):
            self.process.join(GRACE)
            raise DeviceError(
                f"the process for {self.part.name} ended unexpectedly, with {_ending(self.process.exitcode)}",
                hint="\0jobs\0 1 runs one part at a time and needs less memory",
                code="process_lost",
            ) from None
        self.part = None
        return told


@dataclass
class Crew:
    """Workers, and what they have to make.

    Args:
        ahead: parts that nobody has begun, the longest first.
    """

    workshop: Workshop
    workers: list[Worker]
    ahead: list[RecipePart]
    task: Task

    def finished(self, recipes: Mapping[str, Sequence[RecipePart]]) -> Iterator[str]:
        """Names of recipes, each as soon as its parts are made. Raises Interrupted, and whatever a part raises."""
        ahead = dict(recipes)
        while ahead:
            whole = [name for name, parts in ahead.items() if self.workshop.made.keys() >= {*parts}]
            self._go_on(timeout=0.0 if whole else _POLL)
            for name in whole[:1]:  # while it is written, all workers have work
                del ahead[name]
                yield name

    def _go_on(self, *, timeout: float) -> None:
        """Give out work, and take what is done within so many seconds."""
        self._begin()
        busy = [worker for worker in self.workers if worker.part is not None]
        if not busy:
            return
        self.task.advance(0, note=", ".join(worker.part.name for worker in busy if worker.part is not None)[:60])
        told = wait([worker.link for worker in busy], timeout=timeout)
        for worker in busy:
            if worker.link in told:
                self._take(worker)
        self._begin()

    def _begin(self) -> None:
        """Give parts to workers that have none."""
        for worker in self.workers:
            ready = next((part for part in self.ahead if self._is_ready(part)), None)
            if worker.part is None and ready is not None:
                self.ahead.remove(ready)
                known = {
                    one: made for one, made in self.workshop.made.items() if one.is_study and one.name in ready.after
                }
                worker.hand(ready, known)

    def _is_ready(self, part: RecipePart) -> bool:
        there = {one.name for one in self.workshop.made if one.is_study}
        return there.issuperset(part.after)

    def _take(self, worker: Worker) -> None:
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
        """End the workers; what they are at is saved as after any signal."""
        busy = [worker for worker in self.workers if worker.part is not None]
        if busy:
            self.workshop.run.console.info(f"stopping {counted(len(busy), 'part')}; resumable parts save their state")
        for worker in busy:
            worker.process.terminate()
        for worker in self.workers:
            worker.link.close()  # one that waits ends then
        deadline = time.monotonic() + GRACE
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextlib.contextmanager
def crew(
    workshop: Workshop, parts: Sequence[RecipePart], *, jobs: int, environment: Mapping[str, str]
) -> Iterator[Crew]:
    """So many workers for these parts, which end with the block.

    Args:
        environment: what each has beside that of this process.
    """
    ahead = sorted(parts, key=lambda part: -part.seconds)
    task = workshop.run.console.task("parts", len(ahead))
    found = Crew(workshop, [], ahead, task)
    try:
        with _environment(environment):
            for _ in range(jobs):
                found.workers.append(_begun(workshop))
        yield found
    finally:
        found.stop()


def _begun(workshop: Workshop) -> Worker:
    context = multiprocessing.get_context("spawn")  # a copy of this process might hold its locks
    ours, theirs = context.Pipe()
    run = replace(workshop.run, console=None, heads={}, followed={})  # type: ignore[arg-type]  # a console stays here
    asked = (theirs, run, workshop.run.console.options, workshop.options, workshop.places, workshop.folder)
    process = context.Process(target=_work, args=(*asked, os.getpid()), daemon=False)
    process.start()
    theirs.close()
    return Worker(process, ours)


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """The environment with these variables, which processes that begin inside have."""
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


def _work(
    link: Connection,
    run: Run,
    common: CommonOptions,
    options: ReproduceOptions,
    places: Places,
    folder: Path,
    parent: int,
) -> None:
    """What a process does: makes parts that it is asked for, until nobody asks."""
    os.setpgid(0, 0)  # what a terminal tells all processes is for the first one to pass on
    signals.install_handlers()
    die_with(parent)
    configure_torch(threads=run.compute.threads, deterministic=run.compute.deterministic)
    with checks_remembered(), contextlib.suppress(EOFError, OSError):
        while True:
            part, known = link.recv()
            console = Console(run.command, replace(common, quiet=True, progress="none", log_file=None))
            workshop = Workshop(replace(run, console=console), options, places, folder, dict(known))
            link.send(_told(workshop, part))
    if signals.has_abandoned_work():
        os._exit(0)


def _told(workshop: Workshop, part: RecipePart) -> Told:
    """The part, or why there is none."""
    try:
        workshop.make(part)
    except BnnError as error:
        return Told(None, workshop.run.console.warnings, error)
    return Told(workshop.made[part], workshop.run.console.warnings, None)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code}"
    return f"exit {code}"
