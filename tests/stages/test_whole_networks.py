"""Posteriors over other layers than the last, from the command line: fitted, predicted with, and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
"""
FIT = ("fit-laplace", "ckpt.pt", "--prior-precision", "3")


@pytest.fixture
def checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose features are there, of a network by the user's own code; the test works beside it."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 1, 2, 2)).astype(np.float32)
    for name, rows in (("train", slice(0, 40)), ("test", slice(40, 60))):
        np.savez(f"{name}.npz", x=inputs[rows], y=(inputs[rows, 0, 0, 0] > 0).astype(np.int64))
    space: dict[str, object] = {}
    exec(NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")  # type: ignore[operator]
    splits = [word for name in ("train", "test") for word in ("--data", f"{name}=npz:{name}.npz")]
    assert cli("extract-features", "ckpt.pt", "--model", "net.py:make", *splits).code == 0
    return tmp_path / "ckpt.pt"


def test_the_last_layer_by_its_name_is_the_last_layer(cli: Cli, checkpoint: Path) -> None:
    assert cli(*FIT).code == 0
    named = cli(*FIT, "--layers", "3", "--center", "mode", "--trust-code", "--name", "named")
    assert named.code == 0
    folder = Path("ckpt.pt.bnn/posteriors")
    one, other = (read_header(folder / f"{name}.safetensors").meta for name in ("laplace", "named"))
    assert (one.get("layers"), other["layers"]) == (None, "3")
    evidence = [meta["metrics"]["log_marginal_likelihood"] for meta in (one, other)]
    assert evidence[0] == pytest.approx(evidence[1], abs=1e-4)
    asked = ("predict", "ckpt.pt", "--split", "test", "--integrator", "probit", "--trust-code")
    assert cli(*asked, "--posterior", "laplace", "--posterior", "named").code == 0
    probs = [
        read_predictions(Path(f"ckpt.pt.bnn/predictions/{name}.probit/test.h5")).probs for name in ("laplace", "named")
    ]
    np.testing.assert_allclose(probs[0], probs[1], atol=1e-5)


def test_all_layers_are_fitted_predicted_with_and_up_to_date(cli: Cli, checkpoint: Path) -> None:
    assert cli(*FIT, "--layers", "all", "--trust-code").code == 0
    meta = read_header(Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors")).meta
    assert [part["name"] for part in meta["param_layout"]] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert (meta["center"], meta["structure"]) == ("checkpoint", "full")
    assert "up to date" in cli(*FIT, "--layers", "all").stderr  # which runs no code
    refused = cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test")
    assert (refused.code, "add --trust-code" in refused.stderr) == (77, True)
    skipped = cli("predict", "ckpt.pt", "--split", "test")  # nobody named it
    assert (skipped.code, "skipping laplace-all with logit-mc" in skipped.stderr) == (0, True)
    assert cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code").code == 0
    assert Path("ckpt.pt.bnn/predictions/laplace-all.logit-mc/test.h5").is_file()  # of the linearised network


@pytest.mark.parametrize("most_full", [pytest.param(2048, marks=pytest.mark.long), 0])
def test_the_mode_of_all_layers_is_found_and_told(
    cli: Cli, checkpoint: Path, most_full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("climb", "prior_precision"):
        monkeypatch.setattr(f"bnncli.inference.{module}.MAX_FULL_PRECONDITIONER", most_full)
    words = ("--layers", "all", "--center", "mode", "--prior-precision", "marglik", "--trust-code")
    done = cli("fit-laplace", "ckpt.pt", *words, "--json")
    assert done.code == 0, done.stderr
    metrics = done.json["metrics"]
    assert metrics["prior_precision_compared_at"] == ("mode" if most_full else "checkpoint")
    assert ("was chosen around the checkpoint's weights" in done.stderr) == (most_full == 0)
    assert metrics["newton_decrement"] < 0.1
    assert metrics["mode_shortfall"] is None
    assert f"from the mode, after {metrics['mode_passes']:,} passes over the data" in done.stderr
    assert metrics["mode_distance_in_sd"] > 0.1


def test_a_centre_beside_the_mode_is_told(cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*FIT, "--layers", "all", "--center", "mode", "--trust-code")
    monkeypatch.setattr("bnncli.inference.mode.MOST_PASSES", 8)
    monkeypatch.setattr("bnncli.inference.mode.NEAR", 100)
    done = cli(*words)
    assert done.code == 0, done.stderr
    assert "posterior standard deviations from the mode (all 23 parameters together; a draw is about 5 away): the limit of 8 passes was reached" in (
        done.stderr.replace("\n", " ")
    )  # fmt: skip
    monkeypatch.setattr("bnncli.inference.mode.NEAR", 0)
    monkeypatch.setattr("bnncli.inference.mode.MOST_PASSES", 6)
    refused = cli(*words, "--name", "other", "--seed", "3")
    assert (refused.code, "error: found no mode after" in refused.stderr) == (70, True)


def test_code_runs_only_where_it_is_trusted_and_the_same(cli: Cli, checkpoint: Path) -> None:
    refused = cli(*FIT, "--layers", "all")
    assert (refused.code, "add --trust-code" in refused.stderr) == (77, True)
    Path("net.py").write_text(NETWORK + "\n")
    changed = cli(*FIT, "--layers", "all", "--trust-code")
    assert (changed.code, "net.py has changed" in changed.stderr) == (65, True)


def test_data_that_changed_are_told(cli: Cli, checkpoint: Path) -> None:
    np.savez("train.npz", x=np.zeros((40, 1, 2, 2), np.float32), y=np.arange(40) % 2)
    changed = cli(*FIT, "--layers", "all", "--trust-code")
    assert (changed.code, "train.npz has changed" in changed.stderr) == (65, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--layers", "head"), 64, "'head' matches none of '1.weight', '1.bias', '3.weight', '3.bias'"),
        (("--layers", "all+"), 64, "expected last, all or patterns"),
    ],
)
def test_wrong_layers_are_told(cli: Cli, checkpoint: Path, words: tuple[str, ...], code: int, message: str) -> None:
    refused = cli(*FIT, *words, "--trust-code")
    assert refused.code in (2, code)
    assert message in refused.stderr


@pytest.mark.long
def test_diagnose_judges_other_layers_beside_the_last(cli: Cli, checkpoint: Path) -> None:
    words = ("--model", "net.py:make", "--data", "val=npz:test.npz")
    assert cli("extract-features", "ckpt.pt", *words).code == 0
    named = ("--layers", "3", "--trust-code", "--name", "named", "--center", "mode")
    for more in ((), ("--layers", "all", "--trust-code"), named):
        assert cli(*FIT, *more).code == 0
    skipped = cli("diagnose", "ckpt.pt", "--draws", 64, "--json")
    assert (skipped.code, list(skipped.json["posteriors"])) == (0, ["map", "laplace"])
    assert skipped.stderr.count("skipping laplace-all") == 1
    assert cli("diagnose", "ckpt.pt", "--posterior", "laplace-all").code == 77
    found = cli("diagnose", "ckpt.pt", "--draws", 64, "--trust-code", "--json")
    assert found.code == 0, found.stderr
    assert [pair["posteriors"] for pair in found.json["pairs"]] == [["map", "laplace"]]  # never of other parameters
    gains = {one["posterior"]: one for one in found.json["layers"]}
    assert set(gains) == {"laplace-all", "named"}
    entries = found.json["posteriors"]
    difference = entries["laplace-all"]["val_nll"]["value"] - entries["laplace"]["val_nll"]["value"]
    assert gains["laplace-all"]["value"] == pytest.approx(difference, abs=1e-9)
    elbos = [entries[name]["elbo"] for name in ("laplace", "named")]  # of one target, by draws of their own
    assert elbos[0]["value"] == pytest.approx(
        elbos[1]["value"], abs=4 * sum(one["standard_error"] for one in elbos) + 1
    )
    said = cli("diagnose", "ckpt.pt", "--draws", 64, "--trust-code").stdout
    assert all(one["sentence"] in said.replace("\n", " ") for one in gains.values()), said
    alone = cli("diagnose", "ckpt.pt", "--posterior", "named", "--trust-code", "--json").json["verdict"]
    assert (alone["use"], alone["predict"]["posterior"]) == ("named", "map")  # close to its target, and no gain on val
    assert alone["run"] == "bnncli predict ckpt.pt --posterior map --integrator plug-in"


@pytest.mark.parametrize("structure", ["block", "ekfac", "kron"])
def test_structures_of_layers_are_fitted_and_predicted_with(cli: Cli, checkpoint: Path, structure: str) -> None:
    done = cli(*FIT, "--layers", "all", "--structure", structure, "--trust-code", "--json")
    assert done.code == 0, done.stderr
    metrics = done.json["metrics"]
    assert metrics["structure"] == structure
    assert f"{'an' if structure == 'ekfac' else 'a'} {structure} Hessian is not exact" in done.stderr
    assert metrics.get("columns_drawn") == (None if structure == "block" else 0)  # two outputs: all columns
    assert metrics.get("num_diagonal_params") == (None if structure == "block" else 0)
    asked = ("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code")
    assert cli(*asked, "--integrator", "probit", "--integrator", "mc").code == 0
    found = [
        read_predictions(Path(f"ckpt.pt.bnn/predictions/laplace-all.{name}/test.h5")).probs for name in ("probit", "mc")
    ]
    assert 0 < float(np.abs(found[0] - found[1]).max()) < 0.2


def test_a_network_that_was_edited_makes_its_posteriors_stale(cli: Cli, checkpoint: Path) -> None:
    fit = (*FIT, "--layers", "all", "--trust-code")
    assert cli(*fit).code == 0
    header = read_header(Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors"))
    roles = {entry["role"]: entry.get("is_artifact", True) for entry in header.inputs}
    assert roles == {"features.train": True, "data.train": False, "model": False}
    assert cli("status", "ckpt.pt", "--check").code == 0
    Path("net.py").write_text(NETWORK + "\n")
    stale = cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--trust-code")
    assert (stale.code, "laplace-all.safetensors is stale: model (net.py) has changed" in stale.stderr) == (65, True)
    assert "model (net.py) has changed" in cli("status", "ckpt.pt").stdout.replace("\n", " ")
    again = cli(*fit)
    assert (again.code, "net.py has changed" in again.stderr) == (65, True)
    assert cli("predict", "ckpt.pt", "--posterior", "map", "--split", "test").code == 0  # of features alone


def test_layers_select_posteriors_wherever_they_are_read(cli: Cli, checkpoint: Path) -> None:
    words = ("--model", "net.py:make", "--data", "val=npz:test.npz")
    assert cli("extract-features", "ckpt.pt", *words).code == 0
    assert cli(*FIT).code == 0
    assert cli(*FIT, "--layers", "3+1", "--trust-code").code == 0
    asked = ("--layers", "3+1")
    untrusted = [cli(name, "ckpt.pt", *asked) for name in ("predict", "diagnose")]
    assert [(one.code, "add --trust-code" in one.stderr) for one in untrusted] == [(77, True)] * 2
    assert cli("predict", "ckpt.pt", *asked, "--trust-code", "--split", "test").code == 0
    assert [path.name for path in Path("ckpt.pt.bnn/predictions").iterdir()] == ["laplace-3-1.logit-mc"]
    none = cli("compare", "ckpt.pt", "--layers", "last")  # of posteriors that are there
    assert none.code == 66
    assert "no predictions of a posterior over --layers last (have: over 3+1: laplace-3-1)" in none.stderr
    assert "bnncli predict ckpt.pt --layers last" in none.stderr
    assert cli("predict", "ckpt.pt", "--layers", "last", "--split", "test").code == 0
    found = cli("diagnose", "ckpt.pt", *asked, "--draws", 64, "--trust-code", "--json")
    assert (found.code, list(found.json["posteriors"])) == (0, ["laplace-3-1"])
    for words in (("evaluate", "--bootstrap", "0"), ("compare", "--metric", "nll", "--bootstrap", "100")):
        rows = cli(words[0], "ckpt.pt", *words[1:], "--layers", "last", "--json").json["rows"]
        assert [row["posterior"] for row in rows] == ["map", "laplace"]
    words = ("--metric", "nll", "--bootstrap", "100", "--baseline", "map", "--json")
    beside = cli("compare", "ckpt.pt", *asked, *words).json["rows"]  # which is over the last layer
    assert [row["posterior"] for row in beside] == ["map", "laplace-3-1"]
    held = cli("evaluate", "ckpt.pt", *asked, "--bootstrap", "0", "--assert", "nll<=9")  # of these alone
    assert held.code == 0, held.stderr


@pytest.mark.parametrize("name", ["predict", "diagnose"])
def test_layers_without_a_posterior_are_told(cli: Cli, checkpoint: Path, name: str) -> None:
    assert cli(*FIT).code == 0
    none = cli(name, "ckpt.pt", "--layers", "all")
    assert none.stderr.splitlines() == [
        "error: ckpt.pt has no posterior over --layers all (have: over last: map, laplace)",
        "hint: bnncli fit-laplace ckpt.pt --layers all",
    ]
    trusting = cli(name, "ckpt.pt", "--layers", "all", "--trust-code")
    assert trusting.stderr.splitlines()[1] == "hint: bnncli fit-laplace ckpt.pt --layers all --trust-code"
    other = cli(name, "ckpt.pt", "--layers", "all", "--posterior", "laplace")
    assert (other.code, len(other.stderr.splitlines())) == (2, 1)
    assert "--posterior laplace is over --layers last, but got --layers all" in other.stderr
    wrong = cli(name, "ckpt.pt", "--layers", "all+")
    assert (wrong.code, "expected last, all or patterns" in wrong.stderr) == (2, True)
