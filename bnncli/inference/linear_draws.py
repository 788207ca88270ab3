"""Draws of a linearised network's Gaussian N(theta, (H + Lambda)^{-1}) without its covariance: each is the solution of a least-squares problem.

Sample then optimise (Papandreou and Yuille 2010; Antoran et al. 2023, arXiv:2210.04994, section 3). With H = sum_n J_n^T R_n R_n^T J_n,
targets e_n ~ N(0, I) and w ~ N(0, Lambda^{-1}), the minimiser d of sum_n |R_n^T J_n d - e_n|^2 / 2 + |d - w|^2_Lambda / 2 solves
(H + Lambda) d = b, b = sum_n J_n^T R_n e_n + Lambda w. The covariance of b is H + Lambda, so that of d is its inverse, exactly.

All draws are solved together by conjugate gradients (Hestenes and Stiefel 1952), whitened by another Gaussian of the same
target. A step is one pass over the data, with a product by J_n and one by its transpose for each draw; no J is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from bnncli.covariances import Covariance
from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.machine import signals
from bnncli.progress import SILENT, Progress
from bnncli.targets.activation_room import pairs_at_once

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

TOLERANCE = 1e-2  # of a draw's residual: it is wrong by a few hundredths of a standard deviation
MOST_STEPS = 1000
_FEWEST = 64  # examples at once, before vectors are taken one after the other
# PyTorch makes a CPU's normals by sixteens: blocks of so many examples have the numbers that one call makes.
_SIXTEEN = 16


class Solutions(NamedTuple):
    """Of (H + Lambda) d = b.

    Args:
        values: d (S, P) float64.
        num_steps: of conjugate gradients, each a product.
        residual: the largest of the draws, relative to b, both measured by the whitening Gaussian.
    """

    values: Tensor
    num_steps: int
    residual: float

    @property
    def num_passes(self) -> int:
        """Over the data: for the right sides, for each step, and to see the residual."""
        return self.num_steps + 2


def linear_draws(
    target: NetworkTarget,
    theta: Tensor,
    whitening: Covariance,
    *,
    num_draws: int,
    generator: torch.Generator,
    tolerance: float = TOLERANCE,
    progress: Progress = SILENT,
) -> Solutions:
    """Deviations from theta (P,) of draws of N(theta, (H + Lambda)^{-1}), H the Gauss-Newton matrix there.

    Args:
        target: whose prior has Lambda.
        whitening: near that covariance: the nearer, the fewer passes.
        num_draws: S.
        generator: of the targets, on the CPU.
        tolerance: of the residuals.
        progress: advanced once a step.

    Raises:
        NumericError: the residuals do not become so small.
    """

    def normals(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    sides = right_sides(target, theta, num_draws, normals)
    return solve(precision_operator(target, theta), sides, whitening, tolerance=tolerance, progress=progress)


def right_sides(target: NetworkTarget, theta: Tensor, num_draws: int, normals: Callable[..., Tensor]) -> Tensor:
    """b (S, P) float64, linear in standard normals: (S, P) of the prior, then (n, S, M) of each block of examples."""
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
    """A function (S, P) -> (S, P) float64 that multiplies by H + Lambda at theta (P,); vectors go through the network together."""
    theta = theta.to(target.device, target.dtype)
    pairs = pairs_at_once(target.layout, target.device, theta.dtype)
    most = max(1, pairs // min(_FEWEST, target.num_examples))  # vectors at once

    def multiply(vectors: Tensor) -> Tensor:
        total = -target.prior.curvature_times(vectors, target.layout)
        for some, part in zip(vectors.to(theta).split(most), total.split(most), strict=True):
            for rows in target.row_blocks(len(some), theta.dtype):
                part += _product(target, theta, some, rows).double() * target.likelihood_scale
        return total

    return multiply


def _product(target: NetworkTarget, theta: Tensor, vectors: Tensor, rows: slice) -> Tensor:
    """sum_n J_n^T H_n J_n v over the examples in `rows`, (S, P), of vectors (S, P)."""
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
    """The solutions of A d = b for all right sides b (S, P) at once; those that are there take no more products.

    Args:
        multiply: by A (P, P), positive definite, of rows (S, P), float64.
        whitening: Sigma, near A^{-1}; the residuals' lengths are r^T Sigma r.

    Raises:
        NumericError: the residuals do not become so small.
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
    residual = sides - multiply(found)  # what is left in truth: that of the steps is wrong by their rounding
    left = float(((residual * _times(whitening, residual)).sum(dim=1) / first).max().sqrt())
    if not left <= 2 * tolerance:
        raise NumericError(
            f"conjugate gradients left residuals of {left:.2g} after {num_steps} steps; expected at most {tolerance:g}",
            hint="use a larger \0prior_precision\0, or a \0structure\0 closer to full",
        )
    return Solutions(found, num_steps, left)


def _times(covariance: Covariance, rows: Tensor) -> Tensor:
    """r Sigma, of rows r (S, P)."""
    return covariance.unwhiten(covariance.pull_back(rows))
