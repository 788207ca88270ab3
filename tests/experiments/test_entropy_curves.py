"""Distributions of entropies out of the table of predict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.errors import DataError
from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Measurements
from bnncli.experiments._predicted import entropies
from bnncli.experiments.entropy_curves import draw, measure
from bnncli.lazy import torch
from bnncli.progress import SILENT

SETTINGS = {"methods": {"one": "a", "two": "b"}, "hundredths": [10, 100]}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows of two posteriors and two splits, not in order, beside those of another integrator."""
    generator, parts = np.random.default_rng(0), []
    for posterior in "ab":
        for split, low in (("test", 0.0), ("other", 0.5)):
            for variant in ("mean", "mc"):
                for row in generator.permutation(200):
                    entropy = low + row / 200 + (variant == "mean") * 5 + (posterior == "b") * 0.01
                    parts.append((posterior, variant, split, row, entropy))
    columns = [np.array(one) for one in zip(*parts, strict=True)]
    names = ("posterior", "variant", "split", "sample_id", "entropy")
    np.savez(tmp_path / "t.npz", **dict(zip(names, columns, strict=True)))  # type: ignore[arg-type]
    return tmp_path / "t.npz"


def measured(table: Path) -> Measurements:
    return measure(SETTINGS, {"mnist": table}, generator=torch.Generator(), progress=SILENT)


def test_entropies_are_those_of_the_posterior_integrator_and_split_in_the_order_of_rows(table: Path) -> None:
    np.testing.assert_allclose(entropies(table, "a", "other"), 0.5 + np.arange(200) / 200)
    with pytest.raises(DataError, match="no rows of c, mc, split 'test'"):
        entropies(table, "c", "test")
    np.savez(table, x=np.zeros(3))
    with pytest.raises(DataError, match="expected a table written by predict"):
        entropies(table, "a", "test")


def test_shares_and_medians_are_those_of_the_images(table: Path) -> None:
    values = measured(table).values
    assert values["below_mnist_test_one_10"] == Estimate.of_share(21 / 200, 200)
    assert values["below_mnist_other_one_10"].value == 0
    assert values["below_mnist_other_one_100"].value == 101 / 200
    assert values["median_mnist_test_two"].value == pytest.approx(0.01 + 99.5 / 200)


def test_curves_rise_from_zero_to_one(table: Path) -> None:
    figures = draw(measured(table), SETTINGS)
    assert list(figures) == ["ecdf-test", "ecdf-other", "histograms"]
    for line in figures["ecdf-test"].axes[0].lines:
        heights, places = np.asarray(line.get_ydata()), np.asarray(line.get_xdata())
        assert (heights[0], heights[-1]) == (0, 1)
        assert (np.diff(heights) >= 0).all()
        assert (np.diff(places) >= 0).all()
    density = figures["histograms"].axes[0].lines[0]
    widths = np.diff(np.asarray(density.get_xdata()))
    assert float((widths * np.asarray(density.get_ydata())[:-1]).sum()) == pytest.approx(1)
