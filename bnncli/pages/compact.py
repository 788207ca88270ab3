"""Styles of elements that come again and again, as classes: a page of figures is a third smaller."""

from __future__ import annotations

import re

from bnncli.pages.markup import Markup

# Inside a tag alone: in a text quotes stay as they are, and what a name says there must not become a rule of the page.
_STYLE = re.compile(r'(<[^<>]*) style="([^"]*)"')


def with_classes(content: Markup) -> tuple[Markup, str]:
    """The content with a class for each style that stands there twice or more, in the order that they come in; and the CSS of these."""
    found = [style for _, style in _STYLE.findall(content)]
    repeated = [style for style in dict.fromkeys(found) if found.count(style) > 1]
    names = {style: f"s{place:x}" for place, style in enumerate(repeated)}

    def named(match: re.Match[str]) -> str:
        return f'{match[1]} class="{names[match[2]]}"' if match[2] in names else match[0]

    rules = "\n".join(f".{name} {{ {style} }}" for style, name in names.items())
    return Markup(_STYLE.sub(named, content)), rules
