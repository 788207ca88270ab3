"""How good a reference is itself: accuracy and NLL of its class probabilities, as they are and sharpened by a temperature.

The reference is the full-batch HMC of Izmailov, Vikram, Hoffman and Wilson (2021), arXiv 2104.14421. Probabilities p at a temperature T are
p^(1/T), normalised; the same for everybody, and nothing is fitted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.lazy import torch
from bnncli.progress import Progress

_LEAST = float(np.finfo(np.float32).tiny)  # of a probability


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """reference_accuracy, reference_confidence, reference_nll; gain_P, nats an example that a temperature of P per cent lowers it by.

    Args:
        settings: percents, of the temperatures.
        inputs: reference, an NPZ file with `hmc` (N, C), and test, one with labels y (N,) in the same order.

    Raises:
        DataError: they have other numbers of rows.
    """
    with np.load(inputs["reference"]) as arrays:
        probs = arrays["hmc"].astype(np.float64)
    with np.load(inputs["test"]) as arrays:
        labels = arrays["y"]
    if len(probs) != len(labels):
        raise DataError(f"{inputs['reference']} has {len(probs)} rows, but there are {len(labels)} labels")
    losses = _losses(probs, labels, 1.0)
    values = {
        "reference_accuracy": _mean((probs.argmax(axis=1) == labels).astype(np.float64)),
        "reference_confidence": _mean(probs.max(axis=1)),
        "reference_nll": _mean(losses),
    }
    for percent in settings["percents"]:
        values[f"gain_{percent}"] = _mean(losses - _losses(probs, labels, percent / 100))
    return Measurements(values)


def _losses(probs: NDArray, labels: NDArray, temperature: float) -> NDArray:
    """(N,) nats."""
    logits = np.log(np.maximum(probs, _LEAST)) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(labels)), labels]
    found: NDArray = np.log(np.exp(logits).sum(axis=1)) - chosen
    return found


def _mean(values: NDArray) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)), len(values))
