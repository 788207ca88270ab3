"""What single parameters of a posterior are called."""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncli.names import printable

_LONGEST = 24  # letters of a class's name


def parameter_name(meta: dict[str, Any], index: int) -> str:
    """The parameter at a place of theta, by the header of its posterior: of a head with its class and feature.

    Args:
        meta: of the posterior, with its `param_layout`, and `classes`.
    """
    for part in meta.get("param_layout", []):
        size = int(np.prod(part["shape"]))
        if part["offset"] <= index < part["offset"] + size:
            place = [int(one) for one in np.unravel_index(index - part["offset"], part["shape"])]
            classes = meta.get("classes") or []
            own = _of_head(str(part["name"]), place, classes) if part["shape"][0] == len(classes) else None
            return own or printable(f"{part['name']}{place}")
    return f"parameter {index}"


def _of_head(name: str, place: list[int], classes: list[Any]) -> str | None:
    if name not in ("head.weight", "head.bias"):
        return None
    shown = class_name(classes, place[0])
    return f"{shown}: bias" if name == "head.bias" else f"{shown}: weight of feature {place[1]}"


def class_name(classes: list[Any], index: int) -> str:
    """The name of a class, cut, on one line; a number says what it is."""
    name = printable(str(classes[index])) if 0 <= index < len(classes) else str(index)
    if name.isdecimal():
        return f"class {name}"
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
