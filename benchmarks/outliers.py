"""Which score tells outliers apart: AUROC, and the share that is caught at 5 % false alarms, by every score and by ways to combine them.

Runs have the splits train, val and test, out-of-distribution ones, and predictions of `map` and `laplace`. Thresholds are of val, all
else is measured on test. The parts of the combined score are also combined in other ways: as a sum of z-scores, as their lowest, and
as the lowest p-value.

    python benchmarks/outliers.py lenet.pt resnet.th digits
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.curves import roc_curve
from bnncli.evaluation.decisions import fit_outliers
from bnncli.evaluation.detectors import TrainingFeatures, all_detectors, example_scores, prediction_detectors
from bnncli.evaluation.feature_scores import TailRanks
from bnncli.evaluation.statistics import compute_example_statistics

MAKERS = {"network": "map.plug-in", "laplace": "laplace.mc"}
PARTS = ("energy (network)", "mahalanobis", "knn")
FALSE_ALARM = 0.05
Scores = dict[str, NDArray]


def main() -> None:
    """Print a table for each run, and by how much each score is at worst behind the best one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="checkpoints, or names of runs of features")
    gaps: dict[str, list[float]] = {}
    for run in parser.parse_args().runs:
        splits = scores_of(run.with_name(f"{run.name}.bnn"))
        inside, val = splits.pop("test"), splits.pop("val")
        names = list(inside)
        areas = {name: [area(inside[name], one[name]) for one in splits.values()] for name in names}
        print(f"\n| {run.name}: AUROC, caught | {' | '.join(splits)} |\n|---|{'---|' * len(splits)}")
        for name in names:
            rule = fit_outliers(val[name], FALSE_ALARM)
            caught = [rule.is_outlier(one[name]).mean() for one in splits.values()]
            cells = [f"{value:.3f}, {share:.0%}" for value, share in zip(areas[name], caught, strict=True)]
            print(f"| {name} | {' | '.join(cells)} |")
        best = np.max(
            [values for name, values in areas.items() if not name.startswith(("combined", "lowest", "sum"))], axis=0
        )
        for name, values in areas.items():
            gaps.setdefault(name, []).extend((best - values).tolist())
    print("\n| score | largest gap in AUROC to the best single score | mean gap |\n|---|---|---|")
    for name, values in gaps.items():
        print(f"| {name} | {max(values):.3f} | {np.mean(values):.3f} |")


def scores_of(folder: Path) -> dict[str, Scores]:
    """Every score of each split but train, by its name."""
    train = read_features(folder / "features" / "train.h5")
    assert train.labels is not None
    given = TrainingFeatures(
        torch.from_numpy(train.features),
        torch.from_numpy(train.labels),
        torch.device("cpu"),
        lambda purpose: torch.Generator().manual_seed(0),
        {"neighbors": 50},
    )
    fitted = [one.of_features(given) for one in all_detectors().values() if one.of_features is not None]
    found: dict[str, Scores] = {}
    for path in sorted((folder / "features").glob("*.h5")):
        if path.stem == "train":
            continue
        features = torch.from_numpy(read_features(path).features)
        own: Scores = {}
        for title, maker in MAKERS.items():
            file = read_predictions(folder / "predictions" / maker / path.name)
            examples = compute_example_statistics(file.probs)
            values = example_scores(prediction_detectors(), examples, partial(getattr, file))
            named = {name if name == "combined" else f"{name} ({title})": one for name, one in values.items()}
            own |= {name: one for name, one in named.items() if not isinstance(one, str)}
        found[path.stem] = own | {name: one.numpy() for each in fitted for name, one in each.scores(features).items()}
    return {name: own | combinations(own, found["val"]) for name, own in found.items()}


def combinations(own: Mapping[str, NDArray], val: Mapping[str, NDArray]) -> Scores:
    """The parts of the combined score, combined in other ways; all are standardised by val."""
    z = [(own[name] - val[name].mean()) / val[name].std() for name in PARTS]
    ranks = {name: TailRanks.of(torch.from_numpy(val[name])) for name in PARTS}
    log_p = [one.log_p(torch.from_numpy(own[name])).numpy() for name, one in ranks.items()]
    return {
        "sum of z-scores": np.sum(z, axis=0),
        "lowest z-score": np.min(z, axis=0),
        "lowest p-value": np.min(log_p, axis=0),
    }


def area(inside: NDArray, outside: NDArray) -> float:
    """The area under the ROC curve."""
    curve = roc_curve(inside, outside, most=10_000)
    return float(np.trapezoid(curve["tpr"], curve["fpr"]))


if __name__ == "__main__":
    main()
