"""Temperature scaling: the minimum of a convex function, its limits, and the command that stores it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.seeds import seeded
from safetensors.numpy import load_file
from scipy import optimize, special
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from bnncli.artifacts.features import read_features
from bnncli.evaluation import temperature as module
from bnncli.evaluation.temperature import (
    LARGEST,
    SMALLEST,
    LabelledLogits,
    fit_temperature,
    held_out_losses,
)
from bnncli.inference.prior_variants import stratified_folds
from bnncli.inference.stacking import count_modes, fit_shared_temperature, refit_head, stacking_weights
from bnncli.likelihoods import likelihood_of
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget


def make_logits(num_classes: int, *, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and labels that are drawn from the softmax of a quarter of them."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(300, num_classes, generator=generator)
    labels = torch.multinomial(torch.softmax(logits / 4, dim=1), 1, generator=generator)[:, 0]
    return logits, labels


def labelled(logits: Tensor, labels: Tensor) -> LabelledLogits:
    return LabelledLogits(logits, labels, likelihood_of(logits.shape[1]))


def mean_nll(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    log_probs = special.log_softmax(logits.astype(np.float64) / temperature, axis=1)
    return float(-log_probs[np.arange(len(labels)), labels].mean())


@pytest.mark.parametrize("num_classes", [2, 3, 50])
@pytest.mark.parametrize("scale", [0.05, 3.0, 400.0])
def test_the_temperature_is_the_minimum_that_scipy_finds(num_classes: int, scale: float) -> None:
    logits, labels = make_logits(num_classes, scale=scale)
    labels = labels if scale != 0.05 else torch.where(torch.arange(300) % 3 == 0, logits.argmax(dim=1), labels)

    def at(log_temperature: float) -> float:
        return mean_nll(logits.numpy(), labels.numpy(), math.exp(log_temperature))

    bounds = (math.log(SMALLEST), math.log(LARGEST))
    oracle = optimize.minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 1e-10})
    fit = fit_temperature(labelled(logits, labels))
    assert math.log(fit.temperature) == pytest.approx(oracle.x, abs=1e-5)
    assert float(fit.nll_after.mean()) <= oracle.fun + 1e-13
    assert float(fit.nll_before.mean()) == pytest.approx(at(0.0), rel=1e-12)


def test_the_slope_is_zero_at_the_temperature_and_blocks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = make_logits(5, scale=3.0)
    fit = fit_temperature(labelled(logits, labels))
    beta = torch.tensor(1 / fit.temperature, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(beta * logits.double(), labels).backward()
    assert beta.grad is not None
    assert abs(float(beta.grad)) < 1e-12
    monkeypatch.setattr(module, "BLOCK_LOGITS", 7 * 5)
    assert fit_temperature(labelled(logits, labels)).temperature == pytest.approx(fit.temperature, rel=1e-12)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_held_out_losses_are_those_of_refitting_without_each_example(num_classes: int) -> None:
    logits, labels = make_logits(num_classes, scale=3.0)
    logits, labels = logits[:80], labels[:80]
    fit = fit_temperature(labelled(logits, labels))
    found = held_out_losses(labelled(logits, labels), fit)
    exact = []
    for left_out in range(80):
        rest = [row for row in range(80) if row != left_out]
        other = fit_temperature(labelled(logits[rest], labels[rest])).temperature
        exact.append(mean_nll(logits[[left_out]].numpy(), labels[[left_out]].numpy(), other))
    optimism = np.array(exact) - fit.nll_after.numpy()
    np.testing.assert_allclose(found.numpy() - fit.nll_after.numpy(), optimism, rtol=0.15, atol=2e-4)
    assert found.mean().item() - fit.nll_after.mean().item() == pytest.approx(optimism.mean(), rel=0.1)


@pytest.mark.parametrize("likelihood", ["classes", "one logit", "labels"])
def test_one_temperature_of_several_networks_is_the_best_for_their_mean_and_judged_without_each_example(
    likelihood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_LOGITS", 500)
    logits, labels = make_logits(3, scale=3.0)
    generator = torch.Generator().manual_seed(9)
    every = torch.stack([logits + torch.randn(300, 3, generator=generator) for _ in range(4)])
    kind = likelihood_of(3)
    if likelihood == "one logit":
        every, labels, kind = every[:, :, :1], (labels == 0).long(), likelihood_of(1)
    elif likelihood == "labels":
        labels, kind = torch.nn.functional.one_hot(labels, 3).byte(), likelihood_of(3, "multilabel")

    def losses(log_temperature: float, rows: np.ndarray) -> np.ndarray:
        scaled = every[:, rows].double().numpy() / math.exp(log_temperature)
        own = labels[rows].numpy()
        if likelihood == "classes":
            return -np.log(special.softmax(scaled, axis=2).mean(axis=0)[np.arange(len(rows)), own])
        there = special.expit(scaled).mean(axis=0)
        own = own.reshape(len(rows), -1)
        return -np.log(np.where(own > 0, there, 1 - there)).mean(axis=1)

    def best(rows: np.ndarray) -> float:
        found = optimize.minimize_scalar(
            lambda at: losses(at, rows).mean(),
            bounds=(math.log(0.05), math.log(20)),
            method="bounded",
            options={"xatol": 1e-10},
        )
        return float(found.x)

    fit = fit_shared_temperature(every, labels, kind)
    everything = np.arange(300)
    assert math.log(fit[0]) == pytest.approx(best(everything), abs=1e-4)
    assert abs(math.log(fit[0])) > 0.1
    for row in (0, 1, 5, 77, 120, 299):
        without = best(np.delete(everything, row))
        assert float(fit[1][row]) == pytest.approx(losses(without, everything[row : row + 1])[0], abs=2e-4)
    assert float(fit[1].mean()) > losses(math.log(fit[0]), everything).mean()


def test_networks_that_are_all_right_have_no_shared_temperature() -> None:
    logits = torch.eye(3).repeat(2, 4, 1)
    assert fit_shared_temperature(logits, logits[0].argmax(1), likelihood_of(3)) is None


def test_held_out_losses_at_a_bound_are_the_losses_there() -> None:
    logits, labels = torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 1])
    fit = fit_temperature(labelled(logits, labels))
    assert torch.equal(held_out_losses(labelled(logits, labels), fit), fit.nll_after)


def test_a_single_logit_has_the_temperature_of_the_two_that_it_stands_for() -> None:
    logits, labels = make_logits(2, scale=3.0)
    two = labelled(logits - logits[:, :1], labels)
    one = labelled(two.logits[:, 1:], labels)
    fits = fit_temperature(one), fit_temperature(two)
    assert fits[0].temperature == fits[1].temperature
    assert torch.equal(fits[0].nll_after, fits[1].nll_after)
    assert torch.equal(held_out_losses(one, fits[0]), held_out_losses(two, fits[1]))


@pytest.mark.parametrize("factor", [0.1, 8.0])
def test_scaled_logits_have_the_scaled_temperature(factor: float) -> None:
    logits, labels = make_logits(4, scale=3.0)
    one, other = (fit_temperature(labelled(by * logits.double(), labels)) for by in (1.0, factor))
    assert other.temperature == pytest.approx(factor * one.temperature, rel=1e-9)
    torch.testing.assert_close(other.nll_after, one.nll_after)


@pytest.mark.parametrize(
    ("logits", "labels", "expected", "why"),
    [
        ([[3.0, 1.0], [0.0, 2.0]], [0, 1], SMALLEST, "separable"),
        ([[9e9, 1.0], [0.0, 9e9]], [0, 1], SMALLEST, "separable"),
        ([[3.0, 1.0], [0.0, 2.0]], [1, 0], LARGEST, "hopeless"),
        ([[1.0, 1.0], [1.0, 1.0]], [1, 0], 1.0, None),
        ([[3.0, 1.0], [2.0, 2.0]], [0, 1], SMALLEST, "separable"),
    ],
    ids=["separable", "separable far", "hopeless", "constant", "separable but for a tie"],
)
def test_a_minimum_at_infinity_is_bounded_and_said(
    logits: list[list[float]], labels: list[int], expected: float, why: str | None
) -> None:
    fit = fit_temperature(labelled(torch.tensor(logits), torch.tensor(labels)))
    assert fit.temperature == pytest.approx(expected)
    assert fit.unbounded == why
    assert torch.isfinite(fit.nll_after).all()


def test_the_command_divides_the_head_and_records_what_it_did(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    done = cli("fit-temperature", small_run, "--json")
    metrics = done.json["metrics"]
    val = read_features(folder / "features/val.h5")
    assert val.head_bias is not None
    tensors = load_file(folder / "posteriors/temperature.safetensors")
    theta = np.concatenate([val.head_weight.ravel(), val.head_bias])
    np.testing.assert_allclose(tensors["mean"] * tensors["temperature"], theta, rtol=1e-6)
    logits = val.features.astype(np.float64) @ val.head_weight.T + val.head_bias
    assert tensors["temperature"][0] == metrics["temperature"]
    for name, temperature in (("before", 1.0), ("after", metrics["temperature"])):
        assert metrics[f"val_nll_{name}"]["value"] == pytest.approx(mean_nll(logits, val.labels, temperature), rel=1e-6)
    assert metrics["val_nll_change"]["value"] < 0
    assert metrics["val_nll_change"]["standard_error"] > 0
    assert cli("fit-temperature", small_run, "--json").json["metrics"] == metrics
    assert cli("verify", folder / "posteriors/temperature.safetensors").code == 0


def test_a_temperature_predicts_by_plug_in_and_keeps_the_classes(cli: Cli, small_run: Path) -> None:
    assert cli("fit-temperature", small_run).code == 0
    done = cli("predict", small_run, "--posterior", "temperature", "--posterior", "map", "--split", "test", "--json")
    assert done.json["outputs"][0]["role"] == "predictions.temperature.plug-in.test"
    for command in ("evaluate", "diagnose", "status"):
        assert "temperature" in cli(command, small_run).stdout


def test_the_mean_of_another_posterior_can_be_scaled(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    done = cli("fit-temperature", small_run, "--base", "hmc", "--name", "cold", "--json")
    assert {entry["role"] for entry in done.json["inputs"]} == {"features.val", "base"}
    assert done.json["metrics"]["base"] == "hmc"
    refused = cli("fit-temperature", small_run, "--base", "refine", "--name", "no", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "wrong_type")
    assert cli("inspect", folder / "posteriors/cold.safetensors", "--json").json["meta"]["base"] == "hmc"


def test_without_a_labelled_val_split_there_is_no_temperature(
    cli: Cli, small_run: Path, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    (small_run.with_name("small.bnn") / "features/val.h5").unlink()
    done = cli("fit-temperature", small_run, "--json")
    assert (done.code, done.json["error"]["code"]) == (66, "missing_input")
    assert "--hold-out" in done.json["error"]["hint"]
    np.savez(tmp_path / "f.npz", **{name: part for name, part in arrays.items() if name != "labels_val"})
    assert cli("extract-features", tmp_path / "run", "--from-npz", tmp_path / "f.npz").code == 0
    assert cli("fit-temperature", tmp_path / "run", "--json").json["error"]["code"] == "no_labels"


def test_rows_shared_with_the_training_split_are_warned_of(
    cli: Cli, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    np.savez(tmp_path / "f.npz", **{name: part for name, part in arrays.items() if "val" not in name})
    run, words = tmp_path / "run", ("--from-npz", tmp_path / "f.npz")
    assert cli("extract-features", run, *words, "--hold-out", "val=train:30").code == 0
    assert not cli("fit-temperature", run, "--json").json["warnings"]
    assert cli("extract-features", run, *words, "--force").code == 0
    warnings = cli("fit-temperature", run, "--force", "--json").json["warnings"]
    assert any("'train' and 'val' share 30 rows" in text for text in warnings)


def test_a_val_split_that_tells_no_temperature_is_warned_of(
    cli: Cli, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    logits = arrays["features_val"] @ arrays["head_weight"].T + arrays["head_bias"]
    np.savez(tmp_path / "f.npz", **{**arrays, "labels_val": logits.argmax(axis=1)})
    assert cli("extract-features", tmp_path / "run", "--from-npz", tmp_path / "f.npz").code == 0
    done = cli("fit-temperature", tmp_path / "run", "--json")
    assert (done.json["metrics"]["temperature"], done.json["metrics"]["unbounded"]) == (SMALLEST, "separable")
    assert "has the largest logit in every val example" in done.json["warnings"][0]


def log_scores(rows: int, members: int, seed: int = 0) -> Tensor:
    """Log probabilities (N, M) of labels, each member better on some rows."""
    return torch.log(torch.rand(rows, members, generator=seeded(seed), dtype=torch.float64) ** 3 + 1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 20.0])
@pytest.mark.parametrize(("rows", "members"), [(200, 2), (300, 5), (3, 4)])
def test_weights_are_those_of_a_general_optimiser(rows: int, members: int, smoothing: float) -> None:
    scores = log_scores(rows, members)
    shares = scores.exp().numpy()

    def loss(free: np.ndarray) -> float:
        weights = np.exp(free - free.max())
        weights /= weights.sum()
        return float(-np.log(shares @ weights).sum() - smoothing * np.log(weights + 1e-300).sum()) / rows

    found = min(
        (minimize(loss, start, method="BFGS", options={"gtol": 1e-9}) for start in np.eye(members)),
        key=lambda one: one.fun,
    )
    ours = stacking_weights(scores, smoothing=smoothing).numpy()
    assert ours.sum() == pytest.approx(1)
    assert loss(np.log(ours + 1e-300)) <= found.fun + 2e-6


def test_a_member_that_is_best_everywhere_has_the_weight_and_complementary_ones_share_it() -> None:
    best = torch.tensor([[-0.1, -1.0]]).repeat(500, 1)
    assert stacking_weights(best)[0] > 0.99
    halves = torch.cat([torch.tensor([[-0.1, -5.0]]).repeat(50, 1), torch.tensor([[-5.0, -0.1]]).repeat(50, 1)])
    np.testing.assert_allclose(stacking_weights(halves), [0.5, 0.5], atol=1e-3)
    assert torch.isfinite(stacking_weights(torch.tensor([[-2000.0, -1.0], [-1.0, -2000.0]]))).all()


class Units:
    """A task that counts its units."""

    done = 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.done += amount


def problem(rows: int = 300) -> tuple[Tensor, Tensor]:
    features = torch.randn(rows, 4, generator=seeded(), dtype=torch.float64)
    noise = torch.randn(rows, 3, generator=seeded(1), dtype=torch.float64)
    return features, (features[:, :3] * 1.5 + noise).argmax(dim=1)


def test_a_refitted_head_is_the_logistic_regression_whose_folds_predict_best() -> None:
    features, labels = problem()
    layout = HeadLayout(3, 4, has_bias=False)
    folds = stratified_folds(labels, 5, seeded(2))
    every = [torch.ones(300, dtype=torch.bool), *(folds != fold for fold in range(5))]
    targets = [LastLayerTarget(features[some], labels[some], layout, Prior(1.0)) for some in every]

    def fitted(rows: Tensor, precision: float) -> np.ndarray:
        model = LogisticRegression(C=1 / precision, fit_intercept=False, tol=1e-10, max_iter=5000)
        return np.asarray(model.fit(features[rows].numpy(), labels[rows].numpy()).coef_)

    def log_probs(theta: Tensor) -> Tensor:
        heads = theta.view(-1, 3, 4)[folds.long()]
        return torch.log_softmax(torch.einsum("nd,nkd->nk", features, heads), dim=1)[torch.arange(300), labels]

    task = Units()
    found = refit_head("train", targets, log_probs, task=task)
    assert task.done == count_modes(len(targets), None)
    assert found.precision is not None
    np.testing.assert_allclose(found.theta.view(3, 4), fitted(every[0], found.precision), atol=0.02)
    for fold in range(5):
        np.testing.assert_allclose(found.folds[fold].view(3, 4), fitted(every[1 + fold], found.precision), atol=0.02)

    def score(precision: float) -> float:
        heads = np.stack([fitted(every[1 + fold], precision).ravel() for fold in range(5)])
        return float(log_probs(torch.from_numpy(heads)).mean())

    tried = {precision: score(precision) for precision in 10.0 ** np.arange(-2, 5.5, 0.5)}
    assert tried[min(tried, key=lambda one: abs(np.log(one / found.precision)))] >= max(tried.values()) - 1e-4


def test_rows_that_no_fold_has_are_fitted_once() -> None:
    features, labels = problem()
    layout, seen = HeadLayout(3, 4, has_bias=False), []

    def log_probs(theta: Tensor) -> Tensor:
        seen.append(theta.shape)
        return torch.zeros(10)

    target = LastLayerTarget(features, labels, layout, Prior(1.0))
    task = Units()
    found = refit_head("train", [target], log_probs, task=task, precisions=[3.0])
    assert task.done == count_modes(1, [3.0])
    assert (found.precision, tuple(found.folds.shape)) == (3.0, (1, 12))
    assert set(seen) == {(1, 12)}
    torch.testing.assert_close(found.theta, found.folds[0])
