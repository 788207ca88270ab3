"""Training steps, many at once: on a GPU one captured graph a step, so that no Python runs between kernels.

Draws and shuffled rows are laid out for many steps at once; a step finds its own by a counter on the device. Only the
numbers of a whole epoch travel back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bnncli.inference.objective import Objective
from bnncli.progress import SILENT, Task
from bnncli.training.step_graph import StepGraph, num_updates

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**29}  # of the rows and of the draws that are laid out at once
_MAX_FULL_CHUNK = 32  # steps on all data whose draws are laid out at once


class StepRunner:
    """Runs steps that maximise an objective.

    Args:
        objective: to maximise.
        layers: that learn.
        optimizer: of their parameters, its learning rate a tensor on the device.
        batch_size: B; N for all data a step.
        num_draws: S a step.
        warn: told where steps cannot be captured.
    """

    def __init__(
        self,
        objective: Objective,
        layers: Sequence[Any],
        optimizer: torch.optim.Optimizer,
        batch_size: int,
        num_draws: int,
        *,
        warn: Callable[[str], None] = SILENT.warn,
    ) -> None:
        self.objective, self.layers, self.optimizer = objective, layers, optimizer
        self.batch_size, self.num_draws = batch_size, num_draws
        target = objective.target
        self.is_full = batch_size >= target.num_examples
        self.num_batches = -(-target.num_examples // batch_size)
        none = target.examples(torch.empty(0, dtype=torch.int64, device=target.device))
        row_bytes = 0 if self.is_full else sum(part.shape[1:].numel() * part.dtype.itemsize for part in none)
        step_bytes = max(batch_size * row_bytes, target.dtype.itemsize * num_draws * target.layout.num_params)
        most = max(1, _CHUNK_BYTES.get(target.device.type, 2**26) // step_bytes)
        self.chunk = min(_MAX_FULL_CHUNK if self.is_full else self.num_batches, most)
        self._allocate(none)
        # A graph needs its data where they are: those that travel block by block cannot be captured.
        is_resident = not self.is_full or target.is_resident
        self._graph: StepGraph[None] | None = None
        if target.device.type == "cuda" and is_resident:
            runner: StepRunner = weakref.proxy(self)  # a graph that held its holder would outlive it until a collection
            num_done = partial(num_updates, optimizer)
            self._graph = StepGraph(lambda: runner._counted_step(), num_done, target.device, warn=warn)

    def run(self, rates: Sequence[float], generator: torch.Generator, task: Task) -> Tensor:
        """The steps' estimates of the ELBO, float64, one for each rate: one pass over the data, or steps on all data.

        Args:
            rates: learning rate of each step; as many as batches, any number when each takes all data.
            generator: of the shuffle and the draws.
            task: advanced once a step.
        """
        target = self.objective.target
        order = None
        if not self.is_full:
            order = torch.randperm(target.num_examples, generator=generator, device=generator.device)
        parts = []
        for first in range(0, len(rates), self.chunk):
            count = min(self.chunk, len(rates) - first)
            num_rows = self._lay_out(order, first, count, rates, generator)
            whole = count if self.is_full else num_rows // self.batch_size
            for _ in range(whole):
                self._one_step()
                task.advance()
            if whole < count:  # the last batch of an epoch has fewer rows, too few for the graph
                self._step(whole, slice(whole * self.batch_size, num_rows))
                task.advance()
            parts.append(self.estimates[:count].clone())
        return torch.cat(parts)

    def _allocate(self, none: Sequence[Tensor]) -> None:
        """Buffers for a chunk; `none` are examples without a row."""
        target = self.objective.target
        device, layout = target.device, target.layout
        self.noise = torch.empty(self.chunk, self.num_draws, layout.num_params, dtype=target.dtype, device=device)
        self.estimates = torch.empty(self.chunk, dtype=torch.float64, device=device)
        self.rates = torch.empty(self.chunk, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.place = 0
        if not self.is_full:
            num_rows = self.chunk * self.batch_size
            self.examples = tuple(part.new_empty(num_rows, *part.shape[1:]) for part in none)
            self.offsets = torch.arange(self.batch_size, device=device)

    def _lay_out(
        self, order: Tensor | None, first: int, count: int, rates: Sequence[float], generator: torch.Generator
    ) -> int:
        """Fills the buffers for steps first to first + count of the epoch; the number of rows laid out."""
        target = self.objective.target
        noise = torch.randn(
            (count, *self.noise.shape[1:]), generator=generator, device=generator.device, dtype=target.dtype
        )
        self.noise[:count] = noise
        self.rates[:count] = torch.tensor(rates[first : first + count])
        self.counter.zero_()
        self.place = 0
        if order is None:
            return 0
        index = order[first * self.batch_size : (first + count) * self.batch_size].to(target.device)
        for buffer, part in zip(self.examples, target.examples(index), strict=True):
            buffer[: len(index)] = part
        return len(index)

    def _one_step(self) -> None:
        """The next whole step of the chunk: replayed on a GPU, once it has been captured."""
        if self._graph is not None and not self._graph.is_refused:
            self._graph()
        else:
            self._step(self.place, slice(self.place * self.batch_size, (self.place + 1) * self.batch_size))
        self.place += 1

    def _step(self, place: int, rows: slice) -> None:
        """Step `place` of the chunk, on these rows of it."""
        self._learning_rate.copy_(self.rates[place])
        batch = () if self.is_full else (buffer[rows] for buffer in self.examples)
        self.estimates[place] = self._update(self.noise[place], *batch)

    def _counted_step(self) -> None:
        """The step that the counter on the device names; advances it."""
        self._learning_rate.copy_(self.rates.index_select(0, self.counter)[0])
        noise = self.noise.index_select(0, self.counter)[0]
        batch: tuple[Tensor, ...] = ()
        if not self.is_full:
            rows = self.counter * self.batch_size + self.offsets
            batch = tuple(buffer.index_select(0, rows) for buffer in self.examples)
        self.estimates.index_copy_(0, self.counter, self._update(noise, *batch).reshape(1))
        self.counter += 1

    @property
    def _learning_rate(self) -> Tensor:
        rate: Tensor = self.optimizer.param_groups[0]["lr"]
        return rate

    def _update(self, noise: Tensor, *batch: Tensor) -> Tensor:
        """One update of the parameters; the estimate of the ELBO before it, float64."""
        estimate = self.objective.estimate(self.layers, noise, *batch).mean()
        self.optimizer.zero_grad()
        estimate.neg().backward()
        self.optimizer.step()
        return estimate.detach().double()
