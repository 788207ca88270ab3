"""LeNet-5 on Fashion-MNIST (44,426 parameters), trained 100 epochs: every structure over all layers, and the last layer beside.

Needs fmnist-train.npz, fmnist-test.npz, mnist-test.npz and lenet-fmnist-1.pt. The prior precision is chosen on 2,000 rows of
the test set that are then left out of it; MNIST is out of distribution.
"""

from __future__ import annotations

from network_parts._bench import Bench, Done, Folder
from network_parts._scores import score_table
from network_parts._table import Table

STRUCTURES = ("diag", "kron", "ekfac", "low-rank")


def run(bench: Bench) -> list[Table]:
    """Scores of all, then what diagnose says."""
    folder = bench.folder("lenet", "lenet.pt")
    made = _make(bench, folder)
    folder.bnncli("predict", "--split", "test", "--split", "mnist")
    rows = bench.rows(60_000), bench.rows(8_000, 300)
    table = score_table(f"LeNet-5, Fashion-MNIST: {rows[0]} training examples, {rows[1]} test", folder, made)
    table.notes += ["", "diagnose:", *folder.said("diagnose")]
    return [table]


def _make(bench: Bench, folder: Folder) -> dict[str, Done]:
    """The command that made each posterior."""
    train, test, ood = (bench.data(f"{name}.npz") for name in ("fmnist-train", "fmnist-test", "mnist-test"))
    checkpoint = folder.path / folder.run
    if not checkpoint.exists():
        checkpoint.symlink_to(bench.checkpoint("lenet-fmnist-1.pt"))
    splits = [
        "--data",
        f"train=npz:{train}@{bench.rows(60_000)}",
        "--data",
        f"test=npz:{test}@{bench.rows(10_000, 600)}",
    ]
    held = ["--hold-out", f"val=test:{bench.rows(2_000, 300)}", "--ood", f"mnist=npz:{ood}@{bench.rows(10_000)}"]
    folder.bnncli("extract-features", "--model", "lenet5", *splits, *held)
    made = {"temperature": folder.bnncli("fit-temperature"), "laplace": folder.bnncli("fit-laplace")}
    for structure in STRUCTURES:
        name = f"{structure}-all"
        made[name] = folder.bnncli("fit-laplace", "--layers", "all", "--structure", structure, "--name", name)
    return made
