"""The combined score against scikit-learn and scipy, and the rate of false alarms of thresholds on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from problems.seeds import seeded
from scipy.special import logsumexp
from scipy.stats import combine_pvalues
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from bnncli.evaluation import feature_scores
from bnncli.evaluation.decisions import fit_outliers
from bnncli.evaluation.detectors import default_score, usual_score
from bnncli.evaluation.feature_scores import NUM_NEIGHBORS, Combined, TailRanks
from bnncli.parameters.layouts import HeadLayout

CPU = torch.device("cpu")
LAYOUT = HeadLayout(3, 6)
THETA = torch.randn(LAYOUT.num_params, generator=seeded(11), dtype=torch.float64)


def make_split(num_rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Correlated features around three class means, and labels."""
    labels = torch.arange(num_rows) % 3
    mixing = torch.randn(6, 6, generator=seeded(7))
    means = 4 * torch.randn(3, 6, generator=seeded(8))
    return torch.randn(num_rows, 6, generator=seeded(seed)) @ mixing + means[labels], labels


def fit(train: Tensor, labels: Tensor | None, val: Tensor) -> Combined:
    return Combined.fit(train, labels, val, layout=LAYOUT, theta=THETA, device=CPU, generator=seeded(0))


def expected_views(train: Tensor, labels: Tensor, features: Tensor) -> list[NDArray]:
    """Energy, distance to the nearest class and to the nearest features, by scipy and scikit-learn."""
    x, y, new = train.double().numpy(), labels.numpy(), features.double().numpy()
    weight, bias = (part.numpy() for part in LAYOUT.split(THETA) if part is not None)
    means = np.stack([x[y == label].mean(axis=0) for label in range(3)])
    within = EmpiricalCovariance(assume_centered=True).fit(x - means[y])
    unit, far = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (x, new))
    distances, _ = NearestNeighbors(n_neighbors=NUM_NEIGHBORS).fit(unit).kneighbors(far)
    nearest = np.min([within.mahalanobis(new - mean) for mean in means], axis=0)
    return [logsumexp(new @ weight.T + bias, axis=1), -nearest, -distances[:, -1]]


