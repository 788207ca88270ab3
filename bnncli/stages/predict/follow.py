"""predict of what arrives in a folder: each image once, its row appended to a table, whatever stops the command between.

The table is the only state: a file that has its row there is done. Rows are written whole and are on the disk before the next
files are looked at; half a row, which a crash may leave at the end, is cut off when the command starts again, and its file done then.
"""

from __future__ import annotations

import csv
import io
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bnncli.artifacts.atomic import check_writable, publish_bytes, write_error
from bnncli.artifacts.outputs import NAME, as_it_was, csv_bytes, is_table
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.data.pixels import SUFFIXES
from bnncli.errors import DataError, MissingInput, OutputExists, ReadError, WriteError
from bnncli.names import in_table, quoted
from bnncli.session.run import Result
from bnncli.stages.predict.new_data import BLOCK, NewData
from bnncli.system.input_files import reading

_ENDINGS = tuple(SUFFIXES)
SPLIT = "followed"  # what the table says of where its examples are from
POLL_SECONDS = 0.5
_HELD = ("another bnncli process is following into this table", "give \0table\0 another name, or stop that process")


@dataclass
class Arrivals:
    """The images in a folder: which are new, and whole.

    A file that is still being written grows: it is taken when two looks in a row find it the same, or when it has been left alone for
    longer than the time between looks. Hidden files, and those with other endings, are none.

    Attributes:
        num_waiting: files that were still being written at the last look.
    """

    folder: Path
    num_waiting: int = 0
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    _left_out: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_left_out(self) -> int:
        """Files that could not be read."""
        return len(self._left_out)

    def leave_out(self, name: str) -> None:
        """Do not take a file again until it is another one."""
        if name in self._seen:
            self._left_out[name] = self._seen[name]

    def ready(self, done: set[str]) -> list[str]:
        """Names of the files that are new, whole and not done, in order of their names.

        Raises:
            MissingInput: the folder is gone.
        """
        if not self.folder.is_dir():
            raise MissingInput(f"no folder {quoted(self.folder, limit=300)}", path=self.folder)
        found: list[str] = []
        now: dict[str, tuple[int, int]] = {}
        num_waiting = 0
        with reading(self.folder), os.scandir(self.folder) as entries:
            for entry in entries:
                if (
                    in_table(entry.name) in done
                    or entry.name.startswith(".")
                    or not entry.name.lower().endswith(_ENDINGS)
                ):
                    continue
                try:
                    status = entry.stat()
                except OSError:
                    continue  # taken away again, or a loop of links
                if not stat.S_ISREG(status.st_mode):
                    continue  # a folder with such a name
                now[entry.name] = state = (status.st_size, status.st_mtime_ns)
                is_old = time.time_ns() - status.st_mtime_ns > 2e9 * POLL_SECONDS
                is_whole = status.st_size > 0 and (is_old or self._seen.get(entry.name) == state)
                if self._left_out.get(entry.name) == state:
                    continue
                self._left_out.pop(entry.name, None)
                if is_whole:
                    found.append(entry.name)
                else:
                    num_waiting += status.st_size > 0
        self._seen, self.num_waiting = now, num_waiting
        return sorted(found)


@dataclass
class Followed:
    """A folder that is followed into a table."""

    new: NewData
    arrivals: Arrivals
    target: Path
    _done: set[str] = field(default_factory=set)
    _table: tuple[int, int] = (0, 0)  # device and inode of the table

    def until(self, idle: float | None) -> Result:
        """Predict what is there and what arrives, until the command is stopped or nothing has come for `idle` seconds.

        Raises:
            Interrupted: it was stopped. Locked: another process follows into the table.
            OutputExists: the table is no such, or has other columns or posteriors. MissingInput: no folder.
        """
        run = self.new.run
        self.arrivals.ready(set())
        check_writable(self.target.parent, hint="choose another place with \0table\0")
        if run.write.dry_run:
            return Result("planned", [self._output()], lines=[f"append to: {self.target}"])
        with artifact_lock(run.folder.lock(self.target), wait=run.lock.wait, poll=run.console.poll, held=_HELD):
            self._done = continued(
                self.target, self.new.titles, self._origins(), force=run.write.force, is_raw=self.new.shown.is_raw
            )
            self._table = _identity(os.stat(self.target))
            before, last = len(self._done), time.monotonic()
            run.console.info(f"following {self.arrivals.folder} into {self.target}: {before:,} files done")
            while True:
                run.console.poll(f"{len(self._done):,} files done, all in {self.target}")
                if names := self.arrivals.ready(self._done):
                    self._predict(names[:BLOCK])
                    last = time.monotonic()
                elif idle is not None and not self.arrivals.num_waiting and time.monotonic() - last >= idle:
                    break
                else:
                    time.sleep(POLL_SECONDS)
            return Result(
                "computed",
                [self._output()],
                metrics={
                    "examples": len(self._done),
                    "new": len(self._done) - before,
                    "unreadable": self.arrivals.num_left_out,
                },
                summary=[
                    f"new files: {len(self._done) - before:,} ({len(self._done):,} in total); unreadable: "
                    f"{self.arrivals.num_left_out}"
                ],
            )

    def _predict(self, names: Sequence[str]) -> None:
        """Append the rows of these files; of those that cannot be read, say so."""
        try:
            split = self.new.images(SPLIT, f"images:{self.arrivals.folder}", self.arrivals.folder, names)
            text = b"".join(
                csv_bytes(block, self.new.classes) for block in self.new.blocks(split, first_id=len(self._done))
            )
        except (DataError, MissingInput, ReadError) as error:
            if len(names) > 1:
                middle = len(names) // 2
                self._predict(names[:middle])
                self._predict(names[middle:])
                return
            if (self.arrivals.folder / names[0]).exists():
                self.new.run.console.warn(f"skipping {quoted(names[0])}: {error.message}")
                self.arrivals.leave_out(names[0])
            return
        _append(self.target, text, self._table)
        self._done.update(map(in_table, names))
        self.new.run.console.info(f"{len(names):,} new, {len(self._done):,} in total; last: {quoted(names[-1])}")

    def _origins(self) -> set[tuple[str, str]]:
        return {(maker.predictor.path.stem, maker.choice.variant) for maker in self.new.makers}

    def _output(self) -> dict[str, object]:
        return {"role": "table", "path": str(self.target)}


