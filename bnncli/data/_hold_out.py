"""Moving random rows of one split into another, so that tuning never sees what is tested on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bnncli.data._split import InputSplit
from bnncli.errors import UsageError
from bnncli.names import near_miss
from bnncli.numerics.random import permutation
from bnncli.options.declaration import check_split_name


def hold_out_rows(num_rows: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions that stay (num_rows - count,) and that move (count,), both ascending; the seed chooses."""
    if not 0 < count < num_rows:
        raise ValueError(f"expected a count between 0 and {num_rows} rows, got {count}")
    order = permutation(num_rows, seed)
    return np.sort(order[count:]), np.sort(order[:count])


def parse_hold_out(text: str, sizes: Mapping[str, int]) -> tuple[str, str, int]:
    """NEW, OLD and N of `NEW=OLD:N`, for splits of these sizes.

    Raises:
        UsageError: another form, no such split, NEW exists, or OLD has not more than N rows.
    """
    match = re.fullmatch(r"([^=]+)=([^:]+):(\d+)", text)
    if match is None:
        raise UsageError(f"\0hold_out\0: expected NEW=OLD:N, such as val=test:2000; got {text!r}")
    new, old, count = check_split_name(match[1], "\0hold_out\0"), match[2], int(match[3])
    if old not in sizes:
        have = f"no split {old!r} in this command (have: {', '.join(sizes)})"
        raise UsageError(f"\0hold_out\0: {have}", hint=near_miss(old, list(sizes)))
    if new in sizes:
        raise UsageError(f"\0hold_out\0: split {new!r} already exists")
    if not 0 < count < sizes[old]:
        rows = f"1 to {sizes[old] - 1} of the {sizes[old]} rows left in {old!r}"
        raise UsageError(f"\0hold_out\0 {text}: expected {rows}")
    return new, old, count


def hold_out(splits: Mapping[str, InputSplit], text: str, *, seed: int) -> dict[str, InputSplit]:
    """The splits after `NEW=OLD:N` moved N random rows of OLD into NEW.

    Raises:
        UsageError: as parse_hold_out.
    """
    new, old, count = parse_hold_out(text, {name: len(split) for name, split in splits.items()})
    stay, move = hold_out_rows(len(splits[old]), count, seed)
    kept, moved = (replace(splits[old].take(rows), held_out=text) for rows in (stay, move))
    return {**splits, old: kept, new: replace(moved, name=new)}
