"""The full structure: all pairs of parameters.

The Hessian of a softmax is -p_k p_l off the diagonal and its rows sum to zero, so the K (K - 1) / 2 off-diagonal blocks
sum_n p_k p_l x x^T determine H of a last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout, ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.structures import Operations
from bnncli.structures.factorisation import PackedTriangle, Rows, inverse_root, root_of_sum
from bnncli.structures.logits import LogitCovariance, LogitRoot, root_of_covariances
from bnncli.structures.network_sums import weighted_rows
from bnncli.system.memory import is_large
from bnncli.system.signals import interruptible
from bnncli.targets.grams import (
    is_packed,
    packed_grams,
    packed_positions,
    quadratic_forms,
    unpack_symmetric,
    weighted_grams,
)
from bnncli.targets.last_layer import scale_by_likelihood, sum_over_examples

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.network import NetworkTarget


# 7,700 parameters, float32, 16 chains, two threads: products take 60 ms with all of L, 13 to 16 ms without zeros.
_LARGE, _PRODUCT_WIDTH = 2048, 1024


@dataclass(frozen=True)
class Full:
    """Sigma = L L^T with L lower triangular.

    Args:
        scale_tril: L, (P, P).
        jitter: added to the precision's diagonal to factor it; nearly always 0.
    """

    structure: ClassVar[str] = "full"
    scale_tril: Tensor
    jitter: float = 0.0

    @property
    def num_params(self) -> int:
        """P."""
        return self.scale_tril.shape[0]

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Full:
        """Return (H + Lambda)^{-1}, with prior precisions Lambda, factored in float64.

        Raises:
            NumericError: the precision has no Cholesky factor even with the largest jitter.
        """
        matrix = hessian["hessian.full"].double()
        precisions = prior.diagonal(layout, device=matrix.device).double()
        if is_large(len(matrix)):
            mean = float(matrix.diagonal().mean() + precisions.mean())
            return from_rows(lambda start, stop: matrix[start:stop], precisions, mean=mean)
        precision = matrix.clone()
        precision.diagonal().add_(precisions)
        return inverse(precision)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        z, root = z.to(self.scale_tril), self.scale_tril
        if self.num_params <= _LARGE:
            return z @ root.T
        return torch.cat([z[:, :stop] @ root[start:stop, :stop].T for start, stop in self._panels()], dim=1)

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return torch.linalg.solve_triangular(self.scale_tril, x.to(self.scale_tril).T, upper=False).T

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        gradient, root = gradient.to(self.scale_tril), self.scale_tril
        if self.num_params <= _LARGE:
            return gradient @ root
        return torch.cat([gradient[:, start:] @ root[start:, start:stop] for start, stop in self._panels()], dim=1)

    def packed(self) -> PackedTriangle | None:
        """Return L packed for thousands of float32 products with a few vectors; None if that gains nothing."""
        return PackedTriangle.of(self.scale_tril) if self.num_params > _LARGE else None

    def _panels(self) -> list[tuple[int, int]]:
        """Return ranges of rows and columns of L, whose products skip zeros."""
        size = self.num_params
        return [(start, min(start + _PRODUCT_WIDTH, size)) for start in range(0, size, _PRODUCT_WIDTH)]

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(self.scale_tril.diagonal().double().log().sum())

    def marginal_variances(self) -> Tensor:
        """Return the diagonal of Sigma, (P,)."""
        return self.scale_tril.square().sum(dim=1)

    def head_logits(self, layout: HeadLayout) -> LogitCovariance:
        """Return quadratic forms of the blocks of Sigma, which is multiplied out once."""
        return QuadraticForms(self, layout)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `cov.scale_tril` (P, P) and `cov.jitter` (1,), float64."""
        jitter = torch.tensor([self.jitter], dtype=torch.float64)
        return {"cov.scale_tril": self.scale_tril.double().cpu().contiguous(), "cov.jitter": jitter}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Full:
        """Invert to_tensors."""
        return cls(tensors["cov.scale_tril"], jitter=float(tensors["cov.jitter"]))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Full:
        """Return a copy on another device or in another precision."""
        return replace(self, scale_tril=self.scale_tril.to(device=device, dtype=dtype))


def inverse(precision: Tensor) -> Full:
    """Return the covariance of a precision (P, P), float64, which may be overwritten. Raises as from_hessian."""
    return Full(*inverse_root(precision))


def from_rows(rows: Rows, precisions: Tensor, *, mean: float) -> Full:
    """Return (H + Lambda)^{-1} of a large matrix, panel by panel, distributed over the workers.

    Args:
        rows: returns rows start..stop of H.
        precisions: diagonal of Lambda (P,), on the device of the result.
        mean: mean diagonal of H + Lambda.

    Raises:
        NumericError: as from_hessian.
    """
    return Full(*root_of_sum(rows, precisions, mean=mean))


