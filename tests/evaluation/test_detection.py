"""Detection of shifted data: scores of features and of predictions, and the ranking of examples."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from problems.seeds import seeded
from scipy.spatial.distance import cdist
from scipy.special import logsumexp
from scipy.stats import combine_pvalues
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import average_precision_score, roc_auc_score, top_k_accuracy_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation import detection, feature_scores, statistics
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.class_scores import largest_probabilities, ranking_scores
from bnncli.evaluation.decisions import fit_outliers
from bnncli.evaluation.detection import Ranking, detection_rows
from bnncli.evaluation.detectors import default_score, example_scores, prediction_detectors, usual_score
from bnncli.evaluation.feature_scores import NUM_NEIGHBORS, FittedViews, Mahalanobis, Neighbors, TailRanks
from bnncli.evaluation.scores import detection_forms, other_split_rows
from bnncli.evaluation.statistics import (
    ExampleStatistics,
    Row,
    check_probabilities,
    compute_example_statistics,
    row_blocks,
    score_rows,
)
from bnncli.parameters.layouts import HeadLayout
from bnncli.targets import blocks as stream

CPU = torch.device("cpu")


def make_split(num_rows: int = 300, num_features: int = 6, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated features around three class means, and labels."""
    noise = torch.randn(num_rows, num_features, generator=seeded(seed))
    labels = torch.arange(num_rows) % 3
    mixing = torch.randn(num_features, num_features, generator=seeded(7))
    return noise @ mixing + 4 * torch.randn(3, num_features, generator=seeded(8))[labels], labels


