"""The covariance that the curvature of the target at one theta gives: what modes are whitened with, and Gaussians have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli import registry
from bnncli.curvature import count_pass, ggn
from bnncli.inference import memory
from bnncli.lazy import torch
from bnncli.machine.memory import give_back_freed
from bnncli.machine.panels import is_large
from bnncli.machine.team import team

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.targets.target import CurvedTarget

_FULL = "full"
_ROWS = 512  # of H that are made together where they are spread


class LocalCovariance(NamedTuple):
    """A covariance, and what it was made of.

    Args:
        covariance: (H + Lambda)^{-1}.
        hessian: H, without the prior, in the parts of the covariance's structure.
        saves_work: whether another one of the same structure and examples can keep parts of it.
    """

    covariance: Covariance
    hessian: dict[str, Tensor]
    saves_work: bool


def covariance_at(
    target: CurvedTarget,
    theta: Tensor,
    structure: str,
    *,
    hessian: dict[str, Tensor] | None = None,
    before: LocalCovariance | None = None,
) -> LocalCovariance:
    """(H + Lambda)^{-1} at theta (P,), and H without the prior: the one given, or made.

    Args:
        before: of the same examples: where it has the structure, what no theta changes is kept, with its factors.

    Raises:
        NumericError: when the precision is not positive definite.
        UsageError: when there is no such structure.
    """
    if hessian is None and _is_spread(target, structure):
        return _spread(target, theta)
    kind = registry.load_class("covariances", structure)
    kept: dict[str, Any] = {}
    if before is not None and before.covariance.structure == structure and before.saves_work:
        kept = {"before": before.covariance}
    if hessian is None:
        hessian = ggn(target, theta, structure, before=before.hessian if before is not None and kept else None)
        give_back_freed()
    covariance: Covariance = kind.from_hessian(hessian, target.prior, target.layout, **kept)
    return LocalCovariance(covariance, hessian, bool(target.curvature(structure).fixed))


def _is_spread(target: CurvedTarget, structure: str) -> bool:
    """Whether the rows of H are spread over workers, as no device has room for all of them."""
    others, layout = team(), target.layout
    if others is None or others.size == 1 or structure != _FULL or not is_large(layout.num_params):
        return False
    return hasattr(target.curvature(structure), "rows") and not memory.has_room_whole(layout, target.device)


def _spread(target: CurvedTarget, theta: Tensor) -> LocalCovariance:
    """The full one, of rows of H that each worker makes for its own panels; H itself in float32 on the CPU, as it is stored."""
    from bnncli.covariances.full import from_rows

    layout = target.layout
    count_pass(target)  # as where one device makes it, so that the cost is told alike
    rows: Callable[[int, int], Tensor] = target.curvature(_FULL).rows(target, theta)  # type: ignore[attr-defined]
    hessian = torch.empty(layout.num_params, layout.num_params)
    total = 0.0
    for start in range(0, layout.num_params, _ROWS):
        part = rows(start, min(start + _ROWS, layout.num_params))
        total += float(part.diagonal(start).sum())
        hessian[start : start + _ROWS] = part.float().cpu()
    precisions = target.prior.diagonal(layout, device=target.device).double()
    mean = total / layout.num_params + float(precisions.mean())
    return LocalCovariance(from_rows(rows, precisions, mean=mean), {"hessian.full": hessian}, False)
