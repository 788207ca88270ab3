"""Trainings that workers share out."""

from __future__ import annotations

import copy
import errno
from collections.abc import Mapping

import pytest
import torch
from problems.outputs import Told
from problems.threads import in_threads
from torch import Tensor

from bnncli.errors import BnnError, Exit, Interrupted, NumericError
from bnncli.system import signals
from bnncli.system.workers import Team
from bnncli.training.optimizers import join_memory
from bnncli.training.shared_out import Seat, StoredStates, number_tensors, share_out, split_by_number

NUM, EPOCHS = 5, 3


def count(number: int, seat: Seat, *, epochs: int = EPOCHS) -> Mapping[str, Tensor]:
    """A training that counts its epochs, from its state on, in tensors whose sizes are its own."""
    begun = 0 if seat.state is None else int(seat.state["epochs"])
    task = seat.task("count", epochs)
    task.advance(begun)
    for epoch in range(begun, epochs):
        task.advance()
        seat.save({"epochs": torch.tensor(epoch + 1)}, False)
    return {"epochs": torch.tensor(epochs), "own": torch.full((number + 1,), number)}


def shared(
    team: Team, work: object = count, heard: Told | None = None, stored: StoredStates | None = None
) -> list[dict]:  # type: ignore[type-arg]
    labels = [f"training {number}" for number in range(NUM)]
    return share_out(
        team, labels, work, what="count", num_steps=EPOCHS, progress=heard or Told(), stored=stored  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_worker_has_the_results_of_all_in_their_order_and_the_steps_of_all(size: int) -> None:
    heard = [Told() for _ in range(size)]
    for found in in_threads(size, lambda team: shared(team, heard=heard[team.rank])):
        assert isinstance(found, list)
        assert [one["own"].tolist() for one in found] == [[number] * (number + 1) for number in range(NUM)]
    assert [(sum(one.steps), one.tasks[0][1]) for one in heard] == [(NUM * EPOCHS, NUM * EPOCHS)] * size


@pytest.mark.parametrize("failing", range(NUM))
def test_what_ends_one_worker_ends_all_and_the_first_says_it(failing: int) -> None:
    def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
        if number == failing:
            raise NumericError(f"training {number} failed", hint="use less")
        return count(number, seat)

    first, *others = in_threads(3, lambda team: shared(team, work))
    assert isinstance(first, NumericError)
    assert (first.message, first.hint, first.code) == (f"training {failing} failed", "use less", "numeric")
    assert [(type(one), one.exit, one.code) for one in others] == [(NumericError, Exit.NUMERIC, "worker_lost")] * 2  # type: ignore[union-attr]


def test_a_full_disk_of_another_worker_is_told_with_its_number() -> None:
    def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
        if number == NUM - 1:
            raise OSError(errno.ENOSPC, "No space left on device", "draws")
        return count(number, seat)

    first, second = in_threads(2, lambda team: shared(team, work))
    assert isinstance(first, BnnError)
    assert (first.exit, first.message) == (Exit.IO, "worker 1: draws: No space left on device")
    assert isinstance(second, BnnError)


def test_a_bug_is_raised_as_it_is() -> None:
    def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
        raise RuntimeError("a bug")

    (found,) = in_threads(1, lambda team: shared(team, work))
    assert isinstance(found, RuntimeError)


@pytest.mark.parametrize("interrupted", [0, 4])  # of the first worker, and of the last
def test_where_one_is_interrupted_the_first_stores_the_last_whole_rounds_of_all(interrupted: int) -> None:
    stored: list[Mapping[int, Mapping[str, Tensor]]] = []

    def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
        if number != interrupted:
            return count(number, seat, epochs=30)
        count(number, seat, epochs=2)
        raise Interrupted(15, "interrupted by SIGTERM")

    def of(team: Team) -> object:
        return shared(team, work, stored=StoredStates({}, lambda: False, stored.append))

    for found in in_threads(3, of):
        assert isinstance(found, Interrupted)
        assert found.exit == 128 + 15
    (states,) = stored
    # Of three workers the first has training 0, the others two each. Rounds are in step: the others hear of it after their next one.
    epochs = {number: int(one["epochs"]) for number, one in states.items()}
    assert epochs == ({0: 2, 1: 3, 3: 3} if interrupted == 0 else {0: 30, 1: 30, 2: 3, 3: 30, 4: 2})


def test_states_are_stored_when_the_first_worker_says_so_and_another_number_of_them_goes_on() -> None:
    stored: list[dict[int, dict[str, Tensor]]] = []

    def part_of(team: Team) -> object:
        return shared(team, stored=StoredStates({}, lambda: True, lambda given: stored.append(copy.deepcopy(given))))

    in_threads(2, part_of)
    begun = stored[4]  # after five meetings: the first worker's second training is in its second epoch
    assert {number: int(one["epochs"]) for number, one in begun.items()} == {0: 3, 1: 2, 2: 3, 3: 2}
    heard = [Told() for _ in range(3)]
    again: list[Mapping[int, Mapping[str, Tensor]]] = []

    def rest_of(team: Team) -> object:
        own = {number: begun[number] for number in team.share(NUM) if number in begun}
        return shared(team, heard=heard[team.rank], stored=StoredStates(own, lambda: True, again.append))

    found = in_threads(3, rest_of)
    assert [one["epochs"].tolist() for one in found[2]] == [EPOCHS] * NUM  # type: ignore[union-attr, index]
    assert [sum(one.steps) for one in heard] == [NUM * EPOCHS] * 3
    assert {0, 1, 2, 3} <= again[0].keys()  # what is done already stays in the next state


def test_a_warning_of_any_worker_reaches_the_first() -> None:
    def work(number: int, seat: Seat) -> Mapping[str, Tensor]:
        seat.warn(f"training {number} is slow")
        return count(number, seat)

    heard = [Told() for _ in range(2)]
    in_threads(2, lambda team: shared(team, work, heard[team.rank]))
    assert {f"training {number} is slow" for number in range(NUM)} == set(heard[0].lines)


def test_a_signal_to_any_worker_stops_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_received", [15])
    monkeypatch.setattr(signals, "is_leader", lambda: False)
    signals.raise_if_interrupted()  # a follower goes on elsewhere
    for found in in_threads(2, shared):
        assert isinstance(found, Interrupted)


def test_an_interruption_travels_to_other_processes_as_it_is() -> None:
    error = Interrupted(15, "interrupted by SIGTERM")
    error.hint = "go on"
    again = copy.copy(error)
    assert (type(again), again.exit, again.message, again.hint) == (Interrupted, 143, error.message, "go on")


def test_numbered_tensors_come_back() -> None:
    one = {3: {"a/b": torch.ones(2)}, 12: {"a": torch.zeros(1)}}
    assert split_by_number(number_tensors(one)) == one


def test_a_step_on_the_whole_is_a_step_on_every_part() -> None:
    generator = torch.Generator().manual_seed(0)
    joined = [torch.randn(*shape, generator=generator) for shape in ((2, 3), (4,), (1, 2, 2))]
    apart = [tensor.clone() for tensor in joined]
    gradients = [torch.randn(tensor.shape, generator=generator) for tensor in joined]
    whole = join_memory(joined)
    assert all(torch.equal(one, other) for one, other in zip(joined, apart, strict=True))
    optimizers = [torch.optim.Adam(parts, lr=0.1, fused=True) for parts in ([whole], apart)]
    for factor in (1.0, -3.0):
        for one, other, gradient in zip(joined, apart, gradients, strict=True):
            one.grad.copy_(factor * gradient)
            other.grad = factor * gradient
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(joined, apart, strict=True))
