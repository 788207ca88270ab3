"""What is said of a trained network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnncli.artifacts.posteriors import RECORDED_NETWORK
from bnncli.names import counted, percent
from bnncli.options.command import pasted
from bnncli.options.train import TrainOptions
from bnncli.registry import own_names


def summary_of(path: Path, meta: Mapping[str, Any]) -> list[str]:
    """A line on the training, and one on the splits that were not trained on."""
    metrics = meta["metrics"]
    passes = meta["gradient_passes"]
    averaged = " (running average of the weights)" if metrics["is_averaged"] else ""
    train = metrics["splits"]["train"]
    others = {name: scores for name, scores in metrics["splits"].items() if name != "train"}
    lines = [
        f"{path.name}: {counted(passes, 'epoch')}, train NLL {train['nll']:.4f}, accuracy {percent(train['accuracy'], '.2f')}{averaged}"
    ]
    lines += [
        f"  {name}: NLL {scores['nll']:.4f}, accuracy {percent(scores['accuracy'], '.2f')}"
        for name, scores in others.items()
    ]
    if metrics["prior_precision"] is not None:
        lines.append(f"  its weight decay equals a Gaussian prior with precision {metrics['prior_precision']:g}")
    return lines


def next_command(options: TrainOptions, path: Path) -> str:
    """The command that goes on with the checkpoint: what it records need not be said again, but code that is to be run."""
    again: dict[str, Any] = {"data": options.data, "hold_out": options.hold_out, "task": options.task}
    if options.model not in own_names("networks"):  # whoever names the network says all that goes with it
        again = {name: getattr(options, name) for name in RECORDED_NETWORK} | again
    if options.ema is not None:
        again["state"] = "ema"
    return pasted("extract-features", str(path), **again)
