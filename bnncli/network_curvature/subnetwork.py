"""All of H between the parameters of the largest marginal variances; all others are fixed at the centre.

Daxberger, Nalisnick, Allingham, Antoran and Hernandez-Lobato (2021), arXiv:2010.14689, section 4: the variances are those of the
diagonal Gaussian, 1 / (H_ii + lambda_i), under the prior at which H is made. Under one precision for all parameters they have one
order, whatever it is. The order is by the Gauss-Newton matrix also where H is the exact Hessian, whose diagonal may be negative.
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
    """The same of all second derivatives."""

    is_exact: ClassVar[bool] = True  # of the parameters that are there, all others being fixed
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """As `Subnetwork` has them."""
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
        """The parameters and the matrix between them, float64."""
        indices = widest_parameters(target, theta)
        return _parts(indices, _ggn_between(target, theta, indices))

    @staticmethod
    def one_block(target: NetworkTarget, theta: Tensor) -> object:
        """The matrix between any parameters."""
        indices = torch.arange(min(target.choice.size, len(theta)), device=target.device)
        if target.choice.kind == HESSIAN:
            return hessian_between(target, theta, indices)
        return _ggn_between(target, theta, indices)

    @staticmethod
    def examples_at_once(target: NetworkTarget) -> int:
        """As rows have room; of second derivatives the target's own."""
        return target.rows_at_once(1, torch.float32) if target.choice.kind == HESSIAN else examples_at_once(target)

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Of the default size: N^2."""
        from bnncli.targets.curvature_choice import DEFAULT_SIZE

        return min(DEFAULT_SIZE, layout.num_params) ** 2


def _ggn_between(target: NetworkTarget, theta: Tensor, indices: Tensor) -> Tensor:
    """The same of the rows of all examples, (N, N) float64."""
    total = torch.zeros(len(indices), len(indices), dtype=torch.float64, device=target.device)
    for rows in weighted_rows(target, theta):
        chosen = rows[:, indices]
        total += (chosen.T @ chosen).double()
    return total * target.likelihood_scale


def widest_parameters(target: NetworkTarget, theta: Tensor) -> Tensor:
    """Places (N,), ascending, of the parameters of the largest variances 1 / (H_ii + lambda_i); of equal ones the first.

    Raises:
        NumericError: H's diagonal is not finite, so that no order is that of the variances.
    """
    curvature = Diag.hessian(target, theta)["hessian.diag"]
    if not torch.isfinite(curvature).all():
        raise NumericError("the diagonal of the Hessian is not finite", hint="check the inputs")
    precisions = curvature + target.prior.diagonal(target.layout, device=curvature.device)
    return precisions.sort(stable=True).indices[: target.choice.size].sort().values


def _parts(indices: Tensor, values: Tensor) -> dict[str, Tensor]:
    return {"hessian.subnetwork.indices": indices, "hessian.subnetwork.values": values}
