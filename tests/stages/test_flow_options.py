"""refine's flow options on the command line: what is recorded, what is refused, what a saved flow gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.session.inputs import open_posterior

QUICK = ("--epochs", 1, "--length", 2, "--elbo-draws", 8)


def refined(cli: Cli, small_run: Path, *words: object) -> Path:
    done = cli("refine", small_run, "--name", "flow", *QUICK, *words)
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
    aloud = cli("refine", small_run, "--name", "flow", *QUICK, "--flow", "affine")
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
    done = cli("refine", run, *QUICK, "--json")
    assert done.code == 0, done.stderr
    assert done.json["metrics"]["settings"]["scale"] == scale
    assert ("--scale low-rank: --scale kron, the default, needs about 7.5 MiB" in done.stderr) == (scale == "low-rank")


def test_the_flows_own_default_said_aloud_is_the_same_request(cli: Cli, small_run: Path) -> None:
    refined(cli, small_run, "--flow", "affine")
    done = cli(
        "refine", small_run, "--name", "flow", *QUICK, "--flow", "affine", "--scale", "kron", "--space", "whitened"
    )
    assert done.code == 0
    assert "up to date" in done.stderr


def test_another_setting_is_another_request(cli: Cli, small_run: Path) -> None:
    refined(cli, small_run, "--flow", "affine")
    assert cli("refine", small_run, "--name", "flow", *QUICK, "--flow", "affine", "--scale", "low-rank").code == 73


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
