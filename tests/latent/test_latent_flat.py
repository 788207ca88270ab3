"""Latent binary networks as one vector, as graphs, apart from one another, and of scaled inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.outputs import Told
from problems.seeds import seeded
from problems.threads import in_threads
from torch import Tensor

from bnncli.latent import fit as latent_fit
from bnncli.latent.factors import Factors, Moments, initial_factors, initial_model, num_params
from bnncli.latent.fit import (
    EstimatorSettings,
    History,
    Inputs,
    LatentLearner,
    Minibatch,
    Plan,
    Scaling,
    differentiate,
    fit_apart,
    fit_latent,
    fit_tensors,
    join_histories,
    join_models,
    nll_of_repeats,
    split_repeats,
    workspace_of,
)
from bnncli.latent.model import (
    LatentModel,
    SpikeAndSlab,
    bias_divergence,
    bias_gradients,
    factor_gradients,
    weight_divergence,
)
from bnncli.parameters import layouts
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.progress import SILENT, Progress
from bnncli.system.workers import Team
from bnncli.targets.blocks import FeatureBlocks
from bnncli.training.loop import LearningRateSchedule, State, train
from bnncli.training.shared_out import Seat

SMALL = NetworkLayout((4, 3, 5, 2))


def prior_of(num_layers: int, *, differs_by_repeat: bool = False) -> SpikeAndSlab:
    """The same in all layers."""
    rows = [(0.1, 0.2, 0.7), (0.3, -0.1, 1.3)][: 2 if differs_by_repeat else 1]
    parts = torch.tensor(rows, dtype=torch.float64).T.unsqueeze(2).expand(3, len(rows), num_layers)
    return SpikeAndSlab(*parts, bias_sd=0.8)


def told_by_layer(prior: SpikeAndSlab) -> SpikeAndSlab:
    """The same prior, as if its layers differed."""
    other = replace(prior)
    object.__setattr__(other, "is_uniform", False)
    return other


def factors_of(layout: NetworkLayout) -> Factors:
    start = initial_factors(layout, 2, seeded(1), logit_range=(-2, 2), mean_range=1.0).tensors()
    return Factors(**{name: part.double() + 4 * ("rho" in name) for name, part in start.items()})


def step_of(layout: NetworkLayout, prior: SpikeAndSlab, estimator: str, variance: str = "exact") -> dict[str, Tensor]:
    """The gradients of one step, by name."""
    model = LatentModel(layout, factors_of(layout), prior)
    features = torch.randn(7, layout.num_features, generator=seeded(11), dtype=torch.float64)
    labels = torch.randint(0, layout.num_classes, (7,), generator=seeded(12))
    differentiate(
        model, Minibatch(features, labels, 0.2), EstimatorSettings(estimator, variance), seeded(7), workspace_of(model)
    )
    return {name: part.grad for name, part in model.tensors() if part.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() >= {"mean", "rho", "logit", "bias_mean", "bias_rho"}
    for name, part in one.items():
        assert float(part.norm()) > 0, name
        torch.testing.assert_close(part, other[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("differs_by_repeat", [False, True])
@pytest.mark.parametrize(("estimator", "variance"), [("lrt", "exact"), ("lrt", "published"), ("concrete", "exact")])
def test_layers_together_have_the_gradients_of_layers_one_by_one(
    estimator: str, variance: str, differs_by_repeat: bool
) -> None:
    prior = prior_of(3, differs_by_repeat=differs_by_repeat)
    assert prior.is_uniform
    together = step_of(SMALL, prior, estimator, variance)
    assert_same(together, step_of(SMALL, told_by_layer(prior), estimator, variance))


@pytest.mark.parametrize("estimator", ["lrt", "concrete"])
@pytest.mark.parametrize("size", [1, 7, 16, 62])
def test_where_the_vector_is_cut_makes_no_difference(
    estimator: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = step_of(SMALL, prior_of(3), estimator)
    monkeypatch.setattr(layouts, "_BLOCK", size)
    pieces = list(SMALL.chunks(torch.arange(SMALL.num_weights).expand(2, -1)))
    assert torch.equal(torch.cat([part[0] for _, part in pieces], dim=1)[1], torch.arange(SMALL.num_weights))
    assert len(pieces) == -(-SMALL.num_weights // max(1, size // 2))
    assert_same(step_of(SMALL, prior_of(3), estimator), whole)


@pytest.mark.parametrize("differs_by_repeat", [False, True])
def test_gradients_of_layers_together_are_those_of_autograd(differs_by_repeat: bool) -> None:
    factors, prior = factors_of(SMALL), prior_of(3, differs_by_repeat=differs_by_repeat)
    learnt = [part.requires_grad_() for part in (factors.mean, factors.rho, factors.logit)]
    weights = [torch.randn(2, SMALL.num_weights, generator=seeded(i), dtype=torch.float64) for i in range(3)]
    alpha, sd = factors.inclusion, factors.sd
    own = (alpha * factors.mean, alpha * sd.square(), alpha * (1 - alpha) * factors.mean.square())
    total = sum((part * weight).sum() for part, weight in zip(own, weights, strict=True))
    total = total + 0.37 * weight_divergence(factors, prior, SMALL).sum()
    found = factor_gradients(factors, Moments(*weights), prior, SMALL, scale=0.37)
    for one, other in zip(found, torch.autograd.grad(total, learnt), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_gradients_of_the_biases_are_those_of_autograd() -> None:
    factors, prior = factors_of(SMALL), prior_of(3)
    learnt = [part.requires_grad_() for part in (factors.bias_mean, factors.bias_rho)]
    to_mean, to_sd = (torch.randn(2, 10, generator=seeded(i), dtype=torch.float64) for i in range(2))
    total = (to_mean * factors.bias_mean + to_sd * factors.bias_sd).sum()
    total = total + 0.37 * bias_divergence(*learnt, prior, SMALL).sum()
    found = bias_gradients(factors, to_mean, to_sd, prior, scale=0.37)
    for one, other in zip(found, torch.autograd.grad(total, learnt), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rho", [-200.0, -88.0, 40.0])
def test_gradients_of_the_biases_are_finite_for_any_standard_deviation(rho: float) -> None:
    factors, nothing = Factors(*(torch.full((1, 1), value) for value in (0.0, 0.0, 0.0, 0.3, rho))), torch.zeros(1, 1)
    for part in bias_gradients(factors, nothing, nothing, SpikeAndSlab.constant(1), scale=0.01):
        assert torch.isfinite(part).all()


@pytest.mark.parametrize("name", ["inclusion", "slab_mean", "slab_sd"])
def test_a_prior_that_differs_by_layer_is_told_layer_by_layer(name: str) -> None:
    uniform = prior_of(3)
    part = getattr(uniform, name).clone()
    part[0, 2] = 0.45
    other = replace(uniform, **{name: part})
    assert (uniform.is_uniform, other.is_uniform) == (True, False)
    like = torch.zeros(1, dtype=torch.float64)
    assert uniform.layers(like) is uniform.layers(like)
    for index in range(2):
        assert all(map(torch.equal, uniform.layers(like)[index], other.layers(like)[index]))
    assert not all(map(torch.equal, uniform.layers(like)[2], other.layers(like)[2]))
    assert other.layers(like.float())[2].precision.dtype == torch.float32


def test_one_update_for_one_rate_is_that_of_two() -> None:
    features = torch.randn(20, 4, generator=seeded(3))
    states = []
    for choices, num_groups in (({}, 1), ({"inclusion_rate": 0.02, "early_epochs": 1}, 2)):
        factors = Factors(**{name: part.float() for name, part in factors_of(SMALL).tensors().items()})
        plan = Plan(2, 8, 0.02, schedule="cosine", **choices)  # type: ignore[arg-type]
        inputs, labels = Inputs(FeatureBlocks(features, features.device)), torch.arange(20) % 2
        learner = LatentLearner(LatentModel(SMALL, factors, prior_of(3)), inputs, labels, plan, seeded(4))
        assert len(learner.optimizer.param_groups) == num_groups
        kept: list[State] = []
        train(
            learner, LearningRateSchedule(2, 3), what="fit", save=lambda state, is_last, kept=kept: kept.append(state)
        )
        states.append(kept[-1])
    assert states[0].keys() == states[1].keys()
    for name, part in states[0].items():
        assert torch.equal(part, states[1][name]), name


LAYOUT = NetworkLayout((3, 2))


def fit_on(device: str, progress: Progress = SILENT, **choices: Any) -> dict[str, torch.Tensor]:
    """The state after three epochs of six batches, the last of them short."""
    features = torch.randn(46, 3, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.arange(46) % 2
    factors = initial_factors(LAYOUT, 2, torch.Generator().manual_seed(1), device=torch.device(device))
    model = LatentModel(LAYOUT, factors, SpikeAndSlab.constant(1).to(torch.device(device)))
    plan = Plan(epochs=3, batch_size=8, learning_rate=0.01, schedule="cosine", **choices)
    states: list[State] = []
    fit_latent(
        model, features, labels, plan, generator=torch.Generator(device).manual_seed(2), progress=progress,
        save=lambda state, is_last: states.append(state),
    )  # fmt: skip
    assert len(states) == 3
    return {name: part.cpu() for name, part in states[-1].items()}


@pytest.mark.parametrize(
    ("choices", "captures", "replays"),
    [
        ({}, 1, 2 + 5 + 5),  # three ordinary steps of five whole batches first, and the last batch of each epoch
        ({"hyper_prior": True, "early_epochs": 1}, 2, 2 + 2 + 5),  # anew for the prior that was learnt
    ],
)
def test_whole_batches_replay_one_graph_as_long_as_the_prior_is_the_same(
    choices: dict[str, Any], captures: int, replays: int
) -> None:
    plain = fit_on("cpu", **choices)
    with pretend_cuda.pretend() as gpu:
        graphed = fit_on("cuda:0", **choices)
    assert gpu.problems() == []
    assert (gpu.num_captures, gpu.num_replays) == (captures, replays)
    for name, part in plain.items():
        assert torch.equal(part, graphed[name]), name


@pytest.mark.parametrize("failure", [{"capture_error": RuntimeError("not permitted")}, {"captures_nothing": True}])
def test_a_capture_that_fails_is_tried_once_and_draws_as_if_it_had_not_been(failure: dict[str, Any]) -> None:
    plain, progress = fit_on("cpu"), Told()
    with pretend_cuda.pretend(**failure) as gpu:
        graphed = fit_on("cuda:0", progress)
    assert gpu.num_captures == len(progress.lines) == 1
    for name, part in plain.items():
        assert torch.equal(part, graphed[name]), name


PAIR_LAYOUT, NUM_REPEATS, CPU = NetworkLayout((4, 3, 2)), 5, torch.device("cpu")


def start(estimator: str) -> LatentModel:
    generator = seeded(1)
    factors = initial_factors(PAIR_LAYOUT, NUM_REPEATS, generator)
    flows = [initial_model(n, NUM_REPEATS, generator, hidden=(5,)) for _, n in PAIR_LAYOUT.shapes if estimator == "mnf"]
    prior = SpikeAndSlab.constant(2)
    sds = torch.linspace(0.5, 1.5, NUM_REPEATS, dtype=torch.float64).unsqueeze(1).expand(-1, 2)
    return LatentModel(PAIR_LAYOUT, factors, SpikeAndSlab(prior.inclusion, prior.slab_mean, sds), tuple(flows))


def plan(estimator: str) -> Plan:
    learnt = {"hyper_prior": True, "early_epochs": 2} if estimator == "concrete" else {}
    return Plan(3, 10, 0.01, settings=EstimatorSettings(estimator), **learnt)  # type: ignore[arg-type]


def fitted(model: LatentModel, first: int, estimator: str, **report: object) -> tuple[LatentModel, History]:
    features, labels = torch.randn(25, 4, generator=seeded(2)), torch.arange(25) % 2
    return fit_latent(model, features, labels, plan(estimator), generator=seeded(10 + first), **report)  # type: ignore[arg-type]


def fitted_apart(team: Team, estimator: str) -> tuple[LatentModel, History]:
    def fit(model: LatentModel, first: int, seat: Seat) -> Mapping[str, Tensor]:
        return fit_tensors(*fitted(model, first, estimator, save=seat.save, progress=seat))

    parts = fit_apart(team, start(estimator), fit, what="fit", num_steps=9, progress=SILENT)
    return join_models(start(estimator), parts, has_learnt_prior=estimator == "concrete"), join_histories(parts)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have room for the weights of two networks."""
    monkeypatch.setitem(latent_fit.GROUP_WEIGHTS, "cpu", 2 * PAIR_LAYOUT.num_weights + 1)


