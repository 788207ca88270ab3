"""The covariance that the curvature of the target at one theta gives: what modes are whitened with, and Gaussians have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli import registry
from bnncli.curvature import ggn
from bnncli.machine.memory import give_back_freed

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.targets.target import CurvedTarget


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
    kind = registry.load_class("covariances", structure)
    kept: dict[str, Any] = {}
    if before is not None and before.covariance.structure == structure and before.saves_work:
        kept = {"before": before.covariance}
    if hessian is None:
        hessian = ggn(target, theta, structure, before=before.hessian if before is not None and kept else None)
        give_back_freed()
    covariance: Covariance = kind.from_hessian(hessian, target.prior, target.layout, **kept)
    return LocalCovariance(covariance, hessian, bool(target.curvature(structure).fixed))
