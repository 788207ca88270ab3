"""How often monitors raise a false alarm, and how soon they find a change: bnncli's beside a nightly test and, if installed, river.

A stream is 1,000 examples of the test split, then 2,000 of a shift. The score is `combined` of the Laplace posterior's predictions;
the errors are tested as well, as if labels were known. False alarms are counted in streams without a change, over random divisions
into calibration split and stream. A nightly test is the two-sample Kolmogorov-Smirnov test of 100 examples.

    python benchmarks/monitoring.py lenet.pt --train fmnist-train.npz --test fmnist-test.npz --ood kmnist=kmnist-test.npz --out monitoring.json
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.decisions import distance_p_value, kolmogorov_smirnov_distance
from bnncli.evaluation.monitoring import (
    Capital,
    ConformalRanks,
    bet_on_losses,
    bet_on_p_values,
    find_alarm,
    upper_rate,
)

ALPHA, BEFORE, AFTER, NIGHT = 0.01, 1000, 2000, 100
MAKER = "laplace.probit"


@dataclass(frozen=True)
class Observed:
    """Examples of a split: scores (N,) and whether the prediction is wrong (N,), None without labels."""

    scores: NDArray
    is_wrong: NDArray | None

    def rows(self, rows: NDArray) -> Observed:
        """Return some of the rows."""
        return Observed(self.scores[rows], None if self.is_wrong is None else self.is_wrong[rows])

    def followed_by(self, other: Observed) -> Observed:
        """Return both, in order."""
        wrong = None
        if self.is_wrong is not None and other.is_wrong is not None:
            wrong = np.concatenate([self.is_wrong, other.is_wrong])
        return Observed(np.concatenate([self.scores, other.scores]), wrong)


Detector = Callable[[Observed, Observed, np.random.Generator], "int | None"]


def watch_inputs(calib: Observed, stream: Observed, generator: np.random.Generator) -> int | None:
    """Return the number of examples at the alarm of monitor's test of inputs."""
    p_values = ConformalRanks(calib.scores).extend(stream.scores, generator.random(len(stream.scores)))
    return _alarm(bet_on_p_values(p_values), ALPHA / 2)


def watch_errors(calib: Observed, stream: Observed, generator: np.random.Generator) -> int | None:
    """Return the number of examples at the alarm of monitor's test of errors."""
    assert calib.is_wrong is not None
    if stream.is_wrong is None:
        return None
    reference = upper_rate(int(calib.is_wrong.sum()), len(calib.is_wrong), ALPHA / 4)
    return _alarm(bet_on_losses(stream.is_wrong.astype(float), reference), ALPHA / 4)


def _alarm(factors: NDArray, level: float) -> int | None:
    found = find_alarm(Capital.start(factors.shape[-1]).play(factors)[1], level)
    return None if found is None else found.step


def test_nightly(level: float) -> Detector:
    """Return a detector that tests each night's batch at this level."""

    def detect(calib: Observed, stream: Observed, generator: np.random.Generator) -> int | None:
        known = np.sort(calib.scores)
        for start in range(0, len(stream.scores), NIGHT):
            batch = stream.scores[start : start + NIGHT]
            if distance_p_value(kolmogorov_smirnov_distance(known, batch), len(known), len(batch)) <= level:
                return start + len(batch)
        return None

    return detect


def use_river(name: str, of_errors: bool) -> Detector:
    """Return one of river's detectors with its default settings, started on the calibration split."""
    from river import drift  # type: ignore[import-not-found]

    def detect(calib: Observed, stream: Observed, generator: np.random.Generator) -> int | None:
        detector = getattr(drift, name)()
        known, new = (one.is_wrong if of_errors else one.scores for one in (calib, stream))
        if known is None or new is None:
            return None
        for value in known.tolist():
            detector.update(float(value))
        for step, value in enumerate(new.tolist(), 1):
            detector.update(float(value))
            if detector.drift_detected:
                return step
        return None

    return detect


def detectors() -> dict[str, Detector]:
    """Return every detector by name."""
    nights = (BEFORE + AFTER) // NIGHT
    found: dict[str, Detector] = {
        "monitor, inputs": watch_inputs,
        "monitor, errors": watch_errors,
        f"KS of {NIGHT} at {ALPHA}, nightly": test_nightly(ALPHA),
        f"KS of {NIGHT} at {ALPHA} / {nights}": test_nightly(ALPHA / nights),
    }
    try:
        found |= {
            f"river {name}, inputs": use_river(name, of_errors=False) for name in ("ADWIN", "KSWIN", "PageHinkley")
        }
        found["river ADWIN, errors"] = use_river("ADWIN", of_errors=True)
    except ImportError:
        print("river is not installed: left out", file=sys.stderr)
    return found


