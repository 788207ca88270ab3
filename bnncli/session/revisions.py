"""Revisions of the algorithms that create artifacts, raised when the same options give other numbers than before.

A command records its revision and replaces artifacts of another one; status compares them without the command.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from bnncli import registry
from bnncli.artifacts.headers import Header, convert_lookup_errors
from bnncli.artifacts.run_folder import RECOMMENDED
from bnncli.names import FEATURES_NAME

EXTRACT_FEATURES = 1
FIT_CALIBRATION = 1
FIT_TEMPERATURE = 1
HMC_OF_LAYERS = 3  # 2: steps of two and three stages; 3: chains descend from their starts, rotate about their mean
MERGE = 1
PRUNE = 1
TRAIN = 1
FIT_ENSEMBLE = 2  # 2: records its quality on val next to the network's
FIT_LBBNN = 3  # 2: bias gradients by hand, joined weights: other rounding; 3: activations drawn in the best repeat only
FIT_SGHMC = 1
FIT_SWAG = 1
STACK = 1
FIT_VI = 2  # 2: minimum number of steps by default
EVALUATE = 3  # 3: resamples a part of splits above 50,000 examples
EVALUATE_FEATURES = 1
AUTO = 3  # 2: accuracy and OOD detection besides NLL; 3: detection by the features, whatever is recommended
EXPORT = 1
CALIBRATE = 1
MONITOR = 1


LAPLACE_OF_LAYERS = (
    15  # 15: interpolates covariances between precisions; 14: fewer passes, on some of val; before as of_laplace
)


def of_laplace(*, in_span: bool) -> int:
    """Return 15 for fits of the last layer in the row space of the features, 14 for all of theta.

    14 and 15 find modes above 10,000 parameters in fewer products, and search a prior for the mode alone only where that may
    gain. Earlier: 12 and 13 chose the prior for the mode alone if that predicts val best; without val, by leaving out training
    examples; 10 and 11 searched by draws with less noise; 8 and 9 found modes of large heads in float32; 6 and 7
    had values in float64; 4 and 5 no rough products; 2 and 3 no shorter searches of large heads.
    """
    return 15 if in_span else 14


def of_hmc(*, in_span: bool, num_params: int) -> int:
    """Return 18 for chains in the row space of the features, 17 for all of theta; 19 and 20 for long draws.

    17 to 20 move by the gradients of some examples if that is accurate enough, and judge prior precisions by Gaussians
    close to the posteriors; 13 to 16 moved about their base if it was the Gaussian they needed; 9 to 12 always fitted
    one. In 5 to 8, chains neither descended from their starts nor rotated about their mean; in 1 to 4, steps had one stage.
    """
    return (18 if in_span else 17) + (2 if _is_long(num_params) else 0)


def of_predict(num_drawn: int, integrator: str = "") -> int:
    """Return the revision of predictions from draws of this many numbers; 0 means no draws.

    6: long draws. 7: draws of the logits, separate for each example. 5 to 7 have the combined score; 2 to 4 are the
    same without it. 2: groups of draws, Sobol points in several scrambles, stored draws in order.
    """
    if integrator == "logit-mc":
        return 7
    return 6 if _is_long(num_drawn) else 5


def _is_long(num_params: int) -> bool:
    """Return whether draws use the newer stream: float32 on a CPU, drawn on the GPU if there is one."""
    from bnncli.numerics import random  # imports torch

    return num_params > random.LARGE


def of_refine(flow: str, scale: str | None) -> int:
    """Return 5 for layers pushed through together and affine layers with a factor per output, else 4.

    4 and 5 train briefly where the base leaves little to gain, and judge prior precisions by Gaussians close to the
    posteriors. In 2, gradients of the former rounded differently; gradients of the latter were biased.
    """
    return 5 if registry.has_attribute("flows", flow, "push_together") or scale == "block" else 4


def is_another(header: Header) -> bool:
    """Return whether an artifact has another revision than its command's current one; False if unknown.

    Raises:
        DataError: the header lacks what its command would have written.
    """
    revision = header.provenance.get("algo_rev")
    find = _OF_METHODS.get(str(header.meta.get("method"))) if header.kind in ("posterior", "samples") else None
    find = find or _OF_KINDS.get(header.kind)
    with convert_lookup_errors(header.path):
        return find is not None and revision not in find(header)


def _resolve_span(header: Header, structure: str) -> set[bool]:
    """Return whether the artifact would be fitted in the row space of the features; both values if memory decides."""
    weight, *_ = header.meta["param_layout"]
    if header.meta["num_examples"] >= weight["shape"][1]:
        return {False}
    return (
        {True}
        if header.meta.get(structure) in registry.list_declaring("curvature", "is_fitted_in_span")
        else {False, True}
    )


def _laplace_today(header: Header) -> set[int]:
    if header.meta.get("layers") is not None:  # inputs are a network's, not features
        return {LAPLACE_OF_LAYERS}
    return {of_laplace(in_span=in_span) for in_span in _resolve_span(header, "structure")}


def _hmc_today(header: Header) -> set[int]:
    if header.meta.get("layers") is not None:
        return {HMC_OF_LAYERS}
    num_params = sum(math.prod(part["shape"]) for part in header.meta["param_layout"])
    return {of_hmc(in_span=in_span, num_params=num_params) for in_span in _resolve_span(header, "whitening")}


def _refine_today(header: Header) -> set[int]:
    return {of_refine(header.meta["flow"], header.meta["settings"].get("scale"))}


def _metrics_today(header: Header) -> set[int]:
    if header.path.name == RECOMMENDED:
        return {AUTO}
    is_of_features = header.path.name.startswith(f"{FEATURES_NAME}.")
    return {EVALUATE_FEATURES if is_of_features else EVALUATE}


_OF_METHODS: dict[str, Callable[[Header], set[int]]] = {
    "map": lambda header: {EXTRACT_FEATURES},
    "laplace": _laplace_today,
    "refine": _refine_today,
    "hmc": _hmc_today,
    "merge": lambda header: {MERGE},
    "lbbnn": lambda header: {FIT_LBBNN},
    "calibration": lambda header: {FIT_CALIBRATION},
    "temperature": lambda header: {FIT_TEMPERATURE},
    "prune": lambda header: {PRUNE},
    "ensemble": lambda header: {FIT_ENSEMBLE},
    "mola": lambda header: {FIT_ENSEMBLE},
    "sghmc": lambda header: {FIT_SGHMC},
    "stack": lambda header: {STACK},
    "swag": lambda header: {FIT_SWAG},
    "vi": lambda header: {FIT_VI},
}
_WITHOUT_COMBINED = {2, 3, 4}  # revisions of predictions without the combined score
_OF_KINDS: dict[str, Callable[[Header], set[int]]] = {
    "features": lambda header: {EXTRACT_FEATURES},
    "checkpoint": lambda header: {TRAIN},
    "predictions": lambda header: (
        {of_predict(size, str(header.meta.get("integrator"))) for size in (0, sys.maxsize)} | _WITHOUT_COMBINED
    ),
    "metrics": _metrics_today,
    "export": lambda header: {EXPORT},
    "calibration": lambda header: {FIT_CALIBRATION},
    "decision": lambda header: {CALIBRATE},
    "monitor": lambda header: {MONITOR},
}
