"""What fit-lbbnn warns of, and how diagnose and evaluate take latent binary and sparse networks."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.outputs import posterior_file
from sklearn.metrics import log_loss

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions
from bnncli.cli.execute import run_command_line
from bnncli.commands.fit_lbbnn import (
    FitLbbnnOptions,
    compute_guessing_likelihood,
    compute_reach,
    compute_rise,
    warn_of_rise,
    warn_of_short_plan,
)
from bnncli.latent.fit import History, Plan
from bnncli.session.inputs import open_posterior


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_reach_of_a_plan_is_the_sum_of_its_learning_rates(schedule: str) -> None:
    plan = Plan(epochs=12, batch_size=32, learning_rate=0.02, schedule=schedule, inclusion_rate=0.1, early_epochs=3)
    num_batches = 4  # of 100 examples
    rates = [0.1 if step < 3 * num_batches else 0.02 for step in range(12 * num_batches)]
    if schedule == "cosine":
        rates = [rate * (1 + math.cos(math.pi * step / len(rates))) / 2 for step, rate in enumerate(rates)]
    assert compute_reach(plan, 100) == pytest.approx(sum(rates), rel=0.02)


def test_no_logit_moves_farther_than_the_reach_that_is_told(cli: Cli, small_run: Path) -> None:
    done = cli("fit-lbbnn", small_run, "--epochs", 4, "--slab-sd", "1", "--start-inclusion", "1,1")
    assert "12 steps move an inclusion logit by at most 0.06" in done.stderr
    logit = open_posterior(posterior_file(small_run, "lbbnn"))[0].model.factors.logit
    assert 0.02 < float((logit - 1).abs().max()) <= 0.06 * 1.1


def test_a_plan_that_reaches_the_prior_is_not_warned_of() -> None:
    options = FitLbbnnOptions(start_inclusion="0,2", prior_inclusion=0.5).resolved(100)
    plan = Plan(epochs=10, batch_size=10, learning_rate=0.02)
    assert warn_of_short_plan(options, plan, 100) is None  # 100 steps of 0.02: from 2 to 0
    text = warn_of_short_plan(options, plan, 90)
    assert text is not None
    assert "at least --epochs 12" in text  # 90 steps reach 1.8
    assert warn_of_short_plan(options, Plan(epochs=12, batch_size=10, learning_rate=0.02), 90) is None


def test_guessing_is_the_log_loss_of_the_classes_shares() -> None:
    labels = torch.tensor([0, 2, 2, 1, 2, 0, 2])
    shares = np.bincount(labels) / 7
    expected = -log_loss(labels, np.tile(shares, (7, 1)), normalize=False)
    assert compute_guessing_likelihood(labels, 3) == pytest.approx(expected)
    assert compute_guessing_likelihood(torch.zeros(4, dtype=torch.int64), 2) == 0


def test_uneven_inputs_that_are_not_explained_call_for_standardize(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 4)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int64)
    features[:, 3] *= 1e4
    run = new_run(cli, tmp_path / "two", {"features_train": features, "labels_train": labels})
    cli("fit-lbbnn", run, "--epochs", 5).expect(0, "worse", "use --standardize")
    fine = cli("fit-lbbnn", run, "--epochs", 100, "--learning-rate", "0.1", "--standardize", "--force", "--json")
    assert fine.json["warnings"] == []
    metrics = fine.json["metrics"]
    assert metrics["expected_log_likelihood"]["value"] > metrics["log_likelihood_of_shares"]


def test_a_bound_that_still_rises_is_told_at_a_constant_rate_only() -> None:
    history = History()
    for epoch in range(20):
        parts = {f"{name}_divergence": torch.zeros(1, 1) for name in ("weight", "bias", "flow")}
        history.add(log_likelihood=torch.tensor([-200.0 + 5 * epoch]), density=torch.zeros(1, 1), **parts)
    share = compute_rise(history, 0)
    assert share == pytest.approx(10 / 105)  # the mean of two epochs over that of the two before
    assert warn_of_rise(share, "constant") is None
    assert "use more --epochs" in (warn_of_rise(0.2, "constant") or "")
    assert warn_of_rise(0.2, "cosine") is None


@pytest.fixture(scope="module")
def thinned(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """finished_run with a latent binary network, the sparse one of it, and their predictions."""
    folder = tmp_path_factory.mktemp("thinned")
    shutil.copytree(finished_run.with_name("small.bnn"), folder / "small.bnn")
    run = str(folder / "small")
    for line in (
        f"fit-lbbnn {run} --epochs 20 --learning-rate 0.05 --repeats 2 --slab-sd 1",
        f"prune {run} --name sparse",
        f"predict {run} --posterior lbbnn --posterior sparse --integrator all --split test --split val",
    ):
        assert run_command_line(line.split(), io.StringIO()) == 0
    return folder / "small"


@pytest.mark.long
def test_the_density_of_a_row_is_that_of_its_networks(cli: Cli, thinned: Path) -> None:
    rows = cli("evaluate", thinned, "--posterior", "lbbnn", "--posterior", "sparse", "--json").json["rows"]
    found = {
        row["name"]: next(m["value"] for m in row["metrics"] if (m["name"], m.get("layer")) == ("density", "all"))
        for row in rows
        if row["split"] == "test"
    }
    posterior = open_posterior(posterior_file(thinned, "lbbnn"))[0]
    inclusion = posterior.model.factors.inclusion
    assert found["lbbnn.mc"] == pytest.approx(float(inclusion.double().mean()))
    median = float((inclusion[posterior.best] > 0.5).double().mean())
    assert found["lbbnn.plug-in"] == found["sparse.plug-in"] == pytest.approx(median)
    assert found["lbbnn.mean"] == 1
    lines = cli("evaluate", thinned, "--posterior", "sparse").stdout.splitlines()
    assert lines[0].split("|")[-1].strip() == "density"
    assert lines[2].split("|")[-1].strip() == f"{median:.4f}"


def test_the_mean_of_a_latent_network_is_not_its_centre(cli: Cli, thinned: Path) -> None:
    rows = cli("evaluate", thinned, "--posterior", "lbbnn", "--posterior", "sparse", "--json").json["rows"]
    kinds = {row["posterior"]: m["mean"] for row in rows for m in row["metrics"] if m["name"] == "mean_error"}
    assert kinds == {"lbbnn": "draws", "sparse": "exact"}


def test_diagnose_judges_predictions_of_latent_and_sparse_networks_alone(cli: Cli, thinned: Path) -> None:
    entries = cli("diagnose", thinned, "--json").json["posteriors"]
    assert entries["lbbnn"]["is_good"] is entries["sparse"]["is_good"] is None
    assert entries["laplace"]["is_good"] is not None
    split = read_features(thinned.with_name("small.bnn") / "features/val.h5")
    assert split.labels is not None
    folder = thinned.with_name("small.bnn") / "predictions"
    probs = read_predictions(folder / "sparse.plug-in/val.h5").probs.astype(np.float64)
    losses = -np.log(probs[np.arange(len(probs)), split.labels])
    assert entries["sparse"]["val_nll"]["value"] == pytest.approx(losses.mean(), rel=1e-5)
    # Many draws, not one: their mean is nearer to that of 400 others than to a single network's.
    cli("predict", thinned, "--posterior", "lbbnn", "--split", "val", "--samples", 400, "--seed", 1, "-f").expect(0)
    probs = read_predictions(folder / "lbbnn.mc/val.h5").probs.astype(np.float64)
    nll = float(-np.log(probs[np.arange(len(probs)), split.labels]).mean())
    assert entries["lbbnn"]["val_nll"]["value"] == pytest.approx(nll, abs=0.02)
    alone = cli("diagnose", thinned, "--posterior", "lbbnn", "--posterior", "sparse").expect(0)
    assert "no Gaussian, flow or draws to compare" in alone.stdout
    assert "another target" in alone.stdout


def test_a_single_logit_of_two_classes_is_left_out_of_diagnose(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(100, 3)).astype(np.float32)
    labels = (features[:, 0] > 0).astype(np.int64)
    run = new_run(cli, tmp_path / "two", {"features_train": features, "labels_train": labels})
    cli("fit-lbbnn", run, "--epochs", 1).expect(0)
    cli("diagnose", run, "--posterior", "lbbnn").expect(65, "has a single logit")
    cli("fit-laplace", run).expect(0)
    everything = cli("diagnose", run, "--json").expect(0)
    assert list(everything.json["posteriors"]) == ["laplace"]
    assert "has a single logit" in everything.stderr


def test_a_head_without_a_val_split_says_which_slab_it_has(cli: Cli, small_run: Path) -> None:
    assert "no labelled val split" not in cli("fit-lbbnn", small_run, "--epochs", 1).stderr
    (small_run.with_name("small.bnn") / "features/val.h5").unlink()
    told = "no labelled val split to choose the slab's standard deviation on; using 1"
    cli("fit-lbbnn", small_run, "--epochs", 1, "--name", "other").expect(0, told)
    for name, *words in (
        ("given", "--slab-sd", "1"),
        ("hidden", "--hidden", "3"),
        ("learnt", "--estimator", "concrete"),
    ):
        assert told not in cli("fit-lbbnn", small_run, "--epochs", 1, "--name", name, *words).stderr


def test_an_extreme_prior_is_named_where_the_bound_is_not_finite(cli: Cli, small_run: Path) -> None:
    cli("fit-lbbnn", small_run, "--epochs", 2, "--slab-sd", "1e-30").expect(70, "--slab-sd")
