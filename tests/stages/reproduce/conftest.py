"""Folders of recipes of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from problems.recipes import FILES, RECIPE, STUDY

from bnncli.figures import MARK
from bnncli.stages.reproduce import reader, written


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a folder of one study and one recipe, test/table-1, and has them read: recipes(recipe=..., study=...).

    Files of figures are marks, where they are not asked for: to draw them takes as long as what is in them.
    """

    def write(recipe: str = RECIPE, study: str = STUDY, files: str = FILES, *, is_drawn: bool = False) -> Path:
        if not is_drawn:
            monkeypatch.setattr(written, "render", lambda figure, form: f"{MARK} {form}".encode())
        texts = {"works": '[works]\ntest = "A test"', "files": files, "studies/small": study, "test/table-1": recipe}
        for name, text in texts.items():
            path = tmp_path / "recipes" / f"{name}.toml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(reader, "FOLDER", tmp_path / "recipes")
        _forget()
        return tmp_path / "recipes"

    yield write
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    reader.read_study.cache_clear()
    reader.read_recipe.cache_clear()
