"""What refine says of its predictive on val, beside the network, its best temperature and the base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from problems.arrays import make_arrays, make_wide_arrays
from problems.command_line import Cli, new_run

from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.recommendation import score

QUICK = ("--epochs", 30, "--elbo-draws", 16)


def make_run(cli: Cli, folder: Path, arrays: dict[str, np.ndarray], precision: float) -> Path:
    run = new_run(cli, folder / "run", arrays)
    words = ("--structure", "diag", "--prior-precision", precision)
    assert cli("fit-laplace", run, *words).code == 0
    return run


def test_numbers_on_val_are_those_of_predict_and_of_fit_temperature(cli: Cli, tmp_path: Path) -> None:
    run = make_run(cli, tmp_path, make_arrays(), 3.0)
    done = cli("refine", run, *QUICK, "--json")
    found = done.json["metrics"]["val"]
    assert set(found) == {"network", "temperature", "base", "refine"}
    assert cli("predict", run, "--split", "val").code == 0
    for key, variant in {"network": "map.plug-in", "base": "laplace.mc", "refine": "refine.mc"}.items():
        content = read_predictions(run.with_name("run.bnn") / "predictions" / variant / "val.h5")
        expected = score(key, np.asarray(content.probs), np.asarray(content.labels))
        assert found[key]["nll"] == pytest.approx(expected.nll, rel=1e-6), key
        assert found[key]["ece"] == pytest.approx(expected.ece, abs=1e-6), key
    fit = cli("fit-temperature", run, "--json").json["metrics"]
    assert found["temperature"]["temperature"] == pytest.approx(fit["temperature"], rel=1e-6)
    header = read_header(run.with_name("run.bnn") / "posteriors" / "refine.safetensors")
    assert header.meta["metrics"]["val"] == found
    assert "val NLL and ECE: " in done.stderr
    assert f"{found['refine']['nll']:.4f}" in done.stderr


def test_a_refinement_that_helped_and_is_worse_than_the_network_is_warned_of(cli: Cli, tmp_path: Path) -> None:
    arrays = make_wide_arrays()
    for part in ("head_weight", "head_bias"):
        arrays[part] *= 0.4  # of one that is surer 400 examples do not show how often it is wrong
    run = make_run(cli, tmp_path, arrays, 1e-3)
    done = cli("refine", run, *QUICK, "--json").json
    assert done["metrics"]["verdict"] == "helped"
    excess = done["metrics"]["val_excess"]["network"]
    assert excess["is_worse"]
    assert excess["value"] > 2 * excess["standard_error"] > 0
    (text,) = [text for text in done["warnings"] if "predicts val worse" in text]
    for key in ("refine", "network"):
        assert f"{done['metrics']['val'][key]['nll']:.4f}" in text
    assert f"bnncli predict {run} --posterior map" in text or f"bnncli fit-temperature {run}" in text
    again = cli("refine", run, *QUICK, "--json").json
    assert again["action"] == "up_to_date"
    assert text in again["warnings"]


def test_a_refinement_as_good_as_the_network_is_not_warned_of(cli: Cli, tmp_path: Path) -> None:
    run = make_run(cli, tmp_path, make_arrays(), 3.0)
    done = cli("refine", run, *QUICK, "--json").json
    assert not [text for text in done["warnings"] if "predicts val worse" in text]


@pytest.mark.parametrize("without", ["labels_val", "head"])
def test_what_is_not_there_is_not_compared(cli: Cli, tmp_path: Path, without: str) -> None:
    arrays = {name: part for name, part in make_arrays().items() if not name.startswith(without)}
    run = make_run(cli, tmp_path, arrays, 3.0)
    metrics = cli("refine", run, *QUICK, "--json").json["metrics"]
    if without == "labels_val":
        assert (metrics["val"], metrics["val_excess"]) == (None, None)
    else:
        assert set(metrics["val"]) == {"base", "refine"}
    naive = cli("refine", run, *QUICK, "--base", "prior", "--name", "naive", "--json")
    assert naive.code == 0, naive.stderr
    assert "base" not in (naive.json["metrics"]["val"] or {})
