"""Names of lines, which tell their values, and of checkpoints."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bnncli.numerics.digests import json_sha256
from bnncli.options.declaration import flag_of
from bnncli.stages.grid.steps import Axes, GridStep

MAX_NAME = 100  # letters, as of an artifact's


def line_name(step: GridStep, axes: Axes, steps: Mapping[str, GridStep]) -> str:
    """The step's name, with each value that is one of several, those of the steps that it refers to first."""
    words = [step.name, *(_word(option, steps[of].values[option][place]) for (of, option), place in axes.items())]
    return "-".join(words)


def shortened(name: str) -> str:
    """A name of at most MAX_NAME letters: a long one with a digest for its end."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{json_sha256(name)[:8]}"


def _word(option: str, value: Any) -> str:
    """A value in a name: a plain word as it is, anything else behind the option."""
    flag = flag_of(option)[2:]
    if isinstance(value, bool):
        return flag if value else f"no-{flag}"
    text = "+".join(value) if isinstance(value, list) else number_text(value)
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", text):
        return text
    return flag + re.sub(r"[^A-Za-z0-9_-]+", "-", re.sub(r"(?<=\d)\.(?=\d)", "p", text)).strip("-")


def number_text(value: Any) -> str:
    """A number in the shortest words that give it back; anything else as it is."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def checkpoint_names(checkpoints: Sequence[str]) -> dict[str, str]:
    """What tells the checkpoints apart in names of files: the file's own name, or where two share it the whole path."""
    stems = Counter(Path(one).stem for one in checkpoints)
    found: dict[str, str] = {}
    for one in checkpoints:
        name, path = Path(one).stem, os.path.normpath(one)
        if stems[name] > 1:
            name = re.sub(r"[/\\]+", "-", path).strip("-.")
        if name in found.values():
            name = f"{name}-{json_sha256(path)[:8]}"
        found[one] = name
    return found
