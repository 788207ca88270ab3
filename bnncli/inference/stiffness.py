"""The largest curvature of a log posterior, by power iteration: what bounds a gradient step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.inference.white_coordinates import WhiteCoordinates
from bnncli.lazy import torch
from bnncli.targets.network import NetworkTarget
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor

ITERATIONS = 20
MAX_ROWS = 2048  # examples of a network that stand for all
_SQUARED_BATCHES = 32  # that RMSprop starts from


def largest_curvature(
    target: CurvedTarget,
    theta: Tensor,
    generator: torch.Generator,
    scale: Tensor | None = None,
    *,
    whitening: WhiteCoordinates | None = None,
) -> float:
    """The largest eigenvalue of G^1/2 H G^1/2 at theta (P,), H the Hessian of -log joint, or its Gauss-Newton part.

    From below, within a few percent: the Rayleigh quotient after 20 products.

    Args:
        target: with all data; of a network a few thousand seeded examples stand for them.
        scale: G, (P,); 1 by default.
        whitening: in whose coordinates H is taken, where not in those of theta.
    """
    product = sampled(target, generator).hessian_operator(theta)
    if whitening is not None:
        product = whitening.products(product)
    root = torch.ones_like(theta, dtype=torch.float64) if scale is None else scale.double().sqrt()
    vector = torch.randn(len(theta), generator=generator, dtype=torch.float64).to(target.device)
    quotient = vector.new_zeros(())
    for _ in range(ITERATIONS):
        vector = vector / vector.norm()
        image = root * product((root * vector).unsqueeze(0))[0]
        quotient, vector = vector @ image, image
    return float(quotient)


def curvature_passes(target: CurvedTarget) -> float:
    """Gradient passes over the data that largest_curvature takes: a product counts as two."""
    rows = min(MAX_ROWS, target.num_examples) if isinstance(target, NetworkTarget) else target.num_examples
    return 2 * ITERATIONS * rows / target.num_examples


def sampled(target: CurvedTarget, generator: torch.Generator) -> CurvedTarget:
    """The target itself; of a network with many examples, as seeded ones of them tell it."""
    if not isinstance(target, NetworkTarget) or target.num_examples <= MAX_ROWS:
        return target
    rows = torch.randperm(target.num_examples, generator=generator)[:MAX_ROWS].sort().values
    return target.minibatch(*target.examples(rows))


def mean_square(
    target: CurvedTarget, theta: Tensor, batch_size: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Mean squares (P,) of the gradient of the mean loss of minibatches at theta (P,), and the passes that they took."""
    order = torch.randperm(target.num_examples, generator=generator).to(target.device)
    batches = order.split(batch_size)[:_SQUARED_BATCHES]
    stacked = theta.to(target.device, target.dtype).unsqueeze(0)
    total = torch.zeros_like(stacked[0], dtype=torch.float64)
    for rows in batches:
        gradient = target.minibatch(*target.examples(rows)).log_joint_and_grad(stacked)[1]
        total += (gradient[0].double() / target.num_examples).square()
    return total / len(batches), sum(map(len, batches)) / target.num_examples
