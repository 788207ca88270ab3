"""Labelled features that no target has seen, and how well draws of a last layer predict their labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.targets.logit_blocks import block_logits, draw_blocks, row_blocks
from bnncli.theta.head import HeadLayout


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
        features, layout = self.features, self.layout
        theta = theta.to(features)
        losses = torch.empty(features.shape[0], dtype=torch.float64, device=features.device)
        for rows in row_blocks(features.shape[0], layout.num_outputs * theta.shape[0], features.device):
            labels = self.labels[rows]
            parts = [
                layout.likelihood.decision_logs(block_logits(features[rows], block, layout), labels)
                for block in draw_blocks(theta, layout)
            ]
            logs = torch.cat(parts, dim=1).double().logsumexp(dim=1)
            losses[rows] = math.log(theta.shape[0]) - logs.mean(dim=0)
        return losses
