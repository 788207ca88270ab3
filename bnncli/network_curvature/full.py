"""All of the Gauss-Newton matrix, (P, P): for networks of a few thousand parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.network_curvature._rows import weighted_rows

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget
    from bnncli.theta.module import ModuleLayout


class Full:
    """`hessian.full` (P, P)."""

    order: ClassVar[int] = 10
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """`hessian.full`, (P, P) float64."""
        size = target.layout.num_params
        total = torch.zeros(size, size, dtype=torch.float64, device=target.device)
        for rows in weighted_rows(target, theta):
            total += (rows.T @ rows).double()
        return {"hessian.full": total * target.likelihood_scale}

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """P^2."""
        return layout.num_params**2
