"""Steps with their settings and files in them: $NAME in a value stands for one; what is left is a grid."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bnncli.errors import ConfigError

_NAME = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_SCALES = "scales"  # of a step that other scales leave out


class _LeftOut(Exception):
    """A value refers to an optional file that is not there."""


def filled_settings(settings: Mapping[str, Any], files: Mapping[str, Path], *, absent: Sequence[str]) -> dict[str, Any]:
    """Settings with files in them, and the files themselves, by name.

    Args:
        absent: names of optional files that are not there.
    """
    known: dict[str, Any] = {name: str(path) for name, path in files.items()}
    return {**known, **{key: _filled(value, known, absent) for key, value in settings.items()}}


def filled_steps(
    steps: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], scale: str, *, absent: Sequence[str]
) -> list[dict[str, Any]]:
    """The steps of a scale. An entry of a list that refers to an absent file is left out, and so is a step that has one alone; an option
    whose value is the empty text has its default.
    """
    found = []
    for step in steps:
        if scale in step.get(_SCALES, [scale]):
            try:
                filled = {key: _filled(value, settings, absent) for key, value in step.items() if key != _SCALES}
            except _LeftOut:
                continue
            found.append({key: value for key, value in filled.items() if value != ""})
    return found


def _filled(value: Any, known: Mapping[str, Any], absent: Sequence[str]) -> Any:
    if isinstance(value, list):
        kept = []
        for one in value:
            try:
                kept.append(_filled(one, known, absent))
            except _LeftOut:
                continue
        return kept
    if not isinstance(value, str):
        return value
    for name in _NAME.findall(value):
        if name in absent:
            raise _LeftOut(name)
        if name not in known:
            raise ConfigError(
                f"${name}: expected a setting or a file of the recipe; known are {', '.join(sorted(known))}"
            )
    if whole := _NAME.fullmatch(value):
        return known[whole[1]]
    return _NAME.sub(lambda one: str(known[one[1]]), value)


def grid_text(checkpoints: Sequence[str], steps: Sequence[Mapping[str, Any]], *, run_dir: str, said: str) -> str:
    """The file of a grid, TOML.

    Args:
        run_dir: of every step that says none. said: what the file is, for its first line.
    """
    lines = [f"# {said}", f"checkpoints = {_toml(list(checkpoints))}"]
    for step in steps:
        lines += ["", "[[step]]", *(f"{key} = {_toml(value)}" for key, value in step.items())]
        lines += [] if "run-dir" in step else [f"run-dir = {_toml(run_dir)}"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Texts, numbers, true and false, and lists of these are written in TOML as in JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
