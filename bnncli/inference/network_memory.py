"""What fit-laplace over a whole network will take of the memory, planned from measured sizes before it starts, in bytes.

Inputs are held as a whole. Beside them stands what needs most: the making of H, its covariance, the draws that judge a prior
precision, the predictions for val. A block's work is measured on the network itself, on few examples and on more
(`theta.tensor_bytes`); what has the size of theta or of the structure's matrices is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bnncli import registry
from bnncli.inference.climb import CLIMBING_VECTORS
from bnncli.inference.costs import NUM_DRAWS
from bnncli.inference.linearised import noise_size, shared_by
from bnncli.inference.network_blocks import (
    first_use_bytes,
    gradient_bytes,
    kept_bytes,
    prediction_bytes,
    trying_bytes,
    with_kernels,
)
from bnncli.lazy import torch
from bnncli.machine.memory import LARGE_BLOCK, budget, require
from bnncli.targets.curvature_choice import HESSIAN, CurvatureChoice
from bnncli.targets.network import NetworkTarget
from bnncli.theta.module import ModuleLayout
from bnncli.theta.prior import Prior

MOST_FULL = 2000  # parameters that full is taken for unasked: its factors take seconds
AUTOMATIC = ("full", "kron", "diag")  # what is taken unasked, the first that is quick and fits
_COPIES = 6  # of a structure's matrices, float64, at the peak of the covariance: as of a last layer's
_FEWER_COPIES = {"full": 5}  # of those that hold fewer
_VECTORS = 6  # of P numbers, float64: theta at the start, the centre, the network's own, a gradient, and products
_SOLVER_COPIES = 9  # of P numbers for each draw, float64: of conjugate gradients, and what a product and whitening take
_MOST_TOGETHER = 8  # covariances of a search that are judged together: a grid of whole decades
_TOGETHER_VECTORS = 3  # of P numbers, float64, for each: curvatures, scales made of them, and variances
_KEPT_SHARE = 8  # one part in so many of the device, at most, is for what val's linearised logits are made of
_PROBED = 8, 4  # parts of a block of examples that its work is measured on


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
        is_climb: whether the mode is looked for.
        known: what the making of H takes of each structure that was measured.
    """

    layout: ModuleLayout
    num_examples: int
    num_held: int
    choice: CurvatureChoice
    structures: tuple[str, ...]
    is_search: bool
    num_drawn: int = 0
    is_climb: bool = False
    known: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def input_bytes(self) -> int:
        """Of all inputs and labels, as they are held."""
        return (4 * self.layout.num_features + 8) * (self.num_examples + self.num_held)

    def fit_bytes(self, structure: str, device: torch.device) -> int:
        """At the peak, the inputs with it."""
        return self._peak(structure, device, self.kept_bytes(structure, device))

    def _peak(self, structure: str, device: torch.device, kept: int) -> int:
        """The same while so many bytes are kept of val's linearised logits."""
        elements = self._elements(structure)
        beside = self.input_bytes + 8 * _VECTORS * self.layout.num_params + first_use_bytes(device)
        covariance = 8 * _FEWER_COPIES.get(structure, _COPIES) * elements
        if beside + covariance > budget(device):
            return beside + covariance  # too much, before anything is measured
        layout = self.layout
        work = [covariance, trying_bytes(layout), self._hessian_bytes(structure, device)]
        work.append(self._gradient_bytes(device, torch.float64))
        if self.is_search:
            noise = 8 * NUM_DRAWS * noise_size(layout, structure, NUM_DRAWS)
            together = (
                8 * _TOGETHER_VECTORS * min(_MOST_TOGETHER, shared_by(layout, structure, NUM_DRAWS)) * layout.num_params
            )
            judged = max(
                self._gradient_bytes(device, torch.float32), prediction_bytes(layout, self.num_held, structure, device)
            )
            work.append(16 * elements + noise + together + judged)
        if self.num_held:
            work.append(16 * elements + trying_bytes(layout))
            predicted = prediction_bytes(layout, self.num_held, structure, device)
            work.append(16 * elements + predicted)
        if self.num_drawn:
            drawn = 8 * _SOLVER_COPIES * self.num_drawn * layout.num_params
            work.append(8 * elements + drawn + self._gradient_bytes(device, torch.float32))
        if self.is_climb:
            rough = NetworkTarget.rough_structure
            whitening = 8 * self._elements(rough)
            climbing = 8 * CLIMBING_VECTORS * layout.num_params + 2 * whitening
            work.append(climbing + max(_COPIES * whitening, self._hessian_bytes(rough, device)))
            work.append(climbing + self._gradient_bytes(device, torch.float64))
        return beside + kept + max(work)

    def kept_bytes(self, structure: str, device: torch.device) -> int:
        """Of what val's linearised logits are made of, which all rounds of a search and all integrators share; 0 where it has no room."""
        needed, there = self.num_held * kept_bytes(self.layout, structure), budget(device)
        has_room = needed <= there // _KEPT_SHARE and self._peak(structure, device, needed) <= there
        return needed if has_room else 0

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

    def require_fit(self, structure: str, device: torch.device) -> int:
        """What the fit of a structure takes. Raises DeviceError, naming the first that fits, where that is too much."""
        there = budget(device)
        needed = self.fit_bytes(structure, device)
        if needed <= there:
            return needed
        fitting = [name for name in self.structures if self.fit_bytes(name, device) <= there]
        hint = f"use \0structure\0 {fitting[0]}, which fits" if fitting else "no structure fits: use fewer \0layers\0"
        if self.input_bytes > there:
            hint = "the inputs alone need more memory: extract the features of fewer examples"
        what = f"a {structure} covariance with {self.layout.num_params:,} parameters"
        require(needed, device, what=what, hint=hint)
        return needed

    def _elements(self, structure: str) -> int:
        """Numbers in one copy of the structure's matrices."""
        if structure == "low-rank":
            return min(self.choice.rank, self.layout.num_params) * self.layout.num_params
        if structure == "subnetwork":
            return min(self.choice.size, self.layout.num_params) ** 2
        return int(registry.load_class("network_curvature", structure).num_elements(self.layout))

    def _target(self, inputs: torch.Tensor, device: torch.device) -> NetworkTarget:
        """A target of inputs (n, D) and labels that are all the first class's."""
        likelihood, count = self.layout.likelihood, len(inputs)
        shape = (count,) if likelihood.is_exclusive else (count, likelihood.num_classes)
        labels = torch.zeros(shape, dtype=torch.int64 if likelihood.is_exclusive else torch.uint8, device=device)
        return NetworkTarget(inputs, labels, self.layout, Prior(1.0), choice=self.choice)

    def _hessian_bytes(self, structure: str, device: torch.device) -> int:
        """While H is made of a block of examples, what is kept of it with that."""
        curvature = registry.load_class("network_curvature", structure)
        steps = structure, getattr(curvature, "begins_with", structure)
        for step in steps:
            if step not in self.known:
                self.known[step] = self._measured(step, device)
        kind = max(self.known[step] for step in steps)
        size = self.layout.num_params
        basis = min(size, 3 * self.choice.rank + 20) * size if structure == "low-rank" else 0
        return kind + 8 * basis

    def _measured(self, structure: str, device: torch.device) -> int:
        """Of the first block of examples, from its work on fewer."""
        from bnncli.theta.tensor_bytes import growth

        curvature, layout = registry.load_class("network_curvature", structure), self.layout
        every = self._target(torch.zeros(1, layout.num_features).expand(self.num_examples, -1), device)
        own = registry.has_attribute("network_curvature", structure, "examples_at_once")
        at_once = curvature.examples_at_once(every) if own else every.rows_at_once(1, torch.float32)
        has_block = registry.has_attribute("network_curvature", structure, "one_block")
        theta = layout.trained().to(device)

        def work(count: int) -> None:
            target = self._target(torch.zeros(count, layout.num_features), device)
            made = curvature.one_block if has_block else target.curvature(structure).hessian
            made(target, theta)

        few, more = (max(least, at_once // part) for least, part in zip((1, 2), _PROBED, strict=True))
        work(1)  # what a network keeps from its first call on is no part of it
        # A part of the work may take somewhat fewer examples at once than the rest, in blocks just small enough to stay.
        small = LARGE_BLOCK * 8 / (7 * at_once)
        return with_kernels(growth(work, few, more, small=small), layout, at_once, device)

    def _gradient_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """Of a block of examples' gradient."""
        return gradient_bytes(self.layout, self.num_examples, device, dtype)