def expected_distances(train: Tensor, labels: Tensor, features: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances to the nearest class and to the background, by scikit-learn."""
    x, y, new = train.double().numpy(), labels.numpy(), features.double().numpy()
    means = np.stack([x[y == label].mean(axis=0) for label in np.unique(y)])
    within = EmpiricalCovariance(assume_centered=True).fit(x - means[np.searchsorted(np.unique(y), y)])
    nearest = np.min([within.mahalanobis(new - mean) for mean in means], axis=0)
    return nearest, EmpiricalCovariance().fit(x).mahalanobis(new)


def test_distances_are_those_of_scikit_learn() -> None:
    train, labels = make_split()
    features = torch.cat([make_split(50, seed=1)[0], 5 * torch.randn(50, 6, generator=seeded(2))])
    nearest, background = expected_distances(train, labels, features)
    found = Mahalanobis.fit(train, labels, device=CPU).scores(features)
    np.testing.assert_allclose(found["mahalanobis"], -nearest, rtol=1e-9)
    np.testing.assert_allclose(found["relative_mahalanobis"], background - nearest, rtol=1e-8, atol=1e-9)


def test_classes_without_examples_have_no_mean() -> None:
    train, labels = make_split()
    found = Mahalanobis.fit(train, 5 * labels, device=CPU).scores(train)  # labels 0, 5, 10
    assert torch.equal(found["mahalanobis"], Mahalanobis.fit(train, labels, device=CPU).scores(train)["mahalanobis"])


def test_features_that_never_vary_or_repeat_others_change_nothing() -> None:
    train, labels = make_split()
    far = 3 * torch.randn(40, 6, generator=seeded(3))

    def widened(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(len(x), 1), x, 1e3 * x[:, :1] - x[:, 1:2]], dim=1)

    plain = Mahalanobis.fit(train, labels, device=CPU).scores(far)
    wide = Mahalanobis.fit(widened(train), labels, device=CPU)
    assert wide.within.root.shape[1] == wide.background.root.shape[1] == 6
    for name, values in wide.scores(widened(far)).items():
        np.testing.assert_allclose(values, plain[name], rtol=1e-4, atol=1e-3)


def test_the_scale_of_a_feature_does_not_matter() -> None:
    train, labels = make_split()
    scale = torch.tensor([1e-6, 1e-3, 1, 1, 1e3, 1e6])
    plain, scaled = (Mahalanobis.fit(x, labels, device=CPU).scores(x) for x in (train, train * scale))
    for name, values in scaled.items():
        np.testing.assert_allclose(values, plain[name], rtol=1e-4, atol=1e-4)


def test_features_that_are_constant_within_classes_are_refused() -> None:
    labels = torch.arange(30) % 3
    constant = 100 + labels.float()
    jitter = torch.where(torch.arange(30) % 2 == 0, constant, torch.nextafter(constant, torch.zeros(())))
    with pytest.raises(DataError, match="no feature of the training split varies within a class"):
        Mahalanobis.fit(jitter.unsqueeze(1), labels, device=CPU)


def test_the_kth_neighbour_is_that_of_scikit_learn() -> None:
    train, features = make_split()[0], make_split(60, seed=4)[0]
    unit = [torch.nn.functional.normalize(x).double().numpy() for x in (train, features)]
    distances, _ = NearestNeighbors(n_neighbors=7, algorithm="brute").fit(unit[0]).kneighbors(unit[1])
    found = Neighbors.fit(train, device=CPU, generator=seeded(), num_neighbors=7).scores(features)
    np.testing.assert_allclose(-found, distances[:, -1], rtol=1e-5)


def test_features_that_are_all_zero_are_one_away_from_unit_vectors() -> None:
    train = torch.cat([torch.zeros(2, 4), -torch.ones(3, 4)])
    neighbors = Neighbors.fit(train, device=CPU, generator=seeded(), num_neighbors=2)
    np.testing.assert_allclose(neighbors.scores(torch.stack([torch.zeros(4), torch.ones(4)])), [0, -1], atol=1e-7)


def test_k_is_at_most_the_number_of_training_examples() -> None:
    train, features = make_split(20)[0], make_split(10, seed=4)[0]
    neighbors = Neighbors.fit(train, device=CPU, generator=seeded(), num_neighbors=50)
    unit = [torch.nn.functional.normalize(x).double().numpy() for x in (features, train)]
    assert neighbors.num_neighbors == 20
    np.testing.assert_allclose(-neighbors.scores(features), cdist(*unit).max(axis=1), rtol=1e-5)


def test_many_training_examples_are_thinned_by_seed() -> None:
    train = make_split(500)[0]
    one, same, other = (
        Neighbors.fit(train, device=CPU, generator=seeded(seed), num_neighbors=50, max_rows=100).features
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len(one.unique(dim=0)) == 100


def test_blocks_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels = make_split()
    half = train.half()

    def everything() -> list[Tensor]:
        neighbors = Neighbors.fit(half, device=CPU, generator=seeded(), num_neighbors=50)
        return [*Mahalanobis.fit(half, labels, device=CPU).scores(half).values(), neighbors.scores(half)]

    whole = everything()
    monkeypatch.setitem(stream.BLOCK_ELEMENTS, "cpu", 100)
    monkeypatch.setitem(feature_scores._SIMILARITIES, "cpu", 2100)
    for blocked, value in zip(everything(), whole, strict=True):
        np.testing.assert_allclose(blocked, value, rtol=1e-8, atol=1e-8)


def predictions(num_classes: int, *, count: int = 300) -> tuple[NDArray, NDArray]:
    """Float32 predictions with ties, certainties and zeros among them, and labels."""
    generator = np.random.default_rng(num_classes)
    probs = generator.dirichlet(np.full(num_classes, 0.5), size=count).astype(np.float32)
    probs[:20] = np.eye(num_classes)[np.arange(20) % num_classes]
    probs[20:60] = 1 / num_classes
    return probs, generator.integers(num_classes, size=count)


def vectors(examples: ExampleStatistics) -> dict[str, NDArray]:
    return {
        spec.name: getattr(examples, spec.name)
        for spec in fields(examples)
        if spec.name not in ("num_classes", "of_labels")
    }


@pytest.mark.parametrize("num_classes", [2, 5])
def test_the_numbers_of_each_example_are_those_of_the_loop(num_classes: int) -> None:
    probs, labels = predictions(num_classes)
    found = compute_example_statistics(probs, labels)
    for n, (row, label) in enumerate(zip(probs.astype(float).tolist(), labels, strict=True)):
        order = sorted(range(num_classes), key=lambda k: (-row[k], k))
        assert found.predicted[n] == order[0]
        assert found.confidence[n] == max(row)
        assert found.label_rank[n] == order.index(label)
        assert found.is_right[n] == (order[0] == label)
        assert found.label_probability[n] == row[label]
        assert found.entropy[n] == pytest.approx(-sum(p * math.log(p) for p in row if p > 0), rel=1e-12, abs=1e-15)
        assert found.squared_norm[n] == pytest.approx(sum(p * p for p in row), rel=1e-12)


def test_blocks_of_a_mapped_file_give_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs, labels = predictions(5)
    path = tmp_path_factory.mktemp("mapped") / "probs.npy"
    np.save(path, probs)
    whole = vectors(compute_example_statistics(probs, labels))
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 5 * 7)
    blocks = vectors(compute_example_statistics(np.load(path, mmap_mode="r"), labels))
    for name, values in whole.items():
        assert values.dtype == blocks[name].dtype
        np.testing.assert_array_equal(values, blocks[name])


def test_without_labels_what_needs_them_is_none() -> None:
    found = compute_example_statistics(predictions(3)[0])
    assert len(found) == 300
    missing = {name for name, values in vectors(found).items() if values is None}
    assert missing == {"labels", "is_right", "label_probability", "label_rank"}


def test_an_empty_split_has_empty_vectors() -> None:
    found = compute_example_statistics(np.empty((0, 4), dtype=np.float32), np.empty(0, dtype=int))
    assert {values.shape for values in vectors(found).values()} == {(0,)}


def test_what_is_no_prediction_is_refused() -> None:
    probs, labels = predictions(3)
    with pytest.raises(DataError, match="expected 0 to 2, got 0 to 3"):
        compute_example_statistics(probs, labels + (labels == 2))
    with pytest.raises(DataError, match="sum to 1"):
        compute_example_statistics(np.full((2, 3), 0.5))
    with pytest.raises(DataError, match=r"expected shape \(N, 4\)"):
        compute_example_statistics(probs, labels, num_classes=4)


def some_probs(num_classes: int = 7, *, count: int = 200) -> NDArray:
    return np.random.default_rng(0).dirichlet(np.full(num_classes, 0.5), size=count).astype(np.float32)


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        (np.log([0.9, 0.1]), "got log-probabilities down to -2.3", "exponentiate"),
        ([0.0, -np.inf], "got log-probabilities", "exponentiate"),
        ([np.nan, 0.5], "got NaN or infinity", "diverged"),
        ([np.nan, np.nan], "got NaN or infinity", "diverged"),
        ([2.5, -1.5], r"expected values in \[0, 1\], got -1.5 to 2.5", "softmax"),
        ([70.0, 30.0], "got 30 to 70", "percentages"),
        ([1.2, 0.1], "got 0.1 to 1.2", "sum to 1"),
        ([0.9, 0.3], "sum to 1 within 1e-4, got a row that is off by 0.2", "sigmoid"),
        ([0.5, 0.4998], "off by 0.0002", "sigmoid"),
        ([0.2, 0.3, 0.5], r"expected shape \(N, 2\), got \(1, 3\)", None),
    ],
)
def test_what_is_no_probability_is_refused_with_its_likely_cause(
    row: list[float], message: str, hint: str | None
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_probabilities(np.array([row]), 2)
    assert hint is None or hint in str(caught.value.hint)


@pytest.mark.parametrize("probs", [some_probs(), np.empty((0, 7)), np.eye(7), np.full((1, 7), 1.00005 / 7)])
def test_probabilities_pass_and_the_same_rows_a_little_too_large_do_not(probs: NDArray) -> None:
    check_probabilities(probs, 7)
    if len(probs):
        with pytest.raises(DataError, match=r"sum to 1|values in"):
            check_probabilities(probs * 1.0003, 7)


def test_a_bad_row_is_found_in_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 7 * 9)
    probs = some_probs()
    check_probabilities(probs, 7)
    probs[-1] = 0.2
    with pytest.raises(DataError, match=r"off by 0\.4"):
        check_probabilities(probs, 7)


@pytest.mark.parametrize(("num_rows", "row_size"), [(0, 3), (10, 3), (10, 1000), (24, 4)])
def test_blocks_cover_every_row_once_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, row_size: int
) -> None:
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 16)
    blocks = [range(num_rows)[rows] for rows in row_blocks(num_rows, row_size)]
    assert [row for block in blocks for row in block] == list(range(num_rows))
    assert all(len(block) == 1 or len(block) * row_size <= 16 for block in blocks)


FORMS = detection_forms()
STATISTICS = {
    "auroc": detection.auroc, "aupr_in": detection.aupr_in, "aupr_out": detection.aupr_out,
    "fpr95_in": detection.fpr95_in, "fpr95_out": detection.fpr95_out,
}  # fmt: skip
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
def test_all_scores_are_those_of_scikit_learn_under_any_counts(decimals: int) -> None:
    scores_in, scores_out = random_pair(decimals=decimals)
    (weights_in, weights_out), *_ = Bootstrap(1600).weights(("test", 101), ("svhn", 67))  # more than one block
    found = Ranking(scores_in, scores_out).evaluate(list(STATISTICS.values()), weights_in, weights_out)
    for row in range(0, 1600, 53):
        counts = [weights[row].astype(int) for weights in (weights_in, weights_out)]
        expected = expected_scores(scores_in, scores_out, *counts)
        np.testing.assert_allclose(found[row], expected, rtol=1e-12)


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
    examples = compute_example_statistics(probs)
    found = example_scores(prediction_detectors(), examples, arrays.get)
    assert all(
        not isinstance(score, str) and score.dtype == np.float64 and score[0] > score[1] for score in found.values()
    )
    np.testing.assert_allclose(found["max_prob"], [0.98, 0.4], rtol=1e-6)
    np.testing.assert_allclose(found["energy"], [9, 2])
    np.testing.assert_allclose(found["entropy"][1], (probs[1] * np.log(probs[1])).sum(), rtol=1e-6)


@pytest.mark.parametrize("name", ["combined", "mutual_info", "dirichlet_variance", "energy", "max_logit"])
def test_a_score_that_predictions_do_not_give_says_so(name: str) -> None:
    found = example_scores([name], compute_example_statistics(np.full((2, 2), 0.5)), lambda name: None)[name]
    assert isinstance(found, str)
    assert found.startswith(("this integrator provides no", "the predictions have no"))


def test_the_dirichlet_variance_is_that_of_torch_in_any_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    log_a = np.random.default_rng(0).normal(size=(50, 4))
    expected = torch.distributions.Dirichlet(torch.from_numpy(log_a).exp()).variance.sum(dim=1)
    examples = compute_example_statistics(np.full((50, 4), 0.25))
    (whole,) = example_scores(["dirichlet_variance"], examples, lambda name: log_a).values()
    np.testing.assert_allclose(whole, -expected, rtol=1e-10)
    monkeypatch.setattr("bnncli.evaluation.statistics.BLOCK_VALUES", 28)
    (blocked,) = example_scores(["dirichlet_variance"], examples, lambda name: log_a).values()
    np.testing.assert_allclose(blocked, whole, rtol=1e-14)


RANKING = {"rule": "best", "threshold": 0.05, "cap": 5}


def ranked_predictions(num_classes: int = 8, count: int = 300) -> tuple[NDArray, NDArray]:
    generator = np.random.default_rng(0)
    probs = generator.dirichlet(np.full(num_classes, 0.5), size=count).astype(np.float32)
    return probs, (probs.cumsum(axis=1) < generator.random((count, 1))).sum(axis=1).clip(max=num_classes - 1)


def rows_of(probs: NDArray, labels: NDArray | None, lengths: NDArray | None, **keywords: Any) -> dict[str, Row]:
    scores = ranking_scores(
        probs, compute_example_statistics(probs, labels), lengths, None if lengths is None else RANKING
    )
    return {row["name"]: row for row in score_rows(scores, ("test", len(probs)), **keywords)}


def test_the_ranking_is_right_where_the_label_is_among_the_classes_kept() -> None:
    probs, labels = ranked_predictions()
    lengths = np.random.default_rng(1).integers(1, 6, size=300)
    rows = rows_of(probs, labels, lengths)
    kept = [list(np.argsort(-row, kind="stable")[:size]) for row, size in zip(probs, lengths, strict=True)]
    hits = [label in classes for label, classes in zip(labels, kept, strict=True)]
    assert rows["ranked_accuracy"]["value"] == pytest.approx(np.mean(hits), rel=1e-12)
    assert rows["ranked_length"]["value"] == pytest.approx(lengths.mean(), rel=1e-12)
    assert rows["ranked_accuracy"].items() >= RANKING.items()


def test_the_plain_rule_keeps_as_many_classes_by_one_threshold() -> None:
    probs, labels = ranked_predictions()
    lengths = np.repeat([1, 3], 150)
    rows = rows_of(probs, labels, lengths)
    sums = -np.sort(-probs.astype(float), axis=1).cumsum(axis=1)

    def sizes(threshold: float) -> NDArray:
        return np.minimum(1 + (sums < threshold).sum(axis=1), 5)

    # Sizes change where the threshold passes one of the sums.
    threshold = next(t for t in np.sort(sums, axis=None) + 1e-12 if sizes(t).mean() >= lengths.mean())
    assert sizes(threshold).mean() == pytest.approx(2, abs=1 / 300)
    rank = compute_example_statistics(probs, labels).label_rank
    expected = np.mean(rank < sizes(threshold))
    assert rows["cumulative_accuracy"]["value"] == pytest.approx(expected, abs=1.01 / 300)
    gain = rows["ranked_accuracy"]["value"] - rows["cumulative_accuracy"]["value"]
    assert rows["ranked_gain"]["value"] == pytest.approx(gain, abs=1e-12)


@pytest.mark.parametrize("size", [1, 5])
def test_the_shortest_and_the_longest_sets_are_top_k_by_either_rule(size: int) -> None:
    probs, labels = ranked_predictions()
    rows = rows_of(probs, labels, np.full(300, size))
    expected = top_k_accuracy_score(labels, probs, k=size, labels=range(8))
    assert rows["ranked_accuracy"]["value"] == pytest.approx(expected, rel=1e-12)
    assert rows["cumulative_accuracy"]["value"] == pytest.approx(expected, rel=1e-12)
    assert rows["ranked_gain"]["value"] == 0


def test_the_gain_is_resampled_in_pairs() -> None:
    probs, labels = ranked_predictions()
    rows = rows_of(probs, labels, np.repeat([1, 3], 150), bootstrap=Bootstrap(1000))
    apart = np.hypot(rows["ranked_accuracy"]["standard_error"], rows["cumulative_accuracy"]["standard_error"])
    assert 0 < rows["ranked_gain"]["standard_error"] < apart


def test_without_a_ranking_or_labels_the_reason_is_told() -> None:
    probs, labels = ranked_predictions()
    assert {row["undefined"] for row in rows_of(probs, labels, None).values()} == {
        "the predictions have no ranking; create one with predict \0top_k\0"
    }
    rows = rows_of(probs, None, np.ones(300, dtype=int))
    assert rows["ranked_length"]["value"] == 1
    assert rows["ranked_gain"]["undefined"] == "no labels"
    empty = rows_of(probs[:0], labels[:0], np.ones(0, dtype=int))
    assert {row["undefined"] for row in empty.values()} == {"empty split"}


def test_the_largest_probabilities_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, _ = ranked_predictions()
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 8 * 7)
    np.testing.assert_array_equal(largest_probabilities(probs, 3), -np.sort(-probs.astype(float), axis=1)[:, :3])


LAYOUT = HeadLayout(3, 6)
THETA = torch.randn(LAYOUT.num_params, generator=seeded(11), dtype=torch.float64)


def make_detection_split(num_rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Correlated features around three class means, and labels."""
    labels = torch.arange(num_rows) % 3
    mixing = torch.randn(6, 6, generator=seeded(7))
    means = 4 * torch.randn(3, 6, generator=seeded(8))
    return torch.randn(num_rows, 6, generator=seeded(seed)) @ mixing + means[labels], labels


def fit(train: Tensor, labels: Tensor | None, val: Tensor) -> FittedViews:
    return FittedViews.fit(train, labels, val, layout=LAYOUT, theta=THETA, device=CPU, generator=seeded(0))


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
    train, labels = make_detection_split(300, seed=0)
    val = make_detection_split(120, seed=1)[0]
    features = torch.cat([make_detection_split(40, seed=2)[0], 6 * torch.randn(40, 6, generator=seeded(3))])
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
    train, labels = make_detection_split(300, seed=0)
    val = make_detection_split(100, seed=1)[0]
    assert list(fit(train, None, val).ranks) == ["energy", "knn"]
    assert list(fit(train, torch.stack([labels, labels], 1), val).ranks) == [
        "energy",
        "knn",
    ]  # several labels an example
    headless = FittedViews.fit(train, labels, val, device=CPU, generator=seeded(0))
    assert list(headless.ranks) == ["mahalanobis", "knn"]
    constant = labels.float().unsqueeze(1).expand(-1, 6)  # no feature varies within a class
    assert "mahalanobis" not in fit(constant, labels, constant).ranks


def test_many_training_examples_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_scores, "COVARIANCE_ROWS", 100)
    monkeypatch.setattr(feature_scores, "NEIGHBOR_ROWS", 50)
    train, labels = make_detection_split(300, seed=0)
    found = fit(train, labels, make_detection_split(100, seed=1)[0])
    again = fit(train, labels, make_detection_split(100, seed=1)[0])
    assert len(found.neighbors.features) == 50
    assert torch.equal(found.gaussians.total, again.gaussians.total)
    far = make_detection_split(50, seed=5)[0]
    assert torch.equal(found.scores(far), again.scores(far))


