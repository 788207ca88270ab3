"""Hessians of the summed negative log likelihood, without the prior, streamed over the examples.

For a last linear layer the generalised Gauss-Newton matrix (GGN) is the Hessian itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bnncli import registry
from bnncli.covariances.kron import Kron
from bnncli.machine import signals
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.stream import BLOCK_ELEMENTS

_BLOCK_EXAMPLES = {"cpu": 2**13, "cuda": 2**16}


def ggn(target: LastLayerTarget, theta: Tensor, structure: str) -> dict[str, Tensor]:
    """The Hessian of -log likelihood at theta (P,), in the parts and under the names of that structure.

    full: `hessian.full` (P, P); block: `hessian.block` (K, F, F); kron: `hessian.kron.A` (F, F), `hessian.kron.B` (K, K); diag: `hessian.diag` (P,).
    Sums over the examples (twice the data, twice the Hessian), times the target's likelihood_scale; float64.

    Raises:
        UsageError: when there is no such structure.
    """
    kind = registry.load_class("covariances", structure)
    layout = target.layout

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        signals.raise_if_interrupted("the Hessian")
        sums: tuple[Tensor, ...] = kind.curvature_sums(
            layout.augment_features(block), target.probabilities(theta, block)
        )
        return sums

    size = _BLOCK_EXAMPLES.get(target.device.type, 2**13)
    columns = max(layout.num_outputs, BLOCK_ELEMENTS.get(target.device.type, 2**19) // size)
    total = target.blocks.sum(work, columns=columns, dtype=target.dtype)
    hessian: dict[str, Tensor] = kind.hessian(total, layout, target.num_examples)
    return {name: _scaled(name, part, target.likelihood_scale) for name, part in hessian.items()}


def output_factor(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """`hessian.kron.B` (K, K) alone at theta (P,): the outputs' factor, all of the pair that changes with theta."""

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        return (Kron.output_sums(target.probabilities(theta, block)),)

    (total,) = target.blocks.sum(work, columns=target.layout.num_outputs, dtype=target.dtype)
    return _scaled("hessian.kron.B", total, target.likelihood_scale)


def kron_ggn(target: LastLayerTarget, theta: Tensor, *, before: Kron | None = None) -> dict[str, Tensor]:
    """The Kronecker pair of `ggn`; the features' factor, which no theta changes, is that of a covariance made before."""
    if before is None:
        return ggn(target, theta, "kron")
    return {"hessian.kron.A": before.feature_factor, "hessian.kron.B": output_factor(target, theta)}


def ggn_full(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """The Hessian (P, P) float64 of -log likelihood at theta (P,)."""
    return ggn(target, theta, "full")["hessian.full"]


def ggn_kron(target: LastLayerTarget, theta: Tensor) -> tuple[Tensor, Tensor]:
    """A (F, F) and B (K, K), float64, whose Kronecker product B kron A approximates the Hessian at theta (P,)."""
    parts = ggn(target, theta, "kron")
    return parts["hessian.kron.A"], parts["hessian.kron.B"]


def ggn_diag(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """The diagonal (P,) float64 of the Hessian of -log likelihood at theta (P,)."""
    return ggn(target, theta, "diag")["hessian.diag"]


def _scaled(name: str, part: Tensor, likelihood_scale: float) -> Tensor:
    """The part times the scale of the likelihood; of a Kronecker pair only the outputs' factor carries it."""
    if name == "hessian.kron.A" or likelihood_scale == 1.0:
        return part
    return torch.mul(part, likelihood_scale)