@pytest.mark.parametrize("estimator", ["lrt", "mnf", "concrete"])
@pytest.mark.usefixtures("pairs")
def test_each_group_becomes_what_it_would_alone_whoever_fits_it(estimator: str) -> None:
    groups = split_repeats(PAIR_LAYOUT, NUM_REPEATS, CPU)
    assert [part.stop - part.start for part in groups] == [1, 2, 2]
    alone = [fitted(start(estimator).of_repeats(rows), rows.start, estimator) for rows in groups]
    for size in (1, 2):
        for found in in_threads(size, lambda team: fitted_apart(team, estimator)):
            assert isinstance(found, tuple), found
            model, history = found
            assert model.num_repeats == NUM_REPEATS
            for rows, (own, own_history) in zip(groups, alone, strict=True):
                part = model.of_repeats(rows)
                for (name, one), (_, other) in zip(part.tensors(), own.tensors(), strict=True):
                    assert torch.equal(one, other), name
                for name, one in part.prior.tensors().items():
                    assert torch.equal(one, own.prior.tensors()[name]), name
                assert torch.equal(history.bound()[:, rows], own_history.bound())


@pytest.mark.usefixtures("pairs")
def test_a_group_shares_nothing_with_the_start_it_was_cut_from() -> None:
    whole = start("mnf")
    before = {name: tensor.clone() for name, tensor in whole.tensors()}
    part = whole.of_repeats(slice(1, 3))
    for (name, tensor), (_, own) in zip(whole.tensors(), part.tensors(), strict=True):
        is_shared = tensor.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        assert is_shared == name.endswith("mask"), name
    fitted(part, 1, "mnf")
    for name, tensor in whole.tensors():
        assert torch.equal(tensor, before[name]), name


