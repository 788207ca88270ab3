"""Steps of a latent binary fit on a GPU: batches of full size replay one graph, once it has been captured.

The graph draws from the fit's own generator, which it registers; it is captured anew when the prior is another one.
"""

from __future__ import annotations

from typing import Protocol

import torch

from bnncli.inference.latent_steps import Batch, Step
from bnncli.latent.model import LatentModel
from bnncli.latent.prior import SpikeAndSlab

_WARM_UP_STEPS = 3  # that torch wants to see before a capture; they are ordinary steps


class Fit(Protocol):
    """What takes steps: its model's tensors stay where they are, its prior may become another."""

    model: LatentModel
    generator: torch.Generator

    def step(self, batch: Batch) -> Step:
        """One update of the model."""


class GraphSteps:
    """The steps of a fit on a GPU.

    Args:
        fit: whose steps they are.
        batch_size: of the batches that replay the graph; others are ordinary steps.
    """

    def __init__(self, fit: Fit, batch_size: int) -> None:
        self.fit, self.batch_size = fit, batch_size
        self.graph: torch.cuda.CUDAGraph | None = None
        self.prior: SpikeAndSlab | None = None
        self.warm = 0
        self.can_capture = True

    def __call__(self, batch: Batch) -> Step:
        """The step on a batch: what it saw is overwritten by the next."""
        fit = self.fit
        if not self.can_capture or len(batch.features) != self.batch_size:
            return fit.step(batch)
        if self.prior is not fit.model.prior:
            self.graph, self.warm, self.prior = None, 0, fit.model.prior
        if self.graph is None and self.warm < _WARM_UP_STEPS:
            self.warm += 1
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step = fit.step(batch)
            torch.cuda.current_stream().wait_stream(side)
            return step
        if self.graph is None and not self._capture(batch):
            return fit.step(batch)
        assert self.graph is not None
        self.batch.features.copy_(batch.features)
        self.batch.labels.copy_(batch.labels)
        self.graph.replay()
        return self.step

    def _capture(self, batch: Batch) -> bool:
        """Make the graph; False, and no more tries, where some kernel cannot be captured."""
        self.batch = Batch(batch.features.clone(), batch.labels.clone(), batch.share)
        fit, random = self.fit, self.fit.generator.get_state()
        try:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(fit.generator)
            with torch.cuda.graph(graph):
                self.step = fit.step(self.batch)
        except RuntimeError:
            torch.cuda.synchronize()
            self.can_capture = False
            # The generator of a capture that failed still counts itself as captured: another takes its place.
            fit.generator = torch.Generator(fit.model.device)
            fit.generator.set_state(random)
            return False
        self.graph = graph
        return True
