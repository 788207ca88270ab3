"""The loop, the steps and the course of a training, with a learner that is none of ours: the mean of points, by noisy Adam."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pretend_cuda
import pytest
import torch
from torch import Tensor

from bnncli.errors import Interrupted, NumericError
from bnncli.progress import SilentProgress
from bnncli.training.loop import LearningRateSchedule, num_batches, train
from bnncli.training.optimizers import Adam

POINTS = torch.randn(23, 2, generator=torch.Generator().manual_seed(0))
NOISE = 0.3
RATES = (0.2, 0.02)  # of the two parameters


def seeded(device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(1)


class Centre:
    """Two coordinates, a group of the optimizer each, at the least mean square from points and noise."""

    def __init__(
        self, *, batch_size: int | None = 5, steps_at_once: int = 1, draws_in_steps: bool = False,
        shuffles: bool = True, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.device, self.generator, self.points = torch.device(device), seeded(device), POINTS.to(device)
        self.batch_size, self.steps_at_once, self.shuffles = batch_size, steps_at_once, shuffles
        self.draws_in_steps, self.is_capturable, self.seen_shape = draws_in_steps, True, (2,)
        self.num_examples = len(POINTS)
        self.at = [torch.zeros(1, device=device, requires_grad=True) for _ in range(2)]
        self.optimizer = Adam([[part] for part in self.at], self.device)
        self.constants: object = None
        self.objective: list[float] = []
        self.order: Tensor | None = None

    @property
    def num_epochs(self) -> int:
        return len(self.objective)

    def rates(self, epoch: int) -> Sequence[float]:
        return RATES

    def note(self) -> str:
        return f"{self.num_epochs} done"

    def begin_epoch(self, order: Tensor | None) -> None:
        self.order = order

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def draw(self, num_steps: int) -> tuple[Tensor, ...]:
        return () if self.draws_in_steps else (self.normal(num_steps, 2),)

    def gather(self, rows: slice, num_steps: int) -> tuple[Tensor, ...]:
        points = self.points[rows if self.order is None else self.order[rows]]
        return (points.unflatten(0, (num_steps, -1)),)

    def update(self, *parts: Tensor) -> Tensor:
        noise = self.normal(2) if self.draws_in_steps else parts[0]
        points = parts[-1] if self.batch_size is not None else self.points
        loss = (torch.cat(self.at) + NOISE * noise - points).square().mean(dim=0)
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()
        return loss.detach().double()

    def end_round(self, seen: Tensor) -> None:
        self.objective += seen.mean(dim=(1, 2)).neg().tolist()

    def state(self) -> dict[str, Tensor]:
        return {"history.objective": torch.tensor(self.objective, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.objective = state["history.objective"].tolist()


def trained(learner: Centre, epochs: int = 4, schedule: str = "cosine", **rest: Any) -> dict[str, Tensor]:
    """What was learnt and what the epochs gave, on the CPU."""
    train(learner, LearningRateSchedule(epochs, num_batches(learner), schedule), what="centre", **rest)
    return {"at": torch.cat(learner.at).detach().cpu(), **learner.state()}


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, part in one.items():
        assert torch.equal(part, other[name]), name


def by_hand(epochs: int, batch_size: int, *, shuffles: bool, schedule: str) -> dict[str, Tensor]:
    """The same by torch alone: two optimizers, its own schedule, draws as each step needs them."""
    generator, objective = seeded(), list[float]()
    at = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.Adam([{"params": [part], "lr": rate} for part, rate in zip(at, RATES, strict=True)])
    total = epochs * math.ceil(len(POINTS) / batch_size)
    course = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    for _ in range(epochs):
        order = torch.randperm(len(POINTS), generator=generator) if shuffles else torch.arange(len(POINTS))
        losses = []
        for rows in order.split(batch_size):
            noise = torch.randn(2, generator=generator)
            loss = (torch.cat(at) + NOISE * noise - POINTS[rows]).square().mean(dim=0)
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
            losses.append(loss.mean().item())
            if schedule == "cosine":
                course.step()
        objective.append(-sum(losses) / len(losses))
    return {"at": torch.cat(at).detach(), "history.objective": torch.tensor(objective, dtype=torch.float64)}


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("shuffles", [True, False])
@pytest.mark.parametrize("batch_size", [5, 23, 40])
def test_a_training_is_the_loop_that_one_writes_by_hand(batch_size: int, shuffles: bool, schedule: str) -> None:
    learner = Centre(batch_size=batch_size, shuffles=shuffles, draws_in_steps=True)
    found = trained(learner, schedule=schedule)
    expected = by_hand(4, batch_size, shuffles=shuffles, schedule=schedule)
    for name, part in found.items():
        torch.testing.assert_close(part, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps_at_once", [3, 100])
@pytest.mark.parametrize("batch_size", [5, None])
def test_steps_laid_out_together_are_those_one_by_one(batch_size: int | None, steps_at_once: int) -> None:
    one, many = (
        Centre(batch_size=batch_size, steps_at_once=count, draws_in_steps=True) for count in (1, steps_at_once)
    )
    assert_same(trained(one), trained(many))


@pytest.mark.parametrize("batch_size", [5, None])
@pytest.mark.parametrize(("steps_at_once", "draws_in_steps"), [(1, True), (1, False), (3, True), (3, False)])
def test_captured_steps_learn_the_same_and_leave_no_graph(
    steps_at_once: int, draws_in_steps: bool, batch_size: int | None
) -> None:
    choices: dict[str, Any] = {
        "steps_at_once": steps_at_once,
        "draws_in_steps": draws_in_steps,
        "batch_size": batch_size,
    }
    plain = trained(Centre(**choices), 6)
    gc.disable()
    try:
        with pretend_cuda.pretend() as gpu:
            learner = Centre(**choices, device="cuda:0")
            assert_same(trained(learner, 6), plain)
            assert (gpu.num_captures, gpu.num_live_graphs) == (1, 0)
    finally:
        gc.enable()
    assert gpu.problems() == []
    assert gpu.num_replays == 6 * (1 if batch_size is None else 4) - 3  # whole batches, the warm-up apart
    assert all(part.grad is None for part in learner.at)


def test_a_step_that_reads_other_constants_is_captured_anew() -> None:
    class Weighted(Centre):
        """Its points count more in the second half."""

        def update(self, *parts: Tensor) -> Tensor:
            return super().update(*(part * (1 if self.constants is None else 2) for part in parts))

        def end_round(self, seen: Tensor) -> None:
            super().end_round(seen)
            if self.num_epochs == 3:
                self.constants = object()

    plain = trained(Weighted(), 6)
    with pretend_cuda.pretend() as gpu:
        assert_same(trained(Weighted(device="cuda:0"), 6), plain)
    assert (gpu.num_captures, gpu.problems()) == (2, [])
    assert not torch.equal(plain["at"], trained(Centre(), 6)["at"])


class InterruptedAt(SilentProgress):
    """A signal comes in this step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def task(self, name: str, total: int) -> Any:
        return self

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.left -= amount
        if amount and self.left <= 0:
            raise Interrupted(15, "as asked")


