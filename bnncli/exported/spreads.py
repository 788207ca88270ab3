"""How the variances of combinations of the logits become tensors: by the structure of the weights' covariance.

A combination is a row of a matrix (J, K): the logits as they are, minus their mean, or a difference of two. Their variances are
linear in what is known of the weights, so that the combination is folded into the tensors and costs nothing later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.covariances import Covariance
from bnncli.covariances.block import Block
from bnncli.covariances.diag import Diag
from bnncli.covariances.full import Full
from bnncli.covariances.kron import Kron
from bnncli.errors import UsageError
from bnncli.exported.steps import Step, Values, independent_weights, own_directions, shared_directions
from bnncli.lazy import torch
from bnncli.logits import root_of_covariances
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.memory import bytes_text

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 30  # of the directions of all logits, as one file may have


def spread(covariance: Covariance | None, layout: HeadLayout, combination: Tensor) -> tuple[Step, Values]:
    """The step that gives the variances (B, J) of combinations (J, K) of the logits, and its tensors.

    Args:
        covariance: of the weights (P,); None where they are certain.

    Raises:
        UsageError: the tensors would be absurdly large.
    """
    if covariance is None or isinstance(covariance, Diag):
        variances = torch.zeros(layout.num_params) if covariance is None else covariance.variances
        weight, bias = _parted(combination.square() @ layout.augment(variances.double()), layout)
        return independent_weights, {"weight_variance": weight, "bias_variance": bias}
    if isinstance(covariance, Kron):
        loads = along_basis(covariance).T @ (combination @ covariance.output_basis.double()).square().T
        return shared_directions, {**turned_features(covariance, layout), "loads": loads}
    size = layout.num_features + layout.has_bias
    num_bytes = 4 * len(combination) * size**2
    if num_bytes > MOST_BYTES:
        raise UsageError(
            f"the variances of {len(combination)} logits over {layout.num_features} features would need "
            f"{bytes_text(num_bytes)} in the file",
            hint="use \0integrator\0 mc, whose draws need less",
            code="unsupported_export",
        )
    roots = root_of_covariances(_blocks(covariance, layout, combination)).scale
    rows = roots if layout.has_bias else torch.cat([roots, roots.new_zeros(len(roots), 1, size)], dim=1)
    return own_directions, {"directions": rows[:, :-1], "direction_bias": rows[:, -1]}


def turned_features(covariance: Kron, layout: HeadLayout) -> Values:
    """The eigenvectors of the features' factor (D, F), and what the bias adds along each (F,)."""
    basis = covariance.feature_basis.double()
    if not layout.has_bias:
        return {"directions": basis, "direction_bias": basis.new_zeros(len(basis))}
    return {"directions": basis[:-1], "direction_bias": basis[-1] * covariance.bias_unit}


def along_basis(covariance: Kron) -> Tensor:
    """Variances (K, F) in the joint eigenbasis."""
    return covariance.scales.double().square()


def _blocks(covariance: Covariance, layout: HeadLayout, combination: Tensor) -> Tensor:
    """The covariance (J, F, F) of the weights, bias last, of each combination (J, K)."""
    if isinstance(covariance, Block):
        root = covariance.scale_tril.double()
        return torch.einsum("jk,kab->jab", combination.square(), root @ root.transpose(1, 2))
    return torch.stack([_squared(_rows(covariance, layout, row)) for row in combination])


def _rows(covariance: Covariance, layout: HeadLayout, row: Tensor) -> Tensor:
    """Derivatives of one combination (K,) by its weights, times a root of the covariance, (F, P)."""
    if isinstance(covariance, Full):
        root, places = covariance.scale_tril.double(), layout.places(covariance.scale_tril.device)
        return torch.stack([row[k] * root[places[k]] for k in row.nonzero().flatten().tolist()]).sum(dim=0)
    identity = torch.eye(layout.num_features + layout.has_bias, dtype=torch.float64)
    return covariance.pull_back(layout.flatten(row[None, :, None] * identity[:, None, :]))


def _squared(rows: Tensor) -> Tensor:
    return rows @ rows.T


def _parted(augmented: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Columns (J, D) of the weights, and that of the biases (J,), zero without."""
    if layout.has_bias:
        return augmented[:, :-1], augmented[:, -1]
    return augmented, augmented.new_zeros(len(augmented))
