"""Posteriors by name: the hint that makes what is missing, and the steps that were taken already."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.arrays import make_wide_arrays
from problems.command_line import Cli, new_run

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.session.costs import TotalCost, total_cost

ALL = "--layers all"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("refine --base own", "bnncli fit-laplace {} --name own"),
        ("refine --base laplace", "bnncli fit-laplace {}"),
        ("refine --base laplace-all --trust-code", f"bnncli fit-laplace {{}} {ALL} --trust-code"),
        (f"refine {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        (f"refine {ALL} --base own", f"bnncli fit-laplace {{}} {ALL} --name own"),
        ("hmc", "bnncli fit-laplace {}"),
        ("hmc --layers fc --trust-code", "bnncli fit-laplace {} --layers fc --trust-code"),
        ("hmc --base own", "bnncli fit-laplace {} --name own"),
        ("predict --posterior laplace-all", f"bnncli fit-laplace {{}} {ALL}"),
        ("predict --posterior hmc-all --trust-code", f"bnncli hmc {{}} {ALL} --trust-code"),
        ("predict --posterior hmc-al", "did you mean 'hmc'?"),
        ("predict --posterior own", "bnncli status {}"),
        ("diagnose --posterior temperature", "bnncli fit-temperature {}"),
        ("evaluate --posterior laplace", "bnncli fit-laplace {}"),
        ("evaluate --posterior refine", "bnncli predict {} --posterior refine"),
        ("evaluate --posterior refine.mc", "bnncli predict {} --posterior refine"),
        ("evaluate --posterior own", "bnncli status {}"),
        (f"evaluate {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        (f"compare {ALL}", f"bnncli fit-laplace {{}} {ALL}"),
        ("prune", "bnncli fit-lbbnn {}"),
        ("fit-temperature --base own", "bnncli fit-laplace {} --name own"),
    ],
)
def test_the_hint_makes_what_is_not_there(cli: Cli, small_run: Path, words: str, hint: str) -> None:
    folder = small_run.with_name("small.bnn")
    (folder / "posteriors" / "laplace.safetensors").unlink()
    for name in ("laplace", "refine"):
        for path in (folder / "predictions").glob(f"{name}.*/*"):
            path.unlink()
    command, *rest = words.split()
    refused = cli(command, small_run, *rest)
    assert (refused.code, refused.stderr.splitlines()[-1]) == (66, f"hint: {hint.format(small_run)}")


@pytest.fixture
def wide_run(cli: Cli, tmp_path: Path) -> Path:
    return new_run(cli, tmp_path / "run", make_wide_arrays(num_test=40))


def warning(cli: Cli, *words: object) -> str:
    (text,) = [text for text in cli(*words, "--json").json["warnings"] if "predicts val worse" in text]
    return str(text).partition("%). ")[2].replace("Run bnncli", "run bnncli").replace("Use the", "use the")


def test_each_step_that_was_taken_makes_way_for_the_one_after_it(cli: Cli, wide_run: Path) -> None:
    run, folder = shlex.quote(str(wide_run)), wide_run.with_name("run.bnn") / "predictions"
    words = ("fit-laplace", wide_run, "--structure", "kron", "--prior-precision", 5)
    advice = warning(cli, *words)
    assert f"run bnncli fit-temperature {run} (" in advice
    assert f"run bnncli predict {run} --posterior map (" in advice
    assert cli("fit-temperature", wide_run).code == 0
    advice = warning(cli, *words)
    assert "fit-temperature" not in advice
    assert f"run bnncli predict {run} --posterior temperature (" in advice
    assert cli("predict", wide_run, "--posterior", "temperature", "--posterior", "map").code == 0
    advice = warning(cli, *words)
    for name in ("temperature", "map"):
        assert f"--posterior {name}" not in advice
        assert f"use the predictions in {folder / name}.plug-in (" in advice


def test_predictions_of_fewer_splits_or_of_other_features_are_still_to_be_made(cli: Cli, wide_run: Path) -> None:
    words = ("fit-laplace", wide_run, "--structure", "kron", "--prior-precision", 5)
    assert cli("predict", wide_run, "--posterior", "map", "--split", "val").code == 0
    assert f"predict {shlex.quote(str(wide_run))} --posterior map (" in warning(cli, *words)
    assert cli("predict", wide_run, "--posterior", "map").code == 0
    assert "--posterior map (" not in warning(cli, *words)
    new_run(cli, wide_run, make_wide_arrays(num_test=39), "--force")
    assert f"predict {shlex.quote(str(wide_run))} --posterior map (" in warning(cli, *words, "--force")


def test_a_refinement_of_the_gaussian_is_not_advised_again(cli: Cli, wide_run: Path) -> None:
    words = ("fit-laplace", wide_run, "--structure", "kron", "--prior-precision", 5)
    assert "refine" in warning(cli, *words)
    assert cli("refine", wide_run, "--flow", "affine", "--epochs", 2, "--elbo-draws", 16).code == 0
    advice = warning(cli, *words)
    assert f"bnncli refine {shlex.quote(str(wide_run))} --flow affine" not in advice


def test_a_temperature_of_a_posterior_takes_no_name_that_is_taken(cli: Cli, tmp_path: Path) -> None:
    arrays = make_wide_arrays(num_test=40)
    weight = arrays["head_weight"]
    noise = 2 * weight.std() * np.random.default_rng(1).normal(size=weight.shape)
    arrays["head_weight"] = (weight + noise).astype(
        np.float32
    )  # a network that is worse than the mode, both at one temperature
    run = new_run(cli, tmp_path / "run", arrays)
    words = ("fit-laplace", run, "--structure", "kron", "--prior-precision", 300, "--name", "other")
    assert cli(*words).code == 0
    assert cli("fit-temperature", run, "--base", "other").code == 0
    words = (*words[:-1], "another")
    line = next(part for part in warning(cli, *words).split(", or ") if "fit-temperature" in part)
    command = shlex.split(line.removeprefix("run ").removeprefix("Run ").partition(" (")[0])
    assert command[-2:] == ["--name", "another-temperature"]
    assert cli(*command[1:]).code == 0
    assert "fit-temperature" not in warning(cli, *words)


def test_diagnose_goes_on_from_what_has_been_predicted_and_scored(cli: Cli, small_run: Path) -> None:
    def following() -> Any:
        return shlex.split(cli("diagnose", small_run, "--posterior", "laplace", "--json").json["verdict"]["run"])

    first = following()
    if first[1] == "fit-temperature":
        assert cli(*first[1:]).code == 0
        first = following()
    assert first[1] == "predict"
    assert cli(*first[1:]).code == 0
    assert following()[1] == "evaluate"
    assert cli("evaluate", small_run).code == 0
    assert following()[1] == "compare"


@pytest.fixture
def laplace(finished_run: Path) -> Header:
    return read_header(finished_run.with_name("small.bnn") / "posteriors/laplace.safetensors")


def test_training_that_nobody_told_of_is_unknown(laplace: Header) -> None:
    found = total_cost(laplace)
    assert found.training is None
    assert found.network == 0
    assert found.head is not None
    assert found.head > 0


def test_training_is_that_of_the_network_beside_it(laplace: Header, monkeypatch: pytest.MonkeyPatch) -> None:
    network = read_header(laplace.path.with_name("map.safetensors"))
    told = replace(network, meta={**network.meta, "gradient_passes": 100})
    monkeypatch.setattr(
        "bnncli.session.costs.read_header", lambda path: told if path == network.path else read_header(path)
    )
    assert total_cost(laplace).training == 100
    assert total_cost(told) == TotalCost(0.0, 0.0, 100.0)


@pytest.mark.parametrize("passes", [None, 300])
def test_an_ensemble_costs_the_training_of_its_members(laplace: Header, passes: int | None) -> None:
    header = replace(laplace, meta={**laplace.meta, "method": "ensemble", "metrics": {"gradient_passes": passes}})
    assert total_cost(header) == (TotalCost(None, None, None) if passes is None else TotalCost(0.0, 300.0, 0.0))
