"""Pages that stay below a size: where one would not, sections go, the least important first, and a last one says which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bnncli.pages.blocks import Block, Section
from bnncli.pages.markup import Markup
from bnncli.pages.page import MOST_BYTES
from bnncli.pages.sections import section_of

LEFT_OUT = "left-out"  # the name of the section that says what is not there


class FittedPage(NamedTuple):
    """A page below the size, and the sections that are not on it."""

    content: bytes
    left_out: list[Section]


def fitted(
    sections: Sequence[Section],
    *,
    importance: Callable[[Section], float],
    page_of: Callable[[Sequence[Section], dict[str, Markup]], bytes],
    note: Callable[[Sequence[Section]], Block],
    most_bytes: int = MOST_BYTES,
) -> FittedPage:
    """The page of as many of the sections as fit, with the first in any case; of that the first blocks, as many as fit.

    Args:
        importance: the lowest goes first; of equals the last.
        page_of: the page of sections that are HTML already, by name.
        note: what is said of those that are left out.
    """
    ready = {section.name: section_of(section) for section in sections}
    kept, gone = list(sections), list[Section]()
    content = page_of(kept, ready)
    order = sorted(range(1, len(kept)), key=lambda place: (importance(sections[place]), -place))
    for section in (sections[place] for place in order):
        if len(content) <= most_bytes:
            break
        kept.remove(section)
        gone.append(section)
        # Rendering is cheap beside drawing, and classes of styles make the size known only then.
        content = _page(kept, gone, ready, page_of, note)
    first = sections[0]
    for count in range(len(first.blocks) - 1, -1, -1):
        if len(content) <= most_bytes:
            break
        cut = Section(first.name, first.title, first.blocks[:count])
        ready[first.name] = section_of(cut)
        content = _page([cut], [*gone, first], ready, page_of, note)
    return FittedPage(content, gone)


def _page(
    kept: Sequence[Section],
    gone: Sequence[Section],
    ready: dict[str, Markup],
    page_of: Callable[[Sequence[Section], dict[str, Markup]], bytes],
    note: Callable[[Sequence[Section]], Block],
) -> bytes:
    last = Section(LEFT_OUT, "Left out", [note(gone)])
    return page_of([*kept, last], {**ready, LEFT_OUT: section_of(last)})
