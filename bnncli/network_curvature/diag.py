"""The diagonal of H."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.network_curvature._rows import weighted_rows

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget
    from bnncli.theta.module import ModuleLayout


class Diag:
    """`hessian.diag` (P,)."""

    order: ClassVar[int] = 70
    about: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """`hessian.diag`, (P,) float64."""
        total = torch.zeros(target.layout.num_params, dtype=torch.float64, device=target.device)
        for rows in weighted_rows(target, theta):
            total += rows.square().sum(dim=0, dtype=torch.float64)
        return {"hessian.diag": total * target.likelihood_scale}

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """P."""
        return layout.num_params
