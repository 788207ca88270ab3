"""Trials: a command with one fault, in a process of its own; then what it left is looked at, and the command run again."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import importlib
import io
import json
import os
import pkgutil
import random
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bnncli import figures
from bnncli.artifacts.atomic import dead_temporaries
from bnncli.artifacts.files import read_header
from bnncli.cli.execute import run_command_line
from bnncli.commands.export import build as export
from bnncli.errors import BnnError
from bnncli.figures import pages, style
from faults.lines import LINES, Line, copy_tree, leave_leftovers, leave_stale
from faults.mutations import mutations
from faults.shim import READS, WRITES, Shim

FULL = (errno.ENOSPC, errno.EDQUOT)  # what stays so until somebody does something
WRITE_CODES = {errno.ENOSPC: 74, errno.EDQUOT: 74, errno.EIO: 74, errno.EROFS: 73, errno.EACCES: 73}
READ_CODES = {errno.EIO: 74, errno.ESTALE: 74}
SECONDS = 60  # that a trial may take
FEW_INPUTS = 1  # that are damaged, in the default suite
MANY = 100  # of each kind of damage to each input, in the long run


@dataclass(frozen=True)
class Fault:
    """One fault: where in the calls of these kinds, and the errno, or 0 for a kill; or other content of a file."""

    kinds: tuple[str, ...] = ()
    at: int = -1
    number: int = 0
    lasts: bool = False
    file: str = ""
    content: bytes = b""
    what: str = ""


@dataclass
class Outcome:
    """How a command ended: its exit code (negative: the signal), and what it said on stderr."""

    code: int
    stderr: str
    seen: list[tuple[str, str]]


class Campaign:
    """The trials of one line.

    Args:
        base: a prepared folder, which is only copied.
        scratch: where copies may be made.
    """

    def __init__(self, base: Path, scratch: Path, line: Line) -> None:
        os.fsync = lambda descriptor: None  # a kill leaves what the system has taken; waiting for the disk takes long
        self.base, self.scratch, self.line = base, scratch, line
        self.place = scratch / "here"
        self.failures: list[str] = []
        self.seen: dict[str, list[tuple[str, str]]] = {}
        self.states = {"fresh": self._without_outputs(copy_tree(base, scratch / "fresh"))}
        if line.earlier is not None:
            self.states["earlier"] = self._made_earlier(line.earlier)
        self.before = {name: self.contents(folder) for name, folder in self.states.items()}
        self._begin("fresh")
        code, said = self._run(line.argv(line.words))
        assert code == 0, said
        self.after = self.contents(self.place)
        self.hidden = self._hidden()
        gc.collect()
        gc.freeze()

    def _made_earlier(self, words: tuple[str, ...]) -> Path:
        with contextlib.chdir(copy_tree(self.states["fresh"], self.scratch / "earlier")):
            code, said = self._run(self.line.argv(words))
        assert code == 0, said
        return self.scratch / "earlier"

    def _without_outputs(self, folder: Path) -> Path:
        for pattern in self.line.outputs:
            for path in folder.glob(pattern):
                path.unlink()
        return folder

    def _begin(self, state: str) -> None:
        """The folder as it is before a trial."""
        copy_tree(self.states[state], self.place)
        if self.line.command == "clean":
            leave_leftovers(self.place)
        elif self.line.command == "clean/stale":
            leave_stale(self.place)
        os.chdir(self.place)

    def _run(self, argv: list[str]) -> tuple[int, str]:
        """The command in this process: its exit code, and stderr."""
        said, plain = io.StringIO(), sys.stderr
        sys.stderr = said
        try:
            return run_command_line([*argv, "-q"], io.StringIO()), said.getvalue()
        finally:
            sys.stderr = plain

    def _forked(self, argv: list[str], fault: Fault) -> Outcome:
        """The command in a process of its own, with a fault."""
        report = self.scratch / "outcome.json"
        report.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # the threads of the process that was forked are not there
            signal.alarm(SECONDS)
            shim = Shim(self.place, fault.kinds, fault.at, fault.number, fault.lasts)
            shim.install()
            code, said = self._run(argv)
            report.write_text(json.dumps([code, said, shim.seen]))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            return Outcome(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else 1, "", [])
        return Outcome(*json.loads(report.read_text()))

    def argv(self, state: str) -> list[str]:
        """The words of a trial; with --force where there is something to replace."""
        return self.line.argv(self.line.words, *(self.line.force if state == "earlier" else ()))

    def calls(self, kinds: tuple[str, ...], state: str) -> list[tuple[str, str]]:
        """The calls of these kinds that the command makes when nothing fails; one run tells those of all kinds."""
        if state not in self.seen:
            self._begin(state)
            done = self._forked(self.argv(state), Fault(WRITES + READS))
            assert done.code == 0, done.stderr
            self.seen[state] = done.seen
        return [call for call in self.seen[state] if call[0] in kinds]

    def contents(self, folder: Path) -> dict[str, str]:
        """Each output that is there: its content digest, or that of its bytes."""
        found = {}
        for pattern in self.line.outputs:
            for path in sorted(folder.glob(pattern)):
                if not path.name.startswith("."):
                    found[str(path.relative_to(folder))] = _digest(path)
        return found

    def _hidden(self) -> set[str]:
        paths = (path for path in self.place.rglob(".*") if path.is_file() and ".locks" not in path.parts)
        return {path.name for path in paths}

    def trial(self, state: str, fault: Fault, call: tuple[str, str], *, again: bool = True) -> None:
        """One fault: what it must not do goes to `failures`."""
        self._begin(state)
        done = self._forked(self.argv(state), fault)
        what = "kill" if not fault.number else errno.errorcode[fault.number]
        problems = [*self._left(state), *(self._killed(done) if not fault.number else self._failed(done, fault, call))]
        problems += self._again() if again else []
        label = f"{self.line.command} ({state}), {what} at {fault.at}: {' '.join(call)}"
        self.failures += [f"{label}: {problem} [{done.code} {done.stderr[-300:]!r}]" for problem in problems]

    def _left(self, state: str) -> Iterator[str]:
        """What is wrong with the outputs after a fault: each is as it was before, or as it would be, and whole."""
        before, there = self.before[state], self.contents(self.place)
        for name, digest in there.items():
            if digest not in (before.get(name), self.after.get(name)):
                yield f"{name} is neither old nor new"
        for name in before:
            if not (self.place / name).exists() and self.line.argv(())[0] not in ("clean", "rm"):
                yield f"{name} is gone"
        known = self.states[state]
        new = [name for name in there if _is_artifact(name) and not _is_same(known / name, self.place / name)]
        if new and self._run(["verify", *new])[0] != 0:
            yield "verify finds damage"

    def _killed(self, done: Outcome) -> Iterator[str]:
        if done.code != -signal.SIGKILL:
            yield "was not killed"

    def _failed(self, done: Outcome, fault: Fault, call: tuple[str, str]) -> Iterator[str]:
        """What is wrong with how a command ended that met an error of the system."""
        codes = READ_CODES if fault.kinds == READS else WRITE_CODES
        yield from _one_line(done)
        if done.code == 0 and self.contents(self.place) != self.after:
            yield "ends well, with other results"
        of_folder = call[0] == "sync" and not call[1].endswith(".tmp")  # the file is in place then, and that is said
        if done.code not in (0, codes[fault.number], 74 if of_folder else 0):
            yield f"ends with {done.code}, not {codes[fault.number]}"
        if self.line.command != "clean" and call[0] != "unlink" and any(self.place.rglob(".*.tmp")):
            yield "leaves temporaries"

    def _again(self) -> Iterator[str]:
        """What is wrong when the command is run again, and nothing fails."""
        code, said = self._run(self.line.argv(self.line.words, *self.line.force))
        if code == 66 and self.line.command == "rm":
            return  # all that is named is gone
        if code != 0:
            yield f"fails when run again: {said[-300:]}"
        elif self.contents(self.place) != self.after:
            yield "gives other results when run again"
        elif dead_temporaries(self.place) or not self._hidden() <= self.hidden:
            yield f"leaves {sorted(self._hidden() - self.hidden)} when run again"

    def mutated(self, fault: Fault) -> None:
        """One damaged input: refused with one line, or of no consequence."""
        self._begin("fresh")
        (self.place / fault.file).write_bytes(fault.content)
        done = self._forked(self.argv("fresh"), Fault())
        problems = list(_one_line(done))
        has_checksums = self.line.command != "score"  # of its inputs, predictions of the user's own
        if done.code == 0 and has_checksums and (self.line.outputs == () or self.contents(self.place) != self.after):
            problems.append("is accepted, with other results")
        if done.code not in (0, 65, 66, 77):
            problems.append(f"ends with {done.code}")
        label = f"{self.line.command}, {fault.file} {fault.what}"
        self.failures += [f"{label}: {problem} [{done.code} {done.stderr[-300:]!r}]" for problem in problems]


def _one_line(done: Outcome) -> Iterator[str]:
    if done.code < 0:
        yield f"dies of signal {-done.code}"
    if "Traceback" in done.stderr:
        yield "shows a traceback"
    if done.code > 0 and sum(line.startswith("error: ") for line in done.stderr.splitlines()) != 1:
        yield "does not say what is wrong in one line"


def _draw_and_time_nothing() -> None:
    """Figures are their mark alone, and graphs are not timed: both take longer than all else."""
    figures.render = lambda figure, kind: f"{figures.MARK} {kind}".encode()
    for found in pkgutil.iter_modules(figures.__path__):
        module = importlib.import_module(f"bnncli.figures.{found.name}")
        for name in [name for name in vars(module) if re.match("draw(_|$)", name)]:
            setattr(module, name, lambda *words, **names: None)
    style.figure_file = lambda figure, form: f"{figures.MARK} {figure.name} {form}".encode()
    pages.inline_svg = lambda figure: f"<svg><title>{figure.name}</title></svg>"
    export._SECONDS = export._MOST_SECONDS = 0.0


def _digest(path: Path) -> str:
    try:
        return read_header(path).content_digest
    except BnnError:
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_artifact(name: str) -> bool:
    return not name.endswith(".py") and (
        ".bnn/" in name or name.startswith("else/")
    )  # the module beside an export is none


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and one.read_bytes() == other.read_bytes()


def chosen(calls: list[tuple[str, str]], count: int | None, generator: random.Random) -> list[int]:
    """Places among the calls: all, or so many of which half, rounded up, are where something gets its name."""
    places = list(range(len(calls)))
    if count is None or len(places) <= count:
        return places
    naming = [place for place in places if calls[place][0] in ("rename", "link")]
    near = sorted({min(max(place + step, 0), places[-1]) for place in naming for step in (0, 1)})
    first = generator.sample(near, min((count + 1) // 2, len(near)))
    rest = [place for place in places if place not in first]
    return sorted(first + generator.sample(rest, min(count - len(first), len(rest))))


def serve(requests: Connection) -> None:
    """In the child: campaigns as they are asked for, each in a process forked from one that has done all imports.

    A request is the arguments of `run_line`; the answer is how its process ended.
    """
    _draw_and_time_nothing()
    assert run_command_line(["config", "show", "refine", "-q"], io.StringIO()) == 0  # what parses is imported late
    gc.collect()
    gc.freeze()  # a collection of everything takes longer than most commands
    while True:
        words = requests.recv()
        child = os.fork()
        if child == 0:
            try:
                run_line(*words)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        requests.send(os.waitpid(child, 0)[1])


def run_line(base: str, scratch: str, key: str, count: int | None, report: str) -> None:
    """In a process of its own: the trials of one line, so many of each kind and state (None: every one); what went wrong, as JSON."""
    generator = random.Random(f"faults/{key}")
    campaign, numbers = Campaign(Path(base), Path(scratch), LINES[key]), {}
    if LINES[key].is_read_only:
        campaign.failures += [f"{key} writes: {' '.join(call)}" for call in campaign.calls(WRITES, "fresh")]
    else:
        numbers["writes"] = _writes(campaign, count, generator)
    numbers["reads"] = _reads(campaign, count, generator)
    numbers["mutations"] = _mutations(campaign, MANY if count is None else 1, generator)
    found = {"failures": campaign.failures, "trials": numbers, "seconds": sum(os.times()[:4])}
    Path(report).write_text(json.dumps(found))


def _writes(campaign: Campaign, count: int | None, generator: random.Random) -> int:
    """A kill, and errors, at calls that write."""
    number, states = 0, list(campaign.states)
    generator.shuffle(states)  # a few trials: kills in one state, errors in the other
    for state in states:
        calls = campaign.calls(WRITES, state)
        for place in chosen(calls, count, generator) if count is None or state == states[0] else []:
            campaign.trial(state, Fault(WRITES, place), calls[place])
            number += 1
        for place in chosen(calls, count, generator) if count is None or state == states[-1] else []:
            for code in WRITE_CODES if count is None else [generator.choice(list(WRITE_CODES))]:
                campaign.trial(state, Fault(WRITES, place, code, code in FULL), calls[place], again=count is None)
                number += 1
    return number


def _reads(campaign: Campaign, count: int | None, generator: random.Random) -> int:
    """Errors at calls that read."""
    calls = campaign.calls(READS, "fresh")
    places = chosen(calls, count, generator)
    for place in places:
        code = generator.choice(list(READ_CODES))
        campaign.trial("fresh", Fault(READS, place, code), calls[place], again=False)
    return len(places)


def _some(inputs: tuple[str, ...], generator: random.Random) -> list[str]:
    """At most a few of the inputs."""
    return generator.sample(inputs, min(len(inputs), FEW_INPUTS))


def _mutations(campaign: Campaign, count: int, generator: random.Random) -> int:
    """Damaged inputs."""
    number = 0
    for file in campaign.line.inputs if count > 1 else _some(campaign.line.inputs, generator):
        is_run = campaign.line.command != "verify"  # which is asked whether a file is whole, wherever it lies
        for what, content in mutations(campaign.base / file, count, generator, swaps=is_run):
            campaign.mutated(Fault(file=file, content=content, what=what))
            number += 1
    return number
