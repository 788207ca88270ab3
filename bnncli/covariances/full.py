"""The full covariance: every pair of parameters.

The Hessian of a softmax is -p_k p_l off its diagonal and its rows sum to zero, so the K (K - 1) / 2 off-diagonal blocks
sum_n p_k p_l x x^T give all of H. In logit space it is exact: for a last linear layer the generalised Gauss-Newton
matrix is the Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.covariances._roots import inverse_root
from bnncli.logits import LogitRoot, root_of_covariances
from bnncli.machine.interruptible import interruptible
from bnncli.targets.grams import (
    is_packed,
    packed_grams,
    packed_places,
    quadratic_forms,
    unpack_symmetric,
    weighted_grams,
)
from bnncli.theta.head import HeadLayout
from bnncli.theta.prior import Prior


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
        """sum_n p_k p_l x x^T for each pair k < l (p (1 - p) for a single output): (pairs, F, F), or packed (pairs, T)."""
        outputs = probabilities.shape[0]
        count = max(1, outputs * (outputs - 1) // 2)

        def weights(rows: slice) -> Tensor:
            return _pair_weights(probabilities[:, rows])

        if is_packed(count, features):
            return (packed_grams(weights, features),)
        return (weighted_grams(weights, features, count=count),)

    @staticmethod
    def hessian(sums: tuple[Tensor, ...], layout: HeadLayout, num_examples: int) -> dict[str, Tensor]:
        """`hessian.full`, (P, P) float64, written in place, one output's rows at a time."""
        pairs, outputs = sums[0], layout.num_outputs
        places = _theta_places(layout, pairs.device)
        packed = packed_places(places.shape[1], pairs.device)[0] if pairs.ndim == 2 else None
        matrix = pairs.new_empty(layout.num_params, layout.num_params)
        if outputs == 1:
            matrix[places[0]] = layout.flatten(_symmetric(pairs, packed).transpose(0, 1))
            return {"hessian.full": matrix}
        number = _pair_numbers(outputs, pairs.device)
        for k in range(outputs):
            blocks = _symmetric(pairs[number[k]], packed).neg_()
            blocks[k] = 0
            blocks[k] = -blocks.sum(dim=0)
            matrix[places[k]] = layout.flatten(blocks.transpose(0, 1))  # all columns of theta in their order
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
        return _forms_at(features, layout, self._blocks(layout, every, every))

    def logit_projected_variance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """The diagonal of P J Sigma J^T P, (n, K): the projection acts on Sigma's blocks, before any example."""
        every = torch.arange(layout.num_outputs, device=features.device)
        places = _theta_places(layout, self.scale_tril.device)
        columns = self._sigma[:, places].mean(dim=1)  # of theta with the mean over the outputs, (P, F)
        means = columns[places]
        # A matrix and its transpose have the same quadratic form.
        matrices = self._blocks(layout, every, every) - 2 * means + means.mean(dim=0)
        return _forms_at(features, layout, matrices).clamp_min(0)

    def logit_covariance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """Exact J Sigma J^T, (n, K, K): quadratic forms x^T Sigma_kl x, one for each pair of outputs."""
        first, second = torch.triu_indices(layout.num_outputs, layout.num_outputs, device=features.device)
        out = features.new_empty(features.shape[0], layout.num_outputs, layout.num_outputs)
        values = _forms_at(features, layout, self._blocks(layout, first, second))
        out[:, first, second] = values
        out[:, second, first] = values
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

    def _blocks(self, layout: HeadLayout, first: Tensor, second: Tensor) -> Tensor:
        """Sigma's blocks of the outputs first (M,) and second (M,), (M, F, F), in the order of the augmented matrix."""
        places = _theta_places(layout, self.scale_tril.device)
        return self._sigma[places[first].unsqueeze(2), places[second].unsqueeze(1)]

    @cached_property
    def _sigma(self) -> Tensor:
        scale, operations = self.scale_tril, 2 * float(self.num_params) ** 3
        return interruptible(lambda: scale @ scale.T, operations=operations, device=scale.device, name="a covariance")


def _forms_at(features: Tensor, layout: HeadLayout, matrices: Tensor) -> Tensor:
    """x^T M x for each of the matrices (M, F, F), (n, M), at features (n, D)."""
    return quadratic_forms(layout.augment_features(features), matrices).to(features.dtype)


def _pair_weights(probabilities: Tensor) -> Tensor:
    """p_k p_l for each pair k < l, (pairs, n), of probabilities (K, n); p (1 - p) for a single output."""
    outputs = probabilities.shape[0]
    if outputs == 1:
        return probabilities * (1 - probabilities)
    first, second = torch.triu_indices(outputs, outputs, 1, device=probabilities.device)
    return probabilities[first] * probabilities[second]


def _pair_numbers(outputs: int, device: torch.device) -> Tensor:
    """The place of the pair k, l among all pairs k < l, (K, K), symmetric; 0 on the diagonal."""
    first, second = torch.triu_indices(outputs, outputs, 1, device=device)
    number = torch.zeros(outputs, outputs, dtype=torch.int64, device=device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=device)
    return number


def _symmetric(sums: Tensor, packed: Tensor | None) -> Tensor:
    """Matrices (M, F, F), exactly symmetric, of curvature_sums: unpacked where they are packed, by packed_places."""
    return (sums + sums.mT).mul_(0.5) if packed is None else unpack_symmetric(sums, packed)


def _theta_places(layout: HeadLayout, device: torch.device) -> Tensor:
    """Where each output's parameters (the bias last) lie in theta, (K, F)."""
    return layout.augment(torch.arange(layout.num_params, device=device))
