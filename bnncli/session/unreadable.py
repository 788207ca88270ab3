"""Leave out examples that cannot be read, and list them in a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.outputs import escape_formula
from bnncli.data.splits import InputSplit
from bnncli.errors import UNREADABLE, DataError
from bnncli.names import escape_for_table, percent
from bnncli.progress import Progress

if TYPE_CHECKING:
    from bnncli.session.run import Result

_COLUMNS = ("sample_id", "name", "reason")
MOST = 0.01  # share of a split that may be unreadable, by default


class UnreadableExample(NamedTuple):
    """An example that cannot be read: its row in the data, its name ("" without one), and the reason."""

    row: int
    name: str
    reason: str


@contextmanager
def suggest_skipping(options: SkipOptions) -> Iterator[None]:
    """Add to the error for an example that cannot be read how to leave it out, unless the options say so already."""
    try:
        yield
    except DataError as error:
        if error.code == UNREADABLE and error.hint is None and not options.skip_unreadable:
            error.hint = "repair or remove it, or leave out such examples with \0skip_unreadable\0"
        raise


class SkipOptions(Protocol):
    """Options of what to do with unreadable examples."""

    @property
    def skip_unreadable(self) -> bool:
        """True to leave them out."""

    @property
    def max_skipped(self) -> float | None:
        """Largest share of a split that may be left out; None for the default."""


@dataclass
class SkippedExamples:
    """The unreadable examples of each split.

    Attributes:
        most: largest share of a split that may be left out.
        num_workers: reader processes.
    """

    progress: Progress
    most: float = MOST
    num_workers: int = 0
    found: dict[str, list[UnreadableExample]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def asked(cls, progress: Progress, options: SkipOptions, num_workers: int = 0) -> SkippedExamples | None:
        """Return what the options ask for; None where unreadable examples are refused."""
        if not options.skip_unreadable:
            return None
        return cls(progress, MOST if options.max_skipped is None else options.max_skipped, num_workers)

    def leave_out(self, split: InputSplit) -> InputSplit:
        """Return the split without its unreadable examples, and note these.

        Raises:
            DataError: they are more than the allowed share.
            DeviceError: a reader process died, or too many files are open.
        """
        failed = split.find_unreadable(num_workers=self.num_workers, progress=self.progress)
        names = split.names
        found = [
            UnreadableExample(int(split.rows[place]), "" if names is None else names[place], why)
            for place, why in failed
        ]
        if 0 < len(found) == len(split):
            raise DataError(
                f"{split.name}: none of the {len(split):,} examples can be read; the first: {found[0].reason}",
                hint="check the data and their format",
                code="too_many_unreadable",
            )
        if len(found) > self.most * len(split):
            raise DataError(
                f"{split.name}: {len(found):,} of {len(split):,} examples cannot be read ({percent(len(found) / len(split))}), "
                f"more than the allowed {percent(self.most)}; the first: {found[0].reason}",
                hint="check the data, or allow a larger share with \0max_skipped\0",
                code="too_many_unreadable",
            )
        self.found[split.name], self._sizes[split.name] = found, len(split)
        return split.take(np.delete(np.arange(len(split)), [place for place, _ in failed]))

    def list_in(self, result: Result, place: Callable[[str], Path]) -> None:
        """Write the unreadable examples of each split to a file (CSV), and add the files to a command's result.

        Removes the list of an earlier run where every example can be read.

        Args:
            place: returns the file of a split, by name.
        """
        for name, examples in self.found.items():
            path = place(name)
            if not examples:
                if is_list(path):
                    path.unlink()
                continue
            text = io.StringIO(newline="")
            writer = csv.writer(text)
            writer.writerow(_COLUMNS)
            for one in examples:
                writer.writerow((one.row, *(escape_formula(escape_for_table(cell)) for cell in (one.name, one.reason))))
            publish_bytes(path, text.getvalue().encode(), may_replace=True)
            result.outputs.append({"role": "skipped", "path": str(path), "split": name, "examples": len(examples)})
            result.summary.append(
                f"{name}: left out {len(examples):,} of {self._sizes[name]:,} examples that cannot be read; see {path}"
            )


def is_list(path: Path) -> bool:
    """Return whether a file is a list of unreadable examples."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline(100).rstrip() == ",".join(_COLUMNS).encode()
