"""Groups of draws: which draws they hold, that their means make the prediction, and what the files say of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.seeds import seeded
from scipy import special

from bnncli import integrators
from bnncli.artifacts.predictions import PredictionFile, read_predictions, write_predictions
from bnncli.errors import DataError
from bnncli.integrators import _draws, _partitions, load_integrator
from bnncli.integrators._partitions import DrawPartition, group_ends, kept_rows, scramble_ends
from bnncli.integrators.mc import FEWEST_DRAWS, DrawnMc, sample_in_runs
from bnncli.latent.factors import initial_factors
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import HeadLayout, NetworkLayout
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
    assert found.group_probs is not None
    for group, (begin, end) in enumerate(pairwise((0, *groups.ends))):
        own = None if weights is None else weights[begin:end].numpy()
        expected = np.average(probs[begin:end], axis=0, weights=own)[rows]
        np.testing.assert_allclose(found.group_probs[group], expected, atol=2e-6)
        assert groups.weights[group].item() == pytest.approx((end - begin) / 47 if own is None else own.sum())
    mixed = np.tensordot(groups.weights, found.group_probs.double(), axes=1)
    np.testing.assert_allclose(mixed, found.probs[rows], atol=1e-6)


def test_rows_that_are_kept_are_evenly_spaced_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(kept_rows(10_000, 10, 10), torch.arange(10_000))
    rows = kept_rows(10_000, 1000, 10)
    assert len(rows) == _partitions.MOST_BYTES // 40_000
    assert set((rows[1:] - rows[:-1]).tolist()) == {5, 6}
    assert (rows[0], rows[-1]) == (0, 9994)
    assert len(kept_rows(0, 3, 10)) == 0


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
        assert content.group_probs is not None
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
        probs=probs,
        entropy=special.entr(probs).sum(axis=1),
        mutual_info=None,
        labels=None,
        sample_id=np.arange(12),
        classes=["a", "b", "c"],
        group_probs=group_probs,
        group_rows=np.arange(12),
        group_weights=weights,
    )
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
