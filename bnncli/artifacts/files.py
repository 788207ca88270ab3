"""Open any artifact by its first bytes, and read and write metrics files (strict JSON)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.exports import EXPORT_MAGIC, read_export_header
from bnncli.artifacts.headers import SCHEMA, Header, add_digest, check_header, check_is_file, parse_document
from bnncli.artifacts.known_files import is_settled, recall_header, remember_header, state_of
from bnncli.artifacts.posteriors import read_posterior_header
from bnncli.errors import DAMAGED_HINT, DataError
from bnncli.numerics.digests import json_sha256
from bnncli.system.input_files import convert_read_errors

MAX_BYTES = 1 << 26  # a hundred splits with twenty scores are a megabyte


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
    publish_bytes(target, _encode_document(document), may_replace=may_replace)
    return digest


def _encode_document(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(add_digest(document), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _digest(meta: Mapping[str, Any]) -> str:
    return f"sha256:{json_sha256(dict(meta))}"


def read_metrics_header(path: Path) -> Header:
    """Read the header of a metrics file; its meta has `rows` and `predictions`."""
    document, _ = _read(path)
    return _header(path, document)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    check_is_file(path)
    with convert_read_errors(path), open(path, "rb") as stream:
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
    """Read the header of a metrics file after checking its digest."""
    document, text = _read(path)
    header = _header(path, document)
    if header.kind != "metrics":
        raise DataError(f"{path}: expected metrics, got {header.kind}", code="wrong_kind", path=path)
    # Two texts can encode the same number: the text must be byte for byte as written.
    if _digest(header.meta) != header.content_digest or _encode_document(document) != text:
        raise DataError(f"{path}: its content does not match its digest", code="digest_mismatch", path=path)
    return header


def read_header(path: Path) -> Header:
    """Read the header of any artifact by its magic bytes, but not its data; once per unchanged file and command.

    Raises:
        MissingInput: there is no such file, or it cannot be read.
        DeviceError, ReadError: machine or disk failed.
        DataError: the file is not bnncli's, truncated, incomplete, or of another schema.
        Untrusted: an HDF5 file links to other files.
    """
    check_is_file(path)
    with convert_read_errors(path):
        before = state_of(path.stat())
    known: Header | None = recall_header(before)
    if known is not None:
        return replace(known, path=path)
    is_settled_file, header = is_settled(before), _read_header(path)
    with convert_read_errors(path):
        is_same = state_of(path.stat()) == before
    if is_same and is_settled_file:
        remember_header(before, header)
    return header


def _read_header(path: Path) -> Header:
    with convert_read_errors(path), open(path, "rb") as stream:
        magic = stream.read(16)
    if magic.startswith(b"\x89HDF\r\n\x1a\n"):
        from bnncli.artifacts.hdf5 import read_hdf5_header  # slow imports of numpy and h5py

        return read_hdf5_header(path)
    if magic.lstrip().startswith(b"{"):
        return read_metrics_header(path)
    if len(magic) > 8 and magic[8:9] == b"{":
        return read_posterior_header(path)
    if magic.startswith(EXPORT_MAGIC):
        return read_export_header(path)
    what = "empty" if not magic else "truncated, or not a bnncli artifact"
    raise DataError(f"{path} is {what}", code="not_an_artifact", path=path)
