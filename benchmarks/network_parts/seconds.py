"""What commands over whole networks take on one machine: chains over a small MLP, and a Gaussian over a LoRA adapter with its predictions.

Needs no files: data are random, and the encoder is as it is made. The MLP is 64-50-10 (3,760 parameters) with
1,000 training examples; the encoder has six layers of width 384 that read 16 tokens, and adapters of rank 4 at queries and values
(36,864 parameters), with 300 examples each to train, to judge a prior precision and to predict. A pass of these through the encoder, and
one back for each of four classes, is what their linearised logits take: `pass` is the time of that, the least that each
command can take.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from network_parts import _adapted
from network_parts._bench import Bench, Done
from network_parts._table import Table

EXAMPLES, QUICK_EXAMPLES = 300, 12
SIZES, QUICK_SIZES = {"width": 384, "layers": 6}, {"width": 24, "layers": 1}
CHAINS = ("--chains", 4, "--warmup", 60, "--draws", 60)
QUICK_CHAINS = ("--chains", 4, "--warmup", 4, "--draws", 4)
MLP = ("--model", "mlp", "--model-arg", "inputs=64", "--model-arg", "hidden=50", "--model-arg", "classes=10")
LAYERS = ("--layers", "*lora_*", "--trust-code")
COLUMNS = {"command": "", "seconds": ".1f", "CPU seconds": ".1f", "MiB": ".0f"}


def run(bench: Bench) -> list[Table]:
    """Seconds of each command."""
    return [_chains(bench), _adapter(bench)]


def _chains(bench: Bench) -> Table:
    folder = bench.folder("seconds-mlp", "mlp.safetensors")
    data = _random_data(folder.path, {"train": 1_000, "val": 300}, classes=10)
    folder.bnncli("train", *MLP, *data[:2], "--epochs", 20)
    folder.bnncli("extract-features", *MLP, *data)
    words = ("--layers", "all", "--prior-precision", 10, *(QUICK_CHAINS if bench.is_quick else CHAINS))
    table = Table("64-50-10, 1,000 examples, 3,760 parameters", COLUMNS)
    table.rows.append(_row("hmc", folder.bnncli("hmc", *words)))
    return table


def _adapter(bench: Bench) -> Table:
    folder, size = bench.folder("seconds-lora", "encoder.pt"), QUICK_EXAMPLES if bench.is_quick else EXAMPLES
    data = _random_data(folder.path, dict.fromkeys(("train", "val", "test"), size), classes=4)
    torch.manual_seed(0)
    sizes = QUICK_SIZES if bench.is_quick else SIZES
    network = _adapted.make(**sizes)
    if not (folder.path / folder.run).exists():
        torch.save(network.state_dict(), folder.path / folder.run)
    arguments = [word for name, value in sizes.items() for word in ("--model-arg", f"{name}={value}")]
    folder.bnncli("extract-features", "--model", f"{Path(_adapted.__file__).resolve()}:make", *arguments, *data)
    table = Table(f"Encoder with LoRA, 3 x {size} examples, 4 classes", COLUMNS)
    table.rows.append({"command": "pass", "seconds": _least(network, folder.path / "val.npz")})
    for structure in ("kron", "diag"):
        fit = folder.bnncli("fit-laplace", *LAYERS, "--structure", structure, "--name", structure)
        table.rows.append(_row(f"fit-laplace --structure {structure}", fit))
    predicted = folder.bnncli("predict", "--posterior", "kron", "--split", "test", "--trust-code")
    table.rows.append(_row("predict", predicted))
    return table


def _random_data(folder: Path, sizes: dict[str, int], *, classes: int) -> list[str]:
    """Files of random numbers about a centre for each class, and what names them."""
    words, centers = [], 0.3 * np.random.default_rng(99).normal(size=(classes, 64))
    for seed, (split, size) in enumerate(sizes.items()):
        rng = np.random.default_rng(seed)
        file = folder / f"{split}.npz"
        if not file.exists():
            labels = rng.integers(0, classes, size)
            np.savez(file, x=(rng.normal(size=(size, 64)) + centers[labels]).astype(np.float32), y=labels)
        words += ["--data", f"{split}=npz:{file.name}"]
    return words


def _least(network: nn.Module, file: Path) -> float:
    """Seconds of one pass and of one back for each class, of all examples, to the adapters alone."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name)
    chosen = [parameter for parameter in network.parameters() if parameter.requires_grad]
    start = time.perf_counter()
    for inputs in torch.from_numpy(np.load(file)["x"]).split(16):
        logits = network(inputs).sum(dim=0)
        for output in logits:
            torch.autograd.grad(output, chosen, retain_graph=True)
    return time.perf_counter() - start


def _row(command: str, done: Done) -> dict[str, float | int | str | None]:
    return {
        "command": command,
        "seconds": done.cost.seconds,
        "CPU seconds": done.cost.cpu_seconds,
        "MiB": done.cost.peak_mib,
    }
