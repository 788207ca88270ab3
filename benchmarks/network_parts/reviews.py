"""Short film reviews, good or bad, by a small encoder with a LoRA adapter: posteriors over the adapter's parameters alone.

Needs reviews.csv (columns text and label, 0 bad, 1 good) among the data, and among the trained networks `encoder`, a folder of
transformers' save_pretrained with a tokenizer: a BERT-like encoder without a classifier, such as the sentence encoder
all-MiniLM-L6-v2 (six layers, width 384). The libraries transformers and peft must be installed.

Texts of at most 16 words are taken, at random. Queries and values of the last two layers are adapted with rank 2 (6,144 parameters
of that encoder) and the classifier is trained with them. `full` has the prior precision that val chose for `kron`: it
takes long where many are tried. Without HMC and without `--draws`: a gradient of 400 texts takes ten seconds.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

from network_parts._bench import Bench, Done, Folder
from network_parts._lora import train_adapter
from network_parts._scores import score_table
from network_parts._table import Table

SIZES = {"train": 400, "val": 150, "test": 400}
QUICK = {"train": 24, "val": 16, "test": 24}
EPOCHS = 8
MOST_WORDS = 16
CLASSES = ("bad", "good")
LAYERS = ("--layers", "*lora_*", "--trust-code")
OWN_PRECISION = ("diag", "kron")
FLOW = ("--subspace", 20, "--epochs", 5, "--batch-size", 128, "--num-draws", 2, "--elbo-draws", 16)


def run(bench: Bench) -> list[Table]:
    """Scores of all, then what diagnose says."""
    folder, sizes = bench.folder("reviews", "reviews"), QUICK if bench.is_quick else SIZES
    _extract(bench, folder, sizes)
    made = {"temperature": folder.bnncli("fit-temperature"), "laplace": folder.bnncli("fit-laplace")}
    made |= _fit(folder)
    flow = (*LAYERS, "--base", "kron-lora", *FLOW, "--name", "subspace-lora", "--resume")
    made["subspace-lora"] = folder.bnncli("refine", *flow)
    folder.bnncli("predict", "--split", "test", "--trust-code")
    held = f"{sizes['val']} val, {sizes['test']} test"
    table = score_table(f"Film reviews, LoRA: {sizes['train']} training texts, {held}", folder, made)
    table.notes += ["diagnose:", *folder.said("diagnose", "--trust-code")]
    return [table]


def _fit(folder: Folder) -> dict[str, Done]:
    """Gaussians over the adapter, by name."""
    made = {}
    for structure in OWN_PRECISION:
        fit = (*LAYERS, "--structure", structure, "--name", f"{structure}-lora")
        made[f"{structure}-lora"] = folder.bnncli("fit-laplace", *fit)
    precision = ("--prior-precision", f"{made['kron-lora'].metrics['prior_precision']:.6g}")
    fit = (*LAYERS, "--structure", "full", *precision, "--name", "full-lora")
    return made | {"full-lora": folder.bnncli("fit-laplace", *fit)}


def _extract(bench: Bench, folder: Folder, sizes: dict[str, int]) -> None:
    encoder = bench.checkpoint("encoder")
    chosen = _short_reviews(bench.data("reviews.csv"), sum(sizes.values()))
    words: list[object] = []
    for split, size in sizes.items():
        rows, chosen = chosen[:size], chosen[size:]
        _write(folder.path / f"{split}.csv", rows)
        words += ["--data", f"{split}=csv:{split}.csv"]
        if split == "train":
            texts, labels = [text for text, _ in rows], [label for _, label in rows]
            epochs = 1 if bench.is_quick else EPOCHS
            train_adapter(encoder, texts, labels, folder.path / "adapter", names=CLASSES, epochs=epochs)
    folder.bnncli("extract-features", "--model", "peft:adapter", "--base-model", encoder, *words)


def _short_reviews(file: Path, count: int) -> list[tuple[str, int]]:
    """Different texts with their labels, in random order."""
    with open(file, newline="", encoding="utf-8") as stream:
        found = {row["text"]: int(row["label"]) for row in csv.DictReader(stream)}
    short = [(text, label) for text, label in found.items() if 0 < len(text.split()) <= MOST_WORDS]
    random.Random(0).shuffle(short)
    return short[:count]


def _write(file: Path, rows: list[tuple[str, int]]) -> None:
    with open(file, "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("text", "label"), *rows])
