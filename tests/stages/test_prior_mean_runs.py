"""--prior-mean through the pipeline: what fit-laplace fits is what refine, hmc, fit-vi and diagnose aim at."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, extended_run, file_of
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_posterior, write_posterior
from bnncli.inference.elbo import elbo
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import open_posterior, recorded_prior
from bnncli.targets.last_layer import LastLayerTarget

STEPS = (
    ("fit-laplace", "--prior-precision", "10", "--prior-mean", "checkpoint", "--name", "about"),
    ("fit-laplace", "--prior-mean", "checkpoint", "--structure", "full", "--name", "searched"),
    ("refine", "--base", "about", "--epochs", "1", "--length", "2", "--name", "refine-about"),
    ("hmc", "--base", "about", "--chains", "8", "--warmup", "8", "--draws", "16", "--name", "hmc-about"),
    ("fit-vi", "--base", "about", "--epochs", "2", "--elbo-draws", "8", "--name", "vi-about"),
    ("fit-sghmc", "--base", "about", "--chains", "2", "--epochs", "8", "--name", "sghmc-about"),
)  # fmt: skip
NAMES = ("about", "refine-about", "hmc-about", "vi-about", "sghmc-about")


@pytest.fixture(scope="module")
def run_about(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run with posteriors under a prior about the checkpoint; not to be changed."""
    return extended_run(finished_run, tmp_path_factory.mktemp("about"), STEPS)


def head_of(run: Path) -> torch.Tensor:
    """The checkpoint's last layer, (P,): the centre of map."""
    centre: torch.Tensor = open_posterior(file_of(run, "map"))[0].theta
    return centre.double()


def best_scale(run: Path) -> float:
    """One over the temperature of lowest NLL on val, by scipy."""
    arrays = np.load(run.with_name("features.npz"))
    features, labels = (torch.from_numpy(arrays[f"{name}_val"]) for name in ("features", "labels"))
    logits = open_posterior(file_of(run, "map"))[0].layout.logits(features.double(), head_of(run)[None])[0]

    def loss(log_scale: float) -> float:
        return float(cross_entropy(logits * np.exp(log_scale), labels))

    return float(np.exp(minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}).x))


def target_of(run: Path, prior: Prior) -> LastLayerTarget:
    arrays = np.load(run.with_name("features.npz"))
    posterior, _ = open_posterior(file_of(run, "about"))
    features, labels = (torch.from_numpy(arrays[f"{name}_train"]) for name in ("features", "labels"))
    return LastLayerTarget(features, labels, posterior.layout, prior)


def prior_of(run: Path) -> Prior:
    scale = best_scale(run)
    return Prior(10.0).with_mean(scale * head_of(run), scale)


def test_the_mean_is_the_last_layer_at_the_temperature_that_val_prefers_in_every_artifact(run_about: Path) -> None:
    expected = prior_of(run_about)
    for name in NAMES:
        prior = recorded_prior(read_header(file_of(run_about, name)))
        assert prior is not None
        assert prior.mean is not None
        assert prior.mean_scale == pytest.approx(expected.mean_scale, rel=1e-4)
        torch.testing.assert_close(prior.mean, expected.mean, rtol=1e-4, atol=1e-6)
        assert prior == recorded_prior(read_header(file_of(run_about, "about")))
        assert "(P,)" not in str(read_header(file_of(run_about, name)).meta)
    assert "prior_mean_scale" not in read_header(file_of(run_about, "laplace")).meta


def test_the_fit_is_at_the_mode_of_that_target(run_about: Path) -> None:
    fitted, _ = open_posterior(file_of(run_about, "about"))
    distances = []  # to the mode, in posterior standard deviations
    for prior in (fitted.require_prior(), Prior(10.0)):
        _, gradient = target_of(run_about, prior).log_joint_and_grad(fitted.mean.unsqueeze(0), dtype=torch.float64)
        distances.append(float(fitted.covariance.pull_back(gradient).norm()))
    assert distances[0] < 2e-3
    assert distances[1] > 1


