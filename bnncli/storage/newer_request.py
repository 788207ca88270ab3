"""A note beside features of which newer ones were asked for in vain: whatever is made of them now would be of old data.

extract-features leaves it before it works on changed data, or where it fails or refuses, and takes it away when the
features are what was asked for last. A command that was killed in between leaves it as well. A note about the very
request that the features are of (the command died between publishing and taking it away) says nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bnncli.digests import canonical_json, json_sha256
from bnncli.errors import BnnError
from bnncli.names import printable
from bnncli.storage.atomic import publish_bytes
from bnncli.storage.headers import Header, parse_json
from bnncli.storage.provenance import Source, params_hash

SCHEMA = "bnncli.newer-request/1"
UNFINISHED = "it did not end"
_MAX_REASON = 500


def note_path(target: Path) -> Path:
    """Where the note about an artifact lies."""
    return target.with_name(f".{target.name}.newer-request.json")


def request_digest(params: Mapping[str, Any], sources: Iterable[Source]) -> str:
    """Identity of a request: its parameters and the content of its inputs."""
    return _digest(params_hash(params), {source.role: source.content_digest for source in sources})


def leave_note(target: Path, *, reason: str, request: str | None) -> None:
    """Note that a newer request for an artifact has not come through.

    Args:
        reason: why not, in words.
        request: its request_digest; None where the data could not be read.

    Raises:
        OutputExists, WriteError: as publishing any file.
    """
    document = {"schema": SCHEMA, "reason": printable(reason)[:_MAX_REASON], "request": request}
    publish_bytes(note_path(target), canonical_json(document).encode() + b"\n", may_replace=True, poll=False)


def take_note_away(target: Path) -> None:
    """The artifact is what was asked for last."""
    with contextlib.suppress(FileNotFoundError):
        note_path(target).unlink()


def newer_request(header: Header) -> str | None:
    """Why an artifact is not what was asked for last; None when it is, as far as is known."""
    path = note_path(header.path)
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    try:
        note = parse_json(path, text)
    except BnnError as error:
        note = {"reason": error.message}
    note = note if isinstance(note, dict) else {}
    own = _digest(header.provenance["params_hash"], {one["role"]: one["content_digest"] for one in header.inputs})
    if note.get("request") == own:
        return None
    return f"extract-features was asked for other data since, in vain: {note.get('reason', UNFINISHED)}"


def _digest(params: str, inputs: Mapping[str, str]) -> str:
    return json_sha256([params, dict(inputs)])
