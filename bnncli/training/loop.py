"""The training loop: epochs in rounds, a learning-rate schedule, early stopping, resume states.

On a GPU, a training step is captured once as a graph and replayed, so that no Python runs between kernels.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from bnncli.errors import Interrupted, NumericError
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress, Task
from bnncli.training.optimizers import Optimizer, load_optimizer, optimizer_tensors

if TYPE_CHECKING:
    from torch import Tensor


STANDSTILL_ERRORS = 1.5  # standard errors by which the objective must have risen to count as rising
RISING_ERRORS = 3.0  # the same for reporting that it was still rising at the end, which noise should rarely trigger
STEP_SHARES = (0.5, 0.75)  # of the planned steps: where He et al. (2016, arXiv:1512.03385, 4.2) divide the rate by ten
ANNEALING_SHARE = 0.15  # of the steps so far: duration of the final decay after a plateau


@dataclass
class LearningRateSchedule:
    """The schedule of one training, as planned and as it turned out.

    Args:
        epochs: limit on passes over the data.
        num_batches: steps per epoch.
        schedule: of the learning rates: constant, cosine (to zero), or step (a tenth from half of the steps on, a
            hundredth from three quarters on).
        num_cycles: number of consecutive cosines of equal length, each starting at the initial rate.
        patience: rounds to compare with as many before to detect a plateau; 0 for never.
        round_steps: smallest number of steps per round, in whole epochs.

    Attributes:
        num_epochs: actual epochs: fewer than planned after a plateau.
        annealing_start: step at which the final decay began; None before.
    """

    epochs: int
    num_batches: int
    schedule: str = "cosine"
    patience: int = 0
    round_steps: int = 1
    num_cycles: int = 1
    num_epochs: int = field(init=False)
    annealing_start: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_epochs = self.epochs

    @property
    def is_early(self) -> bool:
        """Return whether the objective plateaued."""
        return self.annealing_start is not None

    @property
    def epochs_a_round(self) -> int:
        """Whole epochs with at least `round_steps` steps."""
        return -(-self.round_steps // self.num_batches)

    def rate(self, first: float, step: int) -> float:
        """Return the learning rate of a step, given the initial one.

        With a cosine, it decays to zero at the planned end; after a plateau, faster, from its current value.
        """
        if self.schedule == "constant":
            return first
        start, end = self.annealing_start, self.num_epochs * self.num_batches
        if self.schedule == "step":
            return first * 0.1 ** sum(step >= share * end for share in STEP_SHARES)
        if start is None:
            length = end / self.num_cycles
            return first * _cosine(step % length / length)
        planned_end = self.epochs * self.num_batches
        return first * _cosine(start / planned_end) * _cosine((step - start) / (end - start))

    def look(self, objective: Sequence[float]) -> None:
        """Start the final decay if the objective (higher is better) of the epochs so far has plateaued."""
        if not self.is_early and self._stands_still(objective):
            self._shorten(len(objective))

    def _stands_still(self, objective: Sequence[float]) -> bool:
        """Return whether the mean of the last `patience` rounds is not significantly higher than that of as many before."""
        width = self.patience * self.epochs_a_round
        if len(objective) < 2 * width:
            return False
        return not _rises(objective, width, STANDSTILL_ERRORS)

    def doubt(self, objective: Sequence[float]) -> str | None:
        """Return why the objective of all epochs may not have converged, in words; None if nothing suggests that.

        It was still rising if its last quarter is significantly above the quarter before. With patience, and enough
        epochs for it, a plateau must have been detected as well.
        """
        width = len(objective) // 4
        if self.is_early:
            return None
        if width > 1 and _rises(objective, width, RISING_ERRORS):
            return "was still rising"
        # If the plan is too short for patience, the last quarter decides, given enough epochs.
        is_asked = 2 * self.patience * self.epochs_a_round <= self.epochs or width < 2
        is_doubted = self.patience > 0 and is_asked and not self._stands_still(objective)
        return "had not levelled off" if is_doubted else None

    def _shorten(self, done: int) -> None:
        """Decay the learning rate to zero over a few more epochs, at most as many as planned."""
        more = max(self.epochs_a_round, math.ceil(ANNEALING_SHARE * done))
        if done + more < self.num_epochs:
            self.annealing_start = done * self.num_batches
            self.num_epochs = done + more

    def state(self) -> dict[str, Tensor]:
        """Return the outcome so far as tensors of a resume state."""
        start = -1 if self.annealing_start is None else self.annealing_start
        return {"history.ends": torch.tensor([self.num_epochs, start])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; without an entry, training continues as planned."""
        if "history.ends" in state:
            self.num_epochs, start = (int(value) for value in state["history.ends"])
            self.annealing_start = None if start < 0 else start


