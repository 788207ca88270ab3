"""The inputs that a latent binary network with a single logit selects over repeated fits, compared with the true inputs.

Skaaret-Lund (2022), section 5.2, with rates as shares of the inputs. An input is selected if its inclusion probability
is above 1/2, the median probability model of Barbieri and Berger (2004), arXiv math/0406464.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

THRESHOLD = 0.5
MAX_INPUTS = 1000  # longest list of inputs
Row = dict[str, Any]


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
