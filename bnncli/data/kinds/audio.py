"""`audio:DIR`: sound files in one folder per class, or unlabelled ones directly in DIR.

Classes are the folder names, sorted. WAV files are decoded here; flac, ogg, opus, mp3 and aiff by the library
soundfile. The model's feature extractor prepares the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bnncli.data.labels import check_hashed, files_in, hash_files
from bnncli.data.pixels import Preprocess
from bnncli.data.sound import SUFFIXES, Sound, check_decodable, read_sound
from bnncli.options.declaration import Form
from bnncli.progress import Progress

FORM = Form("audio:DIR", 31, "A folder of sound files, one subfolder per class.")


@dataclass(frozen=True, eq=False)
class AudioDataset:
    """Sound files, decoded when read."""

    folder: Path
    files: tuple[str, ...]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    note: str = ""
    is_sized: bool = True
    items: str = "audio"

    @property
    def names(self) -> tuple[str, ...]:
        """The files, as paths in the folder."""
        return self.files

    @property
    def is_labeled(self) -> bool:
        """Return whether there are class folders."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: np.ndarray) -> tuple[list[Sound], np.ndarray | None]:
        """Return clips and labels (n,) of the rows. Raises DataError for a damaged file."""
        found = [read_sound(self.folder / self.files[row]) for row in rows.tolist()]
        return found, None if self.labels is None else self.labels[rows]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return names and digests of all files, and the rows."""
        places = [self.folder / name for name in self.files]
        hashes = hash_files(places, progress, "audio")
        check_hashed(places, hashes, rows)
        return {"files": np.array(self.files), "sha256": np.array(hashes), "rows": rows}


def exists(place: str) -> bool:
    """Return whether the text as it stands is a folder."""
    return Path(place).expanduser().is_dir()


def open_dataset(place: str, preprocess: Preprocess) -> AudioDataset:
    """Open the sound files of a folder, in sorted order within sorted classes.

    Raises:
        MissingInput: there is no such folder.
        DataError: it has no sound files, or has some both directly and in class folders.
        UsageError: a library needed to decode one is not installed.
    """
    folder = Path(place).expanduser()
    found = files_in(folder, SUFFIXES, "audio files")
    check_decodable(found.files)
    return AudioDataset(folder, *found)
