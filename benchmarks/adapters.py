"""LoRA adapters of a task, and every way to get probabilities from one or from three of them."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from bnncli.artifacts.predictions import read_predictions
from bnncli.cli.execute import run_command_line


def run(line: str) -> dict[str, Any]:
    """Run a command of bnncli and return what it prints with --json."""
    output = io.StringIO()
    if (code := run_command_line([*shlex.split(line), "--json", "--quiet"], output)) != 0:
        raise SystemExit(f"bnncli {line}: exit code {code}")
    return dict(json.loads(output.getvalue()))


@dataclass(frozen=True)
class Adapters:
    """A task for LoRA adapters on a frozen base.

    Attributes:
        base: its folder.
        kind: the library's name of the task.
        targeted: modules that get an adapter.
        load: loads it for training.
        logits: runs a network on inputs, (n, classes).
        inputs: of train, test, and the splits of shifts and outliers.
        targets: of train, test and the splits of shifts.
        words: of extract-features, besides model and base.
        outliers: split of examples of another kind.
        shifts: labelled splits of shifted examples.
        decays: whether the learning rate decays linearly to zero.
    """

    base: Path
    kind: str
    targeted: list[str]
    load: Callable[[], Any]
    logits: Callable[[Any, dict[str, Tensor]], Tensor]
    inputs: Mapping[str, dict[str, Tensor]]
    targets: Mapping[str, Tensor]
    words: str
    outliers: str
    shifts: Sequence[str] = ()
    learning_rate: float = 2e-3
    batch_size: int = 64
    decays: bool = False
    passes: int = 30

    @property
    def predicted(self) -> list[str]:
        """The splits that are scored."""
        return ["test", *self.shifts, self.outliers]


@dataclass(frozen=True)
class Predictions:
    """Predictions of a split: mean probabilities (n, classes), and scores (n,) that are higher for outliers."""

    probs: NDArray
    scores: dict[str, NDArray] = field(default_factory=dict)


def _rows(inputs: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return some examples, without columns that are padding in all of them."""
    own = {name: value[rows] for name, value in inputs.items()}
    longest = int(own["attention_mask"].sum(dim=1).max())
    return {name: value[:, :longest] for name, value in own.items()}


