"""The HTML page of a report: one self-contained file, with the same bytes for the same content.

Text is escaped unless it is markup. A page over the size limit drops its least important sections and says so.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, singledispatch
from importlib.resources import files
from typing import Any, NamedTuple, TypeGuard

from bnncli.figures.style import Cell, FigureContent, declarations
from bnncli.figures.svg import inline_svg
from bnncli.names import printable

_VOID = ("br", "hr", "img", "meta")  # elements without an end tag


class Markup(str):
    """Ready HTML. Plain text next to it is escaped."""

    __slots__ = ()


def escape_text(text: str) -> Markup:
    """Escape text for HTML, on one line, with control characters and stray bytes written out."""
    return Markup(html.escape(printable(text)))


def element(tag: str, *children: str, **attributes: str | int | float | bool | None) -> Markup:
    """Build an element with children that are texts or markup.

    Args:
        attributes: by name, with `_` for `-` and after a Python keyword; None and False are omitted, True has no value.
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape_text(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start) if tag in _VOID else Markup(f"{start}{join_markup(*children)}</{tag}>")


def join_markup(*parts: str, by: str = "") -> Markup:
    """Join the parts, escaping those that are not markup."""
    return Markup(by.join(part if isinstance(part, Markup) else escape_text(part) for part in parts))


def paragraph(*parts: str, kind: str | None = None) -> Markup:
    """Build a paragraph."""
    return element("p", *parts, class_=kind)


def code(text: str) -> Markup:
    """Mark a command or a name as code."""
    return element("code", text)


def strong(text: str) -> Markup:
    """Mark text as important."""
    return element("strong", text)


def commands(lines: list[str]) -> Markup:
    """Build a block of commands to paste, one per line; long lines wrap with an indent, and never inside an option."""
    return element("pre", element("code", *(element("span", _words(line), Markup("\n")) for line in lines)))


def _words(line: str) -> Markup:
    return join_markup(*(element("kbd", word) if word.startswith("-") else word for word in line.split(" ")), by=" ")


def bullets(items: list[Markup]) -> Markup:
    """Build a bullet list."""
    return element("ul", *(element("li", item) for item in items))


class TableCell(NamedTuple):
    """The text of a cell, its sort key (the text if None), and smaller lines below it."""

    text: str
    number: float | None = None
    below: Sequence[str] = ()


@dataclass(frozen=True)
class DataTable:
    """A table whose first column names the rows; sortable where scripts run.

    Args:
        name: letters, digits, dots and dashes, unique on the page.
        caption: shown above the table.
        notes: shown below the table.
        is_folded: whether the table is collapsed at first.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    notes: Sequence[str] = ()
    is_folded: bool = False


class Missing(NamedTuple):
    """A sentence about a missing part, and the command that creates it, if any."""

    sentence: str
    command: str | None = None


class ShownInput(NamedTuple):
    """An example as a picture (PNG), a text, or neither, with its caption."""

    caption: str
    alternative: str
    png: bytes | None = None
    text: str | None = None


@dataclass(frozen=True)
class Gallery:
    """Examples side by side.

    Args:
        title: what the examples have in common.
    """

    title: str
    examples: Sequence[ShownInput]


Block = Markup | FigureContent | DataTable | Missing | Gallery


@dataclass(frozen=True)
class Section:
    """A titled part of a page; its name is unique on the page."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=list)

    @property
    def figures(self) -> list[FigureContent]:
        """The figures among the blocks."""
        return [block for block in self.blocks if is_figure(block)]


def is_figure(block: Block) -> TypeGuard[FigureContent]:
    """Return whether a block is a figure, that is, none of the other kinds."""
    return not isinstance(block, Markup | DataTable | Missing | Gallery)


# Only inside a tag: text keeps its quotes, and a name must not become a CSS rule.
_STYLE = re.compile(r'(<[^<>]*) style="([^"]*)"')


