"""fit-laplace over whole networks: kinds of curvature, ranks, memory, and searches for the prior, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from safetensors.torch import load_file

from bnncli.artifacts.files import read_header
from bnncli.commands.fit_laplace.shared import format_count

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
"""
FIT = ("fit-laplace", "ckpt.pt", "--layers", "all")
GIVEN = ("--prior-precision", "3")
SUBNETWORK = ("--structure", "subnetwork", "--size", 5)


@pytest.fixture
def checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose features are there, with a val split; the test works beside it."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(80, 1, 2, 2)).astype(np.float32)
    labels = (inputs[:, 0, 0, 0] + 0.5 * rng.normal(size=80) > 0).astype(np.int64)
    for name, rows in (("train", slice(0, 50)), ("val", slice(50, 80))):
        np.savez(f"{name}.npz", x=inputs[rows], y=labels[rows])
    space: dict[str, Any] = {}
    exec(NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")
    splits = [word for name in ("train", "val") for word in ("--data", f"{name}=npz:{name}.npz")]
    assert cli("extract-features", "ckpt.pt", "--model", "net.py:make", *splits).code == 0
    return tmp_path / "ckpt.pt"


def meta_of(name: str) -> dict[str, Any]:
    return dict(read_header(Path(f"ckpt.pt.bnn/posteriors/{name}.safetensors")).meta)


def test_kinds_and_ranks_are_fitted_and_recorded(cli: Cli, checkpoint: Path) -> None:
    for name, words in (
        ("ggn", ()),
        ("diag-fisher", ("--curvature", "fisher", "--structure", "diag")),
        ("low-rank", ("--structure", "low-rank", "--rank", "4")),
    ):
        done = cli(*FIT, *GIVEN, *words, "--trust-code", "--name", name)
        assert done.code == 0, done.stderr
        assert ("4 largest eigenvalues" in done.stderr) == (name == "low-rank")
        assert "(the effective number)" in done.stderr
    metas = {name: meta_of(name) for name in ("ggn", "diag-fisher", "low-rank")}
    assert [meta["curvature"] for meta in metas.values()] == ["ggn", "fisher", "ggn"]
    assert [meta["structure"] for meta in metas.values()] == ["full", "diag", "low-rank"]
    assert metas["low-rank"]["metrics"]["rank"] == 4
    assert 0 < metas["low-rank"]["metrics"]["captured_trace"] <= 1
    assert all(0 < meta["metrics"]["effective_params"] < 23 for meta in metas.values())
    alone = cli("fit-laplace", "ckpt.pt", "--layers", "1.bias+3", *GIVEN, "--structure", "kron", "--trust-code")
    assert "3 of 11 parameters have no Kronecker factors and use only their diagonal" in alone.stderr
    nll = {name: meta["metrics"]["val_nll_laplace"] for name, meta in metas.items()}
    assert len(set(nll.values())) == 3


def test_a_subnetwork_is_fitted_and_predicts_and_its_parameters_are_told(cli: Cli, checkpoint: Path) -> None:
    done = cli(*FIT, *GIVEN, *SUBNETWORK, "--trust-code", "--json")
    assert done.code == 0, done.stderr
    assert "5 of 23 parameters vary" in done.stderr
    metrics = done.json["metrics"]
    assert (metrics["subnetwork_size"], sum(metrics["subnetwork_params"].values())) == (5, 5)
    tensors = load_file("ckpt.pt.bnn/posteriors/laplace-all.safetensors")
    assert (tensors["cov.varying"].shape, tensors["cov.scale_tril"].shape) == ((5,), (5, 5))
    predicted = cli(
        "predict",
        "ckpt.pt",
        "--integrator",
        "mc",
        "--integrator",
        "logit-mc",
        "--integrator",
        "probit",
        "--split",
        "val",
        "--trust-code",
    )
    assert predicted.code == 0, predicted.stderr


def test_what_fixes_parameters_is_no_base_and_has_no_density(cli: Cli, checkpoint: Path) -> None:
    assert cli(*FIT, *GIVEN, *SUBNETWORK, "--trust-code").code == 0
    for command in ("refine", "hmc"):
        refused = cli(command, "ckpt.pt", "--layers", "all", "--base", "laplace-all", "--trust-code")
        assert (refused.code, "fixes all but 5 parameters" in refused.stderr) == (2, True), refused.stderr
    judged = cli("diagnose", "ckpt.pt", "--trust-code", "--json").json
    entry = judged["posteriors"]["laplace-all"]
    assert entry["doubts"] == ["it fixes all but 5 parameters"]
    assert (entry["elbo"]["value"], entry["val_nll"]["value"] > 0) == (None, True)
    assert "--prior-precision 3" in judged["verdict"]["run"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(1634.2, "1,634"), (99.96, "100"), (307.4, "307"), (8.034, "8.03"), (0.0, "0"), (-0.25, "-0.25")],
)
def test_numbers_of_directions_are_written_out(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.long
def test_a_posterior_far_from_its_network_is_told_by_a_first_look(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.evaluation.distances._MOST_VALUES", 23 * 70)
    monkeypatch.setattr("bnncli.inference.elbo._FAR_NATS", 13.0)
    for name, precision in (("near", 10), ("far", 0.1)):
        words = ("--structure", "diag", "--prior-precision", precision, "--name", name)
        assert cli(*FIT, *words, "--trust-code").code == 0
    judged = cli("diagnose", "ckpt.pt", "--trust-code", "--json").json
    told = {name: judged["posteriors"][name] for name in ("near", "far")}
    assert (told["near"]["draws"] >= 512, told["far"]["draws"]) == (True, 32)
    assert told["far"]["log_weight_sd"]["value"] > 13
    assert judged["pairs"][0]["n"] == [70, 70]
    assert cli(*FIT, "--structure", "full", *GIVEN, "--trust-code", "--name", "a-full").code == 0
    assert cli(*FIT, "--structure", "diag", *GIVEN, "--trust-code", "--name", "z-diag").code == 0
    monkeypatch.setattr("bnncli.evaluation.verdict.CLOSE_LOG_WEIGHT_SD", 0.01)
    asked = ("diagnose", "ckpt.pt", "--posterior", "a-full", "--posterior", "z-diag", "--trust-code", "--json")
    said = cli(*asked).json
    spreads = {name: said["posteriors"][name]["log_weight_sd"]["value"] for name in ("a-full", "z-diag")}
    assert spreads["z-diag"] < spreads["a-full"]
    assert "--base z-diag" in said["verdict"]["run"]


def test_a_subnetwork_that_does_not_fit_is_refused_before_work(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = cli(*FIT, *GIVEN, "--structure", "subnetwork", "--size", 24, "--trust-code")
    assert (more.code, "--size: expected 1 to 23" in more.stderr) == (2, True), more.stderr
    planned = cli(*FIT, *GIVEN, *SUBNETWORK, "--trust-code", "--dry-run", "--json")
    assert planned.json["outputs"][0]["estimated_bytes"] == 8 * 5**2 + 16 * 23
    for module in ("bnncli.inference.network_memory", "bnncli.system.memory"):
        monkeypatch.setattr(f"{module}.budget", lambda device: 60_000)
    monkeypatch.setattr("bnncli.inference.network_memory._COPIES", 20)  # of so small a matrix the rest is as large
    monkeypatch.setattr("bnncli.inference.network_memory._FIRST_USE", 0)
    assert cli(*FIT, *GIVEN, *SUBNETWORK[:-1], 23, "--trust-code", "--dry-run").code == 69
    assert cli(*FIT, *GIVEN, *SUBNETWORK, "--trust-code", "--dry-run").code == 0


@pytest.mark.long
def test_draws_stand_in_the_place_of_the_gaussian_that_whitens_them(cli: Cli, checkpoint: Path) -> None:
    done = cli(*FIT, "--structure", "diag", "--draws", 6, "--trust-code", "--json")
    assert done.code == 0, done.stderr
    metrics, meta = done.json["metrics"], meta_of("laplace-all")
    assert (meta["type"], meta["metrics"]["structure"], meta["criterion"]) == ("linear-draws", "diag", "val")
    assert 0 < metrics["solver_residual"] <= 0.02
    assert metrics["solver_passes"] == metrics["solver_steps"] + 2
    assert "6 draws from the full Gauss-Newton Gaussian" in done.stderr
    assert metrics["val"]["laplace"]["samples"] == 6
    predict = ("predict", "ckpt.pt", "--split", "val", "--trust-code")
    predicted = cli(*predict, "--integrator", "logit-mc", "--integrator", "mc", "--integrator", "probit")
    assert predicted.code == 0, predicted.stderr
    for words, message in (
        (("--samples", 7), "expected at most 6"),
        (("--integrator", "importance"), "does not work for a linear-draws posterior"),
    ):
        refused = cli(*predict, "--posterior", "laplace-all", *words, "--force")
        assert (refused.code, message in refused.stderr) == (2, True), refused.stderr
    assert "expected a gaussian posterior" in cli("refine", "ckpt.pt", "--layers", "all", "--trust-code").stderr
    entry = cli("diagnose", "ckpt.pt", "--trust-code", "--json").json["posteriors"]["laplace-all"]
    assert (entry["elbo"]["reason"], entry["val_nll"]["value"] > 0) == ("draws have no density", True)
    assert cli(*FIT, "--structure", "diag", *GIVEN, "--draws", 1, "--trust-code", "--name", "single").code == 0
    single = cli("diagnose", "ckpt.pt", "--layers", "all", "--trust-code")
    assert (single.code, "at least two draws from each posterior; single has one" in single.stdout) == (0, True), single
    planned = cli(*FIT, "--draws", 9, "--trust-code", "--dry-run", "--json", "--name", "more")
    assert planned.json["outputs"][0]["estimated_bytes"] == 4 * 9 * 23 + 16 * 23


def test_searches_by_val_and_by_the_marginal_likelihood_choose_a_prior(cli: Cli, checkpoint: Path) -> None:
    chosen = {}
    for criterion in ("val", "marglik"):
        assert cli(*FIT, "--prior-precision", criterion, "--trust-code", "--name", criterion).code == 0
        meta = meta_of(criterion)
        values = dict(meta["curve"])
        assert min(values, key=lambda key: values[key]) == meta["prior_precision"]
        chosen[criterion] = meta["prior_precision"]
    assert len(set(chosen.values())) == 2


def test_layers_have_precisions_of_their_own(cli: Cli, checkpoint: Path) -> None:
    done = cli(*FIT, "--precision-per", "layer", "--trust-code")
    assert (done.code, "prior precision per layer: 1 " in done.stderr) == (0, True), done.stderr
    meta = meta_of("laplace-all")
    own = meta["metrics"]["layer_precisions"]
    assert meta["part_precisions"] == pytest.approx([own["1"], own["1"], own["3"], own["3"]])
    assert meta["metrics"]["layer_precisions_gain"] > 0
    assert "up to date" in cli(*FIT, "--precision-per", "layer").stderr
    predicted = cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "val", "--trust-code")
    assert predicted.code == 0, predicted.stderr


def test_an_indefinite_hessian_names_the_ggn(cli: Cli, checkpoint: Path) -> None:
    refused = cli(*FIT, "--curvature", "hessian", "--prior-precision", "1e-6", "--trust-code")
    assert (refused.code, "use --curvature ggn" in refused.stderr) == (70, True)
    done = cli(*FIT, "--curvature", "hessian", "--prior-precision", "30", "--trust-code")
    assert (done.code, meta_of("laplace-all")["curvature"]) == (0, "hessian")


def test_a_dry_run_plans_without_reading_all_data(cli: Cli, checkpoint: Path) -> None:
    planned = cli(*FIT, *GIVEN, "--trust-code", "--dry-run", "--json")
    assert planned.code == 0
    assert planned.json["outputs"][0]["estimated_bytes"] == 8 * 23**2 + 16 * 23
    assert "--trust-code" in cli(*FIT, *GIVEN, "--dry-run").stderr
    assert cli(*FIT, *GIVEN, "--trust-code").code == 0
    again = cli(*FIT, *GIVEN, "--dry-run", "--json")  # up to date: no code runs
    assert (
        again.json["outputs"][0]["estimated_bytes"]
        == Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors").stat().st_size
    )


def test_what_does_not_fit_is_refused_with_what_does(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bnncli.inference.network_memory", "bnncli.system.memory"):
        monkeypatch.setattr(f"{module}.budget", lambda device: 28_000)
    monkeypatch.setattr("bnncli.inference.network_memory._FIRST_USE", 0)
    refused = cli(*FIT, *GIVEN, "--structure", "full", "--trust-code")
    assert (refused.code, "which fits" in refused.stderr) == (69, True), refused.stderr
    assert cli(*FIT, *GIVEN, "--trust-code").code == 0
    assert meta_of("laplace-all")["structure"] != "full"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--curvature", "hessian", "--structure", "diag"), "expected full or subnetwork; got 'diag'"),
        (("--curvature", "fisher", "--center", "mode"), "works only with --center checkpoint"),
        (("--precision-per", "layer", "--prior-precision", "val"), "by marginal likelihood"),
        (("--rank", "3"), "is for --structure low-rank"),
        (("--size", "3"), "is for --structure subnetwork"),
        ((*SUBNETWORK, "--draws", "3"), "drop --curvature and --structure subnetwork"),
        ((*SUBNETWORK, "--bias-precision", "3"), "give --prior-precision a number"),
        ((*SUBNETWORK, "--center", "mode"), "give --prior-precision val or a number"),
    ],
)
def test_what_does_not_belong_together_is_told(cli: Cli, words: tuple[str | int, ...], message: str) -> None:
    refused = cli(*FIT, *words, "--trust-code")
    assert (refused.code, message in refused.stderr) == (2, True), refused.stderr


def test_the_last_layer_has_one_curvature(cli: Cli) -> None:
    refused = cli("fit-laplace", "ckpt.pt", "--curvature", "fisher")
    assert (refused.code, "for the last layer, ggn equals the Hessian" in refused.stderr) == (2, True)
    refused = cli("fit-laplace", "ckpt.pt", "--draws", "3")
    assert (refused.code, "for the last layer the Gaussian itself is stored" in refused.stderr) == (2, True)
