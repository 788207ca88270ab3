"""What the decisions of `calibrate` guarantee on real data, and what breaks when the data shift.

A test set is divided: a validation split chooses the prior, a calibration split the rules, the rest is decided on. First over
random divisions of the last two: coverage of the sets beside the exact band of its Beta law, how often the risk is above its bound,
the rate of false alarms, and how often precision and recall of the class that is most often wrong fall short. Then one rule of each kind on shifted data: other shares of the classes (those most often wrong alone, and
shares that are drawn), rotated images, and data of another kind. Batches are of 500 examples, drawn with replacement; the alarm is the share of 40 of them.

With --imbalance, a table with rare positives is divided likewise, for precision and recall.

    python benchmarks/decisions.py lenet.pt --train fmnist-train.npz --test fmnist-test.npz --ood kmnist=kmnist-test.npz --out decisions.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bnncli.artifacts.posteriors import read_decision
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.decisions import (
    AcceptanceRule,
    ClassRule,
    CostRule,
    OutlierRule,
    SetRule,
    SetScore,
    ShiftRule,
    covering_rank,
    fit_acceptance,
    fit_outliers,
    fit_precision,
    fit_recall,
    fit_thresholds,
)

PRECISION = RECALL = 0.8
RARE_PRECISION, RARE_RECALL = 0.2, 0.8  # of the imbalanced table, whose calibration examples have some 20 positives
FLAGGED = 6  # the class, shirts, that is most often wrong
ABSTAINING = 0.2  # costs, where a mistake costs 1
COVERAGE, RISK, CERTAINTY, FALSE_ALARM, SHIFT_LEVEL = 0.9, 0.05, 0.95, 0.05, 0.01
RULES = {
    "lac": ("--sets", "lac"),
    "aps": ("--sets", "aps"),
    "raps": ("--sets", "raps"),
    "by-class": ("--sets", "lac", "--class-conditional"),
    "risk": ("--risk", RISK, "--confidence", CERTAINTY),
    "precision": ("--precision", PRECISION, "--class", FLAGGED),
    "recall": ("--recall", RECALL, "--class", FLAGGED),
    "costs": ("--costs", "COSTS"),
    "ood": ("--false-alarm", FALSE_ALARM, "--score", "max_prob"),
    "shift": ("--shift-level", SHIFT_LEVEL, "--score", "max_prob"),
}
NUM_BATCHES, BATCH = 40, 500
MAKERS = {"map": "map.plug-in", "laplace": "laplace.mc"}


@dataclass(frozen=True)
class Predicted:
    """Predictions of a split: probabilities (N, K), labels (N,) or None, the uniform number and the row (N,) of each example."""

    name: str
    probs: NDArray
    labels: NDArray | None
    uniform: NDArray
    sample_id: NDArray

    def rows(self, rows: NDArray, name: str) -> Predicted:
        """Some of the rows, as a split of this name."""
        labels = None if self.labels is None else self.labels[rows]
        return Predicted(name, self.probs[rows], labels, self.uniform[rows], self.sample_id[rows])


def main() -> None:
    """Fit, calibrate, print both tables for each posterior, write JSON."""
    arguments = _parse()
    report: dict[str, Any] = {"schema": "bnncli.benchmark.decisions/1", "posteriors": []}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        _make_run(run, arguments)
        for posterior, maker in MAKERS.items():
            root = run.with_name("run.bnn")
            paths = sorted((root / "predictions" / maker).glob("*.h5"))
            splits = {path.stem: _predicted(path) for path in paths}
            repeated = _over_divisions(splits["calib"], splits["test"], 20 if arguments.quick else 100)
            files = sorted((root / "decisions" / maker).glob("*.safetensors"))
            rules = {path.stem: read_decision(path).rule for path in files}
            shifted = [_decided(one, rules) for one in _shifts(splits)]
            report["posteriors"].append({"posterior": posterior, "divisions": repeated, "shifts": shifted})
            _print(posterior, repeated, shifted)
        if arguments.imbalance:
            report["imbalance"] = _imbalance(run.with_name("rare"), arguments)
            for row in report["imbalance"]:
                print("imbalanced table:", _format_flags(row))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def _make_run(run: Path, arguments: argparse.Namespace) -> None:
    """Features, a posterior, predictions and every rule."""
    held_out = [f"--hold-out={name}=test:{arguments.held_out}" for name in ("val", "calib")]
    data = ["--data", f"train=npz:{arguments.train}", "--data", f"test=npz:{arguments.test}"]
    data += [word for text in arguments.ood for word in ("--ood", text.replace("=", "=npz:", 1))]
    where = ("--run-dir", run.with_name("run.bnn"), "--device", arguments.device)
    checkpoint = arguments.checkpoint
    _bnncli("extract-features", checkpoint, "--model", arguments.model, *data, *held_out, *where)
    for degrees in filter(None, arguments.rotate.split(",")):
        turned = ("--data", f"rotated-{degrees}=npz:{arguments.test}", "--rotate", degrees)
        _bnncli("extract-features", checkpoint, "--model", arguments.model, *turned, *where)
    _bnncli("fit-laplace", checkpoint, *where)
    _bnncli("predict", checkpoint, "--posterior", "map", "--posterior", "laplace", *where)
    costs = run.with_name("costs.csv")
    classes = range(10)
    rows = [",".join(str(int(k != true)) for k in classes) for true in classes]
    head = f"class,{','.join(map(str, classes))},abstain"
    costs.write_text("\n".join([head, *(f"{true},{row},{ABSTAINING}" for true, row in enumerate(rows))]))
    for name, words in RULES.items():
        given = [costs if word == "COSTS" else word for word in words]
        _bnncli("calibrate", checkpoint, *given, "--name", name, *where, may_fail=name in ("risk", "precision"))
    for degrees in filter(None, arguments.rotate.split(",")):
        words = ("--sets", "lac", "--shifted-to", f"rotated-{degrees}", "--name", f"weighted-{degrees}")
        _bnncli("calibrate", checkpoint, *words, *where, may_fail=True)


def _bnncli(command: str, *words: object, may_fail: bool = False) -> None:
    line = [sys.executable, "-m", "bnncli", command, *map(str, words), "--quiet"]
    done = subprocess.run(line, stdout=subprocess.DEVNULL)
    if done.returncode not in ((0, 3, 65) if may_fail else (0,)):  # 65: the shift is too large for weights
        raise SystemExit(f"bnncli {command}: exit code {done.returncode}")


def _predicted(path: Path) -> Predicted:
    content = read_predictions(path)
    labels = None if content.labels is None else np.asarray(content.labels)
    uniform = SetScore("aps", 0).uniform(path.stem, len(content.probs))
    assert uniform is not None
    probs = np.asarray(content.probs, dtype=np.float64)
    return Predicted(path.stem, probs, labels, uniform, np.asarray(content.sample_id))


def _over_divisions(calib: Predicted, test: Predicted, num_divisions: int) -> list[dict[str, Any]]:
    """What each kind of rule comes to on the rest of the pool, fitted to as many of its rows as the calibration split has."""
    assert calib.labels is not None
    assert test.labels is not None
    size, generator = len(calib.probs), np.random.default_rng(0)
    probs = np.concatenate([calib.probs, test.probs])
    labels, uniform = np.concatenate([calib.labels, test.labels]), generator.random(len(probs))
    confidence, is_right = probs.max(axis=1), probs.argmax(axis=1) == labels
    scores = {
        "lac": SetScore("lac").of_labels(probs, labels),
        "aps": SetScore("aps", 0).of_labels(probs, labels, uniform),
        "raps": SetScore("raps", 0, 0.1, 2).of_labels(probs, labels, uniform),
    }
    found: dict[str, list[float]] = {name: [] for name in (*scores, "risk", "accepted", "ood")}
    for _ in range(num_divisions):
        order = generator.permutation(len(probs))
        inside, rest = order[:size], order[size:]
        for name, values in scores.items():
            threshold = fit_thresholds(values[inside], None, COVERAGE, num_classes=probs.shape[1])[0]
            found[name].append(float(np.mean(values[rest] <= threshold)))
        accepted = fit_acceptance(confidence[inside], is_right[inside], RISK, CERTAINTY).accepts(confidence[rest])
        found["accepted"].append(float(accepted.mean()))
        found["risk"].append(float(1 - is_right[rest][accepted].mean()) if accepted.any() else 0.0)
        outliers = fit_outliers(confidence[inside], FALSE_ALARM).is_outlier(confidence[rest])
        found["ood"].append(float(outliers.mean()))
    rank = covering_rank(size, COVERAGE)
    assert rank is not None
    # Of a finite rest, the number covered is beta-binomial.
    law = stats.betabinom(len(probs) - size, rank, size + 1 - rank)
    low, high = (float(end) / (len(probs) - size) for end in law.interval(0.95))
    rows = [
        {
            "rule": name,
            "mean": float(np.mean(found[name])),
            "expected": rank / (size + 1),
            "standard_error": float(law.std() / (len(probs) - size) / num_divisions**0.5),
            "band": [low, high],
            "in_band": float(np.mean([low <= value <= high for value in found[name]])),
        }
        for name in scores
    ]
    rows += _flag_over_divisions(probs[:, FLAGGED], labels == FLAGGED, size, (PRECISION, RECALL), num_divisions)
    exceeded = float(np.mean(np.array(found["risk"]) > RISK))
    rows.append(
        {
            "rule": "risk",
            "mean": float(np.mean(found["risk"])),
            "accepted": float(np.mean(found["accepted"])),
            "exceeded": exceeded,
        }
    )
    rows.append({"rule": "ood", "mean": float(np.mean(found["ood"]))})
    return rows


def _flag_over_divisions(
    probability: NDArray, is_positive: NDArray, size: int, levels: tuple[float, float], num_divisions: int
) -> list[dict[str, Any]]:
    """What precision and recall rules of one class come to on the rest of the pool."""
    generator, rows = np.random.default_rng(3), []
    for name, fit, level in zip(("precision", "recall"), (fit_precision, fit_recall), levels, strict=True):
        found = []
        for _ in range(num_divisions):
            order = generator.permutation(len(probability))
            inside, rest = order[:size], order[size:]
            rule = fit(probability[inside], is_positive[inside], level, CERTAINTY, of_class=0)
            flagged, positive = rule.flags(probability[rest, None]), is_positive[rest]
            if flagged.any():
                found.append([positive[flagged].mean(), flagged[positive].mean()])
        reached = np.array(found or [[np.nan, np.nan]])
        short = float((reached[:, int(name == "recall")] < level).sum() / num_divisions)
        means = {"precision": float(reached[:, 0].mean()), "recall": float(reached[:, 1].mean())}
        rows.append({"rule": name, "level": level, **means, "passed": len(found) / num_divisions, "short": short})
    return rows


def _imbalance(run: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Precision and recall of the rare class of a table, over divisions of its test split in halves."""
    _bnncli("extract-features", run, "--from-npz", arguments.imbalance, "--device", arguments.device)
    _bnncli("fit-laplace", run, "--device", arguments.device)
    _bnncli("predict", run, "--posterior", "laplace", "--split", "test", "--device", arguments.device)
    test = _predicted(next(run.with_name(f"{run.name}.bnn").glob("predictions/laplace.*/test.h5")))
    assert test.labels is not None
    levels, size = (RARE_PRECISION, RARE_RECALL), len(test.probs) // 2
    return _flag_over_divisions(test.probs[:, 1], test.labels == 1, size, levels, 20 if arguments.quick else 100)