def expected_p(references: NDArray, scores: NDArray) -> NDArray:
    """p-values by ranks, interpolated; below all references they fall as the reciprocal of the distance."""
    ordered, size = np.sort(references), len(references)
    inside = (1 + np.interp(scores, ordered, np.arange(1, size + 1))) / (size + 1)
    lowest = ordered[: size // 10]
    distance = np.maximum(0, ordered[0] - scores) / (ordered[size // 10] - lowest).mean()
    return inside / (1 + distance)


def test_the_score_is_fishers_statistic_of_three_p_values() -> None:
    train, labels = make_split(300, seed=0)
    val = make_split(120, seed=1)[0]
    features = torch.cat([make_split(40, seed=2)[0], 6 * torch.randn(40, 6, generator=seeded(3))])
    views = zip(expected_views(train, labels, val), expected_views(train, labels, features), strict=True)
    p_values = np.stack([expected_p(*view) for view in views])
    statistic, _ = combine_pvalues(p_values, method="fisher", axis=0)
    np.testing.assert_allclose(fit(train, labels, val).scores(features), -statistic / 2, rtol=1e-5, atol=1e-5)


def test_many_references_are_thinned_but_for_the_lowest() -> None:
    references = torch.randn(20_000, generator=seeded(4), dtype=torch.float64)
    scores = torch.linspace(-5, 5, 500, dtype=torch.float64)
    found = TailRanks.of(references)
    assert len(found.knots) <= feature_scores.MOST_KNOTS
    np.testing.assert_allclose(found.log_p(scores), np.log(expected_p(references.numpy(), scores.numpy())), atol=0.02)


def test_references_that_are_all_alike_tell_higher_from_lower() -> None:
    found = TailRanks.of(torch.full((50,), 3.0)).log_p(torch.tensor([2.0, 3.0, 4.0]))
    assert torch.isfinite(found).all()
    assert found[0] < found[1] <= found[2] == 0


def test_without_a_class_or_a_head_the_other_views_remain() -> None:
    train, labels = make_split(300, seed=0)
    val = make_split(100, seed=1)[0]
    assert list(fit(train, None, val).ranks) == ["energy", "knn"]
    assert list(fit(train, torch.stack([labels, labels], 1), val).ranks) == [
        "energy",
        "knn",
    ]  # several labels an example
    headless = Combined.fit(train, labels, val, device=CPU, generator=seeded(0))
    assert list(headless.ranks) == ["mahalanobis", "knn"]
    constant = labels.float().unsqueeze(1).expand(-1, 6)  # no feature varies within a class
    assert "mahalanobis" not in fit(constant, labels, constant).ranks


def test_many_training_examples_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_scores, "COVARIANCE_ROWS", 100)
    monkeypatch.setattr(feature_scores, "NEIGHBOR_ROWS", 50)
    train, labels = make_split(300, seed=0)
    found = fit(train, labels, make_split(100, seed=1)[0])
    again = fit(train, labels, make_split(100, seed=1)[0])
    assert len(found.neighbors.features) == 50
    assert found.gaussians is not None
    assert again.gaussians is not None
    assert torch.equal(found.gaussians.total, again.gaussians.total)
    far = make_split(50, seed=5)[0]
    assert torch.equal(found.scores(far), again.scores(far))


def test_nothing_has_no_scores() -> None:
    train, labels = make_split(300, seed=0)
    assert fit(train, labels, train[:50]).scores(train[:0]).shape == (0,)


@pytest.mark.parametrize("num_val", [30, 400])
def test_outliers_that_one_view_alone_sees_are_caught(num_val: int) -> None:
    """Each kind is plain to one of the parts and hidden from another; a few references do not blunt the sum."""
    train, labels = make_split(600, seed=0)
    inside = make_split(500, seed=2)[0]
    found = fit(train, labels, make_split(num_val, seed=1)[0])
    between = train[labels == 0].mean(dim=0) / 2 + train[labels == 1].mean(dim=0) / 2 + 0.1 * inside
    for outside in (between, 20 * torch.randn(500, 6, generator=seeded(3))):
        scores = torch.cat([found.scores(inside), found.scores(outside)])
        assert roc_auc_score([1] * 500 + [0] * 500, scores) > 0.95


@pytest.mark.parametrize("is_labeled", [True, False])
@pytest.mark.parametrize("theta", [THETA, None])
def test_a_score_out_of_its_tensors_is_the_same(is_labeled: bool, theta: Tensor | None) -> None:
    train, labels = make_split(600, seed=0)
    val, new = make_split(700, seed=1)[0], make_split(90, seed=2)[0]
    own = {"layout": LAYOUT, "theta": theta, "device": CPU}
    found = Combined.fit(train, labels if is_labeled else None, val, generator=seeded(0), **own)
    again = Combined.from_tensors(found.to_tensors(), **own)
    assert [*again.ranks] == [*found.ranks] == ["energy"] * (theta is not None) + ["mahalanobis"] * is_labeled + ["knn"]
    assert torch.equal(again.scores(new), found.scores(new))


@pytest.mark.parametrize("is_separate", [True, False])
def test_thresholds_hold_their_rate_of_false_alarms(is_separate: bool) -> None:
    """On calibration examples of their own exactly; on val itself, whose ranks the score goes by, as auto has it, within half a point."""
    train, labels = make_split(300, seed=0)
    rates = []
    for trial in range(60):
        val, calib, new = make_split(800, seed=100 + trial)[0].split([100, 100, 600])
        found = fit(train, labels, val)
        rule = fit_outliers(found.scores(calib if is_separate else val).numpy(), 0.05)
        rates.append(rule.is_outlier(found.scores(new).numpy()).mean())
    error = np.std(rates) / len(rates) ** 0.5
    assert abs(np.mean(rates) - 5 / 101) < 3 * error + (0 if is_separate else 0.005)


def test_the_default_score_is_the_best_that_all_predictions_have() -> None:
    assert default_score([{"combined", "mutual_info"}, {"combined"}]) == "combined"
    assert default_score([{"combined", "mutual_info"}, {"mutual_info"}]) == "mutual_info"
    assert default_score([{"combined"}, {"energy"}]) == "max_prob"
    assert usual_score(["max_prob", "mutual_info", None]) == "mutual_info"
    assert usual_score([]) == "combined"
