"""Names made fit for a message or a table; of what came from a file: no control characters, no escapes, no endless lines.

And what the names of tensors tell, whoever gave them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bnncli.errors import UsageError

_AVERAGED = re.compile(r"(?:^|[._-])(?:ema|averag\w*|swa|polyak|teacher|shadow)(?:[._-]|$)", re.IGNORECASE)
# What other libraries call what has another name here.
_ALSO_CALLED = {
    "acc": "accuracy", "f1": "macro_f1", "f1_score": "macro_f1", "f1_macro": "macro_f1", "auc": "auroc", "roc_auc": "auroc",
    "logloss": "nll", "log_loss": "nll", "cross_entropy": "nll", "nlpd": "nll", "recall": "balanced_accuracy",
    "precision": "macro_precision",
}  # fmt: skip


def printable(text: str, *, keep_bytes: bool = False) -> str:
    """`text` in one line that every terminal and file can take: control characters and stray bytes are escaped.

    Args:
        keep_bytes: leave the bytes of a file name that are not UTF-8, so that a script gets the name as it is.
    """
    return "".join(char if _is_shown(char, keep_bytes) else _escape(char) for char in text)


def in_table(name: str) -> str:
    """A file's name as tables have it: bytes that are not UTF-8 are escaped."""
    return name.encode(errors="backslashreplace").decode()


def _is_shown(char: str, keep_bytes: bool) -> bool:
    return char.isprintable() or (keep_bytes and "\udc80" <= char <= "\udcff")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


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


def near_miss(name: str, known: Sequence[str]) -> str | None:
    """A question that names what may have been meant: at most three names, nearly spelled so, or with it in them, or that it has."""
    if (usual := _ALSO_CALLED.get(name.casefold())) in known:
        return f"did you mean {quoted(usual)}?"
    folded = name.casefold()
    within = [one for one in known if len(name) > 1 and (folded in one.casefold() or folded.startswith(one.casefold()))]
    near = dict.fromkeys([*difflib.get_close_matches(name, known, n=3), *within])
    return f"did you mean {' or '.join(quoted(one) for one in [*near][:3])}?" if near else None


def not_one_of(where: str, given: object, known: Sequence[object], *, also: Sequence[str] = ()) -> UsageError:
    """Return the error for a value that is none of the known ones: what there is, and what may have been meant.

    Args:
        where: the option or the place that the value was given for.
        also: in words, what is allowed beside these.
    """
    names = [str(one) for one in known]
    hint = near_miss(given, names) if isinstance(given, str) else None
    expected = f"one of {', '.join([*names, *also])}" if names else "nothing"
    return UsageError(f"{where}: expected {expected}; got {given!r}", hint=hint)


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural but of one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(share: float, form: str = ".1f") -> str:
    """Return a share in percent: 0.117 as `11.7%`.

    Args:
        form: of the number, as format() takes it.
    """
    return f"{100 * share:{form}}%"


def with_article(word: str) -> str:
    """`a` or `an`, as the first letter has it, and the word."""
    return f"{'an' if word[:1].lower() in tuple('aeiou') else 'a'} {word}"


def is_split(name: str) -> bool:
    """Whether files and folders of this name are, in published data sets, one split of several."""
    return name in ("train", "test", "validation", "valid", "val", "dev")


def by_number(path: Path | str) -> list[list[str | int]]:
    """What sorts paths by the numbers in their names: part-2 before part-10."""
    return [[int(one) if one.isdecimal() else one for one in re.split(r"([0-9]+)", part)] for part in Path(path).parts]


def posterior_title(posterior: str, variant: str, group: str | None) -> str:
    """What a table calls the posterior of predictions: its name, and theirs where that is not <posterior>.<variant>."""
    return posterior if group in (None, f"{posterior}.{variant}") else f"{posterior} ({group})"


def prefixes_of(names: Iterable[str]) -> list[str]:
    """Every prefix of names of tensors, the empty one and those that end with a dot, the shortest first."""
    found = {name[: match.end()] for name in names for match in re.finditer(r"\.", name)}
    return sorted({"", *found}, key=lambda prefix: (prefix.count("."), prefix))


def is_averaged(name: str) -> bool:
    """Whether the name of a state, or what stands before the names in one, says that it is a running average of another."""
    return _AVERAGED.search(name) is not None


FORMATS = {"onnx": ".onnx", "pt2": ".pt2", "torch": ".safetensors"}  # and what the files end in
FEATURES_NAME = "features"  # stands where a posterior's name does, for scores of the features alone
