"""Posteriors against their target and against each other, as diagnose judges them, and their densities over those of draws."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.marginal_density import apart, density, grid_of, spread_over
from bnncli.evaluation.verdict import CLOSE_LOG_WEIGHT_SD, DENSITIES, POINTS
from bnncli.figures.pages import Block, Missing
from bnncli.figures.posteriors import DistanceMatrix, Marginal, Marginals, Weights, WeightSpread
from bnncli.session.run import Table
from bnncli.stages.diagnose.judgement import Judgement
from bnncli.stages.diagnose.tables import diagnosis_tables
from bnncli.stages.report.parameters import parameter_name
from bnncli.stages.report.scores import data_table
from bnncli.stages.report.subject import MOST_DRAWN, Subject

_SHARES = (1.0, 0.99, 0.9, 0.5)  # of parameters in order of how far posteriors lie apart, that are drawn
_GRID = 49


def posteriors(subject: Subject) -> list[Block]:
    """The section."""
    judgement = subject.judgement
    if isinstance(judgement, Missing):
        return [judgement]
    blocks: list[Block] = []
    captions = ("Gaussians, flows and points", "Draws") if len(_tables(judgement)) > 1 else ("Posteriors",)
    for place, table in enumerate(_tables(judgement)):
        blocks.append(
            data_table(table, f"{subject.key}diagnosis-{place}", f"{captions[place]}{subject.of}, by diagnose")
        )
    spread = _spread(subject, judgement)
    matrix = _matrix(subject, judgement)
    blocks += [one for one in (spread, matrix, _marginals(subject, judgement)) if one is not None]
    return blocks


def _tables(judgement: Judgement) -> list[Table]:
    """The tables of diagnose but that of the pairs, which are a figure here."""
    return diagnosis_tables(judgement.entries, [])


def _spread(subject: Subject, judgement: Judgement) -> WeightSpread | None:
    """Pareto k of what has a density."""
    found = [
        Weights(
            name,
            entry["pareto_k"]["value"],
            entry["pareto_k"].get("threshold", 0.7),
            entry["log_weight_sd"]["value"],
        )
        for name, entry in judgement.entries.items()
        if entry["type"] in DENSITIES and entry["log_weight_sd"]["value"] is not None
    ]
    return WeightSpread(found[: 2 * MOST_DRAWN], CLOSE_LOG_WEIGHT_SD, subject.key) if found else None


def _matrix(subject: Subject, judgement: Judgement) -> DistanceMatrix | None:
    """Distances between the posteriors over the layers that most are over."""
    pairs = {(one["posteriors"][0], one["posteriors"][1]): one for one in judgement.pairs}
    names = [name for name in judgement.entries if any(name in pair for pair in pairs)][: MOST_DRAWN + 1]
    kept = {pair: one for pair, one in pairs.items() if set(pair) <= set(names)}
    if not any(one["unbiased"] is not None for one in kept.values()):
        return None
    values = {pair: one["unbiased"] for pair, one in kept.items()}
    return DistanceMatrix(names, values, {pair: one["p_value"] for pair, one in kept.items()}, subject.key)


def _marginals(subject: Subject, judgement: Judgement) -> Marginals | Missing | None:
    """Densities of the draws that diagnose compares, of the posteriors over the same parameters as the reference."""
    chains = [one for one in judgement.diagnoses if one.judged.type == "samples"]
    reference = next((one for one in chains if one.entry["is_good"]), chains[0] if chains else None)
    if reference is None:
        return Missing(
            "Densities of single weights need draws from a sampler to compare with.",
            subject.run.suggest("hmc"),
        )
    alike = [
        one
        for one in judgement.diagnoses
        if one.judged.layers == reference.judged.layers
        and one.draws.draws.shape[1] == reference.draws.draws.shape[1]
        and bool(one.draws.draws.isfinite().all())
    ][:MOST_DRAWN]
    if reference not in alike:
        alike = [reference, *alike[: MOST_DRAWN - 1]]
    draws = {one.judged.name: one.draws.draws.numpy() for one in alike}
    own = reference.judged.name
    wide = {one.judged.name for one in alike if one.judged.type not in POINTS}
    others = {name: values for name, values in draws.items() if name != own and name in wide}
    chosen = spread_over(apart(draws[own], others), _SHARES)
    meta = judgement.headers[own].meta
    panels = [_marginal(parameter_name(meta, index), index, draws, own, wide) for index in chosen]
    shares = ", ".join(f"{100 * share:g}%" for share in _SHARES[1:])
    how = (
        f"The first weight is the one where posteriors differ most from {own}, in its standard deviations; the "
        f"others are at {shares} of that order."
        if others
        else f"Weights are spread evenly over those of {own}."
    )
    return Marginals(panels, own, how, bool(reference.entry["is_good"]), subject.key)


def _marginal(title: str, index: int, draws: dict[str, NDArray[np.float32]], own: str, wide: set[str]) -> Marginal:
    """The densities of one parameter."""
    parts = {name: values[:, index].astype(np.float64) for name, values in draws.items()}
    grid = grid_of([part for name, part in parts.items() if name in wide], _GRID)
    densities, points = {}, {}
    for name in sorted(parts, key=lambda name: name != own):  # the reference lies below the others
        estimate = density(parts[name], grid) if name in wide else None
        if estimate is None:
            points[name] = float(parts[name][0])
        else:
            densities[name] = estimate.tolist()
    return Marginal(title, grid.tolist(), densities, points)
