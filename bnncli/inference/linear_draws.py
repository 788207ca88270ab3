"""Draw from the full Gauss-Newton Gaussian of a network by sample-then-optimise, without forming a covariance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress
from bnncli.structures import Covariance
from bnncli.system import signals
from bnncli.targets.network import NetworkTarget, pairs_at_once, with_smaller_blocks

if TYPE_CHECKING:
    from torch import Tensor


TOLERANCE = 1e-2  # relative residual of a draw: an error of a few hundredths of a standard deviation


MOST_STEPS = 1000


_FEWEST = 64  # examples at once, below which vectors are processed one after the other


# PyTorch draws CPU normals in groups of sixteen: blocks of a multiple of sixteen examples get the numbers of one call.
_SIXTEEN = 16


class Solutions(NamedTuple):
    """Solutions of (H + Lambda) d = b.

    Args:
        values: d (S, P) float64.
        num_steps: conjugate gradient steps, one product each.
        residual: largest relative residual of the draws, in the norm of the whitening Gaussian.
    """

    values: Tensor
    num_steps: int
    residual: float

    @property
    def num_passes(self) -> int:
        """Passes over the data: for the right sides, each step, and the final residual."""
        return self.num_steps + 2


def draw_linearised(
    target: NetworkTarget,
    theta: Tensor,
    whitening: Covariance,
    *,
    num_draws: int,
    generator: torch.Generator,
    tolerance: float = TOLERANCE,
    progress: Progress = SILENT,
) -> Solutions:
    """Draw deviations from theta (P,) of N(theta, (H + Lambda)^{-1}), with H the Gauss-Newton matrix at theta.

    Args:
        target: its prior has precision Lambda.
        whitening: preconditioner, close to that covariance; the closer, the fewer passes.
        num_draws: S.
        generator: CPU generator of the right sides.
        tolerance: of the relative residuals.
        progress: advances once per step.

    Raises:
        NumericError: the residuals do not reach the tolerance.
    """

    def normals(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    sides = right_sides(target, theta, num_draws, normals)
    return solve(precision_operator(target, theta), sides, whitening, tolerance=tolerance, progress=progress)


def right_sides(target: NetworkTarget, theta: Tensor, num_draws: int, normals: Callable[..., Tensor]) -> Tensor:
    """Return b (S, P) float64, linear in standard normals: (S, P) for the prior, then (n, S, M) per block of examples."""
    theta = theta.to(target.device, target.dtype)
    precisions = target.prior.diagonal(target.layout, device=target.device)
    total = normals(num_draws, len(theta)).to(target.device) * precisions.sqrt()
    size = max(_SIXTEEN, target.rows_at_once(num_draws, theta.dtype) // _SIXTEEN * _SIXTEEN)
    for begin in range(0, target.num_examples, size):
        signals.raise_if_interrupted("the draws")
        rows = slice(begin, min(begin + size, target.num_examples))
        inputs = target.inputs[rows].to(target.device)
        with torch.enable_grad():
            logits, pull = torch.func.vjp(
                lambda one, inputs=inputs: target.layout.logits(inputs, one.unsqueeze(0))[0], theta
            )[:2]
        probs = target.likelihood.normalize_(logits.detach().T.unsqueeze(1).clone())[1][:, 0]
        root = target.likelihood.hessian_root(probs)
        noise = normals(logits.shape[0], num_draws, root.shape[1]).to(root)
        slopes = torch.einsum("kmn,nsm->snk", root, noise)
        total += torch.func.vmap(lambda one, pull=pull: pull(one)[0])(slopes).double() * target.likelihood_scale**0.5
    return total


def precision_operator(target: NetworkTarget, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function (S, P) -> (S, P) float64 that multiplies by H + Lambda at theta (P,), all vectors in one pass."""
    theta = theta.to(target.device, target.dtype)
    pairs = pairs_at_once(target.layout, target.device, theta.dtype)
    most = max(1, pairs // min(_FEWEST, target.num_examples))  # vectors at once

    @with_smaller_blocks
    def multiply(target: NetworkTarget, vectors: Tensor) -> Tensor:
        total = -target.prior.curvature_times(vectors, target.layout)
        for some, part in zip(vectors.to(theta).split(most), total.split(most), strict=True):
            for rows in target.row_blocks(len(some), theta.dtype):
                part += _product(target, theta, some, rows).double() * target.likelihood_scale
        return total

    return partial(multiply, target)


def _product(target: NetworkTarget, theta: Tensor, vectors: Tensor, rows: slice) -> Tensor:
    """Return sum_n J_n^T H_n J_n v over the examples in `rows`, (S, P), for vectors (S, P)."""
    inputs = target.inputs[rows].to(target.device)
    with torch.enable_grad():
        logits, pull = torch.func.vjp(lambda one: target.layout.logits(inputs, one.unsqueeze(0))[0], theta)[:2]
    probs = target.likelihood.normalize_(logits.detach().T.unsqueeze(1).clone())[1]
    pushed = target.layout.push(inputs, theta, vectors).permute(2, 0, 1).contiguous()
    weighted = target.likelihood.hessian_product_(probs, pushed).permute(1, 2, 0)
    return torch.func.vmap(lambda one: pull(one)[0])(weighted)


def solve(
    multiply: Callable[[Tensor], Tensor],
    sides: Tensor,
    whitening: Covariance,
    *,
    tolerance: float = TOLERANCE,
    progress: Progress = SILENT,
) -> Solutions:
    """Solve A d = b for all right sides b (S, P) at once; converged ones take no more products.

    Args:
        multiply: multiplies rows (S, P) by A (P, P), positive definite, float64.
        whitening: Sigma, close to A^{-1}; residual norms are r^T Sigma r.

    Raises:
        NumericError: the residuals do not reach the tolerance.
    """
    task = progress.task("conjugate gradients", MOST_STEPS)
    found = torch.zeros_like(sides)
    residual = sides.clone()
    white = _times(whitening, residual)
    first = length = (residual * white).sum(dim=1)
    direction = white.clone()
    num_steps = 0
    while True:
        active = (length > tolerance**2 * first).nonzero()[:, 0]
        if not len(active) or num_steps == MOST_STEPS or not bool(torch.isfinite(length).all()):
            break
        signals.raise_if_interrupted("the draws")
        some = direction[active]
        product = multiply(some)
        step = (length[active] / (some * product).sum(dim=1)).unsqueeze(1)
        found[active] += step * some
        residual[active] -= step * product
        white = _times(whitening, residual[active])
        before, length = length, length.index_copy(0, active, (residual[active] * white).sum(dim=1))
        direction[active] = white + (length / before)[active].unsqueeze(1) * some
        num_steps += 1
        task.advance(note=f"residual {float((length / first).max().sqrt()):.2g}")
    residual = sides - multiply(found)  # the true residual, without the rounding that the steps accumulate
    left = float(((residual * _times(whitening, residual)).sum(dim=1) / first).max().sqrt())
    if not left <= 2 * tolerance:
        raise NumericError(
            f"conjugate gradients left residuals of {left:.2g} after {num_steps} steps; expected at most {tolerance:g}",
            hint="use a larger \0prior_precision\0, or a \0structure\0 closer to full",
        )
    return Solutions(found, num_steps, left)


def _times(covariance: Covariance, rows: Tensor) -> Tensor:
    """Return r Sigma for rows r (S, P)."""
    return covariance.unwhiten(covariance.pull_back(rows))
