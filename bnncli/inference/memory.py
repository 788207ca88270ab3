"""Estimate the bytes of a fit before it starts, and refuse what does not fit.

A fit holds its inputs, some copies of its structure's matrices, and some vectors of P values. Over a network it also
passes a block of examples through it; blocks over a last layer's features take a few MB.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout, MatrixLayout, NetworkLayout, ParamLayout
from bnncli.parameters.module import ModuleLayout, module_places
from bnncli.posteriors import draws_at_once, thetas_at_once
from bnncli.system.memory import budget, is_large, require
from bnncli.system.workers import team
from bnncli.targets.curvature_choice import HESSIAN, RANKED, CurvatureChoice
from bnncli.targets.network import NetworkTarget, activation_bytes_of, pairs_at_once
from bnncli.targets.target import rough_structure

if TYPE_CHECKING:
    import torch

    from bnncli.structures.network_sums import Piece


NUM_DRAWS = 128  # per candidate of a search, common to all candidates so that their noise cancels in comparisons
MAX_FULL_PRECONDITIONER = 2048  # parameters; up to here a full Hessian costs less than the iterations it saves
# Copies of a structure's matrices at the peak of a fit, float64. A full matrix of many rows is factored in panels; if
# its rows are spread over workers: sums of pairs, part of the panels, and the root.
_COPIES, _PANEL_COPIES, _SPREAD_COPIES = 6, 4, 2.5
_SPAN_COPIES = 5  # of the features by examples matrix: float64 features, their factors, the basis
# Vectors of P values, float64.
_MODE_VECTORS = 10  # in the mode search
_CHAIN_VECTORS = 16  # per chain within a trajectory
_COMPLETED_VECTORS = 6  # per chain while a draw in the span is completed to all of theta
_THETA_VECTORS = 5  # per draw while theta is computed from noise
_NETWORK_VECTORS = 16  # of a network: theta, gradients, and the check of its derivatives in float64
_TOGETHER_VECTORS = 24  # of covariances that a search judges together
_STEPS = 20  # of a low-rank fit, beyond three per eigenvector
_SOLVER_VECTORS = 9  # per draw by conjugate gradients
_CLIMBING_VECTORS = 56  # of a network's mode: twenty pairs of L-BFGS, two positions with gradients
# Bytes a value, in two precisions.
_DRAW_BYTES = 32  # per parameter of a draw: noise, theta in two precisions, and one intermediate product
_JUDGED_BYTES = 16  # per parameter of a chain's draw: as read, in float64, and half-chains split
_LAYER_BYTES = 40  # of refine: two precisions, gradient, Adam's two, products, resume states
_TRAINING_DRAW_BYTES = 100  # per parameter: stored by a step through the layers for its gradient
_DIRECTION_BYTES = 80  # per parameter: three float64 blocks, their factors and images
_BASE_COPIES = 2.5  # of a base's file: as read, with derived values, and in a second precision
# Latent binary networks and minibatches, float32.
_WEIGHT_VECTORS = 40  # per weight: factors, gradients, Adam's moments, and resume states
_FLOW_VECTORS = 10  # per parameter of its flows
_WAITING_VECTORS = 14  # per parameter of a network that waits its turn or is done: starts, resume states, results
_ACTIVATION_VECTORS = 10  # per activation of a batch
_SCALED_VECTORS = 3  # per input of a layer in a batch, after scaling by multipliers
_BATCH_VECTORS = 4  # per minibatch logit of each draw
_HOLES = {"cpu": 2}  # factor on a network's block: holes between freed tensors, which a GPU's allocator hardly leaves


def structures() -> list[str]:
    """Return all structures of a last layer, most to least expressive."""
    return registry.in_order("curvature")


def num_elements(structure: str, layout: ParamLayout) -> int:
    """Return the size of one copy of the structure's matrices."""
    kind = "network_curvature" if isinstance(layout, ModuleLayout) else "curvature"
    return int(registry.load_class(kind, structure).num_elements(layout))


