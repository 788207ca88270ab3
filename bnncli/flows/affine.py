"""Affine flow: a learned shift and a learned linear scale; the result is a Gaussian.

One such layer is Gaussian variational inference started from the base. The linear part is Kronecker-factored, as
in Louizos and Welling (2016), arXiv:1603.04733, or diagonal plus low rank, as in Ong, Nott and Smith (2018),
arXiv:1701.03208, with determinant and inverse by the matrix determinant lemma and Woodbury's identity.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from bnncli.flows import SPACES, Recipe, resolve, tensors_of, zeros
from bnncli.flows._layers import orthonormal_columns, reflection_vectors
from bnncli.options.declaration import RANK, Setting
from bnncli.parameters.layouts import MatrixLayout

SETTINGS = {
    "scale": Setting(
        "Linear part; {default} by default (low-rank if that does not fit in memory, diag for other layers than the last)",
        default="kron",
        choices=("kron", "block", "low-rank", "diag"),
        is_closed=True,
        place=30,
    ),
    "rank": RANK.of(only_with=("scale", "low-rank")),
}


class Affine(nn.Module):
    """F(z) = shift + d M z with a diagonal d > 0; starts as the identity.

    kron: M z = vec(B Z A^T), Z (K, F) the weight with the bias as its last column, A (F, F) and B (K, K) lower
    triangular with ones on their diagonals. block: the same with an A of its own for each output.
    diag: M = I.
    low-rank: M = I + Q (C - I) Q^T, Q (P, R) orthonormal, C (R, R) lower triangular with a positive diagonal. M M^T is
    then I + Q (C C^T - I) Q^T, any positive definite matrix that differs from I by rank R: variances shrink as well as
    grow and correlations have either sign, which a plain I + U U^T cannot do, and F is invertible for all parameters.

    Entries below a diagonal are stored times the square root of the matrix's size: all parameters can then learn at
    one rate, for a step in a matrix moves z as far as a step in the shift does.

    Args:
        layout: how the matrix lies in theta.
        generator: of the first directions Q.
        scale: kron, block, low-rank or diag.
        rank: R, for low-rank; 16 by default.

    Raises:
        UsageError: when rank comes with another scale, or is above P.
    """

    recipe: ClassVar[Recipe] = Recipe(length=2, epochs=600, batch_size=2**16, num_draws=8, learning_rate=0.03)
    settings: ClassVar[tuple[str, ...]] = tuple(SETTINGS)
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = (
        "d = exp(log_scale); unit(raw) = I + tril(raw, -1) / sqrt(size); A = unit(feature_factor); "
        "B = unit(output_factor); C = diag(exp(diag(core))) + tril(core, -1) / sqrt(R); Q = first columns of the "
        "Householder reflections along basis"
    )

    def __init__(
        self,
        layout: MatrixLayout,
        generator: torch.Generator,
        *,
        scale: str = SETTINGS["scale"].default,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.layout, self.scale = layout, scale
        self.rank: int | None = resolve(SETTINGS, layout, scale=scale, rank=rank)["rank"]
        self.shift = zeros(layout.num_params, generator=generator)
        self.log_scale = zeros(layout.num_params, generator=generator)
        if self.rank is not None:
            self.basis = reflection_vectors(layout.num_params, self.rank, generator)
            self.core = zeros(self.rank, self.rank, generator=generator)
        elif scale != "diag":
            num_columns = layout.num_features + layout.has_bias
            blocks = (layout.num_outputs,) if scale == "block" else ()
            self.feature_factor = zeros(*blocks, num_columns, num_columns, generator=generator)
            self.output_factor = zeros(layout.num_outputs, layout.num_outputs, generator=generator)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J|, the same number for all, (S,)."""
        if self.scale == "diag":
            moved = z
        elif self.scale == "low-rank":
            basis = orthonormal_columns(self.basis)
            moved = z + (z @ basis) @ (_lower_less_identity(self.core).T @ basis.T)
        else:
            # (K, S, F): one product for each output, or one for all of them.
            rows = self.layout.augment(z).transpose(0, 1) @ _unit_lower(self.feature_factor).mT
            moved = self.layout.flatten(_unit_lower(self.output_factor) @ rows.transpose(0, 1))
        return torch.addcmul(self.shift, self.log_scale.exp(), moved), self._log_det().expand(z.shape[0])

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y by triangular solves, with R right-hand sides for low-rank."""
        moved = (y - self.shift) * (-self.log_scale).exp()
        solve = torch.linalg.solve_triangular
        if self.scale == "diag":
            return moved
        if self.scale == "low-rank":
            basis = orthonormal_columns(self.basis)
            inside = moved @ basis
            return moved + (solve(_lower(self.core), inside.T, upper=False).T - inside) @ basis.T
        rows = _solve_outputs(_unit_lower(self.output_factor), self.layout.augment(moved).transpose(0, 1), upper=False)
        rows = _solve_features(_unit_lower(self.feature_factor).mT, rows, upper=True)
        return self.layout.flatten(rows.transpose(0, 1))

    def push_score(self, score: Tensor) -> Tensor:
        """Return J^{-T} score, (S, P): the gradient of a log density at F(z) from that at z."""
        solve = torch.linalg.solve_triangular
        if self.scale == "diag":
            moved = score
        elif self.scale == "low-rank":
            basis = orthonormal_columns(self.basis)
            inside = score @ basis
            moved = score + (solve(_lower(self.core).T, inside.T, upper=True).T - inside) @ basis.T
        else:
            # M^{-T} applies the features' factor before the outputs'; factors of single outputs do not commute with the
            # latter.
            rows = self.layout.augment(score).transpose(0, 1)
            rows = _solve_features(_unit_lower(self.feature_factor), rows, upper=False)
            rows = _solve_outputs(_unit_lower(self.output_factor).T, rows, upper=True)
            moved = self.layout.flatten(rows.transpose(0, 1))
        return moved * (-self.log_scale).exp()

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `shift`, `log_scale` (P,); `feature_factor` (F, F) or (K, F, F) and `output_factor` (K, K), or `basis`
        (P, R) and `core` (R, R); for diag only the first two.
        """
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: MatrixLayout) -> Self:
        """Invert to_tensors."""
        if "core" in tensors:
            layer = cls(layout, torch.Generator(), scale="low-rank", rank=tensors["core"].shape[0])
        elif "feature_factor" not in tensors:
            layer = cls(layout, torch.Generator(), scale="diag")
        else:
            scale = "block" if tensors["feature_factor"].ndim == 3 else "kron"
            layer = cls(layout, torch.Generator(), scale=scale)
        layer.load_state_dict(tensors)
        return layer

    def summary(self) -> dict[str, float]:
        """Return |shift|, log|det J|, and the smallest and the largest factor of the diagonal d."""
        with torch.no_grad():
            scale = self.log_scale.exp()
            return {
                "shift_norm": float(self.shift.norm()),
                "log_det": float(self._log_det()),
                "min_scale": float(scale.min()),
                "max_scale": float(scale.max()),
            }

    def _log_det(self) -> Tensor:
        """Return log|det J|, a scalar: 0 for unit triangular factors; det M = det C by the determinant lemma."""
        if self.scale == "low-rank":
            return self.log_scale.sum() + self.core.diagonal().sum()
        return self.log_scale.sum()


