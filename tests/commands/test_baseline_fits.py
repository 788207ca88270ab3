"""fit-sghmc, fit-swag and fit-vi from the command line: what they write, tell, refuse and continue; what each posterior cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run
from problems.own_networks import CODE, extract_own

from bnncli.artifacts.files import read_header
from bnncli.artifacts.samples import read_samples
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import open_posterior, open_samples
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.target import count_passes, counting_passes

SGHMC = ("fit-sghmc", "--chains", 2, "--epochs", 40)
SWAG = ("fit-swag", "--warmup", 2, "--epochs", 4, "--rank", 3)
VI = ("fit-vi", "--epochs", 3, "--elbo-draws", 16)
Make = Callable[[str], None]


def posterior_of(run: Path, name: str) -> Path:
    return run.with_name("small.bnn") / "posteriors" / name


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make_run(layers): features of a network of two inputs by the user's own code; the test works beside them."""
    monkeypatch.chdir(tmp_path)

    def make(layers: str) -> None:
        rng, splits = np.random.default_rng(0), {}
        for name, count in (("train", 40), ("val", 20), ("test", 10)):
            x = rng.normal(size=(count, 2)).astype(np.float32)
            splits[name] = (x, (x[:, 0] > 0).astype(np.int64))
        extract_own(CODE.format(layers), splits)

    return make


ALL = ("ckpt.pt", "--layers", "all", "--trust-code", "--prior-precision", 2)


def test_draws_of_a_head_have_their_log_joint_and_say_what_biases_them(cli: Cli, small_run: Path) -> None:
    done = cli(*SGHMC[:1], small_run, *SGHMC[1:], "--json").expect(0)
    metrics = done.json["metrics"]
    path = posterior_of(small_run, "sghmc.nc")
    samples, content = open_samples(path)
    assert tuple(samples.draws.shape[:2]) == (2, 28)
    with np.load(small_run.with_name("features.npz")) as arrays:
        features, labels = arrays["features_train"], arrays["labels_train"]
    header = read_header(path)
    prior = Prior.from_meta(header.meta)
    assert prior is not None
    target = LastLayerTarget(torch.from_numpy(features), torch.from_numpy(labels), HeadLayout(3, 5), prior)
    expected = target.log_joint(samples.draws.flatten(0, 1)).view(2, 28)
    np.testing.assert_allclose(content.stats["lp"], expected, rtol=1e-6)
    assert metrics["excess_by_steps"] == pytest.approx(0.05)
    assert (metrics["sampler"], metrics["preconditioner"]) == ("sghmc", "base")
    assert metrics["cost"] == {"gradient_passes": 2 * 40 + 2 * 2 * 20, "through": "head"}
    assert metrics["val"]["sghmc"]["samples"] == 56
    assert "steps are never rejected" in done.stderr
    assert read_samples(path).header is not None
    judged = cli("diagnose", small_run, "--posterior", "sghmc", "--json").json["posteriors"]["sghmc"]
    assert "it accepts every move, which biases its draws" in judged["doubts"]


def test_minibatches_of_whitened_chains_add_little_as_their_rate_falls(cli: Cli, small_run: Path) -> None:
    whole, parts, plain = (
        cli("fit-sghmc", small_run, *SGHMC[1:], "--name", name, *words, "--json").json["metrics"]
        for name, words in (
            ("whole", ()),
            ("parts", ("--batch-size", 60)),
            ("plain", ("--batch-size", 60, "--preconditioner", "none")),
        )
    )
    assert whole["stiffness"] == pytest.approx(1, rel=0.01)  # of the base's own target, in its coordinates
    assert (whole["excess_by_batches"], parts["excess_by_batches"]) == (0, pytest.approx(0.05))
    assert plain["excess_by_batches"] > 1
    assert parts["learning_rate"] < whole["learning_rate"]


