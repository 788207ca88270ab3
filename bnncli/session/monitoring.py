"""The state of a monitor: its tests on a stream, from one call to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.posteriors import read_tensors
from bnncli.errors import DAMAGED_HINT, DataError
from bnncli.evaluation.monitoring import Alarm, Capital, bet_on_losses, bet_on_p_values, find_alarm
from bnncli.lazy import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

KIND = "monitor"


@dataclass(frozen=True)
class Stream:
    """One test on a stream: its observations so far, and the capital of the bets against no change.

    Attributes:
        keys: (T, 16) uint8, of the examples.
        values: (T,) float64, their scores or losses.
        path: (T,) float64, the log capital after each.
    """

    keys: NDArray
    values: NDArray
    path: NDArray
    capital: Capital

    @classmethod
    def start(cls, num_bets: int) -> Stream:
        """Return the test before any example."""
        return cls(np.zeros((0, 16), np.uint8), np.zeros(0), np.zeros(0), Capital.start(num_bets))

    def extend(self, keys: NDArray, values: NDArray, factors: NDArray) -> Stream:
        """Return the test after these examples (n,), on which the bets pay factors (n, B)."""
        capital, path = self.capital.play(factors)
        joined = [np.concatenate(pair) for pair in ((self.keys, keys), (self.values, values), (self.path, path))]
        return Stream(joined[0], joined[1], joined[2], capital)

    def find_new(self, keys: NDArray) -> NDArray:
        """Return the rows (n,) of keys (N, 16) that the test has not seen, the first of each."""
        known = {key.tobytes() for key in self.keys}
        rows = []
        for row, key in enumerate(keys):
            if (name := key.tobytes()) not in known:
                known.add(name)
                rows.append(row)
        return np.array(rows, dtype=np.int64)

    def to_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors to store."""
        arrays = {
            "keys": self.keys,
            "values": self.values,
            "path": self.path,
            "log_shares": self.capital.log_shares,
        }
        return {f"{prefix}.{name}": torch.from_numpy(np.ascontiguousarray(one)) for name, one in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], prefix: str) -> Stream:
        """Return the stored test. Raises KeyError or ValueError where tensors are missing or do not fit."""
        keys, values, path, shares = (
            tensors[f"{prefix}.{name}"].numpy() for name in ("keys", "values", "path", "log_shares")
        )
        if not (keys.shape == (len(path), 16) and values.shape == path.shape and shares.ndim == 2):
            raise ValueError(f"the shapes of {prefix} do not fit")
        return cls(keys, values, path, Capital(shares))


INPUTS, ERRORS = "inputs", "errors"
NUM_BETS = {INPUTS: bet_on_p_values(np.ones(1)).shape[-1], ERRORS: bet_on_losses(np.zeros(1), 0.5).shape[-1]}


@dataclass(frozen=True)
class State:
    """What a monitor knows.

    Attributes:
        settings: score, alpha, max_error, coverage and seed, fixed when it began.
        reference: error rate that the losses are tested against, and the level of that test; None without one.
        sets: level of the adaptive sets; counts of the labelled examples with such a set, and of those whose set missed.
    """

    settings: dict[str, Any]
    streams: dict[str, Stream]
    reference: dict[str, float] | None
    sets: dict[str, Any] | None

    @property
    def levels(self) -> dict[str, float]:
        """Return the level of each test's alarm, whose sum with that of the reference is alpha."""
        half = self.settings["alpha"] / 2
        return {INPUTS: half, ERRORS: half if self.reference is None else self.reference["level"]}

    def alarms(self) -> dict[str, Alarm]:
        """Return the alarms by test."""
        found = {name: find_alarm(stream.path, self.levels[name]) for name, stream in self.streams.items()}
        return {name: alarm for name, alarm in found.items() if alarm is not None}


def read_state(path: Path) -> State:
    """Read the state of a monitor. Raises as read_tensors, or DataError where it does not fit itself."""
    tensors, header = read_tensors(path, kind=KIND)
    try:
        streams = {name: Stream.from_tensors(tensors, name) for name in NUM_BETS}
        return State(header.meta["settings"], streams, header.meta["reference"], header.meta["sets"])
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}", code="damaged", hint=DAMAGED_HINT, path=path) from None
