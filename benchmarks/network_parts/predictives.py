"""Why weight draws (`mc`) and the linearised network (`logit-mc`) differ: LeNet-5 on Fashion-MNIST under priors from weak to strong.

Needs fmnist-train.npz, fmnist-test.npz and lenet-fmnist-1.pt. One Gauss-Newton matrix stands for the loss's curvature where it is
that of the linearised network exactly, and of the network itself only near the mean: draws under a weak prior leave that region (Immer,
Korzepa and Bauer 2021, arXiv:2008.08400). `plug-in` is the mean alone; all four share one Gaussian a row.
"""

from __future__ import annotations

from network_parts._bench import Bench, Folder
from network_parts._scores import score_rows
from network_parts._table import Cell, Table

PRECISIONS = (1, 10, 100, 1_000, 10_000)
INTEGRATORS = ("mc", "logit-mc", "probit", "plug-in")
STRUCTURE = "kron"
DRAWS = 100  # of the weights; logit-mc takes its own number


def run(bench: Bench) -> list[Table]:
    """NLL and ECE of each integrator, a row a prior precision."""
    folder = bench.folder("predictives", "lenet.pt")
    rows = {"train": bench.rows(10_000), "test": bench.rows(1_000, 100)}
    _extract(bench, folder, rows)
    precisions = PRECISIONS[1:4:2] if bench.is_quick else PRECISIONS
    return [_table(folder, precisions, rows)]


def _extract(bench: Bench, folder: Folder, rows: dict[str, int]) -> None:
    checkpoint = folder.path / folder.run
    if not checkpoint.exists():
        checkpoint.symlink_to(bench.checkpoint("lenet-fmnist-1.pt"))
    words = []
    for split, file in (("train", "fmnist-train.npz"), ("test", "fmnist-test.npz")):
        words += ["--data", f"{split}=npz:{bench.data(file)}@{rows[split]}"]
    folder.bnncli("extract-features", "--model", "lenet5", *words)


def _table(folder: Folder, precisions: tuple[int, ...], rows: dict[str, int]) -> Table:
    columns = {"prior precision": ",.0f"} | {
        f"{name} {score}": ".4f" for score in ("nll", "ece") for name in INTEGRATORS
    }
    sizes = f"{rows['train']} training examples, {rows['test']} test, {DRAWS} draws of the weights"
    table = Table(f"LeNet-5, Fashion-MNIST, {STRUCTURE} over all layers, {sizes}", columns)
    names = {precision: f"{STRUCTURE}-{precision}" for precision in precisions}
    for precision, name in names.items():
        fit = ("--layers", "all", "--structure", STRUCTURE, "--prior-precision", precision, "--name", name)
        folder.bnncli("fit-laplace", *fit)
    chosen = [word for name in names.values() for word in ("--posterior", name)]
    for integrator in INTEGRATORS:
        samples = ("--samples", DRAWS) if integrator == "mc" else ()
        folder.bnncli("predict", *chosen, "--split", "test", "--integrator", integrator, *samples)
    found = {(row["posterior"], row["integrator"]): row for row in score_rows(folder.bnncli("evaluate").document)}
    for precision, name in names.items():
        row: dict[str, Cell] = {"prior precision": precision}
        for integrator in INTEGRATORS:
            row |= {f"{integrator} {score}": found[name, integrator][score] for score in ("nll", "ece")}
        table.rows.append(row)
    return table
