"""Figure files: published like every other output, and replaced only where the old one is a figure of ours."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from bnncli.figures import MARK as FIGURE_MARK
from bnncli.storage.atomic import publish_bytes
from bnncli.storage.side_outputs import check_side_output

_MAX_BYTES = 1 << 24  # of ours; what is larger is somebody else's


def check_figure_path(target: Path, flag: str, *, force: bool, others: Iterable[Path]) -> None:
    """Raise before any work when a figure may not be written to `target`.

    Args:
        flag: the option that named it.
        force: whether a file that is not a figure of ours may be replaced.
        others: files of this command, which are never replaced by a figure.

    Raises:
        UsageError: target is one of the others.
        OutputExists: the folder cannot be written, or a foreign file is there.
    """
    check_side_output(target, flag, "figure", is_ours=_is_ours, force=force, others=others)


def write_figure(target: Path, content: bytes) -> str:
    """Publish a figure, whose path has been checked; the digest of its bytes."""
    publish_bytes(target, content, may_replace=True)
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _is_ours(path: Path) -> bool:
    return path.stat().st_size <= _MAX_BYTES and FIGURE_MARK.encode() in path.read_bytes()
