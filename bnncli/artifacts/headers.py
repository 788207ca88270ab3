"""Read and write the header of an artifact: kind, schema, content digest, provenance.

Headers may be damaged or forged with valid digests, so the type of every field that readers use is checked.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.errors import DAMAGED_HINT, DataError, MissingInput
from bnncli.numerics.digests import json_sha256
from bnncli.system.input_files import read_error

MAX_TEXT = 1 << 14
_LARGEST = 1 << 53  # integers that JSON readers agree on

Check = Callable[[Any], bool]


def find_invalid_field(kind: str, provenance: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
    """Return the first required field that is missing or has the wrong type; None if all are valid."""
    for part, checks, optional in (
        (provenance, _PROVENANCE, _PROVENANCE_IF_THERE),
        (meta, _META.get(kind, {}), _META_IF_THERE),
    ):
        for key, check in checks.items():
            if key not in part or not check(part[key]):
                return key
        for key, check in optional.items():
            if key in part and not check(part[key]):
                return key
    return None


def is_text(value: Any) -> bool:
    """Return whether a value is a text that can be shown and used in a path."""
    return isinstance(value, str) and len(value) <= MAX_TEXT and "\0" not in value


def _has(value: Any, checks: Mapping[str, Check]) -> bool:
    return isinstance(value, dict) and all(key in value and check(value[key]) for key, check in checks.items())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e308


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _object_of(checks: Mapping[str, Check]) -> Check:
    return lambda value: _has(value, checks)


def _is_checkpoint(value: Any) -> bool:
    return _has(value, _CHECKPOINT) and ("files" not in value or _has(value, _FILES))


_INPUT = {"role": is_text, "path": is_text, "content_digest": is_text}
_CHECKPOINT = {"file_sha256": is_text, "weights_digest": is_text}
_FILES = {"path": is_text, "files": _list_of(is_text)}  # of a model with its own weights
_PLACE = {"shape": _list_of(_is_count), "offset": _is_count}
_PROVENANCE: dict[str, Check] = {
    "params_hash": is_text,
    "params": _is_object,
    "algo_rev": _is_count,
    "command": _is_list,
    "inputs": _list_of(_object_of(_INPUT)),
}
_PROVENANCE_IF_THERE: dict[str, Check] = {
    "checkpoint": _or_none(_is_checkpoint),
    "tool": _is_object,
    "versions": _is_object,
    "warnings": _list_of(is_text),
    "source": is_text,
    "network_fit": _is_object,
    "input_statistics": _is_object,
    "device": is_text,
    "created_at": is_text,
    "seconds": _is_number,
}
_META: dict[str, dict[str, Check]] = {
    "checkpoint": {"gradient_passes": _is_count},
    "calibration": {"map": is_text, "classes": _list_of(is_text), "floor": _is_number, "metrics": _is_object},
    "decision": {
        "rule": is_text,
        "settings": _is_object,
        "fitted": _is_object,
        "maker": _is_object,
        "classes": _list_of(is_text),
        "posterior": is_text,
        "integrator": is_text,
        "variant": is_text,
        "split": is_text,
        "num_examples": _is_count,
    },
    "monitor": {
        "posterior": is_text,
        "variant": is_text,
        "split": is_text,
        "calibration": is_text,
        "settings": _is_object,
        "reference": _or_none(_is_object),
        "sets": _or_none(_is_object),
        "metrics": _is_object,
    },
    "predictions": {"posterior": is_text, "integrator": is_text, "split": is_text, "num_examples": _is_count},
    "export": {"posterior": is_text, "variant": is_text, "format": is_text, "metrics": _is_object},
}
_META_IF_THERE: dict[str, Check] = {
    "split": is_text,
    "num_examples": _is_count,
    "gradient_passes": _or_none(_is_count),
    "num_features": _is_count,
    "num_outputs": _is_count,
    "is_labeled": _is_flag,
    "is_ood": _is_flag,
    "has_bias": _is_flag,
    "class_counts": _or_none(_list_of(_is_count)),
    "order_digest": _or_none(is_text),
    "head_digest": _or_none(is_text),
    "posterior": is_text,
    "integrator": is_text,
    "variant": is_text,
    "samples": _or_none(_is_count),
    "draws": _or_none(_is_count),
    "settings": _is_object,
    "interval_level": _or_none(_is_number),
    "warning": _or_none(is_text),
    "method": is_text,
    "likelihood": is_text,
    "type": is_text,
    "classes": _list_of(is_text),
    "metrics": _is_object,
    "param_layout": _list_of(_object_of(_PLACE)),
    "default_samples": _or_none(_is_count),
    "row_space_rank": _or_none(_is_count),
    "sizes": _list_of(_is_count),
    "rows": _or_none(_list_of(_is_object)),
    "predictions": _or_none(_list_of(_is_object)),
}


SCHEMA = "1.0"
KINDS = (
    "features",
    "posterior",
    "samples",
    "predictions",
    "metrics",
    "checkpoint",
    "decision",
    "export",
    "calibration",
    "monitor",
)
_SEALED_KINDS = (*KINDS, "resume")  # resume states are not artifacts, but their documents have a digest, too
MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 32


@dataclass(frozen=True)
class Header:
    """An artifact's description of itself.

    Attributes:
        kind: one of KINDS.
        schema: "major.minor" of the file's layout.
        content_digest: digest of everything except the provenance.
        provenance: bnncli.provenance/1.
        meta: fields specific to the kind: layout, method, split, numbers of the fit.
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
        """Return the path of an input at the time of writing, relative to the artifact, without `..` unless a link requires it."""
        path = self.path.parent / entry["path"]
        plain = Path(os.path.normpath(path))
        return plain if os.path.realpath(plain) == os.path.realpath(path) else path

    @property
    def weights_digest(self) -> str | None:
        """Digest of the checkpoint of the run; None without one."""
        checkpoint = self.provenance.get("checkpoint")
        return checkpoint["weights_digest"] if checkpoint else None


