"""sbc on the command line: the verdict, its exit code, its figure, and what cannot be tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forged import forge
from problems.command_line import Cli, file_of
from problems.long_run import long_but

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.commands.fit_lbbnn import FitLbbnnOptions
from bnncli.commands.sbc import RankedQuantity, SbcOptions, judge_ranks
from bnncli.inference.sghmc import SghmcPlan
from bnncli.inference.simulation import GaussianRefit, SghmcRefit

FEW = ("--simulations", 50, "--draws", 19, "--examples", 40)


def test_exact_draws_pass_and_a_diagonal_gaussian_does_not(cli: Cli, small_run: Path) -> None:
    exact = cli("sbc", small_run, "--posterior", "hmc", *FEW, "--strict", "--json").expect(0)
    assert exact.json["verdict"]["is_calibrated"]
    cli("fit-laplace", small_run, "--structure", "diag", "--prior-precision", 0.1, "--name", "diag").expect(0)
    rough = cli("sbc", small_run, "--posterior", "diag", *FEW, "--strict", "--json")
    assert (rough.code, rough.json["error"]["code"]) == (3, "not_calibrated")
    worst = min(rough.json["quantities"], key=lambda one: one["p_value"])
    assert worst["p_value"] < 1e-4
    assert worst["name"] in rough.json["verdict"]["sentence"]


@pytest.mark.long
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
    cli(f"fit-{method}", small_run, "--epochs", 4, *more).expect(0)
    done = cli(
        "sbc", small_run, "--posterior", method, "--simulations", 30, "--draws", 19, "--examples", 60, "--json"
    ).expect(0)
    assert not done.json["verdict"]["is_calibrated"]  # four epochs are too few


@pytest.mark.parametrize("preconditioner", long_but(["base", "rmsprop", "none"], "base", mark=pytest.mark.nightly))
def test_sghmc_chains_keep_their_temperature(cli: Cli, small_run: Path, preconditioner: str) -> None:
    plan = ("--epochs", 30, "--chains", 2, "--preconditioner", preconditioner)
    cli("fit-sghmc", small_run, *plan, "--temperature", 0.1).expect(0)
    done = cli(
        "sbc", small_run, "--posterior", "sghmc", "--simulations", 20, "--draws", 9, "--examples", 30, "--json"
    ).expect(0)
    assert not done.json["verdict"]["is_calibrated"]
    joint = done.json["quantities"][0]
    assert (joint["name"], joint["fault"]) == ("log joint", "too high")


def test_a_fit_whose_preconditioner_is_gone_is_refused(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", 1, "--name", "other").expect(0)
    plan = ("--epochs", 4, "--chains", 2)
    cli("fit-sghmc", small_run, *plan, "--base", "other", "--name", "gone").expect(0)
    (small_run.with_name("small.bnn") / "posteriors" / "other.safetensors").unlink()
    cli("sbc", small_run, "--posterior", "gone", *FEW).expect(65, "gone.nc is stale: base")
    cli("sbc", small_run, "--posterior", "gone", *FEW, "--allow-stale").expect(
        65,
        "--posterior: gone is preconditioned by other, which must be fitted again too",
        "found nothing\nhint: run fit-sghmc again",
    )


@pytest.mark.long
def test_a_fit_that_flies_away_is_named_with_what_helps(cli: Cli, small_run: Path) -> None:
    plan = ("--epochs", 100, "--chains", 2, "--preconditioner", "none", "--momentum-decay", 1)
    cli("fit-sghmc", small_run, *plan, "--learning-rate", 50, "--name", "far").expect(0)
    cli("sbc", small_run, "--posterior", "far", *FEW).expect(
        70,
        "fitting far to simulated labels: the chains diverged",
        "fit the posterior with other options: use a --learning-rate below 50",
    )


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
    cli("fit-sghmc", small_run, *plan, *more).expect(0)
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
def test_latent_binary_fits_use_their_own_prior(cli: Cli, small_run: Path, words: tuple[object, ...]) -> None:
    cli("fit-lbbnn", small_run, "--epochs", 20, "--slab-sd", 2, "--prior-inclusion", 0.5, *words).expect(0)
    done = cli(
        "sbc", small_run, "--posterior", "lbbnn", "--simulations", 40, "--draws", 19, "--examples", 60, "--json"
    ).expect(0)
    assert not done.json["verdict"]["is_calibrated"]  # twenty steps are too few, and it says so
    assert "fitting lbbnn to 60 simulated labels: 20 steps move an inclusion logit by" in done.stderr
    assert [one["name"].split()[0] for one in done.json["quantities"]] == [
        *("log", "weight", "weight", "weight", "bias"),
        *4 * ["logit"],
    ]
    assert done.json["quantities"][0]["name"] == "log likelihood"


def test_latent_binary_fits_have_truths_from_their_prior_alone(cli: Cli, small_run: Path) -> None:
    cli("fit-lbbnn", small_run, "--epochs", 1, "--slab-sd", 2).expect(0)
    own = cli("sbc", small_run, "--posterior", "lbbnn", "--truth", "hmc")
    assert (own.code, own.stderr.count("\n")) == (2, 1)
    assert (
        "--truth: expected prior, because fit-lbbnn can be tested only on parameters drawn from its prior (lbbnn)"
        in own.stderr
    )
    cli("sbc", small_run, "--posterior", "hmc", "--truth", "lbbnn").expect(
        2, "or a last-layer posterior from laplace, refine, hmc, vi, swag, sghmc, merge; got lbbnn"
    )


def test_a_latent_binary_fit_that_learned_its_prior_is_refused(cli: Cli, small_run: Path) -> None:
    fit = ("fit-lbbnn", small_run, "--estimator", "concrete", "--epochs", 1, "--name")
    assert cli(*fit, "learned").code == cli(*fit, "kept", "--early-epochs", 0).code == 0
    cli("sbc", small_run, "--posterior", "learned").expect(
        2, "which learns its prior from the labels", "--early-epochs 0"
    )
    few = ("--simulations", 20, "--draws", 9, "--examples", 30)
    cli("sbc", small_run, "--posterior", "kept", *few).expect(0)


def test_epochs_that_fit_lbbnn_chose_are_chosen_anew_and_given_ones_kept() -> None:
    from bnncli.commands.sbc import read_options

    options = FitLbbnnOptions(prior_inclusion=0.2, estimator="mnf", flow_rate=1e-4, repeats=3)
    assert read_options(latent_header(options, 5000), 200) == options.resolved(200)
    given = replace(options, epochs=70)
    assert read_options(latent_header(given, 5000), 200) == given.resolved(200)


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
    cli("fit-laplace", small_run, "--center", "checkpoint", "--prior-precision", 3, "--name", "beside").expect(0)
    done = cli("sbc", small_run, *words)
    assert done.code in (2, 66)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "change", "code", "message"),
    [
        ("laplace", {"method": "ensemble"}, 2, "is from ensemble: its networks were trained separately"),
        ("hmc", {"layers": "all"}, 2, "is over --layers all"),
        ("hmc", {"prior_precision": None}, 2, "hmc records no prior"),
        ("lbbnn", {"sizes": [5, 4, 6, 3]}, 2, "lbbnn has --hidden 4,6"),
        ("lbbnn", {"sizes": None}, 65, "its header is damaged"),
        ("lbbnn", {"estimator": None}, 65, "its header is damaged"),
        ("lbbnn", {"params": None}, 65, "its header is damaged"),
    ],
    ids=str,
)
def test_a_fit_that_cannot_be_made_anew_is_refused_with_the_reason(
    cli: Cli, small_run: Path, name: str, change: dict[str, Any], code: int, message: str
) -> None:
    if name == "lbbnn":
        cli("fit-lbbnn", small_run, "--epochs", 1, "--slab-sd", 1).expect(0)

    def forged(document: dict[str, Any]) -> None:
        provenance = document["provenance"]
        for key, value in change.items():
            place = provenance if key == "params" else provenance["params"] if key == "estimator" else document["meta"]
            if value is None:
                del place[key]
            else:
                place[key] = value

    forge(file_of(small_run, name), forged)
    done = cli("sbc", small_run, "--posterior", name, "--allow-stale")
    assert (done.code, message in " ".join(done.stderr.split())) == (code, True), done.stderr


def test_fit_without_room_is_refused(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.system.memory.budget", lambda device: 1000)
    done = cli("sbc", small_run, "--posterior", "hmc", "--json").expect(69)
    assert "a fit of 18 parameters with a full covariance" in done.json["error"]["message"]


def test_a_truth_that_is_no_exact_draw_is_warned_of(cli: Cli, small_run: Path) -> None:
    cli("sbc", small_run, "--truth", "laplace", "--simulations", 20, "--draws", 9).expect(
        0, "--truth laplace is an approximation"
    )


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
    for _ in range(150):
        ranks = generator.integers(0, 20, size=(3, 40))
        doubted += not judge_ranks(
            [RankedQuantity("one", one, 19, law.p_value(one)) for one in ranks], "x", options
        ).is_calibrated
    assert doubted / 150 < 0.2 + 3 * (0.2 * 0.8 / 150) ** 0.5
    assert doubted / 150 > 0.05
