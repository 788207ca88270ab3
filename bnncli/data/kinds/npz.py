"""`npz:FILE[:x,y]`: arrays of inputs and labels in a NumPy archive.

`npz:FILE:input_ids+attention_mask,y` names several inputs, which the network takes by name. The same holds for a single
array (N, L) of integers, which are token ids: `npz:FILE:input_ids,y`. An array `groups` (N,) has the group of each row. For audio models the inputs are waves (N, T) or
(N, T, channels), integers or reals in [-1, 1], and the array `sampling_rate` has their rate in Hz.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from bnncli.data.arrays import (
    TOKEN_IDS,
    ArrayDataset,
    NamedArrays,
    array_dataset,
    check_groups,
    check_named_arrays,
    npz_names,
    read_npz,
)
from bnncli.data.pixels import Preprocess
from bnncli.data.sound import WaveDataset, is_waves, wave_dataset
from bnncli.errors import DataError, UsageError
from bnncli.names import quote_name
from bnncli.options.declaration import Form

FORM = Form("npz:FILE[:x,y]", 10, "Arrays of inputs and labels in a NumPy archive.")

DEFAULT_NAMES = ("x", "y")
RATE = "sampling_rate"
GROUPS = "groups"


def exists(place: str) -> bool:
    """Return whether the text as it stands is a file."""
    return Path(place).expanduser().is_file()


def open_dataset(place: str, preprocess: Preprocess) -> ArrayDataset | NamedArrays | WaveDataset:
    """Open inputs and labels of an archive; no labels if only one array is named or there is no y.

    Raises:
        MissingInput, DataError, Untrusted: as in read_npz; labels break a rule; or waves lack a sampling rate.
        UsageError: there are more than two names.
    """
    path, names = _divide(place)
    if names is None:
        names = [name for name in DEFAULT_NAMES if name == "x" or name in npz_names(path)]
    if not 1 <= len(names) <= 2:
        raise UsageError(f"npz: expected FILE, FILE:INPUTS or FILE:INPUTS,LABELS; got {place!r}")
    inputs = _inputs(path, names[0])
    has_groups = GROUPS in npz_names(path) and GROUPS not in (*inputs, *names[1:])
    arrays = read_npz(path, [*inputs, *names[1:], *([GROUPS] if has_groups else [])])
    labels = arrays[names[1]] if len(names) == 2 else None
    dataset = _dataset(path, arrays, inputs, labels, preprocess)
    if not has_groups:
        return dataset
    where = f"npz:{path}: array {quote_name(GROUPS)}"
    return replace(dataset, groups=check_groups(arrays[GROUPS], num_rows=len(dataset), where=where))


def _dataset(
    path: Path, arrays: Mapping[str, np.ndarray], inputs: list[str], labels: np.ndarray | None, preprocess: Preprocess
) -> ArrayDataset | NamedArrays | WaveDataset:
    if len(inputs) > 1 or inputs == [TOKEN_IDS] or (inputs != ["x"] and _can_be_tokens(arrays[inputs[0]])):
        return check_named_arrays({name: arrays[name] for name in inputs}, labels, where=f"npz:{path}")
    if preprocess.transform is not None and preprocess.transform.takes == "audio" and is_waves(arrays[inputs[0]]):
        return wave_dataset(arrays[inputs[0]], labels, _sampling_rate(path), where=f"npz:{path}")
    return array_dataset(arrays[inputs[0]], labels, where=f"npz:{path}")


def _can_be_tokens(array: np.ndarray) -> bool:
    """Return whether an array may hold token ids: rows of integers in a type that pixels do not have."""
    return array.ndim == 2 and array.dtype.kind in "iu" and array.dtype != np.uint8


def _sampling_rate(path: Path) -> int:
    """Return the rate in Hz. Raises DataError if the archive lacks it."""
    if RATE not in npz_names(path):
        raise DataError(
            f"{quote_name(path, limit=300)} does not give the sampling rate of its audio", path=path,
            hint=f"add it to the file: np.savez(FILE, x=..., y=..., {RATE}=16000)",
        )  # fmt: skip
    (found,) = read_npz(path, [RATE]).values()
    if found.size != 1 or found.dtype.kind not in "iuf" or found.item() != round(found.item()):
        raise DataError(
            f"{quote_name(path, limit=300)}: {RATE} is {quote_name(found)}, expected an integer number of Hz", path=path
        )
    return int(found.item())


def _inputs(path: Path, text: str) -> list[str]:
    """Return one name or several joined by +, which belongs to a name if such an array exists."""
    return [text] if "+" not in text or text in npz_names(path) else text.split("+")


def _divide(place: str) -> tuple[Path, list[str] | None]:
    """Split into file and array names; a colon belongs to the file name if that file exists."""
    path = Path(place).expanduser()
    match = re.fullmatch(r"(.+):([^:/]+)", place)
    if path.exists() or match is None:
        return path, None
    return Path(match[1]).expanduser(), match[2].split(",")
