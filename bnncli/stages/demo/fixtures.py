"""Where the small data set and checkpoint of the demonstration lie: in the wheel, or in a checkout's fixtures/."""

from __future__ import annotations

from pathlib import Path

import bnncli
from bnncli.errors import MissingInput

_PACKAGE = Path(bnncli.__file__).resolve().parent
_FOLDERS = (_PACKAGE / "fixtures", _PACKAGE.parent / "fixtures")


def fixture_path(name: str) -> Path:
    """The file called `name`, such as train.npz. Raises MissingInput when this installation lacks it."""
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise MissingInput(f"this installation lacks the fixture {name!r}", hint="reinstall bnncli from its wheel")
