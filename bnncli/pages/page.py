"""A whole page: one HTML file that opens from a disk, asks for nothing outside, and is the same bytes for the same content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bnncli.pages.blocks import Section
from bnncli.pages.compact import with_classes
from bnncli.pages.markup import Markup, element, joined, paragraph
from bnncli.pages.script import script, script_hash
from bnncli.pages.sections import section_of
from bnncli.pages.style import style

MARK = "bnncli-page"  # in every page of ours: what carries it may be made again
OPTIONS = "bnncli-options"  # says what it was made with
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
    """The file.

    Args:
        lead: a sentence below the title.
        options: that it was made with, JSON values, for whoever would replace it.
        ready: sections as HTML, by name, where they are known.
        made_by: what stands at the foot.
    """
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{script_hash()}'; base-uri 'none'; form-action 'none'"
    parts = {section.name: section_of(section) for section in sections} if ready is None else ready
    main, rules = with_classes(element("main", *(parts[section.name] for section in sections)))
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
    text = joined(Markup("<!DOCTYPE html>\n"), element("html", head, body, lang="en"), Markup("\n"))
    return text.encode("utf-8")