def continued(target: Path, header: bytes, origins: set[tuple[str, str]], *, force: bool, is_raw: bool) -> set[str]:
    """Names of the files that a table has the rows of, made ready for more rows: begun where there is none, half a row cut off.

    A file of whose rows by several posteriors not all are there is cut off with them: rows of a file are written at once.

    Args:
        header: the line of titles.
        origins: posteriors and integrators of the rows.
        is_raw: whether names stand there as they are.

    Raises:
        OutputExists: it is no table, or one with other columns or posteriors.
    """
    if force or not target.exists() or target.stat().st_size == 0:
        _replace(target, header)
        return set()
    if not target.is_file() or not is_table(target):
        raise OutputExists(
            f"{target} exists and is not a table of bnncli", hint="give \0table\0 another name", path=target
        )
    content = target.read_bytes()
    whole = content[: _end_of_rows(content)]
    if not whole.startswith(header):
        hint = "give \0table\0 another name, or add \0force\0 to start over"
        raise OutputExists(f"the columns of {target} differ from those this command writes", hint=hint, path=target)
    rows = list(csv.DictReader(io.StringIO(whole.decode(), newline="")))
    others = {(row["posterior"], row["variant"]) for row in rows} - origins
    if others:
        posterior, variant = sorted(others)[0]
        hint = "name the same posteriors again, give \0table\0 another name, or add \0force\0 to start over"
        raise OutputExists(f"{target} has rows of {posterior} ({variant})", hint=hint, path=target)
    counts: dict[str, int] = {}
    for row in rows:
        name = row[NAME] if is_raw else as_it_was(row[NAME])
        counts[name] = counts.get(name, 0) + 1
    done = {name for name, count in counts.items() if count == len(origins)}
    if len(done) < len(counts):
        kept = [row for row in rows if (row[NAME] if is_raw else as_it_was(row[NAME])) in done]
        text = io.StringIO(newline="")
        csv.DictWriter(text, list(rows[0]), lineterminator="\r\n").writerows(kept)
        _replace(target, header + text.getvalue().encode())
    elif len(whole) < len(content):
        os.truncate(target, len(whole))
    return done


def _end_of_rows(content: bytes) -> int:
    """Where the last whole row ends: a line end outside quotes."""
    end = len(content)
    while (end := content.rfind(b"\r\n", 0, end)) >= 0:
        if content.count(b'"', 0, end) % 2 == 0:
            return end + 2
    return 0


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _append(target: Path, text: bytes, table: tuple[int, int]) -> None:
    """Add rows at the end of the table, and wait until they are on the disk.

    Args:
        table: its identity. Another file, or a link to one, may stand in its place by now, and is nobody's to write.

    Raises:
        WriteError: there is no room (the table then has none of the rows), or the table is gone or was replaced.
    """
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise write_error(error, target) from None
    try:
        if _identity(os.fstat(descriptor)) != table:
            hint = "run the command again with a table that no other program replaces"
            raise WriteError(f"{target} was replaced while bnncli wrote to it", hint=hint, path=target)
        size = os.fstat(descriptor).st_size
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise write_error(error, target) from None
    finally:
        os.close(descriptor)


def _replace(target: Path, content: bytes) -> None:
    publish_bytes(target, content, may_replace=True)
