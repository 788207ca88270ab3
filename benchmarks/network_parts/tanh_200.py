"""A 784-200-200-10 tanh network on Fashion-MNIST (199,210 parameters).

Published for this network: Ortega, Rodriguez Santana and Hernandez-Lobato 2024, "Variational linearized Laplace approximation for
Bayesian deep learning", arXiv:2302.12565 (their training is not ours: compare each posterior with the MAP beside it). Needs
fmnist-train.npz and fmnist-test.npz.
"""

from __future__ import annotations

from network_parts._bench import Bench
from network_parts._fashion import extract_mlp
from network_parts._scores import score_table
from network_parts._table import Cell, Table

PUBLISHED: list[dict[str, Cell]] = [
    {"posterior": "MAP", "nll": 0.3733},
    {"posterior": "kron, all layers", "nll": 0.3767},
    {"posterior": "full, last layer", "nll": 0.3729},
    {"posterior": "VaLLA", "nll": 0.3547},
]
EPOCHS = 30


def run(bench: Bench) -> list[Table]:
    """MAP, the last layer, all layers, and a flow in a subspace of these."""
    folder, rows = bench.folder("tanh-200", "tanh.pt"), bench.rows(60_000)
    hidden = (20, 20) if bench.is_quick else (200, 200)
    extract_mlp(bench, folder, hidden=hidden, rows=rows, epochs=EPOCHS, activation="tanh")
    made = {"temperature": folder.bnncli("fit-temperature")}
    made["laplace"] = folder.bnncli("fit-laplace", "--structure", "full")
    for structure in ("kron", "ekfac"):
        words = ("--layers", "all", "--structure", structure, "--name", f"{structure}-all")
        made[f"{structure}-all"] = folder.bnncli("fit-laplace", *words)
    quick = ("--epochs", 2) if bench.is_quick else ()
    flow = ("--subspace", 50, "--elbo-draws", 16)  # of all 60,000 examples each, and up to 256 where 16 do not decide
    words = ("--layers", "all", "--base", "kron-all", *flow, "--name", "subspace-all", "--resume", *quick)
    made["subspace-all"] = folder.bnncli("refine", *words)
    folder.bnncli("predict", "--split", "test")
    title = f"784-200-200-10 tanh, Fashion-MNIST: {rows} training examples, {EPOCHS} epochs"
    table = score_table(title, folder, made, PUBLISHED)
    table.notes += ["diagnose:", *folder.said("diagnose", "--draws", 64)]
    return [table]
