"""Samplers and large problems on a pretend GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pretend_cuda
import pytest
import torch
from interrupted import StopAt
from pretend_cuda import Pretend
from problems.outputs import Told
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli import registry
from bnncli.artifacts.resume import DrawFile
from bnncli.evaluation.convergence import convergence, held_out_convergence
from bnncli.inference.dynamics import DYNAMICS, DrawStore, WhitenedPotential
from bnncli.inference.hmc import HmcRun, Workers, sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.row_space import complete_draws
from bnncli.models import features as parts
from bnncli.models.features import FeatureComputation
from bnncli.numerics import random
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import standard_normal
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import ggn
from bnncli.structures.factorisation import inverse_root
from bnncli.system import memory
from bnncli.system.workers import Team
from bnncli.targets import blocks, last_layer
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
    whole = partial(complete_draws, rows=rows, prior=target.prior) if rows else None
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


LAYOUT = HeadLayout(3, 6)
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[pretend_cuda.Pretend]:
    with pretend_cuda.pretend() as found:
        yield found
    assert found.problems() == []


def make_target(num_examples: int = 100) -> LastLayerTarget:
    features = torch.randn(num_examples, 6, generator=seeded())
    return LastLayerTarget(features.to(CUDA), (3 * features[:, :3]).argmax(dim=1).to(CUDA), LAYOUT, Prior(1.0))


def sample_into(target: LastLayerTarget, store: DrawStore, stop: StopAt | None = None) -> HmcRun:
    base = fit_gaussian(target, start=torch.zeros(21, dtype=torch.float64, device=CUDA)).gaussian
    words = {"num_chains": 4, "num_warmup": 10, "num_draws": 12, "store": store, "resume": stop or StopAt()}
    return sample_hmc(target, mode=base.mean, covariance=base.covariance, generator=seeded(1), **words)


@pytest.mark.parametrize("large", [1, 1000])
def test_chains_wait_for_the_gpu_once_a_warm_up_transition_and_draws_never(
    gpu: pretend_cuda.Pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(random, "LARGE", large)
    target, store = make_target(), DrawFile(tmp_path / "hmc.nc", num_chains=4, num_params=21, buffer_bytes=1)
    fit_gaussian(target, start=torch.zeros(21, dtype=torch.float64, device=CUDA))
    gpu.clear()
    sample_into(target, store)
    assert (
        sum(count for place, count in gpu.syncs.items() if place.startswith("download @ inference/dynamics.py")) == 10
    )
    kept = [count for place, count in gpu.syncs.items() if "@ inference/hmc.py" in place]
    assert sum(kept) == 1  # whether all diverged, at the end
    assert not any("artifacts/resume.py" in place for place in gpu.syncs)
    travelled = sum(gpu.uploads.values())
    assert (travelled < 23 * 8 * 4 + 1) == (large == 1)  # what is compared with acceptances alone; else momenta as well
    store.remove()


def test_long_draws_are_made_on_the_gpu_from_the_streams_seed(
    gpu: pretend_cuda.Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "LARGE", 10)
    stream_ = seeded()
    first, second = (standard_normal(3, 11, stream_, CUDA) for _ in range(2))
    assert (first.device, first.dtype, gpu.uploads.total()) == (CUDA, torch.float64, 0)
    assert not torch.equal(first, second)
    assert torch.equal(standard_normal(3, 11, seeded(), CUDA), first)


def test_draws_leave_the_gpu_without_a_wait_and_arrive(gpu: pretend_cuda.Pretend, tmp_path: Path) -> None:
    expected = list(torch.randn(7, 3, 5, generator=seeded()))
    on_gpu = [record.to(CUDA) for record in expected]
    gpu.clear()
    store = DrawFile(tmp_path / "hmc.nc", num_chains=3, num_params=5, buffer_bytes=130)
    for record in on_gpu:
        store.append(record)
    assert (gpu.num_syncs, gpu.downloads.total()) == (0, 6 * 60)
    assert torch.equal(store.draws(), torch.stack(expected, dim=1))
    store.remove()


def test_convergence_is_judged_on_the_gpu_to_the_numbers_of_the_cpu(gpu: pretend_cuda.Pretend) -> None:
    draws = np.random.default_rng(0).normal(size=(30, 4, 21)).astype(np.float32).transpose(1, 0, 2)
    features, labels = torch.randn(9, 6, generator=seeded()), torch.arange(9) % 3
    expected = convergence(draws), held_out_convergence(torch.from_numpy(draws), features, labels, layout=LAYOUT)
    assert gpu.num_kernels == 0
    words = {"layout": LAYOUT, "device": CUDA}
    got = convergence(draws, device=CUDA), held_out_convergence(torch.from_numpy(draws), features, labels, **words)
    assert got == expected
    assert gpu.num_kernels > 200
    gpu.largest_tensor = 8 * 4 * 30 * 9 - 1  # the log probabilities, then, are made on the CPU
    assert held_out_convergence(torch.from_numpy(draws), features, labels, **words) == expected[1]


def test_features_beside_the_gpu_give_the_bits_of_features_on_it(
    gpu: pretend_cuda.Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cuda", 1000)
    monkeypatch.setattr(blocks, "TRANSFER_BYTES", 310 * 24)
    on_it = make_target(1001)
    beside = LastLayerTarget(on_it.features.cpu(), on_it.labels, LAYOUT, on_it.prior)
    theta = torch.randn(5, 21, generator=seeded(2)).to(CUDA)

    def everything(target: LastLayerTarget) -> list[Tensor]:
        hessians = [part for name in ("full", "kron", "diag") for part in ggn(target, theta[0], name).values()]
        return [*hessians, *target.log_joint_and_grad(theta), target.hessian_vector_product(theta[0], theta)]

    for ours, theirs in zip(everything(beside), everything(on_it), strict=True):
        assert torch.equal(ours, theirs)
    assert gpu.uploads.total() > 1001 * 24


GPU = torch.device("cuda:0")


def root_of(num_panels: int) -> tuple[int, torch.Tensor]:
    with pretend_cuda.pretend() as gpu:
        size = 7 * num_panels
        matrix = torch.randn(size, size + 2, generator=seeded(), dtype=torch.float64)
        root, _ = inverse_root((matrix @ matrix.T).to(GPU))
        assert root.is_cuda
        found = root.cpu()
    assert gpu.problems() == []
    return gpu.num_syncs, found @ found.T @ (matrix @ matrix.T)


def test_panels_wait_no_more_for_more_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_WIDTH", {"cpu": 7, "cuda": 7})
    monkeypatch.setattr(memory, "_LARGE", 3)
    (few, one), (many, other) = (root_of(count) for count in (3, 6))
    assert few == many
    for found in (one, other):
        torch.testing.assert_close(found, torch.eye(len(found), dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.parametrize("workers", [None, Workers(Team(0, 1), 2)])
def test_modes_and_chains_in_single_precision_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, workers: Workers | None, structure: str
) -> None:
    monkeypatch.setattr("bnncli.inference.hmc._LARGE", 1)
    monkeypatch.setattr("bnncli.inference.mode.MAX_FULL_PRECONDITIONER", 1)
    for name, value in {"_MANY": 1, "_FAR": 0.1}.items():
        monkeypatch.setattr(f"bnncli.inference.mode.{name}", value)
    for name, value in {"_LARGE": 1, "_PRODUCT_WIDTH": 5}.items():
        monkeypatch.setattr(f"bnncli.structures.full.{name}", value)
    features, labels = torch.randn(80, 6, generator=seeded()), torch.arange(80) % 3
    with pretend_cuda.pretend() as gpu:
        target = LastLayerTarget(features.to(GPU), labels.to(GPU), LAYOUT, Prior(2.0))
        base = fit_gaussian(target, structure=structure, start=torch.zeros(LAYOUT.num_params)).gaussian
        options = {"num_chains": 4, "num_warmup": 6, "num_draws": 4, "workers": workers}
        drawn = sample_hmc(target, mode=base.mean, covariance=base.covariance, generator=seeded(), **options)
    assert gpu.problems() == []
    assert torch.isfinite(drawn.draws).all()


def test_a_batch_in_parts_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "budget", lambda device: 100_000)
    with pretend_cuda.pretend() as gpu:
        network = nn.Linear(200, 5).to(GPU)
        sizes: list[int] = []

        def read(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            sizes.append(len(inputs))
            with torch.inference_mode():
                wide = torch.cat([inputs] * 20, dim=1)
                return wide[:, :3], network(inputs)

        features, output = FeatureComputation(read, GPU)(torch.randn(30, 200, generator=seeded()).to(GPU))  # type: ignore[arg-type]
        assert features.is_cuda
        assert output.is_cuda
    assert gpu.problems() == []
    assert (len(features), sum(sizes[1:])) == (30, 30)
    assert max(sizes) < 10
