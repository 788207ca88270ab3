"""From `SPLIT=KIND:PLACE[@N]` to a split."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from bnncli import registry
from bnncli.data._known import Memory, known_or_opened
from bnncli.data._labels import common_task
from bnncli.data._preprocess import Preprocess
from bnncli.data._split import Dataset, InputSplit
from bnncli.data._transform import check_fits
from bnncli.errors import DataError, UsageError
from bnncli.options.declaration import check_split_name
from bnncli.options.parts import forms
from bnncli.system.input_files import reading

_FAMILY = "data"
_FOLDER = "images"  # what a folder most often is


def parse_split(text: str, *, option: str = "\0data\0") -> tuple[str, str]:
    """Name and spec out of `SPLIT=SPEC`.

    Raises:
        UsageError: there is no `=`, or the name could not be a file's name.
    """
    name, equals, spec = text.partition("=")
    if not equals or not spec:
        raise UsageError(f"{option}: expected SPLIT=SPEC, such as train=npz:train.npz; got {text!r}")
    return check_split_name(name, option), spec


def _forms() -> str:
    *others, last = forms()
    return f"{', '.join(others)} or {last}, optionally followed by @N for the first N rows"


def _perhaps(place: str) -> str | None:
    """What may be meant, where the name of a file ends as a kind is called, or is that of a folder."""
    suffixes = Path(re.split(r"[:@]", place)[0]).suffixes
    kinds = [suffix[1:] for suffix in suffixes if registry.has_name(_FAMILY, suffix[1:])]
    if not kinds and Path(place).is_dir():
        kinds = [_FOLDER]
    return f"did you mean {kinds[-1]}:{place}?" if kinds else None


def open_stored(spec: str) -> Dataset:
    """The data set that `KIND:PLACE[@N]` names, all of its rows, as stored: for no model. Raises as `load_split` does."""
    return _opened(spec, Preprocess(), None)[2]


def load_split(
    spec: str,
    *,
    name: str = "",
    preprocess: Preprocess | None = None,
    takes_any_labels: bool = False,
    memory: Memory | None = None,
) -> InputSplit:
    """The split that `KIND:PLACE[@N]` names, its files open or in memory.

    A trailing `@N` belongs to the file name where such a file exists.

    Args:
        takes_any_labels: whether zeros and ones (N, L) pass whatever they are, as other splits may tell: `common_task`.
        memory: what is known of it; data whose bytes are known are opened when they are read.

    Raises:
        UsageError: unknown kind or form, or data of another kind than the model takes.
        MissingInput: a file does not exist.
        DataError: a file is damaged, labels break a rule, or there are fewer than N rows.
        Untrusted: reading it would unpickle.
    """
    preprocess = preprocess or Preprocess()
    kind, place, dataset, count = _opened(spec, preprocess, memory)
    check_fits(dataset, preprocess.transform, spec)
    if count is not None and not 1 <= count <= len(dataset):
        raise DataError(f"{spec}: you asked for {count} rows, but there are only {len(dataset)}", code="too_few_rows")
    rows = np.arange(len(dataset) if count is None else count)
    split = InputSplit(spec, dataset, rows, preprocess, dataset.is_labeled, count, name)
    if not takes_any_labels:
        common_task({f"{kind}:{place}": split.shown_labels}, None)
    return split


def _opened(spec: str, preprocess: Preprocess, memory: Memory | None) -> tuple[str, str, Dataset, int | None]:
    """Kind, place, data set and the N of @N. Raises as `load_split` does."""
    kind, colon, place = spec.partition(":")
    if not colon or not place or not registry.has_name(_FAMILY, kind):
        raise UsageError(f"\0data\0: expected {_forms()}; got {spec!r}", hint=_perhaps(place or kind))
    module = registry.load_module(_FAMILY, kind)
    match = re.fullmatch(r"(.+)@(\d+)", place)
    count = None
    with reading(Path(place)):  # a name too long, a folder that may not be entered
        if match and not module.exists(place):
            place, count = match[1], int(match[2])
        dataset = known_or_opened(kind, module, place, preprocess, memory)
    return kind, place, dataset, count
