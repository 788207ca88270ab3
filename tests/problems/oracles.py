"""What a head's target and Hessians must be, written out by torch's own losses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear

from bnncli.parameters.layouts import HeadLayout
from bnncli.targets.last_layer import LastLayerTarget


def negative_log_likelihood(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """Nats of all examples at theta (P,), once, by the losses of torch.nn."""
    logits = linear(target.features, *target.layout.split(theta))
    if target.layout.num_outputs == 1:
        return binary_cross_entropy_with_logits(logits[:, 0], target.labels.double(), reduction="sum")
    return cross_entropy(logits, target.labels, reduction="sum")


def hessian_of_loss(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """The likelihood's Hessian (P, P) at theta (P,), by autograd."""
    return torch.autograd.functional.hessian(lambda one: negative_log_likelihood(target, one), theta)


def in_theta_order(dense: Tensor, layout: HeadLayout) -> Tensor:
    """A matrix (P, P) of rows and columns (output, feature with bias last) as theta orders them."""
    places = layout.augment(torch.arange(layout.num_params)).flatten()
    out = torch.empty_like(dense)
    out[places[:, None], places] = dense
    return out
