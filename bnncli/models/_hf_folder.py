"""Folders of `save_pretrained`, read without any library: what is in them, and what config.json says.

File names and fields are those of the library transformers, release 5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bnncli.errors import DataError, MissingInput
from bnncli.models._extra import require
from bnncli.names import listed, quoted
from bnncli.system.input_files import MAX_BYTES, open_regular, read_object

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"  # beside NAME.index.json where they are in shards
TOKENIZER = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.spm", "bpe.codes",
)  # fmt: skip
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
_CLASSIFIER = re.compile(r"\w+For(Sequence|Image|Audio)Classification\w*")
_NO_NAME = re.compile(r"LABEL_\d+")
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PATIENCE = 30.0  # seconds for the first answer; without a limit the library waits for one for ever


def folder_of(place: str, *, option: str, allow_download: bool) -> Path:
    """The folder that a place names; of a name on the Hugging Face Hub its copy on this machine, fetched where that is allowed.

    Raises:
        MissingInput: there is no such folder, or it could not be fetched.
    """
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        hint = f"give the folder that contains it: {folder.parent}"
        raise MissingInput(
            f"{option}: {quoted(folder, limit=300)} is a file, expected a folder", path=folder, hint=hint
        )
    if not allow_download or not _REPOSITORY.fullmatch(place):
        is_name = _REPOSITORY.fullmatch(place) and not allow_download
        hint = "give a local folder, or add \0allow_download\0 to fetch the model from the Hugging Face Hub"
        message = f"{option}: no folder {quoted(folder, limit=300)}"
        raise MissingInput(message, path=folder, hint=hint if is_name else None)
    hub = require("huggingface_hub", extra="hf")
    wanted = ["*.json", "*.txt", "*.model", "*.spm", "*.safetensors"]
    try:
        with suppress(FileNotFoundError):  # it is not on this machine yet
            there = Path(hub.snapshot_download(place, allow_patterns=wanted, local_files_only=True))
            if next(there.glob("*.safetensors"), None) is not None:  # else a tokenizer alone, or the like
                return there
        hub.model_info(place, timeout=_PATIENCE)
        return Path(hub.snapshot_download(place, allow_patterns=wanted))
    except Exception as error:  # of the library, of the network, of the disk
        why = " ".join(str(error).split())[:200]
        raise MissingInput(f"{option}: could not fetch {place!r}: {why}", path=folder) from error


def files_like(folder: Path, patterns: Iterable[str]) -> tuple[Path, ...]:
    """The files of a folder whose names match one of the patterns, sorted."""
    return tuple(sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that a model's weights are in: one, or an index and its shards; none where there are no weights.

    Raises:
        MissingInput: a shard is missing. DataError: the index is damaged.
    """
    there = [name for one in (WEIGHTS, PICKLED) for name in (one, f"{one}.index.json") if (folder / name).is_file()]
    if not there or there[0] in (WEIGHTS, PICKLED):
        return tuple(folder / name for name in there[:1])
    index = folder / there[0]
    names = read_object(index).get("weight_map")
    shards = sorted({*names.values()}) if isinstance(names, dict) and all(map(_is_name, names.values())) else []
    if not shards:
        raise DataError(f"{quoted(index, limit=300)} lists no weight files", path=index)
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        message = (
            f"{quoted(folder, limit=300)}: {len(missing)} of {len(shards)} weight files are missing: {listed(missing)}"
        )
        raise MissingInput(message, path=folder / missing[0], hint="copy or download all of them")
    return (index, *(folder / name for name in shards))


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file, by its header. Raises MissingInput, or DataError where it is damaged."""
    with open_regular(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        raw = stream.read(length) if length <= MAX_BYTES else b""
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DataError(f"{quoted(path, limit=300)} is truncated or damaged", code="truncated", path=path) from None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The class that the model was saved from, as config.json names it."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def classified_by(architecture: str | None) -> str | None:
    """Sequence, Image or Audio, by the name of a class; None where that is no classifier's."""
    match = _CLASSIFIER.fullmatch(architecture) if architecture is not None else None
    return match[1] if match is not None else None


def kind_of(config: Mapping[str, Any], folder: Path) -> str:
    """Sequence, Image or Audio: what the model classifies; networks of audio are called those of sequences by many.

    Raises:
        DataError: the model is no classifier, or a regression; or its weights are quantised.
    """
    name, where = architecture_of(config), quoted(folder, limit=300)
    kind = classified_by(name)
    if kind is None:
        has = "config.json names no architecture" if name is None else f"the model is {quoted(name)}"
        expected = "expected a sequence, image or audio classifier"
        raise DataError(f"{where}: {has}, {expected}", code="not_a_classifier", path=folder / CONFIG)
    check_plain(config, folder)
    return "Audio" if kind == "Sequence" and feature_extractor(folder) is not None else kind


def check_plain(config: Mapping[str, Any], folder: Path) -> None:
    """Nothing, when a model is a classifier with plain weights. Raises DataError for a regression and quantised weights."""
    where = quoted(folder, limit=300)
    if config.get("problem_type") == "regression":
        message = f"{where}: expected a classifier, got a regression model (problem_type regression)"
        raise DataError(message, code="regression", path=folder / CONFIG)
    if config.get("quantization_config") is not None:
        method = (
            config["quantization_config"].get("quant_method")
            if isinstance(config["quantization_config"], dict)
            else None
        )
        raise DataError(
            f"{where}: the weights are quantised ({method or 'quantization_config'}), which is not supported",
            code="quantised", path=folder / CONFIG, hint="save the model before quantisation, or after model.dequantize()",
        )  # fmt: skip


def feature_extractor(folder: Path) -> dict[str, Any] | None:
    """What a folder says of the feature extractor that makes inputs of sound; None where it has none."""
    for name in reversed(PROCESSOR):  # the library's own order
        found = read_object(folder / name) if (folder / name).is_file() else {}
        for one in (found.get("feature_extractor"), found):
            if isinstance(one, dict) and "sampling_rate" in one:
                return one
    return None


def input_patterns(kind: str) -> tuple[str, ...]:
    """Names of the files that make inputs, for models of Sequence, Image or Audio."""
    return TOKENIZER if kind == "Sequence" else PROCESSOR


def num_labels(config: Mapping[str, Any]) -> int:
    """Outputs of a classifier; the library's own default is two."""
    names = config.get("id2label")
    return len(names) if isinstance(names, dict) else int(config.get("num_labels", 2))


def classes_of(config: Mapping[str, Any], folder: Path) -> tuple[str, ...] | None:
    """Names of the outputs; None where config.json has none of the user's, or several outputs have one.

    Raises:
        DataError: id2label does not number its names 0, 1, 2, ...
    """
    names = config.get("id2label")
    if not isinstance(names, dict) or len(names) < 2:
        return None
    found = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(name, str | int) for name in found):
        message = f"{quoted(folder / CONFIG, limit=300)}: the keys of id2label are not 0 to {len(names) - 1}"
        raise DataError(message, path=folder / CONFIG)
    texts = tuple(str(name) for name in found)
    is_named = len(set(texts)) == len(texts) and not all(map(_NO_NAME.fullmatch, texts))
    return texts if is_named else None


def task_of(config: Mapping[str, Any]) -> str | None:
    """multiclass, binary or multilabel; None where config.json does not tell."""
    if num_labels(config) == 1:
        return "binary"
    of_types = {"single_label_classification": "multiclass", "multi_label_classification": "multilabel"}
    return of_types.get(str(config.get("problem_type")))
