"""The files of a model that has weights of its own: they are the run's checkpoint, and CKPT is the run's name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.artifacts.freshness import is_same_file
from bnncli.artifacts.known_files import State, is_settled, state_of
from bnncli.errors import MissingInput, UsageError
from bnncli.models import Asked, SavedModel, is_kind, open_model
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import open_regular

_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".distcp")  # a file of weights is meant, not a run's name

_DIGESTS: dict[
    tuple[State, ...] | None, str
] = {}  # of files in these states: large ones, which a command asks for often


@dataclass(frozen=True)
class ModelFiles:
    """Files below a folder, by their names relative to it, sorted."""

    folder: Path
    names: tuple[str, ...]

    @classmethod
    def of(cls, files: Sequence[Path]) -> ModelFiles:
        """These files; the folder is the innermost that has all of them."""
        places = [os.path.abspath(file) for file in files]
        folder = os.path.commonpath([os.path.dirname(place) for place in places])
        return cls(Path(folder), tuple(sorted(os.path.relpath(place, folder) for place in places)))

    @classmethod
    def recorded(cls, record: Mapping[str, Any], root: Path) -> ModelFiles | None:
        """The files that a checkpoint's record names, as to_json gives them; None where it is of a single file."""
        return cls(root.absolute().parent / record["path"], tuple(record["files"])) if "files" in record else None

    def to_json(self, root: Path) -> dict[str, Any]:
        """As provenance names them: the folder relative to the run folder's parent, so that both can be moved together."""
        return {"path": os.path.relpath(self.folder, root.absolute().parent), "files": list(self.names)}

    def sha256(self, progress: Progress = SILENT) -> str:
        """The hexadecimal digest of their names and bytes.

        Raises:
            MissingInput, DeviceError, ReadError: one cannot be read, as open_regular says.
        """
        before = self.states()
        if before not in _DIGESTS:
            found, is_known_later = [], before is not None and all(map(is_settled, before))
            for name in self.names:
                with open_regular(self.folder / name) as stream:
                    found.append([name, file_sha256(stream, progress)])
            digest = json_sha256(found)
            if not is_known_later or self.states() != before:
                return digest
            _DIGESTS[before] = digest
        return _DIGESTS[before]

    def states(self) -> tuple[State, ...] | None:
        """What changes when one of them is changed or replaced; None where one is missing."""
        try:
            return tuple(state_of(os.stat(self.folder / name)) for name in self.names)
        except (OSError, ValueError):  # NUL in a name
            return None

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(os.stat(self.folder / name).st_size for name in self.names)


def own_files(saved: SavedModel | None, checkpoint: Path) -> ModelFiles | None:
    """The files whose weights a run has; None where those of CKPT, another file or a folder of weights, fill the network.

    Raises:
        MissingInput: CKPT has the name of a file of weights, and there is none.
    """
    if saved is None or not saved.files:
        return None
    own = [place for file in saved.files for place in (file, file.parent)]
    if _may_be_weights(checkpoint) and not any(is_same_file(checkpoint, place) for place in own):
        return None
    if checkpoint.suffix in _SUFFIXES and not checkpoint.exists():
        hint = "to use the model's own weights, give its folder or any name that is not a weights file"
        raise MissingInput(f"no file {str(checkpoint)!r}", path=checkpoint, hint=hint)
    return ModelFiles.of(saved.files)


def _may_be_weights(checkpoint: Path) -> bool:
    """Whether CKPT is more than a name: a file, or a folder with files of weights."""
    is_folder = checkpoint.is_dir()
    return checkpoint.is_file() or (is_folder and any(one.suffix in _SUFFIXES for one in checkpoint.iterdir()))


def opened_model(spec: str | None, arguments: Sequence[str], **asked: Any) -> SavedModel | None:
    """The saved model that `--model` names; None for a built-in network, a factory, or no network.

    Args:
        arguments: each as KEY=VALUE.
        asked: the other fields of Asked.

    Raises:
        What open_model raises.
    """
    if spec is None or not is_kind(spec):
        return None
    return open_model(spec, Asked(arguments_by_name(arguments), **asked))


def arguments_by_name(texts: Sequence[str]) -> dict[str, str]:
    """The arguments of a network, each given as KEY=VALUE. Raises UsageError for any other text."""
    arguments = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"\0model_arg\0: expected KEY=VALUE; got {text!r}")
        arguments[key] = value
    return arguments
