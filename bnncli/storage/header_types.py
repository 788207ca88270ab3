"""What everything that readers look up in a header must be: a header may be damaged or forged, with every digest right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_TEXT = 1 << 14
_LARGEST = 1 << 53  # of whole numbers, as JSON readers agree on

Check = Callable[[Any], bool]


def odd_field(kind: str, provenance: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
    """The first field that readers look up and that is missing or not of its type; None where all are as they should be."""
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
    """Whether a value is a text that can be shown, and be part of a path."""
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
_FILES = {"path": is_text, "files": _list_of(is_text)}  # of a model with weights of its own
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
