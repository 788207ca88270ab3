"""Estimate the memory and the time that fits of a last layer need, from sizes and before they start."""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout, MatrixLayout, NetworkLayout, ParamLayout
from bnncli.posteriors import draws_at_once
from bnncli.system.devices import Speed, speed_of
from bnncli.system.memory import budget, is_large, require
from bnncli.system.workers import team
from bnncli.targets.target import rough_structure

if TYPE_CHECKING:
    import torch


SEARCH_FITS, SEARCH_MODES = 10, 16  # of a search for the prior precision: Hessians that are made, modes that are found
NUM_DRAWS = 128  # of each candidate, common to all: their noise cancels in comparisons
MOST_LEFT_OUT = 300  # outputs of a head whose examples are left out: the cubes of their number, for hundreds of examples, take seconds
NUM_FOLDS = 5  # of a cross-validation over the rows of val
QUICK_SECONDS = (
    6.0  # that the factors of a structure may take which is fitted unasked: of 6,000 parameters on two cores
)
QUICK_ANYWHERE = (
    4762  # parameters of the largest full covariance whose factors take no longer on one core; all devices are faster
)
_MODE_OPERATIONS = 150.0  # for each example and parameter: 30 to 120 of easy heads, up to 450 under weak priors
_GRADIENTS = 4  # of a transition of a chain, about


def fit_seconds(
    structure: str, layout: MatrixLayout, *, num_examples: int, speed: Speed, num_fits: int = 1, num_modes: int = 1
) -> float:
    """Seconds of so many covariances of a structure, and of so many modes, on a device of that speed.

    Raises:
        ValueError: there is no such structure.
    """
    choices = registry.in_order("curvature")
    if structure not in choices:
        raise ValueError(f"structure: expected one of {', '.join(choices)}, got {structure!r}")
    curvature = registry.load_class("curvature", structure)
    needed = curvature.operations(layout, num_examples)
    once = min(num_fits, 1)
    fit = needed.products / speed.products + needed.elementwise / speed.elementwise + needed.factors / speed.factors
    fixed = needed.products_once / speed.products + needed.factors_once / speed.factors
    return (
        num_fits * fit + once * fixed + num_modes * _MODE_OPERATIONS * num_examples * layout.num_params / speed.products
    )


def largest_full(device: torch.device | str) -> int:
    """Parameters of the largest full covariance that is quick there: whose factor and inverse take QUICK_SECONDS."""
    return round((1.5 * QUICK_SECONDS * speed_of(device).factors) ** (1 / 3))


def transition_seconds(layout: MatrixLayout, *, num_examples: int, speed: Speed) -> float:
    """Seconds of a transition of one chain of hmc: two products with the features for each gradient."""
    return _GRADIENTS * 4 * num_examples * layout.num_params / speed.products


MAX_FULL_PRECONDITIONER = 2048  # parameters; up to here a full Hessian costs less than the iterations it saves
_WHITENING_SHARE = (
    1.0  # of the time that draws take, that a closer Gaussian may take before them: each is worth several of others
)
_COPIES = 6  # of a structure's matrices that a fit holds at its peak
_PANEL_COPIES = 4  # of a full one that is factored panel by panel
_SPREAD_COPIES = 2.5  # of one whose rows are spread over workers: the sums of pairs, a part of the panels, and the root
_MODE_VECTORS = 10  # of P numbers that the search for the mode holds
_BYTES_A_DRAW = 32  # of each parameter: noise, theta in two precisions, and one product on the way
_WEIGHT_VECTORS = (
    40  # of a latent binary network's weights: factors, gradients, Adam's, moments, and states to resume from
)
_FLOW_VECTORS = 10  # of its flows' parameters
_WAITING_WEIGHT_VECTORS = (
    14  # of one that waits its turn or is done: starts, states to resume from, results of all workers
)
_WAITING_FLOW_VECTORS = 5
_ACTIVATION_VECTORS = 10  # of a batch's activations
_SCALED_VECTORS = 3  # of a batch's inputs of each layer, once they are scaled by multipliers
_BYTES_A_LAYER_NUMBER = (
    40  # of refine's layers: in two precisions, gradient, Adam's two, products, states to resume from
)
_BYTES_A_TRAINING_DRAW = 100  # of each parameter: what a step through the layers keeps for its gradient
_BYTES_A_DIRECTION = 80  # of each parameter: three blocks of float64, their factors and images
_BATCH_VECTORS = 4  # of a minibatch's logits under every draw
_CHAIN_VECTORS = 16  # of P numbers that each chain holds within a trajectory
_SPAN_COPIES = 5  # of a matrix of features by examples: the features in float64, their factors, the basis
_COMPLETED_VECTORS = 6  # of P numbers that each chain holds while a draw in a span becomes one of all of theta