def fit_bytes(structure: str, layout: MatrixLayout, *, num_draws: int = 0, whole: MatrixLayout | None = None) -> int:
    """Return the bytes to fit a Gaussian of this structure to a last layer, with `num_draws` draws at once to judge it.

    Args:
        whole: layout of all of theta, if `layout` is the span of the features; draws are of all of theta.
    """
    size = layout.num_params
    rough = num_elements(rough_structure(layout.num_outputs), layout)
    matrices = _copies(structure, layout) * max(num_elements(structure, layout), rough)
    if size <= MAX_FULL_PRECONDITIONER:
        matrices += 2 * size**2
    drawn = _DRAW_BYTES * num_draws * (whole or layout).num_params
    return round(8 * (matrices + _MODE_VECTORS * size + _SPAN_COPIES * _basis_elements(layout, whole)) + drawn)


def _copies(structure: str, layout: ParamLayout) -> float:
    """Return the number of copies of a structure's matrices at the peak of a fit, per worker."""
    if structure != structures()[0] or not is_large(layout.num_params):
        return _COPIES
    others = team()
    is_spread = others is not None and others.size > 1 and not isinstance(layout, ModuleLayout)
    return _SPREAD_COPIES if is_spread else _PANEL_COPIES


def has_room_whole(layout: ParamLayout, device: torch.device | str) -> bool:
    """Return whether a full Hessian and its covariance fit on one device; else the rows are spread over the workers."""
    return 8 * _PANEL_COPIES * layout.num_params**2 <= budget(device)


def _basis_elements(layout: MatrixLayout, whole: MatrixLayout | None) -> int:
    """Return the size of the basis of the span; 0 if the layout is all of theta."""
    return 0 if whole is None else whole.num_features * layout.num_features


def sampling_bytes(structure: str, layout: MatrixLayout, *, num_chains: int, whole: MatrixLayout | None = None) -> int:
    """Return the bytes for chains whitened by a Gaussian of this structure: its fit, then the states of the chains."""
    chain = _CHAIN_VECTORS * layout.num_params + (_COMPLETED_VECTORS * whole.num_params if whole else 0)
    return fit_bytes(structure, layout, whole=whole) + 8 * num_chains * chain


def refinement_bytes(
    structure: str,
    layout: MatrixLayout,
    *,
    num_draws: int,
    training: int = 0,
    whole: MatrixLayout | None = None,
    elements: int | None = None,
) -> int:
    """Return the bytes to refine a stored Gaussian: as read, in two precisions; training, then draws to judge it.

    Args:
        elements: size of the stored covariance, for structures without a curvature.
    """
    matrices = (num_elements(structure, layout) if elements is None else elements) + _basis_elements(layout, whole)
    return 20 * matrices + max(training, _DRAW_BYTES * num_draws * (whole or layout).num_params)


def training_bytes(layout: ClassifierLayout, *, num_layer_params: int, num_draws: int, batch_size: int = 0) -> int:
    """Return the bytes to train a flow.

    Args:
        num_layer_params: parameters in all layers.
        num_draws: draws per step.
        batch_size: of minibatches; 0 if a step uses all data, in blocks.
    """
    batch = layout.num_features + _BATCH_VECTORS * num_draws * layout.num_outputs
    draws = _TRAINING_DRAW_BYTES * num_draws * layout.num_params
    return _LAYER_BYTES * num_layer_params + draws + 4 * batch_size * batch


def subspace_bytes(num_params: int, num_directions: int) -> int:
    """Return the bytes for directions in whitened coordinates: found from three times as many, then in two precisions."""
    return _DIRECTION_BYTES * num_params * num_directions


def latent_bytes(
    layout: NetworkLayout, *, num_repeats: int, batch_size: int, num_flow_params: int = 0, num_waiting: int = 0
) -> int:
    """Return the bytes of a latent binary fit.

    Args:
        num_repeats: networks at once.
        num_flow_params: flow parameters per network.
        num_waiting: networks of all workers, if they are fitted in turns.
    """
    waiting = _WAITING_VECTORS * (layout.num_params + num_flow_params)
    vectors = _WEIGHT_VECTORS * layout.num_params + _FLOW_VECTORS * num_flow_params
    scaled = _SCALED_VECTORS * sum(layout.sizes[:-1]) * (num_flow_params > 0)
    activations = _ACTIVATION_VECTORS * sum(layout.sizes[1:]) + scaled
    training = num_repeats * (vectors + batch_size * activations)
    return 4 * (training + num_waiting * waiting) + 8 * batch_size * layout.num_features


def stored_bytes(structure: str, layout: MatrixLayout, *, whole: MatrixLayout | None = None) -> int:
    """Return the bytes of a Gaussian's file: float64 matrices, float32 Hessian, mean and head."""
    return 12 * num_elements(structure, layout) + 8 * _basis_elements(layout, whole) + 12 * (whole or layout).num_params


