"""The distance of features to their k-th nearest neighbour: Sun, Ming, Zhu and Li (2022), arXiv 2204.06507."""

from __future__ import annotations

from bnncli.detectors import Detector, FittedDetector, TrainingFeatures
from bnncli.evaluation.score_options import ScoreOption


def of_features(train: TrainingFeatures) -> FittedDetector:
    """Among the training features, at unit length."""
    from bnncli.evaluation.feature_scores import Neighbors

    neighbors = Neighbors.fit(
        train.features,
        device=train.device,
        generator=train.generator("evaluate/neighbors"),
        num_neighbors=train.settings["neighbors"],
    )
    asked, found = train.settings["neighbors"], neighbors.num_neighbors
    notes = (
        [f"\0neighbors\0 {asked}: using k = {found}, because there are only {found} training examples"]
        if found < asked
        else []
    )
    return FittedDetector(lambda features: {"knn": neighbors.scores(features)}, {"neighbors": found}, notes)


K = ScoreOption(
    text="k of \0score\0 knn: the distance to the k-th nearest training features.", default=50, minimum=1, place=2
)  # as published for 50,000 training examples
DETECTOR = Detector(place=10, of_features=of_features, options={"neighbors": K})
