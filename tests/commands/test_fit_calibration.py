"""fit-calibration through the pipeline: maps, the default choice, val out of fold, and what takes the place of temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run
from problems.label_sets import label_arrays
from scipy.special import expit, log_softmax, softmax

from bnncli.artifacts.posteriors import read_posterior
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.calibration_maps import MAPS


def folder_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.bnn")


def posterior_of(run: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, header = read_posterior(folder_of(run) / "posteriors" / f"{name}.safetensors")
    return tensors, header.meta


def predicted(run: Path, name: str, split: str) -> Any:
    return read_predictions(folder_of(run) / "predictions" / f"{name}.plug-in" / f"{split}.h5").probs


def logits_of(arrays: dict[str, np.ndarray], split: str) -> np.ndarray:
    weight, bias = (arrays[f"head_{name}"].astype(np.float64) for name in ("weight", "bias"))
    return np.asarray(arrays[f"features_{split}"].astype(np.float64) @ weight.T + bias)


def biased_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays whose head favours one class, which one temperature cannot correct."""
    arrays = make_arrays(seed)
    arrays["head_bias"] = arrays["head_bias"] + np.array([6, 0, 0], np.float32)
    return arrays


def test_temperature_is_what_fit_temperature_writes(cli: Cli, small_run: Path) -> None:
    first = cli("fit-temperature", small_run, "--json").json
    again = cli("fit-calibration", small_run, "--map", "temperature", "--json").json
    assert again["action"] == "up_to_date"
    assert again["metrics"] == first["metrics"]
    assert again["outputs"] == first["outputs"]


