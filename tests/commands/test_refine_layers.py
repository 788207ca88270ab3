"""refine: options of flows, and layers of a network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_all
from kills import kill_midway
from problems.command_line import Cli
from problems.own_networks import TANH, extract_own

from bnncli.artifacts.files import read_header
from bnncli.session.inputs import open_posterior

QUICK = ("--epochs", "4", "--batch-size", "16", "--elbo-draws", "8")
TRUST = ("--trust-code",)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose Gaussian over all layers is there, of a network by the user's own code."""
    folder = tmp_path_factory.mktemp("layers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make()
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, beside which the test works."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ckpt.pt"


def make() -> None:
    """The run, in the working folder."""
    inputs = np.random.default_rng(0).normal(size=(80, 1, 2, 2)).astype(np.float32)
    labels = (inputs[:, 0, 0, 0] > 0).astype(np.int64)
    rows = {"train": slice(0, 40), "val": slice(40, 60), "test": slice(60, 80)}
    extract_own(TANH, {name: (inputs[some], labels[some]) for name, some in rows.items()})
    run_all(("fit-laplace", "ckpt.pt", "--prior-precision", "3", "--structure", "full", "--layers", "all", *TRUST))


def test_all_layers_are_refined_predicted_with_and_up_to_date(cli: Cli, run: Path) -> None:
    metrics = cli("refine", "ckpt.pt", "--layers", "all", *QUICK, *TRUST, "--json").expect(0).json["metrics"]
    assert (metrics["over_layers"], metrics["flow"], metrics["settings"]) == ("all", "radial", {})
    assert set(metrics["val"]) == {"network", "temperature", "base", "refine"}
    assert metrics["elbo_gain"]["value"] > 0
    meta = read_header(Path("ckpt.pt.bnn/posteriors/refine-all.safetensors")).meta
    assert [part["name"] for part in meta["param_layout"]] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert "up to date" in cli("refine", "ckpt.pt", "--base", "laplace-all", *QUICK).stderr
    cli("predict", "ckpt.pt", "--posterior", "refine-all", "--split", "test", *TRUST).expect(0)
    assert Path("ckpt.pt.bnn/predictions/refine-all.mc/test.h5").is_file()


def test_a_setting_of_affine_flows_chooses_them(cli: Cli, run: Path) -> None:
    done = cli("refine", "ckpt.pt", "--layers", "all", "--scale", "diag", *QUICK, *TRUST, "--json").expect(0)
    assert (done.json["metrics"]["flow"], done.json["metrics"]["settings"]["scale"]) == ("affine", "diag")


def test_the_elbo_over_a_network_is_of_few_draws(cli: Cli, run: Path) -> None:
    done = cli("refine", "ckpt.pt", "--layers", "all", "--epochs", "1", *TRUST, "--json").expect(0)
    assert done.json["metrics"]["elbo_draws"] in [32 * 2**look for look in range(5)]


@pytest.mark.parametrize(
    "words",
    [
        ("fit-laplace", "--prior-precision", "3", "--name", "new"),
        ("refine", *QUICK),
        ("hmc", "--base", "laplace-all"),
        ("hmc", "--prior-precision", "3"),  # no base tells how many parameters there are
        ("predict", "--posterior", "laplace-all", "--split", "test"),
        ("predict", "--posterior", "laplace-all", "--split", "test", "--integrator", "mc"),
    ],
    ids=" ".join,
)
def test_a_dry_run_says_what_memory_and_disk_the_work_takes(cli: Cli, run: Path, words: tuple[str, ...]) -> None:
    asked = (words[0], "ckpt.pt", *words[1:], "--layers", "all", *TRUST, "--dry-run")
    told, said = cli(*asked, "--json").json["outputs"][0], cli(*asked).stdout
    memory, disk = told["estimated_memory_bytes"], told["estimated_bytes"]
    assert (memory > 8 * 23, disk > 8 * 23) == (True, True)
    assert f"(needs about {max(1, memory >> 20)} MiB of memory and 1 MiB of disk, on cpu)" in said.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("predict", "--split", "test"), "predicting 20 examples with laplace-all (logit-mc): needs about", "use fewer --samples or"),
        (("diagnose",), "diagnose of 1 posteriors over a network: needs about", "fewer --layers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_work(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str, hint: str
) -> None:
    asked = (words[0], "ckpt.pt", "--posterior", "laplace-all", *words[1:], *TRUST)
    for module in ("system.memory", "session.prediction_memory"):
        monkeypatch.setattr(f"bnncli.{module}.budget", lambda device: 1000)
    refused = cli(*asked, "--json")
    assert (refused.code, hint in refused.json["error"]["hint"]) == (69, True)
    assert message in refused.json["error"]["message"]


