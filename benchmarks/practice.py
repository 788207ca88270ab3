"""Whether the defaults give the best answer that the tool knows: test NLL and ECE of what users get, beside what else they would do.

Each case is a run as a user makes it: features, `auto`, then `refine` and `hmc` with all defaults, on test. Beside them scikit-learn's
logistic regression on the same features, its penalty chosen on val, and ensembles where sibling checkpoints are there. Claims: auto
is not worse than the network at one temperature by more than its own error, and within .005 nats of the best.

    python benchmarks/practice.py --data DATA --checkpoints CHECKPOINTS

DATA holds practice-digits.npz, practice-mnist-cnn.npz, practice-imbalance.npz, fmnist-train.npz, fmnist-test.npz, cifar10-train10k.npz and
cifar10-test.npz; CHECKPOINTS lenet-fmnist-1.pt to -3.pt and resnet20-12fca82f.th. What is not there is left out; the embedded case always runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
NEAR = 0.005  # nats, of the best
CIFAR10 = ("--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225")
PENALTIES = 10.0 ** np.arange(-4, 4.5, 0.5)  # scikit-learn's C


class Case(NamedTuple):
    """A run to be made: the checkpoint that is copied, if any, further ones, and words of extract-features."""

    name: str
    checkpoint: Path | None
    siblings: tuple[Path, ...]
    words: tuple[str, ...]


class Row(NamedTuple):
    """A predictive on test."""

    name: str
    nll: float
    error: float
    ece: float
    accuracy: float
    losses: NDArray


def cases(data: Path, checkpoints: Path) -> list[Case]:
    """Those whose files are there."""
    splits = [f"--data={split}=npz:{FIXTURES / split}.npz" for split in ("train", "val", "test")]
    found = [Case("demo", FIXTURES / "lenet5-fmnist.pt", (), ("--model", "lenet5", *splits))]
    tables = ("digits", "mnist-cnn", "imbalance")
    found += [Case(name, None, (), ("--from-npz", str(data / f"practice-{name}.npz"))) for name in tables]
    lenets = [checkpoints / f"lenet-fmnist-{seed}.pt" for seed in (1, 2, 3)]
    fashion = (
        "--model",
        "lenet5",
        f"--data=train=npz:{data / 'fmnist-train.npz'}@10000",
        f"--data=test=npz:{data / 'fmnist-test.npz'}",
    )
    found.append(Case("lenet", lenets[0], tuple(lenets[1:]), (*fashion, "--hold-out", "val=test:2000")))
    images = (f"--data=train=npz:{data / 'cifar10-train10k.npz'}", f"--data=test=npz:{data / 'cifar10-test.npz'}")
    resnet = ("--model", "resnet20", *CIFAR10, *images, "--hold-out", "val=test:2000")
    found.append(Case("resnet20", checkpoints / "resnet20-12fca82f.th", (), resnet))
    return [case for case in found if all(path.is_file() for path in _files(case))]


def _files(case: Case) -> list[Path]:
    files = [*case.siblings, *([case.checkpoint] if case.checkpoint else [])]
    arrays = [word for word in case.words if ".npz" in word]
    return files + [Path(word.split("npz:")[-1].split("@")[0]) for word in arrays]


def bnncli(*words: object) -> dict[str, object]:
    """Run a command; its JSON, with the seconds that it took. Exits where it fails, but for a verdict."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bnncli", *map(str, words), "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3):
        sys.exit(f"practice.py: bnncli {' '.join(map(str, words))}: {done.stderr.strip().splitlines()[-2:]}")
    return {**json.loads(done.stdout), "wall": time.perf_counter() - start}


def row(name: str, probs: NDArray, labels: NDArray) -> Row:
    """NLL with its standard error, ECE of 15 bins, and accuracy."""
    probs = np.asarray(probs, dtype=np.float64)
    losses = -np.log(np.clip(probs[np.arange(len(labels)), labels], 1e-300, None))
    confidence, is_right = probs.max(axis=1), probs.argmax(axis=1) == labels
    bins = np.minimum((confidence * 15).astype(int), 14)
    ece = sum(abs((is_right[bins == one] - confidence[bins == one]).sum()) for one in range(15)) / len(labels)
    return Row(name, losses.mean(), losses.std(ddof=1) / len(losses) ** 0.5, ece, is_right.mean(), losses)