def test_nothing_has_no_scores() -> None:
    train, labels = make_detection_split(300, seed=0)
    assert fit(train, labels, train[:50]).scores(train[:0]).shape == (0,)


@pytest.mark.parametrize("num_val", [30, 400])
def test_outliers_that_one_view_alone_sees_are_caught(num_val: int) -> None:
    """Each kind is plain to one of the parts and hidden from another; a few references do not blunt the sum."""
    train, labels = make_detection_split(600, seed=0)
    inside = make_detection_split(500, seed=2)[0]
    found = fit(train, labels, make_detection_split(num_val, seed=1)[0])
    between = train[labels == 0].mean(dim=0) / 2 + train[labels == 1].mean(dim=0) / 2 + 0.1 * inside
    for outside in (between, 20 * torch.randn(500, 6, generator=seeded(3))):
        scores = torch.cat([found.scores(inside), found.scores(outside)])
        assert roc_auc_score([1] * 500 + [0] * 500, scores) > 0.95


@pytest.mark.parametrize("is_labeled", [True, False])
@pytest.mark.parametrize("theta", [THETA, None])
def test_a_score_out_of_its_tensors_is_the_same(is_labeled: bool, theta: Tensor | None) -> None:
    train, labels = make_detection_split(600, seed=0)
    val, new = make_detection_split(700, seed=1)[0], make_detection_split(90, seed=2)[0]
    own = {"layout": LAYOUT, "theta": theta, "device": CPU}
    found = FittedViews.fit(train, labels if is_labeled else None, val, generator=seeded(0), **own)
    again = FittedViews.from_tensors(found.to_tensors(), **own)
    assert [*again.ranks] == [*found.ranks] == ["energy"] * (theta is not None) + ["mahalanobis"] * is_labeled + ["knn"]
    assert torch.equal(again.scores(new), found.scores(new))


@pytest.mark.parametrize("is_separate", [True, False])
def test_thresholds_hold_their_rate_of_false_alarms(is_separate: bool) -> None:
    """On calibration examples of their own exactly; on val itself, whose ranks the score goes by, as auto has it, within half a point."""
    train, labels = make_detection_split(300, seed=0)
    rates = []
    for trial in range(60):
        val, calib, new = make_detection_split(800, seed=100 + trial)[0].split([100, 100, 600])
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