def fit_bytes(structure: str, layout: MatrixLayout, *, num_draws: int = 0, whole: MatrixLayout | None = None) -> int:
    """Bytes that a Gaussian of this structure takes to fit, with `num_draws` draws of it at once to judge it.

    Args:
        whole: of all of theta, where the layout is of the span of the features; draws are of all of it.
    """
    size = layout.num_params
    matrices = _copies(structure, layout) * max(
        _elements(structure, layout), _elements(rough_structure(layout.num_outputs), layout)
    )
    if size <= MAX_FULL_PRECONDITIONER:
        matrices += 2 * size**2
    drawn = _BYTES_A_DRAW * num_draws * (whole or layout).num_params
    return round(8 * (matrices + _MODE_VECTORS * size + _SPAN_COPIES * _basis_elements(layout, whole)) + drawn)


def _copies(structure: str, layout: MatrixLayout) -> float:
    """Of a structure's matrices that a fit holds at its peak, on each worker where there are several."""
    if structure != structures()[0] or not is_large(layout.num_params):
        return _COPIES
    others = team()
    return _PANEL_COPIES if others is None or others.size == 1 else _SPREAD_COPIES


def has_room_whole(layout: ParamLayout, device: torch.device | str) -> bool:
    """Whether a full Hessian and what is made of it have room on one device; elsewhere its rows are spread over the workers."""
    return 8 * _PANEL_COPIES * layout.num_params**2 <= budget(device)


def sampling_bytes(structure: str, layout: MatrixLayout, *, num_chains: int, whole: MatrixLayout | None = None) -> int:
    """Bytes that chains whitened by a Gaussian of this structure take: its fit, then their states."""
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
    """Bytes that a stored Gaussian takes to refine: as read, in two precisions; the training, then draws to judge it.

    Args:
        elements: numbers of the stored covariance, of a structure that no curvature has.
    """
    matrices = (_elements(structure, layout) if elements is None else elements) + _basis_elements(layout, whole)
    return 20 * matrices + max(training, _BYTES_A_DRAW * num_draws * (whole or layout).num_params)


def training_bytes(layout: ClassifierLayout, *, num_layer_params: int, num_draws: int, batch_size: int = 0) -> int:
    """Bytes that the training of a flow takes.

    Args:
        num_layer_params: numbers in all layers.
        num_draws: a step.
        batch_size: of minibatches; 0 where a step takes all data, block by block.
    """
    batch = layout.num_features + _BATCH_VECTORS * num_draws * layout.num_outputs
    draws = _BYTES_A_TRAINING_DRAW * num_draws * layout.num_params
    return _BYTES_A_LAYER_NUMBER * num_layer_params + draws + 4 * batch_size * batch


def subspace_bytes(num_params: int, num_directions: int) -> int:
    """Bytes that directions of whitened coordinates take: found, by three times as many; then in two precisions."""
    return _BYTES_A_DIRECTION * num_params * num_directions


def latent_bytes(
    layout: NetworkLayout, *, num_repeats: int, batch_size: int, num_flow_params: int = 0, num_waiting: int = 0
) -> int:
    """Bytes that a latent binary fit takes: so many networks at once, each with so many parameters of flows.

    Args:
        num_waiting: networks of all workers, where they are fitted in turns.
    """
    waiting = _WAITING_WEIGHT_VECTORS * layout.num_params + _WAITING_FLOW_VECTORS * num_flow_params
    vectors = _WEIGHT_VECTORS * layout.num_params + _FLOW_VECTORS * num_flow_params
    activations = _ACTIVATION_VECTORS * sum(layout.sizes[1:]) + _SCALED_VECTORS * sum(layout.sizes[:-1]) * (
        num_flow_params > 0
    )
    training = num_repeats * (vectors + batch_size * activations)
    return 4 * (training + num_waiting * waiting) + 8 * batch_size * layout.num_features


