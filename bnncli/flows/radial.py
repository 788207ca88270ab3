"""Radial flow: contraction or expansion around a point.

Rezende and Mohamed (2015), arXiv:1505.05770, equation 14 and appendix A.2; the inverse is the positive root of a
quadratic, because the layer only moves points along the ray from x0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bnncli.flows import PUBLISHED, SPACES, Recipe, load_tensors, tensors_of, uniform
from bnncli.parameters.layouts import ParamLayout


class Radial(nn.Module):
    """F(z) = z + beta (z - x0) / (alpha + |z - x0|), alpha = softplus(raw_alpha), beta = -alpha + softplus(raw_beta).

    beta > -alpha for any raw parameters, so that F is invertible. Starts near the identity, all raw parameters from
    U(-1/sqrt(P), 1/sqrt(P)) as in Pyro.

    Args:
        layout: of theta; only P matters.
        generator: of the initial parameters.
    """

    recipe: ClassVar[Recipe] = PUBLISHED
    settings: ClassVar[tuple[str, ...]] = ()
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = "alpha = softplus(raw_alpha); beta = -alpha + softplus(raw_beta)"

    def __init__(self, layout: ParamLayout, generator: torch.Generator) -> None:
        super().__init__()
        dim = layout.num_params
        bound = 1 / math.sqrt(dim)
        self.x0 = nn.Parameter(uniform((dim,), bound, generator))
        self.raw_alpha = nn.Parameter(uniform((1,), bound, generator))
        self.raw_beta = nn.Parameter(uniform((1,), bound, generator))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J| = (P - 1) log(1 + beta h) + log(1 + beta alpha h^2), (S,)."""
        alpha, beta = self._constrained()
        image, _, _, h, stretch = _move(z, self.x0, alpha, beta)
        return image, _log_det(h, stretch, alpha, z.shape[-1]).squeeze(-1)

    @staticmethod
    def push_together(layers: Sequence[Radial], z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) through all layers and the sum of their log|det J| (S,), differentiable once.

        Equals layer by layer up to rounding, in a third of the operations: what all layers share is computed for all at
        once, and backward is in closed form.
        """
        parts = [getattr(layer, name) for name in ("x0", "raw_alpha", "raw_beta") for layer in layers]
        image, log_det = _Together.apply(z, *parts)
        return image, log_det

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y: |y - x0| = R = r (1 + beta / (alpha + r)), a quadratic in r."""
        alpha, beta = self._constrained()
        offset = y - self.x0
        image_radius = torch.linalg.vector_norm(offset, dim=-1, keepdim=True)
        linear = alpha + beta - image_radius
        root = torch.sqrt(linear.square() + 4 * alpha * image_radius)
        # Of the two forms of the positive root, the one without cancellation; at the centre both are 0 / 0.
        safe = torch.where(root + linear > 0, root + linear, torch.ones_like(root))
        radius = torch.where(linear > 0, 2 * alpha * image_radius / safe, 0.5 * (root - linear))
        return self.x0 + offset / (1 + beta / (alpha + radius))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `x0` (P,), `raw_alpha` (1,), `raw_beta` (1,), float64."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return load_tensors(cls(layout, torch.Generator()), tensors)

    def summary(self) -> dict[str, float]:
        """Return alpha, beta and |x0|: beta near 0 does nothing, beta near -alpha contracts to a point."""
        with torch.no_grad():
            alpha, beta = self._constrained()
            return {"alpha": float(alpha), "beta": float(beta), "x0_norm": float(self.x0.norm())}

    def _constrained(self) -> tuple[Tensor, Tensor]:
        return _constrain(self.raw_alpha, self.raw_beta)


def _constrain(raw_alpha: Tensor, raw_beta: Tensor) -> tuple[Tensor, Tensor]:
    alpha = softplus(raw_alpha)
    return alpha, softplus(raw_beta) - alpha