def test_the_best_repeat_alone_is_what_it_is_among_the_others() -> None:
    model = start("mnf")
    whole = LatentBinary(model, tuple(model.multiplier_means(seeded(3), 10)), best=2)
    alone = whole.of_best()
    assert (alone.model.num_repeats, alone.best) == (1, 0)
    for name in ("center", "mean_theta", "inclusion"):
        torch.testing.assert_close(getattr(alone, name), getattr(whole, name))


@pytest.mark.parametrize(
    ("sizes", "num_repeats", "expected"),
    [
        ((784, 400, 600, 10), 4, [1, 1, 1, 1]),
        ((2048, 10), 4, [2, 2]),
        ((2048, 10), 10, [2, 3, 2, 3]),
        ((84, 10), 10, [10]),
        ((20, 1), 1, [1]),
    ],
)
def test_groups_follow_from_sizes_alone(sizes: tuple[int, ...], num_repeats: int, expected: list[int]) -> None:
    groups = split_repeats(NetworkLayout(sizes), num_repeats, CPU)
    assert [part.stop - part.start for part in groups] == expected
    assert [part.start for part in groups] == [sum(expected[:i]) for i in range(len(expected))]


@pytest.mark.parametrize("block_bytes", [8, 8 * 3 * 7, 2**26])
def test_moments_are_those_of_numpy_however_large_the_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(latent_fit, "_BLOCK_BYTES", block_bytes)
    features = torch.randn(40, 3, generator=seeded(0)) * torch.tensor([1.0, 30.0, 0.01]) + 1000
    found = Scaling.of(features, CPU)
    doubled = features.double().numpy()
    np.testing.assert_allclose(found.shift.numpy(), doubled.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.scale.numpy(), doubled.std(axis=0), rtol=1e-6)


