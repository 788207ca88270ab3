"""The page on trainers and trackers: its examples run as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from problems.documented import DOCS, Block, blocks_of
from problems.optional_libraries import library

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

BLOCKS = [block for block in blocks_of(DOCS / "how-to/training.md") if block.runs]


@pytest.mark.parametrize("block", BLOCKS, ids=["lightning", "transformers"])
def test_an_example_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    library("lightning")
    library("transformers")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(block.text, space)
    assert space["callback"].run.posteriors == ("map", "laplace")
