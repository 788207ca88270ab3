"""Marginal densities of a study's posteriors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from problems.arrays import make_arrays
from problems.command_line import Cli
from problems.recipes import RECIPE, STUDY

from bnncli.errors import ConfigError
from bnncli.numerics import random
from bnncli.session.inputs import open_posterior
from bnncli.stages.reproduce.marginals import marginals
from bnncli.stages.reproduce.reader import read_recipe
from bnncli.stages.reproduce.recipe import MarginalFigure

Recipes = Callable[..., Path]
MARGINALS = '\n[[marginals]]\nname = "densities"\nposteriors = { kron = "g", diagonal = "d", network = "map" }\n'
SECOND = '[[step]]\nname = "d"\ncommand = "fit-laplace"\nstructure = "diag"\nprior-precision = 30\n[[step]]\ncommand = "predict"'


@pytest.fixture
def posteriors(recipes: Recipes, tmp_path: Path, cli: Cli) -> Path:
    """The folder of those that the recipe has made, with its figure."""
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "features.npz", **make_arrays())
    recipes(recipe=RECIPE + MARGINALS, study=STUDY.replace('[[step]]\ncommand = "predict"', SECOND))
    done = cli("reproduce", "test/table-1", "--data", tmp_path / "data", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.stderr
    assert "densities.png" in done.json["recipes"][0]["figures"]
    return tmp_path / "out/quick/studies/small/runs/one/posteriors"


def test_curves_are_the_densities_of_the_posteriors(posteriors: Path) -> None:
    figure = MarginalFigure("densities", "small", {"kron": "g", "diagonal": "d", "network": "map"})
    found = marginals(figure, posteriors, seed=0)
    assert found is not None
    assert found.reference == "kron"
    gaussian = open_posterior(posteriors / "g.safetensors")[0]
    for panel in found.marginals:
        index = int(panel.title.split(",")[0].removeprefix("weight "))
        grid, curve = np.array(panel.grid), np.array(panel.densities["kron"])
        step, sd = grid[1] - grid[0], float(gaussian.sample(4000, random.stream(1, "test"))[:, index].std())
        assert curve.sum() * step == pytest.approx(1, abs=0.02)
        mean = float((grid * curve).sum() * step)
        assert mean == pytest.approx(float(gaussian.center[index]), abs=5 * sd / 2000**0.5)
        assert list(panel.points) == ["network"]


def test_without_one_of_the_posteriors_there_is_no_figure(posteriors: Path) -> None:
    figure = MarginalFigure("densities", "small", {"kron": "g", "refined": "absent"})
    assert marginals(figure, posteriors, seed=0) is None


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('kron = "g", diagonal = "d", ', "", "expected the reference and others"),
        ('name = "densities"', 'name = "densities"\nstudy = "no"', "study: expected one of the recipe's studies"),
    ],
)
def test_a_wrong_figure_is_told(recipes: Recipes, old: str, new: str, match: str) -> None:
    recipes(recipe=RECIPE + MARGINALS.replace(old, new))
    with pytest.raises(ConfigError, match=match):
        read_recipe("test/table-1")
