"""Chains of samplers: traces, ranks, R-hat and effective sample sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.headers import Header, interpreting
from bnncli.evaluation.chain_figures import block_means, histogram, rank_band, rank_counts
from bnncli.evaluation.convergence import GOOD_RHAT, parameter_statistics
from bnncli.evaluation.rank_statistics import RankStatistics
from bnncli.evaluation.verdict import GOOD_ESS
from bnncli.figures.chains import ChainTraces, Histogram, Mixing, RankHistograms, Trace
from bnncli.figures.pages import Block, Missing, element, paragraph
from bnncli.session.chains import deciding_line
from bnncli.session.inputs import open_samples, require_draws
from bnncli.stages.report.parameters import parameter_name
from bnncli.stages.report.subject import Subject, tried

_MOST_POSTERIORS = 2  # with chains, in one report
_MOST_CHAINS = 8
_NUM_BLOCKS = 32
_NUM_BINS = 10
_MOST_PARAMETERS = 4096  # judged one by one, evenly over all
LOG_POSTERIOR = "log posterior density"


def chains(subject: Subject) -> list[Block]:
    """The section."""
    found = {name: header for name, header in subject.headers.items() if header.kind == "samples"}
    blocks: list[Block] = []
    for name, header in list(found.items())[:_MOST_POSTERIORS]:
        blocks.append(element("h3", name))
        made = tried(partial(_of_posterior, subject, name, header))
        blocks += [made] if isinstance(made, Missing) else made
    if not found:
        blocks = [
            Missing(
                "The run has no draws from a sampler to compare the other posteriors with.",
                subject.run.suggest("hmc"),
            )
        ]
    return blocks


def _said(header: Header) -> str:
    """How many draws there are, and how they agree on what decides."""
    with interpreting(header.path):
        return f"{deciding_line(header.meta['metrics'])}."


def _of_posterior(subject: Subject, name: str, header: Header) -> list[Block]:
    """The figures of one posterior that is draws."""
    require_draws(subject.run, header)
    posterior, content = open_samples(header.path)
    draws = posterior.draws.numpy()
    places = np.unique(np.linspace(0, draws.shape[2] - 1, min(_MOST_PARAMETERS, draws.shape[2])).round().astype(int))
    statistics = parameter_statistics(draws[:, :, places], device=subject.run.device)
    shown = np.unique(np.linspace(0, len(draws) - 1, min(_MOST_CHAINS, len(draws))).round().astype(int))
    worst = int(places[_worst(statistics)]) if statistics is not None else 0
    quantity = f"{parameter_name(header.meta, worst)}{' (mixes worst)' if statistics is not None else ''}"
    values = {quantity: np.asarray(draws[:, :, worst], dtype=np.float64)}
    log_density = content.stats.get("lp")
    if log_density is not None:
        values = {LOG_POSTERIOR: np.asarray(log_density, dtype=np.float64), **values}
    numbers = (shown + 1).tolist()
    found: list[Block] = [
        paragraph(_said(header)),
        ChainTraces(name, [_trace(what, one[shown], numbers) for what, one in values.items()], len(draws), subject.key),
    ]
    if draws.shape[1] >= 2 * _NUM_BINS:
        counts = rank_counts(values[quantity], _NUM_BINS)[shown].tolist()
        band = rank_band(draws.shape[1], _NUM_BINS)
        found.append(RankHistograms(name, quantity, numbers, counts, band, len(draws), subject.key))
    if statistics is None:
        found.append(
            Missing(
                "R-hat and effective sample sizes of single parameters are undefined: the chains are too short, "
                "or do not move."
            )
        )
    else:
        found.append(_mixing(subject, name, statistics))
    return found


def _trace(quantity: str, draws: NDArray[np.float64], numbers: list[int]) -> Trace:
    middles, means = block_means(draws, _NUM_BLOCKS)
    return Trace(quantity, numbers, middles, means.tolist())


def _worst(statistics: RankStatistics) -> int:
    """The parameter of the largest R-hat; of the smallest sample size where that is undefined."""
    r_hat: Any = statistics.r_hat
    return int(r_hat.argmax()) if bool(r_hat.isfinite().all()) else int(statistics.ess_bulk.argmin())


def _mixing(subject: Subject, name: str, statistics: RankStatistics) -> Mixing:
    r_hat, bulk, tail = (part.numpy() for part in statistics)
    ratio = Histogram("R-hat", *histogram(r_hat, 30)) if np.isfinite(r_hat).all() else None
    edges = np.array(histogram(np.concatenate([bulk, tail]), 30)[0])
    sizes = [
        Histogram(what, edges.tolist(), np.histogram(part, edges)[0].tolist())
        for what, part in (("bulk", bulk), ("tail", tail))
    ]
    return Mixing(name, ratio, sizes, GOOD_RHAT, GOOD_ESS, len(r_hat), subject.key)
