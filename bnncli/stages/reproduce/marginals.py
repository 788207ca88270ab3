"""Marginal densities of a study's posteriors over those of its sampler, of weights that nobody picked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.marginal_density import apart, density, grid_of, spread_over
from bnncli.figures.posteriors import Marginal, Marginals
from bnncli.numerics import random
from bnncli.session.inputs import open_posterior
from bnncli.stages.reproduce.recipe import MarginalFigure

_SHARES = (1.0, 0.9, 0.5, 0.1)  # of the weights in order of how far posteriors lie apart, 1 being the furthest
_DRAWS = 2000  # of what is no sample already: a density of so many looks as it is
_GRID = 241
_REACH = 6.0  # standard deviations of the reference that are shown beyond the furthest mean: Laplace as published is tens of them wide


def marginals(figure: MarginalFigure, folder: Path, *, seed: int) -> Marginals | None:
    """The densities; None where the run has not all of the posteriors.

    Args:
        folder: of the posteriors of one checkpoint.
    """
    paths = {called: _file(folder, name) for called, name in figure.posteriors.items()}
    draws = {called: _draws(path, seed=seed) for called, path in paths.items() if path is not None}
    if len(draws) < len(paths):
        return None
    reference = next(iter(draws))
    others = {called: one for called, one in draws.items() if called != reference}
    distances = apart(draws[reference], others)
    panels = [_panel(index, distances[index], draws) for index in spread_over(distances, _SHARES)]
    shares = ", ".join(f"{100 * share:g}%" for share in _SHARES[1:])
    how = (
        f"The first weight is the one where a posterior differs most from {reference}; the others are at {shares} of "
        "that order."
    )
    return Marginals(panels, reference, how)


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.nc", folder / f"{name}.safetensors") if path.is_file()), None)


def _draws(path: Path, *, seed: int) -> NDArray[np.float64]:
    """Draws (S, P): all of a sampler's, seeded ones of a density."""
    posterior, header = open_posterior(path)
    if header.kind == "samples":
        return np.asarray(posterior.draws.flatten(0, 1), dtype=np.float64)
    return np.asarray(posterior.sample(_DRAWS, random.stream(seed, "reproduce/marginals")).detach(), dtype=np.float64)


def _panel(index: int, distance: float, draws: Mapping[str, NDArray[np.float64]]) -> Marginal:
    parts = {called: values[:, index] for called, values in draws.items()}
    center, sd = next((float(one.mean()), float(one.std())) for one in parts.values())
    reach = (_REACH + max(distance, _REACH)) * sd
    near = grid_of(list(parts.values()), 2)
    grid = np.linspace(max(near[0], center - reach), min(near[1], center + reach), _GRID)
    found = {called: density(values, grid) for called, values in parts.items()}
    densities = {called: one.tolist() for called, one in found.items() if one is not None}
    points = {called: float(parts[called][0]) for called, one in found.items() if one is None}
    return Marginal(f"weight {index}, {distance:.2g} sd", grid.tolist(), densities, points)
