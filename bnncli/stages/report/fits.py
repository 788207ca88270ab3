"""How the posteriors were fitted: searches for the prior precision, and what each epoch gave."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.posteriors import read_posterior
from bnncli.figures.fits import LABELS, LinePanel, LinePanels, PriorPrecisionCurve, Series
from bnncli.figures.pages import Block, Missing
from bnncli.stages.report.subject import MOST_DRAWN, Subject, tried

if TYPE_CHECKING:
    from torch import Tensor

_MOST_POINTS = 200  # of a trace
_MOST_CURVES = 4  # searches for a prior precision
_MOST_LINES = 5  # of a panel
_HISTORIES = {  # by method: what its history is of, and what an epoch gives
    "refine": ("history.elbo", "ELBO, nats"),
    "vi": ("history.elbo", "ELBO, nats"),
    "swag": ("history.log_joint", "log joint, nats"),
}
_LATENT = "lbbnn"


def fits(subject: Subject) -> list[Block]:
    """The section."""
    curves: list[Block] = []
    panels = []
    for name, header in list(subject.headers.items())[:MOST_DRAWN]:
        curve = tried(partial(_curve, subject, name, header)) if len(curves) < _MOST_CURVES else None
        curves += [curve] if curve is not None else []
        trace = tried(partial(_trace, name, header))
        if isinstance(trace, Missing):
            curves.append(trace)
        elif trace is not None:
            panels.append(trace)
    blocks = curves
    if panels:
        blocks.append(
            LinePanels(
                f"{subject.key}elbo",
                "Progress of each fit",
                "The objective of each fit by epoch, estimated with noise: the evidence lower bound (ELBO) of "
                "flows and variational fits, the log joint of SWAG. A fit that has finished has levelled off.",
                panels,
            )
        )
    if not blocks:
        run = subject.run
        blocks.append(
            Missing(
                "No fit of this run searched for a prior precision or ran in epochs.",
                run.suggest("refine"),
            )
        )
    return blocks


def _curve(subject: Subject, name: str, header: Header) -> PriorPrecisionCurve | None:
    """What the search for the prior precision saw; None where there was none."""
    with interpreting(header.path):
        points, criterion = header.meta.get("curve"), header.meta.get("criterion")
        if not points or criterion not in LABELS:
            return None
        metrics = header.meta.get("metrics", {})
        curve = [(float(precision), float(value)) for precision, value in points]
        network = metrics.get("val_nll_network") if criterion == "val" else None
        at_edge = bool(metrics.get("prior_precision_at_edge"))
    return PriorPrecisionCurve(name, curve, criterion, at_edge, network, subject.key)


def _trace(name: str, header: Header) -> LinePanel | None:
    """What each epoch gave; None of a posterior that was not fitted in epochs."""
    method = str(header.meta.get("method"))
    if method not in (*_HISTORIES, _LATENT):
        return None
    tensors, _ = read_posterior(header.path)
    if method == _LATENT:
        from bnncli.latent.fit import History

        history, what = History.from_tensors(tensors).bound(), "ELBO, nats"
    else:
        key, what = _HISTORIES[method]
        if key not in tensors:
            return None
        history = tensors[key]
    if len(history) == 0:
        return None
    return LinePanel(name, "epoch", what, _lines(history))


def _lines(history: Tensor) -> list[Series]:
    """A line, or one for each of several repeats (E, R); epochs are thinned evenly, the first and the last are kept."""
    values = history.double().flatten(1).numpy() if history.ndim > 1 else history.double().numpy()[:, None]
    places = np.unique(np.linspace(0, len(values) - 1, min(_MOST_POINTS, len(values))).round().astype(int))
    names = [f"repeat {line + 1}" if values.shape[1] > 1 else "ELBO" for line in range(values.shape[1])]
    return [
        Series(name, (places + 1).tolist(), values[places, line].tolist())
        for line, name in enumerate(names[:_MOST_LINES])
    ]
