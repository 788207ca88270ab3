"""What hmc says of its predictive on val, beside the network as trained and at its best temperature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from problems.arrays import make_arrays, make_wide_arrays
from problems.command_line import Cli, new_run

from bnncli.artifacts.predictions import read_predictions
from bnncli.commands import hmc
from bnncli.evaluation.recommendation import score

SMALL = ("--chains", 4, "--warmup", 30, "--draws", 30)


def test_numbers_on_val_are_those_of_predict(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    done = cli("hmc", run, *SMALL, "--prior-precision", 3, "--json")
    found = done.json["metrics"]["val"]
    words = ("--integrator", "mc", "--integrator", "plug-in")
    assert cli("predict", run, "--split", "val", *words).code == 0
    for key, variant in {"network": "map.plug-in", "hmc": "hmc.mc", "plug-in": "hmc.plug-in"}.items():
        content = read_predictions(run.with_name("run.bnn") / "predictions" / variant / "val.h5")
        expected = score(key, np.asarray(content.probs), np.asarray(content.labels))
        assert found[key]["nll"] == pytest.approx(expected.nll, rel=1e-6), key
        assert found[key]["ece"] == pytest.approx(expected.ece, abs=1e-6), key
    assert found["hmc"]["samples"] == 120
    fit = cli("fit-temperature", run, "--json").json["metrics"]
    assert found["temperature"]["temperature"] == pytest.approx(fit["temperature"], rel=1e-6)
    assert "val NLL and ECE: " in done.stderr
    assert "predicts val worse" not in done.stderr


def test_draws_that_predict_worse_than_the_network_are_warned_of(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_wide_arrays())
    words = ("hmc", run, *SMALL, "--prior-precision")
    done = cli(*words, 1e-3, "--json").json
    excess = done["metrics"]["val_excess"]["temperature"]
    assert excess["is_worse"]
    assert excess["value"] > 2 * excess["standard_error"] > 0
    (text,) = [text for text in done["warnings"] if "predicts val worse" in text]
    assert f"bnncli fit-temperature {run}" in text
    again = cli(*words, 1e-3, "--json").json
    assert (again["action"], text in again["warnings"]) == ("up_to_date", True)


def test_more_draws_than_memory_is_meant_for_are_thinned(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    words = ("hmc", run, *SMALL, "--prior-precision", 3, "--json")
    whole = cli(*words).json["metrics"]["val"]["hmc"]
    num_params = sum(make_arrays()[f"head_{part}"].size for part in ("weight", "bias"))
    monkeypatch.setattr(hmc, "_MOST_PREDICTING", 70 * num_params)
    found = cli(*words, "--name", "thinned").json["metrics"]["val"]["hmc"]
    assert found["samples"] == 60
    assert found["nll"] == pytest.approx(whole["nll"], rel=0.1)


@pytest.mark.parametrize("without", ["labels_val", "head"])
def test_what_is_not_there_is_not_compared(cli: Cli, tmp_path: Path, without: str) -> None:
    arrays = {name: part for name, part in make_arrays().items() if not name.startswith(without)}
    run = new_run(cli, tmp_path / "run", arrays)
    metrics = cli("hmc", run, *SMALL, "--prior-precision", 3, "--json").json["metrics"]
    if without == "labels_val":
        assert "val" not in metrics
    else:
        assert set(metrics["val"]) == {"hmc", "plug-in", "plug-in-temperature"}
