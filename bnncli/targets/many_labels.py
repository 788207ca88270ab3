"""Log posteriors of the same examples under many sets of labels, as one target: batched refits of simulated data.

The label term of a last layer is linear in theta (see last_layer.py), so that sets of labels differ by an inner product alone, and
one pass over the features serves all. Each set's theta is told in coordinates whitened by a Gaussian of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.shapes import check_shapes
from bnncli.targets.last_layer import LastLayerTarget, MinibatchTarget
from bnncli.theta.head import HeadLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ManyLabels:
    """The log posteriors of M targets over z (C, P), theta = mean + L z; row c is of target c % M.

    Args:
        targets: M, of the same features, layout and prior; their labels differ.
        means: (M, P) float64.
        roots: (M, P, P), L, of the precision that products with it are to have: most of the time goes to reading them.
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
        """How each theta lies."""
        return self.targets[0].layout

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.targets[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products."""
        return self.targets[0].dtype

    @property
    def num_examples(self) -> int:
        """N."""
        return self.targets[0].num_examples

    @property
    def is_resident(self) -> bool:
        """Whether the features lie on the device."""
        return self.targets[0].is_resident

    @cached_property
    def _own_statistics(self) -> Tensor:
        """By how much each set's label statistic differs from the first's, (M, P)."""
        statistics = torch.stack([one.label_statistic for one in self.targets])
        return (statistics - statistics[0]) * self.targets[0].likelihood_scale

    def theta(self, z: Tensor) -> Tensor:
        """theta (C, P) float64 at z (C, P)."""
        moved = (self._by_set(z).to(self.roots.dtype) @ self.roots.mT).double()
        return (self._means_of(z) + moved).transpose(0, 1).reshape(z.shape)

    def log_joint(self, theta: Tensor) -> Tensor:
        """(C,) float64 nats at z (C, P), called theta as targets have it."""
        at = self.theta(theta)
        return self.targets[0].log_joint(at) + self._labels_term(at)

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The same with the gradient by z, (C, P)."""
        at = self.theta(theta)
        value, gradient = self.targets[0].log_joint_and_grad(at)
        own = self._by_set(gradient) + self._own_statistics.unsqueeze(1)
        return value + self._labels_term(at), self._pulled(own).reshape(theta.shape)

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """Of the rows in index (B,): features (B, D) and label indicators of all sets (B, M, K), in the products' precision."""
        features, dtype = self.targets[0].rows(index), self.dtype
        indicators = [one.likelihood.indicators(one.labels[index], dtype) for one in self.targets]
        return features, torch.stack(indicators).permute(2, 0, 1)

    def minibatch(self, *examples: Tensor) -> ManyMinibatches:
        """The targets as some examples tell them, the likelihood scaled by N / B: unbiased for the whole."""
        return ManyMinibatches(self, *examples)

    def by_target(self, z: Tensor) -> Tensor:
        """theta (M, C / M * T, P) float64 of each target, chain after chain, at T draws of every row, z (C, T, P)."""
        theta = torch.stack([self.theta(some.to(self.device)) for some in z.unbind(dim=1)])
        return theta.unflatten(1, (-1, len(self.targets))).permute(2, 1, 0, 3).flatten(1, 2)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """The gradient by z (C, P) float64 of one by theta (C, P)."""
        return self._pulled(self._by_set(gradient)).reshape(gradient.shape)

    def _pulled(self, gradient: Tensor) -> Tensor:
        """The gradient by z of one by theta, (M, C / M, P), as (C / M, M, P) float64."""
        return (gradient.to(self.roots.dtype) @ self.roots).double().transpose(0, 1)

    def _by_set(self, rows: Tensor) -> Tensor:
        """Rows (C, P) by their target, (M, C / M, P)."""
        return rows.double().unflatten(0, (-1, len(self.targets))).transpose(0, 1)

    def _means_of(self, rows: Tensor) -> Tensor:
        return self.means.unsqueeze(1).expand(-1, len(rows) // len(self.targets), -1)

    def _labels_term(self, theta: Tensor) -> Tensor:
        """What the sets' own labels add to the log joint of the first's, (C,), at theta (C, P)."""
        terms = (self._by_set(theta) * self._own_statistics.unsqueeze(1)).sum(dim=2)
        return terms.transpose(0, 1).reshape(-1)


@dataclass(frozen=True)
class ManyMinibatches:
    """What some examples tell of many targets.

    Args:
        many: of all examples.
        features: (B, D), in the products' precision.
        indicators: (B, M, K), the likelihood's of their labels in each set.
    """

    many: ManyLabels
    features: Tensor
    indicators: Tensor

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """(C,) float64 nats and its gradient (C, P) float64 at z (C, P), called theta as targets have it."""
        at = self.many.theta(theta).to(self.features.dtype)
        by_row = self.indicators.permute(2, 1, 0).repeat(1, len(at) // len(self.many.targets), 1)
        value, gradient = MinibatchTarget(self.many.targets[0], self.features, by_row).log_joint_and_grad(at)
        return value, self.many.pull_back(gradient)
