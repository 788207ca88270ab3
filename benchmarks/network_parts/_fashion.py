"""Fully connected networks on Fashion-MNIST: trained where they are not there, and their features extracted."""

from __future__ import annotations

import torch

from bnncli.models.architectures.mlp import build
from network_parts._bench import Bench, Folder
from network_parts._training import train


def extract_mlp(
    bench: Bench, folder: Folder, *, hidden: tuple[int, ...], rows: int, epochs: int, activation: str = "relu"
) -> None:
    """Trains on the first rows by Adam with weight decay 5e-4; 2,000 of the test set's rows are val.

    Raises:
        LeftOut: the data are not at hand.
    """
    source, test = bench.data("fmnist-train.npz"), bench.data("fmnist-test.npz")
    epochs = 2 if bench.is_quick else epochs
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build(hidden=hidden, activation=activation)
    train(module, source, rows, folder.path / folder.run, epochs=epochs, weight_decay=5e-4)
    model = (
        ("--model", "mlp") if activation == "relu" else ("--model", "mlp", "--model-arg", f"activation={activation}")
    )
    splits = ("--data", f"train=npz:{source}@{rows}", "--data", f"test=npz:{test}@{bench.rows(10_000, 600)}")
    folder.bnncli("extract-features", *model, *splits, "--hold-out", f"val=test:{bench.rows(2_000, 300)}")
