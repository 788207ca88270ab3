"""Folders of recipes of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from problems.recipes import FILES, RECIPE, STUDY

from bnncli.stages.reproduce import reader


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a folder of one study and one recipe, test/table-1, and has them read: recipes(recipe=..., study=...)."""

    def write(recipe: str = RECIPE, study: str = STUDY, files: str = FILES) -> Path:
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