def main() -> None:
    """Make the run, watch the streams, print one table, write JSON."""
    arguments = _parse()
    with tempfile.TemporaryDirectory() as folder:
        splits = _make_splits(Path(folder) / "run.bnn", arguments)
    report: dict[str, Any] = {"schema": "bnncli.benchmark.monitoring/1", "alpha": ALPHA, "rows": []}
    calib, test = splits.pop("calib"), splits.pop("test")
    shifts = {"gradual": None, **splits}
    last = list(splits.values())[-1]
    print(f"{'':<32}{'false alarms':>14}" + "".join(f"{name:>22}" for name in shifts))
    for name, detect in detectors().items():
        row: dict[str, Any] = {
            "detector": name,
            "false_alarms": _count_false_alarms(detect, calib, test, arguments.streams),
        }
        cells = [f"{row['false_alarms']:.2f}"]
        for shift, after in shifts.items():
            delays = [_delay(detect, calib, test, after, last, number) for number in range(arguments.streams)]
            before, found = sum(one == -1 for one in delays), [one for one in delays if one is not None and one >= 0]
            median = float(np.median([math.inf if one is None else one for one in delays if one != -1] or [math.inf]))
            row[shift] = {"median_delay": None if math.isinf(median) else median, "found": len(found), "early": before}
            cells.append(f"{'-' if math.isinf(median) else f'{median:.0f}'} ({len(found)} of {arguments.streams})")
        print(f"{name:<32}{cells[0]:>14}" + "".join(f"{cell:>22}" for cell in cells[1:]), flush=True)
        report["rows"].append(row)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def _count_false_alarms(detect: Detector, calib: Observed, test: Observed, count: int) -> float:
    pool, size, alarms = calib.followed_by(test), len(calib.scores), 0
    for number in range(count):
        generator = np.random.default_rng([1, number])
        order = generator.permutation(len(pool.scores))
        stream = pool.rows(order[size : size + BEFORE + AFTER])
        alarms += detect(pool.rows(order[:size]), stream, generator) is not None
    return alarms / count


def _delay(
    detect: Detector, calib: Observed, test: Observed, after: Observed | None, last: Observed, number: int
) -> int | None:
    """Return the examples from the change to the alarm: -1 for an alarm before it, None for none.

    Without `after`, a growing share of the examples, up to a half, is of the last shift.
    """
    generator = np.random.default_rng([2, number])
    rows = generator.permutation(len(test.scores))[:BEFORE]
    if after is not None:
        shifted = after.rows(generator.choice(len(after.scores), size=AFTER))
    else:
        is_other = generator.random(AFTER) < np.linspace(0, 0.5, AFTER)
        same, other = (one.rows(generator.choice(len(one.scores), size=AFTER)) for one in (test, last))
        scores = np.where(is_other, other.scores, same.scores)
        wrong = None
        if same.is_wrong is not None and other.is_wrong is not None:
            wrong = np.where(is_other, other.is_wrong, same.is_wrong)
        shifted = Observed(scores, wrong)
    step = detect(calib, test.rows(rows).followed_by(shifted), generator)
    return None if step is None else max(-1, step - BEFORE - 1) if step <= BEFORE else step - BEFORE


def _make_splits(root: Path, arguments: argparse.Namespace) -> dict[str, Observed]:
    """Return what is watched of each split: calib, test, the hardest classes, rotations, other data."""
    held_out = [f"--hold-out={name}=test:{arguments.held_out}" for name in ("val", "calib")]
    data = ["--data", f"train=npz:{arguments.train}", "--data", f"test=npz:{arguments.test}"]
    data += [word for text in arguments.ood for word in ("--ood", text.replace("=", "=npz:", 1))]
    where = ("--run-dir", root)
    network = ("--model", arguments.model, *arguments.options.split())
    _bnncli("extract-features", arguments.checkpoint, *network, *data, *held_out, *where)
    for degrees in filter(None, arguments.rotate.split(",")):
        turned = ("--data", f"rotated-{degrees}=npz:{arguments.test}", "--rotate", degrees)
        _bnncli("extract-features", arguments.checkpoint, *network, *turned, *where)
    _bnncli("fit-laplace", arguments.checkpoint, *where)
    _bnncli("predict", arguments.checkpoint, "--posterior", "laplace", "--integrator", "probit", *where)
    found, hardest = {}, None
    for path in sorted((root / "predictions" / MAKER).glob("*.h5")):
        if path.stem in ("train", "val"):
            continue
        content = read_predictions(path)
        assert content.combined is not None
        wrong = (
            None if content.labels is None else np.asarray(content.probs).argmax(axis=1) != np.asarray(content.labels)
        )
        found[path.stem] = Observed(np.asarray(content.combined, dtype=np.float64), wrong)
        if path.stem == "test":
            assert wrong is not None
            labels = np.asarray(content.labels)
            rates = [wrong[labels == k].mean() for k in range(len(content.classes))]
            hardest = np.flatnonzero(np.isin(labels, np.argsort(rates)[-3:]))
    assert hardest is not None
    first = {name: found.pop(name) for name in ("calib", "test")}
    return {**first, "3 hardest classes": first["test"].rows(hardest), **found}


def _bnncli(command: str, *words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "bnncli", command, *map(str, words), "--quiet"], stdout=subprocess.DEVNULL, check=True
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--options", default="", help="further options of extract-features, such as --mean and --std")
    parser.add_argument("--train", required=True, help="npz of the training images")
    parser.add_argument("--test", required=True, help="npz of the test images")
    parser.add_argument("--ood", action="append", default=[], metavar="NAME=FILE", help="npz of data of another kind")
    parser.add_argument("--rotate", default="15,30", help="degrees, comma-separated")
    parser.add_argument(
        "--held-out", type=int, default=2000, help="rows of the validation and of the calibration split"
    )
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--out", type=Path, help="where the numbers go as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