def _move(z: Tensor, x0: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Return the image of z (S, P), its offset z - x0 (S, P), and (S, 1): r = |z - x0|, h = 1 / (alpha + r) and beta h."""
    offset = z - x0
    radius = torch.linalg.vector_norm(offset, dim=-1, keepdim=True)
    h = torch.reciprocal(alpha + radius)
    stretch = beta * h
    return torch.addcmul(z, stretch, offset), offset, radius, h, stretch


def _log_det(h: Tensor, stretch: Tensor, alpha: Tensor, dim: int) -> Tensor:
    """Return log|det J| (S, L) from h and beta h (S, L) in P = dim, for layers with alpha (L,)."""
    return (dim - 1) * torch.log1p(stretch) + torch.log1p(stretch * alpha * h)


class _Together(torch.autograd.Function):
    """Map z (S, P) and each layer's x0 (P,), raw_alpha (1,) and raw_beta (1,) to the last image and the sum of the log dets (S,)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        count = len(parameters) // 3
        raw = torch.cat(parameters[count:])
        alpha, beta = _constrain(*raw.view(2, count).unbind())
        kept: list[list[Tensor]] = []
        for x0, *own in zip(parameters[:count], alpha.unbind(), beta.unbind(), strict=True):
            z, *others = _move(z, x0, *own)
            kept.append(others)
        offsets, *scalars = zip(*kept, strict=True)
        radius, h, stretch = (torch.cat(parts, dim=1) for parts in scalars)
        ctx.save_for_backward(raw, alpha, radius, h, stretch, *offsets)
        return z, _log_det(h, stretch, alpha, z.shape[1]).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Backpropagate through s = beta h, which moves the image by the offset, and t = alpha h: log|det J| = (P - 1) log(1 + s) + log(1 + s t).

        Both are at most about 1 where h^2 would vanish, and d h / d alpha = d h / d r = -h^2.
        """
        assert not torch.is_grad_enabled(), "differentiable once: for second derivatives push through layer by layer"
        raw, alpha, radius, h, stretch, *offsets = ctx.saved_tensors
        to_image, to_log_det = gradients[0], gradients[1].unsqueeze(1)
        share, size = alpha * h, offsets[0].shape[1]
        inverse = torch.reciprocal(1 + stretch * share)
        # Of the log determinant: its derivative by s, then -(its derivative by h) h / s.
        by_stretch = torch.reciprocal(1 + stretch).mul_(size - 1).addcmul_(share, inverse)
        by_length = torch.addcmul(by_stretch, share, inverse) * to_log_det
        shrink = h * stretch
        # The derivative by a component of the offset is that by its length times their ratio. Where the radius about x0
        # cannot be told from 0 the direction is lost: there the ratio is made smaller so that it does not overflow.
        inward = shrink / radius.clamp(min=math.sqrt(torch.finfo(radius.dtype).tiny))
        scalars = zip(
            offsets, inward.split(1, 1), (inward * by_length).split(1, 1), stretch.neg().split(1, 1), strict=True
        )
        along, to_centers = [], []
        for place, (offset, pull, known, back) in reversed(list(enumerate(scalars))):
            dot = (to_image * offset).sum(dim=1, keepdim=True)
            to_center = (to_image * back).addcmul_(offset, torch.addcmul(known, pull, dot))
            if place or ctx.needs_input_grad[0]:
                to_image = to_image - to_center
            along.append(dot)
            to_centers.append(to_center.sum(dim=0) if len(to_center) > 1 else to_center[0])
        dot = torch.cat(along[::-1], dim=1)
        to_beta = torch.addcmul(dot, by_stretch, to_log_det).mul_(h)
        to_alpha = torch.addcmul(by_length, inverse, to_log_det, value=-1).add_(dot).mul_(shrink).add_(to_beta).neg_()
        to_raw = torch.cat([to_alpha, to_beta], dim=1).sum(dim=0)
        to_raw = torch.ops.aten.softplus_backward(to_raw, raw, 1, 20)
        return to_image if ctx.needs_input_grad[0] else None, *to_centers[::-1], *to_raw.split(1)
