"""Columns of the likelihood's Hessian root for blocks of examples: what is propagated back to make a Gauss-Newton matrix.

H_n = R_n R_n^T. All M columns make it exactly; S random ones R_n e, e of independent signs, make it without bias, their average
outer product being H_n (Martens, Sutskever and Swersky 2012, arXiv:1206.6464).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.likelihoods import Likelihood

MOST_EXACT = 4  # columns that are all propagated
NUM_SIGNS = 2  # random columns an example, where there are more


def num_drawn(num_outputs: int) -> int:
    """Random columns an example; 0 where all are propagated."""
    return 0 if num_outputs <= MOST_EXACT else NUM_SIGNS


class Columns:
    """Those of consecutive blocks of examples.

    Args:
        num_drawn: S, 0 for all.
        seed: of the signs.
    """

    def __init__(self, likelihood: Likelihood, *, num_drawn: int, seed: int) -> None:
        self.likelihood, self.num_drawn = likelihood, num_drawn
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, logits: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Columns (n, K), one after the other, whose outer products sum to H_n at logits (n, K); and whether it is the last."""
        with torch.no_grad():
            probabilities = self.likelihood.normalize_(logits.detach().T.unsqueeze(1).clone())[1][:, 0]
            root = self.likelihood.hessian_root(probabilities)
            if self.num_drawn:
                size = (root.shape[2], self.num_drawn, root.shape[1])
                signs = torch.randint(2, size, generator=self.generator, dtype=torch.int8) * 2 - 1
                scaled = signs.to(root.device, root.dtype) * self.num_drawn**-0.5
                root = torch.einsum("kmn,nsm->ksn", root, scaled)
        last = root.shape[1] - 1
        for index in range(last + 1):
            yield root[:, index].T.contiguous(), index == last
