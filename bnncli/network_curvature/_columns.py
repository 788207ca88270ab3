"""Columns of the likelihood's Hessian root for blocks of examples: what is propagated back to make a Gauss-Newton matrix.

H_n = R_n R_n^T. All M columns make it exactly; S random ones R_n e, e of independent signs, make it without bias, their average
outer product being H_n (Martens, Sutskever and Swersky 2012, arXiv:1206.6464). Of the empirical Fisher matrix there is one, the
gradient at the label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.targets.curvature_choice import FISHER

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

MOST_EXACT = 3  # columns that are all propagated through the network's layers: with one more, four passes are over
MOST_EXACT_REST = 2  # to parameters of which each example has its own gradient, in passes of their own
MOST_DRAWN = 2  # random columns an example, where there are more
ENOUGH = (
    10_000  # random columns of all examples together: factors err by 3 % of their size, or 3 N^-1/2 with one an example
)


def num_drawn(target: NetworkTarget) -> int:
    """Random columns an example for the layers' factors; 0 where all are propagated, or the gradients at the labels are."""
    return 0 if _num_columns(target) <= MOST_EXACT else max(1, min(MOST_DRAWN, ENOUGH // target.num_examples))


def num_drawn_rest(target: NetworkTarget) -> int:
    """The same for parameters of which each example has its own gradient."""
    return 0 if _num_columns(target) <= MOST_EXACT_REST else 1


def _num_columns(target: NetworkTarget) -> int:
    """Of H's root."""
    return 1 if target.choice.kind == FISHER else target.layout.num_outputs - target.likelihood.is_shift_invariant


class Columns:
    """Those of consecutive blocks of a target's examples.

    Args:
        num_drawn: S, 0 for all.
        seed: of the signs.
    """

    def __init__(self, target: NetworkTarget, *, num_drawn: int, seed: int) -> None:
        self.target, self.num_drawn = target, num_drawn
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, logits: Tensor, rows: slice) -> Iterator[tuple[Tensor, bool]]:
        """Columns (n, K), one after the other, whose outer products sum to H_n; and whether it is the last.

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
                # R sqrt(p) = 0: reflected so that sqrt(p) is the last unit vector, the last column is zero and left out.
                sizes = probabilities.sqrt()
                root = root[:, :-1] - root[:, -1:] * (sizes[:-1] / (1 + sizes[-1]))
        last = root.shape[1] - 1
        for index in range(last + 1):
            yield root[:, index].T.contiguous(), index == last

    def _gradient(self, logits: Tensor, rows: slice) -> Tensor:
        """Of the log likelihoods of the labels by the logits, (n, K)."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            total = self.target.likelihood.log_likelihoods(leaf.unsqueeze(0), self.target.labels[rows]).sum()
            return torch.autograd.grad(total, leaf)[0]
