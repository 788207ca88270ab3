"""The full covariance: every pair of parameters.

The Hessian of a softmax is -p_k p_l off its diagonal and its rows sum to zero, so the K (K - 1) / 2 off-diagonal blocks
sum_n p_k p_l x x^T give all of H. In logit space it is exact: for a last linear layer the generalised Gauss-Newton
matrix is the Hessian.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.covariances._logit_root import LogitRoot, root_of_covariances
from bnncli.covariances._products import pack_quadratic_form, packed_products, unpack_symmetric
from bnncli.covariances._roots import inverse_root
from bnncli.layout import HeadLayout
from bnncli.prior import Prior
from bnncli.targets.stream import slices

_BLOCK_EXAMPLES = {"cpu": 1024, "cuda": 2**13}
_FEWEST_EXAMPLES = 64
_PACKED_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class Full:
    """Sigma = L L^T with L lower triangular.

    Args:
        scale_tril: L, (P, P).
        jitter: what had to be added to the precision's diagonal before it could be factored; 0 nearly always.
    """

    structure: ClassVar[str] = "full"
    scale_tril: Tensor
    jitter: float = 0.0

    @property
    def num_params(self) -> int:
        """P."""
        return self.scale_tril.shape[0]

    @staticmethod
    def num_elements(layout: HeadLayout) -> int:
        """P^2."""
        return layout.num_params**2

    @staticmethod
    def curvature_sums(features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
        """sum_n p_k p_l x x^T for each pair k < l (p (1 - p) for a single output), packed, (pairs, F (F + 1) / 2)."""
        total: Tensor | None = None
        for rows in _example_slices(features):
            product = _pair_weights(probabilities[:, rows]) @ packed_products(features[rows]).T
            total = product.double() if total is None else total.add_(product)
        assert total is not None
        return (total,)

    @staticmethod
    def hessian(sums: tuple[Tensor, ...], layout: HeadLayout, num_examples: int) -> dict[str, Tensor]:
        """`hessian.full`, (P, P) float64, written in place, one output's rows at a time."""
        pairs, outputs, size = sums[0], layout.num_outputs, layout.num_features + layout.has_bias
        places = layout.augment(torch.arange(layout.num_params, device=pairs.device))
        matrix = pairs.new_empty(layout.num_params, layout.num_params)
        if outputs == 1:
            return {"hessian.full": _put(matrix, unpack_symmetric(pairs, size), places, places[0])}
        first, second = torch.triu_indices(outputs, outputs, 1, device=pairs.device)
        number = torch.zeros(outputs, outputs, dtype=torch.int64, device=pairs.device)
        number[first, second] = number[second, first] = torch.arange(len(first), device=pairs.device)
        for k in range(outputs):
            blocks = unpack_symmetric(pairs[number[k]], size).neg_()
            blocks[k] = 0
            blocks[k] = -blocks.sum(dim=0)
            _put(matrix, blocks, places, places[k])
        return {"hessian.full": matrix}

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: HeadLayout) -> Full:
        """(H + Lambda)^{-1}, Lambda the prior's precisions, factored in float64.

        Raises:
            NumericError: when even the largest jitter leaves the precision without a Cholesky factor.
        """
        precision = hessian["hessian.full"].double().clone()
        precision.diagonal().add_(prior.diagonal(layout, device=precision.device))
        scale, jitter = inverse_root(precision)
        return cls(scale, jitter=jitter)

    def unwhiten(self, z: Tensor) -> Tensor:
        """z L^T, (S, P)."""
        return z.to(self.scale_tril) @ self.scale_tril.T

    def whiten(self, x: Tensor) -> Tensor:
        """L^{-1} x, (S, P)."""
        return torch.linalg.solve_triangular(self.scale_tril, x.to(self.scale_tril).T, upper=False).T

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P)."""
        return gradient.to(self.scale_tril) @ self.scale_tril

    def log_det_scale(self) -> float:
        """log|det L|."""
        return float(self.scale_tril.diagonal().double().log().sum())

    def logit_variance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """The diagonal of J Sigma J^T, (n, K): quadratic forms x^T Sigma_kk x."""
        every = torch.arange(layout.num_outputs, device=features.device)
        return torch.cat(list(_forms_at(features, layout, self._blocks(layout)[every, :, every])))

    def logit_projected_variance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """The diagonal of P J Sigma J^T P, (n, K): the projection acts on Sigma's blocks, before any example."""
        every, blocks = torch.arange(layout.num_outputs, device=features.device), self._blocks(layout)
        means = blocks.mean(dim=2)  # of Sigma_kl over l, (K, F, F)
        # A matrix and its transpose have the same quadratic form.
        matrices = blocks[every, :, every] - 2 * means + means.mean(dim=0)
        return torch.cat(list(_forms_at(features, layout, matrices))).clamp_min(0)

    def logit_covariance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """Exact J Sigma J^T, (n, K, K): quadratic forms x^T Sigma_kl x, all pairs of outputs in one product."""
        first, second = torch.triu_indices(layout.num_outputs, layout.num_outputs, device=features.device)
        out = features.new_empty(features.shape[0], layout.num_outputs, layout.num_outputs)
        start = 0
        for values in _forms_at(features, layout, self._blocks(layout)[first, :, second]):
            block_out = out[start : start + len(values)]
            block_out[:, first, second] = values
            block_out[:, second, first] = values
            start += len(values)
        return out

    def logit_root(self, features: Tensor, layout: HeadLayout) -> LogitRoot:
        """Roots (n, K, K) of logit_covariance, both computed in float64: under a weak prior it is nearly singular."""
        return root_of_covariances(self.logit_covariance(features.double(), layout)).to(features)

    def to_tensors(self) -> dict[str, Tensor]:
        """`cov.scale_tril` (P, P) and `cov.jitter` (1,), float64."""
        jitter = torch.tensor([self.jitter], dtype=torch.float64)
        return {"cov.scale_tril": self.scale_tril.double().cpu().contiguous(), "cov.jitter": jitter}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: HeadLayout) -> Full:
        """The inverse of to_tensors."""
        return cls(tensors["cov.scale_tril"], jitter=float(tensors["cov.jitter"]))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Full:
        """A copy elsewhere or in another precision."""
        return replace(self, scale_tril=self.scale_tril.to(device=device, dtype=dtype))

    def _blocks(self, layout: HeadLayout) -> Tensor:
        """Sigma as (K, F, K, F), in the order of the augmented matrix."""
        size, outputs = layout.num_features + layout.has_bias, layout.num_outputs
        place = _theta_places(layout, self.scale_tril.device)
        return self._sigma[place][:, place].view(outputs, size, outputs, size)

    @cached_property
    def _sigma(self) -> Tensor:
        return self.scale_tril @ self.scale_tril.T


