"""Repeats in groups that are fitted apart: each as if it were alone, together one model of all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from problems.seeds import seeded
from problems.threads import in_threads
from torch import Tensor

from bnncli.latent import fit as apart
from bnncli.latent.factors import initial_factors, initial_model
from bnncli.latent.fit import (
    EstimatorSettings,
    History,
    Plan,
    fit_apart,
    fit_latent,
    fit_tensors,
    groups_of,
    joined,
    joined_history,
)
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.progress import SILENT
from bnncli.system.workers import Team
from bnncli.training.shared_out import Seat

LAYOUT, NUM_REPEATS, CPU = NetworkLayout((4, 3, 2)), 5, torch.device("cpu")


def start(estimator: str) -> LatentModel:
    generator = seeded(1)
    factors = initial_factors(LAYOUT, NUM_REPEATS, generator)
    flows = [initial_model(n, NUM_REPEATS, generator, hidden=(5,)) for _, n in LAYOUT.shapes if estimator == "mnf"]
    prior = SpikeAndSlab.constant(2)
    sds = torch.linspace(0.5, 1.5, NUM_REPEATS, dtype=torch.float64).unsqueeze(1).expand(-1, 2)
    return LatentModel(LAYOUT, factors, SpikeAndSlab(prior.inclusion, prior.slab_mean, sds), tuple(flows))


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
    return joined(start(estimator), parts, has_learnt_prior=estimator == "concrete"), joined_history(parts)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have room for the weights of two networks."""
    monkeypatch.setitem(apart.GROUP_WEIGHTS, "cpu", 2 * LAYOUT.num_weights + 1)


@pytest.mark.parametrize("estimator", ["lrt", "mnf", "concrete"])
@pytest.mark.usefixtures("pairs")
def test_each_group_becomes_what_it_would_alone_whoever_fits_it(estimator: str) -> None:
    groups = groups_of(LAYOUT, NUM_REPEATS, CPU)
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
    groups = groups_of(NetworkLayout(sizes), num_repeats, CPU)
    assert [part.stop - part.start for part in groups] == expected
    assert [part.start for part in groups] == [sum(expected[:i]) for i in range(len(expected))]
