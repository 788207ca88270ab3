"""Pages as tests read them: every element in its place, every text, every table; what is malformed is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as Tree

VOID = {"meta", "img", "br", "hr"}


@dataclass
class Node:
    """An element with its attributes and what is in it."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text below it."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str, **attributes: str) -> list[Node]:
        """The elements of this name, with these attributes, below it."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                wanted = attributes.items() <= {k.replace("-", "_"): v for k, v in child.attributes.items()}.items()
                found += [child] * (child.tag == tag and wanted)
                found += child.all(tag, **attributes)
        return found

    def one(self, name: str) -> Node:
        """The element of this id."""
        (found,) = [node for node in self.everything() if node.attributes.get("id") == name]
        return found

    def everything(self) -> list[Node]:
        """Every element below it."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                found += [child, *child.everything()]
        return found

    def rows(self) -> list[dict[str, str]]:
        """The rows of the first table below it, by its heads."""
        table = self.all("table")[0]
        heads = [head.text for head in table.all("thead")[0].all("th")]
        lines = table.all("tbody")[0].all("tr")
        cells = [[cell for cell in line.children if isinstance(cell, Node)] for line in lines]
        return [dict(zip(heads, (cell.text for cell in line), strict=True)) for line in cells]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"{tag}: an attribute twice"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"{tag} ends in {self.open[-1].tag}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_page(path: Path) -> Node:
    """The page in a file; every element must be closed where it was opened, and every figure be XML."""
    text = path.read_bytes().decode("utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root]
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        Tree.fromstring(svg)
    return reader.root


def check_is_self_contained(root: Node, text: str) -> None:
    """Nothing is asked for outside: no address, and links and sources that lead into the page or are data."""
    text = re.sub(r'base64,[^"]*', "", text)
    assert not re.search(r"(?i)https?:|//[a-z]|@import|url\((?!#)", text)
    for node in root.everything():
        for name in ("href", "src", "action", "data", "srcset", "poster"):
            value = node.attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,")), (node.tag, value)
        assert node.tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert not [name for name in node.attributes if name.startswith("on")]


def check_names(root: Node) -> None:
    """Every id is unique, and everything that is referred to is there."""
    names = [node.attributes["id"] for node in root.everything() if "id" in node.attributes]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    used = [value[1:] for node in root.everything() if (value := node.attributes.get("href") or "").startswith("#")]
    for node in root.everything():
        used += (node.attributes.get("aria-labelledby") or "").split()
        used += [name for value in node.attributes.values() for name in re.findall(r"url\(#([^)]+)\)", value or "")]
    assert set(used) <= set(names)
