"""Convert a figure to SVG inside an HTML page: small, accessible, in the page's own colours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as Tree

from bnncli.figures import svg_with_letters
from bnncli.figures.style import FigureContent, own_style, variable
from bnncli.names import printable

_SCALE = 1.5  # page pixels per figure point, so that letters of figures and page have the same size
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_FONT = re.compile(r"font-family: [^;]*;?\s*")
_SHORT_FONT = re.compile(r"font: [^;]*?([\d.]+px) [^;]*")  # written by matplotlib before 3.11
_NO_TURN = re.compile(r"^rotate\(-?0(\.0+)? [^)]*\)$")
_URL = re.compile(r"url\(#([^)]+)\)")
_DIGITS = 2
_APART = ":"  # figure names never contain it, so that ids of different figures never clash
_DROPPED = ("metadata", "style")


def inline_svg(shown: FigureContent) -> str:
    """Return the figure as an HTML element; all its ids start with the figure's name."""
    with own_style():
        root = Tree.fromstring(svg_with_letters(shown.draw()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = _read_text(element.text), None
        found = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({name: _compact(name, value) for name, value in found.items()})
    _drop(root)
    own = printable(shown.name)
    _name_apart(root, own)
    _flatten(root)
    return _serialise_with_title(root, shown, own)


def _serialise_with_title(root: Tree.Element, shown: FigureContent, own: str) -> str:
    """Serialise the element, with title and description for screen readers."""
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    told = {
        f"{own}{_APART}title": ("title", shown.title),
        f"{own}{_APART}desc": ("desc", shown.description),
    }
    for place, (name, (tag, text)) in enumerate(told.items()):
        element = Tree.Element(tag, {"id": name})
        element.text = printable(text)
        root.insert(place, element)
    root.attrib.clear()
    root.attrib.update(
        {
            "viewBox": f"0 0 {width:.2f} {height:.2f}",
            "style": f"max-width: {_SCALE * width:.0f}px",
            "role": "img",
            "aria-labelledby": " ".join(told),
        }
    )
    return Tree.tostring(root, encoding="unicode")


def _read_text(text: str | None) -> str | None:
    """Return the text of an element; None if it is only white space."""
    return text if text is not None and text.strip() else None


def _compact(name: str, value: str) -> str:
    """Shorten the numbers of an attribute, and replace fixed colours by the page's."""
    shorter = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.{_DIGITS}f}".rstrip("0").rstrip("."), value)
    if name == "d":
        return " ".join(shorter.split())
    if name != "style":
        return shorter
    return _COLOR.sub(
        lambda color: variable(color[0]), _SHORT_FONT.sub(r"font-size: \1", _FONT.sub("", shorter))
    ).strip()


def _drop(root: Tree.Element) -> None:
    """Remove metadata, and style rules that would apply to the whole page."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in _DROPPED:
                parent.remove(child)
            elif _NO_TURN.match(child.attrib.get("transform", "")):
                del child.attrib["transform"]


def _name_apart(root: Tree.Element, own: str) -> None:
    """Prefix the referenced ids with the figure's name and remove the others."""
    used = dict.fromkeys(name for element in root.iter() for name in _references(element))
    names = {name: f"{own}{_APART}{place:x}" for place, name in enumerate(used)}
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in used:
            element.attrib["id"] = names[name]
        for key, value in element.attrib.items():
            element.attrib[key] = _URL.sub(lambda found: f"url(#{names[found[1]]})", value)
        if "href" in element.attrib:
            element.attrib["href"] = f"#{names[element.attrib['href'].removeprefix('#')]}"


def _references(element: Tree.Element) -> Iterator[str]:
    for key, value in element.attrib.items():
        yield from _URL.findall(value)
        if key == "href":
            yield value.removeprefix("#")


def _flatten(element: Tree.Element) -> None:
    """Replace groups without attributes by their children."""
    kept: list[Tree.Element] = []
    for child in list(element):
        _flatten(child)
        kept += list(child) if child.tag == "g" and not child.attrib else [child]
    if element.tag in ("svg", "g", "defs"):
        element[:] = kept
