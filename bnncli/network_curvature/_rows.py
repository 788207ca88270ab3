"""Rows whose products sum to the Gauss-Newton matrix: H_n^(1/2) J_n of some examples at once, never of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # of rows at once


def weighted_rows(target: NetworkTarget, theta: Tensor) -> Iterator[Tensor]:
    """R_n^T J_n of blocks of examples, (n M, P), with R_n R_n^T = H_n: their outer products sum to H at theta (P,)."""
    layout, likelihood = target.layout, target.likelihood
    theta = theta.to(target.device, target.dtype)
    size = max(1, _ELEMENTS.get(target.device.type, 2**24) // (layout.num_outputs * layout.num_params))
    size = min(size, target.rows_at_once(layout.num_outputs, theta.dtype))
    for start in range(0, target.num_examples, size):
        inputs = target.inputs[start : start + size].to(target.device)
        with torch.no_grad():
            logits = layout.logits(inputs, theta.unsqueeze(0))[0]
            probs = likelihood.normalize_(logits.T.unsqueeze(1).clone())[1][:, 0]
            rows = layout.jacobian(inputs, theta)
            yield torch.einsum("kmn,nkp->nmp", likelihood.hessian_root(probs), rows).flatten(0, 1)
