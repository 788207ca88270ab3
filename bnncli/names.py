"""Format names for messages and tables, and interpret the names of tensors.

Names from files are shown without control characters or escapes, and truncated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bnncli.errors import UsageError

_AVERAGED = re.compile(r"(?:^|[._-])(?:ema|averag\w*|swa|polyak|teacher|shadow)(?:[._-]|$)", re.IGNORECASE)
# Other libraries' names for our metrics.
_ALSO_CALLED = {
    "acc": "accuracy", "f1": "macro_f1", "f1_score": "macro_f1", "f1_macro": "macro_f1", "auc": "auroc", "roc_auc": "auroc",
    "logloss": "nll", "log_loss": "nll", "cross_entropy": "nll", "nlpd": "nll", "recall": "balanced_accuracy",
    "precision": "macro_precision",
}  # fmt: skip


def printable(text: str, *, keep_bytes: bool = False) -> str:
    """Return `text` on one line, with control characters and stray bytes escaped.

    Args:
        keep_bytes: keep bytes of a file name that are not UTF-8, so that scripts get the exact name.
    """
    return "".join(char if _is_shown(char, keep_bytes) else _escape(char) for char in text)


def escape_for_table(name: str) -> str:
    """Return a file name for a table, with bytes that are not UTF-8 escaped."""
    return name.encode(errors="backslashreplace").decode()


def _is_shown(char: str, keep_bytes: bool) -> bool:
    return char.isprintable() or (keep_bytes and "\udc80" <= char <= "\udcff")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def quote_name(name: object, *, limit: int = 80) -> str:
    """Return `name` in quotes, with control and non-printable characters escaped, cut after `limit` characters."""
    text = name if isinstance(name, str) else str(name)
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return repr(cut)


def format_names(names: Iterable[object], *, limit: int = 5) -> str:
    """Return the first `limit` names in quotes, comma-separated, and the number of others."""
    every = list(names)
    shown = ", ".join(quote_name(name) for name in every[:limit])
    rest = len(every) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def near_miss(name: str, known: Sequence[str]) -> str | None:
    """Return a "did you mean" question with up to three similar names, or None. Substrings count as similar."""
    if (usual := _ALSO_CALLED.get(name.casefold())) in known:
        return f"did you mean {quote_name(usual)}?"
    folded = name.casefold()
    within = [one for one in known if len(name) > 1 and (folded in one.casefold() or folded.startswith(one.casefold()))]
    near = dict.fromkeys([*difflib.get_close_matches(name, known, n=3), *within])
    return f"did you mean {' or '.join(quote_name(one) for one in [*near][:3])}?" if near else None


def unknown_value_error(where: str, given: object, known: Sequence[object], *, also: Sequence[str] = ()) -> UsageError:
    """Return the error for an unknown value, with the known values and the most similar ones.

    Args:
        where: option or place of the value.
        also: descriptions of other valid values.
    """
    names = [str(one) for one in known]
    hint = near_miss(given, names) if isinstance(given, str) else None
    expected = f"one of {', '.join([*names, *also])}" if names else "nothing"
    return UsageError(f"{where}: expected {expected}; got {given!r}", hint=hint)


def count_noun(count: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(share: float, form: str = ".1f") -> str:
    """Return a share in percent: 0.117 as `11.7%`.

    Args:
        form: format specification of the number.
    """
    return f"{100 * share:{form}}%"


def add_article(word: str) -> str:
    """Return the word with `a` or `an`, chosen by its first letter."""
    return f"{'an' if word[:1].lower() in tuple('aeiou') else 'a'} {word}"


def is_split(name: str) -> bool:
    """Return whether published data sets use this name for one of their splits."""
    return name in ("train", "test", "validation", "valid", "val", "dev")


def by_number(path: Path | str) -> list[list[str | int]]:
    """Return a key that sorts paths by the numbers in their names: part-2 before part-10."""
    return [[int(one) if one.isdecimal() else one for one in re.split(r"([0-9]+)", part)] for part in Path(path).parts]


def posterior_title(posterior: str, variant: str, group: str | None) -> str:
    """Return the table label of a posterior: its name, and the predictions' name unless that is <posterior>.<variant>."""
    return posterior if group in (None, f"{posterior}.{variant}") else f"{posterior} ({group})"


def prefixes_of(names: Iterable[str]) -> list[str]:
    """Return all prefixes of tensor names, shortest first: the empty one and those that end with a dot."""
    found = {name[: match.end()] for name in names for match in re.finditer(r"\.", name)}
    return sorted({"", *found}, key=lambda prefix: (prefix.count("."), prefix))


def is_averaged(name: str) -> bool:
    """Return whether the name or prefix of a state marks a running average."""
    return _AVERAGED.search(name) is not None


FORMATS = {"onnx": ".onnx", "pt2": ".pt2", "torch": ".safetensors"}  # with their file suffixes
FEATURES_NAME = "features"  # takes the place of a posterior's name for feature scores


def format_duration(seconds: float) -> str:
    """Return an estimated time as seconds below 2 minutes, minutes below 2 hours, and hours above."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(1.0, seconds):.0f} s"
