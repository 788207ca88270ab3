"""Synthetic features of any size in a file that bnncli reads: seeded, with labels of a random head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bnncli.artifacts.features import CHECK_ROWS, FeatureFile, read_features, write_features
from bnncli.artifacts.provenance import build_provenance
from bnncli.numerics.digests import json_sha256
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget

_BLOCK_ELEMENTS = 2**24


def write_split(path: Path, num_examples: int, layout: HeadLayout, *, seed: int) -> None:
    """Write a train split: features uniform in (0, 1), labels drawn from the softmax of a random head."""
    generator = torch.Generator().manual_seed(seed)
    num_features, num_outputs = layout.num_features, layout.num_outputs
    weight = 4 * torch.randn(num_outputs, num_features, generator=generator) / num_features**0.5
    bias = -weight.sum(dim=1) / 2
    features = np.empty((num_examples, num_features), np.float32)
    labels = np.empty(num_examples, np.int64)
    rows = max(1, _BLOCK_ELEMENTS // max(num_features, num_outputs))
    for start in range(0, num_examples, rows):
        block = torch.from_numpy(features[start : start + rows])
        torch.rand(block.shape, generator=generator, out=block)
        logits = torch.addmm(bias, block, weight.T)
        noise = torch.rand(logits.shape, generator=generator).clamp_(1e-20).log_().neg_().log_()  # Gumbel, negated
        labels[start : start + rows] = logits.sub_(noise).argmax(dim=1).numpy()
    split = FeatureFile(
        name="train",
        features=features,
        labels=labels,
        sample_id=np.arange(num_examples),
        classes=[str(k) for k in range(num_outputs)],
        head_weight=weight.numpy(),
        head_bias=bias.numpy(),
        check_logits=features[:CHECK_ROWS] @ weight.numpy().T + bias.numpy(),
        is_ood=False,
    )
    made = f"synthetic:{num_examples},{num_features},{num_outputs}"
    provenance = build_provenance(
        path, command=["benchmarks/scaling.py"], params={"seed": seed}, algo_rev=1, inputs=[], checkpoint=None,
        environment={"seed": seed}, seconds=0.0, warnings=[],
    )  # fmt: skip
    write_features(
        path, split, preprocess={}, layer=None, order_digest=json_sha256([made, seed]), source=made, provenance=provenance,
        may_replace=True,
    )  # fmt: skip


def open_target(
    path: Path, layout: HeadLayout, prior_precision: float, *, device: torch.device, is_mapped: bool
) -> LastLayerTarget:
    """The log posterior of a split: its features left in the file, or moved to the device."""
    split = read_features(path)
    features = torch.from_numpy(split.features)
    if not is_mapped:
        features = features.clone() if device.type == "cpu" else features.to(device)
    assert split.labels is not None
    return LastLayerTarget(features, torch.from_numpy(split.labels).to(device), layout, Prior(prior_precision))
