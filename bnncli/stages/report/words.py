"""Numbers and lists in words."""

from __future__ import annotations


def with_error(value: float, error: float | None, digits: int = 4) -> str:
    """A number with its standard error, where that is known."""
    shown = f"{value:.{digits}f}".replace("-", "−")
    return shown + ("" if error is None else f" ± {error:.{digits}f}")


def listed_in_words(names: list[str], *, most: int | None = None) -> str:
    """`a`, `a and b`, `a, b and c`; with `most` of them, `a, b and 7 more`."""
    if most is not None and len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} more"]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
