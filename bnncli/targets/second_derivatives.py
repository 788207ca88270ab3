"""Products with all second derivatives of a network's log posterior: the Gauss-Newton matrix, and what bends the network itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.targets.passes import counting_products

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

_GRAPHS = 2  # the backward pass is kept beside the forward one


def second_derivatives(target: NetworkTarget, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """A function (M, P) -> (M, P) float64 that multiplies by those of -log_joint at theta (P,).

    The gradient's own gradient along each vector, in blocks of examples (Pearlmutter 1994, Neural Computation 6(1)).
    """
    theta = theta.to(target.device, target.dtype)

    def multiply(vectors: Tensor) -> Tensor:
        vectors = vectors.to(target.device)
        total = torch.zeros(vectors.shape, dtype=torch.float64, device=target.device)
        for rows in target.row_blocks(_GRAPHS, theta.dtype):
            with torch.enable_grad():
                leaf = theta.detach().requires_grad_()
                logits = target.logits(leaf.unsqueeze(0), rows)
                value = target.likelihood.log_likelihoods(logits, target.labels[rows]).double().sum()
                (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            for vector, found in zip(vectors.to(theta.dtype), total, strict=True):
                found -= torch.autograd.grad(gradient, leaf, vector, retain_graph=True)[0].double()
        return total * target.likelihood_scale - target.prior.curvature_times(vectors.double(), target.layout)

    return counting_products(multiply)
