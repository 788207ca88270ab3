"""Out-of-distribution scores against scikit-learn, brute force and known cases; their rows and replicates."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from bnncli.errors import DataError
from bnncli.evaluation import detection
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.detection import Ranking, detection_rows
from bnncli.evaluation.detectors import example_scores, of_predictions
from bnncli.evaluation.scores import detection_forms, other_split_rows
from bnncli.evaluation.statistics import ExampleStatistics, examples_of

FORMS = detection_forms()
STATISTICS = {
    "auroc": detection.auroc,
    "aupr_in": detection.aupr_in,
    "aupr_out": detection.aupr_out,
    "fpr95_in": detection.fpr95_in,
    "fpr95_out": detection.fpr95_out,
}
NAMES = tuple(STATISTICS)


def estimate(ranking: Ranking) -> dict[str, float]:
    return dict(zip(NAMES, ranking.estimate(list(STATISTICS.values())), strict=True))


def random_pair(seed: int = 0, *, decimals: int = 2) -> tuple[NDArray, NDArray]:
    """Scores of two splits; with ties for few decimals."""
    generator = np.random.default_rng(seed)
    return generator.beta(6, 2, 101).round(decimals), generator.beta(3, 3, 67).round(decimals)


def expected_scores(scores_in: NDArray, scores_out: NDArray, counts_in: NDArray, counts_out: NDArray) -> list[float]:
    """All five by scikit-learn with sample weights, and by percentiles of the examples repeated."""
    scores, weights = np.concatenate([scores_in, scores_out]), np.concatenate([counts_in, counts_out])
    is_in = np.repeat([1, 0], [len(scores_in), len(scores_out)])
    repeated_in, repeated_out = np.repeat(scores_in, counts_in), np.repeat(scores_out, counts_out)
    return [
        roc_auc_score(is_in, scores, sample_weight=weights),
        average_precision_score(is_in, scores, sample_weight=weights),
        average_precision_score(1 - is_in, -scores, sample_weight=weights),
        float(np.mean(repeated_out >= np.percentile(repeated_in, 5))),
        float(np.mean(repeated_in <= np.percentile(repeated_out, 95))),
    ]


@pytest.mark.parametrize("decimals", [1, 2, 9])
def test_all_scores_are_those_of_scikit_learn_under_any_counts(decimals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores_in, scores_out = random_pair(decimals=decimals)
    monkeypatch.setattr(detection, "_BLOCK", 700)  # four replicates at a time
    (weights_in, weights_out), *_ = Bootstrap(30).weights(("test", 101), ("svhn", 67))
    found = Ranking(scores_in, scores_out).evaluate(list(STATISTICS.values()), weights_in, weights_out)
    for row in range(30):
        counts = [weights[row].astype(int) for weights in (weights_in, weights_out)]
        expected = expected_scores(scores_in, scores_out, *counts)
        np.testing.assert_allclose(found[row], expected, rtol=1e-12)


def test_the_estimate_is_that_of_scikit_learn() -> None:
    scores_in, scores_out = random_pair()
    ones = (np.ones(101, dtype=int), np.ones(67, dtype=int))
    found = estimate(Ranking(scores_in.astype(np.float32), scores_out.astype(np.float32)))
    assert tuple(found) == NAMES
    np.testing.assert_allclose(list(found.values()), expected_scores(scores_in, scores_out, *ones), rtol=1e-6)


def test_auroc_is_the_share_of_pairs_in_the_right_order_with_ties_half() -> None:
    scores_in, scores_out = random_pair()
    difference = scores_in[:, None] - scores_out
    assert (difference == 0).any()
    expected = (difference > 0).mean() + 0.5 * (difference == 0).mean()
    assert estimate(Ranking(scores_in, scores_out))["auroc"] == pytest.approx(expected, rel=1e-12)


def test_swapping_splits_and_signs_swaps_the_positive_side() -> None:
    scores_in, scores_out = random_pair()
    one, other = estimate(Ranking(scores_in, scores_out)), estimate(Ranking(-scores_out, -scores_in))
    assert one["auroc"] == pytest.approx(other["auroc"], rel=1e-12)
    for name in ("aupr", "fpr95"):
        assert one[f"{name}_in"] == pytest.approx(other[f"{name}_out"], rel=1e-12)
        assert one[f"{name}_out"] == pytest.approx(other[f"{name}_in"], rel=1e-12)
    backwards = estimate(Ranking(scores_out, scores_in))
    assert one["auroc"] + backwards["auroc"] == pytest.approx(1, rel=1e-12)


def test_fpr95_lies_on_the_roc_curve_where_95_percent_are_accepted() -> None:
    generator = np.random.default_rng(1)
    scores_in, scores_out = generator.beta(6, 2, 1001), generator.beta(3, 3, 700)
    is_in = np.repeat([1, 0], [1001, 700])
    false, true, _ = roc_curve(is_in, np.concatenate([scores_in, scores_out]), drop_intermediate=False)
    measured = estimate(Ranking(scores_in, scores_out))["fpr95_in"]
    assert measured == pytest.approx(false[np.argmax(true >= 0.95)], abs=1 / 700)


def test_identical_splits_cannot_be_told_apart() -> None:
    scores = np.random.default_rng(2).uniform(0.5, 1, 1000)
    found = estimate(Ranking(scores, scores))
    assert found["auroc"] == pytest.approx(0.5, abs=1e-12)
    assert (found["fpr95_in"], found["fpr95_out"]) == (0.95, 0.95)


def test_separated_splits_are_told_apart_without_error() -> None:
    found = estimate(Ranking(np.linspace(0.9, 1, 50), np.linspace(0.5, 0.8, 40)))
    assert tuple(found.values()) == (1.0, 1.0, 1.0, 0.0, 0.0)


def test_saturated_scores_accept_everything() -> None:
    found = estimate(Ranking(np.ones(30, dtype=np.float32), np.ones(20, dtype=np.float32)))
    assert tuple(found.values()) == pytest.approx((0.5, 0.6, 0.4, 1.0, 1.0), rel=1e-12)


def test_one_example_on_each_side_is_enough() -> None:
    assert tuple(estimate(Ranking(np.array([2.0]), np.array([1.0]))).values()) == (1.0, 1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [([0.1, np.nan], "expected finite scores"), ([], "expected one score per example, got shape \\(0,\\)")],
)
def test_what_is_no_score_is_refused(values: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Ranking(np.ones(3), np.array(values))


def rows_by_choice(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    return {(row["name"], row["positive"], row["score"]): row for row in rows}


def test_rows_name_the_split_the_score_and_the_convention() -> None:
    scores_in, scores_out = random_pair()
    rows = detection_rows({"energy": scores_in}, {"energy": scores_out}, FORMS, split="test", ood="svhn")
    values = estimate(Ranking(scores_in, scores_out))
    assert [row["value"] for row in rows] == list(values.values())
    assert [f"{row['name']}_{row['positive']}" for row in rows] == ["auroc_in", *NAMES[1:]]
    assert all((row["ood"], row["score"], row["n"]) == ("svhn", "energy", [101, 67]) for row in rows)
    assert [row["higher_is_better"] for row in rows] == [True, True, True, False, False]
    assert [row.get("threshold", "")[:4] for row in rows] == ["", "", "", "5th ", "95th"]
    assert "interval" not in rows[0]


def test_rows_of_several_scores_are_resampled_alike() -> None:
    scores_in, scores_out = random_pair()
    inside, outside = {"a": scores_in, "b": 2 * scores_in}, {"a": scores_out, "b": 2 * scores_out}
    found = rows_by_choice(
        detection_rows(inside, outside, FORMS, split="test", ood="svhn", bootstrap=Bootstrap(200, level=0.9))
    )
    first, second = found["auroc", "in", "a"], found["auroc", "in", "b"]
    assert first["interval"] == second["interval"]
    assert first["interval"].items() >= {"level": 0.9, "method": "percentile", "replicates": 200}.items()
    weights_in, weights_out = next(Bootstrap(200).weights(("test", 101), ("svhn", 67)))
    replicates = Ranking(scores_in, scores_out).evaluate([detection.fpr95_out], weights_in, weights_out)[:, 0]
    row = found["fpr95", "out", "b"]
    assert row["standard_error"] == pytest.approx(replicates.std(ddof=1), rel=1e-12)
    assert (row["interval"]["low"], row["interval"]["high"]) == pytest.approx(np.quantile(replicates, [0.05, 0.95]))


def test_the_standard_error_of_auroc_is_that_of_hanley_and_mcneil() -> None:
    generator = np.random.default_rng(3)
    n, m = 400, 300
    scores_in, scores_out = generator.exponential(3, n), generator.exponential(1, m)
    row = detection_rows({"s": scores_in}, {"s": scores_out}, FORMS, split="a", ood="b", bootstrap=Bootstrap(1000))[0]
    area = row["value"]
    # Hanley and McNeil (1982): their probabilities for exponential scores are exact.
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (n - 1) * (first - area**2) + (m - 1) * (second - area**2)
    assert row["standard_error"] == pytest.approx(np.sqrt(variance / (n * m)), rel=0.15)


@pytest.mark.parametrize(
    ("num_in", "num_out", "reason"),
    [(0, 5, "the in-distribution split is empty"), (5, 0, "only one class is present: split svhn is empty")],
)
def test_an_empty_split_leaves_the_rows_undefined(num_in: int, num_out: int, reason: str) -> None:
    rows = detection_rows(
        {"s": np.ones(num_in)}, {"s": np.ones(num_out)}, FORMS, split="test", ood="svhn", bootstrap=Bootstrap(9)
    )
    assert [(row["value"], row["undefined"]) for row in rows] == [(None, reason)] * 5
    rows_by_choice(rows)


def test_a_score_that_is_not_there_says_why_beside_one_that_is() -> None:
    scores_in, scores_out = random_pair()
    inside, outside = {"a": scores_in, "b": "no b"}, {"a": scores_out, "b": scores_out}
    found = rows_by_choice(detection_rows(inside, outside, FORMS, split="test", ood="svhn", bootstrap=Bootstrap(20)))
    assert found["aupr", "out", "a"]["value"] is not None
    assert (found["aupr", "out", "b"]["value"], found["aupr", "out", "b"]["undefined"]) == (None, "no b")


def sure(confidence: NDArray) -> ExampleStatistics:
    """Statistics of examples with this largest probability (N,) and nothing else."""
    nothing = np.zeros(len(confidence))
    return ExampleStatistics(2, confidence, nothing.astype(np.int64), nothing, nothing)


def test_mmc_is_the_mean_of_the_largest_probabilities() -> None:
    confidence = random_pair()[1]
    (row,) = other_split_rows(sure(confidence), "svhn", Bootstrap(2000))
    assert (row["name"], row["value"], row["n"], row["ood"]) == ("mmc", pytest.approx(confidence.mean()), 67, "svhn")
    assert row["standard_error"] == pytest.approx(confidence.std() / np.sqrt(67), rel=0.08)
    (row,) = other_split_rows(sure(np.empty(0)), "svhn", None)
    assert row["undefined"] == "split svhn is empty"


def test_every_score_is_higher_for_what_looks_in_distribution() -> None:
    probs = np.array([[0.98, 0.01, 0.01], [0.4, 0.3, 0.3]], dtype=np.float32)
    arrays = {
        "combined": np.array([-1.0, -9.0], dtype=np.float32),
        "mutual_info": np.array([0.1, 0.4], dtype=np.float32),
        "energy": np.array([-9.0, -2.0], dtype=np.float32),
        "max_logit": np.array([9.0, 1.5], dtype=np.float32),
        "log_concentration": np.log([[98, 1, 1], [4, 3, 3]]).astype(np.float32),
    }
    examples = examples_of(probs)
    found = example_scores(of_predictions(), examples, arrays.get)
    assert all(
        not isinstance(score, str) and score.dtype == np.float64 and score[0] > score[1] for score in found.values()
    )
    np.testing.assert_allclose(found["max_prob"], [0.98, 0.4], rtol=1e-6)
    np.testing.assert_allclose(found["energy"], [9, 2])
    np.testing.assert_allclose(found["entropy"][1], (probs[1] * np.log(probs[1])).sum(), rtol=1e-6)


@pytest.mark.parametrize("name", ["combined", "mutual_info", "dirichlet_variance", "energy", "max_logit"])
def test_a_score_that_predictions_do_not_give_says_so(name: str) -> None:
    found = example_scores([name], examples_of(np.full((2, 2), 0.5)), lambda name: None)[name]
    assert isinstance(found, str)
    assert found.startswith(("this integrator provides no", "the predictions have no"))


def test_the_dirichlet_variance_is_that_of_torch_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    log_a = np.random.default_rng(0).normal(size=(50, 4))
    expected = torch.distributions.Dirichlet(torch.from_numpy(log_a).exp()).variance.sum(dim=1)
    examples = examples_of(np.full((50, 4), 0.25))
    (whole,) = example_scores(["dirichlet_variance"], examples, lambda name: log_a).values()
    np.testing.assert_allclose(whole, -expected, rtol=1e-10)
    monkeypatch.setattr("bnncli.evaluation.statistics.BLOCK_VALUES", 28)
    (blocked,) = example_scores(["dirichlet_variance"], examples, lambda name: log_a).values()
    np.testing.assert_allclose(blocked, whole, rtol=1e-14)
