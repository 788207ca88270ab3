"""Training of the small networks, in plain torch: Adam on minibatches, as their papers have it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy


def train(
    module: nn.Module, file: Path, rows: int, out: Path, *,
    epochs: int, seed: int = 0, batch_size: int = 128, learning_rate: float = 1e-3, weight_decay: float = 0.0, prior_precision: float = 0.0
) -> float:  # fmt: skip
    """The seconds of training on the first rows of an npz of bytes (x, y), divided by 255; the weights are written to `out`.

    Adam with a cosine to zero on the mean cross-entropy. `weight_decay` is Adam's own (coupled), which no prior equals. A file
    that is there is kept; the seconds are then NaN.
    """
    if out.exists():
        return float("nan")
    start = time.perf_counter()
    with np.load(file) as arrays:
        inputs = torch.from_numpy(arrays["x"][:rows]).float().div_(255)
        labels = torch.from_numpy(arrays["y"][:rows].astype(np.int64))
    optimizer = torch.optim.Adam(module.parameters(), learning_rate, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-rows // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for batch in torch.randperm(rows, generator=generator).split(batch_size):
            loss = cross_entropy(module(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    torch.save(module.state_dict(), out)
    return time.perf_counter() - start
