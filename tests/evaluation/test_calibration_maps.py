"""Calibration maps against scikit-learn, SciPy and NumPy, and where fits have no minimum."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize, special
from sklearn.calibration import _SigmoidCalibration
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from bnncli.evaluation import calibration_maps as module
from bnncli.evaluation.calibration_maps import (
    MAPS,
    NUM_BINS,
    CalibrationData,
    FittedMap,
    choose_map,
    fit_map,
    open_map,
)
from bnncli.evaluation.temperature import fit_temperature
from bnncli.likelihoods import likelihood_of


def draw(size: int, num_classes: int, *, seed: int = 0, labels: bool = False) -> CalibrationData:
    """Overconfident logits of classes of unequal frequency."""
    generator = np.random.default_rng(seed)
    logits = np.round(3 * generator.normal(size=(size, num_classes)) * 64) / 64
    true = logits / 2 + np.linspace(-1, 1, num_classes)
    if labels:
        found = (generator.random(logits.shape) < special.expit(true)).astype(np.int64)
        return CalibrationData(logits, found, likelihood_of(num_classes, "multilabel"))
    chances = special.softmax(true, axis=1).cumsum(axis=1)
    found = (generator.random((size, 1)) > chances).sum(axis=1).clip(max=num_classes - 1)
    return CalibrationData(logits, found, likelihood_of(num_classes))


def fit(name: str, data: CalibrationData, precision: float = 1e-6) -> module.CalibrationMap:
    return MAPS[name].fit(data, precision, None)


def probs_of(name: str, data: CalibrationData, new: NDArray, precision: float = 1e-6) -> NDArray:
    return np.asarray(fit(name, data, precision).probs(torch.from_numpy(new)).numpy())


def odds_of(logits: NDArray) -> NDArray:
    """Log odds of each class against the others, by its definition."""
    others = [np.delete(logits, k, axis=1) for k in range(logits.shape[1])]
    return logits - np.stack([special.logsumexp(part, axis=1) for part in others], axis=1)


NEW = draw(200, 3, seed=1).logits


def divided(columns: list[NDArray]) -> NDArray:
    found = np.stack(columns, axis=1)
    return found / found.sum(axis=1, keepdims=True)


def test_temperature_is_that_of_fit_temperature() -> None:
    data = draw(400, 4)
    beta = float(fit("temperature", data).tensors["map_weight"])
    assert beta == 1 / fit_temperature(data.labelled).temperature


@pytest.mark.parametrize("name", ["vector", "matrix", "dirichlet"])
def test_maps_of_all_logits_have_the_lowest_nll_that_scipy_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guo et al. (2017), Kull et al. (2019): an affine function of the logits or log probabilities; both solvers."""
    data = draw(600, 3)
    inputs = special.log_softmax(data.logits, axis=1) if name == "dirichlet" else data.logits
    for prior in ("WEAK", "BIAS"):
        monkeypatch.setattr(module, prior, 1e-6)

    def nll(flat: NDArray) -> float:
        weight = np.diag(flat[:3]) if name == "vector" else flat[:-3].reshape(3, 3)
        logs = special.log_softmax(inputs @ weight.T + flat[-3:], axis=1)
        return -float(logs[np.arange(600), data.labels].mean())

    start = np.concatenate([np.ones(3) if name == "vector" else np.eye(3).ravel(), np.zeros(3)])
    best = optimize.minimize(nll, start, method="BFGS", options={"gtol": 1e-7}).fun
    for most in (600, 0):
        monkeypatch.setattr(module, "_MOST_NEWTON", most)
        found = fit(name, data)
        weight, bias = found.tensors["map_weight"].numpy(), found.tensors["map_bias"].numpy()
        assert nll(np.concatenate([weight.ravel(), bias])) == pytest.approx(best, abs=1e-6)


def test_dirichlet_calibration_is_a_logistic_regression_on_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw(600, 3)
    for prior in ("WEAK", "BIAS"):
        monkeypatch.setattr(module, prior, 1e-6)
    logs = special.log_softmax(data.logits, axis=1)
    oracle = LogisticRegression(C=1e6, tol=1e-10, max_iter=5000).fit(logs, data.labels)
    expected = oracle.predict_proba(special.log_softmax(NEW, axis=1))
    assert np.abs(probs_of("dirichlet", data, NEW) - expected).max() < 1e-4