def _cosine(share: float) -> float:
    """Return 1 at 0, decaying to 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def _rises(objective: Sequence[float], width: int, errors: float) -> bool:
    """Return whether the mean of the last `width` epochs exceeds that of as many before by `errors` standard errors."""
    values = torch.tensor(objective[len(objective) - 2 * width :], dtype=torch.float64)
    before, after = values[:width], values[width:]
    # Single epochs show no noise: compare them directly.
    error = math.sqrt(float(before.var() + after.var()) / width) if width > 1 else 0.0
    return float(after.mean() - before.mean()) > errors * error


class Learner(Protocol):
    """Parameters, and how to update them on a batch.

    Attributes:
        generator: of shuffles and draws. A failed capture replaces it by another in the same state.
        batch_size: examples per step; None if each step uses all data.
        shuffles: whether batches are drawn in each epoch; else they are blocks of consecutive examples.
        steps_at_once: steps whose draws and batches are prepared together. With one, a step's are copied to where a
            graph reads.
        seen_shape: shape of an update's result.
        draws_in_steps: whether an update draws from the generator.
        is_capturable: whether an update may be captured as a graph, if the device has graphs.
    """

    generator: torch.Generator
    batch_size: int | None
    shuffles: bool
    steps_at_once: int
    seen_shape: tuple[int, ...]
    draws_in_steps: bool
    is_capturable: bool

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the parameters."""

    @property
    def device(self) -> torch.device:
        """Device of parameters and batches."""

    @property
    def num_examples(self) -> int:
        """Number of examples, N."""

    @property
    def num_epochs(self) -> int:
        """Epochs passed to end_round, including those before a loaded state."""

    @property
    def objective(self) -> Sequence[float]:
        """Objective of each of those epochs; higher is better."""

    @property
    def constants(self) -> object:
        """Return the values that an update reads besides parameters and batch; if it changes, a captured step is invalid."""

    def rates(self, epoch: int) -> Sequence[float]:
        """Return the learning rate of each optimizer group in an epoch, before any schedule."""

    def note(self) -> str:
        """Return a short note on the state of the training, for people."""

    def begin_epoch(self, order: Tensor | None) -> None:
        """Set the order (N,) of the examples for batches, None for the data's; not called if a step uses all data."""

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Return the draws of num_steps steps on the device; steps are the first axis of each."""

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """Return these rows of the order as num_steps batches of equal size on the device; batches are the first axis of each."""

    def update(self, *parts: Tensor) -> Tensor:
        """Update the parameters, given a step's draws and batch; return its result, float64, `seen_shape`, on the device."""

    def end_round(self, seen: Tensor) -> None:
        """Record the results of all steps of some epochs, (epochs, steps, *seen_shape).

        Raises:
            NumericError: an epoch's objective is not finite.
        """

    def state(self) -> dict[str, Tensor]:
        """Return copies of everything that resuming needs besides the optimizer."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""


def num_batches(learner: Learner) -> int:
    """Return the steps per epoch."""
    return 1 if learner.batch_size is None else -(-learner.num_examples // learner.batch_size)


_WARM_UP_STEPS = 3  # ordinary steps that torch requires before a capture
_REGISTERING_ENDS = "2.14"  # torch release from which graphs find their generators

Result = TypeVar("Result")


class Drawing(Protocol):
    """An object that draws random numbers in its steps. A failed capture replaces its generator by another in the same state."""

    generator: torch.Generator


def num_updates(optimizer: Optimizer) -> int:
    """Return the number of updates that an optimizer has counted on the device."""
    return int(next(iter(optimizer.state.values()))["step"])


class StepGraph(Generic[Result]):
    """A step that is run directly at first, then captured and replayed.

    Args:
        step: reads and writes tensors that stay in place. Each replay overwrites what the captured call returned.
        num_done: returns the steps counted on the device, which shows whether a replay did the step.
        device: of the tensors.
        warn: called once with the reason if there is no graph.
        drawing: owner of the device generator that the step draws from; None if it draws nothing.
    """

    def __init__(
        self,
        step: Callable[[], Result],
        num_done: Callable[[], int],
        device: torch.device,
        *,
        warn: Callable[[str], None],
        drawing: Drawing | None = None,
    ) -> None:
        self.step, self.num_done, self.device, self.warn, self.drawing = step, num_done, device, warn, drawing
        self.is_refused = False
        self._captured: tuple[torch.cuda.CUDAGraph, Result] | None = None
        self._warm = 0

    def __call__(self) -> Result:
        """Run one step.

        Raises:
            torch.OutOfMemoryError: there is no memory for the graph.
        """
        with torch.cuda.device(self.device):
            if self._captured is not None:
                graph, result = self._captured
                graph.replay()
                return result
            if self.is_refused:
                return self.step()
            if self._warm < _WARM_UP_STEPS:
                self._warm += 1
                return self._beside()
            return self._first()

    def _beside(self) -> Result:
        """Run the step on the side stream."""
        here = torch.cuda.current_stream(self.device)
        side = _side_stream(here.device)
        side.wait_stream(here)
        with torch.cuda.stream(side), warnings.catch_warnings():
            # Capturable optimizers warn about a first step outside of a capture.
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True", UserWarning)
            result = self.step()
        here.wait_stream(side)
        return result

    def _first(self) -> Result:
        """Run the step as the first replay of a new graph; directly if there is none, or the replay did nothing."""
        before = self.num_done()
        captured = self._capture()
        if captured is None:
            return self.step()
        graph, result = captured
        is_recorded = self.num_done() == before  # a capture records the step without running it
        graph.replay()
        is_done = self.num_done() > before
        if is_recorded and is_done:
            self._captured = captured
            return result
        self._refuse("the captured graph does nothing")
        return result if is_done else self.step()

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Result] | None:
        """Return the graph and the step's result; None if a kernel cannot be captured."""
        here, random = torch.cuda.current_stream(self.device), None
        graph = torch.cuda.CUDAGraph()
        if self.drawing is not None:
            random = self.drawing.generator.get_state()
            if torch.torch_version.TorchVersion(torch.__version__) < _REGISTERING_ENDS:
                graph.register_generator_state(self.drawing.generator)
        stream = _side_stream(here.device)
        try:
            # Other threads, such as the writer of draws, may wait for the GPU meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = self.step()
        except RuntimeError as error:
            torch.cuda.set_stream(here)  # torch 2.13 stays on the capture's stream
            causes = _causes(error)
            for cause in causes:
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            torch.cuda.synchronize(self.device)
            if self.drawing is not None and random is not None:  # the old one still considers itself captured
                self.drawing.generator = torch.Generator(self.device)
                self.drawing.generator.set_state(random)
            self._refuse(" ".join(str(causes[-1]).split())[:200])
            return None
        return graph, result

    def _refuse(self, why: str) -> None:
        self.is_refused = True
        self.warn(f"running steps one at a time, which is slower: cannot record them as a CUDA graph ({why})")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all steps of a device warm up and are captured, since streams do not share freed memory."""
    return torch.cuda.Stream(device)


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and its causes: ending a capture fails as well if a kernel in it has failed."""
    found = [error]
    while (earlier := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(earlier)
    return found


Rates = Sequence[float]  # of a step: one per optimizer group

_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**29}  # of batches and draws prepared at once
_LARGEST = 3.4028234663852886e38  # of float32


