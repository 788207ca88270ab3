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

from bnncli.artifacts.files import read_header
from bnncli.session.inputs import open_posterior

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
"""
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
    Path("net.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(80, 1, 2, 2)).astype(np.float32)
    for name, rows in {"train": slice(0, 40), "val": slice(40, 60), "test": slice(60, 80)}.items():
        np.savez(f"{name}.npz", x=inputs[rows], y=(inputs[rows, 0, 0, 0] > 0).astype(np.int64))
    space: dict[str, object] = {}
    exec(NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")  # type: ignore[operator]
    splits = [word for name in ("train", "val", "test") for word in ("--data", f"{name}=npz:{name}.npz")]
    fit = ("fit-laplace", "ckpt.pt", "--prior-precision", "3", "--structure", "full", "--layers", "all", *TRUST)
    run_all(("extract-features", "ckpt.pt", "--model", "net.py:make", *splits), fit)


def test_all_layers_are_refined_predicted_with_and_up_to_date(cli: Cli, run: Path) -> None:
    done = cli("refine", "ckpt.pt", "--layers", "all", *QUICK, *TRUST, "--json")
    assert done.code == 0, done.stderr
    metrics = done.json["metrics"]
    assert (metrics["over_layers"], metrics["flow"], metrics["settings"]) == ("all", "radial", {})
    assert set(metrics["val"]) == {"network", "temperature", "base", "refine"}
    assert metrics["elbo_gain"]["value"] > 0
    meta = read_header(Path("ckpt.pt.bnn/posteriors/refine-all.safetensors")).meta
    assert [part["name"] for part in meta["param_layout"]] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    again = cli("refine", "ckpt.pt", "--base", "laplace-all", *QUICK)  # which says the layers, and runs no code
    assert "up to date" in again.stderr
    assert cli("predict", "ckpt.pt", "--posterior", "refine-all", "--split", "test", *TRUST).code == 0
    assert Path("ckpt.pt.bnn/predictions/refine-all.mc/test.h5").is_file()


def test_a_setting_of_affine_flows_chooses_them(cli: Cli, run: Path) -> None:
    done = cli("refine", "ckpt.pt", "--layers", "all", "--scale", "diag", *QUICK, *TRUST, "--json")
    assert done.code == 0, done.stderr
    assert (done.json["metrics"]["flow"], done.json["metrics"]["settings"]["scale"]) == ("affine", "diag")


def test_the_elbo_over_a_network_is_of_few_draws(cli: Cli, run: Path) -> None:
    done = cli("refine", "ckpt.pt", "--layers", "all", "--epochs", "1", *TRUST, "--json")
    assert done.code == 0, done.stderr
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
    assert (memory > 20 << 20, disk > 8 * 23) == (True, True)
    assert f"(needs about {memory >> 20} MiB of memory and 1 MiB of disk, on cpu)" in said.replace("\n", "")


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
        monkeypatch.setattr(f"bnncli.{module}.budget", lambda device: 10 << 20)
    refused = cli(*asked, "--json")
    assert (refused.code, hint in refused.json["error"]["hint"]) == (69, True)
    assert message in refused.json["error"]["message"]


def test_few_directions_are_recorded_and_reported(cli: Cli, run: Path) -> None:
    words = ("--layers", "all", "--subspace", "5", *QUICK)
    done = cli("refine", "ckpt.pt", *words, *TRUST, "--json")
    assert done.code == 0, done.stderr
    assert (done.json["metrics"]["subspace"]["dimensions"], done.json["metrics"]["settings"]["scale"]) == (5, "kron")
    least, most = done.json["metrics"]["subspace"]["share_of_prior"]
    assert 0 < least <= most <= 1 + 1e-6
    header = read_header(Path("ckpt.pt.bnn/posteriors/refine-all.safetensors"))
    assert (header.meta["subspace"], header.provenance["params"]["subspace"]) == (5, 5)
    again = cli("refine", "ckpt.pt", *words)
    assert "up to date" in again.stderr
    assert "the flow acts in 5 directions" in again.stderr
    predicted = cli("predict", "ckpt.pt", "--posterior", "refine-all", "--split", "test", *TRUST)
    assert predicted.code == 0, predicted.stderr


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
        assert cli(*fit, "--name", "drawn", *TRUST).code == 0
    refused = cli("refine", "ckpt.pt", *words, *QUICK)
    assert (refused.code, message in refused.stderr) == (code, True), refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_prior_is_refined_over_the_layers_of_its_laplace(cli: Cli, run: Path) -> None:
    done = cli("refine", "ckpt.pt", "--layers", "all", "--base", "prior", "--flow", "radial", *QUICK, *TRUST, "--json")
    assert done.code == 0, done.stderr
    assert "base" not in done.json["metrics"]["val"]


QUICK_HEAD = ("--epochs", 1, "--length", 2, "--elbo-draws", 8)


def refined(cli: Cli, small_run: Path, *words: object) -> Path:
    done = cli("refine", small_run, "--name", "flow", *QUICK_HEAD, *words)
    assert done.code == 0, done.stderr
    return small_run.with_name("small.bnn") / "posteriors" / "flow.safetensors"


def test_params_record_the_settings_that_were_resolved(cli: Cli, small_run: Path) -> None:
    path = refined(cli, small_run, "--flow", "affine", "--scale", "low-rank")
    params = cli("inspect", path, "--json").json["provenance"]["params"]
    assert (params["scale"], params["rank"], params["hidden"], params["space"]) == ("low-rank", 16, None, "whitened")


def test_the_flow_is_affine_where_none_is_named(cli: Cli, small_run: Path) -> None:
    path = refined(cli, small_run)
    meta = cli("inspect", path, "--json").json
    params = meta["provenance"]["params"]
    assert (meta["meta"]["flow"], params["scale"], params["rank"]) == ("affine", "kron", None)
    assert params["learning_rate"] == 0.03  # its own plan, not that of radial
    aloud = cli("refine", small_run, "--name", "flow", *QUICK_HEAD, "--flow", "affine")
    assert "up to date" in aloud.stderr


def test_radial_named_with_its_length_and_epochs_keeps_the_published_plan(cli: Cli, small_run: Path) -> None:
    words = ("--flow", "radial", "--length", 5, "--epochs", 20, "--name", "published")
    assert cli("refine", small_run, *words).code == 0
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
    assert cli("extract-features", run, "--from-npz", tmp_path / "wide.npz").code == 0
    assert cli("fit-laplace", run, "--structure", "diag", "--prior-precision", 1).code == 0
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: megabytes * 10**6)
    done = cli("refine", run, *QUICK_HEAD, "--json")
    assert done.code == 0, done.stderr
    assert done.json["metrics"]["settings"]["scale"] == scale
    assert ("--scale low-rank: --scale kron, the default, needs about 7.5 MiB" in done.stderr) == (scale == "low-rank")


def test_the_flows_own_default_said_aloud_is_the_same_request(cli: Cli, small_run: Path) -> None:
    refined(cli, small_run, "--flow", "affine")
    done = cli(
        "refine",
        small_run,
        "--name",
        "flow",
        *QUICK_HEAD,
        "--flow",
        "affine",
        "--scale",
        "kron",
        "--space",
        "whitened",
    )
    assert done.code == 0
    assert "up to date" in done.stderr


def test_another_setting_is_another_request(cli: Cli, small_run: Path) -> None:
    refined(cli, small_run, "--flow", "affine")
    assert cli("refine", small_run, "--name", "flow", *QUICK_HEAD, "--flow", "affine", "--scale", "low-rank").code == 73


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
def test_a_setting_that_the_flow_does_not_take_is_refused(
    cli: Cli, small_run: Path, words: tuple[object, ...], why: str
) -> None:
    done = cli("refine", small_run, "--name", "flow", *words)
    assert done.code == 2
    assert why in done.stderr


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--flow", "affine", "--scale", "low-rank", "--rank", 3), {"scale": "low-rank", "rank": 3}),
        (("--flow", "spline", "--hidden", 5), {"hidden": 5}),
        (("--flow", "householder"), {}),
    ],
)
def test_a_saved_flow_loads_and_has_the_same_density(
    cli: Cli, small_run: Path, words: tuple[object, ...], settings: dict[str, Any]
) -> None:
    posterior, header = open_posterior(refined(cli, small_run, *words))
    assert header.meta["settings"] == settings
    assert header.meta["maps"] == posterior.layers[0].maps
    assert [getattr(layer, "index", i) for i, layer in enumerate(posterior.layers)] == [0, 1]
    theta, log_density = posterior.from_noise(posterior.noise(6, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(posterior.log_density(theta), log_density, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("words", "revision"),
    [(("--flow", "affine"), 2), (("--flow", "affine", "--scale", "block"), 3), (("--flow", "radial"), 3)],
)
def test_what_was_trained_otherwise_before_is_made_anew(
    cli: Cli, small_run: Path, words: tuple[str, ...], revision: int
) -> None:
    """The gradients of a factor for each output were biased once; those of radial layers rounded otherwise."""
    header = read_header(refined(cli, small_run, *words, "--epochs", 1, "--length", 1))
    assert header.provenance["algo_rev"] == revision
