"""The files that recipes need: where they are, and what to give where they are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bnncli.errors import BnnError, MissingInput
from bnncli.names import counted
from bnncli.options.reproduce import ReproduceOptions
from bnncli.stages.demo.fixtures import fixture_path
from bnncli.stages.reproduce.reader import known_files
from bnncli.stages.reproduce.recipe import Needs

_FIXTURES = "fixtures"


@dataclass(frozen=True)
class Places:
    """Folders by the names that files of recipes begin with; None where it was not given."""

    folders: Mapping[str, Path | None]

    @classmethod
    def of(cls, options: ReproduceOptions) -> Places:
        """Those that the options name. Raises MissingInput where one of these is no folder."""
        found = {}
        for place, given in (("data", options.data), ("checkpoints", options.checkpoints)):
            found[place] = None if given is None else Path(given)
            if given is not None and not Path(given).is_dir():
                raise MissingInput(f"--{place}: expected a folder; {given} is not one", path=given)
        return cls(found)

    def find(self, file: str) -> Path | None:
        """The file, as `data/fmnist-train.npz`; None where it is not there."""
        place, _, name = file.partition("/")
        if place == _FIXTURES:
            try:
                return fixture_path(name)
            except BnnError:
                return None
        folder = self.folders[place]
        return folder / name if folder is not None and (folder / name).exists() else None

    def found(self, needs: Needs) -> dict[str, Path]:
        """Those that are there, by the names that recipes have for them."""
        every = {**needs.required, **needs.optional}
        return {name: path for name, file in every.items() if (path := self.find(file)) is not None}

    def missing(self, files: Iterable[str]) -> str:
        """What to give for those that are not there, in a line; empty where all are."""
        lacking = [file for file in files if self.find(file) is None]
        if len(lacking) < 2:
            return "".join(f"needs {self._missing(file, known_files()[file].partition(':')[0])}" for file in lacking)
        names = f"needs {lacking[0].partition('/')[2]} and {counted(len(lacking) - 1, 'other file')}"
        asked = [
            f"--{place} DIR" for place, folder in self.folders.items() if folder is None and _are_at(place, lacking)
        ]
        looked = [
            str(folder) for place, folder in self.folders.items() if folder is not None and _are_at(place, lacking)
        ]
        return f"{names}: give {' and '.join(asked)}" if asked else f"{names}, which are not in {' and '.join(looked)}"

    def missing_each(self, files: Iterable[str]) -> list[str]:
        """The same, an entry for each, with what the file is."""
        return [self._missing(file, known_files()[file]) for file in files if self.find(file) is None]

    def _missing(self, file: str, described: str) -> str:
        place, _, name = file.partition("/")
        what = f"{name} ({described})"
        if place == _FIXTURES:
            return f"{what}, which this installation lacks"
        folder = self.folders[place]
        return f"{what}: give --{place} DIR" if folder is None else f"{what}, which is not in {folder}"


def _are_at(place: str, files: list[str]) -> bool:
    """Whether one of the files is of this place."""
    return any(file.startswith(f"{place}/") for file in files)