def steps_at_once(step_bytes: int, device: torch.device, *, most: int) -> int:
    """Return how many steps to prepare together, at least one; step_bytes: larger of a step's draws and batch."""
    return min(most, max(1, _CHUNK_BYTES.get(device.type, 2**26) // step_bytes))


class Steps:
    """Runs the steps of a learner, which does not refer back, since a cycle would keep a graph alive until collected.

    Args:
        learner: performs the updates.
        warn: called if steps cannot be captured.
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
        self._parts: tuple[Tensor, ...] = ()  # where the graph reads the draws and batches of a chunk
        self._rates_now: Rates = ()
        self._graph: StepGraph[None] | None = None
        self._constants: object = None

    def run(self, rates: Sequence[Rates], task: Task, note: str = "") -> Tensor:
        """Return the results of steps, (steps, *seen_shape): of one epoch, or of any number that each use all data.

        Args:
            rates: learning rates of each step.
            task: advances once per step, with the note.

        Raises:
            NumericError: a rate exceeds float32.
        """
        learner = self.learner
        largest = max(map(max, rates))
        if largest > _LARGEST:  # infinite there, with device-dependent results
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
        """Run the steps of an epoch from `first` on."""
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
        if whole < count:  # the last batch of an epoch is smaller, and does not fit the graph
            rest = learner.gather(slice(end, stop), 1)
            self._step(whole, rates[whole], [*(part[whole] for part in draws), *(part[0] for part in rest)])
            task.advance(note=note)
        return self.seen[:count].clone()

    def _graph_of_now(self) -> StepGraph[None] | None:
        """Return the graph of whole batches; None if there is none."""
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
        """Copy draws, batches and learning rates of a chunk to where the graph reads."""
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
        """Run the step given by the device counter, and advance it; with one step per chunk, the only one."""
        if self.chunk == 1:
            self.seen[0] = self.learner.update(*(part[0] for part in self._parts))
            return
        for own, rates in zip(self.learning_rates, self.rates, strict=True):
            own.copy_(rates.index_select(0, self.counter)[0])
        parts = [part.index_select(0, self.counter)[0] for part in self._parts]
        self.seen.index_copy_(0, self.counter, self.learner.update(*parts).unsqueeze(0))
        self.counter += 1

    def _step(self, place: int, rates: Rates, parts: Sequence[Tensor]) -> None:
        """Run a step directly."""
        self._set_rates(rates)
        self.seen[place] = self.learner.update(*parts)

    def _set_rates(self, rates: Rates) -> None:
        if rates != self._rates_now:
            self._rates_now = rates
            for own, rate in zip(self.learning_rates, rates, strict=True):
                own.fill_(rate)


State: TypeAlias = "Mapping[str, Tensor]"
Save = Callable[[State, bool], None]


def train(
    learner: Learner,
    course: LearningRateSchedule,
    *,
    what: str,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> None:
    """Train a learner in place.

    Args:
        learner: to be trained.
        course: the schedule; afterwards says whether training stopped early.
        what: name of the task.
        state: from an interrupted call; the result equals that of an uninterrupted one, bit for bit.
        save: called with the state after every round, and with True on interruption.
        progress: advances once per step.

    Raises:
        NumericError: an epoch's objective is not finite.
    """
    training = _Training(learner, course, Steps(learner, warn=progress.warn))
    if state is not None:
        training.load(state)
    task = progress.task(what, course.epochs * course.num_batches)
    task.advance(learner.num_epochs * course.num_batches)
    kept: State = {} if save is None else training.state()
    try:
        while learner.num_epochs < course.num_epochs:
            training.run_round(task)
            if save is not None:
                kept = training.state()
                save(kept, False)
    except Interrupted:
        if save is not None:
            save(kept, True)
        raise
    learner.optimizer.zero_grad()  # gradients are in the memory of the graph, which is freed


def step_rates(learner: Learner, course: LearningRateSchedule, epoch: int) -> list[Rates]:
    """Return the learning rates of every step of an epoch."""
    first = epoch * course.num_batches
    groups = learner.rates(epoch)
    return [tuple(course.rate(rate, first + step) for rate in groups) for step in range(course.num_batches)]


class _Training:
    """A learner, its schedule and its steps: everything in a state."""

    def __init__(self, learner: Learner, course: LearningRateSchedule, steps: Steps) -> None:
        self.learner, self.course, self.steps = learner, course, steps

    def run_round(self, task: Task) -> None:
        """Run some epochs, then check for a plateau."""
        learner, course = self.learner, self.course
        first = learner.num_epochs
        last = min(first + course.epochs_a_round, course.num_epochs)
        rates = [step_rates(learner, course, epoch) for epoch in range(first, last)]
        if learner.batch_size is None:  # an epoch is one step: prepare draws for the whole round
            seen = self.steps.run([step for (step,) in rates], task, learner.note()).unsqueeze(1)
        else:
            seen = torch.stack([self.steps.run(epoch, task, learner.note()) for epoch in rates])
        learner.end_round(seen)
        if course.patience:
            course.look(learner.objective)

    def state(self) -> dict[str, Tensor]:
        """Return copies of everything, on the device."""
        learner = self.learner
        own = {"generator": learner.generator.get_state(), **self.course.state(), **learner.state()}
        return own | optimizer_tensors(learner.optimizer)

    def load(self, state: State) -> None:
        """Load a state."""
        self.learner.generator.set_state(state["generator"].cpu())
        self.course.load(state)
        self.learner.load(state)
        load_optimizer(self.learner.optimizer, state)