class LastLayerFull:
    """`hessian.full` (P, P)."""

    order: ClassVar[int] = 10
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = True
    is_same_in_span: ClassVar[bool] = True
    is_fitted_in_span: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: LastLayerTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.full`, (P, P) float64."""
        return {"hessian.full": whole_of_pairs(_sum_pairs(target, theta), target.layout)}

    @staticmethod
    def rows(target: LastLayerTarget, theta: Tensor) -> Callable[[int, int], Tensor]:
        """Return a function that computes rows start..stop of `hessian.full`, from a quarter to half of its numbers."""
        return rows_of_pairs(_sum_pairs(target, theta), target.layout)

    @staticmethod
    def num_elements(layout: HeadLayout) -> int:
        """Return P^2."""
        return layout.num_params**2

    @staticmethod
    def operations(layout: HeadLayout, num_examples: int) -> Operations:
        """Count 2 N F^2 for products per pair of outputs, and a Cholesky factor and inverse; panels halve the latter."""
        size = layout.num_features + layout.has_bias
        factors = (2 if is_large(layout.num_params) else 4) / 3 * float(layout.num_params) ** 3
        return Operations(products=2 * num_examples * layout.likelihood.num_pairs * size**2, factors=factors)

    @staticmethod
    def most_elements(layout: HeadLayout, *, largest_full: int, in_span: bool) -> float:
        """Return the size of the largest full structure that is fast enough."""
        return largest_full**2


def _sum_pairs(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """Return the sums of `_sum_block` over all examples, one per pair of outputs."""
    (pairs,) = sum_over_examples(target, theta, partial(_sum_block, target.layout.likelihood))
    return scale_by_likelihood(pairs, target)


def _sum_block(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n w_n x x^T for the weights w of each pair of outputs: (pairs, F, F), or packed (pairs, T)."""
    count = likelihood.num_pairs

    def weights(rows: slice) -> Tensor:
        return likelihood.hessian_pairs(probabilities[:, rows])

    if is_packed(count, features):
        return (packed_grams(weights, features),)
    return (weighted_grams(weights, features, count=count),)


def whole_of_pairs(pairs: Tensor, layout: HeadLayout) -> Tensor:
    """Return H, (P, P) float64, from the sums of the pairs of outputs; written in place, one output's rows at a time."""
    places = layout.places(pairs.device)
    matrix = pairs.new_empty(layout.num_params, layout.num_params)
    for k, rows in enumerate(_rows_of_outputs(pairs, layout)):
        matrix[places[k]] = rows(slice(None))
    return matrix


def rows_of_pairs(pairs: Tensor, layout: HeadLayout) -> Callable[[int, int], Tensor]:
    """Return a function that computes rows start..stop of H, (stop - start, P) float64, from the sums of the pairs."""
    num_features, num_weights = layout.num_features, layout.num_outputs * layout.num_features
    outputs = _rows_of_outputs(pairs, layout)

    def rows(start: int, stop: int) -> Tensor:
        parts = []
        for k in range(start // num_features, layout.num_outputs):
            first, last = (min(max(end - k * num_features, 0), num_features) for end in (start, stop))
            if last <= first:
                break
            parts.append(outputs[k](slice(first, last)))
        biases = range(max(start, num_weights), max(stop, num_weights))
        parts += [outputs[place - num_weights](slice(num_features, None)) for place in biases]
        return torch.cat(parts)

    return rows


def _rows_of_outputs(pairs: Tensor, layout: HeadLayout) -> list[Callable[[slice], Tensor]]:
    """Return, for each output, a function that computes rows of H, (n, P), for some of its parameters, the bias last."""
    places = layout.places(pairs.device)
    packed = packed_positions(places.shape[1], pairs.device)[0] if pairs.ndim == 2 else None
    if not layout.likelihood.is_shift_invariant:
        return [partial(_own_rows, pairs[k], packed, places[k], layout.num_params) for k in range(layout.num_outputs)]
    number = _pair_numbers(layout.num_outputs, pairs.device)
    return [partial(_softmax_rows, pairs, packed, layout, number[k], k) for k in range(layout.num_outputs)]


def _own_rows(sums: Tensor, packed: Tensor | None, places: Tensor, num_params: int, some: slice) -> Tensor:
    """Return rows of an output whose parameters couple only with each other."""
    block = _symmetric(sums, packed, some)
    rows = block.new_zeros(len(block), num_params)
    rows[:, places] = block
    return rows


def _softmax_rows(
    pairs: Tensor, packed: Tensor | None, layout: HeadLayout, numbers: Tensor, k: int, some: slice
) -> Tensor:
    """Return rows of output k, whose own block is minus the sum of all others."""
    blocks = _symmetric(pairs[numbers], packed, some).neg_()
    blocks[k] = 0
    blocks[k] = -blocks.permute(1, 2, 0).contiguous().sum(dim=2)  # fixed summation order, however many rows there are
    return layout.flatten(blocks.transpose(0, 1))  # columns in theta order


def _pair_numbers(outputs: int, device: torch.device) -> Tensor:
    """Return the index of the pair k, l among all pairs k < l, (K, K), symmetric; 0 on the diagonal."""
    first, second = torch.triu_indices(outputs, outputs, 1, device=device)
    number = torch.zeros(outputs, outputs, dtype=torch.int64, device=device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=device)
    return number


def _symmetric(sums: Tensor, packed: Tensor | None, some: slice) -> Tensor:
    """Return some rows of exactly symmetric matrices (..., F, F) from the pairs' sums, unpacking them if packed."""
    if packed is not None:
        return unpack_symmetric(sums, packed[some])
    return (sums[..., some, :] + sums[..., :, some].mT).mul_(0.5)


_AT_ONCE = 16  # rows of the Hessian


class NetworkFullHessian:
    """`hessian.full` (P, P), with all second derivatives; may be indefinite far from a mode."""

    is_exact: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.full`, (P, P) float64."""
        every = torch.arange(target.layout.num_params, device=target.device)
        return {"hessian.full": hessian_between(target, theta, every)}


def hessian_between(target: NetworkTarget, theta: Tensor, indices: Tensor) -> Tensor:
    """Return second derivatives of the summed negative log likelihood at indices (N,) of theta, (N, N) float64.

    Uses products with unit vectors, in float64.
    """
    theta = theta.to(target.device).double()
    layout, likelihood = target.layout, target.likelihood
    total = torch.zeros(len(indices), len(indices), dtype=torch.float64, device=target.device)
    for rows in target.row_blocks(_AT_ONCE, theta.dtype):
        inputs, labels = target.inputs[rows].to(target.device), target.labels[rows]

        def loss(one: Tensor, inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            return -likelihood.log_likelihoods(layout.logits(inputs, one.unsqueeze(0)), labels).sum()

        pull = torch.func.vjp(torch.func.grad(loss), theta)[1]
        for begin in range(0, len(indices), _AT_ONCE):
            some = indices[begin : begin + _AT_ONCE]
            units = torch.zeros(len(some), len(theta), dtype=torch.float64, device=target.device)
            units.scatter_(1, some.unsqueeze(1), 1.0)
            total[begin : begin + _AT_ONCE] += torch.func.vmap(pull)(units)[0][:, indices]
    return (total + total.T) * (0.5 * target.likelihood_scale)


class NetworkFull:
    """`hessian.full` (P, P)."""

    order: ClassVar[int] = 10
    about: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "hessian", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    of_hessian = NetworkFullHessian

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.full`, (P, P) float64."""
        size = target.layout.num_params
        total = torch.zeros(size, size, dtype=torch.float64, device=target.device)
        for rows in weighted_rows(target, theta):
            total += rows.T @ rows
        return {"hessian.full": total * target.likelihood_scale}

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return P^2."""
        return layout.num_params**2


@dataclass(frozen=True)
class QuadraticForms:
    """x^T Sigma_kl x for all outputs k, l.

    Args:
        theta_covariance: Sigma = L L^T.
        layout: of theta.
    """

    theta_covariance: Full
    layout: HeadLayout
    is_dense: ClassVar[bool] = True

    def variance(self, inputs: Tensor) -> Tensor:
        """Return x^T Sigma_kk x, (n, K)."""
        return self._forms_at(inputs, self._diagonal)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P J Sigma J^T P, (n, K), projecting Sigma's blocks once for all examples."""
        return self._forms_at(inputs, self._projected).clamp_min(0)

    @cached_property
    def _diagonal(self) -> Tensor:
        """Sigma's diagonal blocks, one per output, (K, F, F)."""
        every = torch.arange(self.layout.num_outputs, device=self._sigma.device)
        return self._blocks(every, every)

    @cached_property
    def _projected(self) -> Tensor:
        """Matrices (K, F, F) whose forms are the variances of the logits minus their mean."""
        places = self.layout.places(self._sigma.device)
        columns = self._sigma[:, places].mean(dim=1)  # covariance of theta with the mean over outputs, (P, F)
        means = columns[places]
        # A matrix and its transpose have the same quadratic form.
        return self._diagonal - 2 * means + means.mean(dim=0)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return x^T Sigma_kl x, (n, K, K)."""
        num_outputs = self.layout.num_outputs
        first, second = torch.triu_indices(num_outputs, num_outputs, device=inputs.device)
        out = inputs.new_empty(inputs.shape[0], num_outputs, num_outputs)
        values = self._forms_at(inputs, self._blocks(first, second))
        out[:, first, second] = values
        out[:, second, first] = values
        return out

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return roots (n, K, K) of the covariances, in float64: under a weak prior they are nearly singular."""
        return root_of_covariances(self.covariance(inputs.double())).to(inputs)

    def _forms_at(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Return x^T M x for each of the matrices (M, F, F), (n, M), at features (n, D)."""
        return quadratic_forms(self.layout.augment_features(features), matrices).to(features.dtype)

    def _blocks(self, first: Tensor, second: Tensor) -> Tensor:
        """Return Sigma's blocks between outputs first (M,) and second (M,), (M, F, F), in augmented order."""
        places = self.layout.places(self._sigma.device)
        return self._sigma[places[first].unsqueeze(2), places[second].unsqueeze(1)]

    @cached_property
    def _sigma(self) -> Tensor:
        scale, operations = self.theta_covariance.scale_tril, 2 * float(self.layout.num_params) ** 3
        return interruptible(lambda: scale @ scale.T, operations=operations, device=scale.device, name="a covariance")
