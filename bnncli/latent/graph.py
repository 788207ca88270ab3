"""Steps of a latent binary fit on a GPU: batches of full size replay one graph, once it has been captured.

The graph draws from the fit's own generator; it is captured anew when the prior is another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from bnncli.latent.model import LatentModel
from bnncli.latent.prior import SpikeAndSlab
from bnncli.latent.steps import Batch, Step
from bnncli.training.step_graph import StepGraph, num_updates


class Fit(Protocol):
    """What takes steps: its model's tensors stay where they are, its prior may become another."""

    model: LatentModel
    generator: torch.Generator
    optimizer: torch.optim.Adam

    def step(self, batch: Batch) -> Step:
        """One update of the model."""


class GraphSteps:
    """The steps of a fit on a GPU.

    Args:
        fit: whose steps they are. It is not kept alive: it holds these steps, and a graph would outlive both until a
            collection.
        batch_size: of the batches that replay the graph; others are ordinary steps.
        warn: told where steps cannot be captured.
    """

    def __init__(self, fit: Fit, batch_size: int, *, warn: Callable[[str], None]) -> None:
        self.fit: Fit = weakref.proxy(fit)
        self.batch_size, self.warn = batch_size, warn
        self.graph: StepGraph[Step] | None = None
        self.batch: Batch | None = None
        self.prior: SpikeAndSlab | None = None

    def __call__(self, batch: Batch) -> Step:
        """The step on a batch: what it saw is overwritten by the next."""
        fit = self.fit
        is_refused = self.graph is not None and self.graph.is_refused
        if is_refused or len(batch.features) != self.batch_size:
            return fit.step(batch)
        if self.batch is None:
            self.batch = Batch(batch.features.clone(), batch.labels.clone(), batch.share)
        own = self.batch
        if self.graph is None or self.prior is not fit.model.prior:
            self.prior = fit.model.prior
            num_done = partial(num_updates, fit.optimizer)
            self.graph = StepGraph(lambda: fit.step(own), num_done, fit.model.device, warn=self.warn, drawing=fit)
        own.features.copy_(batch.features)
        own.labels.copy_(batch.labels)
        return self.graph()