def train_adapter(task: Adapters, folder: Path, *, epochs: int, seed: int) -> None:
    """Train a LoRA adapter and save it."""
    torch.manual_seed(seed)
    settings = peft.LoraConfig(task_type=task.kind, r=8, lora_alpha=16, lora_dropout=0.1, target_modules=task.targeted)
    network = peft.get_peft_model(task.load(), settings).train()
    inputs, targets = task.inputs["train"], task.targets["train"]
    trained = [one for one in network.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.learning_rate, weight_decay=0.01)
    steps = epochs * -(-len(targets) // task.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0 if task.decays else 1, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(targets)).split(task.batch_size):
            loss = torch.nn.functional.cross_entropy(task.logits(network, _rows(inputs, rows)), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    network.save_pretrained(folder)


def entropy(probs: NDArray) -> NDArray:
    """Return the entropy of distributions (..., classes) in nats."""
    return np.asarray(-(probs * np.log(probs.clip(1e-12))).sum(axis=-1))


def average(members: NDArray) -> Predictions:
    """Return the mean of probabilities (members, n, classes), and the members' mutual information."""
    mean = members.mean(axis=0)
    return Predictions(mean, {"mutual_info": entropy(mean) - entropy(members).mean(axis=0)})


def drop_out(task: Adapters, folder: Path, split: str) -> Predictions:
    """Return predictions by passes with dropout."""
    torch.manual_seed(0)
    network = peft.PeftModel.from_pretrained(task.load(), folder).train()
    order = torch.argsort(task.inputs[split]["attention_mask"].sum(dim=1), stable=True)  # less padding
    with torch.no_grad():
        parts = [
            torch.stack([task.logits(network, some).softmax(dim=1) for _ in range(task.passes)], dim=1)
            for some in (_rows(task.inputs[split], rows) for rows in order.split(64))
        ]
    return average(torch.cat(parts)[order.argsort()].double().numpy().swapaxes(0, 1))


def score(found: Mapping[str, Predictions], task: Adapters) -> dict[str, float]:
    """Return NLL, ECE (15 bins) and accuracy on test, the NLL of each shift, and how well each score finds outliers."""
    probs, labels = found["test"].probs, task.targets["test"].numpy()
    confidence, is_right = probs.max(axis=1), probs.argmax(axis=1) == labels
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((confidence - is_right)[bins == one].sum()) for one in range(15)]

    def nll(split: str) -> float:
        targets = task.targets[split].numpy()
        return float(-np.log(found[split].probs[np.arange(len(targets)), targets].clip(1e-12)).mean())

    def auroc(outliers: NDArray, inliers: NDArray) -> float:
        return float(stats.mannwhitneyu(outliers, inliers).statistic / (len(outliers) * len(inliers)))

    other = found[task.outliers]
    return {
        "nll": nll("test"),
        "ece": float(sum(gaps) / len(labels)),
        "accuracy": float(is_right.mean()),
        **{f"{split}_nll": nll(split) for split in task.shifts},
        "auroc": auroc(entropy(other.probs), entropy(probs)),
        **{f"{name}_auroc": auroc(values, found["test"].scores[name]) for name, values in other.scores.items()},
    }


def compare_adapters(
    folder: Path, task: Adapters, *, epochs: int, recommend: bool = False
) -> dict[str, dict[str, float]]:
    """Train three adapters; return the scores of each way to get probabilities from one, and from all.

    Args:
        folder: for adapters and runs. Those that are there are kept.
        recommend: also let `auto` choose.
    """
    runs = [folder / f"adapter-run-{seed}" for seed in range(3)]
    adapters = [folder / f"adapter-{seed}" for seed in range(3)]
    for seed, (one, adapter) in enumerate(zip(runs, adapters, strict=True)):
        if not adapter.exists():
            train_adapter(task, adapter, epochs=epochs, seed=seed)
        run(f"extract-features {one} --model peft:{adapter} --base-model {task.base} {task.words}")
        run(f"fit-temperature {one}")
    first = runs[0]
    run(f"fit-laplace {first}")
    run(f"fit-laplace {first} --layers '*lora_*' --structure kron --name lora")
    for one in runs:
        run(f"predict {one} --posterior all {' '.join(f'--split {split}' for split in task.predicted)}")

    def read(one: Path, name: str, split: str) -> Predictions:
        (place,) = Path(f"{one}.bnn").glob(f"predictions/{name}.*/{split}.h5")
        file = read_predictions(place)
        scores = {} if file.combined is None else {"combined": -np.asarray(file.combined, np.float64)}
        if file.mutual_info is not None:
            scores["mutual_info"] = np.asarray(file.mutual_info, np.float64)
        return Predictions(np.asarray(file.probs, np.float64), scores)

    def mean(name: str) -> dict[str, Predictions]:
        return {split: average(np.stack([read(one, name, split).probs for one in runs])) for split in task.predicted}

    named = {"network": "map", "one temperature": "temperature", "Laplace": "laplace", "Laplace-LoRA": "lora"}
    found = {name: {split: read(first, own, split) for split in task.predicted} for name, own in named.items()}
    found["MC dropout"] = {split: drop_out(task, adapters[0], split) for split in task.predicted}
    found["three adapters"], found["three adapters at a temperature each"] = mean("map"), mean("temperature")
    if recommend:
        rows = run(f"auto {first}")["rows"]
        (name,) = (row["posterior"] for row in rows if row["is_recommended"])
        run(f"predict {first} --posterior {name}")
        found[f"auto: {name}"] = {split: read(first, name, split) for split in task.predicted}
    return {name: score(own, task) for name, own in found.items()}


def print_scores(scores: Mapping[str, Mapping[str, float | None]]) -> None:
    """Print a line for each way to get probabilities."""
    for name, own in scores.items():
        shown = " ".join(f"{key} {value:.4f}" for key, value in own.items() if value is not None)
        print(f"{name:<40}{shown}")
