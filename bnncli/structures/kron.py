"""The Kronecker-factored structure: H is approximated by B kron A, outputs times features, for each matrix of weights.

Last layer. A = mean_n x x^T (with a one for the bias), B = sum_n (diag(p) - p p^T), after Martens and Grosse (2015),
arXiv:1503.05671. With A = V diag(a) V^T and B = U diag(b) U^T, Sigma = (U kron V) diag(1 / (b_i a_j + precision)) (U
kron V)^T exactly. L is its symmetric root, which does not depend on the signs and the order of the eigenvectors. If the
biases have a precision of their own, they are rescaled to the weights' precision: R = diag(1, ..., 1, sqrt(weight
precision / bias precision)) turns B kron A + I kron Lambda into B kron R A R + precision I, and L = (I kron R) times
the symmetric root of the inverse. This is still exact.

Network. One pair of factors for every weight that acts as a matrix, with its bias. With inputs x_nt and gradients g_nt
at the outputs of positions t = 1..T of example n, for each column of the Hessian's root, a layer's block sum_n (sum_t
g_nt kron x_nt)(sum_t g_nt kron x_nt)^T is approximated by (sum_nt g g^T) kron (mean_nt x x^T); over positions Grosse
and Martens (2016), arXiv:1602.01407, the setting "expand" of Eschenhagen et al. (2023), arXiv:2311.00636. It is exact
if x or g are the same for all n and there is one position. All other parameters have a diagonal.

A layer's covariance. H = W diag(s) W^T with W = U kron V, the eigenvectors of the output and feature factors. If the
biases have a precision of their own, output direction i has the precision V (diag(s_i) + weight precision + d v v^T)
V^T, where v is the last row of V and d the difference of the precisions: a diagonal matrix plus one of rank one, with a
closed-form inverse and root (Sherman and Morrison 1950). With D = diag(s_i) + weight precision, q = D^{-1/2} v and c =
1 + d |q|^2, L = W D^{-1/2} (I - g q q^T) W^T, g = (1 - c^{-1/2}) / |q|^2. This is exact for every prior, in bases that
do not depend on it. As |v| = 1, c = sum_j v_j^2 (s_ij + bias precision) / (s_ij + weight precision), which loses no
digits to cancellation when biases are nearly free.

Large factors. With a rank k, a factor of more than 2 k rows is kept as its k leading eigenvectors V (F, k) and the mean
of its other eigenvalues: V diag(a) V^T + m (I - V V^T). The trace is exact, unlike in the low-rank factors of
Laplace-LoRA (Yang et al. 2024, arXiv:2308.13111), where m is 0 and the prior alone fills these directions. The factor is
never formed: its products with 6 k random vectors are summed in the same pass, and give V by the method of Nystrom
(Tropp et al. 2017, arXiv:1706.05736). In the coordinates V^T x and x - V V^T x all of the above holds unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout, MatrixLayout, ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.structures import Covariance, Operations
from bnncli.structures.block import InLayers
from bnncli.structures.diag import Diag
from bnncli.structures.logits import LogitCovariance, LogitRoot
from bnncli.structures.network_logits import (
    BlockRoot,
    MatrixDerivatives,
    PulledBlock,
    Turned,
    weighted_root,
)
from bnncli.structures.network_sums import (
    Columns,
    Matrix,
    Piece,
    coordinates,
    diagonal_of,
    find_checked,
    forward,
    from_coordinates,
    gradients,
    is_complete,
    matrices_of,
    num_drawn,
    num_drawn_rest,
    place_of,
    row_coordinates,
    scales_of,
)
from bnncli.system.signals import eigenvectors
from bnncli.targets.last_layer import scale_by_likelihood, sum_over_examples

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.network import NetworkTarget


_FACTOR = "hessian.kron.A"  # the feature factor of a head; parts of layers have longer names


@dataclass(frozen=True)
class Kron:
    """(B kron A + Lambda)^{-1} in a joint eigenbasis; build with from_hessian.

    Args:
        feature_factor, output_factor: A (F, F) with F = D + 1 (D without a bias), B (K, K).
        feature_values, output_values: eigenvalues a (F,) of R A R and b (K,) of B.
        feature_basis, output_basis: eigenvectors V (F, F) of R A R and U (K, K) of B, in columns.
        scales: (K, F), (b_i a_j + weight precision)^{-1/2}.
        prior: of weights and biases.
        layout: position of the augmented matrix (K, F) in theta.
    """

    structure: ClassVar[str] = "kron"
    feature_factor: Tensor
    output_factor: Tensor
    feature_values: Tensor
    output_values: Tensor
    feature_basis: Tensor
    output_basis: Tensor
    scales: Tensor
    prior: Prior
    layout: MatrixLayout

    @property
    def num_params(self) -> int:
        """P."""
        return self.scales.numel()

    @property
    def bias_unit(self) -> float:
        """Last entry of R, the scale of the biases; 1 if they have the weights' precision."""
        return _bias_unit(self.prior, self.layout)

    @classmethod
    def from_hessian(
        cls, hessian: dict[str, Tensor], prior: Prior, layout: MatrixLayout, *, before: Kron | None = None
    ) -> Kron | KronLayers:
        """Return (B kron A + Lambda)^{-1} with prior precisions Lambda, per layer if the Hessian has several.

        Args:
            before: another covariance; reuses the eigenvectors of each factor that is the same tensor. Those of A
                depend on the prior only through the scale of the biases, so with a single precision they are computed
                once.

        Raises:
            NumericError: a factor is not finite.
        """
        if _FACTOR not in hessian:
            return KronLayers.from_hessian(hessian, prior, layout)
        feature_factor, output_factor = hessian[_FACTOR].double(), hessian["hessian.kron.B"].double()
        unit = _bias_unit(prior, layout)
        if before is not None and before.feature_factor is feature_factor and before.bias_unit == unit:
            feature_values, feature_basis = before.feature_values, before.feature_basis
        else:
            feature_values, feature_basis = _eigenvectors(_in_bias_units(feature_factor, unit))
        if before is not None and before.output_factor is output_factor:
            output_values, output_basis = before.output_values, before.output_basis
        else:
            output_values, output_basis = _eigenvectors(output_factor)
        curvature = torch.outer(output_values.clamp(min=0), feature_values.clamp(min=0))
        scales = (curvature + prior.weight_precision).rsqrt()
        return cls(
            feature_factor, output_factor, feature_values, output_values, feature_basis, output_basis, scales, prior, layout
        )  # fmt: skip

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._scale_biases(self._in_eigenbasis(z, self.scales), self.bias_unit)

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return self._in_eigenbasis(self._scale_biases(x, 1 / self.bias_unit), 1 / self.scales)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._in_eigenbasis(self._scale_biases(gradient, self.bias_unit), self.scales)

    def rotated(self) -> RotatedKron:
        """Return another root of the same covariance, which takes half the products."""
        return RotatedKron(self)

    def widest(self, count: int) -> Tensor | None:
        """Return the products of eigenvectors with the largest variances, (P, K) float64; None if biases are rescaled."""
        if self.bias_unit != 1:
            return None
        chosen = largest_coordinates(self.scales, count)
        return self.layout.flatten(self.output_basis @ chosen @ self.feature_basis.T).T.double()

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(self.scales.double().log().sum()) + self.layout.num_outputs * math.log(self.bias_unit)

    def head_logits(self, layout: HeadLayout) -> LogitCovariance:
        """Return U diag(v) U^T, with v the variances along U."""
        return AlongOutputBasis(self, layout)

    @staticmethod
    def network_root() -> type[BlockRoot]:
        """Return the kind of block that a layer's Jacobian is multiplied by."""
        return TurnedBlock

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `hessian.kron.A`, `hessian.kron.B` and the prior's tensors; loading recomputes the eigenbasis."""
        return {
            _FACTOR: self.feature_factor.double().cpu().contiguous(),
            "hessian.kron.B": self.output_factor.double().cpu().contiguous(),
            **self.prior.to_tensors(),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: MatrixLayout) -> Kron | KronLayers:
        """Invert to_tensors."""
        return cls.from_hessian(tensors, Prior.from_tensors(tensors), layout)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Kron:
        """Return a copy on another device or in another precision."""
        tensors: dict[str, Any] = {
            field.name: value.to(device=device, dtype=dtype)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **tensors)

    def _scale_biases(self, x: Tensor, factor: float) -> Tensor:
        """Multiply the biases in x (..., P) by a factor."""
        if factor == 1:
            return x
        size = self.layout.num_outputs * self.layout.num_features
        return torch.cat([x[..., :size], x[..., size:] * factor], dim=-1)

    def _in_eigenbasis(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply the coordinates of x (S, P) in the joint eigenbasis by factors (K, F)."""
        matrix = self.layout.augment(x.to(self.scales))
        rotated = (self.output_basis.T @ matrix @ self.feature_basis) * factors
        return self.layout.flatten(self.output_basis @ rotated @ self.feature_basis.T)


@dataclass(frozen=True)
class RotatedKron:
    """L R, with L of a Kron and R the rotation to its eigenbasis; for linear systems, whose coordinates do not matter."""

    kron: Kron

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z (L R)^T, (S, P)."""
        kron = self.kron
        scaled = kron.layout.augment(z.to(kron.scales)) * kron.scales
        rotated = kron.layout.flatten(kron.output_basis @ scaled @ kron.feature_basis.T)
        return kron._scale_biases(rotated, kron.bias_unit)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L R, (S, P)."""
        kron = self.kron
        matrix = kron.layout.augment(kron._scale_biases(gradient, kron.bias_unit).to(kron.scales))
        return kron.layout.flatten((kron.output_basis.T @ matrix @ kron.feature_basis) * kron.scales)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RotatedKron:
        """Return a copy on another device or in another precision."""
        return RotatedKron(self.kron.to(device=device, dtype=dtype))


def _eigenvectors(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (F,) and eigenvectors (F, F) of a factor. Raises NumericError if it is not finite."""
    return eigenvectors(factor, what="the Kronecker factors of the Hessian")


def _bias_unit(prior: Prior, layout: MatrixLayout) -> float:
    """Return sqrt(weight precision / bias precision); 1 without a bias or a separate precision."""
    if prior.is_isotropic or prior.bias_precision is None or not layout.has_bias:
        return 1.0
    return math.sqrt(prior.weight_precision / prior.bias_precision)


def _in_bias_units(factor: Tensor, unit: float) -> Tensor:
    """Return R A R, (F, F), for A (F, F)."""
    if unit == 1:
        return factor
    scaled = factor.clone()
    scaled[-1] *= unit
    scaled[:, -1] *= unit
    return scaled


class LastLayerKron:
    """`hessian.kron.A` (F, F), the feature factor, independent of theta; `hessian.kron.B` (K, K), the output factor."""

    order: ClassVar[int] = 30
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = False
    is_same_in_span: ClassVar[bool] = True
    is_fitted_in_span: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ("hessian.kron.A",)

    @staticmethod
    def hessian(
        target: LastLayerTarget, theta: Tensor, *, before: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return `hessian.kron.A` (F, F) and `hessian.kron.B` (K, K), float64; only B carries the likelihood's scale."""
        if before is not None:
            return {"hessian.kron.A": before["hessian.kron.A"], "hessian.kron.B": _output_factor(target, theta)}
        features, outputs = sum_over_examples(target, theta, partial(_sum_block, target.layout.likelihood))
        return {
            "hessian.kron.A": features / target.num_examples,
            "hessian.kron.B": scale_by_likelihood(outputs, target),
        }

    @staticmethod
    def num_elements(layout: MatrixLayout) -> int:
        """Return F^2 + K^2, plus K F scales."""
        return (layout.num_features + layout.has_bias) ** 2 + layout.num_outputs**2 + layout.num_params

    @staticmethod
    def operations(layout: MatrixLayout, num_examples: int) -> Operations:
        """Count 2 N K^2 for products and the eigenvectors of B; once, 2 N F^2 for products and the eigenvectors of A."""
        size, outputs = layout.num_features + layout.has_bias, layout.num_outputs
        return Operations(
            products=2 * num_examples * outputs**2,
            factors=10 * float(outputs) ** 3,
            products_once=2 * num_examples * size**2,
            factors_once=10 * float(size) ** 3,
        )

    @staticmethod
    def most_elements(layout: MatrixLayout, *, largest_full: int, in_span: bool) -> float:
        """Return infinity for up to `largest_full` / 3 outputs, else 0, because a search decomposes B ten times."""
        return math.inf if layout.num_outputs <= largest_full / 3 else 0.0


def _sum_block(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n x x^T (F, F) and the output part (K, K), from features (n, F) and probabilities (K, n)."""
    return (features.T @ features).double(), likelihood.hessian_sum(probabilities)


def _output_factor(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """Return B (K, K) at theta (P,); needs no product with the features except the logits, if those are not cached."""
    probabilities = target.row_probabilities(theta)

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        return (target.layout.likelihood.hessian_sum(probabilities(rows, block)),)

    (total,) = target.blocks.sum(work, columns=target.layout.num_outputs, dtype=target.dtype)
    return scale_by_likelihood(total, target)


class NetworkKron:
    """`hessian.kron.<weight>.values` (K, F), `.outputs` (K, K), `.features` (F, F), and `hessian.kron.rest`.

    With a rank: see EigenLayers.
    """

    order: ClassVar[int] = 40
    about: ClassVar[str] = "Kronecker factors of each layer"
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return each layer's eigenvectors, the products of the eigenvalues, and the diagonal of the rest."""
        found = LayerFactors.of(target, theta)
        bases = found.bases()
        return build_parts("kron", found, bases, {name: basis.values for name, basis in bases.items()})

    @staticmethod
    def metrics(hessian: dict[str, Tensor]) -> dict[str, Any]:
        """Return how the factors were computed."""
        return describe_factors("kron", hessian)

    @staticmethod
    def num_elements(layout: ModuleLayout, rank: int | None = None) -> int:
        """Return F^2 + K^2 summed over layers, plus P; with a rank, 6 rank F for a large F."""
        sides = (side for one in matrices_of(layout) for side in (one.num_columns, one.num_outputs))
        return sum(side * (num_tests(side, rank) or side) for side in sides) + layout.num_params


_TESTS = 6  # random test vectors per eigenvector of a large factor


def num_tests(size: int, rank: int | None) -> int | None:
    """Return the number of test vectors of a factor (size, size); None for one that is formed."""
    return None if rank is None or size <= 2 * rank else min(size, _TESTS * rank)


@dataclass
class FactorSum:
    """A sum of x x^T, (F, F), or of its products with test vectors where only leading eigenvectors are wanted.

    Args:
        total: (F, F), or times W, (F, l), float64.
        rank: number of eigenvectors to keep.
        test: W (F, l) float64; None if the sum is formed.
        trace: of the sum, if it is not formed.
    """

    total: Tensor
    rank: int | None
    test: Tensor | None
    trace: Tensor

    @classmethod
    def empty(cls, size: int, rank: int | None, device: torch.device) -> FactorSum:
        """Return zeros."""
        count = num_tests(size, rank)
        generator = torch.Generator().manual_seed(size)
        test = None if count is None else torch.randn(size, count, generator=generator, dtype=torch.float64).to(device)
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        return cls(zeros(size, count or size), rank, test, zeros(()))

    def add_inputs(self, use: Any) -> int:
        """Add the inputs of one use; returns their number."""
        if self.test is None:
            gram, count = use.gram()
            self.total += gram
            return int(count)
        count = 0
        for columns in use.column_blocks():
            self.add(columns)
            count += columns.shape[1]
        return count

    def add(self, columns: Tensor) -> None:
        """Add X X^T of columns X (F, n)."""
        if self.test is None:
            self.total += (columns @ columns.T).double()
        else:
            self.total += (columns @ (columns.T @ self.test.to(columns))).double()
            self.trace += columns.square().sum(dtype=torch.float64)

    def times(self, scale: float) -> FactorSum:
        """Return the sum times a number."""
        return replace(self, total=self.total * scale, trace=self.trace * scale)

    def eigenvectors(self, what: str) -> tuple[Tensor, Tensor]:
        """Return eigenvalues (F,) and vectors (F, F); of a sum that is not formed (k + 1,), the last for all others, and (F, k).

        Raises:
            NumericError: the sum is not finite.
        """
        if self.test is None:
            return eigenvectors(self.total, what=what)
        assert self.rank is not None
        core = self.test.T @ self.total
        values, vectors = eigenvectors((core + core.T) / 2, what=what)
        is_large = values > len(self.total) * torch.finfo(torch.float64).eps * values[-1]
        roots = torch.where(is_large, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
        basis, sizes, _ = torch.linalg.svd(self.total @ (vectors * roots), full_matrices=False)
        leading = sizes[: self.rank].square()
        rest = (self.trace - leading.sum()).clamp(min=0) / (len(self.total) - self.rank)
        return torch.cat([leading, rest.unsqueeze(0)]), basis[:, : self.rank]


@dataclass(frozen=True)
class Basis:
    """Eigenvectors of the factors of one layer.

    Args:
        outputs: U (K, K), or the leading ones.
        features: V (F, F), likewise.
        values: (K, F), products of their eigenvalues; of leading vectors (k + 1, ...), with the mean of the others last.
    """

    outputs: Tensor
    features: Tensor
    values: Tensor


@dataclass(frozen=True)
class LayerFactors:
    """Factors of each layer, float64.

    Args:
        matrices: the layers.
        features: by weight name, the mean of x x^T.
        outputs: by weight name, the sum of g g^T.
        rest: diagonal of all other parameters.
        num_drawn: random columns per example used for the factors or the rest; 0 for all columns.
    """

    matrices: list[Matrix]
    features: dict[str, FactorSum]
    outputs: dict[str, FactorSum]
    rest: Tensor
    num_drawn: int

    @classmethod
    def of(cls, target: NetworkTarget, theta: Tensor) -> LayerFactors:
        """Compute the factors at theta (P,)."""
        layout = target.layout
        theta = theta.to(target.device, target.dtype)
        pieces = find_checked(
            layout, theta, target.inputs[:2].to(target.device), [*matrices_of(layout), *scales_of(layout)]
        )
        matrices = [piece for piece in pieces if isinstance(piece, Matrix)]
        sums = _LayerSums.empty(matrices, layout.num_params, target.device, target.choice.rank)
        sums.add_all(target, theta, pieces)
        known = {part.name for piece in pieces for part in piece.parts}
        others = [part for part in layout.parts if part.name not in known]
        drawn_rest = (num_drawn_rest(target) if pieces else num_drawn(target)) if others else 0
        columns = Columns(target, num_drawn=drawn_rest, seed=0)
        for part, values in zip(others, diagonal_of(target, theta, others, columns), strict=True):
            sums.diagonal[part.place] = values
        taken = {part.name for matrix in matrices for part in matrix.parts}
        rest = [sums.diagonal[part.place] for part in layout.parts if part.name not in taken]
        scale = target.likelihood_scale
        return cls(
            matrices,
            {name: total.times(1 / sums.positions[name]) for name, total in sums.features.items()},
            {name: total.times(scale) for name, total in sums.outputs.items()},
            torch.cat(rest) * scale if rest else sums.diagonal[:0],
            max(num_drawn(target), drawn_rest),
        )

    def bases(self) -> dict[str, Basis]:
        """Return the eigenbases by weight name. Raises NumericError if a factor is not finite."""
        found = {}
        for name, factor in self.features.items():
            what = f"the Kronecker factors of {name}"
            feature_values, features = factor.eigenvectors(what)
            output_values, outputs = self.outputs[name].eigenvectors(what)
            values = torch.outer(output_values.clamp(min=0), feature_values.clamp(min=0))
            found[name] = Basis(outputs.contiguous(), features.contiguous(), values)
        return found


def build_parts(
    structure: str, factors: LayerFactors, bases: dict[str, Basis], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the parts `hessian.<structure>.` of a Hessian from the bases and the curvatures (K, F) along them."""
    parts: dict[str, Tensor] = {}
    for name, basis in bases.items():
        own = {"values": values[name], "outputs": basis.outputs, "features": basis.features}
        parts |= {f"hessian.{structure}.{name}.{key}": tensor for key, tensor in own.items()}
    if len(factors.rest):
        parts[f"hessian.{structure}.rest"] = factors.rest
    return parts | {f"hessian.{structure}.drawn": torch.tensor([factors.num_drawn], dtype=torch.float64)}


def describe_factors(structure: str, hessian: dict[str, Tensor]) -> dict[str, Any]:
    """Return the number of random columns per example (0 for all) and the number of parameters with a diagonal."""
    rest = hessian.get(f"hessian.{structure}.rest")
    drawn = int(hessian[f"hessian.{structure}.drawn"])
    return {"columns_drawn": drawn, "num_diagonal_params": 0 if rest is None else len(rest)}


@dataclass(frozen=True)
class _LayerSums:
    """Sums over examples and positions, float64.

    Args:
        features: by weight name, the sum of x x^T.
        outputs: by weight name, the sum of g g^T.
        positions: by weight name, the number of x.
        diagonal: (P,), sums of squared gradients of scales.
    """

    features: dict[str, FactorSum]
    outputs: dict[str, FactorSum]
    positions: dict[str, int]
    diagonal: Tensor

    @classmethod
    def empty(cls, matrices: Sequence[Matrix], num_params: int, device: torch.device, rank: int | None) -> _LayerSums:
        """Return zeros; with a rank, only the leading eigenvectors of large factors can be found."""
        return cls(
            {one.name: FactorSum.empty(one.num_columns, rank, device) for one in matrices},
            {one.name: FactorSum.empty(one.num_outputs, rank, device) for one in matrices},
            {one.name: 0 for one in matrices},
            torch.zeros(num_params, dtype=torch.float64, device=device),
        )

    def add_all(self, target: NetworkTarget, theta: Tensor, pieces: Sequence[Piece]) -> None:
        """Add all examples of the target, at theta (P,)."""
        columns = Columns(target, num_drawn=num_drawn(target), seed=0)
        places = {piece.parts[0].name: place_of(piece) for piece in pieces}
        for rows in target.row_blocks(1, theta.dtype) if pieces else ():
            logits, noted = forward(target.layout, theta, target.inputs[rows].to(target.device), pieces)
            for name in self.features:
                for use, _ in noted[name]:
                    self.positions[name] += self.features[name].add_inputs(use)
            for column, is_last in columns.of(logits, rows):
                for name, pairs in gradients(logits, noted, column, is_last=is_last).items():
                    if name in self.outputs:
                        for use, gradient in pairs:
                            self.outputs[name].add(use.outputs(gradient).transpose(0, 1).flatten(1))
                    else:
                        slopes = sum(use.per_example(gradient) for use, gradient in pairs)
                        self.diagonal[places[name]] += slopes.square().sum(dim=0, dtype=torch.float64)


class _RankOne(NamedTuple):
    """Rank-one term from a separate bias precision, by output direction.

    Args:
        direction: q, (K, F).
        shrinkage: g, (K, 1).
        growth: c, (K, 1).
    """

    direction: Tensor
    shrinkage: Tensor
    growth: Tensor


@dataclass(frozen=True)
class InEigenbasis:
    """(W diag(s) W^T + Lambda)^{-1} over the parameters of one layer.

    Args:
        values: s, (K, F), not negative; of bases that are not complete, with one more row or column, for what is
            outside their span.
        output_basis, feature_basis: U (K, K) and V (F, F), orthogonal, or the leading columns of these.
        weight_precision, bias_precision: prior precisions.
        layout: position of the augmented matrix (K, F) in the layer's parameters.
    """

    structure: ClassVar[str] = "kron"
    values: Tensor
    output_basis: Tensor
    feature_basis: Tensor
    weight_precision: float
    bias_precision: float
    layout: MatrixLayout

    @property
    def num_params(self) -> int:
        """Number of parameters of the layer."""
        return len(self.output_basis) * len(self.feature_basis)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._from_basis(self._scales * self._shrunk(self._to_basis(z)))

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        scaled = self._to_basis(x) / self._scales
        if self._own_bias is not None:
            direction, shrinkage, growth = self._own_bias
            along = (scaled * direction).sum(dim=-1, keepdim=True)
            scaled = scaled + shrinkage * growth.sqrt() * along * direction
        return self._from_basis(scaled)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._from_basis(self.pull_back_turned(self._to_basis(gradient)))

    def pull_back_turned(self, gradient: Tensor) -> Tensor:
        """Return the pull-back in the bases, given W^T gradient (..., K, F)."""
        return self._shrunk(self._scales.to(gradient) * gradient)

    @property
    def variances(self) -> Tensor | None:
        """Variances of the coordinates, (K, F), see `coordinates`; None if they are correlated."""
        return self._scales.square() if self._own_bias is None else None

    def widest(self, count: int) -> Tensor | None:
        """Return the widest products of basis vectors, (P, K) float64; None if coordinates are correlated or bases not complete."""
        if self.variances is None or not (is_complete(self.output_basis) and is_complete(self.feature_basis)):
            return None
        return self._from_basis(largest_coordinates(self.variances, count)).T.double()

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        outputs, features = _dimensions_of(self.output_basis), _dimensions_of(self.feature_basis)
        value = float(outputs @ self._scales.double().log() @ features)
        if self._own_bias is None:
            return value
        return value - 0.5 * float(outputs @ self._own_bias.growth.double().log()[:, 0])

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `values` (K, F), `outputs` (K, K) and `features` (F, F), float64, without the prior."""
        tensors = {"values": self.values, "outputs": self.output_basis, "features": self.feature_basis}
        return {name: tensor.double().cpu().contiguous() for name, tensor in tensors.items()}

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> InEigenbasis:
        """Return a copy on another device or in another precision."""
        values, outputs, features = (
            tensor.to(device=device, dtype=dtype) for tensor in (self.values, self.output_basis, self.feature_basis)
        )
        return replace(self, values=values, output_basis=outputs, feature_basis=features)

    @cached_property
    def _scales(self) -> Tensor:
        """D^{-1/2}, (K, F)."""
        return (self._curvature + self.weight_precision).rsqrt()

    @cached_property
    def _curvature(self) -> Tensor:
        """The value of each coordinate, (K, F)."""
        return _repeat_last(_repeat_last(self.values, self.feature_basis).mT, self.output_basis).mT

    @cached_property
    def _own_bias(self) -> _RankOne | None:
        """The rank-one term; None if biases have the weights' precision."""
        difference = self.bias_precision - self.weight_precision
        if difference == 0 or not self.layout.has_bias:
            return None
        basis = self.feature_basis.double()
        bias = torch.zeros(len(basis), 1, dtype=basis.dtype, device=basis.device)
        bias[-1] = 1
        values, last = self._curvature.double(), coordinates(basis, bias)[:, 0]
        direction = (values + self.weight_precision).rsqrt() * last
        length = direction.square().sum(dim=1, keepdim=True)
        lifted = (values + self.bias_precision) / (values + self.weight_precision)
        growth = (lifted * last.square()).sum(dim=1, keepdim=True) / last.square().sum()
        shrinkage = (1 - growth.rsqrt()) / length
        return _RankOne(*(one.to(self.values.dtype) for one in (direction, shrinkage, growth)))

    def _shrunk(self, rotated: Tensor) -> Tensor:
        """Return (I - g q q^T) times coordinates (S, K, F) in the basis."""
        if self._own_bias is None:
            return rotated
        direction, shrinkage = self._own_bias.direction.to(rotated), self._own_bias.shrinkage.to(rotated)
        return rotated - shrinkage * (rotated * direction).sum(dim=-1, keepdim=True) * direction

    def _to_basis(self, x: Tensor) -> Tensor:
        """Return W^T x, (S, K, F)."""
        return row_coordinates(
            self.feature_basis, coordinates(self.output_basis, self.layout.augment(x.to(self.values)))
        )

    def _from_basis(self, rotated: Tensor) -> Tensor:
        """Return W x, (S, P)."""
        columns = from_coordinates(self.output_basis, rotated)
        if is_complete(self.feature_basis):
            return self.layout.flatten(columns @ self.feature_basis.T)
        return self.layout.flatten(from_coordinates(self.feature_basis, columns.mT).mT)


def _repeat_last(values: Tensor, basis: Tensor) -> Tensor:
    """Return values (n, k + 1) of a basis (F, k) with the last once per coordinate outside its span, (n, k + F)."""
    if is_complete(basis):
        return values
    size, rank = basis.shape
    return torch.cat([values[:, :rank], values[:, rank:].expand(-1, size)], dim=1)


def _dimensions_of(basis: Tensor) -> Tensor:
    """Return the number of dimensions that each coordinate in a basis (F, k) stands for, float64; they sum to F."""
    size, rank = basis.shape
    ones = torch.ones(rank, dtype=torch.float64, device=basis.device)
    return ones if is_complete(basis) else torch.cat([ones, ones.new_full((size,), (size - rank) / size)])


def largest_coordinates(variances: Tensor, count: int) -> Tensor:
    """Return one-hot matrices (count, K, F) at the largest of variances (K, F); ties go to the first."""
    places = variances.flatten().sort(descending=True, stable=True).indices[:count]
    found = variances.new_zeros(count, variances.numel()).scatter_(1, places.unsqueeze(1), 1.0)
    return found.unflatten(1, variances.shape)


class EigenLayers(InLayers):
    """Curvatures that are diagonal in a Kronecker product of bases, one per layer; other parameters have a diagonal.

    H has parts `hessian.<structure>.<weight's name>.` with `values` (K, F), `outputs` (K, K) and `features` (F, F), for
    a weight as a matrix, and for its bias if F is one more than the number of columns; and `hessian.<structure>.rest`,
    the diagonal of all other parameters, in theta order. Of a large factor with a rank k, `features` is (F, k) and
    `values` (K, k + 1); likewise `outputs`. A file stores these parts and the prior.
    """

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Self:
        """Return (H + Lambda)^{-1}. Raises NumericError if H is not finite."""
        stored = {name: part.double() for name, part in hessian.items() if name.startswith("hessian.")}
        if not all(torch.isfinite(part).all() for part in stored.values()):
            raise NumericError("the Hessian is not finite", hint="check the inputs")
        precisions, prefix = prior.diagonal(layout), f"hessian.{cls.structure}"
        pieces: list[Covariance] = []
        parts, taken = iter(layout.parts), 0
        for part in parts:
            values = stored.get(f"{prefix}.{part.name}.values")
            if values is None:
                rest, size = stored[f"{prefix}.rest"], math.prod(part.shape)
                pieces.append(Diag(1 / (rest[taken : taken + size] + precisions[part.place].to(rest.device))))
                taken += size
                continue
            own = HeadLayout(part.shape[0], math.prod(part.shape[1:]), has_bias=False)
            features = stored[f"{prefix}.{part.name}.features"]
            has_bias = len(features) == own.num_features + 1
            last = next(parts) if has_bias else part
            pieces.append(
                InEigenbasis(
                    values.clamp(min=0),
                    stored[f"{prefix}.{part.name}.outputs"],
                    features,
                    float(precisions[part.offset]),
                    float(precisions[last.offset]),
                    HeadLayout(own.num_outputs, own.num_features, has_bias=has_bias),
                )
            )
        return cls(tuple(pieces), stored | prior.to_tensors())

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return cls.from_hessian(tensors, Prior.from_tensors(tensors), layout)

    @staticmethod
    def network_root() -> type[BlockRoot]:
        """Return the kind of block that a layer's Jacobian is multiplied by."""
        return TurnedBlock

    @staticmethod
    def _logit_block(piece: Covariance) -> BlockRoot:
        return TurnedBlock(piece) if isinstance(piece, InEigenbasis) else PulledBlock(piece)


class KronLayers(EigenLayers):
    """Kronecker factors, one pair per layer."""

    structure: ClassVar[str] = "kron"


@dataclass(frozen=True)
class AlongOutputBasis:
    """U diag(v) U^T, O(F^2 + F K + K^2) per example.

    Args:
        theta_covariance: its output factor has the eigenvectors U.
        layout: of theta.
    """

    theta_covariance: Kron
    layout: HeadLayout
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of U diag(v) U^T, (n, K)."""
        return (self._along_basis(inputs) @ self._basis.square().T).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P U diag(v) U^T P, (n, K); centres the columns of U, so that nothing cancels."""
        projected = (self._basis - self._basis.mean(dim=0)).square()
        return (self._along_basis(inputs) @ projected.T).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return U diag(v) U^T, (n, K, K)."""
        variances = self._along_basis(inputs)
        out = (self._basis * variances.unsqueeze(1)) @ self._basis.T
        return out.to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return U diag(sqrt(v)), without K^2 numbers per example."""
        return LogitRoot(self._along_basis(inputs).sqrt(), self._basis).to(inputs)

    @property
    def _basis(self) -> Tensor:
        """U (K, K)."""
        return self.theta_covariance.output_basis

    def _along_basis(self, features: Tensor) -> Tensor:
        """Return v (n, K)."""
        sigma = self.theta_covariance
        augmented = self.layout.augment_features(features).to(sigma.feature_basis)
        if sigma.bias_unit != 1:
            augmented[:, -1] *= sigma.bias_unit
        projected = augmented @ sigma.feature_basis
        return projected.square() @ sigma.scales.square().T


@dataclass(frozen=True)
class TurnedBlock:
    """A block whose curvature is diagonal in a Kronecker product of bases.

    Args:
        covariance: inverse of the curvature plus the prior.
    """

    num_copies: ClassVar[int] = 3  # the Jacobian and its float64 image
    covariance: InEigenbasis

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return Jacobians (n, K, p) times L."""
        return PulledBlock(self.covariance).of_rows(rows)

    def turn(self, layer: MatrixDerivatives) -> Turned:
        """Return the Jacobian in the bases, transforming output gradients and inputs rather than their products."""
        return layer.turned(self.covariance.output_basis, self.covariance.feature_basis)

    def of_turned(self, turned: Turned) -> Tensor:
        """Return the Jacobian times standard deviations if the coordinates in the bases are independent, else times L."""
        sigma = self.covariance
        if sigma.variances is None:
            return sigma.pull_back_turned(turned.whole()).flatten(2)
        return weighted_root(turned, sigma.variances)

    def turns_as(self, other: BlockRoot) -> bool:
        """Return whether the bases are the same tensors."""
        own = self.covariance
        return isinstance(other, TurnedBlock) and (
            other.covariance.output_basis is own.output_basis and other.covariance.feature_basis is own.feature_basis
        )

    @property
    def spectrum(self) -> tuple[Tensor, float] | None:
        """Return the curvature (K, F) and the prior precision; None if biases have a precision of their own."""
        sigma = self.covariance
        return None if sigma.variances is None else (sigma._curvature, sigma.weight_precision)
