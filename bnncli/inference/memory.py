"""Estimate memory and time of last-layer fits from sizes, before they start."""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout, MatrixLayout, NetworkLayout, ParamLayout
from bnncli.posteriors import draws_at_once
from bnncli.system.devices import Speed, estimate_speed
from bnncli.system.memory import budget, is_large, require
from bnncli.system.workers import team
from bnncli.targets.target import rough_structure

if TYPE_CHECKING:
    import torch


SEARCH_FITS, SEARCH_MODES = 10, 16  # of a prior precision search: Hessians computed, modes found
NUM_DRAWS = 128  # per candidate, common to all candidates so that their noise cancels in comparisons
MOST_LEFT_OUT = 300  # outputs of a head in leave-one-out: their cube, for hundreds of examples, takes seconds
NUM_FOLDS = 5  # of cross-validation over the rows of val
QUICK_SECONDS = 6.0  # time limit for factoring a structure that is chosen automatically: 6,000 parameters on two cores
QUICK_ANYWHERE = 4762  # parameters of the largest full covariance within that limit on one core, the slowest device
_MODE_OPERATIONS = 150.0  # per example and parameter: 30 to 120 for easy heads, up to 450 under weak priors
_GRADIENTS = 4  # per transition of a chain, roughly


def fit_seconds(
    structure: str, layout: MatrixLayout, *, num_examples: int, speed: Speed, num_fits: int = 1, num_modes: int = 1
) -> float:
    """Estimate the seconds for num_fits covariances of a structure and num_modes modes on a device of this speed.

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
    """Return the number of parameters of the largest full covariance whose factor and inverse take QUICK_SECONDS."""
    return round((1.5 * QUICK_SECONDS * estimate_speed(device).factors) ** (1 / 3))


def transition_seconds(layout: MatrixLayout, *, num_examples: int, speed: Speed) -> float:
    """Return the seconds of an hmc transition of one chain: two products with the features per gradient."""
    return _GRADIENTS * 4 * num_examples * layout.num_params / speed.products


MAX_FULL_PRECONDITIONER = 2048  # parameters; up to here a full Hessian costs less than the iterations it saves
_WHITENING_SHARE = (
    1.0  # share of the sampling time that a better whitening may take; each of its draws is worth several others
)
_COPIES = 6  # of a structure's matrices at the peak of a fit
_PANEL_COPIES = 4  # of a full matrix factored in panels
# of a full matrix whose rows are spread over workers: sums of pairs, part of the panels, and the root
_SPREAD_COPIES = 2.5
_MODE_VECTORS = 10  # vectors of P values in the mode search
_BYTES_A_DRAW = 32  # per parameter: noise, theta in two precisions, and one intermediate product
_WEIGHT_VECTORS = 40  # per weight of a latent binary network: factors, gradients, Adam's moments, and resume states
_FLOW_VECTORS = 10  # per parameter of its flows
_WAITING_WEIGHT_VECTORS = (
    14  # per weight of a network that waits its turn or is done: starts, resume states, results of all workers
)
_WAITING_FLOW_VECTORS = 5
_ACTIVATION_VECTORS = 10  # per activation of a batch
_SCALED_VECTORS = 3  # per input of a layer in a batch, after scaling by multipliers
_BYTES_A_LAYER_NUMBER = 40  # of refine: two precisions, gradient, Adam's two, products, resume states
_BYTES_A_TRAINING_DRAW = 100  # per parameter: stored by a step through the layers for its gradient
_BYTES_A_DIRECTION = 80  # per parameter: three float64 blocks, their factors and images
_BATCH_VECTORS = 4  # per minibatch logit of each draw
_CHAIN_VECTORS = 16  # vectors of P values per chain within a trajectory
_SPAN_COPIES = 5  # of the features by examples matrix: float64 features, their factors, the basis
_COMPLETED_VECTORS = 6  # vectors of P values per chain while a draw in the span is completed to all of theta


def fit_bytes(structure: str, layout: MatrixLayout, *, num_draws: int = 0, whole: MatrixLayout | None = None) -> int:
    """Return the bytes to fit a Gaussian of this structure, with `num_draws` draws at once to judge it.

    Args:
        whole: layout of all of theta, if `layout` is the span of the features; draws are of all of theta.
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
    """Return the number of copies of a structure's matrices at the peak of a fit, per worker."""
    if structure != structures()[0] or not is_large(layout.num_params):
        return _COPIES
    others = team()
    return _PANEL_COPIES if others is None or others.size == 1 else _SPREAD_COPIES


def has_room_whole(layout: ParamLayout, device: torch.device | str) -> bool:
    """Return whether a full Hessian and its covariance fit on one device; else the rows are spread over the workers."""
    return 8 * _PANEL_COPIES * layout.num_params**2 <= budget(device)


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
    matrices = (_elements(structure, layout) if elements is None else elements) + _basis_elements(layout, whole)
    return 20 * matrices + max(training, _BYTES_A_DRAW * num_draws * (whole or layout).num_params)


def training_bytes(layout: ClassifierLayout, *, num_layer_params: int, num_draws: int, batch_size: int = 0) -> int:
    """Return the bytes to train a flow.

    Args:
        num_layer_params: parameters in all layers.
        num_draws: draws per step.
        batch_size: of minibatches; 0 if a step uses all data, in blocks.
    """
    batch = layout.num_features + _BATCH_VECTORS * num_draws * layout.num_outputs
    draws = _BYTES_A_TRAINING_DRAW * num_draws * layout.num_params
    return _BYTES_A_LAYER_NUMBER * num_layer_params + draws + 4 * batch_size * batch