@pytest.mark.parametrize("num_draws", [19, 20])
def test_few_draws_a_chain_tell_no_effective_sample_size(cli: Cli, small_run: Path, num_draws: int) -> None:
    words = ("--chains", 2, "--sampler", "sghmc", "--epochs", 2 * num_draws, "--draws", num_draws, "--exploration", 0.5)
    done = cli("fit-sghmc", small_run, *words, "--json").expect(0)
    metrics, is_told = done.json["metrics"], num_draws >= 20
    sizes = [metrics[f"{of}min_ess_{kind}"] for of in ("", "heldout_") for kind in ("bulk", "tail")]
    assert [size is not None for size in sizes] == [is_told] * 4
    few = f"{num_draws} draws per chain are too few for an effective sample size, which needs 20"
    assert metrics["undefined"] == (None if is_told else few)
    assert (f"; {few}\n" in done.stderr, "smallest effective sample size" in done.stderr) == (not is_told, is_told)
    size = cli("diagnose", small_run, "--posterior", "sghmc", "--json").json["posteriors"]["sghmc"]["ess_bulk"]
    assert size == ({"value": sizes[0]} if is_told else {"value": None, "reason": few})


@pytest.mark.long
def test_a_colder_posterior_is_said_to_be_none(cli: Cli, small_run: Path) -> None:
    words = (*SGHMC[1:], "--sampler", "sghmc", "--exploration", 0.1)
    cold = cli("fit-sghmc", small_run, *words, "--temperature", 0.0001, "--name", "cold")
    assert "temperature 0.0001 instead of the posterior's 1" in cold.stderr
    cli("fit-sghmc", small_run, *words, "--name", "warm").expect(0)
    spreads = [open_samples(posterior_of(small_run, f"{name}.nc"))[0].draws[:, -10:].std() for name in ("cold", "warm")]
    assert spreads[0] < spreads[1]
    light = cli(*VI[:1], small_run, *VI[1:], "--kl-weight", 0.1)
    assert "weight 0.1, not 1, so this fit neither approximates the target" in light.stderr


def test_swag_says_how_wide_it_is_and_warns_of_more_than_the_prior(cli: Cli, small_run: Path) -> None:
    done = cli(*SWAG[:1], small_run, *SWAG[1:], "--scale", 1e4, "--json")
    metrics = done.json["metrics"]
    assert metrics["share_wider_than_prior"] > 0
    assert "a larger variance than under the prior" in done.stderr
    gaussian, header = open_posterior(posterior_of(small_run, "swag.safetensors"))
    shares = gaussian.covariance.marginal_variances() * metrics["prior_precision"]
    assert float(shares.median()) == pytest.approx(metrics["median_share_of_prior"], rel=1e-4)
    assert (header.meta["structure"], header.meta["type"]) == ("swag", "gaussian")
    narrow = cli(*SWAG[:1], small_run, *SWAG[1:], "--learning-rate", 1e-9, "--name", "narrow")
    assert "the spread is negligible compared with the prior" in narrow.stderr
    cli("fit-swag", small_run, "--batch-size", 10**6, "--name", "whole").expect(
        2, "because minibatch noise sets SWAG's spread"
    )


@pytest.mark.long
def test_vi_warns_where_its_elbo_is_below_its_maximum(cli: Cli, small_run: Path) -> None:
    default = cli("fit-vi", small_run, "--name", "default", "--json").json
    best = default["metrics"]
    assert best["epochs"] == 4000  # the batch is all data
    assert abs(best["shortfall"]["value"]) < 0.5
    assert default["warnings"] == []
    rising = cli("fit-vi", small_run, "--epochs", 80, "--patience", 0, "--name", "rising", "--json").json
    left = rising["metrics"]["shortfall"]["value"]
    assert left == pytest.approx(best["elbo"]["value"] - rising["metrics"]["elbo"]["value"], rel=0.1)
    own, base = (open_posterior(posterior_of(small_run, f"{one}.safetensors"))[0] for one in ("rising", "laplace"))
    variances = base.covariance.marginal_variances()
    beside, away = rising["metrics"]["beside_base"], (own.mean - base.mean) / variances.sqrt()
    assert (beside["name"], beside["largest_distance"]) == ("laplace", pytest.approx(float(away.abs().max()), rel=1e-4))
    assert beside["rms_distance"] == pytest.approx(float(away.square().mean().sqrt()), rel=1e-4)
    assert beside["median_share"] == pytest.approx(float((own.covariance.variances / variances).median()), rel=1e-4)
    assert best["beside_base"]["largest_distance"] < 1
    warning = f"the ELBO is about {left:.3g} nats below its maximum after 80 epochs: use more --epochs"
    assert rising["warnings"][0] == warning
    judged = cli("diagnose", small_run, "--posterior", "default", "--posterior", "rising", "--json").json["posteriors"]
    found = [f"its ELBO is about {left:.3g} nats below its maximum" in judged[name]["doubts"] for name in judged]
    assert found == [False, True]
    short = cli("fit-vi", small_run, "--epochs", 1, "--elbo-draws", 16, "--name", "short", "--kl-weight", 0.5)
    assert re.search(
        r"the objective is about \d+ nats below its maximum after 1 epoch: use more --epochs\n", short.stderr
    )
    words = ("--epochs", 3000, "--patience", 2, "--learning-rate", 0.1, "--elbo-draws", 16, "--name", "still", "--json")
    still = cli("fit-vi", small_run, *words)
    assert still.json["metrics"]["ended_early"]
    assert "use more --epochs" not in still.stderr


