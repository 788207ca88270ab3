"""Rows whose outer products sum to H: H_n^(1/2) J_n, or gradients, for a block of examples at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.system.signals import between_blocks
from bnncli.targets.curvature_choice import FISHER

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}  # of rows at once


def weighted_rows(target: NetworkTarget, theta: Tensor) -> Iterator[Tensor]:
    """Yield rows (n M, P) for blocks of examples, whose outer products sum to H at theta (P,).

    R_n^T J_n with R_n R_n^T = H_n for the Gauss-Newton matrix. For the empirical Fisher matrix, each example's gradient
    of the log likelihood of its label, so M is 1.
    """
    theta = theta.to(target.device, target.dtype)
    is_fisher = target.choice.kind == FISHER
    size = examples_at_once(target)
    for start in range(0, target.num_examples, size):
        between_blocks("the Hessian")
        some = slice(start, start + size)
        inputs = target.inputs[some].to(target.device)
        with torch.no_grad():
            if is_fisher:
                yield _gradients(target, theta, inputs, target.labels[some])
            else:
                yield _roots(target, theta, inputs)


def examples_at_once(target: NetworkTarget) -> int:
    """Return the number of examples whose rows, and the activations for each row, fit at once."""
    num_rows = 1 if target.choice.kind == FISHER else target.layout.num_outputs
    size = _ELEMENTS.get(target.device.type, 2**24) // (num_rows * target.layout.num_params)
    return max(1, min(target.num_examples, size, target.rows_at_once(num_rows, target.dtype)))


def _roots(target: NetworkTarget, theta: Tensor, inputs: Tensor) -> Tensor:
    """Return R_n^T J_n, (n M, P)."""
    layout, likelihood = target.layout, target.likelihood
    logits = layout.logits(inputs, theta.unsqueeze(0))[0]
    probs = likelihood.normalize_(logits.T.unsqueeze(1).clone())[1][:, 0]
    return torch.einsum("kmn,nkp->nmp", likelihood.hessian_root(probs), layout.jacobian(inputs, theta)).flatten(0, 1)


def _gradients(target: NetworkTarget, theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each example's log likelihood, (n, P)."""
    layout, likelihood = target.layout, target.likelihood

    def log_likelihood(draw: Tensor, example: Tensor, label: Tensor) -> Tensor:
        logits = layout.logits(example.unsqueeze(0), draw.unsqueeze(0))
        return likelihood.log_likelihoods(logits, label.unsqueeze(0)).sum()

    return torch.func.vmap(torch.func.grad(log_likelihood), in_dims=(None, 0, 0))(theta, inputs, labels)
