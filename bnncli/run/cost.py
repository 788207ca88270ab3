"""What a posterior cost: passes over the training data, counted in gradients, and whether they went through the network.

One definition for all. A pass is as many gradients by theta of one example's log likelihood, each at one theta, as there are training
examples: E epochs of C chains, or of S draws a step, are E C or E S passes. Draws that differ from example to example are one. A product
with the Hessian counts as two passes; a curvature pass (the Hessian, or a part of it, at one theta) as one through the head, and through
a network as one for each logit, as that takes a backward pass each (bnncli.targets.target counts both). Passes that take no gradient
(values, predictions, features) and what judges a posterior are not counted. What goes into a posterior is: a refined one has the cost
of its base too, and all have that of the checkpoint's training, where it is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header

HEAD, NETWORK = "head", "network"
_FREE = ("map", "temperature")  # methods that take no gradient of the training data themselves
_MADE_OF = ("refine",)  # methods whose base is part of them, and not only the source of a prior


@dataclass(frozen=True)
class Cost:
    """What a fit cost.

    Args:
        passes: gradient passes over the training data.
        through: head, which only multiplies features, or network.
    """

    passes: float
    through: str

    def to_metrics(self) -> dict[str, Any]:
        """As the metrics of posteriors have it."""
        return {"cost": {"gradient_passes": self.passes, "through": self.through}}

    @classmethod
    def of_fit(cls, passes: float, *, is_last_layer: bool) -> Cost:
        """The cost of a fit to a target."""
        return cls(float(passes), HEAD if is_last_layer else NETWORK)

    @classmethod
    def recorded(cls, metrics: Mapping[str, Any]) -> Cost | None:
        """The inverse of to_metrics; None where nothing was recorded, or not in this form."""
        entry = metrics.get("cost")
        if not isinstance(entry, Mapping) or not isinstance(entry.get("gradient_passes"), int | float):
            return None
        return cls(float(entry["gradient_passes"]), str(entry.get("through")))


@dataclass(frozen=True)
class TotalCost:
    """What a posterior and what it is made of cost; what is unknown is None, never guessed.

    Args:
        head, network: gradient passes through the head and through the network, of the posterior and its base; both None where either's
            is unknown.
        training: of the checkpoint, through the network.
    """

    head: float | None
    network: float | None
    training: float | None

    @property
    def own(self) -> float | None:
        """Of the posterior and its base, through head and network together."""
        return None if self.head is None or self.network is None else self.head + self.network

    @property
    def rank(self) -> tuple[bool, float, float]:
        """What rows are sorted by, the cheapest first: passes through the network, then through the head; unknown ones last."""
        return self.own is None, (self.network or 0.0) + (self.training or 0.0), self.head or 0.0

    def to_json(self) -> dict[str, Any]:
        """As `compare --json` has it."""
        return {"head_passes": self.head, "network_passes": self.network, "training_passes": self.training}


def total_cost(header: Header | None) -> TotalCost:
    """The cost of a posterior by its header; unknown without one."""
    if header is None:
        return TotalCost(None, None, None)
    found = _own(header)
    if header.meta.get("method") in (
        "ensemble",
        "mola",
    ):  # what the members' trainings took, the checkpoint's among them
        members = _count(header.meta.get("metrics", {}))
        return TotalCost(None, None, None) if members is None else TotalCost(0.0, members, 0.0)
    if found is None:
        return TotalCost(None, None, _training(header))
    return TotalCost(found[HEAD], found[NETWORK], _training(header))


def _own(header: Header) -> dict[str, float] | None:
    """Passes through head and network of a posterior, and of the base that it is made of; None where they are unknown."""
    method = str(header.meta.get("method"))
    found = {HEAD: 0.0, NETWORK: 0.0}
    if method in _FREE:
        return found
    own = Cost.recorded(header.meta.get("metrics", {}))
    if own is None or own.through not in found:
        return None
    found[own.through] += own.passes
    for entry in header.inputs:
        if entry["role"] == "base" and method in _MADE_OF:
            path = header.input_path(entry)
            base = _own(read_header(path)) if path.is_file() else None
            if base is None:
                return None
            found = {name: passes + base[name] for name, passes in found.items()}
    return found


def _training(header: Header) -> float | None:
    """Gradient passes that the training of the checkpoint took; None where it is not known."""
    network = header.path.with_name("map.safetensors")
    return _count(read_header(network).meta) if network.is_file() else None


def _count(recorded: Mapping[str, Any]) -> float | None:
    passes = recorded.get("gradient_passes")
    return float(passes) if isinstance(passes, int | float) and not isinstance(passes, bool) else None