def _forms_at(features: Tensor, layout: HeadLayout, matrices: Tensor) -> Iterator[Tensor]:
    """x^T M x for each of the matrices (M, F, F), in blocks (n, M) of the features' rows."""
    forms = pack_quadratic_form(matrices)
    for rows in _example_slices(layout.augment_features(features[:1]), features.shape[0]):
        block = layout.augment_features(features[rows]).to(forms.dtype)
        yield (forms @ packed_products(block)).T.to(features.dtype)


def _pair_weights(probabilities: Tensor) -> Tensor:
    """p_k p_l for each pair k < l, (pairs, n), of probabilities (K, n); p (1 - p) for a single output."""
    outputs = probabilities.shape[0]
    if outputs == 1:
        return probabilities * (1 - probabilities)
    first, second = torch.triu_indices(outputs, outputs, 1, device=probabilities.device)
    return probabilities[first] * probabilities[second]


def _example_slices(features: Tensor, num_examples: int | None = None) -> Iterator[slice]:
    """Slices of examples whose packed products fit the cache, or hide the cost of adding what they give."""
    size, kind = features.shape[1], features.device.type
    most = _PACKED_ELEMENTS.get(kind, 2**22) // (size * (size + 1) // 2)
    length = min(max(most, _FEWEST_EXAMPLES), _BLOCK_EXAMPLES.get(kind, 1024))
    return slices(0, features.shape[0] if num_examples is None else num_examples, length)


def _theta_places(layout: HeadLayout, device: torch.device) -> Tensor:
    """For each parameter in augmented order (output by output, the bias last), its place in theta, (P,)."""
    return layout.augment(torch.arange(layout.num_params, device=device)).flatten()


def _put(matrix: Tensor, blocks: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """The matrix (P, P), with blocks (K, F, F) in the given rows (F,) and each output's places (K, F)."""
    for block, columns in zip(blocks, places, strict=True):
        matrix[rows.unsqueeze(1), columns] = block
    return matrix