def check_header(path: Path, kind: Any, schema: Any, digest: Any, provenance: Any, meta: Any) -> Header:
    """Build a Header from raw values. Raises DataError if our writer cannot have produced them."""
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
    if (field := find_invalid_field(kind, provenance, meta)) is not None:
        raise DataError(f"{path}: its header is damaged: field {field!r} is invalid", code="bad_header", path=path)
    return Header(path, kind, schema, digest, provenance, meta)


@contextmanager
def convert_lookup_errors(path: Path) -> Iterator[None]:
    """Treat failed lookups of header fields inside the block as damage to the file, not as bugs.

    Raises:
        DataError: a field is missing or has another type.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = " ".join(str(error).split())[:120]
        message = f"{path}: its header is damaged ({type(error).__name__}: {what})"
        raise DataError(message, code="bad_header", hint=DAMAGED_HINT, path=path) from error


def parse_json(path: Path, text: str | bytes, *, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse strict JSON: limited size and depth, no duplicate keys, finite numbers; else raise DataError."""
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
    """Return the nesting depth of lists and objects."""
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


def add_digest(document: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of the whole document, including provenance, to detect any damage."""
    return {**document, "document_sha256": json_sha256(document)}


def parse_document(path: Path, text: str | bytes, *, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse what with_digest returned. Raises DataError if the text is not strict JSON, or not as written."""
    document = parse_json(path, text, most_bytes=most_bytes)
    if not isinstance(document, dict):
        raise DataError(f"{path}: its header is damaged", code="bad_header", path=path)
    digest = document.pop("document_sha256", None)
    if document.get("kind") in _SEALED_KINDS and digest != json_sha256(document):
        raise DataError(f"{path}: its header does not match its digest", code="bad_header", path=path)
    return document


def check_is_file(path: Path) -> None:
    """Raise MissingInput unless `path` is a regular file that can be accessed."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: NUL in the path
        raise MissingInput(f"{path} does not exist", path=path) from None
    except OSError as error:
        raise read_error(error, path) from error
    if not stat.S_ISREG(mode):
        raise MissingInput(f"{path} is not a regular file", path=path)
