"""Small heads: their layouts, targets with features and labels drawn by seed, and Gaussians at their modes.

A file of tests names its own problem once: `make_target = partial(head_target, num_examples=12, labels=by_sign, prior=0.3)`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget
from problems.seeds import seeded

# Several outputs and the single one of two classes, each with and without a bias.
LAYOUTS = [HeadLayout(3, 4), HeadLayout(3, 4, has_bias=False), HeadLayout(1, 4), HeadLayout(1, 4, has_bias=False)]
# Two classes by one output and by two, and three.
ONE, TWO, THREE = HeadLayout(1, 4), HeadLayout(2, 4, has_bias=False), HeadLayout(3, 4)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)

Labels = Callable[[Tensor, HeadLayout, torch.Generator], Tensor]  # of features (N, D); the generator has drawn them


def by_sign(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    """Two classes that the first feature separates."""
    return (features[:, 0] > 0).long()


def by_noisy_sign(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    """Two classes that overlap along the first feature, whatever the layout has."""
    return (features[:, 0] + torch.randn(len(features), generator=generator) > 0).long()


def at_random(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    """Classes that have nothing to do with the features."""
    return torch.randint(layout.num_classes, (len(features),), generator=generator)


def at_random_by(seed: int) -> Labels:
    """The same, from a seed of their own."""
    return lambda features, layout, generator: at_random(features, layout, seeded(seed))


def draw_examples(
    layout: HeadLayout, num_examples: int, labels: Labels, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Standard normal features (N, D), and labels (N,)."""
    generator = seeded(seed)
    features = torch.randn(num_examples, layout.num_features, generator=generator, dtype=dtype)
    return features, labels(features, layout, generator)


def head_target(
    layout: HeadLayout,
    num_examples: int = 30,
    *,
    labels: Labels = at_random,
    prior: Prior | float = 1.0,
    likelihood_scale: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> LastLayerTarget:
    """The target of examples drawn so; `prior`: or the one precision of all parameters."""
    prior = prior if isinstance(prior, Prior) else Prior(prior)
    return LastLayerTarget(
        *draw_examples(layout, num_examples, labels, seed=seed, dtype=dtype), layout, prior, likelihood_scale
    )


def gaussian_at_mode(target: LastLayerTarget, structure: str = "full") -> Gaussian:
    """What fit-laplace fits, from theta = 0."""
    return fit_gaussian(target, start=torch.zeros(target.layout.num_params), structure=structure).gaussian


def draw_theta(layout: HeadLayout, num_draws: int | None = None, *, seed: int = 1) -> Tensor:
    """Standard normal parameters (S, P), or (P,) where no number is given."""
    size = (layout.num_params,) if num_draws is None else (num_draws, layout.num_params)
    return torch.randn(size, generator=seeded(seed), dtype=torch.float64)
