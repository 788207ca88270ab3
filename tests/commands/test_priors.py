"""Priors of runs: a precision of biases, a mean, and searches."""

from __future__ import annotations

import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import kill_midway
from problems.arrays import make_arrays, make_wide_arrays
from problems.command_line import Cli, extended_run, file_of, new_run
from problems.long_run import long_but
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_posterior, write_posterior
from bnncli.artifacts.samples import read_samples
from bnncli.commands.fit_laplace import last_layer
from bnncli.inference import prior_search as prior_precision
from bnncli.inference import prior_search as search_rows
from bnncli.inference import structure_choice
from bnncli.inference.elbo import elbo
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import open_posterior, read_recorded_prior
from bnncli.session.prior_choice import prior_line
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
    cli(*words).expect(0)
    assert read_recorded_prior(read_header(file_of(run, "hmc-two-longer"))) == PRIOR


def test_evaluate_warns_of_draws_from_another_target(cli: Cli, run_of_two: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_two.with_name("small.bnn"), tmp_path / "small.bnn")
    run = tmp_path / "small"
    cli("predict", run, "--posterior", "two", "--split", "test").expect(0)
    done = cli("evaluate", run, "--posterior", "two")
    assert (
        "two has prior precision 10 (bias 0.1), but hmc has 10: MMD^2 and other distances compare different targets"
        in done.stderr
    )
    assert "different targets" not in cli("evaluate", run, "--posterior", "two", "--reference", "hmc-two").stderr


def test_the_prior_itself_as_base_has_both_precisions(cli: Cli, small_run: Path) -> None:
    words = ("--prior-precision", 10, "--bias-precision", 0.1, "--force")
    cli("fit-laplace", small_run, *words).expect(0)
    cli("refine", small_run, "--base", "prior", "--epochs", 1, "--length", 1, "--name", "naive").expect(0)
    posterior, header = open_posterior(file_of(small_run, "naive"))
    assert read_recorded_prior(header) == PRIOR
    expected = PRIOR.diagonal(posterior.layout).reciprocal()
    root = posterior.base.covariance.unwhiten(torch.eye(len(expected), dtype=torch.float64)).T
    torch.testing.assert_close(root @ root.T, expected.diag())


def test_a_number_given_to_hmc_holds_for_biases_too(cli: Cli, run_of_two: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of_two.with_name("small.bnn"), tmp_path / "small.bnn")
    words = ("--prior-precision", 5, "--chains", 2, "--warmup", 4, "--draws", 4, "--name", "five")
    cli("hmc", tmp_path / "small", *words).expect(0)
    assert read_recorded_prior(read_header(file_of(tmp_path / "small", "five"))) == Prior(5.0)
    cli("refine", tmp_path / "small", "--base", "two", "--prior-precision", 5, "--epochs", 1, "--force").expect(0)
    posterior, header = open_posterior(file_of(tmp_path / "small", "refine"))
    assert (read_recorded_prior(header), posterior.base.prior) == (Prior(5.0), PRIOR)


def test_the_same_number_for_both_is_the_default(cli: Cli, small_run: Path) -> None:
    words = ("fit-laplace", small_run, "--prior-precision", 10, "--bias-precision", 10)
    for name in ("same", "same-kron"):
        extra = ("--structure", "kron") if name == "same-kron" else ()
        cli(*words, *extra, "--name", name).expect(0)
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


def test_a_head_without_bias_has_no_bias_precision(cli: Cli, tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    arrays.pop("head_bias")
    new_run(cli, tmp_path / "bare", arrays)
    cli("fit-laplace", tmp_path / "bare", "--prior-precision", 1, "--bias-precision", 1).expect(
        2, "--bias-precision: the head has no bias"
    )


def test_large_heads_are_sampled(cli: Cli, run_of_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bnncli.inference.structure_choice.QUICK_ANYWHERE", 9
    )  # chains are whitened by a Kronecker-factored Gaussian
    monkeypatch.setattr("bnncli.inference.structure_choice.largest_full", lambda device: 9)
    monkeypatch.setattr("bnncli.inference.structure_choice._WHITENING_SHARE", 0.0)
    shutil.copytree(run_of_two.with_name("small.bnn"), tmp_path / "small.bnn")
    words = ("--base", "two", "--chains", 8, "--warmup", 40, "--draws", 60, "--name", "large")
    cli("hmc", tmp_path / "small", *words).expect(0)
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
    cli("sbc", run_about, "--posterior", "about", *few, "--strict").expect(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layers", "all"), "--prior-mean checkpoint is for --layers last; got --layers all"),
        (("--prior-precision", "marglik", "--prior-mean", "network"), "--prior-mean"),
    ],
)
def test_what_has_no_such_prior_is_refused(cli: Cli, run_about: Path, words: tuple[str, ...], message: str) -> None:
    given = words if "--prior-mean" in words else (*words, "--prior-mean", "checkpoint")
    cli("fit-laplace", run_about, *given).expect(2, message)