def _solve_outputs(factor: Tensor, rows: Tensor, *, upper: bool) -> Tensor:
    """Return factor^{-1} times the outputs of rows (K, S, F), in one solve: a batch would copy the factor S times."""
    return torch.linalg.solve_triangular(factor, rows.flatten(1), upper=upper).view_as(rows)


def _solve_features(factor: Tensor, rows: Tensor, *, upper: bool) -> Tensor:
    """Return each row of rows (K, S, F) times factor^{-1}: one solve for a shared factor (F, F), a batch for (K, F, F)."""
    if factor.ndim == 3:
        return torch.linalg.solve_triangular(factor, rows, upper=upper, left=False)
    return torch.linalg.solve_triangular(factor, rows.flatten(0, 1), upper=upper, left=False).view_as(rows)


def _unit_lower(raw: Tensor) -> Tensor:
    """Return the lower triangular I + tril(raw, -1) / sqrt(n), (..., n, n)."""
    size = raw.shape[-1]
    return torch.eye(size, dtype=raw.dtype, device=raw.device) + raw.tril(-1) / math.sqrt(size)


def _lower(raw: Tensor) -> Tensor:
    """Return the lower triangular matrix with the positive diagonal exp(diag(raw)), (n, n)."""
    return raw.tril(-1) / math.sqrt(raw.shape[0]) + torch.diag(raw.diagonal().exp())


def _lower_less_identity(raw: Tensor) -> Tensor:
    """Return _lower(raw) - I, exact near 0."""
    return raw.tril(-1) / math.sqrt(raw.shape[0]) + torch.diag(raw.diagonal().expm1())
