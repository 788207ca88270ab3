"""Options of predict."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.option import Checked, option


@dataclass(frozen=True)
class PredictOptions(Checked):
    """Options of predict. An option called like a setting of an integrator is that setting; None is its own default."""

    posterior: list[str] = option(
        [],
        "Posterior to predict with, by name or file; all of the run by default. Repeatable.",
        metavar="NAME|FILE",
        numeric=False,
    )
    integrator: list[str] = option(
        [],
        "How the posterior becomes probabilities; plug-in for map and temperature, mc for all others by default; all takes every one that fits the posterior. Repeatable.",
        family="integrators",
        choices=("all",),
    )
    split: list[str] = option(
        [], "Split to predict; all but train by default. Repeatable.", metavar="SPLIT", numeric=False
    )
    samples: int | None = option(
        None,
        "Draws of a sampling integrator; its own number by default (mc: 20), all draws of a posterior that is draws (hmc).",
        minimum=1,
    )
    keep_samples: bool = option(
        False, "Keep the probabilities of every draw as well (float16, draws x examples x classes).", numeric=False
    )
    qmc: bool = option(False, "Draw by scrambled Sobol points instead of pseudo-random numbers (mc, logit-mc).")
    projection: str | None = option(
        None,
        "What of the logits is used: none (as they are), sum-zero (minus their mean), difference (probit, of two classes), conditional (bridge).",
        metavar="NAME",
    )
    order: int | None = option(None, "Order of the mean-field approximation: 0, 1 or 2.", minimum=0)
    normalize: bool = option(False, "Shrink logits of large variance before the Laplace bridge (bridge).")
    rule: str | None = option(None, "Quadrature rule: trapezoid or gauss-hermite (quadrature).", metavar="NAME")
    points: int | None = option(None, "Points of the quadrature rule (quadrature).", minimum=1)