def test_features_without_a_network_have_no_checkpoint_to_be_about(cli: Cli, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {"features_train": generator.normal(size=(20, 3)).astype(np.float32), "labels_train": np.arange(20) % 2}
    np.savez(tmp_path / "bare.npz", **arrays)
    cli("extract-features", tmp_path / "bare", "--from-npz", tmp_path / "bare.npz").expect(0)
    cli("fit-laplace", tmp_path / "bare", "--prior-mean", "checkpoint").expect(
        2, "--prior-mean checkpoint: this run has only features, no network; use --prior-mean zero"
    )


def test_a_mean_of_another_size_is_refused(cli: Cli, run_about: Path, tmp_path: Path) -> None:
    shutil.copytree(run_about.with_name("small.bnn"), tmp_path / "small.bnn")
    path = file_of(tmp_path / "small", "about")
    tensors, header = read_posterior(path)
    short = {**tensors, "prior.mean": tensors["prior.mean"][:3]}
    write_posterior(path, short, meta=header.meta, provenance=header.provenance, may_replace=True)
    cli("hmc", tmp_path / "small", "--base", "about", "--name", "other").expect(
        65, "is damaged: the prior mean has shape (3,); expected (18,)"
    )


HMC = ("hmc", "--chains", 8, "--warmup", 20, "--draws", 40)
REFINE = ("refine", "--epochs", 400, "--elbo-draws", 16)
SUFFIXES = {"hmc": ".nc", "refine": ".safetensors"}
each_command = pytest.mark.parametrize("command", [HMC, REFINE], ids=lambda words: words[0])
hmc_in_short = pytest.mark.parametrize("command", long_but([HMC, REFINE], HMC), ids=lambda words: words[0])


def make_run(cli: Cli, folder: Path, precision: float, *more: Any, arrays: dict[str, np.ndarray] | None = None) -> Path:
    run = new_run(cli, folder / "run", arrays or make_arrays())
    cli("fit-laplace", run, "--prior-precision", precision, *more).expect(0)
    return run


def header(run: Path, name: str, command: tuple[Any, ...]) -> Any:
    return read_header(run.with_name("run.bnn") / "posteriors" / f"{name}{SUFFIXES[command[0]]}")


@pytest.mark.long
@each_command
def test_precision_far_off_is_left_for_a_better_one(cli: Cli, tmp_path: Path, command: tuple[Any, ...]) -> None:
    run = make_run(cli, tmp_path, 300)
    words = (command[0], run, *command[1:], "--json")
    found = cli(*words).expect(0)
    metrics, meta = found.json["metrics"], header(run, command[0], command).meta
    assert metrics["prior_precision"] == meta["prior_precision"] < 100
    assert (metrics["prior_precision_by"], metrics["prior_precision_base"]) == ("val", 300)
    kept = cli(*words, "--prior-precision", "inherit", "--name", "kept").json["metrics"]
    assert kept["val"][command[0]]["nll"] > 1.05 * metrics["val"][command[0]]["nll"]
    nll = dict(metrics["prior_precision_curve"])
    assert nll[metrics["prior_precision"]] < nll[300]
    # Short runs tell what whole ones do.
    assert nll[300] == pytest.approx(kept["val"][command[0]]["nll"], rel=0.05)
    assert nll[metrics["prior_precision"]] == pytest.approx(metrics["val"][command[0]]["nll"], rel=0.05)
    assert prior_line(metrics)[0] in " ".join(found.stderr.split())
    assert cli(*words).json["action"] == "up_to_date"


@pytest.mark.long
@each_command
def test_inherited_precision_is_that_number(cli: Cli, tmp_path: Path, command: tuple[Any, ...]) -> None:
    run = make_run(cli, tmp_path, 3)
    words = (command[0], run, *command[1:], "--json")
    found = cli(*words).json["metrics"]
    assert found["prior_precision"] == found["prior_precision_base"] == 3  # which is as good as its neighbours
    assert "no other precision predicts val significantly better" in prior_line(found)[0]
    kept = cli(*words, "--prior-precision", "inherit", "--name", "kept").json["metrics"]
    assert found["val"] == kept["val"]
    assert "prior_precision_by" not in kept
    given = cli(*words, "--prior-precision", 3, "--name", "given").json["metrics"]
    assert given["val"][command[0]]["nll"] == pytest.approx(kept["val"][command[0]]["nll"], abs=1e-3)
    if command is HMC:
        ours, theirs = (
            read_samples(run.with_name("run.bnn") / "posteriors" / f"{name}.nc").head_weight for name in ("hmc", "kept")
        )
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
@each_command
def test_a_run_that_goes_on_does_not_search_again(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[Any, ...]
) -> None:
    run = make_run(cli, tmp_path, 300)
    whole = cli(command[0], run, *command[1:], "--name", "whole", "--json").json
    kill_midway(run, "cut", *command, saves=9)

    def climb(*given: object, **named: object) -> None:
        raise AssertionError("searched again")

    with monkeypatch.context() as patch:
        patch.setattr(f"bnncli.commands.{command[0]}.search_prior", climb)
        done = cli(command[0], run, *command[1:], "--name", "cut", "--resume", "--json")
    assert "resuming" in done.stderr
    assert done.json["outputs"][0]["content_digest"] == whole["outputs"][0]["content_digest"]
    named = ("--prior-precision", repr(whole["metrics"]["prior_precision"]), "--name", "given", "--json")
    given = cli(command[0], run, *command[1:], *named).json["metrics"]
    assert given["val"] == whole["metrics"]["val"]  # the search leaves no trace in the run


@pytest.mark.long
@each_command
def test_gaussians_close_to_the_posteriors_stand_for_short_runs(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[Any, ...]
) -> None:
    run = make_run(cli, tmp_path, 300, arrays=make_arrays(num_train=4000))
    words = (command[0], run, "--json")
    found = cli(*words).expect(0).json["metrics"]
    nll = dict(found["prior_precision_curve"])
    assert found["prior_precision_by_gaussians"] == len(nll)
    assert "NLL of the Gaussians, which are close to the posteriors: " in prior_line(found)[0]
    assert nll[found["prior_precision"]] == pytest.approx(found["val"][command[0]]["nll"], abs=2e-3)
    monkeypatch.setattr(f"bnncli.commands.{command[0]}.losses_if_close", lambda *given: None)
    in_short = cli(*words, "--name", "in-short").json["metrics"]
    assert in_short["prior_precision_by_gaussians"] == 0
    assert in_short["prior_precision"] == found["prior_precision"]
    assert dict(in_short["prior_precision_curve"]) == pytest.approx(nll, abs=0.01)
    assert found["cost"]["gradient_passes"] < in_short["cost"]["gradient_passes"]


def test_training_is_brief_where_the_base_leaves_little_to_gain(cli: Cli, tmp_path: Path) -> None:
    run = make_run(cli, tmp_path, 3, arrays=make_arrays(num_train=4000))
    words = ("refine", run, "--prior-precision", "inherit", "--epochs", 200, "--elbo-draws", 64, "--json")
    found = cli(*words).expect(0).json["metrics"]
    assert found["log_weight_sd_before"] < 1
    assert found["epochs_run"] == 75  # two rounds of 25 and the final decay
    assert found["verdict"] == "negligible"
    patient = cli(*words, "--patience", 0, "--name", "patient").json["metrics"]
    assert patient["epochs_run"] == 200
    assert patient["elbo_after"]["value"] < found["elbo_after"]["value"] + 0.5


def test_training_is_patient_where_the_base_leaves_more_to_gain(cli: Cli, tmp_path: Path) -> None:
    run = make_run(cli, tmp_path, 0.01, arrays=make_arrays(num_train=200))
    words = ("refine", run, "--prior-precision", "inherit", "--epochs", 600, "--elbo-draws", 64, "--json")
    found = cli(*words).expect(0).json["metrics"]
    assert found["log_weight_sd_before"] > 1
    assert cli(*words, "--patience", 1, "--name", "brief").json["metrics"]["epochs_run"] < found["epochs_run"]


@hmc_in_short
def test_the_biases_follow(cli: Cli, tmp_path: Path, command: tuple[Any, ...]) -> None:
    run = make_run(cli, tmp_path, 300, "--bias-precision", 30)
    cli(command[0], run, *command[1:]).expect(0)
    meta = header(run, command[0], command).meta
    assert meta["prior_precision"] < 100
    assert meta["bias_precision"] == pytest.approx(meta["prior_precision"] / 10)


@hmc_in_short
def test_fewer_examples_than_features(cli: Cli, tmp_path: Path, command: tuple[Any, ...]) -> None:
    run = make_run(cli, tmp_path, 300, "--structure", "full", arrays=make_wide_arrays())
    metrics = cli(command[0], run, *command[1:], "--json").expect(0).json["metrics"]
    nll = dict(metrics["prior_precision_curve"])
    assert metrics["prior_precision"] < 300
    assert nll[metrics["prior_precision"]] == pytest.approx(metrics["val"][command[0]]["nll"], rel=0.2)


@each_command
@pytest.mark.parametrize(
    ("without", "more", "why"),
    [
        ("labels_val", {"hmc": (), "refine": ()}, "no labelled val split"),
        ("", {"hmc": ("--draws", 8), "refine": ("--epochs", 5)}, "too short to search"),
    ],
)
def test_where_nothing_tells_the_precision_is_the_bases(
    cli: Cli, tmp_path: Path, command: tuple[Any, ...], without: str, more: dict[str, Any], why: str
) -> None:
    arrays = {name: part for name, part in make_arrays().items() if name != without}
    run = make_run(cli, tmp_path, 300, arrays=arrays)
    done = cli(command[0], run, *command[1:], *more[command[0]], "--json")
    assert done.json["metrics"].get("prior_precision_by") is None
    assert "using the base's prior precision: " in done.stderr
    assert why in done.stderr
    assert header(run, command[0], command).meta["prior_precision"] == 300
    inherited = cli(command[0], run, *command[1:], *more[command[0]], "--prior-precision", "inherit", "--json")
    assert inherited.json["action"] == "up_to_date"  # it is the same request


def arrays() -> dict[str, np.ndarray]:
    """Features of three classes."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(3, 5))
    found = {"head_weight": (2 * weight).astype(np.float32), "head_bias": np.zeros(3, np.float32)}
    for split, count in (("train", 120), ("val", 300)):
        features = generator.normal(size=(count, 5)).astype(np.float32)
        found[f"features_{split}"] = features
        found[f"labels_{split}"] = (features @ weight.T + generator.gumbel(size=(count, 3))).argmax(axis=1)
    return found


def test_expensive_structure_uses_a_quick_search(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    by_kron = cli("fit-laplace", run, "--structure", "kron", "--name", "kron", "--json").json["metrics"]
    by_full = cli("fit-laplace", run, "--structure", "full", "--name", "full", "--json").json["metrics"]
    assert "prior_precision_structure" not in by_full
    assert by_full["prior_precision"] != by_kron["prior_precision"]
    monkeypatch.setattr(structure_choice, "automatic_structures", lambda layout, budget, **sizes: ["kron", "diag"])
    done = cli("fit-laplace", run, "--structure", "full", "--name", "quick", "--json")
    metrics = done.json["metrics"]
    assert (metrics["structure"], metrics["prior_precision_structure"]) == ("full", "kron")
    assert metrics["prior_precision"] == by_kron["prior_precision"]
    assert "searching for the prior precision with kron" in done.stderr
    given = cli("fit-laplace", run, "--prior-precision", by_kron["prior_precision"], "--structure", "full", "--json")
    assert metrics["log_marginal_likelihood"] == pytest.approx(
        given.json["metrics"]["log_marginal_likelihood"], abs=2e-3
    )


@pytest.mark.parametrize("center", ["mode", "checkpoint"])
def test_search_of_a_part_says_so(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, center: str) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    words = ("fit-laplace", run, "--structure", "full", "--center", center, "--json")
    whole = cli(*words, "--name", "whole").json["metrics"]
    assert "prior_precision_val_examples" not in whole
    monkeypatch.setattr(search_rows, "_MODE_WORK", {"cpu": 18 * 50})
    monkeypatch.setattr(search_rows, "_VAL_WORK", {"cpu": 18 * 128 * 100})
    monkeypatch.setattr(search_rows, "LEAST_VAL", 10)
    done = cli(*words, "--name", "part")
    metrics = done.json["metrics"]
    assert metrics["prior_precision_val_examples"] == 100
    if center == "mode":
        assert metrics["prior_precision_train_examples"] == 50
        assert metrics["prior_precision"] != whole["prior_precision"]
        assert metrics["cost"]["gradient_passes"] % 1 != 0  # passes over a part count as that part
        assert "with 50 of 120 examples of train and 100 of 300 examples of val; the final fit uses all" in done.stderr
    else:  # one Hessian, that of all, serves the whole curve
        assert "prior_precision_train_examples" not in metrics
        assert "with 100 of 300 examples of val; the final fit uses all" in done.stderr
        assert metrics["prior_precision"] == whole["prior_precision"]
    given = cli(*words, "--prior-precision", metrics["prior_precision"], "--name", "given").json["metrics"]
    for name in ("log_marginal_likelihood", "val_nll_laplace"):
        assert metrics[name] == pytest.approx(given[name], abs=2e-3)


@pytest.mark.parametrize(
    ("num_outputs", "num_features", "num_examples", "num_draws", "structure"),
    [
        (20, 384, 10_000, 320, "full"),
        (20, 384, 10_000, 5, "block"),
        (10, 84, 60_000, 5, "full"),
        (100, 500, 50_000, 320, "kron"),
    ],
)
def test_chains_are_whitened_by_all_of_the_covariance_where_draws_cost_more(
    monkeypatch: pytest.MonkeyPatch,
    num_outputs: int,
    num_features: int,
    num_examples: int,
    num_draws: int,
    structure: str,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layout = HeadLayout(num_outputs, num_features)
    there = 200 << 30
    found = structure_choice.whitening_structure(
        layout, there, device="cpu", num_examples=num_examples, num_chains=16, num_draws=num_draws
    )
    assert found == structure
    own = structure_choice.automatic_structure(layout, 2 << 30, device="cpu")
    assert (
        structure_choice.whitening_structure(
            layout, 2 << 30, device="cpu", num_examples=9, num_chains=16, num_draws=320
        )
        == own
    )


def test_brief_search_stays_near_the_checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    words = ("fit-laplace", run, "--structure", "kron", "--json")
    whole = cli(*words, "--name", "whole").json["metrics"]
    monkeypatch.setattr(search_rows, "_BRIEF_SHARE", 1e-9)
    done = cli(*words, "--name", "brief")
    assert "searching for the prior precision around the checkpoint's own" in done.stderr
    brief = done.json["metrics"]
    assert len(brief["prior_precision_curve"]) < len(whole["prior_precision_curve"])
    assert brief["val_nll_laplace"] == pytest.approx(whole["val_nll_laplace"], abs=2e-3)
    assert brief["cost"]["gradient_passes"] < whole["cost"]["gradient_passes"]
    assert "prior_precision_train_examples" not in brief


def test_folds_of_a_part_have_modes_of_all_rows(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    monkeypatch.setattr(search_rows, "_MODE_WORK", {"cpu": 18 * 150})
    monkeypatch.setattr(search_rows, "_VAL_WORK", {"cpu": 18 * 128 * 100})
    monkeypatch.setattr(search_rows, "LEAST_VAL", 10)
    words = ("fit-laplace", run, "--structure", "full", "--fit-on", "train+val", "--prior-mean", "checkpoint")
    done = cli(*words, "--name", "part", "--json")
    metrics = done.json["metrics"]
    assert (metrics["prior_precision_train_examples"], metrics["prior_precision_val_examples"]) == (150, 100)
    assert "searching for the prior precision with 150 of 420 examples" in done.stderr
    cli(*words, "--name", "given", "--prior-precision", metrics["prior_precision"]).expect(0)
    folder = run.with_name("run.bnn") / "posteriors"
    part, given = (read_posterior(folder / f"{name}.safetensors")[0] for name in ("part", "given"))
    assert torch.equal(part["folds.rows"], given["folds.rows"])
    for name in ("mean", "folds.theta"):
        torch.testing.assert_close(part[name], given[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "problem", [make_arrays(), make_arrays(seed=3, num_classes=5, num_features=20)], ids=["3", "5"]
)
def test_the_choice_is_that_of_a_search_by_the_closest_structure(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: dict[str, Any]
) -> None:
    run = new_run(cli, tmp_path / "run", problem)
    plain = cli("fit-laplace", run, "--json").json["metrics"]
    searched: list[tuple[str, int]] = []
    search = prior_precision.search

    def counted(*given: Any, **named: Any) -> Any:
        found = search(*given, **named)
        searched.append((named["structure"], len(found.curve)))
        return found

    monkeypatch.setattr(last_layer, "QUICK_SECONDS", 0.0)  # as if all searches were long
    monkeypatch.setattr(last_layer, "_DEARER", 0.0)
    monkeypatch.setattr("bnncli.commands.fit_laplace.last_layer.search", counted)
    found = cli("fit-laplace", run, "--name", "rough", "--json").json["metrics"]
    assert searched[0][0] != "full"
    assert found["structure"] == plain["structure"]
    assert found["prior_precision"] == pytest.approx(plain["prior_precision"], rel=0.1)
    assert found["val"]["laplace"]["nll"] == pytest.approx(plain["val"]["laplace"]["nll"], rel=1e-3)
    if found["structure"] == searched[0][0] or found["prior_precision_for"] == "plug-in":  # of which it says all
        assert len(searched) == 1
    else:  # around the rough one's, and not all over again
        assert [name for name, _ in searched[1:]] == [found["structure"]]
        assert searched[1][1] < len(plain["prior_precision_curve"])
