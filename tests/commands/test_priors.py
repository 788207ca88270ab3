"""Priors of runs: a precision of biases, and a mean."""

from __future__ import annotations

import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, extended_run, file_of, new_run
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_posterior, write_posterior
from bnncli.artifacts.samples import read_samples
from bnncli.inference.elbo import elbo
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import open_posterior, read_recorded_prior
from bnncli.targets.last_layer import LastLayerTarget

PRIOR = Prior(10.0, 0.1)
STEPS = (
    ("fit-laplace", "--prior-precision", "10", "--bias-precision", "0.1", "--name", "two"),
    ("refine", "--base", "two", "--epochs", "1", "--length", "2", "--name", "refine-two"),
    ("hmc", "--base", "two", "--chains", "8", "--warmup", "8", "--draws", "16", "--name", "hmc-two"),
)  # fmt: skip


@pytest.fixture(scope="module")
def run_of_two(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run with posteriors of two precisions beside its own; not to be changed."""
    return extended_run(finished_run, tmp_path_factory.mktemp("two"), STEPS)


def target_of(run: Path, prior: Prior) -> LastLayerTarget:
    arrays = np.load(run.with_name("features.npz"))
    posterior, _ = open_posterior(file_of(run, "laplace"))
    features, labels = (torch.from_numpy(arrays[f"{name}_train"]) for name in ("features", "labels"))
    return LastLayerTarget(features, labels, posterior.layout, prior)


def test_every_artifact_has_both_precisions(run_of_two: Path) -> None:
    for name in ("two", "refine-two", "hmc-two"):
        header = read_header(file_of(run_of_two, name))
        assert read_recorded_prior(header) == PRIOR
        assert header.meta["bias_precision"] == 0.1
        if name != "refine-two":
            assert header.meta["metrics"]["bias_precision"] == 0.1
    for name in ("two", "refine-two"):
        tensors, _ = read_posterior(file_of(run_of_two, name))
        assert Prior.from_tensors(tensors) == PRIOR
    for name in ("laplace", "refine", "hmc"):
        assert "bias_precision" not in read_header(file_of(run_of_two, name)).meta


def test_the_fit_is_at_the_mode_of_the_target_with_two_precisions(run_of_two: Path) -> None:
    fitted, _ = open_posterior(file_of(run_of_two, "two"))
    distances = []  # to the mode, in posterior standard deviations
    for prior in (PRIOR, Prior(10.0)):
        target = target_of(run_of_two, prior)
        _, gradient = target.log_joint_and_grad(fitted.mean.unsqueeze(0), dtype=torch.float64)
        distances.append(float(fitted.covariance.pull_back(gradient).norm()))
    assert distances[0] < 2e-3
    assert distances[1] > 1


def test_refine_starts_at_the_elbo_of_the_base_on_that_target(run_of_two: Path) -> None:
    base, _ = open_posterior(file_of(run_of_two, "two"))
    metrics = read_header(file_of(run_of_two, "refine-two")).meta["metrics"]
    expected = elbo(target_of(run_of_two, PRIOR), base, num_samples=4000, generator=torch.Generator().manual_seed(3))
    before = metrics["elbo_before"]
    error = np.hypot(before["standard_error"], expected.standard_error)
    assert before["value"] == pytest.approx(expected.value, abs=4 * error)
    wrong = elbo(target_of(run_of_two, Prior(10.0)), base, num_samples=4000, generator=torch.Generator().manual_seed(3))
    assert abs(wrong.value - expected.value) > 40 * error


def test_log_posteriors_of_draws_are_those_of_that_target(run_of_two: Path) -> None:
    samples = read_samples(file_of(run_of_two, "hmc-two"))
    posterior, _ = open_posterior(file_of(run_of_two, "hmc-two"))
    expected = target_of(run_of_two, PRIOR).log_joint(posterior.draws[0])
    np.testing.assert_allclose(samples.stats["lp"][0], expected.numpy(), atol=1e-3)
    assert [samples.constants[name].tolist() for name in ("prior_precision", "bias_precision")] == [[10.0], [0.1]]


def test_diagnose_judges_each_on_its_own_target(cli: Cli, run_of_two: Path) -> None:
    done = cli("diagnose", run_of_two, "--json")
    posteriors, pairs = done.json["posteriors"], done.json["pairs"]
    shown = {name: (entry["prior_precision"], entry["bias_precision"]) for name, entry in posteriors.items()}
    assert shown == {"map": (None, None)} | dict.fromkeys(("laplace", "refine", "hmc"), (10.0, None)) | dict.fromkeys(
        ("two", "refine-two", "hmc-two"), (10.0, 0.1)
    )
    same = {frozenset(pair["posteriors"]) for pair in pairs if pair["is_same_target"]}
    assert {"two", "hmc-two"} in same
    assert {"two", "hmc"} not in same
    stored = read_header(file_of(run_of_two, "refine-two")).meta["metrics"]["elbo_before"]
    elbo_now = posteriors["two"]["elbo"]
    error = np.hypot(stored["standard_error"], elbo_now["standard_error"])
    assert elbo_now["value"] == pytest.approx(stored["value"], abs=4 * error)
    table = cli("diagnose", run_of_two, "--posterior", "two").stdout
    assert "10 / 0.1" in table


def test_diagnose_suggests_commands_that_keep_both_precisions(cli: Cli, run_of_two: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_two.with_name("small.bnn"), tmp_path / "small.bnn")
    run = tmp_path / "small"
    command = cli("diagnose", run, "--posterior", "hmc-two", "--json").json["verdict"]["run"]
    words = shlex.split(command)[1:]
    assert ("--name", "hmc-two-longer") in pairwise(words)
    assert cli(*words).code == 0
    assert read_recorded_prior(read_header(file_of(run, "hmc-two-longer"))) == PRIOR


def test_evaluate_warns_of_draws_from_another_target(cli: Cli, run_of_two: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_two.with_name("small.bnn"), tmp_path / "small.bnn")
    run = tmp_path / "small"
    assert cli("predict", run, "--posterior", "two", "--split", "test").code == 0
    done = cli("evaluate", run, "--posterior", "two")
    assert (
        "two has prior precision 10 (bias 0.1), but hmc has 10: MMD^2 and other distances compare different targets"
        in done.stderr
    )
    assert "different targets" not in cli("evaluate", run, "--posterior", "two", "--reference", "hmc-two").stderr


def test_the_prior_itself_as_base_has_both_precisions(cli: Cli, small_run: Path) -> None:
    words = ("--prior-precision", 10, "--bias-precision", 0.1, "--force")
    assert cli("fit-laplace", small_run, *words).code == 0
    assert cli("refine", small_run, "--base", "prior", "--epochs", 1, "--length", 1, "--name", "naive").code == 0
    posterior, header = open_posterior(file_of(small_run, "naive"))
    assert read_recorded_prior(header) == PRIOR
    expected = PRIOR.diagonal(posterior.layout).reciprocal()
    root = posterior.base.covariance.unwhiten(torch.eye(len(expected), dtype=torch.float64)).T
    torch.testing.assert_close(root @ root.T, expected.diag())


def test_a_number_given_to_hmc_holds_for_biases_too(cli: Cli, run_of_two: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_two.with_name("small.bnn"), tmp_path / "small.bnn")
    words = ("--prior-precision", 5, "--chains", 2, "--warmup", 4, "--draws", 4, "--name", "five")
    assert cli("hmc", tmp_path / "small", *words).code == 0
    assert read_recorded_prior(read_header(file_of(tmp_path / "small", "five"))) == Prior(5.0)
    assert (
        cli("refine", tmp_path / "small", "--base", "two", "--prior-precision", 5, "--epochs", 1, "--force").code == 0
    )
    posterior, header = open_posterior(file_of(tmp_path / "small", "refine"))
    assert (read_recorded_prior(header), posterior.base.prior) == (Prior(5.0), PRIOR)


def test_the_same_number_for_both_is_the_default(cli: Cli, small_run: Path) -> None:
    words = ("fit-laplace", small_run, "--prior-precision", 10, "--bias-precision", 10)
    for name in ("same", "same-kron"):
        extra = ("--structure", "kron") if name == "same-kron" else ()
        assert cli(*words, *extra, "--name", name).code == 0
    digests = [read_header(file_of(small_run, name)).content_digest for name in ("same", "laplace")]
    assert digests[0] == digests[1]


def test_a_search_keeps_the_bias_precision(cli: Cli, small_run: Path) -> None:
    done = cli("fit-laplace", small_run, "--bias-precision", 0.1, "--name", "searched", "--json")
    metrics = done.json["metrics"]
    assert (done.code, metrics["prior_precision_by"], metrics["bias_precision"]) == (0, "val", 0.1)
    assert read_recorded_prior(read_header(file_of(small_run, "searched"))) == Prior(metrics["prior_precision"], 0.1)
    assert ", 0.1 for the biases;" in done.stderr


def test_every_structure_takes_a_bias_precision(cli: Cli, small_run: Path) -> None:
    evidence = {}
    for structure in ("full", "block", "kron", "diag"):
        words = ("--prior-precision", 10, "--bias-precision", 0.1, "--structure", structure, "--name", structure)
        done = cli("fit-laplace", small_run, *words, "--json")
        assert (done.code, done.json["metrics"]["bias_precision"]) == (0, 0.1)
        posterior, header = open_posterior(file_of(small_run, structure))
        assert (read_recorded_prior(header), posterior.prior) == (PRIOR, PRIOR)
        evidence[structure] = done.json["metrics"]["log_marginal_likelihood"]
    assert evidence["kron"] == pytest.approx(evidence["full"], abs=2)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "no"])
def test_what_is_no_precision_is_a_usage_error(cli: Cli, small_run: Path, value: str) -> None:
    done = cli("fit-laplace", small_run, f"--bias-precision={value}")
    assert done.code == 2
    assert f"--bias-precision: expected same or a positive number; got '{value}'" in done.stderr


def test_a_head_without_bias_has_no_bias_precision(cli: Cli, tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    arrays.pop("head_bias")
    new_run(cli, tmp_path / "bare", arrays)
    done = cli("fit-laplace", tmp_path / "bare", "--prior-precision", 1, "--bias-precision", 1)
    assert (done.code, "--bias-precision: the head has no bias" in done.stderr) == (2, True)


def test_large_heads_are_sampled_with_both_precisions(
    cli: Cli, run_of_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bnncli.inference.memory.QUICK_ANYWHERE", 9
    )  # chains are whitened by a Kronecker-factored Gaussian
    monkeypatch.setattr("bnncli.inference.memory.largest_full", lambda device: 9)
    monkeypatch.setattr("bnncli.inference.memory._WHITENING_SHARE", 0.0)
    shutil.copytree(run_of_two.with_name("small.bnn"), tmp_path / "small.bnn")
    words = ("--base", "two", "--chains", 8, "--warmup", 40, "--draws", 60, "--name", "large")
    assert cli("hmc", tmp_path / "small", *words).code == 0
    path = file_of(tmp_path / "small", "large")
    header = read_header(path)
    assert (header.meta["whitening"], read_recorded_prior(header)) == ("kron", PRIOR)
    assert header.meta["metrics"]["max_rhat"] < 1.1
    posterior, _ = open_posterior(path)
    expected = target_of(run_of_two, PRIOR).log_joint(posterior.draws[0])
    np.testing.assert_allclose(read_samples(path).stats["lp"][0], expected.numpy(), atol=1e-3)


MEAN_STEPS = (
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
    return extended_run(finished_run, tmp_path_factory.mktemp("about"), MEAN_STEPS)


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


def target_about_mean(run: Path, prior: Prior) -> LastLayerTarget:
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
        prior = read_recorded_prior(read_header(file_of(run_about, name)))
        assert prior is not None
        assert prior.mean is not None
        assert prior.mean_scale == pytest.approx(expected.mean_scale, rel=1e-4)
        torch.testing.assert_close(prior.mean, expected.mean, rtol=1e-4, atol=1e-6)
        assert prior == read_recorded_prior(read_header(file_of(run_about, "about")))
        assert "(P,)" not in str(read_header(file_of(run_about, name)).meta)
    assert "prior_mean_scale" not in read_header(file_of(run_about, "laplace")).meta


def test_the_fit_is_at_the_mode_of_that_target(run_about: Path) -> None:
    fitted, _ = open_posterior(file_of(run_about, "about"))
    distances = []  # to the mode, in posterior standard deviations
    for prior in (fitted.require_prior(), Prior(10.0)):
        _, gradient = target_about_mean(run_about, prior).log_joint_and_grad(
            fitted.mean.unsqueeze(0), dtype=torch.float64
        )
        distances.append(float(fitted.covariance.pull_back(gradient).norm()))
    assert distances[0] < 2e-3
    assert distances[1] > 1


def test_refine_starts_at_the_elbo_of_the_base_and_draws_have_the_log_joint_of_that_target(run_about: Path) -> None:
    base, _ = open_posterior(file_of(run_about, "about"))
    target = target_about_mean(run_about, base.require_prior())
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
