"""Names made fit for a message or a table; of what came from a file: no control characters, no escapes, no endless lines."""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    """`text` in one line that every terminal and file can take: control characters and stray bytes are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def quoted(name: object, *, limit: int = 80) -> str:
    """`name` in quotes, control and non-printable characters escaped, cut after `limit` characters."""
    text = name if isinstance(name, str) else str(name)
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return repr(cut)


def listed(names: Iterable[object], *, limit: int = 5) -> str:
    """The first `limit` names in quotes, comma-separated, and how many more there are."""
    every = list(names)
    shown = ", ".join(quoted(name) for name in every[:limit])
    rest = len(every) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def posterior_title(posterior: str, variant: str, group: str | None) -> str:
    """What a table calls the posterior of predictions: its name, and theirs where that is not <posterior>.<variant>."""
    return posterior if group in (None, f"{posterior}.{variant}") else f"{posterior} ({group})"
