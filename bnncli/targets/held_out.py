"""Labelled features that no target has seen, and how well draws of a last layer predict their labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.targets.logit_blocks import block_logits, draw_blocks, row_blocks
from bnncli.theta.head import HeadLayout

if TYPE_CHECKING:
    from torch import Tensor

_MOST_COLUMNS = 2**11  # logits of an example made at a time, if it has fewer: blocks of a few rows are slow


@dataclass(frozen=True)
class HeldOutFeatures:
    """Features with labels.

    Args:
        features: (M, D), on the device and in the precision that logits are made in.
        labels: (M,), there too; (M, C) where classes do not exclude each other.
        layout: how weight and bias lie in theta.
    """

    features: Tensor
    labels: Tensor
    layout: HeadLayout
    is_linearised: ClassVar[bool] = False

    def losses(self, theta: Tensor) -> Tensor:
        """Negative log (M,), float64 nats, of the average over draws theta (S, P) of each label's probability.

        Of several labels an example the mean over them: of each being there or not.
        """
        theta, layout = theta.to(self.features), self.layout
        blocks = draw_blocks(theta, layout)
        return self.losses_by(
            lambda features: (block_logits(features, block, layout) for block in blocks), num_draws=len(theta)
        )

    def losses_by(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int) -> Tensor:
        """The same of draws of the logits.

        Args:
            drawn: for features (n, D), the draws in blocks (K, s, n), which may be overwritten.
            num_draws: S, of all blocks.
        """
        features, layout = self.features, self.layout
        losses = torch.empty(features.shape[0], dtype=torch.float64, device=features.device)
        columns = min(layout.num_outputs * num_draws, max(layout.num_outputs, _MOST_COLUMNS))
        for rows in row_blocks(features.shape[0], columns, features.device):
            labels = self.labels[rows]
            parts = [layout.likelihood.decision_logs(logits, labels) for logits in drawn(features[rows])]
            logs = torch.cat(parts, dim=1).double().logsumexp(dim=1)
            losses[rows] = math.log(num_draws) - logs.mean(dim=0)
        return losses