def stored_bytes(structure: str, layout: MatrixLayout, *, whole: MatrixLayout | None = None) -> int:
    """Bytes of a Gaussian's file: the matrices in float64, the Hessian in float32, the mean and the head."""
    return 12 * _elements(structure, layout) + 8 * _basis_elements(layout, whole) + 12 * (whole or layout).num_params


def automatic_structure(layout: MatrixLayout, budget: int, *, device: torch.device | str, **sizes: Any) -> str:
    """The structure to fit when none was asked for.

    Full where it fits in the budget (bytes) and the device factors it soon: 6,000 parameters on two cores, 27,000 and more on a GPU that is
    fast in float64; else block where it fits and its sums over the examples cost no more than those of the largest such full one; else kron
    where it fits; else diag. Sizes as for fit_bytes: in the span of the features, whose examples are few, it is a block's factors that
    must cost no more than a full one's.
    """
    return next(iter(automatic_structures(layout, budget, device=device, **sizes)), structures()[-1])


def automatic_structures(layout: MatrixLayout, budget: int, *, device: torch.device | str, **sizes: Any) -> list[str]:
    """All structures that are quick and fit in the budget (bytes), by the rule of automatic_structure, which takes the first."""
    in_span = sizes.get("whole") is not None

    def is_quick(name: str) -> bool:
        most = partial(registry.load_class("curvature", name).most_elements, layout, in_span=in_span)
        elements = _elements(name, layout)
        # What is quick everywhere needs no look at the device, for which torch is imported.
        return elements <= most(largest_full=QUICK_ANYWHERE) or elements <= most(largest_full=largest_full(device))

    quick = [name for name in structures() if is_quick(name)]
    return [name for name in quick if fit_bytes(name, layout, **sizes) <= budget]


def whitening_structure(
    layout: MatrixLayout,
    budget: int,
    *,
    device: torch.device | str,
    num_examples: int,
    num_chains: int,
    num_draws: int,
    whole: MatrixLayout | None = None,
) -> str:
    """The structure of the Gaussian that chains move in the coordinates of.

    The one that fit-laplace takes of itself, or the full one where that takes no longer than the draws: a search for a prior makes ten
    such Gaussians, chains need one, and every draw is worth the more for it (7,700 parameters of 20 classes, 16 chains of 260 draws: R-hat 1.008 and
    3,676 effective ones, by blocks 1.213 and 53).

    Args:
        num_draws: of each chain, those of the warm-up with them.
    """
    structure = automatic_structure(layout, budget, device=device, whole=whole)
    closest = structures()[0]
    if whole is not None or structure == closest or sampling_bytes(closest, layout, num_chains=num_chains) > budget:
        return structure
    speed = speed_of(device)
    drawing = num_draws * num_chains * transition_seconds(layout, num_examples=num_examples, speed=speed)
    making = fit_seconds(closest, layout, num_examples=num_examples, speed=speed)
    return closest if making <= _WHITENING_SHARE * drawing else structure


def structures() -> list[str]:
    """All structures, from the one that says most of the posterior to the least."""
    return registry.in_order("curvature")


def require_fit(structure: str, layout: MatrixLayout, device: torch.device | str, **sizes: Any) -> None:
    """Pass when the structure can be fitted. Raises DeviceError, naming the largest that can, otherwise."""
    there = budget(device)
    fitting = [name for name in structures() if fit_bytes(name, layout, **sizes) <= there]
    hint = (
        f"use \0structure\0 {fitting[0]}, the largest that fits" if fitting else "no structure fits: use fewer features"
    )
    what = f"a {structure} covariance with {layout.num_params} parameters"
    require(fit_bytes(structure, layout, **sizes), device, what=what, hint=hint)


