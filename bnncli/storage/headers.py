"""What every artifact says of itself: kind, schema, content digest, provenance; and the JSON that says it."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.errors import DAMAGED_HINT, DataError, MissingInput
from bnncli.machine.input_files import read_error
from bnncli.numerics.digests import json_sha256
from bnncli.storage.header_types import is_text, odd_field

SCHEMA = "1.0"
KINDS = ("features", "posterior", "samples", "predictions", "metrics", "checkpoint", "decision", "export")
_SEALED_KINDS = (*KINDS, "resume")  # a resume state is no artifact, but its document has a digest too
MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 32


@dataclass(frozen=True)
class Header:
    """An artifact's description of itself.

    Attributes:
        kind: one of KINDS.
        schema: "major.minor" of the file's layout.
        content_digest: digest of everything but the provenance.
        provenance: bnncli.provenance/1.
        meta: what else the kind says: layout, method, split, numbers of the fit.
    """

    path: Path
    kind: str
    schema: str
    content_digest: str
    provenance: dict[str, Any]
    meta: dict[str, Any]

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Direct inputs: role, path relative to the artifact, content digest."""
        return list(self.provenance.get("inputs", []))

    def input_path(self, entry: dict[str, Any]) -> Path:
        """Where an input lay when this was written; paths are relative to the artifact, and leave out `..` where no link forbids it."""
        path = self.path.parent / entry["path"]
        plain = Path(os.path.normpath(path))
        return plain if os.path.realpath(plain) == os.path.realpath(path) else path

    @property
    def weights_digest(self) -> str | None:
        """Digest of the checkpoint the run belongs to; None without one."""
        checkpoint = self.provenance.get("checkpoint")
        return checkpoint["weights_digest"] if checkpoint else None


def check_header(path: Path, kind: Any, schema: Any, digest: Any, provenance: Any, meta: Any) -> Header:
    """A Header from raw values. Raises DataError when they are not what our writer makes."""
    if kind not in KINDS:
        raise DataError(f"{path}: not a bnncli artifact (kind {repr(kind)[:80]})", code="wrong_kind", path=path)
    version = re.fullmatch(r"([0-9]{1,4})(\.[0-9]{1,4})?", schema) if isinstance(schema, str) else None
    if version is None:
        raise DataError(f"{path}: unreadable schema {repr(schema)[:80]}", code="bad_schema", path=path)
    major, own = int(version[1]), int(SCHEMA.partition(".")[0])
    if major > own:
        raise DataError(
            f"{path}: schema {schema} was written by a newer bnncli; this version reads {SCHEMA}",
            code="future_schema",
            hint="upgrade bnncli",
            path=path,
        )
    if major < own:
        raise DataError(f"{path}: schema {schema} is older than {SCHEMA}", code="old_schema", path=path)
    if not is_text(digest) or not isinstance(provenance, dict) or not isinstance(meta, dict):
        raise DataError(f"{path}: its header is damaged", code="bad_header", path=path)
    if (field := odd_field(kind, provenance, meta)) is not None:
        raise DataError(f"{path}: its header is damaged: field {field!r} is invalid", code="bad_header", path=path)
    return Header(path, kind, schema, digest, provenance, meta)


@contextmanager
def interpreting(path: Path) -> Iterator[None]:
    """Numbers of a fit, kept in a header, are looked up inside the block: what cannot be is damage of the file, not a bug.

    Raises:
        DataError: for a field that is missing or of another type.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = " ".join(str(error).split())[:120]
        message = f"{path}: its header is damaged ({type(error).__name__}: {what})"
        raise DataError(message, code="bad_header", hint=DAMAGED_HINT, path=path) from error


def parse_json(path: Path, text: str | bytes, *, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Strict JSON: at most 1 MiB or what is said, no duplicate keys, finite numbers, not deeply nested; else DataError."""
    if len(text) > most_bytes:
        raise DataError(f"{path}: its header has {len(text)} bytes, expected at most {most_bytes}", path=path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(keys) != len(set(keys)):
            raise DataError(f"{path}: its header has a duplicate key", code="bad_header", path=path)
        return dict(pairs)

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):  # NaN, Infinity, 1e999
            raise ValueError(number)
        return value

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError):
        raise DataError(f"{path}: its header is not JSON", code="bad_header", path=path) from None
    if _depth(value) > MAX_JSON_DEPTH:
        raise DataError(f"{path}: its header is nested too deeply", code="bad_header", path=path)
    return value


def _depth(value: Any) -> int:
    """How deeply lists and objects are nested."""
    depth, level = 0, [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        depth, level = depth + 1, inner
    return depth


def with_digest(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with a digest of all of itself, provenance too: damage anywhere in it shows."""
    return {**document, "document_sha256": json_sha256(document)}


def parse_document(path: Path, text: str | bytes, *, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """What with_digest was given. Raises DataError when the text is not strict JSON, or not as it was written."""
    document = parse_json(path, text, most_bytes=most_bytes)
    if not isinstance(document, dict):
        raise DataError(f"{path}: its header is damaged", code="bad_header", path=path)
    digest = document.pop("document_sha256", None)
    if document.get("kind") in _SEALED_KINDS and digest != json_sha256(document):
        raise DataError(f"{path}: its header does not match its digest", code="bad_header", path=path)
    return document


def check_is_file(path: Path) -> None:
    """Raise MissingInput unless `path` is a regular file, whose state can be asked for."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # NUL in it
        raise MissingInput(f"{path} does not exist", path=path) from None
    except OSError as error:
        raise read_error(error, path) from error
    if not stat.S_ISREG(mode):
        raise MissingInput(f"{path} is not a regular file", path=path)
