"""The revisions of the algorithms that make artifacts: raised where the same options give other numbers than before.

A command records its own and makes anew what was made by another; status compares, without the command.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from bnncli import registry
from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.run_folder import RECOMMENDED
from bnncli.names import FEATURES_NAME

EXTRACT_FEATURES = 1
FIT_TEMPERATURE = 1
HMC_OF_LAYERS = 3  # other than the last. 2: steps of two and three stages; 3: chains fall from their starts, and turn about their mean
MERGE = 1
PRUNE = 1
TRAIN = 1
FIT_ENSEMBLE = 2  # 2: its worth on val beside the network's
FIT_LBBNN = 3  # 2: gradients of the biases by hand, weights of all layers together: other rounding; 3: draws of activations are of the best repeat alone
FIT_SGHMC = 1
FIT_SWAG = 1
STACK = 1
FIT_VI = 2  # 2: at least so many steps by default
EVALUATE = 2
EVALUATE_FEATURES = 1
AUTO = 3  # 2: accuracy and out-of-distribution detection beside the NLL; 3: detection by the features, whatever is recommended
EXPORT = 1
CALIBRATE = 1


def of_laplace(*, in_span: bool) -> int:
    """13: fits in the row space of the features, 12: over all of theta. 12 and 13 choose the prior for the mode alone where that predicts
    val best, and without val by leaving out examples of train; 10 and 11 searched by draws with less noise; 8 and 9 found modes of large heads in float32, 6 and 7 had values in float64, 4 and 5 no rough products, 2 and 3 no shorter searches of large heads.
    """
    return 13 if in_span else 12


def of_hmc(*, in_span: bool, num_params: int) -> int:
    """14: chains in the row space of the features, 13: over all of theta. 15 and 16: the same of long draws.

    Of 13 to 16 they move about their base where that is the Gaussian they need, of 9 to 12 one was made anew; of 5 to 8 chains did not
    fall from their starts, nor turn about their mean; steps were of one stage of 1 to 4.
    """
    return (14 if in_span else 13) + (2 if _is_long(num_params) else 0)


def of_predict(num_drawn: int, integrator: str = "") -> int:
    """Predictions from draws of so many numbers each, 0 without draws. 6: of long ones. 7: by draws of the logits, each example's own.

    5 to 7 have the combined score, 2 to 4 were the same without. 2: groups of draws; Sobol points in several scrambles; stored draws
    in their order.
    """
    if integrator == "logit-mc":
        return 7
    return 6 if _is_long(num_drawn) else 5


def _is_long(num_params: int) -> bool:
    """Whether draws come from another stream than once: in float32 on a CPU, and made on a GPU where there is one."""
    from bnncli.numerics import random  # here, for torch

    return num_params > random.LARGE


def of_refine(flow: str, scale: str | None) -> int:
    """3: layers that are pushed through together, whose gradients autograd made and rounded in its own way;
    and affine ones with a factor for each output, whose gradients were biased.
    """
    return 3 if registry.has_attribute("flows", flow, "push_together") or scale == "block" else 2


def is_another(header: Header) -> bool:
    """Whether an artifact was made by another revision than its command has today; False where that cannot be told.

    Raises:
        DataError: the header does not say what its command would have written.
    """
    revision = header.provenance.get("algo_rev")
    find = _OF_METHODS.get(str(header.meta.get("method"))) if header.kind in ("posterior", "samples") else None
    find = find or _OF_KINDS.get(header.kind)
    with interpreting(header.path):
        return find is not None and revision not in find(header)


def _in_span_today(header: Header, structure: str) -> set[bool]:
    """Whether the artifact would be made in the row space of the features; both where what memory there is decides."""
    weight, *_ = header.meta["param_layout"]
    if header.meta["num_examples"] >= weight["shape"][1]:
        return {False}
    return (
        {True} if header.meta.get(structure) in registry.declaring("curvature", "is_fitted_in_span") else {False, True}
    )


def _laplace_today(header: Header) -> set[int]:
    if header.meta.get("layers") is not None:  # not of features, but of a network's inputs
        return {of_laplace(in_span=False)}
    return {of_laplace(in_span=in_span) for in_span in _in_span_today(header, "structure")}


def _hmc_today(header: Header) -> set[int]:
    if header.meta.get("layers") is not None:
        return {HMC_OF_LAYERS}
    num_params = sum(math.prod(part["shape"]) for part in header.meta["param_layout"])
    return {of_hmc(in_span=in_span, num_params=num_params) for in_span in _in_span_today(header, "whitening")}


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
    "temperature": lambda header: {FIT_TEMPERATURE},
    "prune": lambda header: {PRUNE},
    "ensemble": lambda header: {FIT_ENSEMBLE},
    "mola": lambda header: {FIT_ENSEMBLE},
    "sghmc": lambda header: {FIT_SGHMC},
    "stack": lambda header: {STACK},
    "swag": lambda header: {FIT_SWAG},
    "vi": lambda header: {FIT_VI},
}
_WITHOUT_COMBINED = {2, 3, 4}  # predictions that lack the combined score, and are the same otherwise
_OF_KINDS: dict[str, Callable[[Header], set[int]]] = {
    "features": lambda header: {EXTRACT_FEATURES},
    "checkpoint": lambda header: {TRAIN},
    "predictions": lambda header: (
        {of_predict(size, str(header.meta.get("integrator"))) for size in (0, sys.maxsize)} | _WITHOUT_COMBINED
    ),
    "metrics": _metrics_today,
    "export": lambda header: {EXPORT},
    "decision": lambda header: {CALIBRATE},
}
