"""Out-of-distribution scores of features, the same for all posteriors; higher is more in-distribution.

Mahalanobis: Lee, Lee, Lee and Shin (2018), arXiv 1807.03888, eq. (2), on the last layer's features only. Relative
Mahalanobis: Ren, Fort, Liu, Guha Roy, Padhy and Lakshminarayanan (2021), arXiv 2106.09022, eq. (3). Nearest neighbours:
Sun, Ming, Zhu and Li (2022), arXiv 2204.06507, eq. (2). All treat the training split as in-distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from bnncli.errors import DataError
from bnncli.lazy import torch
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
