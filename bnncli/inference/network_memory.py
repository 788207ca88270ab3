"""Estimate memory of fits over whole networks from measured sizes, before they start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bnncli import registry
from bnncli.inference import elbo
from bnncli.inference.memory import NUM_DRAWS, draw_prediction_bytes, fit_bytes
from bnncli.inference.mode import CLIMBING_VECTORS
from bnncli.inference.prior_criterion import covariances_at_once, noise_size
from bnncli.lazy import torch
from bnncli.parameters.layouts import MatrixLayout
from bnncli.parameters.module import ModuleLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import draws_at_once, thetas_at_once
from bnncli.system.memory import LARGE_BLOCK, budget, require
from bnncli.targets.curvature_choice import HESSIAN, CurvatureChoice
from bnncli.targets.network import NetworkTarget, pairs_at_once

if TYPE_CHECKING:
    from bnncli.parameters.tensor_bytes import Growth
    from bnncli.structures.network_sums import Piece


# of a process on a CPU: libraries loaded on first use, their tables and kernels
_FIRST_USE = 20 * 2**20
# One part in this many of the largest layer is relaid out when tensors are at their peak (LeNet-5).
_LAID_OUT_AT_PEAK = 2
_HOLES = 2  # times what flows back to the layers: one to three (ResNet-20)
# vectors of P values, float64, while derivatives are probed: a Jacobian of two examples twice, and theta
_TRIED_VECTORS = 6
_TRIED_PASSES = 8  # per example, float32, and its gradient: two examples in float64, twice
_TRIED_PIECES = 8  # of the largest layer: gradients of two examples, stacked and summed, and their distance


def first_use_bytes(device: torch.device) -> int:
    """Return the bytes that a CPU process allocates on first use, regardless of sizes."""
    return _FIRST_USE if device.type == "cpu" else 0


def process_bytes(work: Growth, layout: ModuleLayout, num_examples: int, device: torch.device) -> int:
    """Return the process bytes while working on a block of examples, given what its tensors take.

    On a CPU, convolutions temporarily change the memory layout of their channels, and freed blocks that the C library
    does not return leave holes, in the end about as much again (measured: 70 MiB for 69 MiB of a ResNet-20's factors).
    """
    tensors = work.of(num_examples)
    if device.type != "cpu":
        return tensors
    laid_out = num_examples * layout.laid_out_bytes // _LAID_OUT_AT_PEAK
    return tensors + laid_out + work.holes(num_examples, LARGE_BLOCK)


def gradient_bytes(layout: ModuleLayout, num_pairs: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes of a gradient over num_pairs pairs of draw and example, less the gradient itself.

    In float64, this includes a float64 copy of the fixed parameters.
    """
    from bnncli.targets.network import pairs_at_once

    count = min(num_pairs, pairs_at_once(layout, device, dtype))
    work = replace(layout.working, fixed=max(0, layout.working.fixed - 4 * layout.num_params))
    beside = 8 * _num_frozen(layout) if dtype == torch.float64 else 0
    return beside + process_bytes(work.times(dtype.itemsize // 4), layout, count, device)


def prediction_bytes(layout: ModuleLayout, num_examples: int, structure: str, device: torch.device) -> int:
    """Return the bytes while logit covariances of num_examples are computed layer by layer, besides the posterior.

    The positions of Sigma's blocks are probed first, which takes trying_bytes. On a CPU, small blocks for what flows
    back to the layers leave holes.
    """
    from bnncli.structures.logit_gaussian import is_turned, largest_root
    from bnncli.structures.network_logits import block_size

    num_others, root = _num_beside_layers(layout), largest_root(structure, layout)
    count, each = block_size(layout, root, device, num_others)
    if is_turned(structure):
        root = root // _largest_module(layout) * largest_product(layout)
        each = block_size(layout, root, device, num_others)[1]
    holes = _HOLES * layout.num_outputs * layout.own_outputs if device.type == "cpu" else 0
    return 4 * (each + holes) * min(count, num_examples)


def probing_bytes(layout: ModuleLayout) -> int:
    """Return the bytes while derivatives are probed in float64 on two examples.

    Includes a float64 copy of the other parameters, a Jacobian, and gradients of the largest module.
    """
    tried = _TRIED_VECTORS * layout.num_params + _TRIED_PIECES * _largest_module(layout)
    return 8 * (_num_frozen(layout) + tried) + _TRIED_PASSES * layout.working.each


def _num_beside_layers(layout: ModuleLayout) -> int:
    """Return the number of parameters in theta that belong to no linear layer, convolution or norm, such as attention's own."""
    from bnncli.structures.network_sums import matrices_of, scales_of

    pieces: list[Piece] = [*matrices_of(layout), *scales_of(layout)]
    taken = {part.name for piece in pieces for part in piece.parts}
    return sum(part.place.stop - part.place.start for part in layout.parts if part.name not in taken)


def _num_frozen(layout: ModuleLayout) -> int:
    """Return the number of network parameters that are not in theta."""
    assert layout.network is not None
    return sum(value.numel() for value in layout.network.module.parameters()) - layout.num_params


def _largest_module(layout: ModuleLayout) -> int:
    """Return the number of chosen parameters in the module that has most."""
    from bnncli.parameters.module import module_places

    return max(place.stop - place.start for place in module_places(layout).values())


def logit_cache_bytes(layout: ModuleLayout, structure: str) -> int:
    """Return float32 values per example to keep linearised logits: inputs of layers called once, else derivatives."""
    from bnncli.parameters.module import module_places
    from bnncli.structures.logit_gaussian import is_turned

    once = _find_called_once(layout) if is_turned(structure) else {}
    sizes = {name: place.stop - place.start for name, place in module_places(layout).items()}
    each = (
        layout.num_outputs * once[name] + size // once[name] if name in once else layout.num_outputs * size
        for name, size in sizes.items()
    )
    return 4 * (layout.num_outputs + sum(each))


def largest_product(layout: ModuleLayout) -> int:
    """Return the size of the largest module that needs derivatives; linear layers called once, at one position, need none."""
    from bnncli.parameters.module import module_places

    once = _find_called_once(layout)
    return max(
        (place.stop - place.start for name, place in module_places(layout).items() if name not in once), default=0
    )


def _find_called_once(layout: ModuleLayout) -> dict[str, int]:
    """Return the outputs of each linear layer that is called once, at one position of an example."""
    shapes = {part.name.rpartition(".")[0]: part.shape for part in layout.parts if len(part.shape) == 2}
    return {name: shape[0] for name, shape in shapes.items() if layout.outputs_of_owners.get(name) == shape[0]}


MOST_FULL = 2000  # parameters up to which full is chosen automatically: its factors take seconds
AUTOMATIC = ("full", "kron", "diag")  # automatic choices; the first that is quick and fits
_COPIES = 6  # of a structure's matrices, float64, at the peak of the covariance, as for a last layer
_FEWER_COPIES = {"full": 5}  # structures that need fewer
_VECTORS = 6  # of P values, float64: theta at the start, the centre, the network's own, a gradient, and products
_SOLVER_COPIES = 9  # vectors of P values per draw, float64: conjugate gradients, a product, and whitening
_MOST_TOGETHER = 8  # covariances of a search judged together: a grid of whole decades
# vectors of P values per covariance, float64: curvatures, scales computed from them, and variances
_TOGETHER_VECTORS = 3
_KEPT_SHARE = 8  # at most one part in this many of the device holds what val's linearised logits are computed from
_PROBED = 8, 4  # fractions of a block of examples on which its memory is measured


@dataclass(frozen=True)
class NetworkPlan:
    """The memory plan of a fit.

    Args:
        layout: of the chosen parameters, bound to the network.
        num_examples, num_held: size of training and validation data, 0 without any.
        choice: what H is, and what is kept of it.
        structures: available structures, most to least expressive.
        is_search: whether a prior precision is searched for on the validation data.
        num_drawn: draws by conjugate gradients, or 0.
        is_climb: whether the mode is searched for.
        known: measured bytes to compute H, by structure.
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
        """Bytes of all inputs and labels."""
        return (4 * self.layout.num_features + 8) * (self.num_examples + self.num_held)

    def fit_bytes(self, structure: str, device: torch.device) -> int:
        """Return the peak bytes, including the inputs."""
        return self._peak(structure, device, self.kept_bytes(structure, device))

    def _peak(self, structure: str, device: torch.device, kept: int) -> int:
        """Return the peak bytes while `kept` bytes are held for val's linearised logits."""
        elements = self._elements(structure)
        beside = self.input_bytes + 8 * _VECTORS * self.layout.num_params + first_use_bytes(device)
        covariance = 8 * _FEWER_COPIES.get(structure, _COPIES) * elements
        if beside + covariance > budget(device):
            return beside + covariance  # too much even before anything is measured
        layout = self.layout
        work = [covariance, probing_bytes(layout), self._hessian_bytes(structure, device)]
        work.append(self._gradient_bytes(device, torch.float64))
        if self.is_search:
            noise = 8 * NUM_DRAWS * noise_size(layout, structure, NUM_DRAWS)
            together = (
                8
                * _TOGETHER_VECTORS
                * min(_MOST_TOGETHER, covariances_at_once(layout, structure, NUM_DRAWS))
                * layout.num_params
            )
            judged = max(
                self._gradient_bytes(device, torch.float32), prediction_bytes(layout, self.num_held, structure, device)
            )
            work.append(16 * elements + noise + together + judged)
        if self.num_held:
            work.append(16 * elements + probing_bytes(layout))
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
        """Return the bytes held for val's linearised logits, shared by search rounds and integrators; 0 if they do not fit."""
        needed, there = self.num_held * logit_cache_bytes(self.layout, structure), budget(device)
        has_room = needed <= there // _KEPT_SHARE and self._peak(structure, device, needed) <= there
        return needed if has_room else 0

    def stored_bytes(self, structure: str) -> int:
        """Return the bytes of the posterior's file: float64 matrices, mean, and the network's parameters."""
        if self.num_drawn:
            return 4 * self.num_drawn * self.layout.num_params + 16 * self.layout.num_params
        return 8 * self._elements(structure) + 16 * self.layout.num_params

    def automatic_structure(self, device: torch.device) -> str:
        """Return the structure to fit by default; diag if none is quick and fits."""
        there = budget(device)
        for name in AUTOMATIC:
            is_quick = name != "full" or self.layout.num_params <= MOST_FULL or self.choice.kind == HESSIAN
            if name in self.structures and is_quick and self.fit_bytes(name, device) <= there:
                return name
        return next(name for name in reversed(AUTOMATIC) if name in self.structures)

    def require_fit(self, structure: str, device: torch.device) -> int:
        """Return the bytes of a fit. Raises DeviceError, naming the first structure that fits, if this one does not."""
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
        """Return the size of one copy of the structure's matrices."""
        if structure == "low-rank":
            return min(self.choice.rank, self.layout.num_params) * self.layout.num_params
        if structure == "subnetwork":
            return min(self.choice.size, self.layout.num_params) ** 2
        return int(registry.load_class("network_curvature", structure).num_elements(self.layout))

    def _target(self, inputs: torch.Tensor, device: torch.device) -> NetworkTarget:
        """Return a target of inputs (n, D) whose labels are all the first class."""
        likelihood, count = self.layout.likelihood, len(inputs)
        shape = (count,) if likelihood.is_exclusive else (count, likelihood.num_classes)
        labels = torch.zeros(shape, dtype=torch.int64 if likelihood.is_exclusive else torch.uint8, device=device)
        return NetworkTarget(inputs, labels, self.layout, Prior(1.0), choice=self.choice)

    def _hessian_bytes(self, structure: str, device: torch.device) -> int:
        """Return the bytes while H is computed from a block of examples, including what is kept of it."""
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
        """Measure the bytes of the first block of examples, extrapolated from smaller ones."""
        from bnncli.parameters.tensor_bytes import measure_growth

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
        work(1)  # exclude what a network allocates on its first call
        # Parts of the work may use somewhat fewer examples at once than the rest, in blocks just small enough.
        small = LARGE_BLOCK * 8 / (7 * at_once)
        return process_bytes(measure_growth(work, few, more, small=small), layout, at_once, device)

    def _gradient_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return the bytes of a block of examples' gradient."""
        return gradient_bytes(self.layout, self.num_examples, device, dtype)


_CHAIN_VECTORS = 14  # of P values, float64, per chain within a trajectory: two states, momentum, and products
_JUDGED_VECTORS = 6  # of P values, float64, per weighted draw: theta and intermediate values
_MADE_VECTORS = 4  # of P values, float64, per draw generated to predict with


@dataclass(frozen=True)
class NetworkDraws:
    """The memory plan of draws over a network.

    Args:
        layout: of the chosen parameters, bound to the network.
        num_examples, num_held: size of training and validation data, 0 without any.
        base_bytes: of the base's file, float64, or of what replaces it.
    """

    layout: ModuleLayout
    num_examples: int
    num_held: int
    base_bytes: int

    def sampling_bytes(self, device: torch.device, *, num_chains: int, num_draws: int) -> int:
        """Return the bytes for chains with num_draws draws each, which are read from their file to be judged."""
        size = self.layout.num_params
        chains = 8 * _CHAIN_VECTORS * num_chains * size
        moving = chains + gradient_bytes(self.layout, num_chains * self.num_examples, device, torch.float32)
        work = max(moving, 8 * num_chains * size) + 4 * num_chains * num_draws * size
        return self._beside(device) + max(work, probing_bytes(self.layout))

    def require_sampling(self, device: torch.device, *, num_chains: int, num_draws: int) -> int:
        """Return the bytes for chains. Raises DeviceError, naming how many fit, if these do not."""

        def needed(count: int) -> int:
            return self.sampling_bytes(device, num_chains=count, num_draws=num_draws)

        there = budget(device)
        fitting = [count for count in range(1, num_chains) if needed(count) <= there]
        hint = f"use at most \0chains\0 {fitting[-1]}" if fitting else "no chain fits: use fewer \0layers\0"
        what = f"hmc with {num_chains} chains and {self.layout.num_params} parameters"
        require(needed(num_chains), device, what=what, hint=hint)
        return needed(num_chains)

    def refinement_bytes(
        self, device: torch.device, *, training: int, num_drawn: int, num_judging: int, num_predicting: int
    ) -> int:
        """Return the bytes to refine with a flow.

        Args:
            training: training_bytes of the flow.
            num_drawn: draws per step.
            num_judging: draws for the ELBO.
            num_predicting: draws to predict the validation data.
        """
        layout, size = self.layout, self.layout.num_params
        step = training + gradient_bytes(layout, num_drawn * self.num_examples, device, torch.float32)
        block = gradient_bytes(layout, pairs_at_once(layout, device), device, torch.float32)
        judging = weighted_draw_bytes(size, num_draws=num_judging) + block
        work = [step, judging, probing_bytes(layout)]
        if self.num_held:
            noise = min(num_predicting, draws_at_once(size))
            work.append(size * (4 * num_predicting + 8 * noise + 8 * _MADE_VECTORS * min(noise, thetas_at_once(size))))
            work.append(4 * size * num_predicting + block)
        return self._beside(device) + max(work)

    def require_refinement(self, device: torch.device, **sizes: int) -> int:
        """Return the bytes of a flow; sizes as in refinement_bytes. Raises DeviceError if it does not fit."""
        needed = self.refinement_bytes(device, **sizes)
        hint = "use fewer \0elbo_draws\0, a shorter \0length\0 or a smaller \0subspace\0"
        require(needed, device, what=f"refining a Gaussian of {self.layout}", hint=hint)
        return needed

    def _beside(self, device: torch.device) -> int:
        """Return the bytes of the inputs and of the base: as read, with derived values, and in a second precision."""
        inputs = (4 * self.layout.num_features + 8) * (self.num_examples + self.num_held)
        return first_use_bytes(device) + inputs + 5 * self.base_bytes // 2


def weighted_draw_bytes(num_params: int, *, num_draws: int) -> int:
    """Return the bytes of weighted draws (S, P), in blocks, besides a block of examples."""
    held = min(num_draws, draws_at_once(num_params))
    return 8 * num_params * (held + _JUDGED_VECTORS * min(held, elbo.draws_weighted_at_once(num_params)))


_BATCH_VECTORS = 4  # per minibatch logit of each theta
_FULL_STEPS = 32  # full-data steps prepared at once, as in bnncli.inference.refine
_LAID_OUT = 2**26  # batches and draws of several steps prepared at once on a CPU, as in bnncli.training.loop


@dataclass(frozen=True)
class StochasticFitPlan:
    """The memory plan of a stochastic fit.

    Args:
        num_vectors: vectors of P values, float64: parameters, gradients, optimizer and resume states.
        num_drawn: thetas whose gradients a step takes.
        batch_size: examples per step; all or more for no minibatches.
        num_kept: draws (float32) that it returns.
        num_predicting: draws that predict val.
        num_judging: draws whose log joint is computed.
    """

    num_vectors: int
    num_drawn: int
    batch_size: int
    num_kept: int = 0
    num_predicting: int = 0
    num_judging: int = 0

    def head_bytes(self, layout: MatrixLayout, num_examples: int) -> int:
        """Return the bytes for a last layer."""
        batch = min(self.batch_size, num_examples) * (
            layout.num_features + _BATCH_VECTORS * self.num_drawn * layout.num_outputs
        )
        is_whole = self.batch_size >= num_examples
        step = 4 * batch * (not is_whole) + self._laid_out(layout.num_params, layout.num_features, num_examples)
        used = draw_prediction_bytes(layout.num_params, num_used=max(self.num_predicting, 1), num_stored=self.num_kept)
        judging = fit_bytes("diag", layout, num_draws=self.num_judging)
        return (
            8 * self.num_vectors * layout.num_params + 4 * self.num_kept * layout.num_params + max(step, used, judging)
        )

    def network_bytes(self, layout: ModuleLayout, num_examples: int, num_held: int, device: torch.device) -> int:
        """Return the bytes for a network's parameters, including its inputs."""
        from bnncli.targets.network import pairs_at_once  # imports torch

        size = layout.num_params
        inputs = (4 * layout.num_features + 8) * (num_examples + num_held)
        pairs = self.num_drawn * min(self.batch_size, num_examples)
        block = gradient_bytes(layout, pairs_at_once(layout, device), device, torch.float32)
        laid_out = self._laid_out(size, layout.num_features, num_examples)
        work = [gradient_bytes(layout, pairs, device, torch.float32) + laid_out, probing_bytes(layout)]
        if num_held:
            work.append(
                draw_prediction_bytes(size, num_used=max(self.num_predicting, 1), num_stored=self.num_kept) + block
            )
        if self.num_judging:
            work.append(draw_prediction_bytes(size, num_used=self.num_judging) + block)
        held = 8 * self.num_vectors * size + 4 * self.num_kept * size
        return first_use_bytes(device) + inputs + held + max(work)

    def _laid_out(self, num_params: int, num_features: int, num_examples: int) -> int:
        """Return the bytes for batches and noise of several steps, or of one large one."""
        noise = self.num_drawn * num_params
        if self.batch_size >= num_examples:
            return 4 * max(noise, min(_LAID_OUT // 4, _FULL_STEPS * noise))
        batch, num_steps = self.batch_size * num_features, -(-num_examples // self.batch_size)
        return 4 * max(noise + batch, min(_LAID_OUT // 4, num_steps * (noise + batch)))
