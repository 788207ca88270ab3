"""Calibration maps on test, fitted on val: bnncli's beside stack, laplace, scikit-learn's and, if it is installed, netcal's.

The networks are those of practice.py. The table is synthetic: 1 positive in 20, a gradient-boosted classifier and a forest of
scikit-learn, calibrated through `bnncli score`.

    python benchmarks/calibration_maps.py --data DATA --checkpoints CHECKPOINTS --out calibration-maps.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from practice import Case, Row, bnncli, cases, row
from scipy.special import logit
from sklearn.calibration import _SigmoidCalibration
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.calibration_maps import MAPS

SMALLEST = 1e-12


def peers(probs: NDArray, labels: NDArray, new: NDArray) -> Iterator[tuple[str, NDArray]]:
    """Yield other libraries' calibrated probabilities of `new` (N, C), fitted to probs and labels."""

    def against_rest(fit: Callable[[NDArray, NDArray, NDArray], NDArray]) -> NDArray:
        if probs.shape[1] == 2:
            second = fit(probs[:, 1], labels, new[:, 1])
            return np.stack([1 - second, second], axis=1)
        columns = [fit(probs[:, k], (labels == k).astype(int), new[:, k]) for k in range(probs.shape[1])]
        found = np.stack(columns, axis=1)
        return found / found.sum(axis=1, keepdims=True).clip(SMALLEST)

    def odds(column: NDArray) -> NDArray:
        return np.asarray(logit(column.clip(SMALLEST, 1 - SMALLEST)))

    yield "scikit-learn sigmoid", against_rest(lambda p, y, q: _SigmoidCalibration().fit(odds(p), y).predict(odds(q)))
    yield (
        "scikit-learn isotonic",
        against_rest(lambda p, y, q: IsotonicRegression(out_of_bounds="clip").fit(p, y).predict(q)),
    )
    logs, others = (np.log(part.clip(SMALLEST)) for part in (probs, new))
    yield "scikit-learn LR on log p", LogisticRegression(C=1e4, max_iter=5000).fit(logs, labels).predict_proba(others)
    try:
        from netcal.binning import HistogramBinning
        from netcal.scaling import BetaCalibration, TemperatureScaling
    except ImportError:
        return
    own, given = (probs[:, 1], new[:, 1]) if probs.shape[1] == 2 else (probs, new)
    for name, made in (
        ("temperature", TemperatureScaling()),
        ("beta", BetaCalibration()),
        ("histogram", HistogramBinning(15)),
    ):
        found = np.asarray(made.fit(own, labels).transform(given))
        yield f"netcal {name}", np.stack([1 - found, found], axis=1) if found.ndim == 1 else found


def network_rows(case: Case, folder: Path) -> Iterator[Row]:
    """Yield the network, every map, stack and laplace, and the peers, on test."""
    path = folder / case.name
    if case.checkpoint is not None:
        shutil.copy(case.checkpoint, path)
    bnncli("extract-features", path, *case.words)
    seconds: dict[str, Any] = {"calibration": bnncli("fit-calibration", path)["wall"]}
    for name in MAPS:
        seconds[name] = bnncli("fit-calibration", path, "--map", name)["wall"]
    for command in ("stack", "fit-laplace"):
        seconds[command.removeprefix("fit-")] = bnncli(command, path)["wall"]
    run = path.with_name(f"{path.name}.bnn")
    names = ["map", *seconds]
    bnncli("predict", path, "--posterior", "map", "--split", "val")
    bnncli("predict", path, "--split", "test", *(word for name in names for word in ("--posterior", name)))
    val, labels = (np.asarray(read_features(run / "features" / f"{split}.h5").labels) for split in ("val", "test"))
    for name in names:
        (file,) = (run / "predictions").glob(f"{name}.*/test.h5")
        took = f", {seconds[name]:.1f} s" if name in seconds else ""
        yield row(f"{file.parent.name.removesuffix('.plug-in')}{took}", read_predictions(file).probs, labels)
    given, new = (
        read_predictions(run / "predictions" / "map.plug-in" / f"{split}.h5").probs for split in ("val", "test")
    )
    yield from timed_peers(np.asarray(given, np.float64), val, np.asarray(new, np.float64), labels)


def table_rows(kind: str, folder: Path, *, size: int, names: Sequence[str]) -> Iterator[Row]:
    """Yield a classifier of an imbalanced table as it is, through every map, and through the peers, on test."""
    x, y = make_classification(
        size, 20, n_informative=8, n_redundant=4, weights=[0.95], flip_y=0.02, class_sep=0.7, random_state=0
    )
    ends = [size // 4, size // 4 + size // 10]
    (x, val, test), (y, of_val, labels) = (np.split(part, ends) for part in (x, y))
    made = HistGradientBoostingClassifier(max_iter=300, random_state=0) if kind == "boosting" else RandomForestClassifier(random_state=0)  # fmt: skip
    given, new = (made.fit(x, y).predict_proba(part) for part in (val, test))
    for name, probs, own in (("val", given, of_val), ("test", new, labels)):
        np.savez(folder / f"{kind}-{name}.npz", probs=probs, label=own)
    yield row("as trained", new.clip(SMALLEST), labels)
    for name in names:
        fitted, table = folder / f"{kind}-{name}.safetensors", folder / f"{kind}-{name}.npz"
        took = bnncli(
            "score", folder / f"{kind}-val.npz", "--fit-calibration", name, "--out", fitted, "--bootstrap", 0
        )["wall"]
        bnncli("score", folder / f"{kind}-test.npz", "--calibration", fitted, "--out", table, "--bootstrap", 0)
        with np.load(table) as arrays:
            yield row(f"{name}, {took:.1f} s", arrays["probabilities"], labels)
    yield from timed_peers(given, of_val, new, labels)


def timed_peers(given: NDArray, val: NDArray, new: NDArray, labels: NDArray) -> Iterator[Row]:
    """Yield the peers' rows, with the seconds that each took. Probabilities of 0 count as 1e-12."""
    start = time.perf_counter()
    for name, probs in peers(given, val, new):
        yield row(f"{name}, {time.perf_counter() - start:.1f} s", probs.clip(SMALLEST), labels)
        start = time.perf_counter()


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--only", nargs="*", help="cases by name: those of practice.py, boosting, forest")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small table, to see that the script runs")
    parser.add_argument("--device", default="cpu", help="cpu: there is nothing here for a GPU")
    options = parser.parse_args()
    only = ["forest"] if options.quick else options.only
    found = {}
    with tempfile.TemporaryDirectory() as place:
        networks = {one.name: one for one in cases(options.data.resolve(), options.checkpoints.resolve())}
        for name in (*networks, "boosting", "forest"):
            if only and name not in only:
                continue
            folder = Path(place)
            small = (
                {"size": 2000, "names": ("isotonic",)} if options.quick else {"size": 40_000, "names": ("auto", *MAPS)}
            )
            is_network = name in networks
            rows = network_rows(networks[name], folder) if is_network else table_rows(name, folder, **small)
            found[name] = [one._asdict() | {"losses": None} for one in rows]
            print(f"\n| {name} | NLL | ECE % | accuracy % |\n|---|---|---|---|")
            for one in found[name]:
                print(
                    f"| {one['name']} | {one['nll']:.4f} +- {one['error']:.4f} | {100 * one['ece']:.1f} | {100 * one['accuracy']:.1f} |",
                    flush=True,
                )
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
