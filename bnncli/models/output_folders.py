"""Output folders of the Hugging Face Trainer and of Lightning: which of their checkpoints to use."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bnncli.errors import BnnError
from bnncli.models.checkpoint_files import load_tensors, sniff, sniff_zip
from bnncli.models.sharded import find_sharded_folder
from bnncli.names import quote_name
from bnncli.system.input_files import convert_read_errors, open_regular, read_object


class Choice(NamedTuple):
    """The checkpoint to use in an output folder: a file, a folder in it, or the folder itself for its own weights."""

    kind: str
    path: Path
    reason: str
    others: tuple[str, ...]


def choose_checkpoint(folder: Path) -> Choice | None:
    """Return the best checkpoint in an output folder if it is recorded, else the last; None for any other folder."""
    with convert_read_errors(folder):
        return _choose_of_trainer(folder) or _choose_of_lightning(folder)


_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|adapter_model\.(safetensors|bin)"
)
_STATE = "trainer_state.json"


def _choose_of_trainer(folder: Path) -> Choice | None:
    steps = [step for step in _numbered(folder, "checkpoint-") if _weights(step) or find_sharded_folder(step)]
    if not steps:
        return None
    best, score = _best_of_trainer(folder, steps[-1])
    path, reason = _best_or_last(steps, best, f"{_STATE}{score}")
    if own := _weights(folder):
        if path.name != best:
            path, reason = folder, "the folder's own weights; the best checkpoint is not recorded, or is gone"
        elif own == _weights(path) and filecmp.cmpfiles(folder, path, own, shallow=False)[0] == own:
            path, reason = folder, f"the folder's own weights, which are those of {best}, {reason}"
        else:
            reason = f"{reason}; the folder's own weights are different"
    others = tuple(step.name for step in steps if step != path)
    is_described = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if len(weights := _weights(path)) == 1 and not is_described:  # of a network in the user's code
        path /= weights[0]
    return Choice("trainer folder", path, reason, others)


def _best_or_last(paths: list[Path], best: str, source: str) -> tuple[Path, str]:
    """Return the path called `best`, else the last one, and why."""
    for path in paths:
        if path.name == best:
            return path, f"the best according to {source}"
    why = f"the best, {quote_name(best)}, is not there" if best else "no best one is recorded"
    return paths[-1], f"the last; {why}"


def _best_of_trainer(folder: Path, last: Path) -> tuple[str, str]:
    """Return the name of the best checkpoint, empty if it is not recorded, and its score in words."""
    for file in (folder / _STATE, last / _STATE):
        with suppress(BnnError):
            state = read_object(file)
            if isinstance(best := state.get("best_model_checkpoint"), str):  # may be a path on another machine
                score = state.get("best_metric")
                text = f" (best_metric {score:.4g})" if isinstance(score, float) else ""
                return re.split(r"[/\\]", best.rstrip("/\\"))[-1], text
    return "", ""


def _weights(folder: Path) -> list[str]:
    """Return the names of the files of weights in a folder of save_pretrained."""
    return sorted(path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name))


def _numbered(folder: Path, prefix: str) -> list[Path]:
    """Return the subfolders called `prefix` and a number, in its order."""
    names = [path for path in folder.glob(f"{prefix}*") if path.name[len(prefix) :].isdecimal() and path.is_dir()]
    return sorted(names, key=lambda path: int(path.name[len(prefix) :]))


_LOGS, _CHECKPOINTS = "lightning_logs", "checkpoints"
_OF_LIGHTNING = re.compile(r"last[.-].*|.*(epoch|step)=?\d.*")


def _choose_of_lightning(folder: Path) -> Choice | None:
    logs = folder / _LOGS if (folder / _LOGS).is_dir() else folder
    versions = [version / _CHECKPOINTS for version in _numbered(logs, "version_")]
    files = [path for place in (*versions, folder / _CHECKPOINTS, folder) for path in _lightning_checkpoints(place)]
    if not files:
        return None
    newest = [file for file in files if file.parent == files[-1].parent]
    path, reason = _best_or_last(newest, _best_of_lightning(files[-1]), "ModelCheckpoint")
    others = tuple(str(file.relative_to(folder)) for file in files if file != path)
    return Choice("lightning folder", path, reason, others)


def _lightning_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, files or folders, the last one last."""

    def place(path: Path) -> tuple[bool, list[int], int, str]:
        times = [int(digits) for digits in re.findall(r"(?:epoch|step)=?(\d+)", path.name)]
        return path.name.startswith("last"), times, len(path.name), path.name  # last-v1 is later than last

    return sorted(filter(lambda path: _OF_LIGHTNING.fullmatch(path.name), folder.glob("*.ckpt")), key=place)


def _best_of_lightning(path: Path) -> str:
    """Return the name of the best file that a checkpoint's ModelCheckpoint recorded; empty without one or its score."""
    saved: Any = None
    with suppress(BnnError), open_regular(path) as stream:
        kind = sniff(stream)
        saved = load_tensors(stream, kind=sniff_zip(stream) if kind == "zip" else kind)
    callbacks = saved.get("callbacks") if isinstance(saved, Mapping) else None
    for callback in callbacks.values() if isinstance(callbacks, Mapping) else ():
        if isinstance(callback, Mapping) and callback.get("best_model_score") is not None:
            return re.split(r"[/\\]", str(callback.get("best_model_path")))[-1]
    return ""