def _format_flags(row: dict[str, Any]) -> str:
    return (
        f"{row['rule']} of {row['level']}: precision {row['precision']:.3f}, recall {row['recall']:.3f}, short in "
        f"{row['short']:.0%} (allowed: {1 - CERTAINTY:.0%}), a threshold in {row['passed']:.0%}"
    )


def _shifts(splits: dict[str, Predicted]) -> list[Predicted]:
    """The test split as it is, with other shares of the classes, rotated, and data of another kind."""
    test, generator = splits["test"], np.random.default_rng(1)
    assert test.labels is not None
    labels, num_classes = test.labels, test.probs.shape[1]
    is_right = test.probs.argmax(axis=1) == labels
    hardest = np.argsort([is_right[labels == k].mean() for k in range(num_classes)])[:3]
    found = [test, test.rows(np.flatnonzero(np.isin(labels, hardest)), "3 hardest classes")]
    for number in range(2):
        shares = generator.dirichlet(np.full(num_classes, 0.5))
        weights = (shares / np.bincount(labels, minlength=num_classes))[labels]
        rows = generator.choice(len(labels), size=len(labels), p=weights / weights.sum())
        found.append(test.rows(rows, f"drawn shares {number + 1}"))
    for name, one in splits.items():
        if name.startswith("rotated"):  # without the rows that were held out
            found.append(one.rows(np.flatnonzero(np.isin(one.sample_id, test.sample_id)), name))
        elif name not in ("calib", "val", "train", "test"):
            found.append(one)
    return found


