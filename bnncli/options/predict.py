"""Options of predict."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.option import Checked, option


@dataclass(frozen=True)
class PredictOptions(Checked):
    """Options of predict."""

    posterior: list[str] = option(
        [],
        "Posterior to predict with, by name or file; all of the run by default. Repeatable.",
        metavar="NAME|FILE",
        numeric=False,
    )
    integrator: str | None = option(
        None,
        "How the posterior becomes probabilities; plug-in for map, mc for all others by default.",
        family="integrators",
    )
    keep_samples: bool = option(
        False, "Keep the probabilities of every draw as well (float16, draws x examples x classes).", numeric=False
    )
    samples: int | None = option(None, "Draws of a sampling integrator; 20 by default, all draws for hmc.", minimum=1)
    split: list[str] = option(
        [], "Split to predict; all but train by default. Repeatable.", metavar="SPLIT", numeric=False
    )
