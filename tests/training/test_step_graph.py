"""Training steps as a captured graph on a pretend GPU: on any device, with any torch, and where none can be had."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pretend_cuda
import pytest
import torch
from torch import Tensor

from bnncli.inference.refine import RefineFit, fit_flow
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.diag import Diag
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.training.loop import StepGraph, num_updates
from bnncli.training.optimizers import Adam

NUM_STEPS = 8


class Descent:
    """Adam on a noisy parabola."""

    def __init__(self, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.parameter = torch.zeros(3, device=device, requires_grad=True)
        self.optimizer = Adam([[self.parameter]], torch.device(device))
        self.optimizer.param_groups[0]["lr"].fill_(0.1)

    def step(self) -> Tensor:
        noise = torch.randn(3, generator=self.generator, device=self.generator.device)
        loss = (self.parameter - 2 + noise).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        """The losses of all steps, on the CPU."""
        return torch.stack([step().clone() for _ in range(NUM_STEPS)]).cpu()


def plain() -> Tensor:
    descent = Descent("cpu")
    return descent.run(descent.step)


def graphed(device: str, said: list[str]) -> Tensor:
    descent = Descent(device)
    num_done = partial(num_updates, descent.optimizer)
    return descent.run(StepGraph(descent.step, num_done, torch.device(device), warn=said.append, drawing=descent))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("current", [0, 1])
def test_steps_are_replayed_on_their_device_whichever_is_current(device: str, current: int) -> None:
    with pretend_cuda.pretend(device) as gpu:
        torch.cuda.set_device(current)
        assert torch.equal(graphed(device, said := []), plain())
        assert torch.cuda.current_device() == current
    assert (said, gpu.problems()) == ([], [])
    assert (gpu.num_captures, gpu.num_replays) == (1, NUM_STEPS - 3)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        ({"capture_error": RuntimeError("operation not permitted when\n stream is capturing")}, "operation not permitted"),
        ({"captures_nothing": True}, "the captured graph does nothing"),
    ],
)  # fmt: skip
def test_steps_go_on_one_by_one_where_there_can_be_no_graph(failure: dict[str, Any], why: str) -> None:
    with pretend_cuda.pretend(**failure) as gpu:
        before = torch.cuda.current_stream()
        assert torch.equal(graphed("cuda:0", said := []), plain())
        assert torch.cuda.current_stream() is before
    assert gpu.num_captures == len(said) == 1
    assert why in said[0]


def test_a_capture_on_another_devices_stream_takes_its_step_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda.pretend("cuda:1") as gpu:
        plain_graph = torch.cuda.graph
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: plain_graph(graph, stream=torch.cuda.Stream(0)))
        assert torch.equal(graphed("cuda:1", said := []), plain())
        monkeypatch.undo()
    assert len(said) == gpu.num_captures == 1


def test_another_thread_may_wait_for_the_gpu_during_a_capture() -> None:
    """As the one does that writes the draws of chains while the step of those is captured."""

    class Waited(Descent):
        def step(self) -> Tensor:
            arrival = torch.cuda.Event()
            writer = threading.Thread(target=arrival.synchronize)
            writer.start()
            writer.join()
            return super().step()

    with pretend_cuda.pretend() as gpu:
        descent, said = Waited("cuda:0"), list[str]()
        num_done = partial(num_updates, descent.optimizer)
        descent.run(StepGraph(descent.step, num_done, gpu.device, warn=said.append, drawing=descent))
    assert (said, gpu.problems(), gpu.num_captures) == ([], [], 1)


@pytest.mark.parametrize(("device", "current"), [("cuda:0", 0), ("cuda:1", 0), ("cuda", 1)])
def test_all_graphs_of_a_device_use_one_side_stream(device: str, current: int) -> None:
    """The allocator keeps what a stream gives back for that stream alone."""
    seen, descents = set[int](), []

    class Watched(Descent):
        def step(self) -> Tensor:
            seen.add(id(torch.cuda.current_stream(device)))
            return super().step()

    with pretend_cuda.pretend(f"cuda:{max(current, int(device[5:] or 0))}") as gpu:
        torch.cuda.set_device(current)
        before = id(torch.cuda.current_stream(device))
        for _ in range(2):
            descents.append(descent := Watched(str(gpu.device)))
            num_done = partial(num_updates, descent.optimizer)
            descent.run(StepGraph(descent.step, num_done, torch.device(device), warn=pytest.fail, drawing=descent))
        assert (len(seen), gpu.num_captures) == (1, 2)
        assert before not in seen
        again = Watched(str(gpu.device))
        again.step()
        assert before in seen


def test_no_memory_for_a_graph_is_an_error_and_leaves_the_stream_as_it_was() -> None:
    with pretend_cuda.pretend(capture_error=torch.OutOfMemoryError("CUDA out of memory")):
        before = torch.cuda.current_stream()
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            graphed("cuda:0", [])
        assert torch.cuda.current_stream() is before


@pytest.mark.parametrize(
    ("version", "registers_lazily"), [("2.13.1+cu130", False), ("2.14.0", True), ("2.15.0+cu132", True)]
)
def test_generators_are_registered_where_torch_does_not_do_it(
    monkeypatch: pytest.MonkeyPatch, version: str, registers_lazily: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pretend_cuda.pretend(registers_lazily=registers_lazily) as gpu:
        assert torch.equal(graphed("cuda:0", said := []), plain())
    assert (said, gpu.problems(), gpu.num_replays) == ([], [], NUM_STEPS - 3)


def refined(device: str, batch_size: int, *, is_streamed: bool = False) -> RefineFit:
    features, labels = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    layout, prior = HeadLayout(3, 4), Prior(2.0)
    target = LastLayerTarget(features if is_streamed else features.to(device), labels.to(device), layout, prior)
    zeros = torch.zeros(layout.num_params, dtype=torch.float64)
    base = Gaussian(zeros, Diag.from_hessian({"hessian.diag": zeros}, prior, layout), layout, prior)
    generator = torch.Generator(device).manual_seed(1)
    return fit_flow(
        target, base.to(torch.device(device)), generator=generator, flow="householder", length=1, epochs=8,
        batch_size=batch_size, num_draws=4, learning_rate=0.3,
    )  # fmt: skip


@pytest.mark.parametrize("batch_size", [16, 60])
def test_a_flow_learns_the_same_on_a_second_gpu(batch_size: int) -> None:
    """With the first GPU current, as where a library's user has chosen no other."""
    with pretend_cuda.pretend("cuda:1") as gpu:
        learnt = refined("cuda:1", batch_size).history
    assert (gpu.problems(), gpu.num_captures) == ([], 1)
    assert gpu.num_replays > 1
    assert torch.equal(learnt, refined("cpu", batch_size).history)


@pytest.mark.parametrize(("batch_size", "num_captures"), [(16, 1), (60, 0)])
def test_a_flow_learns_the_same_from_features_that_travel(batch_size: int, num_captures: int) -> None:
    """Minibatches are gathered for the graph; all data at once go by block by block, which no graph can do."""
    with pretend_cuda.pretend() as gpu:
        learnt = refined("cuda:0", batch_size, is_streamed=True).history
    assert (gpu.problems(), gpu.num_captures) == ([], num_captures)
    assert torch.equal(learnt, refined("cpu", batch_size).history)