def test_few_directions_are_recorded_and_reported(cli: Cli, run: Path) -> None:
    words = ("--layers", "all", "--subspace", "5", *QUICK)
    done = cli("refine", "ckpt.pt", *words, *TRUST, "--json").expect(0)
    assert (done.json["metrics"]["subspace"]["dimensions"], done.json["metrics"]["settings"]["scale"]) == (5, "kron")
    least, most = done.json["metrics"]["subspace"]["share_of_prior"]
    assert 0 < least <= most <= 1 + 1e-6
    header = read_header(Path("ckpt.pt.bnn/posteriors/refine-all.safetensors"))
    assert (header.meta["subspace"], header.provenance["params"]["subspace"]) == (5, 5)
    again = cli("refine", "ckpt.pt", *words)
    assert "up to date" in again.stderr
    assert "the flow acts in 5 directions" in again.stderr
    cli("predict", "ckpt.pt", "--posterior", "refine-all", "--split", "test", *TRUST).expect(0)


@pytest.mark.long
def test_a_killed_refine_of_a_network_resumes_to_the_same_bits(cli: Cli, run: Path) -> None:
    plan = ("--layers", "all", "--flow", "radial", "--epochs", "60", "--batch-size", "16", "--patience", "0")
    plan = (*plan, "--elbo-draws", "8", *TRUST)
    kill_midway(run, "cut", "refine", *plan)
    again = cli("refine", "ckpt.pt", *plan, "--name", "cut", "--resume", "--json")
    whole = cli("refine", "ckpt.pt", *plan, "--name", "whole", "--json")
    assert "resuming" in again.stderr
    assert again.json["outputs"][0]["content_digest"] == whole.json["outputs"][0]["content_digest"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--layers", "3"), 66, "hint: bnncli fit-laplace ckpt.pt --layers 3\n"),
        (("--layers", "3", "--base", "laplace-all"), 2, "--layers 3: the base"),
        (("--layers", "all", "--scale", "kron", *TRUST), 2, "--scale kron needs a single weight matrix"),
        (("--layers", "all", "--subspace", "24", *TRUST), 2, "--subspace: expected 1 to 23 (the number of parameters)"),
        (
            ("--layers", "all", "--subspace", "2", "--space", "weight"),
            2,
            "--subspace needs the base's whitened coordinates",
        ),
        (("--base", "map", *TRUST), 65, "expected a gaussian posterior"),
        (("--base", "drawn", *TRUST), 65, "hint: bnncli fit-laplace ckpt.pt --layers all --trust-code"),
        (("--base", "prior", *TRUST), 2, "--trust-code is for --layers all or a pattern"),
        (("--layers", "all"), 77, "add --trust-code"),
    ],
)
@pytest.mark.long
def test_what_does_not_fit_is_one_line(cli: Cli, run: Path, words: tuple[str, ...], code: int, message: str) -> None:
    if "drawn" in words:
        fit = ("fit-laplace", "ckpt.pt", "--prior-precision", "3", "--layers", "all", "--draws", "2")
        cli(*fit, "--name", "drawn", *TRUST).expect(0)
    cli("refine", "ckpt.pt", *words, *QUICK).expect(code, message)


def test_the_prior_is_refined_over_the_layers_of_its_laplace(cli: Cli, run: Path) -> None:
    done = cli(
        "refine", "ckpt.pt", "--layers", "all", "--base", "prior", "--flow", "radial", *QUICK, *TRUST, "--json"
    ).expect(0)
    assert "base" not in done.json["metrics"]["val"]


QUICK_HEAD = ("--epochs", 1, "--length", 2, "--elbo-draws", 8)


