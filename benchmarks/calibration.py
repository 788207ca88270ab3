"""How often the intervals of calibration errors hold the truth, how wide they are, and how often the test rejects.

Labels are drawn from a softmax; the predictions are that softmax (calibrated), it at another temperature, or it with logits
that are shifted by class. The truth of each error is that of many examples in the same bins; the bins of equal mass are
those of the population there, and of the sample in each trial.

    python benchmarks/calibration.py --trials 200 --out calibration.json
    python benchmarks/calibration.py --sizes 2000 --classes 10 --trials 1000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import calibration_scores, class_wise_scores
from bnncli.evaluation.statistics import ScoreGroup, compute_example_statistics, score_rows

Row = dict[str, Any]
LEVEL = 0.95
FLOOR_ALPHA = 0.05
# Temperature of the predictions, and how much the logits are shifted by class.
KINDS = {"calibrated": (1.0, 0.0), "mild": (1.1, 0.0), "over": (0.8, 0.0), "under": (1.5, 0.0), "strong over": (0.5, 0.0),
         "strong under": (2.0, 0.0), "by class": (1.0, 1.0)}  # fmt: skip
SCALES = {10: (2.0, 4.0, 8.0, 40.0), 100: (3.0, 8.0, 40.0)}  # of the logits: accuracies of about .5 to .99


@dataclass(frozen=True)
class World:
    """Logits of standard deviation `scale`; predictions at a temperature, shifted by class."""

    num_classes: int
    scale: float
    temperature: float
    shift: float

    def draw(self, count: int, generator: np.random.Generator) -> tuple[NDArray, NDArray]:
        """Predictions (N, C) and labels (N,)."""
        logits = self.scale * generator.standard_normal((count, self.num_classes))
        true = softmax(logits, axis=1)
        labels = (true.cumsum(axis=1) < generator.random((count, 1))).sum(axis=1).clip(0, self.num_classes - 1)
        shifted = logits / self.temperature + self.shift * np.linspace(-1, 1, self.num_classes)
        return softmax(shifted, axis=1), labels

    @property
    def is_calibrated(self) -> bool:
        """Whether every error of the population is 0."""
        return self.temperature == 1 and self.shift == 0


def scores_of(probs: NDArray, labels: NDArray) -> list[ScoreGroup]:
    """The calibration errors in all their forms."""
    return [*calibration_scores(compute_example_statistics(probs, labels)), class_wise_scores(probs, labels)]


def truths(world: World, count: int, generator: np.random.Generator) -> dict[str, float]:
    """The errors of a large sample, by form; 0 where they are known to be."""
    rows = score_rows(
        [ScoreGroup(g.members, g.statistic, g.undefined) for g in scores_of(*world.draw(count, generator))],
        ("truth", count),
    )
    return {
        form(row): 0.0 if world.is_calibrated and row["strategy"] != "published" else row["value"]
        for row in rows
        if row["value"] is not None
    }


def form(row: Row) -> str:
    """What an error is called here."""
    return " ".join(str(row[key]) for key in ("name", "strategy", "norm") if key in row)


def measured(world: World, *, size: int, trials: int, truth_size: int, seed: int) -> Iterator[Row]:
    """A row for each form: coverage, both kinds of miss, mean width, value and floor, rejections of calibration at 5 %."""
    generator = np.random.default_rng(seed)
    truth = truths(world, truth_size, generator)
    found: dict[str, list[list[float]]] = {}
    accuracy = []
    for trial in range(trials):
        probs, labels = world.draw(size, generator)
        accuracy.append(np.mean(probs.argmax(axis=1) == labels))
        # Two replicates: the bootstrap gives the standard error alone.
        for row in score_rows(scores_of(probs, labels), ("test", size), Bootstrap(2, LEVEL, trial)):
            if row["value"] is not None and form(row) in truth:
                ends = row["interval"]
                found.setdefault(form(row), []).append(
                    [ends["low"], ends["high"], row["value"], row["floor"], row["p_calibrated"]]
                )
    for name, trials_of in found.items():
        low, high, value, floor, p = np.array(trials_of).T
        error = truth[name]
        yield {
            "form": name, "size": size, **vars(world), "accuracy": float(np.mean(accuracy)), "truth": error,
            "value": float(value.mean()), "floor": float(floor.mean()), "width": float(np.mean(high - low)),
            "coverage": float(np.mean((low <= error) & (error <= high))), "above": float(np.mean(low > error)),
            "below": float(np.mean(high < error)), "rejected": float(np.mean(p <= FLOOR_ALPHA)), "trials": len(low),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="500,2000,10000")
    parser.add_argument("--classes", default="10,100")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--truth-size", type=int, default=400_000, help="of ten classes; fewer of more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small case, to see that the script runs")
    parser.add_argument("--device", default="cpu", help="cpu: there is nothing here for a GPU")
    options = parser.parse_args()
    cases = [
        (World(classes, scale, *KINDS[kind]), size, kind)
        for classes in map(int, options.classes.split(","))
        for scale in SCALES[classes]
        for size in map(int, options.sizes.split(","))
        for kind in options.kinds.split(",")
    ]
    if options.quick:
        cases, options.trials, options.truth_size = [(World(10, 2.0, *KINDS["over"]), 300, "over")], 20, 20_000
    rows = []
    print(
        f"{'form':24} {'N':>6} {'C':>4} {'kind':13} accuracy  truth  value  floor  width  coverage  above  below  rejected"
    )
    for world, size, kind in cases:
        count = max(20_000, options.truth_size * 10 // world.num_classes)
        for row in measured(world, size=size, trials=options.trials, truth_size=count, seed=options.seed):
            rows.append({**row, "kind": kind})
            print(
                f"{row['form']:24} {size:6d} {world.num_classes:4d} {kind:13} {row['accuracy']:8.3f} {row['truth']:6.4f} {row['value']:6.4f} "
                f"{row['floor']:6.4f} {row['width']:6.4f} {row['coverage']:9.3f} {row['above']:6.3f} {row['below']:6.3f} {row['rejected']:9.3f}",
                flush=True,
            )
    if options.out is not None:
        options.out.write_text(json.dumps({"rows": rows, "level": LEVEL}, indent=1) + "\n")


if __name__ == "__main__":
    main()
