"""Recipes of a test's own, in the place of those that ship."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from problems import recipes as small
from problems.arrays import make_arrays
from problems.recipes import Recipes

from bnncli.figures import MARK
from bnncli.papers import recipe, results
from bnncli.papers.recipe import PaperRecipe


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Recipes:
    """Sets the recipes that there are: recipes(), that of problems.recipes, or recipes(RECIPE, ...).

    Figures are marks unless `is_drawn`: drawing them takes as long as all the rest.
    """

    def set_recipes(*given: PaperRecipe, is_drawn: bool = False) -> None:
        if not is_drawn:
            monkeypatch.setattr(results, "render", lambda figure, form: f"{MARK} {form}".encode())
        module = ModuleType("recipes_of_a_test")
        vars(module).update({one.name: one for one in given or (small.FIRST,)})
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(recipe, "WORKS", (module.__name__,))
        for file, what in small.FILES.items():
            monkeypatch.setitem(recipe.FILES, file, what)

    return set_recipes


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder with the features of the small head."""
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "features.npz", **make_arrays())  # type: ignore[arg-type]
    return tmp_path / "data"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