@pytest.mark.parametrize("batch_size", [5, None])
@pytest.mark.parametrize("steps_at_once", [1, 3])
def test_a_training_continues_from_every_round_to_the_same_bits(steps_at_once: int, batch_size: int | None) -> None:
    def learner() -> Centre:
        return Centre(steps_at_once=steps_at_once, batch_size=batch_size)

    states: list[tuple[dict[str, Tensor], bool]] = []
    whole = trained(learner(), save=lambda state, is_last: states.append((dict(state), is_last)))
    assert [is_last for _, is_last in states] == 4 * [False]
    assert [len(state["history.objective"]) for state, _ in states] == [1, 2, 3, 4]
    for state, _ in states:
        assert_same(trained(learner(), state=state), whole)
        without = {name: part for name, part in state.items() if name != "history.ends"}
        assert_same(trained(learner(), state=without), whole)  # as of a training that could not end early
    kept: list[tuple[dict[str, Tensor], bool]] = []
    num_steps = num_batches(learner())
    with pytest.raises(Interrupted):
        trained(
            learner(), progress=InterruptedAt(3 * num_steps),
            save=lambda state, is_last: kept.append((dict(state), is_last)),
        )  # fmt: skip
    assert [is_last for _, is_last in kept] == [False, False, True]
    assert_same(kept[-1][0], states[1][0])
    assert_same(trained(learner(), state=kept[-1][0]), whole)


