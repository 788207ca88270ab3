"""Probabilities under one theta, kept from the evaluation of a target there for what comes next: its Hessian, and products with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Of logits or probabilities (K, N) that are kept; larger ones are made again. Not a share of what is free, on which bits would depend.
_KEPT_BYTES = 2**29
_KEPT_SHARE = 8  # on a GPU, whose own work needs the rest: one part in so many of all its memory, free or not
_EARLY_SHARE = 32  # the same, where they lie beside factors that are made


def is_kept(num_bytes: int, device: torch.device, *, share: int = _KEPT_SHARE) -> bool:
    """Whether what a pass over the data could make again is small enough to stay on the device, of a GPU one part in `share` of its memory."""
    return num_bytes <= (_KEPT_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[1] // share)


class KeptProbabilities:
    """Those (K, N) of the last theta (P,) that was evaluated while they are asked for; of a team's worker, of its own rows alone."""

    def __init__(self) -> None:
        self._is_asked = False
        self._theta: Tensor | None = None
        self._values: Tensor | None = None

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Within, evaluations fill them; after it they are gone."""
        before, self._is_asked = self._is_asked, True
        try:
            yield
        finally:
            self._is_asked = before
            self._theta = self._values = None

    def room(self, theta: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Where an evaluation at theta (1, P) shall write them; None where nobody asks, or there is no room."""
        self._theta = self._values = None
        size, device = shape[0] * shape[1] * dtype.itemsize, theta.device
        if not self._is_asked or len(theta) != 1 or not is_kept(size, device, share=_EARLY_SHARE):
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            self._values = torch.empty(shape, dtype=dtype, device=device)
            self._theta = theta[0].clone()
        return self._values

    def find(self, theta: Tensor) -> Tensor | None:
        """Those under theta (P,), as they were evaluated in their precision; None where others are kept, or none."""
        if self._theta is None or self._values is None or not torch.equal(theta.to(self._theta), self._theta):
            return None
        return self._values
