"""evaluate --score and the distances in weight space, end to end: rows, table, files, assertions, refusals."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.detectors import feature_detectors, prediction_detectors
from bnncli.options.scoring import EvaluateOptions
from bnncli.session.inputs import open_posterior

Metrics = list[dict[str, Any]]


def rows_of(document: dict[str, Any], posterior: str, split: str = "test") -> Metrics:
    return next(row["metrics"] for row in document["rows"] if (row["posterior"], row["split"]) == (posterior, split))


def find(metrics: Metrics, name: str, **choices: str) -> dict[str, Any]:
    found = [m for m in metrics if m["name"] == name and all(m.get(key) == value for key, value in choices.items())]
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def scored(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run whose predictions have every score, made once, and the document that told them."""
    from bnncli.cli.execute import run_command_line

    folder, stdout = tmp_path_factory.mktemp("scored"), io.StringIO()
    shutil.copytree(finished_run.with_name("small.bnn"), folder / "small.bnn")
    words = ("evaluate", folder / "small", "--score", "all", "--bootstrap", 50, "--force", "--json")
    assert run_command_line([str(word) for word in words], stdout) == 0
    return folder / "small", json.loads(stdout.getvalue())


@pytest.fixture
def everything(scored: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return scored[1]


@pytest.fixture
def scored_run(scored: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(scored[0].with_name("small.bnn"), tmp_path / "small.bnn")
    return tmp_path / "small"


def test_every_score_detects_the_other_split(everything: dict[str, Any], finished_run: Path) -> None:
    folder = finished_run.with_name("small.bnn") / "predictions" / "laplace.mc"
    inside, outside = (read_predictions(folder / f"{name}.h5") for name in ("test", "far"))
    is_in = np.repeat([1, 0], [len(inside.probs), len(outside.probs)])
    expected = {
        "max_prob": [part.probs.max(axis=1) for part in (inside, outside)],
        "entropy": [-part.entropy for part in (inside, outside)],
        "mutual_info": [-part.mutual_info for part in (inside, outside)],
        "energy": [-part.energy for part in (inside, outside)],
        "max_logit": [part.max_logit for part in (inside, outside)],
    }
    metrics = rows_of(everything, "laplace")
    for score, values in expected.items():
        row = find(metrics, "auroc", score=score)
        assert row["value"] == pytest.approx(roc_auc_score(is_in, np.concatenate(values)), rel=1e-4)
        assert row["ood"] == "far"
        assert row["interval"]["replicates"] == 50
    assert find(metrics, "auroc", score="dirichlet_variance")["undefined"].startswith(
        "this integrator provides no Dirichlet"
    )
    assert find(metrics, "mmc", ood="far")["value"] == pytest.approx(outside.probs.max(axis=1).mean(), rel=1e-6)


def test_scores_of_features_have_one_row_for_all_posteriors(everything: dict[str, Any], arrays: Any) -> None:
    metrics = rows_of(everything, "features")
    assert {row["name"] for row in metrics} == {"auroc", "aupr", "fpr95"}
    assert {row["score"] for row in metrics} == set(feature_detectors())
    unit = {name: arrays[f"features_{name}"].astype(float) for name in ("train", "test", "far")}
    unit = {name: rows / np.linalg.norm(rows, axis=1, keepdims=True) for name, rows in unit.items()}
    known = NearestNeighbors(n_neighbors=50).fit(unit["train"])
    scores = [-known.kneighbors(unit[name])[0][:, -1] for name in ("test", "far")]
    row = find(metrics, "auroc", score="knn")
    assert row["value"] == pytest.approx(roc_auc_score([1] * 120 + [0] * 60, np.concatenate(scores)), rel=1e-4)
    assert (row["neighbors"], row["n"]) == (50, [120, 60])
    described = next(row for row in everything["rows"] if row["posterior"] == "features")
    assert (described["integrator"], described["variant"], described["samples"]) == ("none", "none", None)


def test_scores_of_features_have_a_file_with_the_features_as_inputs(
    scored: tuple[Path, dict[str, Any]], everything: dict[str, Any]
) -> None:
    path = scored[0].with_name("small.bnn") / "metrics" / "features.none.json"
    document = json.loads(path.read_text())
    roles = {entry["role"] for entry in document["provenance"]["inputs"]}
    assert roles == {f"features.{name}" for name in ("train", "val", "test", "far")}
    assert document["rows"] == [row for row in everything["rows"] if row["posterior"] == "features"]


def test_the_table_shows_the_scores_that_were_asked_for(cli: Cli, everything: dict[str, Any], scored_run: Path) -> None:
    done = cli("evaluate", scored_run, "--score", "all", "--bootstrap", 50, "--metric", "auroc")
    header = done.stdout.splitlines()[0] if done.stdout else ""
    metrics = [metric for row in everything["rows"] for metric in row["metrics"] if metric["name"] == "auroc"]
    shown = {metric["score"] for metric in metrics if metric["value"] is not None}
    assert shown >= {*prediction_detectors(), *feature_detectors()} - {"dirichlet_variance"}  # only of bridge
    assert all(
        (f"AUROC far {name}" in header) == (name in shown) for name in (*prediction_detectors(), *feature_detectors())
    ), header
    one = cli("evaluate", scored_run, "--score", "energy", "--bootstrap", 50, "--force", "--posterior", "laplace")
    assert "detection by energy" in one.stdout
    assert "features" not in one.stdout
    energy = find(rows_of(everything, "laplace"), "auroc", score="energy")["value"]
    assert f"{energy:.3f}" in one.stdout


def test_scores_of_features_leave_the_rows_of_posteriors_as_they_were(cli: Cli, small_run: Path) -> None:
    plain = cli("evaluate", small_run, "--json")
    assert plain.json["action"] == "up_to_date"
    more = cli("evaluate", small_run, "--score", "knn", "--json").json
    assert [row for row in more["rows"] if row["posterior"] != "features"] == plain.json["rows"]
    assert [row for row in more["rows"] if row["posterior"] == "features"]


def test_assertions_reach_scores_of_features_and_others_pass_them_by(cli: Cli, small_run: Path) -> None:
    words = ("evaluate", small_run, "--score", "knn", "--json")
    done = cli(*words, "--assert", "auroc>=0", "--assert", "auroc:knn>=0", "--assert", "features.fpr95:knn:out<=1")
    assert done.code == 0, done.stderr
    by = {check["expr"]: set() for check in done.json["checks"]}
    for check in done.json["checks"]:
        by[check["expr"]].add(check["posterior"])
    assert by["auroc:knn>=0"] == by["features.fpr95:knn:out<=1"] == {"features"}
    assert by["auroc>=0"] == {"map", "laplace", "refine", "hmc"}
    assert cli(*words, "--assert", "features.auroc:knn>=1").code == 3
    missing = cli("evaluate", small_run, "--assert", "auroc:knn>=0")
    assert missing.code == 66
    assert "add --score" in missing.stderr


def test_distances_are_those_of_the_stored_posteriors(everything: dict[str, Any], finished_run: Path) -> None:
    folder = finished_run.with_name("small.bnn") / "posteriors"
    (laplace, _), (hmc, _) = (open_posterior(folder / name) for name in ("laplace.safetensors", "hmc.nc"))
    draws = hmc.draws.double().flatten(0, 1)
    gap = (laplace.mean - draws.mean(dim=0)) / draws.std(dim=0)
    row = find(rows_of(everything, "laplace"), "mean_error")
    assert (row["mean"], row["value"]) == ("exact", pytest.approx(float(gap.square().mean().sqrt()), rel=1e-6))
    point = rows_of(everything, "map")
    assert find(point, "wasserstein", over="largest")["value"] >= find(point, "wasserstein", over="mean")["value"] > 0
    assert {find(point, "mmd2", estimator=name)["n"][1] for name in ("biased", "published")} == {128}
    unbiased = find(point, "mmd2", estimator="unbiased")
    assert unbiased["n"] == unbiased["p_value_draws"] == [600, 128]
    assert unbiased["blocks"] == 8  # the chains
    own = [
        m for m in rows_of(everything, "hmc") if m["name"] in ("mmd2", "wasserstein", "mean_error", "covariance_error")
    ]
    assert len(own) == 7
    assert all("identical to the reference hmc" in m["undefined"] for m in own)


def test_distances_are_measured_once_for_each_posterior(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("predict", small_run, "--posterior", "laplace", "--integrator", "probit").code == 0
    measured = []
    monkeypatch.setattr("bnncli.commands.evaluate.reference_rows", lambda *_, **words: measured.append(words) or [])
    assert cli("evaluate", small_run, "--force", "--bootstrap", 0).code == 0
    assert len(measured) == 4  # map, laplace, refine, hmc; two integrators of laplace
    assert all(words["device"] == torch.device("cpu") for words in measured)


@pytest.mark.parametrize("command", [("fit-laplace",), ("refine",), ("hmc",)])
def test_no_posterior_may_be_called_features(cli: Cli, small_run: Path, command: tuple[str]) -> None:
    done = cli(*command, small_run, "--name", "features")
    assert done.code == 2
    assert "the name 'features' is reserved for scores that need no posterior" in done.stderr


def test_without_another_split_features_have_nothing_to_detect(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    for path in folder.glob("predictions/*/far.h5"):
        path.unlink()
    done = cli("evaluate", small_run, "--score", "knn", "--force", "--bootstrap", 0, "--posterior", "map")
    assert done.code == 0
    assert "no out-of-distribution split to detect with features" in done.stderr


def test_a_training_split_without_labels_still_has_neighbours(cli: Cli, tmp_path: Path, arrays: Any) -> None:
    run = tmp_path / "bare"
    del arrays["labels_train"]
    new_run(cli, run, arrays, "--ood", "far")
    assert cli("predict", run).code == 0
    metrics = rows_of(cli("evaluate", run, "--score", "knn", "--bootstrap", 0, "--json").json, "features")
    assert find(metrics, "auroc", score="mahalanobis")["undefined"] == "the training split has no labels"
    assert 0 < find(metrics, "auroc", score="knn")["value"] < 1


def test_the_scores_to_make_always_have_that_of_the_table() -> None:
    assert EvaluateOptions().shown_scores == EvaluateOptions().prediction_scores == ["combined"]
    options = EvaluateOptions(score=["knn", "energy"])
    assert (options.shown_scores, options.prediction_scores) == (["energy", "knn"], ["combined", "energy"])
    assert (options.curve_score, EvaluateOptions(score=["knn"]).curve_score) == ("energy", "combined")
    assert EvaluateOptions(score=["all"]).shown_scores == [*prediction_detectors(), *feature_detectors()]
    assert EvaluateOptions(score=["energy"]).needs_features is False


def test_no_more_neighbours_are_told_than_there_are(cli: Cli, small_run: Path) -> None:
    done = cli("evaluate", small_run, "--score", "knn", "--neighbors", 10**6, "--json", "--split", "test")
    (row,) = [row for row in done.json["rows"] if row["posterior"] == "features"]
    num_train = len(np.load(small_run.with_name("features.npz"))["labels_train"])
    assert {metric["neighbors"] for metric in row["metrics"] if metric["score"] == "knn"} == {num_train}
    assert f"there are only {num_train} training examples" in done.stderr