def _decided(split: Predicted, rules: dict[str, Any]) -> dict[str, Any]:
    """What the rules come to on a split."""
    confidence, predicted = split.probs.max(axis=1), split.probs.argmax(axis=1)
    row: dict[str, Any] = {"split": split.name, "examples": len(confidence)}
    for name, rule in rules.items():
        if isinstance(rule, SetRule):
            sets = rule.sets(split.probs, None if rule.score.seed is None else split.uniform)
            row[f"{name} size"] = float(sets.sum(axis=1).mean())
            if split.labels is not None:
                covered = sets[np.arange(len(sets)), split.labels]
                row[name] = float(covered.mean())
                row[f"{name} worst"] = min(float(covered[split.labels == k].mean()) for k in np.unique(split.labels))
        elif isinstance(rule, AcceptanceRule):
            accepted = rule.accepts(confidence)
            row["accepted"] = float(accepted.mean())
            if split.labels is not None and accepted.any():
                row["risk"] = float((predicted != split.labels)[accepted].mean())
        elif isinstance(rule, ClassRule) and split.labels is not None:
            flagged, positive = rule.flags(split.probs), split.labels == rule.of_class
            if name == "precision" and flagged.any():
                row[name] = float(positive[flagged].mean())
            if name == "recall" and positive.any():
                row[name] = float(flagged[positive].mean())
        elif isinstance(rule, CostRule) and split.labels is not None:
            decided, expected = rule.decide(split.probs)
            row["cost"] = float(rule.costs[split.labels, decided].mean())
            row["expected"] = float(expected.mean())
            row["argmax cost"] = float(rule.costs[split.labels, predicted].mean())
        elif isinstance(rule, OutlierRule):
            row["ood"] = float(rule.is_outlier(confidence).mean())
        elif isinstance(rule, ShiftRule):
            generator = np.random.default_rng(2)
            batches = [generator.choice(confidence, size=BATCH) for _ in range(NUM_BATCHES)]
            p_values = [rule.p_value(batch) for batch in batches]
            row["alarms"] = float(np.mean([p is not None and p <= rule.level for p in p_values]))
    return row


