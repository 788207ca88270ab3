"""The Mahalanobis distance of features to the nearest class: Lee, Lee, Lee and Shin (2018), arXiv 1807.03888."""

from __future__ import annotations

from bnncli.detectors import Detector, FittedDetector, TrainingFeatures


def of_features(train: TrainingFeatures) -> FittedDetector:
    """This and the relative one: Gaussians of the same features."""
    from bnncli.errors import DataError
    from bnncli.evaluation.feature_scores import Mahalanobis

    if train.labels is None:
        raise DataError(train.no_classes)
    return FittedDetector(Mahalanobis.fit(train.features, train.labels, device=train.device).scores)


DETECTOR = Detector(place=8, of_features=of_features)