@pytest.mark.long
def test_the_elbo_of_vi_is_told_with_its_error_and_judged_alike_by_diagnose(cli: Cli, small_run: Path) -> None:
    elbo = cli("fit-vi", small_run, "--epochs", 60, "--elbo-draws", 64, "--json").json["metrics"]["elbo"]
    judged = cli("diagnose", small_run, "--posterior", "vi", "--draws", 256, "--json").json["posteriors"]["vi"]["elbo"]
    assert abs(elbo["value"] - judged["value"]) < 4 * math.hypot(elbo["standard_error"], judged["standard_error"])
    cli("refine", small_run, "--base", "vi", "--epochs", 1, "--name", "refined").expect(0)
    cli("predict", small_run, "--posterior", "vi", "--integrator", "probit", "--split", "test").expect(0)


@pytest.mark.parametrize("command", [SGHMC, SWAG])
def test_too_high_a_learning_rate_is_to_be_left_out(cli: Cli, small_run: Path, command: tuple[object, ...]) -> None:
    cli(command[0], small_run, *command[1:], "--learning-rate", 1e30).expect(
        70, "hint: omit --learning-rate to let bnncli choose one"
    )
    high = cli(command[0], small_run, *command[1:], "--learning-rate", 1000)
    assert "omit --learning-rate to let bnncli choose one" in high.stderr
    assert "below 1e+03" not in high.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fit-sghmc", "--sampler", "sgld", "--momentum-decay", 0.5), "sgld has no momentum"),
        (("fit-sghmc", "--sampler", "sghmc", "--cycles", 2), "--cycles is for --sampler cyclical"),
        (("fit-sghmc", "--sampler", "cyclical", "--epochs", 41), "expected a multiple of the 4 --cycles; got 41"),
        (("fit-sghmc", "--epochs", 40, "--draws", 30), "--draws: expected at most 28"),
        (("fit-sghmc", "--preconditioner", "base", "--prior-precision", 3), "--prior-precision has none"),
        (("fit-sghmc", "--preconditioner", "base", "--base", "hmc"), "hmc is not one"),
        (("fit-vi", "--optimizer", "ivon", "--estimator", "local"), "ivon needs --estimator reparam"),
        (("fit-vi", "--num-draws", 3), "--num-draws is for --estimator reparam"),
        (("fit-swag", "--rank", 9, "--epochs", 4), "--rank: expected at most the 4 --epochs; got 9"),
        (("fit-vi", "--prior-precision", 3, "--base", "hmc"), "give only one of --prior-precision and --base"),
    ],
)
def test_conflicting_options_are_refused(cli: Cli, small_run: Path, words: tuple[object, ...], said: str) -> None:
    cli(words[0], small_run, *words[1:]).expect(2, said)


@pytest.mark.long
def test_fits_over_a_network_are_stored_and_predicted_with(cli: Cli, make_run: Make) -> None:
    make_run("nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)")
    for words, name in ((SGHMC, "sghmc-all"), (SWAG, "swag-all"), (VI, "vi-all")):
        assert cli(words[0], *ALL, *words[1:], "--json").expect(0).json["metrics"]["cost"]["through"] == "network"
        assert "up to date" in cli(words[0], *ALL[:3], *ALL[4:], *words[1:]).stderr  # which runs no code
        cli("predict", "ckpt.pt", "--posterior", name, "--split", "test", "--trust-code").expect(0)
    cli("fit-sghmc", *ALL, *SGHMC[1:], "--start", "init", "--name", "init", "--json").expect(0)
    cli("diagnose", "ckpt.pt", "--layers", "all", "--draws", 16, "--trust-code", "--json").expect(0)


