"""What fit-laplace over a whole network will take of the memory, planned from measured sizes before it starts, in bytes.

Inputs are held as a whole. Beside them stands what needs most: the making of H, its covariance, or the draws that judge a prior
precision. Activations of an example are measured on the network (`theta.module.activation_bytes`), counts of copies are measured
peaks (benchmarks/network_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from bnncli import registry
from bnncli.inference.costs import NUM_DRAWS
from bnncli.lazy import torch
from bnncli.machine.memory import budget, require
from bnncli.network_curvature._rows import examples_at_once
from bnncli.targets.curvature_choice import HESSIAN, CurvatureChoice
from bnncli.targets.network import activation_bytes_of, pairs_at_once
from bnncli.theta.module import ModuleLayout

MOST_FULL = 2000  # parameters that full is taken for unasked: its factors take seconds
AUTOMATIC = ("full", "kron", "diag")  # what is taken unasked, the first that is quick and fits
_COPIES = 6  # of a structure's matrices, float64, at the peak of the covariance: as of a last layer's
_ROW_COPIES = 4  # of a block of rows of H: Jacobians by parameter, as one, their product with the root, its squares
_PRODUCT_COPIES = 10  # of a block's activations, with their derivatives along a direction, and what convolutions unfold
_GRAPH_COPIES = (
    5  # of a block's activations where layers' factors are made: as they are kept, unfolded, and their gradients
)
_SOLVER_COPIES = 9  # of P numbers for each draw, float64: of conjugate gradients, and what a product and whitening take
_VECTORS = 10  # of P numbers, float64
_BYTES_A_DRAW = 40  # of each parameter: noise, its product with the root and what that takes, theta in two precisions


@dataclass(frozen=True)
class NetworkPlan:
    """A fit, as its memory goes.

    Args:
        layout: of the chosen parameters, bound to the network.
        num_examples, num_held: of the training and the validation data, 0 without any.
        choice: what H is, and what is kept of it.
        structures: that can be had, from the one that says most of the posterior to the least.
        is_search: whether a prior precision is searched for on the validation data.
        num_drawn: draws that are made by conjugate gradients, 0 for none.
    """

    layout: ModuleLayout
    num_examples: int
    num_held: int
    choice: CurvatureChoice
    structures: tuple[str, ...]
    is_search: bool
    num_drawn: int = 0

    @property
    def input_bytes(self) -> int:
        """Of all inputs, as they are held."""
        return 4 * self.layout.num_features * (self.num_examples + self.num_held)

    def fit_bytes(self, structure: str, device: torch.device) -> int:
        """At the peak, the inputs with it."""
        size = self.layout.num_params
        held = 8 * (_VECTORS * size + 2 * self._elements(structure))
        work = max(self._hessian_bytes(structure, device), 8 * _COPIES * self._elements(structure) - held, 0)
        if self.is_search:
            work = max(work, _BYTES_A_DRAW * NUM_DRAWS * size + self._activation_bytes(self.num_held, device))
        drawn = 8 * _SOLVER_COPIES * self.num_drawn * size
        return self.input_bytes + held + max(work, drawn + self._activation_bytes(self.num_examples, device))

    def stored_bytes(self, structure: str) -> int:
        """Of the posterior's file: the matrices in float64, mean and network's parameters with them."""
        if self.num_drawn:
            return 4 * self.num_drawn * self.layout.num_params + 16 * self.layout.num_params
        return 8 * self._elements(structure) + 16 * self.layout.num_params

    def automatic_structure(self, device: torch.device) -> str:
        """The structure to fit when none was asked for; diag where none is quick and fits."""
        there = budget(device)
        for name in AUTOMATIC:
            is_quick = name != "full" or self.layout.num_params <= MOST_FULL or self.choice.kind == HESSIAN
            if name in self.structures and is_quick and self.fit_bytes(name, device) <= there:
                return name
        return next(name for name in reversed(AUTOMATIC) if name in self.structures)

    def require_fit(self, structure: str, device: torch.device) -> None:
        """Pass when the structure can be fitted. Raises DeviceError, naming the first that can, otherwise."""
        there = budget(device)
        fitting = [name for name in self.structures if self.fit_bytes(name, device) <= there]
        hint = f"use \0structure\0 {fitting[0]}, which fits" if fitting else "no structure fits: use fewer \0layers\0"
        if self.input_bytes > there:
            hint = "the inputs alone are larger: extract the features of fewer examples"
        what = f"a {structure} covariance of {self.layout.num_params:,} parameters"
        require(self.fit_bytes(structure, device), device, what=what, hint=hint)

    def _elements(self, structure: str) -> int:
        """Numbers in one copy of the structure's matrices."""
        if structure == "low-rank":
            return min(self.choice.rank, self.layout.num_params) * self.layout.num_params
        if structure == "subnetwork":
            return min(self.choice.size, self.layout.num_params) ** 2
        return int(registry.load_class("network_curvature", structure).num_elements(self.layout))

    def _activation_bytes(self, num_examples: int, device: torch.device) -> int:
        """Of a block of so many examples, or of as many as are worked on at once."""
        return min(num_examples, pairs_at_once(self.layout, device)) * activation_bytes_of(self.layout)

    def _hessian_bytes(self, structure: str, device: torch.device) -> int:
        """While H is made, beside what is held of it."""
        layout = self.layout
        if structure in ("full", "diag", "subnetwork"):
            width = layout.num_outputs * layout.num_params
            size = examples_at_once(layout, device, num_rows=layout.num_outputs, dtype=torch.float32)
            count = min(size, self.num_examples)
            return 4 * count * (_ROW_COPIES * width + layout.num_outputs * layout.widest)
        if structure == "low-rank":  # Lanczos' basis
            steps = min(layout.num_params, 3 * self.choice.rank + 20)
            count = min(self.num_examples, pairs_at_once(layout, device))
            return 8 * steps * layout.num_params + 4 * _PRODUCT_COPIES * count * layout.widest
        return 4 * _GRAPH_COPIES * min(self.num_examples, pairs_at_once(layout, device)) * layout.widest
