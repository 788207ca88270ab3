"""What an experiment measured, kept beside its results and taken again where nothing that it is of has changed."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import bnncli
from bnncli.artifacts.atomic import publish_bytes
from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Measurements
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.progress import Progress

NAME = "measured.npz"  # in a recipe's folder
_HEAD = "head"
_ARRAY = "array "  # before the name of one that is drawn


def request_of(
    name: str, settings: Mapping[str, Any], files: Mapping[str, Path], *, seed: int, progress: Progress
) -> str:
    """The digest of all that the numbers of a recipe's experiment depend on: a file counts by its content, and not by its place."""
    inputs = {called: file_sha256(path, progress) for called, path in files.items()}
    asked = {"recipe": name, "settings": dict(settings), "inputs": inputs, "seed": seed, "version": bnncli.__version__}
    return json_sha256(asked | {"experiments": _experiments_sha256()})


@cache
def _experiments_sha256() -> str:
    """Of the text of every experiment, which may change without the version."""
    folder = Path(bnncli.__file__).parent / "experiments"
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


def keep(path: Path, request: str, measured: Measurements) -> None:
    """Write what was measured. Raises WriteError, OutputExists."""
    head = {"request": request, "values": {name: asdict(one) for name, one in measured.values.items()}}
    content = io.BytesIO()
    parts: dict[str, Any] = {f"{_ARRAY}{name}": np.asarray(one) for name, one in measured.arrays.items()}
    parts[_HEAD] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez_compressed(content, **parts)
    publish_bytes(path, content.getvalue(), may_replace=True)


def kept(path: Path, request: str) -> Measurements | None:
    """What was measured for the same request; None where that was another, or there is no whole file."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            head = json.loads(stored[_HEAD].tobytes())
            if head["request"] != request:
                return None
            arrays = {name.removeprefix(_ARRAY): stored[name] for name in stored.files if name != _HEAD}
            return Measurements({name: Estimate(**one) for name, one in head["values"].items()}, arrays)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
