"""Pages for people: published like every other output, and replaced only where the old one is a page of ours."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bnncli.errors import OutputExists
from bnncli.pages.page import MARK, OPTIONS
from bnncli.storage.atomic import publish_bytes
from bnncli.storage.freshness import differences
from bnncli.storage.side_outputs import check_side_output

_LOOKED_AT = 1 << 16  # bytes: the mark and the options stand in the head
_OPTIONS = re.compile(rf'<meta name="{OPTIONS}" content="([^"]*)">')


def check_page_path(
    target: Path, flag: str, options: Mapping[str, Any], *, force: bool, others: Iterable[Path]
) -> None:
    """Raise before any work when a page may not be written to `target`.

    Args:
        flag: the option that named it.
        options: that it is to be made with.
        force: whether a file that is no page of ours, or was made with other options, may be replaced.
        others: files of this command, which are never replaced.

    Raises:
        UsageError: target is one of the others.
        OutputExists: there is no such folder, it cannot be written, or a foreign file or a page of other options is there.
    """
    folder = target.parent
    if not folder.exists():
        hint = f"create the folder, or choose another place with {flag}"
        raise OutputExists(f"{flag}: no folder {folder}", hint=hint, code="not_writable", path=folder)
    check_side_output(target, flag, "report", is_ours=_is_ours, force=force, others=others)
    recorded = _recorded(target)
    if recorded is not None and recorded != options and not force:
        raise OutputExists(
            f"{target} already exists with other options ({differences(recorded, options)})",
            hint=f"add \0force\0 to replace it, or {flag} FILE to keep both",
            path=target,
        )


def _recorded(path: Path) -> dict[str, Any] | None:
    """The options that a page was made with; None where there is none, or it does not say."""
    if not path.is_file():
        return None
    with open(path, "rb") as stream:
        found = _OPTIONS.search(stream.read(_LOOKED_AT).decode(errors="replace"))
    try:
        told = json.loads(html.unescape(found[1])) if found is not None else None
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def write_page(target: Path, content: bytes) -> str:
    """Publish a page, whose path has been checked; the digest of its bytes."""
    publish_bytes(target, content, may_replace=True)
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _is_ours(path: Path) -> bool:
    with open(path, "rb") as stream:
        return MARK.encode() in stream.read(_LOOKED_AT)
