"""The combined out-of-distribution score: three views of an example's features, each ranked against val, as one number.

The views are the energy of the network's own logits (Liu et al. 2020, arXiv 2010.03759), the Mahalanobis distance to
the nearest class (Lee et al. 2018, arXiv 1807.03888) and the distance to the nearest training features (Sun et al.
2022, arXiv 2204.06507). The rank of the example among those of val turns each into a p-value (Bates et al. 2023, arXiv
2104.08279). The score is the sum of their logarithms, Fisher's method, with which Haroush, Frostig, Heller and Soudry
(2022, arXiv 2102.12967) combine views of a network. The ranks need only val and no outliers; training features, which a
network may have memorised, only define the views. The score depends on the network and its data, not on a posterior.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bnncli.errors import DataError
from bnncli.evaluation.feature_scores import ClassGaussians, Mahalanobis, Neighbors, Whitening
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.targets.blocks import FeatureBlocks

if TYPE_CHECKING:
    from torch import Tensor

REVISION = 1  # increases when `fit` returns something else for the same features
NUM_NEIGHBORS, NEIGHBOR_ROWS = (
    5,
    5_000,
)  # as good as 50 of 60,000 (docs/explanation/outliers.md), and small enough to export
COVARIANCE_ROWS = 50_000  # training examples used for means and covariance
MOST_KNOTS = 512
TAIL_SHARE = 0.1  # share of val that sets the scale of the tail below the lowest score


@dataclass(frozen=True)
class TailRanks:
    """log p-values of scores from their ranks among reference scores.

    The rank is interpolated between reference scores. Below the lowest one the p-value falls as 1 / (1 + distance /
    scale), so that far examples remain distinguishable with few references.

    Args:
        knots: (m,) float64, some reference scores in ascending order, including all of the lowest.
        counts: (m,) float64, number of references at most equal to each knot.
        size: number of references, n.
        scale: mean distance of the lowest tenth of the references from the tenth percentile.
    """

    knots: Tensor
    counts: Tensor
    size: int
    scale: float

    @classmethod
    def of(cls, references: Tensor) -> TailRanks:
        """Build the ranks of reference scores (n,)."""
        ordered, size = references.double().sort().values, len(references)
        ranks = np.arange(1, size + 1)
        if size > MOST_KNOTS:
            ranks = np.unique(np.geomspace(1, size, MOST_KNOTS).round().astype(np.int64))
        num_low = max(1, int(TAIL_SHARE * size))
        scale = float((ordered[num_low] - ordered[:num_low]).mean())
        least = 1e-6 * float(ordered.abs().max())  # tied scores have no scale
        counts = torch.from_numpy(ranks).to(ordered)
        return cls(ordered[torch.from_numpy(ranks - 1).to(ordered.device)], counts, size, max(scale, least, 1e-30))

    def log_p(self, scores: Tensor) -> Tensor:
        """Return the log p-values (N,) float64 of scores (N,)."""
        return torch.cat([self._log_p(block) for block in scores.double().split(4096)])

    def _log_p(self, scores: Tensor) -> Tensor:
        above = scores.unsqueeze(1) - self.knots[:-1]
        shares = (above / self.knots.diff().clamp_min(1e-30)).clamp(0, 1)
        count = self.counts[0] + shares @ self.counts.diff()
        excess = (self.knots[0] - scores).clamp_min(0) / self.scale
        return ((1 + count) / (1 + self.size)).log() - excess.log1p()


def fit_cost(num_examples: int, num_features: int) -> float:
    """Estimate the number of multiplications for the covariance of features (N, D) and its eigenvectors."""
    return float(num_features**2) * (min(num_examples, COVARIANCE_ROWS) + 16 * num_features)


@dataclass(frozen=True)
class Combined:
    """The views, fitted to training features, and the reference ranks from val.

    Args:
        gaussians: None unless each example has one class.
        layout, theta: the network's own head, theta (P,); None without one.
        ranks: view name to reference ranks.
    """

    gaussians: ClassGaussians | None
    neighbors: Neighbors
    layout: HeadLayout | None
    theta: Tensor | None
    ranks: Mapping[str, TailRanks]

    @classmethod
    def fit(
        cls,
        features: Tensor,
        labels: Tensor | None,
        val: Tensor,
        *,
        layout: HeadLayout | None = None,
        theta: Tensor | None = None,
        device: torch.device,
        generator: torch.Generator,
    ) -> Combined:
        """Fit the views to training features (N, D) with labels (N,), and the ranks to val (n, D), n >= 10.

        Args:
            labels: None or multi-label (N, C): no Mahalanobis distance.
            generator: subsamples large training sets.
        """
        neighbors = Neighbors.fit(
            features, device=device, generator=generator, num_neighbors=NUM_NEIGHBORS, max_rows=NEIGHBOR_ROWS
        )
        gaussians = _gaussians(features, labels, device, generator)
        theta = None if theta is None or layout is None else theta.to(device, torch.float64)
        views = cls(gaussians, neighbors, layout, theta, {})._views(val)
        ranks = {name: TailRanks.of(scores.to(device)) for name, scores in views.items()}
        return cls(gaussians, neighbors, layout, theta, ranks)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all fitted tensors on the CPU, by name.

        `neighbors`; per view `knots.`, `counts.` and `tail.`; `class.` of the Gaussians.
        """
        found = {"neighbors": self.neighbors.features}
        if self.gaussians is not None:
            within = self.gaussians.within
            found |= {"class.mean": within.mean, "class.root": within.root, "class.centers": self.gaussians.centers}
        for name, own in self.ranks.items():
            tail = torch.tensor([own.size, own.scale], dtype=torch.float64)
            found |= {f"knots.{name}": own.knots, f"counts.{name}": own.counts, f"tail.{name}": tail}
        return {name: tensor.cpu() for name, tensor in found.items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], *, layout: HeadLayout | None, theta: Tensor | None, device: torch.device
    ) -> Combined:
        """Invert to_tensors, on the device; layout and theta as in `fit`. Raises KeyError if a tensor is missing."""
        found = {name: tensor.to(device) for name, tensor in tensors.items()}
        gaussians = None
        if "class.mean" in found:
            gaussians = ClassGaussians(Whitening(found["class.mean"], found["class.root"]), found["class.centers"])
        ranks = {}
        for name in ("energy", "mahalanobis", "knn"):
            if f"knots.{name}" in found:
                size, scale = tensors[f"tail.{name}"].tolist()
                ranks[name] = TailRanks(found[f"knots.{name}"], found[f"counts.{name}"], int(size), scale)
        neighbors = Neighbors(found["neighbors"], min(NUM_NEIGHBORS, len(found["neighbors"])))
        theta = None if theta is None or layout is None else theta.to(device, torch.float64)
        return cls(gaussians, neighbors, layout, theta, ranks)

    def scores(self, features: Tensor) -> Tensor:
        """Return sums of log p-values (n,), float64 on the CPU, of features (n, D); higher is more in-distribution."""
        found = torch.zeros(len(features), dtype=torch.float64)
        if not len(features):
            return found
        views = self._views(features)
        for name, ranks in self.ranks.items():
            found += ranks.log_p(views[name].to(ranks.knots.device)).cpu()
        return found

    def _views(self, features: Tensor) -> dict[str, Tensor]:
        """Return the scores (n,) of each view, higher for in-distribution examples."""
        found = {} if self.theta is None else {"energy": self._energy(features)}
        if self.gaussians is not None:
            found["mahalanobis"] = -self.gaussians.nearest(features)
        return {**found, "knn": self.neighbors.scores(features)}

    def _energy(self, features: Tensor) -> Tensor:
        layout, theta = self.layout, self.theta
        assert layout is not None
        assert theta is not None

        def partitions(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            return (layout.likelihood.log_partitions(layout.logits(block, theta.unsqueeze(0))[0]),)

        blocks = FeatureBlocks(features, theta.device).map(partitions, columns=layout.widest, dtype=torch.float64)
        return torch.cat([part.cpu() for (part,) in blocks])


def _gaussians(
    features: Tensor, labels: Tensor | None, device: torch.device, generator: torch.Generator
) -> Mahalanobis | None:
    """Fit Gaussians of all classes to at most COVARIANCE_ROWS examples; None without classes or within-class variance."""
    if labels is None or labels.ndim != 1:
        return None
    if len(features) > COVARIANCE_ROWS:
        rows = torch.randperm(len(features), generator=generator, device=generator.device)[:COVARIANCE_ROWS]
        rows = rows.sort().values.to(features.device)
        features, labels = features[rows], labels[rows]
    try:
        return Mahalanobis.fit(features, labels, device=device)
    except DataError:
        return None
