"""Pages for people: published like every other output, and replaced only where the old one is a page of ours."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from bnncli.pages.page import MARK
from bnncli.storage.atomic import publish_bytes
from bnncli.storage.side_outputs import check_side_output

_LOOKED_AT = 4096  # bytes: the mark stands in the head


def check_page_path(target: Path, flag: str, *, force: bool, others: Iterable[Path]) -> None:
    """Raise before any work when a page may not be written to `target`.

    Args:
        flag: the option that named it.
        force: whether a file that is no page of ours may be replaced.
        others: files of this command, which are never replaced.

    Raises:
        UsageError: target is one of the others.
        OutputExists: the folder cannot be written, or a foreign file is there.
    """
    check_side_output(target, flag, "report", is_ours=_is_ours, force=force, others=others)


def write_page(target: Path, content: bytes) -> str:
    """Publish a page, whose path has been checked; the digest of its bytes."""
    publish_bytes(target, content, may_replace=True)
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _is_ours(path: Path) -> bool:
    with open(path, "rb") as stream:
        return MARK.encode() in stream.read(_LOOKED_AT)
