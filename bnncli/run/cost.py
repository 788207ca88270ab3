"""What a posterior cost: passes over the training data, counted in gradients, and whether they went through the network.

One definition for all. A pass is as many gradients by theta of one example's log likelihood, each at one theta, as there are training
examples: E epochs of C chains, or of S draws a step, are E C or E S passes. A product with the Hessian counts as two passes; a curvature
pass (the Hessian, or a part of it, at one theta) as one through the head, and through a network as one for each logit, as that takes a
backward pass each. Passes that take no gradient (values, predictions, features) and what judges a posterior are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD, NETWORK = "head", "network"
PRODUCT_PASSES = 2.0  # of a product with the Hessian: there and back


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


def curvature_cost(num_outputs: int, *, is_last_layer: bool) -> float:
    """Passes of one curvature pass."""
    return 1.0 if is_last_layer else float(num_outputs)
