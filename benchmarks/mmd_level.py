"""How often MMD^2's test tells equal distributions apart: chains of several shapes and correlations, by simulation.

    python benchmarks/mmd_level.py [--repeats 300] [--parameters 3] [--shift 0]

For each case the share of p-values at most 0.05 and 0.2 and their mean: of the test by blocks, and of relabelling single
draws thinned to their effective sample size, as one would do without it.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor

from bnncli.evaluation.convergence import convergence
from bnncli.evaluation.distances import (
    NUM_DRAWS,
    ThinnedDraws,
    compare_draws,
    median_distance,
    squared_distances,
    thin,
    thin_draws,
)

CASES = [
    (chains, length, correlation, other)
    for chains, length in ((16, 75), (4, 260), (16, 260))
    for correlation in (-0.5, 0.0, 0.5)
    for other in ("draws", "chains")
]


def autoregressive(shape: tuple[int, int, int], correlation: float, generator: torch.Generator) -> Tensor:
    """Chains (C, T, P) of N(0, I) with this correlation at lag one."""
    draws = torch.randn(shape, generator=generator, dtype=torch.float64)
    draws[:, 1:] *= math.sqrt(1 - correlation**2)
    for t in range(1, shape[1]):
        draws[:, t] += correlation * draws[:, t - 1]
    return draws


def effective(draws: Tensor) -> int:
    """The smallest effective number of draws, as hmc records it."""
    worst = convergence(draws.numpy())
    assert worst.ess_bulk is not None
    assert worst.ess_tail is not None
    return int(min(worst.ess_bulk, worst.ess_tail))


def p_values(case: tuple[int, int, float, str], args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Of the blocks and of single draws, for every repeat."""
    chains, length, correlation, other = case
    generator = torch.Generator().manual_seed(args.seed)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.repeats):
        sides: list[list[ThinnedDraws]] = []
        for is_chain in (other == "chains", True):
            if is_chain:
                draws = autoregressive((chains, length, args.parameters), correlation, generator)
                size = effective(draws)
                pair = [thin_draws(draws, size), ThinnedDraws(thin(draws, min(NUM_DRAWS, size)))]
            else:
                draws = torch.randn(NUM_DRAWS, args.parameters, generator=generator, dtype=torch.float64)
                pair = [ThinnedDraws(draws)] * 2
            sides.append(pair)
        for kept, x, y in zip(found, *sides, strict=True):
            moved = ThinnedDraws(x.draws + args.shift, x.blocks, x.untested)
            distances = squared_distances(moved.draws, y.draws)
            compared = compare_draws(
                moved, y, distances, median_distance(distances.yy), generator=generator, num_permutations=199
            )
            kept.append(math.nan if compared.p_value is None else compared.p_value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--parameters", type=int, default=3)
    parser.add_argument("--shift", type=float, default=0.0, help="of one side, in standard deviations of a parameter")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, action="append", help="numbers of the cases; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("chains x draws, correlation, against: share p <= .05, p <= .2, mean p; of blocks | of single draws")
    for number in args.case or range(len(CASES)):
        texts = [
            f"{np.mean(values <= 0.05):.3f} {np.mean(values <= 0.2):.3f} {values.mean():.3f}"
            for values in map(np.array, p_values(CASES[number], args))
        ]
        chains, length, correlation, other = CASES[number]
        print(f"{chains} x {length}, {correlation:+.1f}, {other}: " + " | ".join(texts), flush=True)


if __name__ == "__main__":
    main()