def test_a_column_that_never_varies_is_only_shifted() -> None:
    features = torch.full((7919, 2), 0.1)
    features[::2, 1] = 0.3
    found = Scaling.of(features, CPU)
    assert found.scale[0] == 1
    assert found(features).abs()[:, 0].max() < 1e-6


def test_a_column_that_varies_by_less_than_float32_resolves_does_not_blow_up() -> None:
    features = torch.zeros(700, 2)
    features[0] = torch.tensor([1e-42, 1e-44])
    found = Scaling.of(features, CPU)
    assert found.scale.tolist() == [1, 1]
    assert bool(found(features).isfinite().all())


def test_a_posterior_of_scaled_inputs_is_one_for_inputs_as_they_are() -> None:
    features = 100 + 3 * torch.randn(50, 6, generator=seeded(2))
    features[:, 4] = 250.5
    own, model = Scaling.of(features, CPU), _start()
    posterior = LatentBinary(model, shift=own.shift, scale=own.scale)
    theta = model.layout.join(*model.draw_weights(torch.arange(4) % 2, seeded(7)))
    found = posterior.layout.logits(features, posterior.sample(4, seeded(7)))
    torch.testing.assert_close(found, model.layout.logits(own(features), theta), rtol=1e-4, atol=1e-4)


def _start() -> LatentModel:
    layout = NetworkLayout((6, 5, 3))
    return LatentModel(layout, initial_factors(layout, 2, seeded(1)), SpikeAndSlab.constant(2))


