"""JSON files that others wrote: a model's configuration, an index of shards, a description of a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bnncli.errors import DataError
from bnncli.machine.input_files import open_regular
from bnncli.names import quoted

MAX_BYTES = 1 << 26


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MissingInput: there is no such file. DataError: it is not JSON, no object, or larger than 64 MiB.
    """
    with open_regular(path) as stream:
        raw = stream.read(MAX_BYTES + 1)
    shown = quoted(path, limit=300)
    if len(raw) > MAX_BYTES:
        raise DataError(f"{shown} is larger than {MAX_BYTES >> 20} MiB: expected a small JSON file", path=path)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown} is not a complete JSON file: {error}", path=path) from None
    if not isinstance(found, dict):
        raise DataError(f"{shown}: expected a JSON object, got {type(found).__name__}", path=path)
    return found
