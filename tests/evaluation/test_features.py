"""Scores of features and of examples, in blocks."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from problems.seeds import seeded
from scipy.spatial.distance import cdist
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation import feature_scores
from bnncli.evaluation import statistics as probabilities
from bnncli.evaluation.feature_scores import Mahalanobis, Neighbors
from bnncli.evaluation.statistics import ExampleStatistics, check_probabilities, compute_example_statistics, row_blocks
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
    monkeypatch.setattr(probabilities, "BLOCK_VALUES", 5 * 7)
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
    monkeypatch.setattr(probabilities, "BLOCK_VALUES", 7 * 9)
    probs = some_probs()
    check_probabilities(probs, 7)
    probs[-1] = 0.2
    with pytest.raises(DataError, match=r"off by 0\.4"):
        check_probabilities(probs, 7)


@pytest.mark.parametrize(("num_rows", "row_size"), [(0, 3), (10, 3), (10, 1000), (24, 4)])
def test_blocks_cover_every_row_once_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, row_size: int
) -> None:
    monkeypatch.setattr(probabilities, "BLOCK_VALUES", 16)
    blocks = [range(num_rows)[rows] for rows in row_blocks(num_rows, row_size)]
    assert [row for block in blocks for row in block] == list(range(num_rows))
    assert all(len(block) == 1 or len(block) * row_size <= 16 for block in blocks)
