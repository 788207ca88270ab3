"""The logits that a network makes probabilities of, as they were before its softmax or sigmoid.

Undone from the outside, probabilities near 0 and 1 have too few digits, and none of their gradients is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LINKS = {
    "softmax",
    "log_softmax",
    "sigmoid",
    "sigmoid_",
    "expit",
    "special_expit",
    "special_softmax",
    "special_log_softmax",
}
# What may come after, as the search for heads allows it: the same is done to the logits. A logarithm of a softmax has its logits.
_VIEWS = {
    *("view", "reshape", "flatten", "squeeze", "unsqueeze"),
    *("contiguous", "clone", "detach", "to", "float", "double"),
}
_LOGARITHMS = {"log", "log_"}
# From outside, where the probabilities come another way; as far as floating-point numbers go.
_UNDONE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda output: output,
    "softmax": lambda output: output.clamp(min=torch.finfo(output.dtype).tiny).log(),
    "sigmoid": lambda output: output.logit(eps=torch.finfo(output.dtype).eps),
}


_NOTE = "_before_link"  # attribute of a result: it lives as long as that, and no longer


class BeforeLinks(TorchFunctionMode):
    """Notes, inside `with`, what goes into softmaxes and sigmoids; works under torch.func, for it reads no numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = args[0] if args else kwargs.get("input")
        logits = getattr(given, _NOTE, None)
        if name in _LINKS:
            logits = given.clone() if name.endswith("_") else given
        elif logits is None or name not in _VIEWS | _LOGARITHMS:
            return func(*args, **kwargs)
        elif name in _VIEWS:
            logits = func(logits, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        setattr(result, _NOTE, logits)
        return result


def logits_before(output: Tensor, link: str) -> Tensor:
    """What went into the softmax or sigmoid that an output (n, ...) was, of its shape."""
    found: Tensor | None = getattr(output, _NOTE, None)
    return _UNDONE[link](output) if found is None else found
