"""Out-of-distribution scores of features: Mahalanobis, nearest neighbours, and the combination of three views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.shapes import check_shapes
from bnncli.system.workers import Parts
from bnncli.targets.blocks import FeatureBlocks, slices

if TYPE_CHECKING:
    from torch import Tensor


# Directions with a smaller share of the largest variance, after scaling every feature to unit variance, are rounding
# errors of linearly dependent float32 features.
RANK_CUT = 1e-10
_ROUNDING = 2.0**-46  # of float32, squared
MAX_NEIGHBOR_ROWS = 100_000  # training examples searched for neighbours
_SIMILARITIES = {"cpu": 2**23, "cuda": 2**28}  # similarities per block


@dataclass(frozen=True)
class Whitening:
    """A Gaussian over features, as the map to a standard normal.

    Args:
        mean: (D,) float64.
        root: (D, r) float64; (x - mean) root has unit covariance, r is the rank of the covariance.
    """

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, *, mean_square: Tensor) -> Whitening:
        """Build the whitening from the pseudo-inverse's root, which drops directions without variance (constant features).

        The rank is determined after scaling every feature to unit variance.

        Args:
            mean_square: (D,), mean squared features; variances that are rounding errors relative to it count as 0.

        Raises:
            DataError: no feature varies.
        """
        variance = covariance.diagonal()
        inverse = torch.where(variance > _ROUNDING * mean_square, variance.rsqrt(), 0.0)
        values, vectors = torch.linalg.eigh(covariance * inverse * inverse.unsqueeze(1))
        is_kept = values > RANK_CUT * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
        if not is_kept.any():
            raise DataError("no feature of the training split varies within a class")
        return cls(mean, inverse.unsqueeze(1) * vectors[:, is_kept] * values[is_kept].rsqrt())

    def __call__(self, features: Tensor) -> Tensor:
        """Whiten features (n, D) float64 to (n, r)."""
        return (features - self.mean) @ self.root


@dataclass(frozen=True)
class ClassGaussians:
    """One Gaussian per class over the features, with a shared covariance.

    Args:
        within: within-class Gaussian, centred at the overall mean.
        centers: (C, r) float64, whitened means of the classes with examples.
    """

    within: Whitening
    centers: Tensor

    def nearest(self, features: Tensor) -> Tensor:
        """Return the squared distance to the nearest class mean, (n,) float64 on the CPU, of features (n, D)."""

        def distances(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            return (self._nearest(block),)

        return self._of_blocks(features, distances)[0]

    def _nearest(self, block: Tensor) -> Tensor:
        whitened = self.within(block)
        cross = self.centers.square().sum(dim=1) - 2 * whitened @ self.centers.T
        return (whitened.square().sum(dim=1) + cross.amin(dim=1)).clamp_min(0)

    def _of_blocks(self, features: Tensor, work: Callable[[slice, Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        width = max(features.shape[1], len(self.centers))
        blocks = FeatureBlocks(features, self.centers.device).map(work, columns=width, dtype=torch.float64)
        return [torch.cat(part).cpu() for part in zip(*blocks, strict=True)]


@dataclass(frozen=True)
class Mahalanobis(ClassGaussians):
    """Class Gaussians with a background Gaussian of all examples.

    Args:
        total: (D, D) float64, covariance of all examples.
        mean_square: (D,), mean squared features.
    """

    total: Tensor
    mean_square: Tensor

    @classmethod
    def fit(cls, features: Tensor, labels: Tensor, *, device: torch.device) -> Mahalanobis:
        """Fit the Gaussians by maximum likelihood, in float64, in two passes over the features.

        Args:
            features: (N, D), training split; may be memory-mapped.
            labels: (N,) classes.

        Raises:
            DataError: no feature varies within a class.
        """
        check_shapes(features=(features, "N D"), labels=(labels, "N"))
        blocks, num_columns = FeatureBlocks(features, device), features.shape[1]
        classes, index = labels.to(device).unique(return_inverse=True)

        def class_sums(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            if device.type == "cpu":
                return (block.new_zeros(len(classes), num_columns).index_add_(0, index[rows], block),)
            # index_add_ on CUDA adds in any order; a matrix product is deterministic.
            is_member = torch.arange(len(classes), device=device).unsqueeze(1) == index[rows]
            return (is_member.to(block.dtype) @ block,)

        def products(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            residual = block - means[index[rows]]
            return (residual.T @ residual,)

        counts = torch.bincount(index, minlength=len(classes)).double().unsqueeze(1)
        (sums,) = blocks.sum(class_sums, columns=max(num_columns, len(classes)), dtype=torch.float64)
        means, mean = sums / counts, sums.sum(dim=0) / len(features)
        (scatter,) = blocks.sum(products, columns=num_columns, dtype=torch.float64)
        between = (means - mean).T @ (counts * (means - mean))
        covariance, total = scatter / len(features), (scatter + between) / len(features)
        mean_square = mean.square() + total.diagonal()
        within = Whitening.of(mean, covariance, mean_square=mean_square)
        return cls(within, within(means), total, mean_square)

    @cached_property
    def background(self) -> Whitening:
        """The Gaussian of all examples."""
        return Whitening.of(self.within.mean, self.total, mean_square=self.mean_square)

    def scores(self, features: Tensor) -> dict[str, Tensor]:
        """Return `mahalanobis` and `relative_mahalanobis`, (n,) float64 on the CPU, of features (n, D).

        The first is the negative squared distance to the nearest class mean. The second adds the squared distance to
        the mean of all examples under the covariance of all.
        """

        def distances(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            nearest = self._nearest(block)
            return -nearest, self.background(block).square().sum(dim=1) - nearest

        names = ("mahalanobis", "relative_mahalanobis")
        return dict(zip(names, self._of_blocks(features, distances), strict=True))


@dataclass(frozen=True)
class Neighbors:
    """Training features of unit length, searched for neighbours.

    Args:
        features: (T, D) float32; all-zero features stay 0.
        num_neighbors: k, at most T.
    """

    features: Tensor
    num_neighbors: int

    @classmethod
    def fit(
        cls,
        features: Tensor,
        *,
        device: torch.device,
        generator: torch.Generator,
        num_neighbors: int,
        max_rows: int = MAX_NEIGHBOR_ROWS,
    ) -> Neighbors:
        """Store the training features (N, D), or a random subset of `max_rows`; k is at most their number."""
        check_shapes(features=(features, "N D"))
        if len(features) > max_rows:
            chosen = torch.randperm(len(features), generator=generator, device=generator.device)[:max_rows]
            features = features[chosen.sort().values.to(features.device)]
        unit = torch.nn.functional.normalize(features.to(device=device, dtype=torch.float32))
        return cls(unit, min(num_neighbors, len(unit)))

    def scores(self, features: Tensor) -> Tensor:
        """Return `knn`: the negative distance of each row of features (n, D), at unit length, to its k-th neighbour.

        The result is (n,) float64 on the CPU. float32 products find the neighbour; its distance is computed in float64.
        Worker processes of one command share the blocks of rows.
        """
        known, device = self.features, self.features.device
        size = max(1, _SIMILARITIES.get(device.type, 2**23) // len(known))
        # |x - t|^2 = |x|^2 + |t|^2 - 2 x t: half of |t|^2 matters where t = 0.
        offset = -0.5 * known.square().sum(dim=1)
        closeness = known.new_empty(
            min(size, len(features)), len(known)
        )  # reused buffer: allocating pages costs more than the products
        blocks = list(slices(0, len(features), size))
        parts, found = Parts(len(blocks)), [known.new_empty(0, dtype=torch.float64)]
        for rows in (blocks[place] for place in parts.own):
            block = torch.nn.functional.normalize(features[rows].to(device=device, dtype=torch.float32))
            torch.addmm(offset, block, known.T, out=closeness[: len(block)])
            place = closeness[: len(block)].topk(self.num_neighbors, dim=1).indices[:, -1]
            found.append((block.double() - known[place].double()).square().sum(dim=1).sqrt())
        found_by_all = parts.of_all(torch.cat(found).cpu().numpy(), [rows.stop - rows.start for rows in blocks])
        return -torch.from_numpy(found_by_all)


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
class FittedViews:
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
    ) -> FittedViews:
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
    ) -> FittedViews:
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