def extract_style_classes(content: Markup) -> tuple[Markup, str]:
    """Replace each style that occurs at least twice by a class; return the content and the CSS of the classes."""
    found = [style for _, style in _STYLE.findall(content)]
    repeated = [style for style in dict.fromkeys(found) if found.count(style) > 1]
    names = {style: f"s{place:x}" for place, style in enumerate(repeated)}

    def named(match: re.Match[str]) -> str:
        return f'{match[1]} class="{names[match[2]]}"' if match[2] in names else match[0]

    rules = "\n".join(f".{name} {{ {style} }}" for style, name in names.items())
    return Markup(_STYLE.sub(named, content)), rules


_LIGHT = (
    "--paper: #ffffff; --ink: #16191d; --soft: #50565d; --line: #d5d9de; --wash: #f4f6f8; --accent: #00558a; --shade: #0000002e; "
    f"--warn: #8a4b00; {declarations(is_dark=False)}"
)
_DARK = (
    "--paper: #14171a; --ink: #e8eaed; --soft: #b3bac2; --line: #3a4149; --wash: #1e2328; --accent: #7cc4f8; --shade: #000000b0; "
    f"--warn: #f0b267; {declarations(is_dark=True)}"
)


@cache
def style() -> str:
    """Return the CSS of a page. Printed pages are light."""
    colors = f":root {{ color-scheme: light dark; {_LIGHT} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    return colors + files("bnncli.figures").joinpath("page.css").read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return the script of a page."""
    return files("bnncli.figures").joinpath("page.js").read_text(encoding="utf-8")


def script_hash() -> str:
    """Return the script's hash for the content security policy, which blocks all other scripts."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()


_DIGITS = 4  # of numbers in a figure's table; figures have a lower resolution


def table_of(table: DataTable) -> Markup:
    """Render a table with its caption and notes."""
    head = element("tr", *(element("th", column, scope="col") for column in table.columns))
    rows = [
        element("tr", element("th", row[0].text, scope="row"), *(_cell(cell) for cell in row[1:])) for row in table.rows
    ]
    caption = _caption(table.caption)
    whole = element("table", caption, element("thead", head), element("tbody", *rows), class_="sortable")
    notes = [paragraph(note, kind="note") for note in table.notes]
    box = element("div", wrap_in_scroll_box(whole, table.caption), *notes, class_="table", id=table.name)
    return element("details", element("summary", table.caption), box) if table.is_folded else box


def numbers_of(shown: FigureContent) -> Markup:
    """Render the numbers of a figure as a collapsed table."""
    numbers, title = shown.numbers, shown.title
    head = element("tr", *(element("th", column, scope="col") for column in numbers.columns))
    rows = [element("tr", *(element("td", _format_cell(cell)) for cell in row)) for row in numbers.rows]
    caption = _caption(f"{title}: the numbers")
    whole = element("table", caption, element("thead", head), element("tbody", *rows))
    return element("details", element("summary", "Numbers"), wrap_in_scroll_box(whole, f"Numbers of {shown.name}"))


def _cell(cell: TableCell) -> Markup:
    is_number = cell.number is not None
    below = [element("small", line) for line in cell.below]
    return element(
        "td",
        cell.text,
        *below,
        class_="number" if is_number else None,
        data_sort=repr(cell.number) if is_number else None,
    )


def _caption(text: str) -> Markup:
    """Wrap the caption in a box that stays in place while the table scrolls."""
    return element("caption", element("span", text))


def wrap_in_scroll_box(content: Markup, label: str) -> Markup:
    """Wrap content in a box that scrolls horizontally if it is wider than the page."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def _format_cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.{_DIGITS}g}" if isinstance(cell, float) else str(cell)


_COLUMN = 640  # pixels; wider figures get a row of their own and scroll on a phone


def section_of(section: Section) -> Markup:
    """Render a section; adjacent figures are laid out side by side."""
    parts: list[Markup] = []
    figures: list[Markup] = []
    for block in section.blocks:
        shown = block_of(block)
        if is_figure(block):
            figures.append(shown)
            continue
        parts += _row(figures)
        figures = []
        parts.append(shown)
    parts += _row(figures)
    title = element("h2", section.title, id=f"{section.name}:title")
    return element("section", title, *parts, id=section.name, aria_labelledby=f"{section.name}:title")


