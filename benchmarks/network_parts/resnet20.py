"""A public ResNet-20 on CIFAR-10 (269,722 parameters): Gaussians over all layers, the last layer and a temperature beside.

Needs resnet20-12fca82f.th (inputs normalised as below), cifar10-train10k.npz, cifar10-test.npz, cifar100-test5k.npz; and
cifar10-test-hmc.npz for the second table: `hmc`, class probabilities of each row of cifar10-test.npz by full-batch HMC over another
ResNet-20 (Izmailov et al. 2021, arXiv:2104.14421). Val and test are random rows of the test set, CIFAR-100 is out of distribution.
The network was trained on 50,000 examples, the posteriors over all layers are given some hundreds: the time goes into
the logits' covariance of each held-out example. So all but `diag` have the precision that val chose for `kron`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.features import read_sample_ids
from bnncli.artifacts.predictions import read_predictions
from network_parts._bench import Bench, Done, Folder
from network_parts._scores import score_rows, score_table
from network_parts._table import Table

SIZES = {"train": 200, "val": 60, "test": 300, "cifar100": 100}
QUICK = {"train": 16, "val": 40, "test": 40, "cifar100": 10}
TEST_ROWS = 10_000
CHANNELS = ("--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225")
OWN_PRECISION = ("diag", "kron")
PRECISION_OF_KRON: dict[str, tuple[object, ...]] = {
    "ekfac": (), "low-rank": ("--rank", 20), "subnetwork": ("--size", 300),
}  # fmt: skip
FLOW = ("--subspace", 20, "--epochs", 5, "--batch-size", 128, "--num-draws", 2, "--elbo-draws", 16)


def run(bench: Bench) -> list[Table]:
    """Scores of all with what diagnose says; then how far each is from the HMC of another network."""
    folder, sizes = bench.folder("resnet20", "resnet20.th"), QUICK if bench.is_quick else SIZES
    _extract(bench, folder, sizes)
    made = {"temperature": folder.bnncli("fit-temperature"), "laplace": folder.bnncli("fit-laplace")}
    made |= _fit(folder)
    name = "subspace-all"
    made[name] = folder.bnncli("refine", "--layers", "all", "--base", "kron-all", *FLOW, "--name", name, "--resume")
    folder.bnncli("predict", "--split", "test", "--split", "cifar100")
    held = f"{sizes['val']} val, {sizes['test']} test"
    table = score_table(f"ResNet-20, CIFAR-10: {sizes['train']} training examples, {held}", folder, made)
    table.notes += ["diagnose:", *folder.said("diagnose")]
    return [table, _beside_hmc(bench, folder)]


def _extract(bench: Bench, folder: Folder, sizes: dict[str, int]) -> None:
    train, test, ood = (bench.data(f"{name}.npz") for name in ("cifar10-train10k", "cifar10-test", "cifar100-test5k"))
    trained, checkpoint = bench.checkpoint("resnet20-12fca82f.th"), folder.path / folder.run
    if not checkpoint.exists():
        checkpoint.symlink_to(trained)
    # Rows of the test set are sorted by class: both splits are drawn from all of it, and what is left is not used.
    splits = ("--data", f"train=npz:{train}@{sizes['train']}", "--data", f"rest=npz:{test}@{TEST_ROWS}")
    held = [word for name in ("val", "test") for word in ("--hold-out", f"{name}=rest:{sizes[name]}")]
    other = ("--ood", f"cifar100=npz:{ood}@{sizes['cifar100']}")
    folder.bnncli("extract-features", "--model", "resnet20", *CHANNELS, *splits, *held, *other)


def _fit(folder: Folder) -> dict[str, Done]:
    """Gaussians over all layers, by name."""
    made = {}
    for structure in OWN_PRECISION:
        made[f"{structure}-all"] = _over_all(folder, structure)
    precision = made["kron-all"].metrics["prior_precision"]
    for structure, words in PRECISION_OF_KRON.items():
        made[f"{structure}-all"] = _over_all(folder, structure, *words, "--prior-precision", f"{precision:.6g}")
    return made


def _over_all(folder: Folder, structure: str, *words: object) -> Done:
    whole = ("--layers", "all", "--structure", structure, "--name", f"{structure}-all")
    return folder.bnncli("fit-laplace", *whole, *words)


def _beside_hmc(bench: Bench, folder: Folder) -> Table:
    """Agreement of the predicted classes, and total variation of the probabilities: of each posterior and the other's HMC."""
    results = folder.path / f"{folder.run}.bnn"
    rows = read_sample_ids(results / "features/test.h5")
    with np.load(bench.data("cifar10-test-hmc.npz")) as arrays:
        hmc = arrays["hmc"][rows].astype(np.float64)
    table = Table(
        f"Beside the HMC of another ResNet-20, {len(rows)} test examples",
        {"posterior": "", "integrator": "", "agreement": ".4f", "total variation": ".4f"},
    )
    for row in score_rows(folder.bnncli("evaluate").document):
        predicted = read_predictions(results / f"predictions/{row['posterior']}.{row['integrator']}/test.h5")
        agreement, variation = apart(np.asarray(predicted.probs, np.float64), hmc)
        named = {key: row[key] for key in ("posterior", "integrator")}
        table.rows.append({**named, "agreement": agreement, "total variation": variation})
    return table


def apart(probs: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[float, float]:
    """The share of examples whose likeliest class is the same, and the mean total variation, of probabilities (N, C)."""
    agreement = (probs.argmax(axis=1) == others.argmax(axis=1)).mean()
    return float(agreement), float(0.5 * np.abs(probs - others).sum(axis=1).mean())
