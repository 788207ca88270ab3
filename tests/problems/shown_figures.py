"""One of every figure that reports show, of small numbers."""

from __future__ import annotations

import math

from bnncli.figures.chains import ChainTraces, Histogram, Mixing, RankHistograms, Trace
from bnncli.figures.fits import LinePanel, LinePanels, PriorPrecisionCurve, Series
from bnncli.figures.posteriors import DistanceMatrix, Marginal, Marginals, Weights, WeightSpread
from bnncli.figures.predictions import ConfidenceHistograms, ReliabilityDiagrams, RiskCoverage, Roc
from bnncli.figures.scores import Line, ScoreIntervals, ScorePanel
from bnncli.figures.style import FigureContent

_EDGES = [0.0, 0.25, 0.5, 0.75, 1.0]
_BINS = {
    "edges": _EDGES,
    "count": [0, 3, 20, 400],
    "confidence": [None, 0.4, 0.6, 0.95],
    "accuracy": [None, 0.5, 0.55, 0.93],
}
_GRID = [-3 + 0.25 * step for step in range(25)]
_CURVE = [(10.0**power, 0.3 + 0.05 * (power - 1) ** 2) for power in (-2, -1, 0, 0.5, 0.75, 1, 1.25, 1.5, 2, 3)]


def _bell(mean: float, sd: float) -> list[float]:
    return [math.exp(-0.5 * ((x - mean) / sd) ** 2) / (sd * math.sqrt(2 * math.pi)) for x in _GRID]


def shown_figures() -> list[FigureContent]:
    """All kinds, two posteriors in each."""
    steps = list(range(0, 200, 5))
    means = [[math.sin(0.3 * step + chain) for step in range(40)] for chain in range(4)]
    histograms = {"test": [0, 10, 40, 150], "mnist": [5, 40, 50, 30]}
    return [
        ReliabilityDiagrams({"laplace": _BINS, "hmc": _BINS}, "test", {"laplace": 0.0123, "hmc": None}),
        RiskCoverage({"laplace": {"coverage": [0.1, 0.5, 1.0], "risk": [0.0, 0.01, 0.1]}}, "test", {"laplace": 0.02}),
        Roc({"laplace": {"fpr": [0.0, 0.1, 1.0], "tpr": [0.0, 0.8, 1.0]}}, "test", "mnist", {"laplace": 0.86}, "combined"),
        ConfidenceHistograms(_EDGES, {"laplace": histograms, "hmc": histograms}, "test"),
        PriorPrecisionCurve("laplace", _CURVE, "val", at_edge=True, network=0.4),
        LinePanels(
            "elbo", "ELBO", "The evidence lower bound, epoch by epoch.",
            [LinePanel("refine", "epoch", "ELBO, nats", [Series("refine", [1, 2, 3], [-9.0, -7.0, -6.5])])],
        ),
        ChainTraces("hmc", [Trace("log posterior", range(1, 5), steps, means)], num_chains=4),
        RankHistograms("hmc", "head.weight[0, 3]", [1, 2, 3], [[9, 11, 10], [12, 8, 10], [9, 11, 10]], (5, 15), 5),
        Mixing(
            "hmc", Histogram("R-hat", [1.0, 1.02, 1.04, 1.06], [40, 8, 2]),
            [Histogram("bulk", [200, 400, 600], [10, 40]), Histogram("tail", [200, 400, 600], [20, 30])], 1.05, 400, 50,
        ),
        Marginals(
            [Marginal("class 3, feature 17", _GRID, {"hmc": _bell(0, 1), "laplace": _bell(0.3, 0.8)}, {"map": 1.5})], "hmc", "The first.",
        ),
        DistanceMatrix(["map", "laplace", "hmc"], {("map", "laplace"): 0.7, ("map", "hmc"): 0.69, ("laplace", "hmc"): None}, {}),
        WeightSpread([Weights("laplace", 0.4, 0.7, 0.9), Weights("diag", 3.2, 0.7, 90.0), Weights("flow", None, 0.7, None)], 2.0),
        ScoreIntervals(
            "scores-test", ["map", "laplace"],
            [ScorePanel("NLL", [Line((), 0.32, (0.31, 0.33), is_marked=True), Line((), None, None, is_marked=True)])] * 3,
            "Scores on test", "Intervals hold the true score with probability 0.95.",
        ),
    ]  # fmt: skip
