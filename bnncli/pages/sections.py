"""Sections of a page as HTML, block by block."""

from __future__ import annotations

import base64
import re
from functools import singledispatch

from bnncli.figures.inline import inline_svg
from bnncli.figures.shown import Shown
from bnncli.pages.blocks import Block, DataTable, Gallery, Missing, Section, ShownInput, is_figure
from bnncli.pages.markup import Markup, code, element, joined, paragraph
from bnncli.pages.tables import numbers_of, scrolled, table_of

_COLUMN = 640  # pixels: figures wider than that have a row of their own, and scroll on a phone


def section_of(section: Section) -> Markup:
    """The section with its title; figures that follow each other stand side by side where there is room."""
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
    """A block as HTML; what is none of the kinds below is a figure."""
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
    return joined(element("h3", block.title), element("ul", *items, class_="gallery"))


def figure_of(shown: Shown) -> Markup:
    """The picture, what it is and how it is read, and its numbers."""
    caption = element("figcaption", element("strong", shown.title), " ", element("span", shown.description))
    picture = Markup(inline_svg(shown))
    width = re.search(r"max-width: (\d+)px", picture)
    is_wide = width is not None and int(width[1]) > _COLUMN
    if is_wide:
        picture = scrolled(picture, shown.title)
    return element("figure", picture, caption, numbers_of(shown), id=shown.name, class_="wide" if is_wide else None)


def _example(one: ShownInput) -> Markup:
    caption = element("span", one.caption, class_="said")
    if one.png is not None:
        source = f"data:image/png;base64,{base64.b64encode(one.png).decode()}"
        return joined(element("img", src=source, alt=one.alternative), caption)
    if one.text is not None:
        return joined(element("q", one.text), caption)
    return caption