def refined(cli: Cli, small_run: Path, *words: object) -> Path:
    cli("refine", small_run, "--name", "flow", *QUICK_HEAD, *words).expect(0)
    return small_run.with_name("small.bnn") / "posteriors" / "flow.safetensors"


def test_radial_named_with_its_length_and_epochs_keeps_the_published_plan(cli: Cli, small_run: Path) -> None:
    words = ("--flow", "radial", "--length", 5, "--epochs", 20, "--name", "published")
    cli("refine", small_run, *words).expect(0)
    path = small_run.with_name("small.bnn") / "posteriors" / "published.safetensors"
    params = cli("inspect", path, "--json").json["provenance"]["params"]
    plan = {"batch_size": 128, "learning_rate": 0.001, "num_draws": 1, "space": "whitened", "scale": None}
    assert plan.items() <= params.items()


@pytest.mark.parametrize(("megabytes", "scale"), [(10, "low-rank"), (100, "kron")])
def test_low_rank_takes_the_place_of_kron_where_that_does_not_fit(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megabytes: int, scale: str
) -> None:
    generator, run = np.random.default_rng(0), tmp_path / "wide"
    arrays = {"features_train": generator.normal(size=(40, 300)), "labels_train": np.arange(40) % 2}
    np.savez(tmp_path / "wide.npz", **arrays, head_weight=np.zeros((2, 300)), head_bias=np.zeros(2))
    cli("extract-features", run, "--from-npz", tmp_path / "wide.npz").expect(0)
    cli("fit-laplace", run, "--structure", "diag", "--prior-precision", 1).expect(0)
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: megabytes * 10**6)
    done = cli("refine", run, *QUICK_HEAD, "--json").expect(0)
    assert done.json["metrics"]["settings"]["scale"] == scale
    assert ("--scale low-rank: --scale kron, the default, needs about 7.5 MiB" in done.stderr) == (scale == "low-rank")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--flow", "radial", "--rank", 4), "--rank: not supported by radial layers; supported by: affine"),
        (("--flow", "planar", "--scale", "kron"), "--scale: not supported by planar layers; supported by: affine"),
        (("--flow", "affine", "--rank", 4), "--rank: not supported with --scale kron"),
        (("--flow", "affine", "--scale", "low-rank", "--rank", 99), "--rank: expected 1 to 18"),
        (("--flow", "sylvester", "--hidden", 4), "supported by: iaf, realnvp, spline"),
        (("--flow", "householder", "--space", "whitened"), "--space: householder layers support weight space"),
        (("--rank", 0), "--rank: expected a number of at least 1"),
    ],
)
def test_settings_of_other_flows_are_refused(cli: Cli, small_run: Path, words: tuple[object, ...], why: str) -> None:
    cli("refine", small_run, "--name", "flow", *words).expect(2, why)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--flow", "affine", "--scale", "low-rank", "--rank", 3), {"scale": "low-rank", "rank": 3}),
        (("--flow", "spline", "--hidden", 5), {"hidden": 5}),
        (("--flow", "householder"), {}),
    ],
)
def test_saved_flow_is_loaded(cli: Cli, small_run: Path, words: tuple[object, ...], settings: dict[str, Any]) -> None:
    posterior, header = open_posterior(refined(cli, small_run, *words))
    assert header.meta["settings"] == settings
    assert header.meta["maps"] == posterior.layers[0].maps
    assert [getattr(layer, "index", i) for i, layer in enumerate(posterior.layers)] == [0, 1]
    theta, log_density = posterior.from_noise(posterior.noise(6, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(posterior.log_density(theta), log_density, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("words", "revision"),
    [(("--flow", "affine"), 4), (("--flow", "affine", "--scale", "block"), 5), (("--flow", "radial"), 5)],
)
def test_revisions_of_changed_training(cli: Cli, small_run: Path, words: tuple[str, ...], revision: int) -> None:
    """The gradients of a factor for each output were biased once; those of radial layers rounded otherwise."""
    header = read_header(refined(cli, small_run, *words, "--epochs", 1, "--length", 1))
    assert header.provenance["algo_rev"] == revision