def test_a_strong_prior_gives_one_temperature() -> None:
    for data in (draw(300, 3), draw(300, 3, labels=True)):
        expected = probs_of("temperature", data, NEW)
        np.testing.assert_allclose(probs_of("vector", data, NEW, 1e9), expected, atol=1e-5)


def test_platt_is_the_sigmoid_of_scikit_learn() -> None:
    data = draw(500, 3)
    odds, new = odds_of(data.logits), odds_of(NEW)
    columns = [_SigmoidCalibration().fit(odds[:, k], data.labels == k).predict(new[:, k]) for k in range(3)]
    np.testing.assert_allclose(probs_of("platt", data, NEW), divided(columns), atol=1e-5)


@pytest.mark.parametrize("signs", [(1, 1), (1, -1)])
def test_beta_is_a_logistic_regression_on_both_logs(signs: tuple[int, int]) -> None:
    """Kull et al. (2017), as betacal fits it: a negative coefficient is dropped."""
    data = draw(500, 2)
    log_odds = data.logits[:, 1] - data.logits[:, 0]
    both = np.stack([special.log_expit(log_odds), -special.log_expit(-log_odds)], axis=1)
    chance = special.expit(both @ (0.6 * np.array(signs)) + 0.3)
    labels = (np.random.default_rng(3).random(500) < chance).astype(np.int64)
    data = CalibrationData(data.logits, labels, data.likelihood)
    kept = [0] if signs[1] < 0 else [0, 1]
    oracle = LogisticRegression(C=1e8, tol=1e-10, max_iter=5000).fit(both[:, kept], labels)
    found = fit("beta", data).tensors
    expected = np.zeros(2)
    expected[kept] = oracle.coef_[0]
    np.testing.assert_allclose([float(found["map_present"]), float(found["map_absent"])], expected, atol=1e-3)
    assert float(found["map_bias"]) == pytest.approx(oracle.intercept_[0], abs=1e-3)


def test_isotonic_is_the_regression_of_scikit_learn_between_its_ends() -> None:
    data = draw(500, 2)
    odds, new = data.logits[:, 1] - data.logits[:, 0], NEW[:, 1] - NEW[:, 0]
    oracle = IsotonicRegression(out_of_bounds="clip").fit(odds, data.labels)
    expected, found = oracle.predict(new), probs_of("isotonic", data, NEW[:, :2])[:, 1]
    values = np.unique(oracle.y_thresholds_)
    inside = (expected >= values[1]) & (expected <= values[-2])
    assert 50 < inside.sum() < 200
    np.testing.assert_allclose(found[inside], expected[inside], atol=1e-9)
    assert (np.diff(found[new.argsort()]) >= -1e-12).all()
    assert found.min() > 1e-3  # the ends count one example more
    assert found.max() < 1 - 1e-3


def test_the_histogram_is_the_share_in_each_bin() -> None:
    data = draw(2000, 3)
    probs, new = special.softmax(data.logits, axis=1), special.softmax(NEW, axis=1)
    columns = []
    for k in range(3):
        places, others = ((part[:, k] * NUM_BINS).astype(int) for part in (probs, new))
        shares = [
            ((data.labels[places == j] == k).sum() + (j + 0.5) / NUM_BINS) / ((places == j).sum() + 1)
            for j in range(NUM_BINS)
        ]
        columns.append(np.array(shares)[others])
    np.testing.assert_allclose(probs_of("histogram", data, NEW), divided(columns), atol=1e-9)


@pytest.mark.parametrize("name", MAPS)
def test_labels_by_themselves_are_mapped_each_as_two_classes(name: str) -> None:
    data = draw(400, 3, labels=True)
    assert MAPS[name].takes_labels == (name not in ("matrix", "dirichlet"))
    if name == "temperature" or not MAPS[name].takes_labels:
        return
    for k in range(3):
        own = np.stack([np.zeros(400), data.logits[:, k]], axis=1)
        alone = CalibrationData(own, data.labels[:, k], likelihood_of(2))
        if name == "vector":  # affine in the log odds
            name = "platt"
        expected = probs_of(name, alone, np.stack([np.zeros(200), NEW[:, k]], axis=1))[:, 1]
        np.testing.assert_allclose(probs_of(name, data, NEW)[:, k], expected, atol=1e-9)


