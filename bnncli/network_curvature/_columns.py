"""Columns of the likelihood's Hessian root for blocks of examples, propagated back to compute a Gauss-Newton matrix.

H_n = R_n R_n^T. All M columns give it exactly. S random columns R_n e, with independent signs e, give it without bias,
since their mean outer product is H_n (Martens, Sutskever and Swersky 2012, arXiv:1206.6464). The empirical Fisher
matrix has one column, the gradient at the label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.targets.curvature_choice import FISHER

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

# up to this many columns are all propagated through the network's layers
MOST_EXACT = 3
MOST_EXACT_REST = 2  # the same for parameters with per-example gradients, which take passes of their own
MOST_DRAWN = 2  # random columns per example, if there are more columns
ENOUGH = (
    # random columns of all examples together; factors then err by 3 % (by 3 N^-1/2 with one per example)
    10_000
)


def num_drawn(target: NetworkTarget) -> int:
    """Return the number of random columns per example for the layers' factors; 0 if none are random."""
    return 0 if _num_columns(target) <= MOST_EXACT else max(1, min(MOST_DRAWN, ENOUGH // target.num_examples))


def num_drawn_rest(target: NetworkTarget) -> int:
    """Return the number of random columns per example for parameters with per-example gradients; 0 for all."""
    return 0 if _num_columns(target) <= MOST_EXACT_REST else 1


def _num_columns(target: NetworkTarget) -> int:
    """Return the number of columns of H's root."""
    return 1 if target.choice.kind == FISHER else target.layout.num_outputs - target.likelihood.is_shift_invariant


class Columns:
    """Columns for consecutive blocks of a target's examples.

    Args:
        num_drawn: S, 0 for all.
        seed: of the signs.
    """

    def __init__(self, target: NetworkTarget, *, num_drawn: int, seed: int) -> None:
        self.target, self.num_drawn = target, num_drawn
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, logits: Tensor, rows: slice) -> Iterator[tuple[Tensor, bool]]:
        """Yield columns (n, K) whose outer products sum to H_n, each with whether it is the last.

        Args:
            logits: (n, K), of the examples in `rows`.
        """
        if self.target.choice.kind == FISHER:
            yield self._gradient(logits, rows), True
            return
        likelihood = self.target.likelihood
        with torch.no_grad():
            probabilities = likelihood.normalize_(logits.detach().T.unsqueeze(1).clone())[1][:, 0]
            root = likelihood.hessian_root(probabilities)
            if self.num_drawn:
                size = (root.shape[2], self.num_drawn, root.shape[1])
                signs = torch.randint(2, size, generator=self.generator, dtype=torch.int8) * 2 - 1
                scaled = signs.to(root.device, root.dtype) * self.num_drawn**-0.5
                root = torch.einsum("kmn,nsm->ksn", root, scaled)
            elif likelihood.is_shift_invariant:
                # R sqrt(p) = 0: reflect sqrt(p) to the last unit vector; the last column is then zero.
                sizes = probabilities.sqrt()
                root = root[:, :-1] - root[:, -1:] * (sizes[:-1] / (1 + sizes[-1]))
        last = root.shape[1] - 1
        for index in range(last + 1):
            yield root[:, index].T.contiguous(), index == last

    def _gradient(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the gradients of the labels' log likelihoods in the logits, (n, K)."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            total = self.target.likelihood.log_likelihoods(leaf.unsqueeze(0), self.target.labels[rows]).sum()
            return torch.autograd.grad(total, leaf)[0]