def subspace_bytes(num_params: int, num_directions: int) -> int:
    """Return the bytes for directions in whitened coordinates: found from three times as many, then in two precisions."""
    return _BYTES_A_DIRECTION * num_params * num_directions


def latent_bytes(
    layout: NetworkLayout, *, num_repeats: int, batch_size: int, num_flow_params: int = 0, num_waiting: int = 0
) -> int:
    """Return the bytes of a latent binary fit.

    Args:
        num_repeats: networks at once.
        num_flow_params: flow parameters per network.
        num_waiting: networks of all workers, if they are fitted in turns.
    """
    waiting = _WAITING_WEIGHT_VECTORS * layout.num_params + _WAITING_FLOW_VECTORS * num_flow_params
    vectors = _WEIGHT_VECTORS * layout.num_params + _FLOW_VECTORS * num_flow_params
    activations = _ACTIVATION_VECTORS * sum(layout.sizes[1:]) + _SCALED_VECTORS * sum(layout.sizes[:-1]) * (
        num_flow_params > 0
    )
    training = num_repeats * (vectors + batch_size * activations)
    return 4 * (training + num_waiting * waiting) + 8 * batch_size * layout.num_features


def stored_bytes(structure: str, layout: MatrixLayout, *, whole: MatrixLayout | None = None) -> int:
    """Return the bytes of a Gaussian's file: float64 matrices, float32 Hessian, mean and head."""
    return 12 * _elements(structure, layout) + 8 * _basis_elements(layout, whole) + 12 * (whole or layout).num_params


def automatic_structure(layout: MatrixLayout, budget: int, *, device: torch.device | str, **sizes: Any) -> str:
    """Return the structure to fit by default.

    Full if it fits in the budget (bytes) and is quick to factor on the device: 6,000 parameters on two cores, 27,000 or
    more on a GPU that is fast in float64. Otherwise block if it fits and its sums over examples cost no more than those
    of the largest quick full one (in the span of the features, where examples are few: if its factors do); otherwise
    kron if it fits; otherwise diag. Sizes as in fit_bytes.
    """
    return next(iter(automatic_structures(layout, budget, device=device, **sizes)), structures()[-1])


def automatic_structures(layout: MatrixLayout, budget: int, *, device: torch.device | str, **sizes: Any) -> list[str]:
    """Return all structures that are quick and fit in the budget (bytes), best first; see automatic_structure."""
    in_span = sizes.get("whole") is not None

    def is_quick(name: str) -> bool:
        most = partial(registry.load_class("curvature", name).most_elements, layout, in_span=in_span)
        elements = _elements(name, layout)
        # Structures that are quick everywhere need no device lookup, which imports torch.
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
    """Return the structure of the Gaussian that whitens chains.

    The default of fit-laplace, or full if it takes no longer than sampling: a prior search fits ten such Gaussians,
    chains need only one, and it improves every draw (7,700 parameters of 20 classes, 16 chains of 260 draws: full gives
    R-hat 1.008 and ESS 3,676, block 1.213 and 53).

    Args:
        num_draws: per chain, including warm-up.
    """
    structure = automatic_structure(layout, budget, device=device, whole=whole)
    closest = structures()[0]
    if whole is not None or structure == closest or sampling_bytes(closest, layout, num_chains=num_chains) > budget:
        return structure
    speed = estimate_speed(device)
    drawing = num_draws * num_chains * transition_seconds(layout, num_examples=num_examples, speed=speed)
    making = fit_seconds(closest, layout, num_examples=num_examples, speed=speed)
    return closest if making <= _WHITENING_SHARE * drawing else structure


def structures() -> list[str]:
    """Return all structures, most to least expressive."""
    return registry.in_order("curvature")


def require_fit(structure: str, layout: MatrixLayout, device: torch.device | str, **sizes: Any) -> None:
    """Raise DeviceError, naming the largest structure that fits, if this one does not."""
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
    """Raise DeviceError, naming how many chains fit, if these do not."""
    there = budget(device)
    whitening = automatic_structure(layout, there, device=device, whole=whole)  # a closer one is used only if it fits
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


def draw_prediction_bytes(num_params: int, *, num_used: int, num_stored: int = 0) -> int:
    """Return the bytes to predict with draws of theta.

    float32: the stored draws, the chosen ones if not all are used, and matrices of these with the biases. Generated
    draws also need noise and theta of a part of them in float64.

    Args:
        num_used: draws used to predict.
        num_stored: draws of a samples posterior; 0 if draws are generated.
    """
    copies = 1 if num_used == num_stored else 2
    made = 0 if num_stored else _BYTES_A_DRAW * min(num_used, draws_at_once(num_params))
    return num_params * (4 * (num_stored + copies * num_used) + made)


def draw_storage_bytes(num_params: int, num_draws: int) -> int:
    """Return the bytes on disk of a sampler's draws: while sampling, and in the artifact."""
    return 2 * num_draws * (4 * num_params + 64)


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


def _elements(structure: str, layout: MatrixLayout) -> int:
    """Return the size of one copy of the structure's matrices."""
    return int(registry.load_class("curvature", structure).num_elements(layout))


def _basis_elements(layout: MatrixLayout, whole: MatrixLayout | None) -> int:
    """Return the size of the basis of the span; 0 if the layout is all of theta."""
    return 0 if whole is None else whole.num_features * layout.num_features
