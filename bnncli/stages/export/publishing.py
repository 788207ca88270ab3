"""How an export becomes a file, or two where the tensors go with the code that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.atomic import publish_bytes, published_together
from bnncli.artifacts.exports import KIND, write_export
from bnncli.artifacts.headers import Header
from bnncli.artifacts.outputs import check_side_output
from bnncli.artifacts.posteriors import write_tensors
from bnncli.errors import UsageError
from bnncli.export import MARK
from bnncli.names import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

CODE = "code"  # in what a file of tensors says of itself: the module that reads it


def code_path(target: Path) -> Path:
    """Where the module that reads a file of tensors lies: beside it."""
    return target.with_suffix(".py")


def check_suffix(out: str | None, form: str) -> None:
    """Raise UsageError where a file's name ends as those of another format do."""
    others = {suffix: name for name, suffix in FORMATS.items() if name != form}
    other = None if out is None else others.get(Path(out).suffix.lower())
    if other is not None:
        raise UsageError(
            f"\0out\0 {out} has the ending of \0format\0 {other}, but the format is {form}; add \0format\0 "
            f"{other} or use another name"
        )


def check_code_path(target: Path, *, force: bool) -> None:
    """Raise before any work where the module may not be written there."""
    if code_path(target) == target:
        raise UsageError("\0out\0: expected a tensor file such as head.safetensors; the module is written beside it")
    check_side_output(code_path(target), "\0out\0", "module", is_ours=_is_ours, force=force, others=[])


def write(
    target: Path,
    content: bytes | Mapping[str, Tensor],
    *,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a graph, or tensors with their module, and return the content digest."""
    if isinstance(content, bytes):
        return write_export(target, content, meta=meta, provenance=provenance, may_replace=may_replace)
    with published_together(lambda targets: None):
        digest = write_tensors(target, content, kind=KIND, meta=meta, provenance=provenance, may_replace=may_replace)
        publish_bytes(code_path(target), meta[CODE].encode(), may_replace=True)
    return digest


def complete(header: Header) -> None:
    """Write the module of a file of tensors again where it is gone."""
    if CODE in header.meta and not code_path(header.path).exists():
        publish_bytes(code_path(header.path), header.meta[CODE].encode(), may_replace=False)


def _is_ours(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(len(MARK)) == MARK.encode()