def test_a_network_with_batch_norm_has_no_other_start_than_the_checkpoint(cli: Cli, make_run: Make) -> None:
    make_run("nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)")
    for words in (SGHMC, VI):
        cli(words[0], *ALL, *words[1:], "--start", "init").expect(
            2, "the network has batch norm (1)", "use --start checkpoint"
        )


def test_passes_are_gradients_and_products_over_the_number_of_examples() -> None:
    features, labels = torch.randn(30, 4), torch.arange(30) % 3
    target = LastLayerTarget(features, labels, HeadLayout(3, 4), Prior(1.0))
    theta = torch.zeros(5, 15, dtype=torch.float64)
    with counting_passes() as outer:
        target.log_joint_and_grad(theta)
        with counting_passes() as inner:
            target.hessian_operator(theta[0])(theta[:3])
        target.log_joint(theta)
    assert (inner.passes, outer.passes) == (6, 11)
    with counting_passes() as outer, counting_passes(share=0.25):
        target.log_joint_and_grad(theta)
    assert outer.passes == 1.25
    count_passes(3)  # nobody asks
    with counting_passes() as tally:
        fit_gaussian(target, structure="diag", center="checkpoint", start=theta[0])
    assert 1 <= tally.passes <= 3


def test_rows_are_sorted_by_cost_and_a_base_is_part_of_what_is_refined(cli: Cli, small_run: Path) -> None:
    cli("refine", small_run, "--epochs", 3, "--length", 2, "--force").expect(0)
    cli("hmc", small_run, "--chains", 2, "--warmup", 4, "--draws", 8, "--force").expect(0)
    cli("predict", small_run).expect(0)
    done = cli("compare", small_run, "--by", "cost", "--metric", "nll", "--json")
    costs = {row["posterior"]: row["cost"] for row in done.json["rows"]}
    assert list(costs) == sorted(costs, key=lambda name: costs[name]["head_passes"])
    assert costs["map"] == {"head_passes": 0, "network_passes": 0, "training_passes": None}
    metrics = {
        name: read_header(posterior_of(small_run, f"{name}.safetensors")).meta["metrics"]
        for name in ("laplace", "refine")
    }
    own = {name: one["cost"]["gradient_passes"] for name, one in metrics.items()}
    assert own["refine"] == 3 * 8  # affine: 8 draws a step
    assert costs["refine"]["head_passes"] == own["refine"] + own["laplace"]
    drawn = read_header(posterior_of(small_run, "hmc.nc")).meta["metrics"]
    assert drawn["cost"]["gradient_passes"] > 2 * 12 * drawn["mean_steps"] * 0.5
    table = cli("compare", small_run, "--by", "cost", "--metric", "nll")
    assert "gradient passes" in table.stdout
    assert "gradient passes without the checkpoint's training" in " ".join(table.stdout.split())
    assert "gradient passes" not in cli("compare", small_run, "--metric", "nll").stdout
    for form in ("markdown", "latex"):
        assert (
            "gradient passes" in cli("compare", small_run, "--by", "cost", "--metric", "nll", "--format", form).stdout
        )


def test_swag_of_one_example_is_refused(cli: Cli, tmp_path: Path) -> None:
    run = new_run(
        cli,
        tmp_path / "one",
        {**make_arrays(), "features_train": np.ones((1, 5), np.float32), "labels_train": np.zeros(1, np.int64)},
    )
    cli("fit-swag", run, "--prior-precision", 1).expect(65, "at least two training examples")


def test_swag_says_how_wide_it_is_beside_its_base(cli: Cli, small_run: Path) -> None:
    done = cli(*SWAG[:1], small_run, *SWAG[1:], "--json").expect(0)
    swag, laplace = (
        open_posterior(small_run.with_name("small.bnn") / f"posteriors/{name}.safetensors")[
            0
        ].covariance.marginal_variances()
        for name in ("swag", "laplace")
    )
    assert done.json["metrics"]["base"] == "laplace"
    assert done.json["metrics"]["median_share_of_base"] == pytest.approx(float((swag / laplace).median()), rel=1e-4)
    assert "of its variance in laplace" in done.stderr