def made_draw_bytes(num_params: int, num_draws: int) -> int:
    """Return the bytes while draws of theta are computed from noise, in blocks."""
    noise = min(num_draws, draws_at_once(num_params))
    return 8 * num_params * (noise + _THETA_VECTORS * min(noise, thetas_at_once(num_params)))


def draw_prediction_bytes(num_params: int, *, num_used: int, num_stored: int = 0) -> int:
    """Return the bytes to predict with draws of theta.

    float32: the stored draws, the chosen ones if not all are used, and matrices of these with the biases. Generated
    draws also need noise and theta of a part of them in float64.

    Args:
        num_used: draws used to predict.
        num_stored: draws of a samples posterior; 0 if draws are generated.
    """
    copies = 1 if num_used == num_stored else 2
    made = 0 if num_stored else made_draw_bytes(num_params, num_used)
    return 4 * num_params * (num_stored + copies * num_used) + made


def draw_storage_bytes(num_params: int, num_draws: int) -> int:
    """Return the bytes on disk of a sampler's draws: while sampling, and in the artifact."""
    return 2 * num_draws * (4 * num_params + 64)


def require_fit(structure: str, layout: MatrixLayout, device: torch.device | str, **sizes: Any) -> None:
    """Raise DeviceError, naming the largest structure that fits, if this one does not."""
    there = budget(device)
    fitting = [name for name in structures() if fit_bytes(name, layout, **sizes) <= there]
    hint = (
        f"use \0structure\0 {fitting[0]}, the largest that fits" if fitting else "no structure fits: use fewer features"
    )
    what = f"a {structure} covariance with {layout.num_params} parameters"
    require(fit_bytes(structure, layout, **sizes), device, what=what, hint=hint)


def require_refinement(
    structure: str,
    layout: MatrixLayout,
    device: torch.device | str,
    *,
    training: int = 0,
    elements: int | None = None,
    **sizes: Any,
) -> None:
    """Raise DeviceError, naming what fits, if a flow on a Gaussian of this structure does not.

    Args:
        training: training_bytes of the flow.
        elements, sizes: as in refinement_bytes.
    """
    there = budget(device)
    sizes = {**sizes, "training": training}
    fitting = [name for name in structures() if refinement_bytes(name, layout, **sizes) <= there]
    less = "use \0flow\0 radial" if training > there else "use fewer \0elbo_draws\0"
    hint = f"refine a base fitted with fit-laplace \0structure\0 {fitting[0]}" if fitting else less
    needed = refinement_bytes(structure, layout, **sizes, elements=elements)
    require(needed, device, what=f"refining a {structure} Gaussian with {layout.num_params} parameters", hint=hint)


def require_draws(
    num_params: int, device: torch.device | str, *, num_used: int, num_stored: int = 0, option: str | None = None
) -> None:
    """Check that draws of theta fit on the device, and stored ones on the CPU, where they are read.

    Args:
        num_params, num_used, num_stored: as in draw_prediction_bytes.
        option: option that limits how many are used.

    Raises:
        DeviceError: they do not fit; names how many do, if any.
    """
    what = f"{num_stored or num_used} draws with {num_params} parameters"
    fewer = "reduce the number of draws: hmc with fewer \0chains\0 or \0draws\0" if num_stored else None
    if str(device) != "cpu":
        require(4 * num_stored * num_params, "cpu", what=f"reading {what}", hint=fewer)

    def needed(count: int) -> int:
        return draw_prediction_bytes(num_params, num_used=count, num_stored=num_stored)

    most = bisect.bisect_right(range(1, num_used), budget(device), key=needed) if option is not None else 0
    require(needed(num_used), device, what=what, hint=f"use at most {option} {most}" if most else fewer)


