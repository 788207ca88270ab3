"""Artifacts whose header somebody has changed, with every digest and seal made anew: what an attacker would publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from bnncli.artifacts import files, posteriors
from bnncli.artifacts.files import read_header
from bnncli.artifacts.hdf5 import header_of, open_hdf5, read_contents, write_hdf5
from bnncli.artifacts.headers import add_digest

Change = Callable[[dict[str, Any]], None]


def forge(path: Path, change: Change) -> None:
    """Write the artifact again, its document {kind, schema, content_digest, provenance, meta} changed in place.

    Its content digest is made anew before the change, so that a changed meta is as consistent as it can be.
    """
    header = read_header(path)
    document = {
        "kind": header.kind,
        "schema": header.schema,
        "content_digest": header.content_digest,
        "provenance": dict(header.provenance),
        "meta": dict(header.meta),
    }
    if path.suffix == ".safetensors":
        _forge_posterior(path, document, change)
    elif path.suffix == ".json":
        _forge_metrics(path, document, change)
    else:
        _forge_hdf5(path, document, change)


def _forge_posterior(path: Path, document: dict[str, Any], change: Change) -> None:
    from safetensors.torch import load, save

    tensors = load(path.read_bytes())
    change(document)
    if isinstance(document.get("meta"), dict) and document.get("content_digest") == read_header(path).content_digest:
        document["content_digest"] = posteriors._digest(tensors, document["meta"])
    text = json.dumps(add_digest(document), sort_keys=True, separators=(",", ":"))
    path.write_bytes(save(tensors, metadata={posteriors.METADATA_KEY: text}))


def _forge_metrics(path: Path, document: dict[str, Any], change: Change) -> None:
    change(document)
    meta = document.pop("meta", {})
    document["schema"] = f"bnncli.metrics/{document['schema']}"
    if isinstance(meta, dict):
        if document.get("content_digest") == read_header(path).content_digest:
            document["content_digest"] = files._digest({key: meta.get(key) for key in ("predictions", "rows")})
        document |= meta
    path.write_bytes(files._encode_document(document))


def _forge_hdf5(path: Path, document: dict[str, Any], change: Change) -> None:
    with open_hdf5(path) as file:
        header = header_of(path, file)
        arrays, texts = read_contents(path, file)
    original = dict(document)
    change(document)

    def decorate(file: h5py.File) -> None:
        marks = {key: document.get(key) for key in ("kind", "schema", "content_digest")}
        kept = ("kind", "schema") if document.get("content_digest") == original["content_digest"] else marks
        decorated.update({f"bnncli_{key}": marks[key] for key in kept})

    decorated: dict[str, Any] = {}
    update = h5py.AttributeManager.update

    def forged_update(self: Any, values: Any) -> None:
        update(self, {**values, **{key: _storable(value) for key, value in decorated.items() if key in values}})

    h5py.AttributeManager.update = forged_update
    try:
        write_hdf5(
            path, arrays, texts, kind=header.kind, meta=document.get("meta"), provenance=document.get("provenance"),
            may_replace=True, decorate=decorate,
        )  # type: ignore[arg-type]  # fmt: skip
    finally:
        h5py.AttributeManager.update = update


def _storable(value: Any) -> Any:
    """A value as an attribute of HDF5 can have it; JSON where there is none."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace").replace("\0", "")
    return value if isinstance(value, int | float) and abs(value) < 2**63 else json.dumps(value)
