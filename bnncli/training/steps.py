"""Training steps, many at once: on a GPU one captured graph a step, so that no Python runs between kernels.

Draws and batches are laid out for many steps at once; a step finds its own by a counter on the device. Only what the steps of
a whole chunk saw leaves them. A learner that lays out one step at a time has its batch copied to where the graph looks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.progress import Task
from bnncli.training.learner import Learner
from bnncli.training.step_graph import StepGraph, num_updates

if TYPE_CHECKING:
    from torch import Tensor

Rates = Sequence[float]  # of a step: one for each group of the optimizer

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**29}  # of the batches and of the draws that are laid out at once
_LARGEST = 3.4028234663852886e38  # of float32


def steps_at_once(step_bytes: int, device: torch.device, *, most: int) -> int:
    """How many steps are worth laying out together, at least one; step_bytes: of the larger of a step's draws and batch."""
    return min(most, max(1, _CHUNK_BYTES.get(device.type, 2**26) // step_bytes))


class Steps:
    """The steps of a learner, which does not hold them: a graph would outlive both until a collection of cycles.

    Args:
        learner: whose updates they are.
        warn: told where steps cannot be captured.
    """

    def __init__(self, learner: Learner, *, warn: Callable[[str], None]) -> None:
        self.learner, self.warn = learner, warn
        self.chunk = learner.steps_at_once
        device, groups = learner.device, learner.optimizer.param_groups
        self.learning_rates: list[Tensor] = [group["lr"] for group in groups]
        self.is_capturable = device.type == "cuda" and learner.is_capturable
        self.seen = torch.empty((self.chunk, *learner.seen_shape), dtype=torch.float64, device=device)
        self.rates = torch.empty(len(groups), self.chunk, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._parts: tuple[Tensor, ...] = ()  # where the graph finds the draws and batches of a chunk
        self._rates_now: Rates = ()
        self._graph: StepGraph[None] | None = None
        self._constants: object = None

    def run(self, rates: Sequence[Rates], task: Task, note: str = "") -> Tensor:
        """What the steps saw, (steps, *seen_shape): of one pass over the data, or of any number that each take all data.

        Args:
            rates: the learning rates of each step.
            task: advanced once a step, with the note.

        Raises:
            NumericError: a rate is no float32.
        """
        learner = self.learner
        largest = max(map(max, rates))
        if largest > _LARGEST:  # infinite there, and what infinite steps come to is the device's affair
            raise NumericError(
                f"a learning rate of {largest:g} is out of range for float32", hint="use a smaller \0learning_rate\0"
            )
        if learner.batch_size is not None:
            learner.begin_epoch(self._order())
        chunks = range(0, len(rates), self.chunk)
        return torch.cat([self._run_chunk(first, rates[first : first + self.chunk], task, note) for first in chunks])

    def _order(self) -> Tensor | None:
        generator = self.learner.generator
        if not self.learner.shuffles:
            return None
        return torch.randperm(self.learner.num_examples, generator=generator, device=generator.device)

    def _run_chunk(self, first: int, rates: Sequence[Rates], task: Task, note: str) -> Tensor:
        """The steps from `first` on of an epoch."""
        learner, count, size = self.learner, len(rates), self.learner.batch_size
        draws = learner.draw(count)
        whole, parts, end, stop = count, draws, 0, 0
        if size is not None:
            start, stop = first * size, min((first + count) * size, learner.num_examples)
            whole = (stop - start) // size
            end = start + whole * size
            parts = (*draws, *(learner.gather(slice(start, end), whole) if whole else ()))
        graph = self._graph_of_now() if whole else None
        if graph is not None:
            self._lay_out(parts, rates)
        for place in range(whole):
            if graph is not None and not graph.is_refused:
                graph()
            else:
                self._step(place, rates[place], [part[place] for part in parts])
            task.advance(note=note)
        if whole < count:  # the last batch of an epoch has fewer rows, too few for the graph
            rest = learner.gather(slice(end, stop), 1)
            self._step(whole, rates[whole], [*(part[whole] for part in draws), *(part[0] for part in rest)])
            task.advance(note=note)
        return self.seen[:count].clone()

    def _graph_of_now(self) -> StepGraph[None] | None:
        """The graph of whole batches; None where there can be none."""
        learner, graph = self.learner, self._graph
        if not self.is_capturable or (graph is not None and graph.is_refused):
            return None
        if graph is None or self._constants is not learner.constants:
            self._constants = learner.constants
            steps: Steps = weakref.proxy(self)
            num_done = partial(num_updates, learner.optimizer)
            drawing = learner if learner.draws_in_steps else None
            self._graph = graph = StepGraph(
                lambda: steps._laid_out_step(), num_done, learner.device, warn=self.warn, drawing=drawing
            )
        return graph

    def _lay_out(self, parts: Sequence[Tensor], rates: Sequence[Rates]) -> None:
        """Draws, batches and learning rates of a chunk to where the graph looks."""
        if not self._parts:
            self._parts = tuple(part.new_empty((self.chunk, *part.shape[1:])) for part in parts)
        for own, part in zip(self._parts, parts, strict=True):
            own[: len(part)].copy_(part)
        if self.chunk == 1:
            self._set_rates(rates[0])
            return
        self.rates[:, : len(rates)] = torch.tensor(rates).T
        self.counter.zero_()
        self._rates_now = ()

    def _laid_out_step(self) -> None:
        """The step that the counter on the device names, which it advances; the only one where a chunk is one step."""
        if self.chunk == 1:
            self.seen[0] = self.learner.update(*(part[0] for part in self._parts))
            return
        for own, rates in zip(self.learning_rates, self.rates, strict=True):
            own.copy_(rates.index_select(0, self.counter)[0])
        parts = [part.index_select(0, self.counter)[0] for part in self._parts]
        self.seen.index_copy_(0, self.counter, self.learner.update(*parts).unsqueeze(0))
        self.counter += 1

    def _step(self, place: int, rates: Rates, parts: Sequence[Tensor]) -> None:
        """A step as it is."""
        self._set_rates(rates)
        self.seen[place] = self.learner.update(*parts)

    def _set_rates(self, rates: Rates) -> None:
        if rates != self._rates_now:
            self._rates_now = rates
            for own, rate in zip(self.learning_rates, rates, strict=True):
                own.fill_(rate)
