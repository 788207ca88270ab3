"""stack through the pipeline: members, weights, val out of fold, and runs of other kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, extended_run, new_run
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression

from bnncli.artifacts.posteriors import read_posterior
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands import auto, stack
from bnncli.inference.stacking import stacking_weights
from bnncli.system.signals import BudgetSpent


def heads_of(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, header = read_posterior(run.with_name(f"{run.name}.bnn") / "posteriors" / "stack.safetensors")
    return tensors, header.meta


def logits(theta: torch.Tensor, features: np.ndarray) -> np.ndarray:
    """(N, K) under theta (P,) of three outputs and a bias."""
    weight, bias = theta[:-3].view(3, -1).double().numpy(), theta[-3:].double().numpy()
    return np.asarray(features @ weight.T + bias)


def regression(features: np.ndarray, labels: np.ndarray, precision: float, at: np.ndarray) -> np.ndarray:
    """Probabilities by scikit-learn's penalised logistic regression, whose bias is penalised too."""
    model = LogisticRegression(C=1 / precision, fit_intercept=False, tol=1e-10, max_iter=5000)
    model.fit(np.column_stack([features, np.ones(len(features))]), labels)
    return np.asarray(model.predict_proba(np.column_stack([at, np.ones(len(at))])))


@pytest.fixture(scope="module")
def stacked(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A stacked run, predicted with, and the metrics of the stack; not to be changed."""
    run = extended_run(
        finished_run, tmp_path_factory.mktemp("stack"), (("stack",), ("predict", "--posterior", "stack"))
    )
    return run, heads_of(run)[1]["metrics"]


def test_members_are_logistic_regressions(stacked: tuple[Path, dict[str, Any]], arrays: dict[str, np.ndarray]) -> None:
    run, metrics = stacked
    tensors, _ = heads_of(run)
    kept = [head for head in metrics["heads"] if head["is_kept"]]
    assert tensors["weights"].sum().item() == pytest.approx(1)
    features = {name: arrays[f"features_{name}"] for name in ("train", "val")}
    labels = {name: arrays[f"labels_{name}"] for name in ("train", "val")}
    features["train+val"] = np.concatenate([features["train"], features["val"]])
    labels["train+val"] = np.concatenate([labels["train"], labels["val"]])
    seen = 0
    folds = tensors["folds.rows"].numpy()
    for place, (head, theta) in enumerate(zip(kept, tensors["members"], strict=True)):
        if head["prior_precision"] is None:
            continue
        rows, target = features[head["name"]], labels[head["name"]]
        expected = regression(rows, target, head["prior_precision"], features["val"])
        np.testing.assert_allclose(softmax(logits(theta, features["val"]), axis=1), expected, atol=0.02)
        if head["name"] == "train":
            continue
        for fold in range(5):  # fitted without the rows of its own
            keeps = np.ones(len(rows), dtype=bool)
            keeps[len(rows) - len(folds) :] = folds != fold
            expected = regression(rows[keeps], target[keeps], head["prior_precision"], features["val"])
            probs = softmax(logits(tensors["folds.members"][fold, place], features["val"]), axis=1)
            np.testing.assert_allclose(probs, expected, atol=0.02)
            seen += 1
    assert seen >= 5


def test_predictions_are_mixture(cli: Cli, stacked: tuple[Path, dict[str, Any]], arrays: dict[str, np.ndarray]) -> None:
    run, metrics = stacked
    said = cli("predict", run, "--posterior", "stack", "--split", "val", "--force")
    assert "predicting val out of fold, with 5 folds" in said.stderr
    tensors, _ = heads_of(run)
    folder = run.with_name("small.bnn") / "predictions" / "stack.mc"
    mixture = sum(
        float(weight) * softmax(logits(theta, arrays["features_test"]), axis=1)
        for weight, theta in zip(tensors["weights"], tensors["members"], strict=True)
    )
    np.testing.assert_allclose(read_predictions(folder / "test.h5").probs, mixture, atol=1e-5)

    folds, weights, rows = (tensors[f"folds.{name}"] for name in ("members", "weights", "rows"))
    expected = np.empty((len(rows), 3))
    for fold in range(5):
        own = (rows == fold).numpy()
        expected[own] = sum(
            float(weight) * softmax(logits(theta, arrays["features_val"][own]), axis=1)
            for weight, theta in zip(weights[fold], folds[fold], strict=True)
        )
    got = read_predictions(folder / "val.h5")
    np.testing.assert_allclose(got.probs, expected, atol=1e-5)
    nll = -np.log(expected[np.arange(len(rows)), arrays["labels_val"]]).mean()
    assert metrics["val"]["stack"]["nll"] == pytest.approx(nll, abs=1e-5)


def test_weights_and_temperature_of_a_fold_are_of_the_other_rows(
    cli: Cli, small_run: Path, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "KEPT", 0.0)
    cli("stack", small_run).expect(0)
    tensors, _ = heads_of(small_run)
    labels, rows = arrays["labels_val"], tensors["folds.rows"].numpy()
    scores = np.empty((len(rows), 4))
    for fold in range(5):
        for member in range(4):
            logs = log_softmax(logits(tensors["folds.members"][fold, member], arrays["features_val"]), axis=1)
            scores[rows == fold, member] = logs[rows == fold, labels[rows == fold]]
    network = torch.cat([torch.from_numpy(arrays[name]).flatten() for name in ("head_weight", "head_bias")])
    own = logits(network, arrays["features_val"])
    for fold in range(5):
        others = rows != fold
        expected = stacking_weights(torch.from_numpy(scores[others]))
        torch.testing.assert_close(tensors["folds.weights"][fold], expected, rtol=0, atol=1e-3)

        def loss(scale: float, others: np.ndarray = others) -> float:
            return float(-log_softmax(scale * own[others], axis=1)[np.arange(others.sum()), labels[others]].mean())

        scale = minimize_scalar(loss, bounds=(0.01, 10), method="bounded", options={"xatol": 1e-8}).x
        torch.testing.assert_close(tensors["folds.members"][fold, 0], (scale * network).float(), rtol=1e-3, atol=1e-4)


def test_val_that_is_all_right_does_not_sharpen_the_network(cli: Cli, tmp_path: Path) -> None:
    made, path = make_arrays(), tmp_path / "small"
    scores = made["features_val"] @ made["head_weight"].T + made["head_bias"]
    made["labels_val"] = scores.argmax(axis=1)
    new_run(cli, path, made)
    cli("stack", path).expect(0)
    tensors, _ = heads_of(path)
    largest = np.abs(np.stack([logits(theta, made["features_test"]) for theta in tensors["members"]])).max()
    assert largest < 20 * np.abs(made["features_test"] @ made["head_weight"].T + made["head_bias"]).max()


@pytest.mark.parametrize("is_single", [False, True])
def test_features_without_a_head_are_stacked_too(cli: Cli, tmp_path: Path, is_single: bool) -> None:
    made, path = make_arrays(), tmp_path / "small"
    del made["head_weight"], made["head_bias"]
    words: tuple[str, ...] = ()
    if is_single:
        made |= {name: values.clip(0, 1) for name, values in made.items() if name.startswith("labels")}
        words = ("--task", "binary")
    new_run(cli, path, made, *words)
    metrics = cli("stack", path, "--json").json["metrics"]
    assert [head["name"] for head in metrics["heads"]] == ["train", "val", "train+val"]
    cli("predict", path, "--posterior", "stack").expect(0)
    assert np.isfinite(metrics["val"]["stack"]["nll"])


def test_few_or_no_rows_of_val_are_refused(cli: Cli, tmp_path: Path) -> None:
    for name, rows, code in (("few", 6, 2), ("none", 0, 66)):
        made, path = make_arrays(), tmp_path / name
        for part in ("features_val", "labels_val"):
            made[part] = made[part][:rows]
        if rows == 0:
            del made["features_val"], made["labels_val"]
        new_run(cli, path, made)
        cli("stack", path).expect(code, "val")


def test_its_scores_on_val_are_as_on_test(cli: Cli, tmp_path: Path) -> None:
    """In-sample scores of few rows and many features would be far too good."""
    generator, path = np.random.default_rng(0), tmp_path / "small"
    made: dict[str, np.ndarray] = {}
    weight = generator.normal(size=(3, 40)) / 5
    for name, rows in (("train", 60), ("val", 60), ("test", 4000)):
        features = generator.normal(size=(rows, 40))
        chances = softmax(features @ weight.T, axis=1).cumsum(axis=1)
        made[f"features_{name}"] = features.astype(np.float32)
        made[f"labels_{name}"] = (generator.random((rows, 1)) > chances).sum(axis=1).clip(0, 2)
    new_run(cli, path, made)
    metrics = cli("stack", path, "--json").json["metrics"]
    tensors, _ = heads_of(path)
    mixture = sum(
        float(weight) * np.exp(log_softmax(logits(theta, made["features_test"]), axis=1))
        for weight, theta in zip(tensors["weights"], tensors["members"], strict=True)
    )
    test = -np.log(mixture[np.arange(4000), made["labels_test"]]).mean()
    own = metrics["val"]["stack"]
    assert abs(own["nll"] - test) < 3 * own["standard_error"]


def test_slow_heads_are_left_out(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 320 * 18 * 21 - 1  # of train and val: 320 rows, 18 parameters, 21 modes
    monkeypatch.setattr(stack, "MOST_WORK", {"cpu": most})
    metrics = cli("stack", small_run, "--json").json["metrics"]
    assert [head["name"] for head in metrics["heads"][1:]] == ["train", "val"]
    assert metrics["left_out"] == ["train+val (would take too long)"]
    monkeypatch.setattr(stack, "MOST_WORK", {"cpu": 1})
    cli("stack", small_run, "--force").expect(69, "18 parameters")
    (small_run.with_name("small.bnn") / "posteriors" / "stack.safetensors").unlink()
    found = cli("auto", small_run, "--json").json
    assert "skipped" in next(rung for rung in found["rungs"] if rung["name"] == "stack")["note"]


def test_an_interrupted_stack_goes_on_after_the_ways_that_it_has_refitted(
    cli: Cli, stacked: tuple[Path, dict[str, Any]], small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refit, asked = stack.refit_head, []

    def ending(name: str, *given: Any, **named: Any) -> Any:
        asked.append(name)
        if name == "train+val" and len(asked) == 3:
            raise BudgetSpent
        return refit(name, *given, **named)

    monkeypatch.setattr(stack, "refit_head", ending)
    stopped = cli("stack", small_run)
    assert stopped.code != 0
    assert "continue with: bnncli stack" in stopped.stderr
    cli("stack", small_run, "--resume").expect(0, "resuming after 2 of 3 refits")
    assert asked == ["train", "val", "train+val", "train+val"]
    found, whole = heads_of(small_run), heads_of(stacked[0])
    assert found[0].keys() == whole[0].keys()
    assert all(torch.equal(tensor, whole[0][name]) for name, tensor in found[0].items())
    assert not list((small_run.with_name("small.bnn") / "posteriors").glob(".stack*"))


@pytest.mark.long
def test_auto_resumes_a_stack_ended_by_budget(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refit = stack.refit_head

    def ending(name: str, *given: Any, **named: Any) -> Any:
        if name == "train+val":
            raise BudgetSpent
        return refit(name, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(stack, "refit_head", ending)
        found = cli("auto", small_run, "--json").json
    (rung,) = [rung for rung in found["rungs"] if rung["name"] == "stack"]
    assert (rung["is_there"], "the budget is spent: continue with: bnncli stack" in rung["note"]) == (False, True)
    cli("auto", small_run).expect(0, "resuming after 2 of 3 refits")


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "order"), [(1.0, ["stack", "fit-laplace"]), (1e4, ["fit-laplace", "stack"])])
def test_auto_stacks_last_where_there_is_no_time_for_it(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, order: list[str]
) -> None:
    monkeypatch.setattr(auto, "estimate_seconds", lambda *given: seconds)
    found = cli("auto", small_run, "--budget", "30s", "--json").json
    assert [rung["name"] for rung in found["rungs"] if rung["name"] in order] == order
