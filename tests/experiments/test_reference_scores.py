"""Scores of a reference against scikit-learn's, of probabilities that are under-confident on purpose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from bnncli.errors import DataError
from bnncli.experiments import Measurements
from bnncli.experiments.reference_scores import measure
from bnncli.progress import SILENT

COUNT = 500


def measured(folder: Path, probs: np.ndarray, labels: np.ndarray) -> Measurements:
    np.savez(folder / "hmc.npz", hmc=probs)
    np.savez(folder / "test.npz", y=labels)
    inputs = {"reference": folder / "hmc.npz", "test": folder / "test.npz"}
    return measure({"percents": [50, 100]}, inputs, generator=torch.Generator(), progress=SILENT)


def test_scores_are_those_of_sklearn(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    true = random.dirichlet(np.ones(4), size=COUNT)
    labels = np.array([random.choice(4, p=row) for row in true])
    flat = np.sqrt(true) / np.sqrt(true).sum(axis=1, keepdims=True)  # a temperature of 2, which one of 0.5 undoes
    values = measured(tmp_path, flat, labels).values
    assert values["reference_accuracy"].value == pytest.approx(accuracy_score(labels, flat.argmax(axis=1)))
    assert values["reference_confidence"].value == pytest.approx(flat.max(axis=1).mean())
    assert values["reference_nll"].value == pytest.approx(log_loss(labels, flat))
    assert values["gain_50"].value == pytest.approx(log_loss(labels, flat) - log_loss(labels, true))
    losses = -np.log(flat[np.arange(COUNT), labels]) + np.log(true[np.arange(COUNT), labels])
    assert values["gain_50"].standard_error == pytest.approx(losses.std(ddof=1) / COUNT**0.5)
    assert values["gain_100"].value == pytest.approx(0, abs=1e-12)


def test_other_numbers_of_rows_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 rows, but there are 2 labels"):
        measured(tmp_path, np.full((3, 2), 0.5), np.zeros(2, np.int64))