def test_a_map_is_applied_to_the_logits_and_val_is_predicted_out_of_fold(cli: Cli, tmp_path: Path) -> None:
    arrays = biased_arrays()
    run = new_run(cli, tmp_path / "run", arrays)
    done = cli("fit-calibration", run, "--map", "vector", "--json")
    assert done.code == 0
    metrics, (tensors, meta) = done.json["metrics"], posterior_of(run, "vector")
    assert (meta["type"], meta["map"], meta["method"], meta["num_folds"]) == ("calibrated", "vector", "calibration", 5)
    cli("predict", run, "--posterior", "vector").expect(0)
    weight, bias = tensors["map_weight"].numpy(), tensors["map_bias"].numpy()
    expected = softmax(logits_of(arrays, "test") * weight + bias, axis=1)
    np.testing.assert_allclose(predicted(run, "vector", "test"), expected, atol=2e-5)
    logs, folds = np.empty((80, 3)), tensors["folds.rows"].numpy()
    for fold in range(5):
        weight, bias = (tensors[f"folds.{fold}.{name}"].numpy() for name in ("map_weight", "map_bias"))
        logs[folds == fold] = log_softmax(logits_of(arrays, "val")[folds == fold] * weight + bias, axis=1)
    np.testing.assert_allclose(predicted(run, "vector", "val"), np.exp(logs), atol=2e-5)
    nll = -logs[np.arange(80), arrays["labels_val"]].mean()
    assert metrics["val"]["calibration"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert {one["map"] for one in metrics["maps"]} == {"temperature", "vector"}
    assert metrics["maps"][1]["nll"] == pytest.approx(nll, rel=1e-4)
    gain = metrics["maps"][1]["gain"]
    assert gain["value"] == pytest.approx(metrics["maps"][0]["nll"] - metrics["maps"][1]["nll"], rel=1e-6)
    assert cli("fit-calibration", run, "--map", "vector", "--json").json["action"] == "up_to_date"


def test_the_default_is_the_best_map_if_it_gains_and_temperature_otherwise(cli: Cli, tmp_path: Path) -> None:
    seen = set()
    for name, arrays in (("biased", biased_arrays()), ("fitting", make_arrays())):
        run = new_run(cli, tmp_path / name, arrays)
        done = cli("fit-calibration", run, "--json")
        metrics = done.json["metrics"]
        tried = {one["map"]: one for one in metrics["maps"]}
        assert [*tried] == [*MAPS]
        best = min(tried.values(), key=lambda one: one["nll"])
        gains = best["gain"] is not None and best["gain"]["value"] > best["gain"]["standard_error"]
        assert metrics["map"] == (best["map"] if gains else "temperature")
        seen.add(gains)
        text = cli("fit-calibration", run).stderr
        assert ("lower than that of one temperature by" in text) == gains
        assert ("no other map has a lower out-of-fold NLL" in text) == (not gains)
        cli("predict", run, "--posterior", "calibration", "--split", "test").expect(0)
    assert seen == {True, False}


def test_a_map_that_predicts_worse_than_one_temperature_is_reported(cli: Cli, small_run: Path) -> None:
    metrics = cli("fit-calibration", small_run, "--map", "histogram", "--json").json["metrics"]
    gain = metrics["maps"][1]["gain"]["value"]
    assert gain < 0
    text = cli("fit-calibration", small_run, "--map", "histogram").stderr
    assert f"histogram has a higher NLL than one temperature on rows it has not seen, by {-gain:.4f}" in text


def test_labels_are_mapped_one_by_one_and_maps_of_all_classes_are_refused(cli: Cli, tmp_path: Path) -> None:
    arrays = label_arrays(head_scale=2.0)
    run = new_run(cli, tmp_path / "labels", arrays, "--task", "multilabel", "--ood", "far")
    cli("fit-calibration", run, "--map", "platt").expect(0)
    cli("predict", run, "--posterior", "platt").expect(0)
    tensors = posterior_of(run, "platt")[0]
    odds = logits_of(arrays, "test") * tensors["map_weight"].numpy() + tensors["map_bias"].numpy()
    np.testing.assert_allclose(predicted(run, "platt", "test"), expit(odds), atol=2e-5)
    tried = {one["map"] for one in cli("fit-calibration", run, "--json").json["metrics"]["maps"]}
    assert tried == {name for name, one in MAPS.items() if one.takes_labels}
    refused = cli("fit-calibration", run, "--map", "dirichlet", "--json")
    assert refused.code == 2
    assert "mutually exclusive" in refused.json["error"]["message"]


def test_one_logit_gives_two_classes(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    for split in ("train", "val", "test"):
        arrays[f"labels_{split}"] = arrays[f"labels_{split}"] % 2
    arrays["head_weight"], arrays["head_bias"] = arrays["head_weight"][:1], arrays["head_bias"][:1]
    run = new_run(cli, tmp_path / "one", arrays)
    cli("fit-calibration", run, "--map", "platt").expect(0)
    cli("predict", run, "--posterior", "platt", "--split", "test").expect(0)
    tensors = posterior_of(run, "platt")[0]
    expected = expit(logits_of(arrays, "test") * float(tensors["map_weight"]) + float(tensors["map_bias"]))
    np.testing.assert_allclose(predicted(run, "platt", "test")[:, 1:], expected, atol=2e-5)


def test_the_mean_of_a_base_is_calibrated_and_other_bases_are_refused(cli: Cli, small_run: Path) -> None:
    cli("fit-calibration", small_run, "--map", "beta", "--base", "laplace", "--name", "laplace-beta").expect(0)
    own, base = (posterior_of(small_run, name)[0]["mean"] for name in ("laplace-beta", "laplace"))
    assert torch.equal(own, base)
    assert cli("fit-calibration", small_run, "--base", "refine", "--json").json["error"]["code"] == "wrong_type"


def test_of_a_base_that_was_fitted_to_val_val_is_refused(cli: Cli, small_run: Path) -> None:
    cli("stack", small_run).expect(0)
    cli("fit-calibration", small_run, "--map", "platt", "--base", "stack", "--name", "both").expect(0)
    cli("predict", small_run, "--posterior", "both", "--split", "test").expect(0)
    refused = cli("predict", small_run, "--posterior", "both", "--split", "val", "--json")
    assert refused.json["error"]["code"] == "in_sample"


def test_only_plug_in_predicts_with_a_map(cli: Cli, small_run: Path) -> None:
    cli("fit-calibration", small_run, "--map", "platt").expect(0)
    refused = cli("predict", small_run, "--posterior", "platt", "--integrator", "mc", "--json")
    assert refused.json["error"]["code"] == "unsupported_integrator"
    cli("diagnose", small_run, "--posterior", "platt").expect(0)
    cli("evaluate", small_run, "--json")
    assert "plug-in" in cli("predict", small_run, "--posterior", "platt", "--split", "test").stdout


def test_few_rows_of_val_are_refused(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    few = {name: part[:9] if name.endswith("_val") else part for name, part in arrays.items()}
    run = new_run(cli, tmp_path / "few", few)
    done = cli("fit-calibration", run, "--json")
    assert done.code == 2
    assert "needs at least 10" in done.json["error"]["message"]


def test_maps_that_take_long_or_do_not_converge_are_left_out_by_default(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.evaluation.calibration_maps.MOST_WORK", 80 * 9)
    monkeypatch.setattr("bnncli.evaluation.calibration_maps._MOST_STEPS", 1)
    metrics = cli("fit-calibration", small_run, "--json").json["metrics"]
    assert metrics["left_out"] == [
        "matrix (would take long)",
        "dirichlet (would take long)",
        "platt (did not converge)",
        "beta (did not converge)",
    ]
    assert cli("fit-calibration", small_run, "--map", "platt", "--json").json["error"]["code"] == "not_converged"


@pytest.mark.long
def test_auto_tries_the_map_by_its_scores_out_of_fold(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", biased_arrays())
    found = cli("auto", run, "--report", "--json").expect(0).json
    row = next(row for row in found["rows"] if row["posterior"] == "calibration")
    own = posterior_of(run, "calibration")[1]["metrics"]["val"]["calibration"]
    assert row["nll"] == pytest.approx(own["nll"], rel=1e-4)
    assert row["integrator"] == "plug-in"
    assert row["gain"]["value"] > 0  # over the better of the network and one temperature
    cli("predict", run, "--posterior", "calibration").expect(0)
    page = (folder_of(run) / "report.html").read_text()
    assert "calibration map" in page
    cli("report", run, "--force").expect(0)
    assert "calibration" in (folder_of(run) / "report.html").read_text()
