"""Waves in an array as a data set of sound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bnncli.data._labels import check_labels
from bnncli.data._sound import Sound, checked_sound
from bnncli.progress import Progress

_MOST_CHANNELS = 8


@dataclass(frozen=True, eq=False)
class WaveDataset:
    """Waves (rows, T) or (rows, T, channels) of one sampling rate in Hz, in the type that they were stored in."""

    waves: np.ndarray
    rate: int
    labels: np.ndarray | None
    classes: None = None
    is_sized: bool = False
    names: None = None
    items: str = "audio"

    @property
    def is_labeled(self) -> bool:
        """Whether there are labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.waves)

    def read(self, rows: np.ndarray) -> tuple[list[Sound], np.ndarray | None]:
        """Clips and labels (n,) of the rows."""
        found = [checked_sound(self.waves[row], self.rate, f"row {row}") for row in rows.tolist()]
        return found, None if self.labels is None else self.labels[rows]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """The arrays themselves, the rate, and the rows."""
        found = {"x": self.waves, "sampling_rate": np.array([self.rate]), "rows": rows}
        return found if self.labels is None else {**found, "y": self.labels}


def is_waves(array: np.ndarray) -> bool:
    """Whether an array is one of waves, and not of spectra."""
    has_channels = array.ndim == 3 and array.shape[2] <= _MOST_CHANNELS
    return array.dtype.kind in "if" and (array.ndim == 2 or has_channels)


def wave_dataset(waves: np.ndarray, labels: np.ndarray | None, rate: int, *, where: str) -> WaveDataset:
    """A data set of waves, checked. Raises DataError for waves without samples, and labels that break a rule."""
    if len(waves):
        checked_sound(waves[0], rate, where)
    known = None if labels is None else check_labels(labels, num_rows=len(waves), where=where)
    return WaveDataset(waves, rate, known)
