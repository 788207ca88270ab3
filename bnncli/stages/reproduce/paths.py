"""Paths in JSON documents: keys with dots between them, [3] for a place in a list, [name=laplace,split=test] for the entry with these values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from bnncli.stages.reproduce.formulas import Unmeasured

_PART = re.compile(r"(?:^|\.)([A-Za-z_][A-Za-z0-9_-]*)|\[([^\[\]]+)\]")


def parts_of(path: str) -> list[str | int | dict[str, str]]:
    """Keys, places and conditions of a path. Raises ValueError where it is none."""
    found: list[str | int | dict[str, str]] = []
    end = 0
    for match in _PART.finditer(path):
        if match.start() != end:
            break
        key, inner = match.groups()
        end = match.end()
        found.append(
            key if key is not None else int(inner) if re.fullmatch(r"\d+", inner) else dict(_conditions(inner))
        )
    if not found or end != len(path):
        raise ValueError(f"expected keys with dots, [PLACE] and [KEY=VALUE,...]; got {path!r}")
    return found


def _conditions(text: str) -> Iterator[tuple[str, str]]:
    for one in text.split(","):
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise ValueError(f"expected KEY=VALUE; got {one!r}")
        yield key.strip(), value.strip()


def number_at(document: Any, path: str) -> float:
    """The number at a path. Raises Unmeasured where there is none, with what the document says why."""
    at, holder = _followed(document, path)
    if at is None and isinstance(holder, dict) and holder.get("undefined"):
        raise Unmeasured(f"undefined: {holder['undefined']}")
    if isinstance(at, bool) or not isinstance(at, int | float):
        raise Unmeasured(f"no number at {path}: {str(at)[:80]}")
    return float(at)


def object_at(document: Any, path: str) -> dict[str, Any]:
    """The object at a path. Raises Unmeasured where there is none."""
    at, _ = _followed(document, path)
    if not isinstance(at, dict):
        raise Unmeasured(f"no object at {path}: {str(at)[:80]}")
    return at


def _followed(document: Any, path: str) -> tuple[Any, Any]:
    """What is at a path, and the last object on the way to it."""
    at, holder = document, None
    for part in parts_of(path):
        holder = at if isinstance(at, dict) else holder
        at = _step(at, part, path)
    return at, holder


def _step(at: Any, part: str | int | dict[str, str], path: str) -> Any:
    if isinstance(part, dict):
        entries = at if isinstance(at, list) else []
        found = [one for one in entries if isinstance(one, dict) and _fits(one, part)]
        if len(found) != 1:
            said = ",".join(f"{key}={value}" for key, value in part.items())
            raise Unmeasured(f"{len(found)} entries [{said}] at {path}")
        return found[0]
    if isinstance(part, int):
        if not isinstance(at, list) or part >= len(at):
            raise Unmeasured(f"no index {part} at {path}")
        return at[part]
    if not isinstance(at, dict) or part not in at:
        raise Unmeasured(f"no key {part!r} at {path}")
    return at[part]


def _fits(entry: dict[str, Any], conditions: dict[str, str]) -> bool:
    return all(str(entry.get(key)) == value for key, value in conditions.items())
