"""Count the gradient passes that a posterior took, with its base and the training of its network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header

HEAD, NETWORK = "head", "network"


_FREE = ("map", "temperature", "calibration")  # methods that take no gradients of the training data


_METHODS_INCLUDING_BASE = ("refine",)  # methods whose base is part of the result, not only the source of a prior


@dataclass(frozen=True)
class Cost:
    """Cost of a fit.

    Args:
        passes: gradient passes over the training data.
        through: head (features are only multiplied) or network.
    """

    passes: float
    through: str

    def to_metrics(self) -> dict[str, Any]:
        """Return the entry for a posterior's metrics."""
        return {"cost": {"gradient_passes": self.passes, "through": self.through}}

    @classmethod
    def of_fit(cls, passes: float, *, is_last_layer: bool) -> Cost:
        """Return the cost of a fit to a target."""
        return cls(float(passes), HEAD if is_last_layer else NETWORK)

    @classmethod
    def recorded(cls, metrics: Mapping[str, Any]) -> Cost | None:
        """Invert to_metrics; None if nothing was recorded, or in another form."""
        entry = metrics.get("cost")
        if not isinstance(entry, Mapping) or not isinstance(entry.get("gradient_passes"), int | float):
            return None
        return cls(float(entry["gradient_passes"]), str(entry.get("through")))


@dataclass(frozen=True)
class TotalCost:
    """Cost of a posterior and everything it is made of; unknown parts are None.

    Args:
        head, network: gradient passes through the head and the network for the posterior and its base; both None if either's
            is unknown.
        training: passes through the network to train the checkpoint.
    """

    head: float | None
    network: float | None
    training: float | None

    @property
    def own(self) -> float | None:
        """Return the passes of the posterior and its base, head and network together."""
        return None if self.head is None or self.network is None else self.head + self.network

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Return the sort key, cheapest first: passes through the network, then the head; unknown last."""
        return self.own is None, (self.network or 0.0) + (self.training or 0.0), self.head or 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the entry for `compare --json`."""
        return {"head_passes": self.head, "network_passes": self.network, "training_passes": self.training}


def total_cost(header: Header | None) -> TotalCost:
    """Return the cost of a posterior from its header; unknown without one."""
    if header is None:
        return TotalCost(None, None, None)
    found = _sum_passes(header)
    if header.meta.get("method") in (
        "ensemble",
        "mola",
    ):  # training of all members, the checkpoint included
        members = _count(header.meta.get("metrics", {}))
        return TotalCost(None, None, None) if members is None else TotalCost(0.0, members, 0.0)
    if found is None:
        return TotalCost(None, None, _count_training_passes(header))
    return TotalCost(found[HEAD], found[NETWORK], _count_training_passes(header))


def _sum_passes(header: Header) -> dict[str, float] | None:
    """Return the passes through head and network of a posterior and its base; None if unknown."""
    method = str(header.meta.get("method"))
    found = {HEAD: 0.0, NETWORK: 0.0}
    if method in _FREE:
        return found
    own = Cost.recorded(header.meta.get("metrics", {}))
    if own is None or own.through not in found:
        return None
    found[own.through] += own.passes
    for entry in header.inputs:
        if entry["role"] == "base" and method in _METHODS_INCLUDING_BASE:
            path = header.input_path(entry)
            base = _sum_passes(read_header(path)) if path.is_file() else None
            if base is None:
                return None
            found = {name: passes + base[name] for name, passes in found.items()}
    return found


def _count_training_passes(header: Header) -> float | None:
    """Return the gradient passes that trained the checkpoint; None if unknown."""
    network = header.path.with_name("map.safetensors")
    return _count(read_header(network).meta) if network.is_file() else None


def _count(recorded: Mapping[str, Any]) -> float | None:
    passes = recorded.get("gradient_passes")
    return float(passes) if isinstance(passes, int | float) and not isinstance(passes, bool) else None
