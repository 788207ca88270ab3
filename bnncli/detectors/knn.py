"""The distance of features to their k-th nearest neighbour: Sun, Ming, Zhu and Li (2022), arXiv 2204.06507."""

from __future__ import annotations

from bnncli.detectors import Detector, Fitted, TrainingFeatures


def of_features(train: TrainingFeatures) -> Fitted:
    """Among the training features, at unit length."""
    from bnncli.evaluation.feature_scores import Neighbors

    neighbors = Neighbors.fit(
        train.features,
        device=train.device,
        generator=train.generator("evaluate/neighbors"),
        num_neighbors=train.num_neighbors,
    )
    return Fitted(lambda features: {"knn": neighbors.scores(features)}, {"neighbors": neighbors.num_neighbors})


DETECTOR = Detector(place=9, of_features=of_features)
