"""LeNet-5 on Fashion-MNIST (44,426 parameters), trained for 100 epochs: every structure over all layers, the last layer beside.

Needs fmnist-train.npz, fmnist-test.npz, mnist-test.npz and the trained lenet-fmnist-1.pt. The prior precision is chosen on 2,000
rows of the test set that are then left out of it; 2,000 rows of MNIST are out of distribution. The posteriors are given the
first 10,000 of the examples that the network was trained on: a pass of all takes six times as long.
"""

from __future__ import annotations

from network_parts._bench import Bench, Folder
from network_parts._scores import score_table
from network_parts._table import Table

ROWS = 10_000
STRUCTURES = ("diag", "kron", "ekfac")
RANK = 10  # of low-rank, at the precision that val chose for kron: it takes long where many are tried


def run(bench: Bench) -> list[Table]:
    """Scores of all, then what diagnose says."""
    folder, rows = bench.folder("lenet", "lenet.pt"), bench.rows(ROWS)
    _extract(bench, folder, rows)
    made = {"temperature": folder.bnncli("fit-temperature"), "laplace": folder.bnncli("fit-laplace")}
    for structure in STRUCTURES:
        whole = ("--layers", "all", "--structure", structure, "--name", f"{structure}-all")
        made[f"{structure}-all"] = folder.bnncli("fit-laplace", *whole)
    precision = f"{made['kron-all'].metrics['prior_precision']:.6g}"
    few = ("--layers", "all", "--structure", "low-rank", "--rank", RANK, "--prior-precision", precision)
    made["low-rank-all"] = folder.bnncli("fit-laplace", *few, "--name", "low-rank-all")
    flow = ("--subspace", 50, "--elbo-draws", 32)  # up to 512 where these do not decide, half an hour of passes
    words = ("--layers", "all", "--base", "kron-all", *flow, "--name", "subspace-all", "--resume")
    made["subspace-all"] = folder.bnncli("refine", *words, *(("--epochs", 2) if bench.is_quick else ()))
    folder.bnncli("predict", "--split", "test", "--split", "mnist")
    table = score_table(f"LeNet-5, Fashion-MNIST: {rows} training examples", folder, made)
    table.notes += ["diagnose:", *folder.said("diagnose", "--draws", 64)]
    return [table]


def _extract(bench: Bench, folder: Folder, rows: int) -> None:
    train, test, ood = (bench.data(f"{name}.npz") for name in ("fmnist-train", "fmnist-test", "mnist-test"))
    trained, checkpoint = bench.checkpoint("lenet-fmnist-1.pt"), folder.path / folder.run
    if not checkpoint.exists():
        checkpoint.symlink_to(trained)
    splits = ("--data", f"train=npz:{train}@{rows}", "--data", f"test=npz:{test}@{bench.rows(10_000, 600)}")
    held = ("--hold-out", f"val=test:{bench.rows(2_000, 300)}", "--ood", f"mnist=npz:{ood}@{bench.rows(2_000)}")
    folder.bnncli("extract-features", "--model", "lenet5", *splits, *held)
