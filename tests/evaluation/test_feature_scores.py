"""Scores of features against scikit-learn, brute force and laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy.spatial.distance import cdist
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation import feature_scores
from bnncli.evaluation.feature_scores import Mahalanobis, Neighbors
from bnncli.targets import blocks

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


def test_an_example_of_the_training_split_is_its_own_nearest_neighbour() -> None:
    train = make_split()[0]
    found = Neighbors.fit(train, device=CPU, generator=seeded(), num_neighbors=1).scores(3 * train)
    assert found.abs().max() < 1e-6


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
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 100)
    monkeypatch.setitem(feature_scores._SIMILARITIES, "cpu", 2100)
    for blocked, value in zip(everything(), whole, strict=True):
        np.testing.assert_allclose(blocked, value, rtol=1e-8, atol=1e-8)
