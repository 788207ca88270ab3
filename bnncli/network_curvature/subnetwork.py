"""The full H of the parameters with the largest marginal variances; all others are fixed at the centre.

Daxberger, Nalisnick, Allingham, Antoran and Hernandez-Lobato (2021), arXiv:2010.14689, section 4. The variances are
those of the diagonal Gaussian, 1 / (H_ii + lambda_i), under the prior used for H. With one precision for all
parameters, their order does not depend on it. The order uses the Gauss-Newton matrix even if H is the exact Hessian,
whose diagonal may be negative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.network_curvature._rows import examples_at_once, weighted_rows
from bnncli.network_curvature.diag import Diag
from bnncli.network_curvature.full import hessian_between
from bnncli.targets.curvature_choice import HESSIAN

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget


class SubnetworkHessian:
    """`hessian.subnetwork` with all second derivatives."""

    is_exact: ClassVar[bool] = True  # for the chosen parameters, with all others fixed
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return the parameters and the matrix between them, float64."""
        indices = widest_parameters(target, theta)
        return _parts(indices, hessian_between(target, theta, indices))


class Subnetwork:
    """`hessian.subnetwork.indices` (N,) int64, ascending, places in theta, and `.values` (N, N)."""

    order: ClassVar[int] = 60
    about: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "hessian", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    begins_with: ClassVar[str] = "diag"
    of_hessian = SubnetworkHessian

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return the parameters and the matrix between them, float64."""
        indices = widest_parameters(target, theta)
        return _parts(indices, _ggn_between(target, theta, indices))

    @staticmethod
    def one_block(target: NetworkTarget, theta: Tensor) -> object:
        """Compute the matrix for arbitrary parameters."""
        indices = torch.arange(min(target.choice.size, len(theta)), device=target.device)
        if target.choice.kind == HESSIAN:
            return hessian_between(target, theta, indices)
        return _ggn_between(target, theta, indices)

    @staticmethod
    def examples_at_once(target: NetworkTarget) -> int:
        """Return the number of examples whose rows fit at once; for second derivatives, the target's own."""
        return target.rows_at_once(1, torch.float32) if target.choice.kind == HESSIAN else examples_at_once(target)

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return N^2 for the default size."""
        from bnncli.targets.curvature_choice import DEFAULT_SIZE

        return min(DEFAULT_SIZE, layout.num_params) ** 2


def _ggn_between(target: NetworkTarget, theta: Tensor, indices: Tensor) -> Tensor:
    """Return the Gauss-Newton matrix between the parameters, (N, N) float64, from the rows of all examples."""
    total = torch.zeros(len(indices), len(indices), dtype=torch.float64, device=target.device)
    for rows in weighted_rows(target, theta):
        chosen = rows[:, indices]
        total += (chosen.T @ chosen).double()
    return total * target.likelihood_scale


def widest_parameters(target: NetworkTarget, theta: Tensor) -> Tensor:
    """Return the places (N,), ascending, of the largest variances 1 / (H_ii + lambda_i); ties go to the first.

    Raises:
        NumericError: the diagonal of H is not finite.
    """
    curvature = Diag.hessian(target, theta)["hessian.diag"]
    if not torch.isfinite(curvature).all():
        raise NumericError("the diagonal of the Hessian is not finite", hint="check the inputs")
    precisions = curvature + target.prior.diagonal(target.layout, device=curvature.device)
    return precisions.sort(stable=True).indices[: target.choice.size].sort().values


def _parts(indices: Tensor, values: Tensor) -> dict[str, Tensor]:
    return {"hessian.subnetwork.indices": indices, "hessian.subnetwork.values": values}