def _row(figures: list[Markup]) -> list[Markup]:
    return [element("div", *figures, class_="figures")] if figures else []


@singledispatch
def block_of(block: Block) -> Markup:
    """Render a block as HTML; the default is a figure."""
    assert is_figure(block)
    return figure_of(block)


@block_of.register
def _(block: Markup) -> Markup:
    return block


@block_of.register
def _(block: DataTable) -> Markup:
    return table_of(block)


@block_of.register
def _(block: Missing) -> Markup:
    how = () if block.command is None else (" Run: ", code(block.command))
    return paragraph(block.sentence, *how, kind="missing")


@block_of.register
def _(block: Gallery) -> Markup:
    items = [element("li", _example(one)) for one in block.examples]
    return join_markup(element("h3", block.title), element("ul", *items, class_="gallery"))


def figure_of(shown: FigureContent) -> Markup:
    """Render a figure with its caption and numbers."""
    caption = element("figcaption", element("strong", shown.title), " ", element("span", shown.description))
    picture = Markup(inline_svg(shown))
    width = re.search(r"max-width: (\d+)px", picture)
    is_wide = width is not None and int(width[1]) > _COLUMN
    if is_wide:
        picture = wrap_in_scroll_box(picture, shown.title)
    return element("figure", picture, caption, numbers_of(shown), id=shown.name, class_="wide" if is_wide else None)


def _example(one: ShownInput) -> Markup:
    caption = element("span", one.caption, class_="said")
    if one.png is not None:
        source = f"data:image/png;base64,{base64.b64encode(one.png).decode()}"
        return join_markup(element("img", src=source, alt=one.alternative), caption)
    if one.text is not None:
        return join_markup(element("q", one.text), caption)
    return caption


MARK = "bnncli-page"  # in every page, so that bnncli may overwrite it
OPTIONS = "bnncli-options"  # holds the options that the page was made with
MOST_BYTES = 1_000_000


def page(
    title: str,
    lead: str,
    sections: Sequence[Section],
    *,
    made_by: str,
    options: Mapping[str, Any] | None = None,
    ready: Mapping[str, Markup] | None = None,
) -> bytes:
    """Render the page.

    Args:
        lead: sentence below the title.
        options: JSON values that the page was made with, read when it is replaced.
        ready: sections already rendered, by name.
        made_by: text of the footer.
    """
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{script_hash()}'; base-uri 'none'; form-action 'none'"
    parts = {section.name: section_of(section) for section in sections} if ready is None else ready
    main, rules = extract_style_classes(element("main", *(parts[section.name] for section in sections)))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=MARK),
        element("meta", name=OPTIONS, content=json.dumps(options or {}, sort_keys=True)),
        element("title", title),
        element("style", Markup(style() + rules)),
    )
    links = [element("li", element("a", section.title, href=f"#{section.name}")) for section in sections]
    body = element(
        "body",
        element("header", element("h1", title), paragraph(lead, kind="lead")),
        element("nav", element("ul", *links), aria_label="Sections"),
        main,
        element("footer", paragraph(made_by)),
        element("script", Markup(script())),
    )
    text = join_markup(Markup("<!DOCTYPE html>\n"), element("html", head, body, lang="en"), Markup("\n"))
    return text.encode("utf-8")


LEFT_OUT = "left-out"  # name of the section that lists what was dropped


class FittedPage(NamedTuple):
    """A page within the size limit, and the dropped sections."""

    content: bytes
    left_out: list[Section]


def render_fitting_sections(
    sections: Sequence[Section],
    *,
    importance: Callable[[Section], float],
    page_of: Callable[[Sequence[Section], dict[str, Markup]], bytes],
    note: Callable[[Sequence[Section]], Block],
    most_bytes: int = MOST_BYTES,
) -> FittedPage:
    """Render as many sections as fit. Always keeps the first section, cut to the blocks that fit.

    Args:
        importance: the section with the lowest value is dropped first; of equals, the last.
        page_of: renders a page from rendered sections by name.
        note: block about the dropped sections.
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
        # Rendering is cheap compared to drawing, and style classes make the size unpredictable.
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