def logistic_regression(folder: Path, labels: NDArray) -> Row:
    """scikit-learn's, of the penalty with the lowest NLL on val."""
    train, val, test = (read_features(folder / "features" / f"{split}.h5") for split in ("train", "val", "test"))
    best, chosen = np.inf, np.empty(0)
    for penalty in PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=2000).fit(train.features, train.labels)
        loss = row("", model.predict_proba(val.features), val.labels).nll
        if loss < best:
            best, chosen = loss, model.predict_proba(test.features)
    return row("logistic regression", chosen, labels)


def run_case(case: Case, folder: Path) -> list[Row]:
    """Make the run, and score what each command leaves."""
    paths = [folder / f"{case.name}-{number}" for number in range(1 + len(case.siblings))]
    path = paths[0]
    for source, copy in zip([case.checkpoint, *case.siblings], paths, strict=True):
        if source is not None:
            shutil.copy(source, copy)
    bnncli("extract-features", path, *case.words)
    auto = bnncli("auto", path, "--accept-poor-network")
    names = ["map", "temperature", "stack", "laplace"]
    for command in ("refine", "hmc"):
        bnncli(command, path)
        names.append(command)
    if case.siblings:  # which auto has made an ensemble of, at one temperature
        bnncli("fit-ensemble", *paths, "--name", "as-trained")
        bnncli("fit-ensemble", *paths, "--each", "laplace")
        names += ["ensemble", "as-trained", "mola"]
    bnncli("predict", path, "--split", "test", *(word for name in names for word in ("--posterior", name)))
    run = path.with_name(f"{path.name}.bnn")
    labels = np.asarray(read_features(run / "features" / "test.h5").labels)
    rows = []
    for name in names:
        (file,) = (run / "predictions").glob(f"{name}.*/test.h5")
        rows.append(row(file.parent.name, read_predictions(file).probs, labels))
    rows.append(logistic_regression(run, labels))
    chosen = next(one for one in auto["rows"] if one["is_recommended"])  # type: ignore[attr-defined,union-attr]
    bnncli("predict", path, "--split", "test")
    which = f"{chosen['posterior']}.{chosen['integrator']}"
    probs = read_predictions(run / "predictions" / which / "test.h5").probs
    rows.append(row(f"auto: {chosen['posterior']}", probs, labels)._replace(name=f"auto: {which}"))
    print(f"{case.name}: auto {auto['wall']:.0f} s")
    return rows


def main() -> None:
    """Print a table for each case, and which claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--only", nargs="*", help="cases by name")
    arguments = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as place:
        for case in cases(arguments.data.resolve(), arguments.checkpoints.resolve()):
            if arguments.only and case.name not in arguments.only:
                continue
            rows = run_case(case, Path(place))
            print(f"\n| {case.name}, {len(rows[0].losses)} test rows | NLL | ECE % | accuracy % |\n|---|---|---|---|")
            for one in rows:
                print(
                    f"| {one.name} | {one.nll:.4f} +- {one.error:.4f} | {100 * one.ece:.1f} | {100 * one.accuracy:.1f} |"
                )
            print(flush=True)
            missed += _claims(case.name, rows)
    print("\n".join(missed) or "all claims hold")
    sys.exit(1 if missed else 0)


def _claims(name: str, rows: list[Row]) -> list[str]:
    """What does not hold of a case."""
    auto, best = rows[-1], min(rows, key=lambda one: one.nll)
    missed = []
    if (temperature := next((one for one in rows if one.name == "temperature.plug-in"), None)) is not None:
        gaps = auto.losses - temperature.losses
        if gaps.mean() > 2 * gaps.std(ddof=1) / len(gaps) ** 0.5:
            missed.append(f"{name}: auto is worse than temperature by {gaps.mean():.4f}")
    if auto.nll > best.nll + NEAR:
        missed.append(f"{name}: auto is {auto.nll - best.nll:.4f} nats behind {best.name}")
    return missed


if __name__ == "__main__":
    main()
