"""Variants of the last layer's target: many sets of labels at once, and cheaper gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.shapes import check_shapes
from bnncli.targets.last_layer import (
    LastLayerTarget,
    MinibatchTarget,
    block_logits,
    draw_blocks,
    fits_cache,
    multiply_in,
    weighted_feature_sums,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ManyLabels:
    """The log posteriors of M targets over z (C, P), theta = mean + L z; row c belongs to target c % M.

    Args:
        targets: M targets with the same features, layout and prior, but different labels.
        means: (M, P) float64.
        roots: (M, P, P), L, in the precision of products with it; reading them takes most of the time.
    """

    targets: Sequence[LastLayerTarget]
    means: Tensor
    roots: Tensor
    is_capturable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        num_sets, num_params = len(self.targets), self.layout.num_params
        check_shapes(means=(self.means, f"{num_sets} {num_params}"))
        check_shapes(roots=(self.roots, f"{num_sets} {num_params} {num_params}"))
        if any(one.features is not self.targets[0].features for one in self.targets):
            raise ValueError("the targets must share their features")

    @property
    def layout(self) -> HeadLayout:
        """Layout of each theta."""
        return self.targets[0].layout

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self.targets[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products."""
        return self.targets[0].dtype

    @property
    def num_examples(self) -> int:
        """Number of examples, N."""
        return self.targets[0].num_examples

    @property
    def is_resident(self) -> bool:
        """Return whether the features are on the device."""
        return self.targets[0].is_resident

    @cached_property
    def _own_statistics(self) -> Tensor:
        """Difference of each set's label statistic from the first's, (M, P)."""
        statistics = torch.stack([one.label_statistic for one in self.targets])
        return (statistics - statistics[0]) * self.targets[0].likelihood_scale

    def theta(self, z: Tensor) -> Tensor:
        """Return theta (C, P) float64 at z (C, P)."""
        moved = (self._by_set(z).to(self.roots.dtype) @ self.roots.mT).double()
        return (self._means_of(z) + moved).transpose(0, 1).reshape(z.shape)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return the log joint (C,), float64 nats, at z (C, P), which targets call theta."""
        at = self.theta(theta)
        return self.targets[0].log_joint(at) + self._labels_term(at)

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same with the gradient in z, (C, P)."""
        at = self.theta(theta)
        value, gradient = self.targets[0].log_joint_and_grad(at)
        own = self._by_set(gradient) + self._own_statistics.unsqueeze(1)
        return value + self._labels_term(at), self._pulled(own).reshape(theta.shape)

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """Return features (B, D) and label indicators of all sets (B, M, K) of the rows in index (B,), in the products' precision."""
        features, dtype = self.targets[0].rows(index), self.dtype
        indicators = [one.likelihood.indicators(one.labels[index], dtype) for one in self.targets]
        return features, torch.stack(indicators).permute(2, 0, 1)

    def minibatch(self, *examples: Tensor) -> ManyMinibatches:
        """Return the targets estimated from some examples, with the likelihood scaled by N / B: unbiased."""
        return ManyMinibatches(self, *examples)

    def by_target(self, z: Tensor) -> Tensor:
        """Return theta (M, C / M * T, P) float64 by target, chain after chain, for T draws of every row, z (C, T, P)."""
        theta = torch.stack([self.theta(some.to(self.device)) for some in z.unbind(dim=1)])
        return theta.unflatten(1, (-1, len(self.targets))).permute(2, 1, 0, 3).flatten(1, 2)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient in z (C, P), float64, for one in theta (C, P)."""
        return self._pulled(self._by_set(gradient)).reshape(gradient.shape)

    def _pulled(self, gradient: Tensor) -> Tensor:
        """Return the gradient in z, (C / M, M, P) float64, for one in theta, (M, C / M, P)."""
        return (gradient.to(self.roots.dtype) @ self.roots).double().transpose(0, 1)

    def _by_set(self, rows: Tensor) -> Tensor:
        """Group rows (C, P) by target, (M, C / M, P)."""
        return rows.double().unflatten(0, (-1, len(self.targets))).transpose(0, 1)

    def _means_of(self, rows: Tensor) -> Tensor:
        return self.means.unsqueeze(1).expand(-1, len(rows) // len(self.targets), -1)

    def _labels_term(self, theta: Tensor) -> Tensor:
        """Return what the sets' own labels add to the first's log joint, (C,), at theta (C, P)."""
        terms = (self._by_set(theta) * self._own_statistics.unsqueeze(1)).sum(dim=2)
        return terms.transpose(0, 1).reshape(-1)


@dataclass(frozen=True)
class ManyMinibatches:
    """Many targets estimated from some examples.

    Args:
        many: of all examples.
        features: (B, D), in the products' precision.
        indicators: (B, M, K), the likelihood's for their labels in each set.
    """

    many: ManyLabels
    features: Tensor
    indicators: Tensor

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log joint (C,), float64 nats, and its gradient (C, P), float64, at z (C, P), which targets call theta."""
        at = self.many.theta(theta).to(self.features.dtype)
        by_row = self.indicators.permute(2, 1, 0).repeat(1, len(at) // len(self.many.targets), 1)
        value, gradient = MinibatchTarget(self.many.targets[0], self.features, by_row).log_joint_and_grad(at)
        return value, self.many.pull_back(gradient)


GRADIENTS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class CoarseGradient:
    """The gradient of a target's log joint as a function of the displacement from an anchor.

    Args:
        target: the log posterior.
        anchor: (P,), float64, on the target's device.
        gradient: (P,), float64, of the log joint at the anchor.
        logits: (K, N), float32, of the examples at the anchor; None if too large, and recomputed in each pass.
        precision: tf32 or bfloat16, of the products.
    """

    target: LastLayerTarget
    anchor: Tensor
    gradient: Tensor
    logits: Tensor | None
    precision: str

    @classmethod
    def about(cls, target: LastLayerTarget, anchor: Tensor, precision: str) -> CoarseGradient:
        """Build the gradient about an anchor (P,), with two passes over the data."""
        anchor = anchor.to(target.device).double()
        gradient = target.log_joint_and_grad(anchor.unsqueeze(0), dtype=torch.float64)[1][0]
        return cls(target, anchor, gradient, _kept_logits(target, anchor), precision)

    def __call__(self, displacement: Tensor) -> Tensor:
        """Return the gradient (S, P), float64, at anchor + displacement (S, P)."""
        target = self.target
        blocks = draw_blocks(displacement.to(target.device, torch.float32), target.layout)
        sums = torch.cat([self._difference(block) for block in blocks])
        prior = target.prior.curvature_times(displacement.double(), target.layout)
        return self.gradient + prior - target.likelihood_scale * sums

    def _difference(self, displacement: Tensor) -> Tensor:
        """Return sum_n (p_n(anchor + d) - p_n(anchor)) x_n in theta order, (S, P) float64, for d (S, P) float32."""
        layout, multiply = self.target.layout, multiply_in(self.precision)
        operands = torch.bfloat16 if self.precision == "bfloat16" else torch.float32

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            anchor = _logits(block, self.anchor, self.target) if self.logits is None else self.logits[:, rows].clone()
            logits = block_logits(block, displacement, layout, multiply=multiply).add_(anchor.unsqueeze(1))
            _, probabilities = layout.likelihood.normalize_(logits)
            _, expected = layout.likelihood.normalize_(anchor)
            differences = torch.empty_like(probabilities, dtype=operands)
            torch.sub(probabilities, expected.unsqueeze(1), out=differences)
            return (weighted_feature_sums(differences, block, layout, multiply=multiply),)

        columns = layout.num_outputs * (displacement.shape[0] + 1)
        blocks_in = torch.float32 if self.logits is None else operands
        return self.target.blocks.sum(work, columns=columns, dtype=blocks_in)[0]


@dataclass(frozen=True)
class SubsetResidual:
    """The gradient of a target's log joint beyond second order about an anchor, estimated from some examples.

    What an example adds beyond second order is large for few of them: where the network is sure, probabilities hardly
    change. Examples are drawn in proportion to it and weighted by the inverse probability, so the estimate is unbiased.

    Args:
        target: of the chosen examples (n, D).
        logits: (K, n), float32, at the anchor.
        weights: (n,), float32.
        share: of all examples.
    """

    target: LastLayerTarget
    logits: Tensor
    weights: Tensor
    share: float

    @classmethod
    def draw(
        cls, target: LastLayerTarget, anchor: Tensor, sizes: Tensor, count: int, generator: torch.Generator
    ) -> SubsetResidual:
        """Draw about `count` examples, systematically in their order; those with the largest sizes (N,) are certain."""
        chances = _inclusion_chances(sizes, count)
        start = torch.rand((), generator=generator, dtype=torch.float64).to(chances.device)
        index = (chances.cumsum(dim=0) + start).floor().diff(prepend=start.floor().unsqueeze(0)).nonzero()[:, 0]
        chosen = target.some(index)
        logits = _logits(chosen.features.float(), anchor.to(target.device), target)
        return cls(chosen, logits, (1 / chances[index]).float(), len(index) / target.num_examples)

    def __call__(self, displacement: Tensor) -> Tensor:
        """Return the gradient (S, P), float64, at anchor + displacement (S, P)."""
        target, layout = self.target, self.target.layout
        blocks = draw_blocks(displacement.to(target.device, torch.float32), layout)
        return -target.likelihood_scale * torch.cat([self._sum(block) for block in blocks])

    def _sum(self, displacement: Tensor) -> Tensor:
        layout = self.target.layout

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            third = _beyond_second_order(block, displacement, self.logits[:, rows], self.target)
            return (weighted_feature_sums(third.mul_(self.weights[rows]), block, layout),)

        columns = layout.num_outputs * displacement.shape[0]
        return self.target.blocks.sum(work, columns=columns, dtype=torch.float32)[0]


def residual_sizes(target: LastLayerTarget, anchor: Tensor, displacement: Tensor) -> Tensor:
    """Return how much each example adds to the gradient beyond second order, (N,): rms over displacements (S, P)."""
    anchor, displacement = anchor.to(target.device), displacement.to(target.device, torch.float32)

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        third = _beyond_second_order(block, displacement, _logits(block, anchor, target), target)
        norms = block.square().sum(dim=1).add_(float(target.layout.has_bias))
        return (third.square().sum(dim=0).mean(dim=0).mul_(norms).sqrt_(),)

    columns = target.layout.num_outputs * (displacement.shape[0] + 1)
    return torch.cat([part for (part,) in target.blocks.map(work, columns=columns, dtype=torch.float32)])


def _beyond_second_order(block: Tensor, displacement: Tensor, anchor: Tensor, target: LastLayerTarget) -> Tensor:
    """Return p(f + u) - p(f) - J u, (K, S, n), for features (n, D), displacements (S, P) and logits f (K, n) at the anchor."""
    likelihood = target.likelihood
    moved = block_logits(block, displacement, target.layout)
    _, expected = likelihood.normalize_(anchor.clone())
    expected = expected.unsqueeze(1)
    _, probabilities = likelihood.normalize_(moved + anchor.unsqueeze(1))
    return probabilities.sub_(expected).sub_(likelihood.hessian_product_(expected, moved))


def _inclusion_chances(sizes: Tensor, count: int) -> Tensor:
    """Return inclusion probabilities (N,), float64, that sum to count: in proportion to sizes, and at most 1."""
    ordered = sizes.double().sort(descending=True).values
    rest = ordered.flip(0).cumsum(dim=0).flip(0)
    # The first m are certain where the next would not be: size * (count - m) < the sum of the rest.
    certain = torch.arange(count, device=sizes.device)
    is_below = ordered[:count] * (count - certain) < rest[:count]
    num_certain = int(is_below.to(torch.uint8).argmax()) if bool(is_below.any()) else count - 1
    scale = (count - num_certain) / rest[num_certain].clamp_min(1e-300)
    return (sizes.double() * scale).clamp(max=1.0)


def choose_gradient(gradients: str, target: LastLayerTarget, anchor: Tensor) -> CoarseGradient | None:
    """Return the gradient that moves chains near an anchor (P,): None for float32, the target's own."""
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients: expected one of {', '.join(GRADIENTS)}; got {gradients!r}")
    return None if gradients == "float32" else CoarseGradient.about(target, anchor, gradients)


def _logits(block: Tensor, theta: Tensor, target: LastLayerTarget) -> Tensor:
    """Return logits (K, n) for features (n, D), float32, under one theta (P,), with float32 products."""
    return block_logits(block, theta.float().unsqueeze(0), target.layout)[:, 0]


def _kept_logits(target: LastLayerTarget, theta: Tensor) -> Tensor | None:
    """Return logits (K, N) under theta (P,); None if too large to cache, or out of memory."""
    outputs = target.layout.num_outputs
    if not fits_cache(4 * outputs * target.num_examples, target.device):
        return None
    with contextlib.suppress(torch.OutOfMemoryError):
        parts = target.blocks.map(
            lambda rows, block: (_logits(block, theta, target),), columns=outputs, dtype=torch.float32
        )
        return torch.cat([part for (part,) in parts], dim=1)
    return None
