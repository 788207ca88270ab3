"""The training loop: epochs in rounds, a learning-rate schedule, early stopping, resume states.

On a GPU, a training step is captured once as a graph and replayed, so that no Python runs between kernels."""

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


STANDSTILL_ERRORS = 1.5  # standard errors that the objective must have risen by to be rising
RISING_ERRORS = 3.0  # the same for a last part that is to be told still rising, which is seldom to be said of noise
STEP_SHARES = (0.5, 0.75)  # of the planned steps: where He et al. (2016, arXiv:1512.03385, 4.2) divide the rate by ten
ANNEALING_SHARE = 0.15  # of the steps so far: how long the learning rate falls after a standstill


@dataclass
class Course:
    """The course of one training, as planned and as it became.

    Args:
        epochs: passes over the data, at most.
        num_batches: steps an epoch.
        schedule: of the learning rates: constant, falling to zero along a cosine, or a tenth (step) from half of the steps on and
            a hundredth from three quarters on.
        num_cycles: cosines one after the other, each of as many epochs, with the first rate at its start.
        patience: rounds compared with as many before to tell a standstill; 0 never ends early.
        round_steps: that a round takes at least, in whole epochs.

    Attributes:
        num_epochs: epochs that there will be: fewer than planned after a standstill.
        annealing_start: the step at which the shortened end began; None while there is none.
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
        """Whether the objective stood still."""
        return self.annealing_start is not None

    @property
    def epochs_a_round(self) -> int:
        """Whole epochs of at least `round_steps` steps."""
        return -(-self.round_steps // self.num_batches)

    def rate(self, first: float, step: int) -> float:
        """The learning rate of a step, for one that is `first` at the start.

        Along a cosine to zero at the planned end; after a standstill along a shorter one from where it was.
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
        """Begin the shortened end where the objective of the epochs so far, which is to rise, stands still."""
        if not self.is_early and self._stands_still(objective):
            self._shorten(len(objective))

    def _stands_still(self, objective: Sequence[float]) -> bool:
        """Whether the last `patience` rounds have a mean no higher than as many rounds before, beyond the noise."""
        width = self.patience * self.epochs_a_round
        if len(objective) < 2 * width:
            return False
        return not _rises(objective, width, STANDSTILL_ERRORS)

    def doubt(self, objective: Sequence[float]) -> str | None:
        """Why the objective of all epochs, which is to rise, may not be at its end, in words; None where nothing speaks for it.

        It was still rising where its last quarter is above the quarter before beyond the noise; with patience, and epochs enough
        for that, it is to have been seen to stand still as well.
        """
        width = len(objective) // 4
        if self.is_early:
            return None
        if width > 1 and _rises(objective, width, RISING_ERRORS):
            return "was still rising"
        # Where the plan is too short for patience the last quarter decides, if there are epochs enough to tell anything.
        is_asked = 2 * self.patience * self.epochs_a_round <= self.epochs or width < 2
        is_doubted = self.patience > 0 and is_asked and not self._stands_still(objective)
        return "had not levelled off" if is_doubted else None

    def _shorten(self, done: int) -> None:
        """Let the learning rate fall to zero over a few more epochs, no more than were planned."""
        more = max(self.epochs_a_round, math.ceil(ANNEALING_SHARE * done))
        if done + more < self.num_epochs:
            self.annealing_start = done * self.num_batches
            self.num_epochs = done + more

    def state(self) -> dict[str, Tensor]:
        """What became of it, as tensors of a resume state."""
        start = -1 if self.annealing_start is None else self.annealing_start
        return {"history.ends": torch.tensor([self.num_epochs, start])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state; one that says nothing is of a training that goes on as planned."""
        if "history.ends" in state:
            self.num_epochs, start = (int(value) for value in state["history.ends"])
            self.annealing_start = None if start < 0 else start


def _cosine(share: float) -> float:
    """1 at 0, 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def _rises(objective: Sequence[float], width: int, errors: float) -> bool:
    """Whether the mean of the last `width` epochs is more than so many standard errors above that of as many before."""
    values = torch.tensor(objective[len(objective) - 2 * width :], dtype=torch.float64)
    before, after = values[:width], values[width:]
    # Single epochs do not tell their noise: they are compared as they are.
    error = math.sqrt(float(before.var() + after.var()) / width) if width > 1 else 0.0
    return float(after.mean() - before.mean()) > errors * error


class Learner(Protocol):
    """Parameters, and one update of them on a batch.

    Attributes:
        generator: of shuffles and draws. A capture that fails puts another in its place, in the same state.
        batch_size: examples a step; None where each step takes all data, which have no order then.
        shuffles: whether batches are drawn anew each epoch; else they are blocks of consecutive examples.
        steps_at_once: whose draws and batches are laid out together. With one, a step's are copied to where a graph looks.
        seen_shape: of what an update returns.
        draws_in_steps: whether an update draws from the generator.
        is_capturable: whether an update may be captured as a graph, where the device has graphs.
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
        """What updates the parameters."""

    @property
    def device(self) -> torch.device:
        """Of parameters and batches."""

    @property
    def num_examples(self) -> int:
        """N."""

    @property
    def num_epochs(self) -> int:
        """Epochs that end_round was told of, now or before the state that was taken up."""

    @property
    def objective(self) -> Sequence[float]:
        """What each of those epochs gave of that which is to rise."""

    @property
    def constants(self) -> object:
        """What an update reads besides parameters and batch: with another one a captured step is not the same."""

    def rates(self, epoch: int) -> Sequence[float]:
        """The learning rate of each group of the optimizer in an epoch, before any schedule."""

    def note(self) -> str:
        """A few words on where the training is, for people."""

    def begin_epoch(self, order: Tensor | None) -> None:
        """The order of the examples (N,) that batches are cut from; None for that of the data. Not where a step takes all."""

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        """Draws of so many steps, laid out on the device: the steps are the first axis of each."""

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        """These rows of the order, as so many batches of one size, on the device: the batches are the first axis of each."""

    def update(self, *parts: Tensor) -> Tensor:
        """One update, from a step's draws and batch; what it saw, float64, of shape `seen_shape`, on the device."""

    def end_round(self, seen: Tensor) -> None:
        """Take note of what all steps of some epochs saw, (epochs, steps, *seen_shape).

        Raises:
            NumericError: when an epoch's objective is not finite.
        """

    def state(self) -> dict[str, Tensor]:
        """Copies of all that the optimizer does not know and a resumed training needs."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""


def num_batches(learner: Learner) -> int:
    """Steps of an epoch."""
    return 1 if learner.batch_size is None else -(-learner.num_examples // learner.batch_size)


_WARM_UP_STEPS = 3  # that torch wants to see before a capture; they are ordinary steps
_REGISTERING_ENDS = "2.14"  # the release of torch from which graphs find the generators they draw from

Result = TypeVar("Result")


class Drawing(Protocol):
    """What draws random numbers in its steps. A capture that fails leaves it another generator, in the same state."""

    generator: torch.Generator


def num_updates(optimizer: Optimizer) -> int:
    """How many updates an optimizer has counted on the device."""
    return int(next(iter(optimizer.state.values()))["step"])


class StepGraph(Generic[Result]):
    """A step: run as it is at first, then replayed.

    Args:
        step: reads and writes tensors that stay where they are. What it returns in the capture, each replay overwrites.
        num_done: the steps that the device has counted, which each step adds to: it tells whether a replay did the step.
        device: of the tensors.
        warn: told once why there is no graph.
        drawing: whose generator, on the device, the step draws from; None when it draws nothing.
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
        """One step.

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
        """The step on the side stream."""
        here = torch.cuda.current_stream(self.device)
        side = _side_stream(here.device)
        side.wait_stream(here)
        with torch.cuda.stream(side), warnings.catch_warnings():
            # Optimizers that can be captured warn of a first step outside of a capture.
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True", UserWarning)
            result = self.step()
        here.wait_stream(side)
        return result

    def _first(self) -> Result:
        """The step by the first replay of a new graph; as it is where there is none, or where the replay did nothing."""
        before = self.num_done()
        captured = self._capture()
        if captured is None:
            return self.step()
        graph, result = captured
        is_recorded = self.num_done() == before  # a capture does not take the step, it writes it down
        graph.replay()
        is_done = self.num_done() > before
        if is_recorded and is_done:
            self._captured = captured
            return result
        self._refuse("the captured graph does nothing")
        return result if is_done else self.step()

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Result] | None:
        """The graph and what the step returned in it; None where some kernel cannot be captured."""
        here, random = torch.cuda.current_stream(self.device), None
        graph = torch.cuda.CUDAGraph()
        if self.drawing is not None:
            random = self.drawing.generator.get_state()
            if torch.torch_version.TorchVersion(torch.__version__) < _REGISTERING_ENDS:
                graph.register_generator_state(self.drawing.generator)
        stream = _side_stream(here.device)
        try:
            # Other threads may wait for the GPU meanwhile, as the one does that writes draws.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = self.step()
        except RuntimeError as error:
            torch.cuda.set_stream(here)  # torch 2.13 leaves that of the capture
            causes = _causes(error)
            for cause in causes:
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            torch.cuda.synchronize(self.device)
            if self.drawing is not None and random is not None:  # the old one still counts itself as captured
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
    """Where all steps of a device warm up and are captured: memory that one stream has given back no other gets."""
    return torch.cuda.Stream(device)


def _causes(error: BaseException) -> list[BaseException]:
    """The error and those that it came of: the end of a capture fails as well when a kernel in it has."""
    found = [error]
    while (earlier := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(earlier)
    return found


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


State: TypeAlias = "Mapping[str, Tensor]"
Save = Callable[[State, bool], None]


def train(
    learner: Learner,
    course: Course,
    *,
    what: str,
    state: State | None = None,
    save: Save | None = None,
    progress: Progress = SILENT,
) -> None:
    """Trains a learner in place.

    Args:
        learner: what learns.
        course: how long and how fast; tells afterwards whether it ended early.
        what: the name of the task.
        state: from an earlier call that was interrupted; the result is that of an uninterrupted one, bit for bit.
        save: called with the state after every round, and with True when the training is interrupted.
        progress: advanced once a step.

    Raises:
        NumericError: when an epoch's objective is not finite.
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
    learner.optimizer.zero_grad()  # gradients lie in the memory of the graph, which is to go


def step_rates(learner: Learner, course: Course, epoch: int) -> list[Rates]:
    """The learning rates of every step of an epoch."""
    first = epoch * course.num_batches
    groups = learner.rates(epoch)
    return [tuple(course.rate(rate, first + step) for rate in groups) for step in range(course.num_batches)]


class _Training:
    """A learner, its course and its steps: all that a state holds."""

    def __init__(self, learner: Learner, course: Course, steps: Steps) -> None:
        self.learner, self.course, self.steps = learner, course, steps

    def run_round(self, task: Task) -> None:
        """Some epochs, then a look whether the objective still rises."""
        learner, course = self.learner, self.course
        first = learner.num_epochs
        last = min(first + course.epochs_a_round, course.num_epochs)
        rates = [step_rates(learner, course, epoch) for epoch in range(first, last)]
        if learner.batch_size is None:  # an epoch is one step: draws are laid out for all of the round
            seen = self.steps.run([step for (step,) in rates], task, learner.note()).unsqueeze(1)
        else:
            seen = torch.stack([self.steps.run(epoch, task, learner.note()) for epoch in rates])
        learner.end_round(seen)
        if course.patience:
            course.look(learner.objective)

    def state(self) -> dict[str, Tensor]:
        """Copies of everything, on the device."""
        learner = self.learner
        own = {"generator": learner.generator.get_state(), **self.course.state(), **learner.state()}
        return own | optimizer_tensors(learner.optimizer)

    def load(self, state: State) -> None:
        """Take up a state."""
        self.learner.generator.set_state(state["generator"].cpu())
        self.course.load(state)
        self.learner.load(state)
        load_optimizer(self.learner.optimizer, state)