def require_latent(
    layout: NetworkLayout,
    device: torch.device | str,
    *,
    num_repeats: int,
    hint: str,
    most_at_once: int | None = None,
    **sizes: int,
) -> None:
    """Raise DeviceError with the hint if a latent binary fit does not fit; sizes as in latent_bytes.

    Args:
        most_at_once: networks that workers fit at once, if they take turns.
    """

    def needed(count: int) -> int:
        if most_at_once is None:
            return latent_bytes(layout, num_repeats=count, **sizes)
        return latent_bytes(layout, num_repeats=min(count, most_at_once), num_waiting=count, **sizes)

    there, first = budget(device), most_at_once or 1
    most = first + (there - needed(first)) // (needed(first + 1) - needed(first))
    what = f"fit-lbbnn with {num_repeats} networks of {layout.num_params} parameters"
    if num_repeats == 1:
        what = f"fit-lbbnn with {layout.num_params} parameters"
    elif most > 0:
        hint = f"{hint}, at most {most} fit at once"
    require(needed(num_repeats), device, what=what, hint=hint)


def block_bytes(layout: ModuleLayout, device: torch.device, num_pairs: int, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a gradient over a block of as many of `num_pairs` pairs of draw and example as it holds."""
    pairs = min(num_pairs, pairs_at_once(layout, device, dtype))
    return _HOLES.get(device.type, 1) * pairs * activation_bytes_of(layout, dtype)


def logit_block_bytes(layout: ModuleLayout, device: torch.device, num_examples: int, structure: str) -> int:
    """Return the bytes of a block of at most `num_examples` while their logits' covariances are computed layer by layer."""
    from bnncli.structures.logit_gaussian import is_turned, largest_root
    from bnncli.structures.network_logits import block_size
    from bnncli.structures.network_sums import matrices_of, scales_of

    pieces: list[Piece] = [*matrices_of(layout), *scales_of(layout)]
    taken = {part.name for piece in pieces for part in piece.parts}
    num_others = sum(part.place.stop - part.place.start for part in layout.parts if part.name not in taken)
    root = largest_root(structure, layout)
    count, each = block_size(layout, root, device, num_others)
    if is_turned(structure):  # linear layers that an example calls once need no derivatives
        once, sizes = _find_called_once(layout), _module_sizes(layout)
        left = max((size for name, size in sizes.items() if name not in once), default=0)
        each = block_size(layout, root // max(sizes.values()) * left, device, num_others)[1]
    return 4 * each * min(count, num_examples)


def logit_cache_bytes(layout: ModuleLayout, structure: str) -> int:
    """Return the bytes per example to keep linearised logits: inputs of layers called once, else derivatives, float32."""
    from bnncli.structures.logit_gaussian import is_turned

    once = _find_called_once(layout) if is_turned(structure) else {}
    each = (
        layout.num_outputs * once[name] + size // once[name] if name in once else layout.num_outputs * size
        for name, size in _module_sizes(layout).items()
    )
    return 4 * (layout.num_outputs + sum(each))


def _module_sizes(layout: ModuleLayout) -> dict[str, int]:
    """Return the number of chosen parameters of each module."""
    return {name: place.stop - place.start for name, place in module_places(layout).items()}


def _find_called_once(layout: ModuleLayout) -> dict[str, int]:
    """Return the outputs of each linear layer that is called once, at one position of an example."""
    shapes = {part.name.rpartition(".")[0]: part.shape for part in layout.parts if len(part.shape) == 2}
    return {name: shape[0] for name, shape in shapes.items() if layout.outputs_of_owners.get(name) == shape[0]}


def input_bytes(layout: ModuleLayout, num_inputs: int) -> int:
    """Return the bytes of inputs and labels."""
    return (4 * layout.num_features + 8) * num_inputs


def network_bytes(layout: ModuleLayout, num_inputs: int, *, is_exact: bool = False) -> int:
    """Return the bytes of inputs, labels and the vectors that any work over a network holds, and of other weights in float64.

    Args:
        is_exact: whether the work takes values in float64, besides the checks.
    """
    assert layout.network is not None
    is_copied = is_exact or layout.network.check_dtype == torch.float64
    num_frozen = sum(value.numel() for value in layout.network.module.parameters()) - layout.num_params
    return input_bytes(layout, num_inputs) + 8 * (is_copied * num_frozen + _NETWORK_VECTORS * layout.num_params)


MOST_FULL = 2000  # parameters up to which full is chosen automatically for a network: its factors take seconds
AUTOMATIC = ("full", "kron", "diag")  # automatic choices for a network; the first that is quick and fits
_FITTING_RANK = 64  # of Kronecker factors that do not fit whole
LEAST_VAL = 1000  # examples of val that a search reads if it does not read all
_MOST_JACOBIANS = {"cpu": 2**31, "cuda": 2**38}  # values of the Jacobians of val: about a minute on one core
_MOST_NODES = 24  # precisions at which a search computes covariances of the logits
_KEPT_SHARE = 8  # at most one part in this many of the device holds what val's linearised logits are computed from


@dataclass(frozen=True)
class NetworkPlan:
    """The memory plan of a fit over a network.

    Args:
        layout: of the chosen parameters, bound to the network.
        num_examples, num_held: size of training and validation data, 0 without any.
        choice: what H is, and what is kept of it.
        structures: available structures, most to least expressive.
        is_search: whether a prior precision is searched for on the validation data.
        num_drawn: draws by conjugate gradients, or 0.
        is_climb: whether the mode is searched for.
    """

    layout: ModuleLayout
    num_examples: int
    num_held: int
    choice: CurvatureChoice
    structures: tuple[str, ...]
    is_search: bool
    num_drawn: int = 0
    is_climb: bool = False

    def fit_bytes(self, structure: str, device: torch.device) -> int:
        """Return the peak bytes: what is held, and the covariance or, beside H and its covariance, the work on blocks."""
        from bnncli.structures.logit_gaussian import is_by_layer

        layout, elements = self.layout, self._elements(structure)
        held = network_bytes(layout, self.num_examples + self.num_held, is_exact=self.is_climb)
        covariance = round(8 * _copies(structure, layout) * elements)
        if held + covariance > budget(device):
            return held + covariance  # too much even before anything is measured
        vectors = max(_TOGETHER_VECTORS * self.is_search, _SOLVER_VECTORS * self.num_drawn)
        if self.is_search and not is_by_layer(structure):
            vectors += NUM_DRAWS  # noise
        if structure == "low-rank":
            vectors = max(vectors, 3 * self.choice.low_rank + _STEPS)
        if self.is_climb:
            whitening = self._elements(NetworkTarget.rough_structure)
            covariance = max(covariance, 8 * (_COPIES + 2) * whitening + 8 * _CLIMBING_VECTORS * layout.num_params)
            vectors = max(vectors, _CLIMBING_VECTORS)
        pairs = min(self.num_examples, pairs_at_once(layout, device))
        of_hessian = block_bytes(layout, device, pairs) + _HOLES.get(device.type, 1) * 4 * pairs * layout.own_outputs
        block = max(of_hessian, block_bytes(layout, device, self.num_examples, torch.float64))
        if self.num_held:
            block = max(block, logit_block_bytes(layout, device, self.num_held, structure))
        return held + max(covariance, 8 * (2 * elements + vectors * layout.num_params) + block)

    def num_judged(self, structure: str, device: torch.device) -> int:
        """Return how many examples of val choose the prior precision and measure the fit: fewer than all if passes take minutes."""
        from bnncli.structures.logit_gaussian import is_by_layer

        if not is_by_layer(structure):
            return self.num_held
        most = _MOST_JACOBIANS.get(device.type, _MOST_JACOBIANS["cpu"])
        return min(self.num_held, max(LEAST_VAL, 4 * most // logit_cache_bytes(self.layout, structure)))

    def kept_bytes(self, structure: str, device: torch.device) -> int:
        """Return the bytes held for val's linearised logits, shared by search rounds and integrators; 0 if they do not fit."""
        needed = self.num_judged(structure, device) * logit_cache_bytes(self.layout, structure)
        return self._affordable(needed, structure, device)

    def path_bytes(self, structure: str, device: torch.device) -> int:
        """Return the bytes held for the covariances of val's logits at several precisions; 0 if not needed, or they do not fit."""
        from bnncli.structures.logit_gaussian import is_by_layer

        if not self.is_search or not is_by_layer(structure) or self.kept_bytes(structure, device):
            return 0
        each = 8 * _MOST_NODES * self.layout.num_outputs**2
        return self._affordable(self.num_judged(structure, device) * each, structure, device)

    def _affordable(self, needed: int, structure: str, device: torch.device) -> int:
        there = budget(device)
        return needed if needed <= min(there // _KEPT_SHARE, there - self.fit_bytes(structure, device)) else 0

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
            return needed + self.kept_bytes(structure, device) + self.path_bytes(structure, device)
        fitting = [name for name in self.structures if self.fit_bytes(name, device) <= there]
        hint = f"use \0structure\0 {fitting[0]}, which fits" if fitting else "no structure fits: use fewer \0layers\0"
        ranked = replace(self, choice=replace(self.choice, rank=_FITTING_RANK))
        if structure in ("kron", "ekfac") and self.choice.rank is None and ranked.fit_bytes(structure, device) <= there:
            hint = f"add \0rank\0 {_FITTING_RANK} to \0structure\0 {structure}, which fits"
        if input_bytes(self.layout, self.num_examples + self.num_held) > there:
            hint = "the inputs alone need more memory: extract the features of fewer examples"
        what = f"a {structure} covariance with {self.layout.num_params:,} parameters"
        require(needed, device, what=what, hint=hint)
        return needed

    def _elements(self, structure: str) -> int:
        """Return the size of one copy of the structure's matrices."""
        if structure == "low-rank":
            return min(self.choice.low_rank, self.layout.num_params) * self.layout.num_params
        if structure == "subnetwork":
            return min(self.choice.size, self.layout.num_params) ** 2
        if structure in RANKED:
            return int(registry.load_class("network_curvature", structure).num_elements(self.layout, self.choice.rank))
        return num_elements(structure, self.layout)


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
        chain = max(8 * _CHAIN_VECTORS + 4 * num_draws, _JUDGED_BYTES * num_draws)
        chains = num_chains * self.layout.num_params * chain
        return self._held + chains + block_bytes(self.layout, device, num_chains * self.num_examples)

    def require_sampling(self, device: torch.device, *, num_chains: int, num_draws: int) -> int:
        """Return the bytes for chains. Raises DeviceError, naming how many fit, if these do not."""

        def needed(count: int) -> int:
            return self.sampling_bytes(device, num_chains=count, num_draws=num_draws)

        fitting = bisect.bisect_right(range(1, num_chains), budget(device), key=needed)
        hint = f"use at most \0chains\0 {fitting}" if fitting else "no chain fits: use fewer \0layers\0"
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
        size, num_predicting = self.layout.num_params, num_predicting * (self.num_held > 0)
        drawn = made_draw_bytes(size, max(num_judging, num_predicting)) + 4 * size * num_predicting
        block = block_bytes(self.layout, device, num_drawn * self.num_examples)
        return self._held + max(
            training + block, drawn + block_bytes(self.layout, device, num_judging * self.num_examples)
        )

    def require_refinement(self, device: torch.device, **sizes: int) -> int:
        """Return the bytes of a flow; sizes as in refinement_bytes. Raises DeviceError if it does not fit."""
        needed = self.refinement_bytes(device, **sizes)
        hint = "use fewer \0elbo_draws\0, a shorter \0length\0 or a smaller \0subspace\0"
        require(needed, device, what=f"refining a Gaussian of {self.layout}", hint=hint)
        return needed

    @property
    def _held(self) -> int:
        """Return the bytes of the inputs, of vectors, and of the base."""
        return network_bytes(self.layout, self.num_examples + self.num_held) + round(_BASE_COPIES * self.base_bytes)


_FULL_STEPS = 32  # full-data steps prepared at once, as in bnncli.inference.refine
_PREPARED = 2**26  # bytes of batches and draws of several steps prepared at once on a CPU, as in bnncli.training.loop


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

    def fit_bytes(self, layout: ClassifierLayout, num_examples: int, num_held: int, device: torch.device) -> int:
        """Return the bytes for a last layer, or for a network's parameters including its inputs."""
        size, batch = layout.num_params, min(self.batch_size, num_examples)
        is_whole = self.batch_size >= num_examples
        one = 4 * (self.num_drawn * size + batch * layout.num_features * (not is_whole))
        num_steps = _FULL_STEPS if is_whole else -(-num_examples // self.batch_size)
        step = max(one, min(_PREPARED, num_steps * one))
        used = draw_prediction_bytes(size, num_used=max(self.num_predicting, 1), num_stored=self.num_kept)
        judging = draw_prediction_bytes(size, num_used=self.num_judging) if self.num_judging else 0
        held = 8 * self.num_vectors * size + 4 * self.num_kept * size
        if not isinstance(layout, ModuleLayout):
            return held + max(step + 4 * batch * _BATCH_VECTORS * self.num_drawn * layout.num_outputs, used, judging)
        held += network_bytes(layout, num_examples + num_held)
        block = block_bytes(layout, device, max(self.num_drawn * batch, (num_held + self.num_judging) * num_examples))
        return held + max(step, used * (num_held > 0), judging) + block