def test_a_fit_scales_its_batches_as_if_they_had_been_scaled_before() -> None:
    features = 3 + 2 * torch.randn(50, 6, generator=seeded(2))
    labels = torch.randint(0, 3, (50,), generator=seeded(3))
    own, plan = Scaling.of(features, CPU), Plan(epochs=2, batch_size=20, learning_rate=0.01)
    one, _ = fit_latent(_start(), features, labels, plan, generator=seeded(4), scaling=own)
    other, _ = fit_latent(_start(), own(features), labels, plan, generator=seeded(4))
    plain, _ = fit_latent(_start(), features, labels, plan, generator=seeded(4))
    assert torch.equal(one.factors.mean, other.factors.mean)
    assert not torch.equal(one.factors.mean, plain.factors.mean)
    losses = [nll_of_repeats(one, features, labels, seeded(5), scaling=own)]
    losses.append(nll_of_repeats(one, own(features), labels, seeded(5)))
    assert torch.equal(*losses)


@pytest.mark.parametrize("rows", [slice(1, 4), torch.tensor([3, 0, 2])], ids=["slice", "index"])
def test_rows_are_taken_in_single_precision(rows: slice | torch.Tensor) -> None:
    features = torch.randn(5, 2, generator=seeded(6)).half()
    own = Scaling(torch.ones(2), torch.full((2,), 2.0))
    found = Inputs(FeatureBlocks(features, CPU), own).gather(rows)
    assert found.dtype == torch.float32
    assert torch.equal(found, (features[rows].float() - 1) / 2)


def test_the_nll_of_blocks_is_that_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(50, 6, generator=seeded(2))
    labels = torch.randint(0, 3, (50,), generator=seeded(3))
    whole = nll_of_repeats(_start(), features, labels, seeded(5))
    monkeypatch.setattr(latent_fit, "_ROWS", {"cpu": 7, "cuda": 7})
    torch.testing.assert_close(nll_of_repeats(_start(), features, labels, seeded(5)), whole)


@pytest.mark.parametrize("hidden", [(4,), (7, 3)])
def test_the_parameters_of_a_multiplier_are_counted(hidden: tuple[int, ...]) -> None:
    model = initial_model(9, 1, seeded(0), length=3, hidden=hidden)
    assert num_params(9, length=3, hidden=hidden) == sum(part.numel() for part in model.parameters())