SEPARABLE = np.array([[9.0, 0.0, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 7.0]] * 20)
CASES = {
    "separable": (SEPARABLE, np.arange(60) % 3),
    "a class that is absent": (draw(60, 3).logits, np.arange(60) % 2),
    "a single class": (draw(60, 3).logits, np.zeros(60, np.int64)),
    "certain": (1e3 * SEPARABLE, np.roll(np.arange(60) % 3, 1)),
    "equal": (np.zeros((60, 3)), np.arange(60) % 3),
    "one row": (np.array([[1.0, 2.0, 0.0]]), np.array([1])),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("case", CASES)
def test_probabilities_stay_finite_and_above_zero_where_a_fit_has_no_minimum(name: str, case: str) -> None:
    data = CalibrationData(*CASES[case], likelihood_of(3))
    new = np.concatenate([NEW, 1e3 * NEW[:5], np.zeros((1, 3))])
    logs = fit(name, data, 0.01).log_probs(torch.from_numpy(new)).numpy()
    assert np.isfinite(logs).all()
    np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1, rtol=1e-9)


def test_scores_are_those_of_maps_that_have_not_seen_a_row() -> None:
    data, folds = draw(200, 3), np.arange(200) % 5
    for name in MAPS:
        found = fit_map(name, data, folds)
        kept = data.take(folds != 2)
        alone = MAPS[name].fit(kept, found.precision or 0.0, None)
        expected = alone.class_logits(torch.from_numpy(data.logits[folds == 2])).numpy()
        np.testing.assert_allclose(
            special.softmax(found.logits[folds == 2], 1), special.softmax(expected, 1), atol=1e-4
        )
        of_labels = special.log_softmax(found.logits, axis=1)[np.arange(200), data.labels]
        np.testing.assert_allclose(found.losses, -of_labels, rtol=1e-9)


def test_the_prior_precision_has_the_lowest_out_of_fold_nll() -> None:
    """Labels without any relation to the off-diagonal want a strong prior, and many labels of a mixture a weak one."""
    plain = fit_map("matrix", draw(150, 5), np.arange(150) % 5)
    data = draw(3000, 5)
    mixed = CalibrationData(data.logits @ np.random.default_rng(0).normal(size=(5, 5)), data.labels, data.likelihood)
    far = fit_map("matrix", mixed, np.arange(3000) % 5)
    assert plain.precision is not None
    assert far.precision is not None
    assert plain.precision >= 10 > 1 >= far.precision


def fitted(name: str, losses: NDArray) -> FittedMap:
    whole = MAPS[name]({}, likelihood_of(2))
    return FittedMap(whole, [], None, np.zeros((len(losses), 2)), losses)


def test_the_best_map_is_chosen_if_it_beats_temperature_by_a_standard_error() -> None:
    losses = np.random.default_rng(0).exponential(size=100)
    noise = np.random.default_rng(1).normal(size=100)
    noise = (noise - noise.mean()) / noise.std(ddof=1)  # a standard error of 0.1
    plain = fitted("temperature", losses)
    worse, near, better = (fitted("beta", losses + gap + noise) for gap in (0.2, -0.09, -0.11))
    assert choose_map([plain, worse])[0] is plain
    assert choose_map([plain, near])[0] is plain
    chosen, why = choose_map([plain, worse, better])
    assert chosen is better
    assert "0.1100 +- 0.1000" in why


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_stored_map_is_the_same_and_steps_need_nothing_of_this_package(name: str, num_classes: int) -> None:
    data = draw(300, num_classes)
    found = fit(name, data, 1.0)
    again = open_map(name, {**found.tensors, "mean": torch.zeros(3)}, data.likelihood)
    new = torch.from_numpy(data.logits[:20])
    assert torch.equal(found.class_logits(new), again.class_logits(new))
    values = {"logits": new, **found.tensors}
    for step in found.steps:
        scope: dict[str, object] = {"Values": dict, "v": values}
        exec(inspect.getsource(step), scope)
        values |= eval(f"{step.__name__}(v)", scope)
    assert torch.equal(values["logits"], found.class_logits(new))
    with pytest.raises(ValueError, match="expected a map"):
        open_map("none", {}, data.likelihood)


def test_temperature_is_tried_however_many_rows_there_are() -> None:
    tried = [name for name in MAPS if module.is_tried(name, 10**8, likelihood_of(10))]
    assert tried == ["temperature"]
