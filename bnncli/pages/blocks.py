"""What sections of a page are made of, besides figures and markup: tables, what is missing, examples to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

from bnncli.figures.shown import Shown
from bnncli.pages.markup import Markup


class TableCell(NamedTuple):
    """What a cell says, the number by which its column is sorted (without, it is sorted by its text), and smaller lines below."""

    text: str
    number: float | None = None
    below: Sequence[str] = ()


@dataclass(frozen=True)
class DataTable:
    """A table whose first column names the rows; it can be read as it is, and sorted where scripts run.

    Args:
        name: letters, digits, dots and dashes, unique on the page.
        caption: what it is.
        notes: below it.
        is_folded: whether it is shown only when it is asked for.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    notes: Sequence[str] = ()
    is_folded: bool = False


class Missing(NamedTuple):
    """What is not there, a sentence, and the command that makes it; None where no command would."""

    sentence: str
    command: str | None = None


class ShownInput(NamedTuple):
    """One example: a picture (a PNG) or a text, or neither, and what is said of it."""

    caption: str
    alternative: str
    png: bytes | None = None
    text: str | None = None


@dataclass(frozen=True)
class Gallery:
    """Examples beside each other.

    Args:
        title: what they have in common.
    """

    title: str
    examples: Sequence[ShownInput]


Block = Markup | Shown | DataTable | Missing | Gallery


@dataclass(frozen=True)
class Section:
    """A part of a page with a title; its name is unique on the page."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=list)

    @property
    def figures(self) -> list[Shown]:
        """The figures among the blocks."""
        return [block for block in self.blocks if is_figure(block)]


def is_figure(block: Block) -> TypeGuard[Shown]:
    """Whether a block is a figure, as everything is that is none of the other kinds."""
    return not isinstance(block, Markup | DataTable | Missing | Gallery)
