"""Latent binary networks: how many weights are in, and which inputs they select."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


NUM_BINS = 20
NUM_THRESHOLDS = 20
Row = dict[str, Any]


def density_rows(inclusion: Sequence[Tensor], drawn: Sequence[Tensor]) -> list[Row]:
    """Return rows of the density: expected, of draws with the standard deviation between them, and of the median model.

    Args:
        inclusion: inclusion probabilities of each layer's weights, any shape.
        drawn: per layer, the share of included weights in each draw (S,).
    """
    counts = [part.numel() for part in inclusion]
    rows = []
    for layer in [None, *range(len(inclusion))]:
        chosen = range(len(inclusion)) if layer is None else [layer]
        total = sum(counts[i] for i in chosen)
        shares = sum(drawn[i].double() * counts[i] for i in chosen) / total
        assert isinstance(shares, torch.Tensor)
        shared: Row = {"name": "density", "layer": "all" if layer is None else str(layer), "n": total}
        found = {
            "expected": sum(float(inclusion[i].double().sum()) for i in chosen) / total,
            "sampled": float(shares.mean()),
            "median": sum(float((inclusion[i] > 0.5).double().sum()) for i in chosen) / total,
        }
        for name, value in found.items():
            row = {**shared, "kind": name, "value": value, "higher_is_better": False}
            if name == "sampled":
                row |= {"draws": len(shares), "sd": float(shares.std()) if len(shares) > 1 else None}
            rows.append(row)
    return rows


def prediction_density_rows(used: Sequence[Tensor]) -> list[Row]:
    """Return rows of the share of weights in the networks that predict, pooled and per layer.

    Args:
        used: per layer, each weight's probability of being in such a network, any shape.
    """
    counts = [part.numel() for part in used]
    sums = [float(part.double().sum()) for part in used]
    shared = {"name": "density", "kind": "used", "higher_is_better": False}
    pooled = {**shared, "layer": "all", "n": sum(counts), "value": sum(sums) / sum(counts)}
    layers = zip(sums, counts, strict=True)
    return [pooled, *({**shared, "layer": str(i), "n": n, "value": part / n} for i, (part, n) in enumerate(layers))]


def inclusion_histogram(inclusion: Tensor, num_bins: int = NUM_BINS) -> Row:
    """Count inclusion probabilities in bins of equal width on [0, 1]."""
    counts = torch.histc(inclusion.double().flatten().cpu(), bins=num_bins, min=0.0, max=1.0)
    return {"edges": [i / num_bins for i in range(num_bins + 1)], "counts": [int(count) for count in counts]}


def density_thresholds(inclusion: Tensor, count: int = NUM_THRESHOLDS) -> list[float]:
    """Return inclusion thresholds whose densities fall from 1 to 0.001 in equal steps of log density.

    The thresholds strictly increase. The first is below every probability and at least one weight is above the last,
    since a density of 0 has no logarithm. Weights of equal probability are included together.
    """
    ordered = inclusion.flatten().cpu().double().sort().values
    shares = torch.logspace(0, -3, count, dtype=torch.float64)
    places = len(ordered) - 1 - (shares[1:] * len(ordered)).round().long().clamp(min=1)
    found = set(ordered[places.clamp(min=0)].tolist())
    return [-1.0, *sorted(threshold for threshold in found if threshold < ordered[-1])]


THRESHOLD = 0.5
MAX_INPUTS = 1000  # longest list of inputs


def input_inclusions(inclusion: Tensor) -> list[Row]:
    """Return, per input (numbered from 1), mean and standard deviation of its inclusion and the share of repeats that select it.

    Args:
        inclusion: (R, D), inclusion probabilities; one repeat has no standard deviation.
    """
    doubled = inclusion.double()
    num_repeats, num_inputs = doubled.shape
    sd = doubled.std(dim=0).tolist() if num_repeats > 1 else [None] * num_inputs
    shares = (doubled > THRESHOLD).double().mean(dim=0).tolist()
    each = zip(doubled.mean(dim=0).tolist(), sd, shares, strict=True)
    return [{"input": i, "mean": m, "sd": s, "share_in": share} for i, (m, s, share) in enumerate(each, start=1)]


def selection_rows(inclusion: Tensor, true_inputs: Sequence[int]) -> list[Row]:
    """Return metric rows: true and false positive rates of the selection, means over repeats with standard errors.

    Args:
        inclusion: (R, D), inclusion probabilities.
        true_inputs: numbered from 1.
    """
    selected = (inclusion.double() > THRESHOLD).double()
    num_repeats, num_inputs = selected.shape
    is_true = torch.zeros(num_inputs, dtype=torch.bool, device=selected.device)
    is_true[[number - 1 for number in true_inputs]] = True
    rows = []
    for name, which in (("true_positive_rate", is_true), ("false_positive_rate", ~is_true)):
        row: Row = {
            "name": name,
            "value": None,
            "n": int(which.sum()),
            "threshold": THRESHOLD,
            "repeats": num_repeats,
            "standard_error": None,
            "higher_is_better": name == "true_positive_rate",
        }
        if row["n"] == 0:
            row["undefined"] = "every input is a true input"
        else:
            rates = selected[:, which].mean(dim=1)
            row["value"] = float(rates.mean())
            if num_repeats > 1:
                row["standard_error"] = float(rates.std()) / math.sqrt(num_repeats)
        rows.append(row)
    return rows
