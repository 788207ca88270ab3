"""sbc on the command line: the verdict, its exit code, its figure, and what cannot be tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli
from problems.long_run import long_but

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.commands import sbc
from bnncli.commands.fit_lbbnn import FitLbbnnOptions
from bnncli.commands.sbc import RankedQuantity, SbcOptions, judge_ranks
from bnncli.errors import DataError, UsageError
from bnncli.inference.sghmc import SghmcPlan
from bnncli.inference.simulation import GaussianRefit, SghmcRefit

FEW = ("--simulations", 50, "--draws", 19, "--examples", 40)


def test_exact_draws_pass_and_a_diagonal_gaussian_does_not(cli: Cli, small_run: Path) -> None:
    exact = cli("sbc", small_run, "--posterior", "hmc", *FEW, "--strict", "--json")
    assert exact.code == 0, exact.stdout
    assert exact.json["verdict"]["is_calibrated"]
    assert cli("fit-laplace", small_run, "--structure", "diag", "--prior-precision", 0.1, "--name", "diag").code == 0
    rough = cli("sbc", small_run, "--posterior", "diag", *FEW, "--strict", "--json")
    assert (rough.code, rough.json["error"]["code"]) == (3, "not_calibrated")
    worst = min(rough.json["quantities"], key=lambda one: one["p_value"])
    assert worst["p_value"] < 1e-4
    assert worst["name"] in rough.json["verdict"]["sentence"]


def test_the_table_and_the_sentence_are_printed_and_the_figure_drawn(cli: Cli, small_run: Path) -> None:
    figure = small_run.with_name("ranks.svg")
    done = cli(
        "sbc", small_run, "--posterior", "refine", "--truth", "hmc", "--simulations", 20, "--draws", 9, "--plot", figure
    )
    assert (done.code, done.stderr.count("approximation")) == (0, 0)
    assert done.stdout.splitlines()[-1].startswith("the fit of refine is ")
    assert sum(line.startswith("logit") for line in done.stdout.splitlines()) == 4
    assert figure.read_text().count("uniform") + figure.stat().st_size > 5000


@pytest.mark.parametrize("method", ["vi", "swag"])
def test_trained_gaussians_are_tried_with_their_own_plans(cli: Cli, small_run: Path, method: str) -> None:
    more = ("--rank", 2, "--warmup", 0) if method == "swag" else ()
    assert cli(f"fit-{method}", small_run, "--epochs", 4, *more).code == 0
    done = cli("sbc", small_run, "--posterior", method, "--simulations", 30, "--draws", 19, "--examples", 60, "--json")
    assert done.code == 0, done.stdout
    assert not done.json["verdict"]["is_calibrated"]  # four epochs are too few


@pytest.mark.parametrize("preconditioner", long_but(["base", "rmsprop", "none"], "base", mark=pytest.mark.nightly))
def test_chains_of_stochastic_gradients_are_tried_as_hot_as_they_were(
    cli: Cli, small_run: Path, preconditioner: str
) -> None:
    plan = ("--epochs", 30, "--chains", 2, "--preconditioner", preconditioner)
    assert cli("fit-sghmc", small_run, *plan, "--temperature", 0.1).code == 0
    done = cli("sbc", small_run, "--posterior", "sghmc", "--simulations", 20, "--draws", 9, "--examples", 30, "--json")
    assert done.code == 0, done.stdout
    assert not done.json["verdict"]["is_calibrated"]
    joint = done.json["quantities"][0]
    assert (joint["name"], joint["fault"]) == ("log joint", "too high")


def test_a_fit_whose_preconditioner_is_gone_is_refused(cli: Cli, small_run: Path) -> None:
    assert cli("fit-laplace", small_run, "--prior-precision", 1, "--name", "other").code == 0
    plan = ("--epochs", 4, "--chains", 2)
    assert cli("fit-sghmc", small_run, *plan, "--base", "other", "--name", "gone").code == 0
    (small_run.with_name("small.bnn") / "posteriors" / "other.safetensors").unlink()
    stale = cli("sbc", small_run, "--posterior", "gone", *FEW)
    assert (stale.code, "gone.nc is stale: base" in stale.stderr) == (65, True)
    gone = cli("sbc", small_run, "--posterior", "gone", *FEW, "--allow-stale")
    assert gone.code == 65
    assert "--posterior: gone is preconditioned by other, which must be fitted again too" in gone.stderr
    assert "found nothing\nhint: run fit-sghmc again" in gone.stderr


def test_a_fit_that_flies_away_is_named_with_what_helps(cli: Cli, small_run: Path) -> None:
    plan = ("--epochs", 100, "--chains", 2, "--preconditioner", "none", "--momentum-decay", 1)
    assert cli("fit-sghmc", small_run, *plan, "--learning-rate", 50, "--name", "far").code == 0
    flown = cli("sbc", small_run, "--posterior", "far", *FEW)
    assert flown.code == 70, flown.stdout
    assert "fitting far to simulated labels: the chains diverged" in flown.stderr
    assert "fit the posterior with other options: use a --learning-rate below 50" in flown.stderr


def test_the_options_of_chains_are_read_as_they_were_recorded(cli: Cli, small_run: Path) -> None:
    from bnncli.commands.sbc import choose_refit

    plan = ("--sampler", "cyclical", "--epochs", 40, "--cycles", 2, "--draws", 3, "--exploration", 0.5, "--chains", 3)
    more = (
        "--batch-size",
        20,
        "--learning-rate",
        0.02,
        "--momentum-decay",
        0.4,
        "--temperature",
        0.5,
        "--start",
        "init",
    )
    assert cli("fit-sghmc", small_run, *plan, *more).code == 0
    header = read_header(small_run.with_name("small.bnn") / "posteriors" / "sghmc.nc")
    assert choose_refit(header) == SghmcRefit(
        SghmcPlan(40, 2, 3, 10, 20, 0.02, 0.4, 0.5), 3, is_given=True, from_initialisation=True, base=GaussianRefit()
    )


def latent_header(options: FitLbbnnOptions, num_examples: int) -> Header:
    """Of a fit of five features to three classes, resolved."""
    meta = {"method": "lbbnn", "sizes": [5, 3], "num_examples": num_examples}
    params = {**options.resolved(num_examples).params(), "sizes": [5, 3], "seed": 0}
    return Header(Path("it.safetensors"), "posterior", "1.0", "", {"params": params}, meta)


@pytest.mark.parametrize("words", [(), ("--standardize", "--repeats", 2)], ids=str)
def test_latent_binary_fits_are_tried_under_their_own_prior(
    cli: Cli, small_run: Path, words: tuple[object, ...]
) -> None:
    assert cli("fit-lbbnn", small_run, "--epochs", 20, "--slab-sd", 2, "--prior-inclusion", 0.5, *words).code == 0
    done = cli("sbc", small_run, "--posterior", "lbbnn", "--simulations", 40, "--draws", 19, "--examples", 60, "--json")
    assert done.code == 0, done.stdout
    assert not done.json["verdict"]["is_calibrated"]  # twenty steps are too few, and it says so
    assert "fitting lbbnn to 60 simulated labels: 20 steps move an inclusion logit by" in done.stderr
    assert [one["name"].split()[0] for one in done.json["quantities"]] == [
        *("log", "weight", "weight", "weight", "bias"),
        *4 * ["logit"],
    ]
    assert done.json["quantities"][0]["name"] == "log likelihood"


def test_latent_binary_fits_have_truths_from_their_prior_alone(cli: Cli, small_run: Path) -> None:
    assert cli("fit-lbbnn", small_run, "--epochs", 1, "--slab-sd", 2).code == 0
    own = cli("sbc", small_run, "--posterior", "lbbnn", "--truth", "hmc")
    assert (own.code, own.stderr.count("\n")) == (2, 1)
    assert (
        "--truth: expected prior, because fit-lbbnn can be tested only on parameters drawn from its prior (lbbnn)"
        in own.stderr
    )
    other = cli("sbc", small_run, "--posterior", "hmc", "--truth", "lbbnn")
    assert other.code == 2
    assert "or a last-layer posterior from laplace, refine, hmc, vi, swag, sghmc, merge; got lbbnn" in other.stderr


def test_a_latent_binary_fit_that_learned_its_prior_is_refused() -> None:
    learned = latent_header(FitLbbnnOptions(estimator="concrete"), 100)
    with pytest.raises(UsageError, match="which learns its prior from the labels") as caught:
        sbc._check_can_be_tried(learned.path, learned)
    assert "--early-epochs 0" in str(caught.value.hint)
    kept = latent_header(FitLbbnnOptions(estimator="concrete", early_epochs=0), 100)
    sbc._check_can_be_tried(kept.path, kept)


def test_epochs_that_fit_lbbnn_chose_are_chosen_anew_and_given_ones_kept() -> None:
    from bnncli.commands.sbc import read_options

    options = FitLbbnnOptions(prior_inclusion=0.2, estimator="mnf", flow_rate=1e-4, repeats=3)
    assert read_options(latent_header(options, 5000), 200) == options.resolved(200)
    given = replace(options, epochs=70)
    assert read_options(latent_header(given, 5000), 200) == given.resolved(200)


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: header.meta.pop("sizes"),
        lambda header: header.provenance.pop("params"),
        lambda header: header.provenance["params"].pop("estimator"),
    ],
)
def test_a_latent_header_that_says_too_little_is_damaged(damage: Callable[[Header], object]) -> None:
    header = latent_header(FitLbbnnOptions(), 100)
    damage(header)
    with pytest.raises(DataError, match="its header is damaged"):
        sbc._check_can_be_tried(header.path, header)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--posterior", "map"),
            "--posterior: expected one of laplace, refine, hmc, vi, swag, sghmc, lbbnn; map is from map: it is a point",
        ),
        (("--posterior", "beside"), "--posterior: beside is centred on the checkpoint's weights"),
        (("--truth", "map"), "--truth: expected prior, or a last-layer posterior"),
        (("--truth", "beside"), "--truth: beside has the prior 3, but the tested posterior has 10"),
        (("--posterior", "absent"), "absent"),
        (("--simulations", 3), "--simulations"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_tried_is_refused(cli: Cli, small_run: Path, words: tuple[object, ...], message: str) -> None:
    assert cli("fit-laplace", small_run, "--center", "checkpoint", "--prior-precision", 3, "--name", "beside").code == 0
    done = cli("sbc", small_run, *words)
    assert done.code in (2, 66)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"method": "ensemble"}, "it is from ensemble: its networks were trained separately"),
        ({"method": "lbbnn", "sizes": [5, 4, 6, 3]}, "it has --hidden 4,6"),
        ({"method": "sghmc", "layers": "all"}, "expected a posterior over the last layer.* it is over --layers all"),
        ({"method": "sghmc"}, "it records no prior"),
    ],
)
def test_a_fit_that_cannot_be_made_anew_is_refused_with_the_reason(meta: dict[str, Any], message: str) -> None:
    path = Path("it.nc")
    with pytest.raises(UsageError, match=message) as caught:
        sbc._check_can_be_tried(path, Header(path, "samples", "1.0", "", {"params": {"estimator": "lrt"}}, meta))
    assert "prior" in message or "--posterior laplace" in str(caught.value.hint)


def test_a_fit_without_room_is_refused_before_it_begins(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.system.memory.budget", lambda device: 1000)
    done = cli("sbc", small_run, "--posterior", "hmc", "--json")
    assert done.code == 69
    assert "a fit of 18 parameters with a full covariance" in done.json["error"]["message"]


def test_a_truth_that_is_no_exact_draw_is_warned_of(cli: Cli, small_run: Path) -> None:
    done = cli("sbc", small_run, "--truth", "laplace", "--simulations", 20, "--draws", 9)
    assert done.code == 0
    assert "--truth laplace is an approximation" in done.stderr


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((2.5, 2.5), "too wide"),
        ((0.5, 0.5), "too narrow"),
        ((1.5, 1.0), "too low"),
        ((1.0, 1.5), "too high"),
        ((1.0, 1.0), None),
    ],
)
def test_it_is_said_how_draws_are_off(shape: tuple[float, float], fault: str | None) -> None:
    """A truth that ranks high lies above draws that are too low."""
    ranks = (np.random.default_rng(0).beta(*shape, size=600) * 101).astype(np.int64)
    assert RankedQuantity("one", ranks, 100, 0.0).fault == fault


def test_a_right_fit_is_doubted_no_more_often_than_the_level_says() -> None:
    from bnncli.evaluation.convergence import RankLaw

    generator, law, options = np.random.default_rng(0), RankLaw(40, 19), SbcOptions(simulations=40, draws=19, level=0.2)
    doubted = 0
    for _ in range(300):
        ranks = generator.integers(0, 20, size=(3, 40))
        doubted += not judge_ranks(
            [RankedQuantity("one", one, 19, law.p_value(one)) for one in ranks], "x", options
        ).is_calibrated
    assert doubted / 300 < 0.2 + 3 * (0.2 * 0.8 / 300) ** 0.5
    assert doubted / 300 > 0.05