def require_sampling(
    layout: MatrixLayout, device: torch.device | str, *, num_chains: int, whole: MatrixLayout | None = None
) -> None:
    """Pass when the chains have room. Raises DeviceError, naming how many do, otherwise."""
    there = budget(device)
    whitening = automatic_structure(
        layout, there, device=device, whole=whole
    )  # a closer one is taken only where it has room
    one, more = (sampling_bytes(whitening, layout, num_chains=count, whole=whole) for count in (1, 2))
    most = 1 + (there - one) // (more - one)
    hint = f"use at most \0chains\0 {most}" if most > 0 else "no chain fits: use a head with fewer features"
    needed = sampling_bytes(whitening, layout, num_chains=num_chains, whole=whole)
    require(needed, device, what=f"hmc with {num_chains} chains and {layout.num_params} parameters", hint=hint)


def require_refinement(
    structure: str,
    layout: MatrixLayout,
    device: torch.device | str,
    *,
    training: int = 0,
    elements: int | None = None,
    **sizes: Any,
) -> None:
    """Pass when a flow on a Gaussian of this structure has room. Raises DeviceError, naming what has, otherwise.

    Args:
        training: training_bytes of the flow.
        elements, sizes: as for refinement_bytes.
    """
    there = budget(device)
    sizes = {**sizes, "training": training}
    fitting = [name for name in structures() if refinement_bytes(name, layout, **sizes) <= there]
    less = "use \0flow\0 radial" if training > there else "use fewer \0elbo_draws\0"
    hint = f"refine a base fitted with fit-laplace \0structure\0 {fitting[0]}" if fitting else less
    needed = refinement_bytes(structure, layout, **sizes, elements=elements)
    require(needed, device, what=f"refining a {structure} Gaussian with {layout.num_params} parameters", hint=hint)


def drawn_bytes(num_params: int, *, num_used: int, num_stored: int = 0) -> int:
    """Bytes that draws of theta take to predict with.

    In float32: those that are stored, the chosen ones where they are not all of them, and these as matrices with the biases
    in place. Draws that are made take noise and theta of a part of them in float64 besides.

    Args:
        num_used: draws that predict.
        num_stored: draws of a posterior that is draws; 0 for one that makes them.
    """
    copies = 1 if num_used == num_stored else 2
    made = 0 if num_stored else _BYTES_A_DRAW * min(num_used, draws_at_once(num_params))
    return num_params * (4 * (num_stored + copies * num_used) + made)


def sampled_bytes(num_params: int, num_draws: int) -> int:
    """Bytes on disk of a sampler's draws: once as they come, once as the artifact."""
    return 2 * num_draws * (4 * num_params + 64)


def require_draws(
    num_params: int, device: torch.device | str, *, num_used: int, num_stored: int = 0, option: str | None = None
) -> None:
    """Pass when draws of theta have room on the device, and stored ones on the CPU, where they are read.

    Args:
        num_params, num_used, num_stored: as for drawn_bytes.
        option: of the command that says how many are used.

    Raises:
        DeviceError: they have none; names how many do, where fewer do.
    """
    what = f"{num_stored or num_used} draws with {num_params} parameters"
    fewer = "reduce the number of draws: hmc with fewer \0chains\0 or \0draws\0" if num_stored else None
    if str(device) != "cpu":
        require(4 * num_stored * num_params, "cpu", what=f"reading {what}", hint=fewer)

    def needed(count: int) -> int:
        return drawn_bytes(num_params, num_used=count, num_stored=num_stored)

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
    """Pass when a latent binary fit has room; sizes as for latent_bytes. Raises DeviceError with the hint otherwise.

    Args:
        most_at_once: networks that workers fit at once, where they take turns.
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


def _elements(structure: str, layout: MatrixLayout) -> int:
    """Numbers in one copy of the structure's matrices."""
    return int(registry.load_class("curvature", structure).num_elements(layout))


def _basis_elements(layout: MatrixLayout, whole: MatrixLayout | None) -> int:
    """Numbers of the basis of the span that the layout is of; none where it is of all of theta."""
    return 0 if whole is None else whole.num_features * layout.num_features
