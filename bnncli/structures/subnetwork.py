"""The structure of a subnetwork: the full H of the parameters with the largest marginal variances, the others fixed.

Daxberger, Nalisnick, Allingham, Antoran and Hernandez-Lobato (2021), arXiv:2010.14689, section 4. The variances are
those of the diagonal Gaussian, 1 / (H_ii + lambda_i), under the prior used for H. With one precision for all
parameters, their order does not depend on it. The order uses the Gauss-Newton matrix even if H is the exact Hessian,
whose diagonal may be negative. Sigma = L L^T, with L (P, N) of N nonzero rows: a draw uses N standard normals, and its
density is that of the N parameters given all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.structures.diag import NetworkDiag
from bnncli.structures.full import Full, hessian_between, inverse
from bnncli.structures.network_sums import weighted_rows

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget


AS_THE_PRIOR = 0.95  # share of the prior's variance above which the data say next to nothing


@dataclass(frozen=True)
class Subnetwork:
    """Sigma; build with from_hessian.

    Args:
        varying: places in theta of the parameters that vary, (N,) int64, ascending.
        inner: their covariance.
        num_params: P.
    """

    structure: ClassVar[str] = "subnetwork"
    varying: Tensor
    inner: Full
    num_params: int

    @property
    def jitter(self) -> float:
        """Jitter added to the precision's diagonal."""
        return self.inner.jitter

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Subnetwork:
        """Return (H + Lambda)^{-1} of the parameters that vary. Raises NumericError if not positive definite."""
        varying = hessian["hessian.subnetwork.indices"]
        precision = hessian["hessian.subnetwork.values"].double().clone()
        precision.diagonal().add_(prior.diagonal(layout, device=precision.device)[varying])
        return cls(varying, inverse(precision), layout.num_params)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T (S, P), given z (S, N)."""
        moved = self.inner.unwhiten(z)
        theta = moved.new_zeros(len(moved), self.num_params)
        theta[:, self.varying] = moved
        return theta

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x (S, N), given x (S, P)."""
        return self.inner.whiten(x[:, self.varying])

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L (S, N), given gradient (S, P)."""
        return self.inner.pull_back(gradient[:, self.varying])

    def log_det_scale(self) -> float:
        """Return log|det L| of the parameters that vary."""
        return self.inner.log_det_scale()

    def marginal_variances(self) -> Tensor:
        """Return the diagonal of Sigma, (P,)."""
        variances = self.inner.scale_tril.new_zeros(self.num_params)
        variances[self.varying] = self.inner.marginal_variances()
        return variances

    def metrics(self, prior: Prior, layout: ParamLayout) -> dict[str, Any]:
        """Count the parameters that vary, in total and per tensor, and those that keep nearly all prior variance."""
        share = self.inner.marginal_variances() * prior.diagonal(layout, device=self.varying.device)[self.varying]
        places = self.varying.cpu()
        inside = {part.name: (places >= part.place.start) & (places < part.place.stop) for part in layout.parts}
        counts = {name: int(one.sum()) for name, one in inside.items()}
        return {
            "subnetwork_size": len(places),
            "subnetwork_params": {name: count for name, count in counts.items() if count},
            "subnetwork_as_prior": int((share > AS_THE_PRIOR).sum()),
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `cov.varying` (N,) int64, and `cov.scale_tril` (N, N) and `cov.jitter` (1,), float64."""
        return {"cov.varying": self.varying.cpu().contiguous(), **self.inner.to_tensors()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Subnetwork:
        """Invert to_tensors."""
        return cls(tensors["cov.varying"], Full.from_tensors(tensors, layout), layout.num_params)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Subnetwork:
        """Return a copy on another device or in another precision."""
        return replace(self, varying=self.varying.to(device=device), inner=self.inner.to(device=device, dtype=dtype))


class NetworkSubnetworkHessian:
    """`hessian.subnetwork` with all second derivatives."""

    is_exact: ClassVar[bool] = True  # for the chosen parameters, with all others fixed
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return the parameters and the matrix between them, float64."""
        indices = widest_parameters(target, theta)
        return _parts(indices, hessian_between(target, theta, indices))


class NetworkSubnetwork:
    """`hessian.subnetwork.indices` (N,) int64, ascending, places in theta, and `.values` (N, N)."""

    order: ClassVar[int] = 60
    about: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "hessian", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    of_hessian = NetworkSubnetworkHessian

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return the parameters and the matrix between them, float64."""
        indices = widest_parameters(target, theta)
        return _parts(indices, _ggn_between(target, theta, indices))

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
    curvature = NetworkDiag.hessian(target, theta)["hessian.diag"]
    if not torch.isfinite(curvature).all():
        raise NumericError("the diagonal of the Hessian is not finite", hint="check the inputs")
    precisions = curvature + target.prior.diagonal(target.layout, device=curvature.device)
    return precisions.sort(stable=True).indices[: target.choice.size].sort().values


def _parts(indices: Tensor, values: Tensor) -> dict[str, Tensor]:
    return {"hessian.subnetwork.indices": indices, "hessian.subnetwork.values": values}
