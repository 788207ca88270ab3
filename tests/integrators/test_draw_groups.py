"""Averages over draws and over groups of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.heads import ONE, THREE, TWO, at_random_by, gaussian_at_mode, head_target
from problems.seeds import seeded
from scipy import special
from torch import Tensor

from bnncli import integrators
from bnncli.artifacts.predictions import PredictionFile, read_predictions, write_predictions
from bnncli.errors import DataError, UsageError
from bnncli.flows import build_layers
from bnncli.integrators import _draws, _partitions, load_integrator
from bnncli.integrators._partitions import (
    DrawPartition,
    central_interval,
    effective_draws,
    group_ends,
    group_mean_rows,
    interval_level,
    scramble_ends,
)
from bnncli.integrators.mc import FEWEST_DRAWS, DrawnMc, sample_in_runs
from bnncli.latent.factors import initial_factors
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.samples import Samples
from bnncli.registry import names

LAYOUT = HeadLayout(3, 4)
SAMPLING = [name for name in names("integrators") if load_integrator(name).is_sampling]


def sizes(ends: tuple[int, ...]) -> list[int]:
    return [end - begin for begin, end in pairwise((0, *ends))]


def test_draws_are_cut_into_ten_nearly_equal_groups() -> None:
    assert sizes(group_ends(200)) == [20] * 10
    assert sorted(sizes(group_ends(23))) == [2] * 7 + [3] * 3
    assert sizes(group_ends(4)) == [1] * 4
    assert group_ends(1) == (1,)


def test_chains_stay_whole_where_there_are_enough_and_are_cut_into_stretches_where_not() -> None:
    ends = group_ends(64, starts=range(0, 64, 4))
    assert len(ends) == 10
    assert all(end % 4 == 0 for end in ends)
    assert set(sizes(ends)) == {4, 8}
    assert sizes(group_ends(60, starts=range(0, 60, 10))) == [10] * 6
    assert sizes(group_ends(80, starts=range(0, 80, 20))) == [8] * 10


def test_stored_draws_that_are_chosen_stay_in_the_order_of_their_chains() -> None:
    draws = torch.arange(6 * 50.0).view(6, 50, 1).expand(6, 50, LAYOUT.num_params).contiguous()
    theta, starts = Samples(draws, LAYOUT).sample_in_runs(100, seeded())
    numbers = theta[:, 0].tolist()
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 100
    chains = [int(number) // 50 for number in numbers]
    assert starts == [chains.index(chain) for chain in sorted(set(chains))]
    whole, all_starts = Samples(draws, LAYOUT).sample_in_runs(None, seeded())
    assert torch.equal(whole, draws.flatten(0, 1))
    assert all_starts == [0, 50, 100, 150, 200, 250]


def test_each_scramble_of_sobol_points_is_a_power_of_two_where_the_draws_are() -> None:
    assert sizes(scramble_ends(256)) == [32] * 8
    assert sizes(scramble_ends(16)) == [2] * 8
    assert sizes(scramble_ends(8)) == [2] * 4
    assert [scramble_ends(size) for size in (1, 2, 3)] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("layout", [HeadLayout(1, 4), LAYOUT, NetworkLayout((4, 6, 3))], ids=str)
@pytest.mark.parametrize("budget", [2**19, 60])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_group_means_are_those_of_their_draws(
    layout: Any, budget: int, is_weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", budget)
    monkeypatch.setattr(_draws, "_CHUNK_EXAMPLES", 5)
    theta, features = torch.randn(47, layout.num_params, generator=seeded()), torch.randn(18, 4, generator=seeded(1))
    weights = torch.rand(47, generator=seeded(2), dtype=torch.float64).softmax(dim=0) if is_weighted else None
    groups, rows = DrawPartition.of(group_ends(47), weights), torch.tensor([0, 3, 4, 11, 17])
    found = DrawnMc(layout, theta, groups, weights).predict(None, features, group_rows=rows)  # type: ignore[arg-type]
    logits = layout.logits(features.double(), theta.double()).numpy()
    if layout.num_outputs == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=2)
    probs = special.softmax(logits, axis=2)
    for group, (begin, end) in enumerate(pairwise((0, *groups.ends))):
        own = None if weights is None else weights[begin:end].numpy()
        expected = np.average(probs[begin:end], axis=0, weights=own)[rows]
        np.testing.assert_allclose(found.group_probs[group], expected, atol=2e-6)
        assert groups.weights[group].item() == pytest.approx((end - begin) / 47 if own is None else own.sum())
    mixed = np.tensordot(groups.weights, found.group_probs.double(), axes=1)
    np.testing.assert_allclose(mixed, found.probs[rows], atol=1e-6)


def test_rows_that_are_kept_are_evenly_spaced_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(group_mean_rows(10_000, 10, 10), torch.arange(10_000))
    rows = group_mean_rows(10_000, 1000, 10)
    assert len(rows) == _partitions.MOST_BYTES // 40_000
    assert set((rows[1:] - rows[:-1]).tolist()) == {5, 6}
    assert (rows[0], rows[-1]) == (0, 9994)
    assert len(group_mean_rows(0, 3, 10)) == 0


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("posterior", ["laplace", "hmc"])
def test_every_sampling_integrators_groups_make_its_prediction(
    posterior: str, is_cut: bool, cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cut:
        monkeypatch.setattr(_partitions, "MOST_BYTES", 10 * 3 * 4 * 50)
    words = ("--posterior", posterior, "--integrator", "all", "--split", "test", "--force", "--json")
    done = cli("predict", small_run, *words)
    paths = {Path(output["path"]).parent.name.split(".")[1]: output["path"] for output in done.json["outputs"]}
    assert {"mc", *(SAMPLING if posterior == "laplace" else ())} <= set(paths)
    assert "plug-in" in paths
    for name, path in paths.items():
        content: Any = read_predictions(Path(path))
        if name not in SAMPLING:
            assert content.group_probs is content.group_rows is content.group_weights is None
            continue
        assert content.group_probs.shape[1:] == (len(content.group_rows), 3)
        assert len(content.group_rows) <= 62 if is_cut else content.group_rows.tolist() == list(range(120))
        mixed = np.tensordot(content.group_weights, content.group_probs[:].astype(float), axes=1)
        np.testing.assert_allclose(mixed, content.probs[content.group_rows], atol=1e-6)
        assert np.abs(content.group_probs[0] - content.group_probs[1]).max() > 1e-4
    assert cli("verify", *paths.values()).code == 0
    assert "array group_probs" in cli("inspect", paths["mc"]).stdout


def test_one_draw_makes_no_groups(cli: Cli, small_run: Path) -> None:
    assert cli("predict", small_run, "--posterior", "laplace", "--split", "test", "--samples", 1, "--force").code == 0
    path = small_run.with_name("small.bnn") / "predictions/laplace.mc/test.h5"
    assert read_predictions(path).group_probs is None


def test_group_g_has_the_same_draws_in_every_split(cli: Cli, small_run: Path) -> None:
    """A run whose split `far` holds the rows of `test`."""
    arrays = dict(np.load(small_run.with_name("features.npz")))
    arrays["features_far"] = arrays["features_test"]
    np.savez(small_run.with_name("twice.npz"), **arrays)
    twice = small_run.with_name("twice")
    made = cli("extract-features", twice, "--from-npz", small_run.with_name("twice.npz"), "--ood", "far")
    assert made.code == 0, made.stderr
    assert cli("fit-laplace", twice).code == 0
    for split in ("test", "far"):  # in commands of their own
        assert cli("predict", twice, "--posterior", "laplace", "--split", split).code == 0
    read: list[Any] = [
        read_predictions(twice.with_name("twice.bnn") / f"predictions/laplace.mc/{s}.h5") for s in ("test", "far")
    ]
    assert np.array_equal(read[0].group_probs, read[1].group_probs)


def content_of(**changes: Any) -> PredictionFile:
    """Twelve examples under four groups of draws, with what is changed."""
    generator = np.random.default_rng(0)
    group_probs = generator.dirichlet(np.ones(3), size=(4, 12)).astype(np.float32)
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    probs = np.tensordot(weights, group_probs, axes=1).astype(np.float32)
    content = PredictionFile(
        probs=probs, entropy=special.entr(probs).sum(axis=1), mutual_info=None, labels=None, sample_id=np.arange(12),
        classes=["a", "b", "c"], group_probs=group_probs, group_rows=np.arange(12), group_weights=weights,
    )  # fmt: skip
    return replace(content, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_weights": None}, "has groups of draws but no group_weights"),
        ({"group_weights": np.full(4, 0.25)}, "the mean of group_probs does not match probs"),
        ({"group_weights": np.array([0.1, 0.2, 0.3, 0.5])}, "least two group_weights that sum to one"),
        ({"group_rows": np.arange(12)[::-1].copy()}, "be ascending rows"),
        ({"group_rows": np.arange(1, 13)}, "be ascending rows"),
        ({"group_rows": np.arange(11)}, "expected group_probs"),
    ],
)
def test_groups_that_do_not_make_the_prediction_are_damage(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "test.h5"
    meta = {"posterior": "laplace", "integrator": "mc", "split": "test", "num_examples": 12}
    keywords: dict[str, Any] = {"meta": meta, "may_replace": False}
    keywords["provenance"] = {"params_hash": "", "params": {}, "algo_rev": 2, "command": [], "inputs": []}
    write_predictions(path, content_of(), **keywords)
    assert read_predictions(path).group_probs is not None
    write_predictions(path, content_of(**changes), **(keywords | {"may_replace": True}))
    with pytest.raises(DataError, match=message):
        read_predictions(path)


def test_groups_of_an_ensembles_draws_hold_whole_rounds_of_its_repeats() -> None:
    layout = NetworkLayout((4, 3))
    factors = initial_factors(layout, 3, seeded())
    latent_ensemble = LatentBinary(LatentModel(layout, factors, SpikeAndSlab.constant(1)))
    theta, starts = sample_in_runs(latent_ensemble, 60, seeded())
    assert torch.equal(theta, latent_ensemble.sample(60, seeded()))
    assert all(end % 3 == 0 for end in group_ends(len(theta), starts=starts))
    assert load_integrator("mc").prepare(latent_ensemble, num_samples=60, generator=seeded()).groups.ends == (  # type: ignore[attr-defined]
        6,
        12,
        18,
        24,
        30,
        36,
        42,
        48,
        54,
        60,
    )


def test_large_heads_are_predicted_with_fewer_draws_by_default() -> None:
    integrator: Any = load_integrator("mc")
    assert integrator.default_for(850) == integrator.default_for(67_000) == integrator.default_samples == 1000
    assert integrator.default_for(2_049_000) == FEWEST_DRAWS
    counts = [integrator.default_for(size) * size for size in (68_000, 200_000, 1_000_000)]
    assert all(2**25 < count <= 2**26 for count in counts[:2])
    quasi: Any = load_integrator("mc", qmc=True)
    assert {quasi.default_for(size) for size in (850, 10**6)} == {256, 64}


def test_networks_are_predicted_with_fewer_draws_by_default() -> None:
    plain: Any = load_integrator("mc")
    quasi: Any = load_integrator("mc", qmc=True)
    assert [plain.default_for(size, is_last_layer=False) for size in (850, 39_760, 10**6)] == [200, 200, 50]
    assert [quasi.default_for(size, is_last_layer=False) for size in (850, 10**6)] == [128, 64]
    assert load_integrator("logit-mc").default_for(10**6, is_last_layer=False) == 256


LAYOUTS = [ONE, TWO, THREE]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def make_gaussian(layout: HeadLayout, structure: str = "full") -> Gaussian:
    return gaussian_at_mode(head_target(layout, labels=at_random_by(0), prior=0.5), structure)


def naive_probs(draws: Tensor, features: Tensor, layout: HeadLayout) -> np.ndarray:
    """(S, N, C) of theta (S, P)."""
    logits = layout.logits(features.double(), draws.double()).numpy()
    if layout.num_outputs == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=2)
    return special.softmax(logits, axis=2)


def test_an_interval_is_numpys_quantiles() -> None:
    draws = torch.rand(7, 53, generator=seeded(), dtype=torch.float64)
    expected = np.quantile(draws.numpy(), [0.025, 0.975], axis=1, method="weibull").T
    np.testing.assert_allclose(central_interval(draws), expected, rtol=1e-12)
    np.testing.assert_allclose(central_interval(draws, torch.full((53,), 2.0)), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 9, 39])
def test_the_interval_of_few_draws_is_all_of_them(size: int) -> None:
    draws = torch.rand(5, size, generator=seeded(), dtype=torch.float64)
    expected = torch.stack([draws.min(dim=1).values, draws.max(dim=1).values], dim=1)
    for weights in (None, torch.ones(size)):
        torch.testing.assert_close(central_interval(draws, weights), expected)


def test_a_weighted_interval_interpolates_between_the_middles_of_shares() -> None:
    draws = torch.rand(6, 400, generator=seeded(), dtype=torch.float64)
    weights = torch.rand(400, generator=seeded(1), dtype=torch.float64) ** 3
    weights[:5] = 0
    size = float(weights.sum() ** 2 / weights.square().sum())
    assert 39 < size < 200
    tails = [(0.025 * (size + 1) - 0.5) / size, (0.975 * (size + 1) - 0.5) / size]
    for row, found in zip(draws.numpy(), central_interval(draws, weights), strict=True):
        order = np.argsort(row)
        shares = (weights.numpy() / weights.sum().item())[order]
        expected = np.interp(tails, np.cumsum(shares) - shares / 2, row[order])
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def share_held(size: int, *, weights_of: Any = None, repeats: int = 4000) -> tuple[float, float]:
    """Mean and standard error of the probability that intervals of `size` skewed draws hold, drawn afresh each time."""
    draws = 2 * torch.randn(repeats, size, generator=seeded(size), dtype=torch.float64) + 1
    if weights_of is None:
        ends = central_interval(torch.sigmoid(draws))
    else:
        rows = [central_interval(torch.sigmoid(row[None]), weights_of(row)) for row in draws]
        ends = torch.cat(rows)
    mean = 1.0 if weights_of is None else 2.0
    held = torch.special.ndtr((torch.logit(ends) - mean) / 2).diff(dim=1)[:, 0]
    return float(held.mean()), float(held.std() / math.sqrt(repeats))


@pytest.mark.parametrize("size", [2, 5, 20, 38, 39, 60, 200])
def test_an_interval_holds_its_level(size: int) -> None:
    held, error = share_held(size)
    level = interval_level(size)
    assert level == pytest.approx(min(0.95, (size - 1) / (size + 1)))
    assert held == pytest.approx(level, abs=4 * error + 0.002)  # linear between draws of a skewed distribution


@pytest.mark.parametrize(("size", "allowed"), [(40, 0.03), (300, 0.01)])
def test_a_weighted_interval_holds_about_its_level(size: int, allowed: float) -> None:
    """Draws of N(1, 4) weighted to N(2, 4): 0.78 S are effective, but fewer of them in the tail that was weighted up."""
    held, error = share_held(size, weights_of=lambda row: (row / 4).softmax(dim=0), repeats=800)
    row = 2 * torch.randn(10**5, generator=seeded(), dtype=torch.float64) + 1
    kish = size * effective_draws(10**5, (row / 4).softmax(dim=0)) / 10**5
    assert held == pytest.approx(min(0.95, (kish - 1) / (kish + 1)), abs=3 * error + allowed)


def test_one_draw_has_no_level() -> None:
    assert interval_level(1) is None


@every_layout
@pytest.mark.parametrize("budget", [2**19, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mc_gives_the_predicted_classs_interval(
    layout: HeadLayout, budget: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", budget)
    monkeypatch.setattr(_draws, "_CHUNK_EXAMPLES", 5)
    # A few draws lie far out, so that the class at their mean is often not the predicted one.
    draws = torch.randn(1, 48, layout.num_params, generator=seeded())
    draws[:, :6] *= 60
    features = torch.randn(40, layout.num_features, generator=seeded(1)).to(dtype)
    prediction = load_integrator("mc").predict(Samples(draws, layout), features, num_samples=None, generator=seeded())
    probs = naive_probs(draws[0], features, layout)
    predicted = probs.mean(axis=0).argmax(axis=1)
    center = naive_probs(draws.mean(dim=1), features, layout)[0].argmax(axis=1)
    assert (predicted != center).sum() > 3
    expected = np.quantile(probs[:, np.arange(40), predicted], [0.025, 0.975], axis=0, method="weibull").T
    np.testing.assert_allclose(prediction.interval, expected, atol=2e-5)


def test_one_draw_has_no_interval() -> None:
    features = torch.randn(3, 4, generator=seeded())
    prediction = load_integrator("mc").predict(make_gaussian(LAYOUTS[2]), features, num_samples=1, generator=seeded())
    assert prediction.interval is None


@pytest.mark.parametrize("name", ["mc", "logit-mc"])
@pytest.mark.parametrize("qmc", [False, True])
def test_draws_made_once_serve_every_block(name: str, qmc: bool) -> None:
    posterior, features = make_gaussian(LAYOUTS[2]), torch.randn(20, 4, generator=seeded(1))
    integrator = load_integrator(name, qmc=qmc)
    whole = integrator.predict(posterior, features, num_samples=16, generator=seeded(3))
    ready = integrator.prepare(posterior, num_samples=16, generator=seeded(3))
    parts = [ready.predict(posterior, block, num_samples=5, generator=seeded(9)) for block in features.split(7)]
    torch.testing.assert_close(torch.cat([part.probs for part in parts]), whole.probs)
    kept = ready.probs_of_draws(posterior, features)  # type: ignore[attr-defined]
    assert kept.shape == (16, 20, 3)
    np.testing.assert_allclose(kept.double().mean(dim=0), whole.probs, atol=1e-3)


@cache
def known() -> tuple[Gaussian, Tensor, Tensor]:
    """A posterior, features (N, D) and their probabilities (N, C) by 2^16 Sobol points of the logits."""
    posterior, features = make_gaussian(LAYOUTS[1]), torch.randn(6, 4, generator=seeded(1), dtype=torch.float64)
    exact = load_integrator("logit-mc", qmc=True).predict(posterior, features, num_samples=2**16, generator=seeded())
    return posterior, features, exact.probs.double()


def many_errors(name: str, *, qmc: bool, num_seeds: int = 100) -> Tensor:
    """Errors (R, N, C) of predictions by 32 draws under many seeds."""
    posterior, features, exact = known()
    integrator = load_integrator(name, qmc=qmc)
    found = [
        integrator.predict(posterior, features, num_samples=32, generator=seeded(seed)).probs
        for seed in range(num_seeds)
    ]
    return torch.stack(found).double() - exact


@pytest.mark.parametrize("name", [pytest.param("mc", marks=pytest.mark.long), "logit-mc"])
def test_sobol_draws_are_unbiased_and_err_less(name: str) -> None:
    plain, quasi = many_errors(name, qmc=False), many_errors(name, qmc=True)
    for errors in (plain, quasi):
        standard_error = errors.std(dim=0) / math.sqrt(len(errors))
        assert (errors.mean(dim=0).abs() < 4 * standard_error + 2e-5).all()
    # Each of the two mean squares has a standard error of at most sqrt(2 / 100) of itself, if all examples erred alike.
    assert quasi.square().mean() < 0.5 * plain.square().mean()


def test_a_flow_draws_from_sobol_points_too() -> None:
    base = make_gaussian(LAYOUTS[2])
    flow = Flow(base, tuple(build_layers("radial", base.layout, seeded(), length=1)), "radial")
    found = load_integrator("mc", qmc=True).prepare(flow, num_samples=16, generator=seeded())
    generator = seeded()
    expected, _ = flow.from_noise(torch.cat([base.quasi_noise(2, generator) for _ in range(8)]))
    assert torch.equal(found.theta, expected.float())  # type: ignore[attr-defined]


def test_stored_draws_have_no_sobol_points() -> None:
    posterior = Samples(torch.zeros(1, 4, LAYOUTS[2].num_params), LAYOUTS[2])
    with pytest.raises(UsageError, match=r"\0qmc\0 needs a posterior built from standard normals .*, got samples"):
        load_integrator("mc", qmc=True).prepare(posterior, num_samples=4, generator=seeded())


def test_an_odd_number_of_sobol_draws_brings_a_warning() -> None:
    posterior = make_gaussian(LAYOUTS[2])
    for name in ("mc", "logit-mc"):
        integrator = load_integrator(name, qmc=True)
        assert "16 or 32" in integrator.prepare(posterior, num_samples=20, generator=seeded()).warning  # type: ignore[attr-defined]
        default = integrator.prepare(posterior, num_samples=integrator.default_samples, generator=seeded())  # type: ignore[attr-defined]
        assert default.warning is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mc", "logit-mc"])
def test_kept_draws_are_those_of_the_integrator(name: str, cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--integrator", name, "--qmc", "--samples", 32)
    assert cli("predict", small_run, *words, "--keep-samples").code == 0
    path = small_run.with_name("small.bnn") / f"predictions/laplace.{name}-qmc/test.h5"
    content = read_predictions(path)  # checks that the mean of the draws is the prediction
    assert content.probs_samples.shape == (32, 120, 3)
    assert content.interval is not None
    predicted = content.probs[:].argmax(axis=1)
    draws = content.probs_samples[:][:, np.arange(120), predicted].astype(np.float64)
    expected = np.quantile(draws, [0.025, 0.975], axis=0, method="weibull").T
    np.testing.assert_allclose(content.interval, expected, atol=1e-3)


def test_sobol_draws_of_stored_draws_are_refused_by_name(cli: Cli, small_run: Path) -> None:
    done = cli("predict", small_run, "--posterior", "hmc", "--integrator", "mc", "--qmc")
    assert done.code == 2
    assert "--integrator mc-qmc does not work for a samples posterior (hmc)" in done.stderr
