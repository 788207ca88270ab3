"""HTML out of texts and elements: what is not markup already is escaped, so that no name of a user's can become markup."""

from __future__ import annotations

import html

from bnncli.names import printable

_VOID = ("br", "hr", "img", "meta")  # elements without an end


class Markup(str):
    """HTML that is ready. A plain text put beside it is escaped."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """The text as HTML shows it: on one line, with control characters and stray bytes written out."""
    return Markup(html.escape(printable(text)))


def element(tag: str, *children: str, **attributes: str | int | float | bool | None) -> Markup:
    """An element with these children, texts or markup.

    Args:
        attributes: by name, with `_` for `-` and after a keyword of Python; None and False are left out, True has no value.
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escaped(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start) if tag in _VOID else Markup(f"{start}{joined(*children)}</{tag}>")


def joined(*parts: str, by: str = "") -> Markup:
    """Parts one after the other, those that are no markup escaped."""
    return Markup(by.join(part if isinstance(part, Markup) else escaped(part) for part in parts))


def paragraph(*parts: str, kind: str | None = None) -> Markup:
    """A paragraph of texts and markup."""
    return element("p", *parts, class_=kind)


def code(text: str) -> Markup:
    """A word of a command or a name, as it is typed."""
    return element("code", text)


def strong(text: str) -> Markup:
    """Words that matter most."""
    return element("strong", text)


def commands(lines: list[str]) -> Markup:
    """Commands to be pasted, a line each; what does not fit goes on, indented, on the next, and no option is broken at its dashes."""
    return element("pre", element("code", *(element("span", _words(line), Markup("\n")) for line in lines)))


def _words(line: str) -> Markup:
    return joined(*(element("kbd", word) if word.startswith("-") else word for word in line.split(" ")), by=" ")


def bullets(items: list[Markup]) -> Markup:
    """A list of texts."""
    return element("ul", *(element("li", item) for item in items))