def _print(posterior: str, repeated: list[dict[str, Any]], shifted: list[dict[str, Any]]) -> None:
    print(f"\n{posterior}: random divisions")
    for row in repeated:
        if "band" in row:
            low, high = row["band"]
            print(f"  {row['rule']:<5} coverage {row['mean']:.4f} (expected {row['expected']:.4f} +- {row['standard_error']:.4f}), "
                  f"{row['in_band']:.0%} within the 95% band {low:.4f} to {high:.4f}")  # fmt: skip
        elif "short" in row:
            print(f"  {_format_flags(row)}")
        elif row["rule"] == "risk":
            print(
                f"  risk  {row['mean']:.4f} of {row['accepted']:.1%} accepted, above {RISK} in {row['exceeded']:.0%} (allowed: {1 - CERTAINTY:.0%})"
            )
        else:
            print(f"  ood   false alarms {row['mean']:.4f} (at most {FALSE_ALARM})")
    columns = (
        "lac",
        "lac worst",
        "lac size",
        "aps",
        "aps size",
        "raps",
        "raps size",
        "by-class",
        "by-class worst",
        "risk",
        "accepted",
        "ood",
        "alarms",
        "precision",
        "recall",
        "cost",
        "expected",
        "argmax cost",
        *sorted({name for row in shifted for name in row if name.startswith("weighted") and " " not in name}),
    )
    print(f"{'':<22}" + "".join(f"{name:>15}" for name in columns))
    for row in shifted:
        cells = [f"{row[name]:.3f}" if name in row else "-" for name in columns]
        print(f"{row['split']:<22}" + "".join(f"{cell:>15}" for cell in cells))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--train", required=True, help="npz of the training images")
    parser.add_argument("--test", required=True, help="npz of the test images")
    parser.add_argument("--ood", action="append", default=[], metavar="NAME=FILE", help="npz of data of another kind")
    parser.add_argument("--imbalance", help="npz of the features of a table with rare positives")
    parser.add_argument("--rotate", default="15,30,45", help="degrees, comma-separated")
    parser.add_argument(
        "--held-out", type=int, default=2000, help="rows of the validation and of the calibration split"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer divisions")
    parser.add_argument("--out", type=Path, help="where the numbers go as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
