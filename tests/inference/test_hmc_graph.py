"""Trajectories of hmc as replays of one captured step, on a pretend GPU: the draws of steps one by one, to the last bit."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pretend_cuda
import pytest
import torch
from interrupted import StopAt
from pretend_cuda import Pretend
from problems.outputs import Told
from problems.seeds import seeded
from torch import Tensor

from bnncli import registry
from bnncli.errors import Interrupted
from bnncli.inference.dynamics import DYNAMICS, MemoryDraws, WhitenedPotential
from bnncli.inference.hmc import HmcRun, sample_hmc
from bnncli.inference.laplace import complete, fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets import last_layer
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace
from bnncli.targets.variants import GRADIENTS, choose_gradient

CPU = torch.device("cpu")
WARM_UP = 3  # steps before the capture
REFUSED = RuntimeError("operation not permitted when stream is capturing")
NUMBERS = ("draws", "log_joint", "energy", "acceptance_rate", "diverging", "n_steps")
PLACES = [*registry.names("curvature"), "row space"]
every_dynamics = pytest.mark.parametrize("dynamics", DYNAMICS)


class Case(NamedTuple):
    """What chains move in: on the CPU, its row space with it where that is meant."""

    target: LastLayerTarget
    base: Gaussian
    rows: RowSpace | None


@cache
def case_of(place: str, outputs: int = 3, bias_precision: float | None = None) -> Case:
    num_examples, num_features = (5, 9) if place == "row space" else (40, 4)
    features = torch.randn(num_examples, num_features, generator=seeded())
    labels = (3 * features[:, : max(outputs, 2)]).argmax(dim=1)
    target, rows = (
        LastLayerTarget(features, labels, HeadLayout(outputs, num_features), Prior(0.5, bias_precision)),
        None,
    )
    if place == "row space":
        rows = RowSpace.of(target.features, target.layout)
        target = rows.target(target)
    start = torch.zeros(target.layout.num_params, dtype=torch.float64)
    return Case(target, fit_gaussian(target, start=start, structure="full" if rows else place).gaussian, rows)


def sample(case: Case, device: torch.device = CPU, *, is_resident: bool = True, **words: Any) -> HmcRun:
    """A few draws on a device, and always the same ones."""
    features, labels = case.target.features, case.target.labels.to(device)
    target = replace(case.target, features=features.to(device) if is_resident else features, labels=labels)
    rows = case.rows.to(device=device) if case.rows else None
    whole = partial(complete, rows=rows, prior=target.prior) if rows else None
    coarse = choose_gradient(words.pop("gradients", "float32"), target, case.base.mean)
    words = {"num_chains": 3, "num_warmup": 2, "num_draws": 3, "complete": whole, "coarse": coarse} | words
    return sample_hmc(target, mode=case.base.mean, covariance=case.base.covariance, generator=seeded(1), **words)


def assert_same(one: HmcRun, other: HmcRun) -> None:
    for name in NUMBERS:
        assert torch.equal(getattr(one, name).cpu(), getattr(other, name).cpu()), name
    assert one.step_size == other.step_size


def counted(monkeypatch: pytest.MonkeyPatch, case: Case, **words: Any) -> tuple[HmcRun, int]:
    """The run on the CPU, and the steps it took, warm-up included."""
    states, plain = [], WhitenedPotential.moving

    def moving(self: WhitenedPotential, z: Tensor) -> Any:
        states.append(0)
        return plain(self, z)

    with monkeypatch.context() as patch:
        patch.setattr(WhitenedPotential, "moving", moving)
        return sample(case, **words), len(states) - 1  # the first is that of the starts


@every_dynamics
@pytest.mark.parametrize("place", PLACES)
def test_one_capture_replays_all_steps_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, place: str, dynamics: str
) -> None:
    case, told = case_of(place), Told()
    plain, num_steps = counted(monkeypatch, case, dynamics=dynamics)
    with pretend_cuda.pretend() as gpu:
        graphed = sample(case, gpu.device, dynamics=dynamics, progress=told)
    assert (gpu.problems(), told.lines) == ([], [])
    assert (gpu.num_captures, gpu.num_replays) == (1, num_steps - WARM_UP)
    assert num_steps > 4 + WARM_UP
    assert_same(graphed, plain)


@pytest.mark.parametrize("gradients", GRADIENTS[1:])
@pytest.mark.parametrize("place", ["full", "row space"])
def test_coarse_gradients_are_captured_too_and_their_energies_are_not(
    monkeypatch: pytest.MonkeyPatch, place: str, gradients: str
) -> None:
    case, told = case_of(place), Told()
    plain, num_steps = counted(monkeypatch, case, gradients=gradients)
    with pretend_cuda.pretend() as gpu:
        graphed = sample(case, gpu.device, gradients=gradients, progress=told)
    assert (gpu.problems(), told.lines) == ([], [])
    assert (gpu.num_captures, gpu.num_replays) == (1, num_steps - WARM_UP)
    assert_same(graphed, plain)
    assert not torch.equal(plain.draws, sample(case).draws)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("place", "outputs", "bias_precision"), [("full", 1, None), ("kron", 3, 0.1)])
def test_single_outputs_and_other_precisions_of_biases_are_captured(
    place: str, outputs: int, bias_precision: float | None
) -> None:
    case = case_of(place, outputs, bias_precision)
    with pretend_cuda.pretend("cuda:1") as gpu:  # the first GPU is current
        graphed = sample(case, gpu.device)
    assert (gpu.problems(), gpu.num_captures) == ([], 1)
    assert_same(graphed, sample(case))


@pytest.mark.parametrize(
    ("dynamics", "failure"), [("split", {"capture_error": REFUSED}), ("leapfrog", {"captures_nothing": True})]
)
def test_chains_go_on_step_by_step_where_there_can_be_no_graph(dynamics: str, failure: dict[str, Any]) -> None:
    case, told = case_of("full"), Told()
    with pretend_cuda.pretend(**failure) as gpu:
        refused = sample(case, gpu.device, dynamics=dynamics, progress=told)
    assert gpu.num_captures == len(told.lines) == 1
    assert "one at a time" in told.lines[0]
    assert_same(refused, sample(case, dynamics=dynamics))


@pytest.mark.parametrize(
    ("dynamics", "stop_at", "gradients"),
    [("split", 1, "float32"), ("leapfrog", 2, "float32"), ("split", 3, "tf32"), ("split", 2, "bfloat16")],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(dynamics: str, stop_at: int, gradients: str) -> None:
    case, cut, store = case_of("full"), StopAt(stop_at), MemoryDraws()
    words = {"dynamics": dynamics, "num_draws": 6, "gradients": gradients}
    with pretend_cuda.pretend() as gpu:
        with pytest.raises(Interrupted):
            sample(case, gpu.device, **words, resume=cut, store=store)
        resumed = sample(case, gpu.device, **words, resume=StopAt(stored=cut.stored), store=store)
    assert (gpu.problems(), gpu.num_captures) == ([], 2)
    assert_same(resumed, sample(case, **words))


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_features_beside_the_gpu_are_not_captured(gradients: str) -> None:
    case = case_of("full")
    with pretend_cuda.pretend() as gpu:
        streamed = sample(case, gpu.device, is_resident=False, gradients=gradients)
    assert (gpu.problems(), gpu.num_captures) == ([], 0)
    assert_same(streamed, sample(case, gradients=gradients))


def test_a_block_that_a_capture_has_no_memory_for_is_an_error_and_not_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tries = last_layer.weighted_feature_sums, []

    def refuse(*arguments: Any, **known: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            tries.append(0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*arguments, **known)

    case = case_of("full")
    with pretend_cuda.pretend() as gpu:
        before = torch.cuda.current_stream()
        monkeypatch.setattr(last_layer, "weighted_feature_sums", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            sample(case, gpu.device)
        assert torch.cuda.current_stream() is before
    assert len(tries) == 1


def launched(case: Case, num_draws: int, **behaviour: Any) -> tuple[Pretend, HmcRun]:
    with pretend_cuda.pretend(**behaviour) as gpu:
        return gpu, sample(case, gpu.device, num_warmup=0, num_draws=num_draws, dynamics="leapfrog", progress=Told())


def test_kernels_that_python_launches_do_not_grow_with_the_steps() -> None:
    """A transition of four or five steps: momenta, the writing of the step's tensors, energies, the choice, the draw."""
    case, transitions = case_of("full"), 2
    (few, short), (many, long) = (launched(case, count) for count in (2, 2 + transitions))
    (few_plain, _), (many_plain, _) = (launched(case, count, capture_error=REFUSED) for count in (2, 2 + transitions))
    steps = int(long.n_steps[0].sum() - short.n_steps[0].sum())
    assert steps > 3 * transitions
    assert many.num_replays - few.num_replays == steps
    graphed = (many.num_kernels - few.num_kernels) / transitions
    plain = (many_plain.num_kernels - few_plain.num_kernels) / transitions
    print(f"kernels a transition of {steps / transitions} steps: {plain} one by one, {graphed} with the graph")
    assert graphed < 45
    assert plain > graphed + 30 * steps / transitions


def test_the_graph_goes_when_the_chains_end() -> None:
    """Its memory is wanted by what comes next, which no collection of cycles comes before."""
    graphs: list[Any] = []
    with pretend_cuda.pretend() as gpu:
        plain = torch.cuda.CUDAGraph

        def made() -> Any:
            graph = plain()
            graphs.append(weakref.ref(graph))
            return graph

        gc.disable()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "CUDAGraph", made)
                sample(case_of("full"), gpu.device)
            assert [graph() for graph in graphs] == [None]
        finally:
            gc.enable()