def test_refine_starts_at_the_elbo_of_the_base_and_draws_have_the_log_joint_of_that_target(run_about: Path) -> None:
    base, _ = open_posterior(file_of(run_about, "about"))
    target = target_of(run_about, base.require_prior())
    before = read_header(file_of(run_about, "refine-about")).meta["metrics"]["elbo_before"]
    expected = elbo(target, base, num_samples=4000, generator=torch.Generator().manual_seed(3))
    error = np.hypot(before["standard_error"], expected.standard_error)
    assert before["value"] == pytest.approx(expected.value, abs=4 * error)
    for name in ("hmc-about", "sghmc-about"):
        from bnncli.artifacts.samples import read_samples

        samples, posterior = read_samples(file_of(run_about, name)), open_posterior(file_of(run_about, name))[0]
        np.testing.assert_allclose(samples.stats["lp"][0], target.log_joint(posterior.draws[0]).numpy(), atol=1e-3)


def test_diagnose_judges_them_on_one_target_and_shows_the_mean(cli: Cli, run_about: Path) -> None:
    found = cli("diagnose", run_about, "--posterior", "about", "--posterior", "hmc-about", "--json").json
    assert [pair["is_same_target"] for pair in found["pairs"]] == [True]
    scale = read_header(file_of(run_about, "about")).meta["prior_mean_scale"]
    assert found["posteriors"]["about"]["prior_mean_scale"] == scale
    shown = cli("diagnose", run_about, "--posterior", "about", "--posterior", "laplace").stdout
    assert f"10 (mean {scale:.3g})" in shown


def test_a_search_is_no_worse_on_val_than_the_network_at_one_temperature(run_about: Path) -> None:
    meta = read_header(file_of(run_about, "searched")).meta
    curve = meta["curve"]
    metrics = meta["metrics"]
    arrays = np.load(run_about.with_name("features.npz"))
    features, labels = (torch.from_numpy(arrays[f"{name}_val"]) for name in ("features", "labels"))
    logits = open_posterior(file_of(run_about, "map"))[0].layout.logits(features.double(), head_of(run_about)[None])[0]
    scaled = float(cross_entropy(logits * best_scale(run_about), labels))
    assert curve[-1][1] == pytest.approx(scaled, abs=2e-3)  # the strongest prior leaves the network at that temperature
    assert min(value for _, value in curve) < scaled + 2e-3
    assert metrics["prior_precision_at_edge"] is False


def test_simulations_under_a_prior_about_a_mean_are_calibrated(cli: Cli, run_about: Path) -> None:
    few = ("--simulations", 40, "--draws", 19, "--examples", 60)
    assert cli("sbc", run_about, "--posterior", "about", *few, "--strict").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layers", "all"), "--prior-mean checkpoint is for --layers last; got --layers all"),
        (("--prior-precision", "marglik", "--prior-mean", "network"), "--prior-mean"),
    ],
)
def test_what_has_no_such_prior_is_refused(cli: Cli, run_about: Path, words: tuple[str, ...], message: str) -> None:
    given = words if "--prior-mean" in words else (*words, "--prior-mean", "checkpoint")
    done = cli("fit-laplace", run_about, *given)
    assert done.code == 2
    assert message in done.stderr


def test_features_without_a_network_have_no_checkpoint_to_be_about(cli: Cli, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {"features_train": generator.normal(size=(20, 3)).astype(np.float32), "labels_train": np.arange(20) % 2}
    np.savez(tmp_path / "bare.npz", **arrays)
    assert cli("extract-features", tmp_path / "bare", "--from-npz", tmp_path / "bare.npz").code == 0
    done = cli("fit-laplace", tmp_path / "bare", "--prior-mean", "checkpoint")
    assert done.code == 2
    assert "--prior-mean checkpoint: this run has only features, no network; use --prior-mean zero" in done.stderr


def test_a_mean_of_another_size_is_refused(cli: Cli, run_about: Path, tmp_path: Path) -> None:
    shutil.copytree(run_about.with_name("small.bnn"), tmp_path / "small.bnn")
    path = file_of(tmp_path / "small", "about")
    tensors, header = read_posterior(path)
    short = {**tensors, "prior.mean": tensors["prior.mean"][:3]}
    write_posterior(path, short, meta=header.meta, provenance=header.provenance, may_replace=True)
    done = cli("hmc", tmp_path / "small", "--base", "about", "--name", "other")
    assert done.code == 65
    assert "is damaged: the prior mean has shape (3,); expected (18,)" in done.stderr
