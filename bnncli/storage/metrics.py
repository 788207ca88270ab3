"""Metrics files: strict JSON, sorted keys, a newline at the end; undefined scores are null with a reason."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bnncli.errors import DAMAGED_HINT, DataError
from bnncli.machine.input_files import reading
from bnncli.numerics.digests import json_sha256
from bnncli.storage.atomic import publish_bytes
from bnncli.storage.headers import SCHEMA, Header, check_header, check_is_file, parse_document, with_digest

MAX_BYTES = 1 << 26  # a hundred splits of twenty scores are a megabyte


def write_metrics(
    target: Path,
    *,
    rows: Sequence[Mapping[str, Any]],
    predictions: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a metrics file and return its content digest."""
    meta = {"predictions": list(predictions), "rows": list(rows)}
    digest = _digest(meta)
    document = {
        "kind": "metrics",
        "schema": "bnncli.metrics/" + SCHEMA,
        "content_digest": digest,
        **meta,
        "provenance": dict(provenance),
    }
    publish_bytes(target, _text(document), may_replace=may_replace)
    return digest


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(with_digest(document), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _digest(meta: Mapping[str, Any]) -> str:
    return f"sha256:{json_sha256(dict(meta))}"


def read_metrics_header(path: Path) -> Header:
    """The header of a metrics file; its meta has `rows` and `predictions`."""
    document, _ = _read(path)
    return _header(path, document)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    check_is_file(path)
    with reading(path), open(path, "rb") as stream:
        text = stream.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise DataError(
            f"{path}: expected at most {MAX_BYTES} bytes of metrics; got more", code="bad_header", path=path
        )
    if not text.endswith(b"\n"):
        raise DataError(f"{path} is truncated", code="truncated", hint=DAMAGED_HINT, path=path)
    return parse_document(path, text, most_bytes=MAX_BYTES), text


def _header(path: Path, document: dict[str, Any]) -> Header:
    schema = str(document.get("schema", "")).removeprefix("bnncli.metrics/")
    meta = {key: document.get(key) for key in ("predictions", "rows")}
    return check_header(
        path, document.get("kind"), schema, document.get("content_digest"), document.get("provenance"), meta
    )


def read_metrics(path: Path) -> Header:
    """The header of a metrics file after a full check of its digest."""
    document, text = _read(path)
    header = _header(path, document)
    if header.kind != "metrics":
        raise DataError(f"{path}: expected metrics, got {header.kind}", code="wrong_kind", path=path)
    # Two texts can be the same number in their last digit: what is read must be what was written, byte for byte.
    if _digest(header.meta) != header.content_digest or _text(document) != text:
        raise DataError(f"{path}: its content does not match its digest", code="digest_mismatch", path=path)
    return header
