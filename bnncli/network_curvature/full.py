"""The full H, (P, P), for networks of a few thousand parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.network_curvature._rows import examples_at_once, weighted_rows

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget

_AT_ONCE = 16  # rows of the Hessian


class FullHessian:
    """`hessian.full` (P, P), with all second derivatives; may be indefinite far from a mode."""

    is_exact: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.full`, (P, P) float64."""
        every = torch.arange(target.layout.num_params, device=target.device)
        return {"hessian.full": hessian_between(target, theta, every)}


def hessian_between(target: NetworkTarget, theta: Tensor, indices: Tensor) -> Tensor:
    """Return second derivatives of the summed negative log likelihood at indices (N,) of theta, (N, N) float64.

    Uses products with unit vectors, in float64.
    """
    theta = theta.to(target.device).double()
    with target.layout.briefly(theta.dtype):
        total = _hessian_between(target, theta, indices)
    return (total + total.T) * (0.5 * target.likelihood_scale)


def _hessian_between(target: NetworkTarget, theta: Tensor, indices: Tensor) -> Tensor:
    layout, likelihood = target.layout, target.likelihood
    total = torch.zeros(len(indices), len(indices), dtype=torch.float64, device=target.device)
    for rows in target.row_blocks(_AT_ONCE, theta.dtype):
        inputs, labels = target.inputs[rows].to(target.device), target.labels[rows]

        def loss(one: Tensor, inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            return -likelihood.log_likelihoods(layout.logits(inputs, one.unsqueeze(0)), labels).sum()

        pull = torch.func.vjp(torch.func.grad(loss), theta)[1]
        for begin in range(0, len(indices), _AT_ONCE):
            some = indices[begin : begin + _AT_ONCE]
            units = torch.zeros(len(some), len(theta), dtype=torch.float64, device=target.device)
            units.scatter_(1, some.unsqueeze(1), 1.0)
            total[begin : begin + _AT_ONCE] += torch.func.vmap(pull)(units)[0][:, indices]
    return total


class Full:
    """`hessian.full` (P, P)."""

    order: ClassVar[int] = 10
    about: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "hessian", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    of_hessian = FullHessian

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.full`, (P, P) float64."""
        size = target.layout.num_params
        total = torch.zeros(size, size, dtype=torch.float64, device=target.device)
        for rows in weighted_rows(target, theta):
            total += rows.T @ rows
        return {"hessian.full": total * target.likelihood_scale}

    @staticmethod
    def examples_at_once(target: NetworkTarget) -> int:
        """Return the number of examples whose rows fit at once."""
        return examples_at_once(target)

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return P^2."""
        return layout.num_params**2