def test_a_standstill_shortens_the_schedule_without_a_jump() -> None:
    course = LearningRateSchedule(100, 4, patience=5, round_steps=8)
    assert course.epochs_a_round == 2
    before = [course.rate(0.1, step) for step in range(160)]
    course.look([0.0, 1.0] * 20)
    assert (course.is_early, course.num_epochs) == (True, 46)
    after = [course.rate(0.1, step) for step in range(160, 184)]
    assert after[0] == pytest.approx(0.1 * (1 + math.cos(math.pi * 160 / 400)) / 2)
    assert all(one > other for one, other in zip(before + after, [*before, *after][1:], strict=False))
    assert 0 < after[-1] < 0.02 * before[-1]
    resumed = LearningRateSchedule(100, 4, patience=5, round_steps=8)
    resumed.load(course.state())
    assert resumed == course
    rising = LearningRateSchedule(100, 4, patience=5, round_steps=8)
    rising.look([0.1 * epoch for epoch in range(40)])
    assert not rising.is_early
    risen = LearningRateSchedule(100, 4, patience=5, round_steps=8)
    risen.look([0.0, 1.0] * 5 + [0.47, 1.47] * 5)  # by two standard errors
    assert not risen.is_early
    soon = LearningRateSchedule(100, 1, patience=2, round_steps=8)
    soon.look([0.0, 1.0] * 16)
    assert soon.num_epochs == 40  # the decay takes a whole round


@pytest.mark.parametrize(
    ("patience", "slope", "doubt"),
    [
        (0, 0.0, None),
        (0, 0.2, "was still rising"),
        (0, 0.002, None),  # less than the noise
        (5, 0.0, None),  # it stands still at the very end
        (5, 0.2, "was still rising"),
        (30, 0.0, None),  # forty epochs are too few to see it
    ],
)
def test_what_may_rise_beyond_the_last_epoch_is_doubted(patience: int, slope: float, doubt: str | None) -> None:
    noise = torch.randn(40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = (slope * torch.arange(40) + noise - noise.mean()).tolist()
    assert LearningRateSchedule(40, 10, patience=patience).doubt(values) == doubt
    short = LearningRateSchedule(40, 10, patience=patience).doubt(values[:3])
    assert short == ("had not levelled off" if patience else None)
    ended = LearningRateSchedule(400, 10, patience=5)
    ended.look([0.0] * 40)
    assert (ended.is_early, ended.doubt(values)) == (True, None)


def test_a_training_that_stands_still_ends_early_in_whole_rounds() -> None:
    learner, course = Centre(), LearningRateSchedule(400, 5, patience=3, round_steps=8)
    states: list[Mapping[str, Tensor]] = []
    train(learner, course, what="centre", save=lambda state, is_last: states.append(state))
    assert course.is_early
    assert learner.num_epochs == course.num_epochs < 200
    resumed, other = Centre(), LearningRateSchedule(400, 5, patience=3, round_steps=8)
    train(resumed, other, what="centre", state=states[-2])
    assert other == course
    assert_same(resumed.state(), learner.state())
    rounds = [len(state["history.objective"]) for state in states]
    assert rounds == [*range(2, course.num_epochs, 2), course.num_epochs]


def test_a_learning_rate_beyond_single_precision_is_refused() -> None:
    learner = Centre()
    learner.rates = lambda epoch: (0.02, 1e200)  # type: ignore[method-assign]
    with pytest.raises(NumericError, match="out of range for float32"):
        trained(learner, 1)
