"""How many weights of a latent binary network are in: metric rows, a histogram, and thresholds of a curve.

Skaaret-Lund (2022), section 5.3, gives the density of one draw; its expectation is the mean of the inclusion probabilities, that of
the median probability model counts those above 1/2. Pooled over all weights, and layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

NUM_BINS = 20
NUM_THRESHOLDS = 20
Row = dict[str, Any]


def density_rows(inclusion: Sequence[Tensor], drawn: Sequence[Tensor]) -> list[Row]:
    """Rows of the density: expected, of draws with its standard deviation between them, and of the median model.

    Args:
        inclusion: probabilities of each layer's weights, any shape.
        drawn: of each layer, the share of its weights that is in, for each draw (S,).
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


def used_density(used: Sequence[Tensor]) -> list[Row]:
    """Rows of the share of weights that are in the networks that predict, pooled and by layer.

    Args:
        used: of each layer's weights, any shape, the probability of being in such a network.
    """
    counts = [part.numel() for part in used]
    sums = [float(part.double().sum()) for part in used]
    shared = {"name": "density", "kind": "used", "higher_is_better": False}
    pooled = {**shared, "layer": "all", "n": sum(counts), "value": sum(sums) / sum(counts)}
    layers = zip(sums, counts, strict=True)
    return [pooled, *({**shared, "layer": str(i), "n": n, "value": part / n} for i, (part, n) in enumerate(layers))]


def inclusion_histogram(inclusion: Tensor, num_bins: int = NUM_BINS) -> Row:
    """Counts of inclusion probabilities in bins of equal width on [0, 1]."""
    counts = torch.histc(inclusion.double().flatten().cpu(), bins=num_bins, min=0.0, max=1.0)
    return {"edges": [i / num_bins for i in range(num_bins + 1)], "counts": [int(count) for count in counts]}


def density_thresholds(inclusion: Tensor, count: int = NUM_THRESHOLDS) -> list[float]:
    """Inclusion thresholds whose densities fall from all weights to one in a thousand, by equal steps of log density.

    Strictly rising; the first is below every probability, and some weight is above the last: a density of 0 has no logarithm.
    Weights of one probability go together.
    """
    ordered = inclusion.flatten().cpu().double().sort().values
    shares = torch.logspace(0, -3, count, dtype=torch.float64)
    places = len(ordered) - 1 - (shares[1:] * len(ordered)).round().long().clamp(min=1)
    found = set(ordered[places.clamp(min=0)].tolist())
    return [-1.0, *sorted(threshold for threshold in found if threshold < ordered[-1])]
