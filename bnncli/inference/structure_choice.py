"""Choose the structure of a last layer's covariance by its memory and its time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.inference.memory import fit_bytes, num_elements, sampling_bytes, structures
from bnncli.parameters.layouts import MatrixLayout
from bnncli.system.devices import Speed, estimate_speed
from bnncli.system.memory import budget, require

if TYPE_CHECKING:
    import torch


SEARCH_FITS, SEARCH_MODES = 10, 16  # of a prior precision search: Hessians computed, modes found
MOST_LEFT_OUT = 300  # outputs of a head in leave-one-out: their cube, for hundreds of examples, takes seconds
NUM_FOLDS = 5  # of cross-validation over the rows of val
QUICK_SECONDS = 6.0  # time limit for factoring a structure that is chosen automatically: 6,000 parameters on two cores
QUICK_ANYWHERE = 4762  # parameters of the largest full covariance within that limit on one core, the slowest device
_MODE_OPERATIONS = 150.0  # per example and parameter: 30 to 120 for easy heads, up to 450 under weak priors
_GRADIENTS = 4  # per transition of a chain, roughly
_WHITENING_SHARE = (
    1.0  # share of the sampling time that a better whitening may take; each of its draws is worth several others
)


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
        elements = num_elements(name, layout)
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
