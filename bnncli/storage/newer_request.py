"""A note beside features of which newer ones were asked for in vain: whatever is made of them now would be of old data.

extract-features leaves it once the data are opened and differ, before it works on them, and takes it away when the
features are what was asked for last. A command that was killed in between leaves it as well. A note about the very
request that the features are of (the command died between publishing and taking it away) says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bnncli.errors import BnnError
from bnncli.machine.input_files import read_error
from bnncli.names import printable
from bnncli.numerics.digests import canonical_json, json_sha256
from bnncli.storage.atomic import publish_bytes, write_error
from bnncli.storage.headers import Header, parse_json
from bnncli.storage.provenance import Source, params_hash

SCHEMA = "bnncli.newer-request/1"
UNFINISHED = "it did not finish"
_MAX_REASON = 500


def note_path(target: Path) -> Path:
    """Where the note about an artifact lies."""
    return target.with_name(f".{target.name}.newer-request.json")


def request_digest(params: Mapping[str, Any], sources: Iterable[Source]) -> str:
    """Identity of a request: its parameters and the content of its inputs."""
    return _digest(params_hash(params), {source.role: source.content_digest for source in sources})


def leave_note(target: Path, *, reason: str, request: str | None, together: Mapping[str, str] | None = None) -> None:
    """Note that a newer request for an artifact has not come through.

    Args:
        reason: why not, in words.
        request: its request_digest; None where it is not known.
        together: the request_digest of every artifact that takes its name with this one, by its stem.

    Raises:
        OutputExists, WriteError: as publishing any file.
    """
    document: dict[str, Any] = {"schema": SCHEMA, "reason": printable(reason)[:_MAX_REASON], "request": request}
    document |= {} if together is None else {"together": dict(together)}
    publish_bytes(note_path(target), canonical_json(document).encode() + b"\n", may_replace=True, poll=False)


def take_note_away(target: Path) -> None:
    """The artifact is what was asked for last. Raises WriteError where the note cannot be removed."""
    try:
        note_path(target).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, note_path(target)) from None


def newer_request(header: Header) -> str | None:
    """Why an artifact is not what was asked for last; None when it is, as far as is known."""
    note = _read_note(header)
    if note is None or note.get("request") == own_digest(header):
        return None
    what = "other data" if "together" not in note else "other splits"
    return f"the last extract-features, for {what}, failed ({note.get('reason', UNFINISHED)})"


def published_meanwhile(header: Header) -> dict[str, str]:
    """What was to take its name together with what an artifact's note is about: request digests by stem; empty without."""
    note = _read_note(header)
    together = {} if note is None or note.get("request") == own_digest(header) else note.get("together")
    pairs = together.items() if isinstance(together, dict) else ()
    return {stem: digest for stem, digest in pairs if isinstance(stem, str) and isinstance(digest, str)}


def own_digest(header: Header) -> str:
    """The request_digest of the request that made an artifact."""
    return _digest(header.provenance["params_hash"], {one["role"]: one["content_digest"] for one in header.inputs})


def _read_note(header: Header) -> dict[str, Any] | None:
    """The note about an artifact; None without one, and one that says nothing where it is no note."""
    path = note_path(header.path)
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise read_error(error, path) from None
    try:
        note = parse_json(path, text)
    except BnnError as error:
        note = {"reason": error.message}
    return note if isinstance(note, dict) else {}


def _digest(params: str, inputs: Mapping[str, str]) -> str:
    return json_sha256([params, dict(inputs)])
