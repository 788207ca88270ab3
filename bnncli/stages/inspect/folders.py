"""Folders: of a saved model, of a checkpoint in several files, of a run, of data; told by the names of their files and small JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bnncli.data import sound
from bnncli.errors import BnnError, DataError, MissingInput
from bnncli.models.huggingface import feature_extractor, weight_files
from bnncli.models.sharded import sharded_folder, shards_of
from bnncli.names import listed, quoted
from bnncli.options.command import pasted
from bnncli.stages.inspect.data_files import can_be_read
from bnncli.stages.inspect.found import CHECKPOINT, Found, data_line
from bnncli.system.input_files import read_object, reading

_WEIGHTS = (".safetensors", ".pt", ".pth", ".pth.tar", ".ckpt", ".bin", ".onnx", ".pt2", ".skops")
_OF_CLASSES = {
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"),
    "audio": tuple(sound.SUFFIXES),
}
_PARTS = ("features", "posteriors", "predictions", "metrics", "decisions", "exports")
_LATER = ("decisions", "exports")  # shown where they are
_DATA = {"Image": "images:TRAIN", "Sequence": "csv:TRAIN.csv"}
_CLASSIFIER = re.compile(r"For(Image|Sequence|Audio)Classification$")


def folder_found(folder: Path) -> Found:
    """What a folder is.

    Raises:
        MissingInput: nothing that is known lies in it.
        DataError: a small file in it is damaged.
    """
    with reading(folder):
        names = sorted(entry.name for entry in folder.iterdir())
        tellers: tuple[Callable[[Path, list[str]], Found | None], ...] = (
            _run, _adapter, _saved_model, _data_set, _of_a_cluster, _shards, _classes, _clips, _tables, _one_file
        )  # fmt: skip
        for tell in tellers:
            if (found := tell(folder, names)) is not None:
                return found
    what = f"it holds {listed(names)}" if names else "it is empty"
    raise MissingInput(f"bnncli does not recognise the folder {quoted(folder, limit=300)}; {what}", path=folder)


def _run(folder: Path, names: list[str]) -> Found | None:
    """A run folder of ours."""
    if folder.suffix != ".bnn" or not {*_PARTS} & {*names}:
        return None
    found = Found("run")
    for part in [part for part in _PARTS if part not in _LATER or part in names]:
        files = sorted(file.name for file in (folder / part).glob("[!.]*")) if part in names else []
        found.add(part, ", ".join(files) or "none", key=part)
    found.suggested = pasted("status", str(folder.with_suffix("")))
    return found


def _adapter(folder: Path, names: list[str]) -> Found | None:
    """An adapter of PEFT."""
    if "adapter_config.json" not in names:
        return None
    config, found = _json(folder / "adapter_config.json"), Found("peft adapter")
    for name in (
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "target_modules",
        "modules_to_save",
    ):
        if config.get(name) is not None:
            found.add(name, config[name], key=name)
    base = str(config.get("base_model_name_or_path") or "")
    local = next((place for place in (base, str(folder / base)) if base and Path(place).is_dir()), "BASE")
    data = "csv:TRAIN.csv" if config.get("task_type") == "SEQ_CLS" else "SPEC"
    found.suggest(folder, model=f"peft:{folder}", data=data, base_model=local)
    return found


def _saved_model(folder: Path, names: list[str]) -> Found | None:
    """A folder of save_pretrained, or one that timm wrote."""
    if "config.json" not in names:
        return None
    config = _json(folder / "config.json")
    if isinstance(config.get("architecture"), str):
        found = Found("timm folder")
        found.add("architecture", config["architecture"], key="architecture")
        for name in ("num_classes", "label_names"):
            if config.get(name) is not None:
                found.add(name, config[name])
        architecture = f"timm:{config['architecture']}"
        found.suggest(folder, model=f"timm:{folder}", data="images:TRAIN", architecture=architecture)
        return found
    if not isinstance(config.get("model_type"), str):
        return None
    found = Found("hugging face folder")
    architectures = [str(one) for one in config.get("architectures") or []]
    found.add("model type", config["model_type"], key="model_type")
    found.add("architecture", ", ".join(architectures) or "unknown", key="architecture")
    for name in ("transformers_version", "torch_dtype", "dtype", "problem_type"):
        if config.get(name) is not None:
            found.add(name, config[name], key=name)
    labels = config.get("id2label")
    if isinstance(labels, dict):
        classes = [str(labels[number]) for number in sorted(labels, key=lambda number: (len(number), number))]
        found.add("classes", f"{len(labels)}: {listed(classes)}")
        found.document["classes"] = classes
    weights: list[str] = []
    try:
        weights = [file.name for file in weight_files(folder)]
    except BnnError as error:  # a shard is missing
        found.add("note", error.message)
    found.add("weights", ", ".join(weights) or "none", key="weights")
    found.add(
        "preprocessing", ", ".join(name for name in names if re.match(r"tokenizer|preprocessor|vocab", name)) or "none"
    )
    task = next((match[1] for one in architectures if (match := _CLASSIFIER.search(one))), None)
    if task is None:
        found.add("note", "not a classifier: it has no head, so its outputs can only be features")
    else:
        is_audio = task == "Audio" or (task == "Sequence" and feature_extractor(folder) is not None)
        data = "audio:TRAIN" if is_audio else _DATA[task]
        found.suggest(folder if weights else Path(CHECKPOINT), model=f"hf:{folder}", data=data)
    return found


def _data_set(folder: Path, names: list[str]) -> Found | None:
    """A data set of Hugging Face, saved to disk."""
    if not {"dataset_info.json", "dataset_dict.json"} & {*names}:
        return None
    found = Found("hf-dataset")
    if "dataset_dict.json" in names:
        splits = _json(folder / "dataset_dict.json").get("splits") or []
        found.add("splits", ", ".join(map(str, splits)), key="splits")
    found.suggested = data_line(f"hf-dataset:{folder}") if can_be_read("hf-dataset") else None
    return found


def _of_a_cluster(folder: Path, names: list[str]) -> Found | None:
    """A checkpoint of torch.distributed.checkpoint or of DeepSpeed, for convert."""
    sharded = sharded_folder(folder)
    if sharded is None:
        return None
    found = Found("deepspeed checkpoint" if sharded.kind == "deepspeed" else "distributed checkpoint")
    found.add("files", len(list(sharded.folder.iterdir())), key="files")
    found.add("folder", str(sharded.folder))
    if sharded.kind == "distributed":
        if not (sharded.folder / ".metadata").is_file():
            found.add("note", "its .metadata file is missing; without it the other files cannot be read")
            return found
        from bnncli.models.sharded import described

        arrays = described(sharded.folder)
        found.document["arrays"] = arrays
        found.facts += [[f"tensor {quoted(name)}", text] for name, text in arrays.items()]
    out = sharded.folder.absolute().parent / f"{sharded.folder.absolute().name}.safetensors"
    found.suggested = pasted("convert", str(folder), str(out))
    return found


def _shards(folder: Path, names: list[str]) -> Found | None:
    """A checkpoint in shards, read as one."""
    if shards_of(folder) is None:
        return None
    from bnncli.stages.inspect.weights import checkpoint_found

    return checkpoint_found(folder)


def _classes(folder: Path, names: list[str]) -> Found | None:
    """Class folders with images, or with sound."""
    for kind, suffixes in _OF_CLASSES.items():
        classes = [name for name in names if (folder / name).is_dir() and _has(folder / name, suffixes)]
        if classes:
            found = Found(kind)
            found.add("classes", f"{len(classes)}: {listed(classes)}")
            found.document["classes"] = classes
            found.suggested = data_line(f"{kind}:{folder}")
            return found
    return None


def _clips(folder: Path, names: list[str]) -> Found | None:
    """Sound without labels."""
    files = [name for name in names if Path(name).suffix.lower() in _OF_CLASSES["audio"]]
    if not files:
        return None
    found = Found("audio")
    found.add("files", f"{len(files)}: {listed(files)}")
    found.suggested = data_line(f"audio:{folder}")
    return found


def _has(folder: Path, suffixes: tuple[str, ...]) -> bool:
    return any(file.suffix.lower() in suffixes for file in folder.iterdir())


def _tables(folder: Path, names: list[str]) -> Found | None:
    """Parquet or Arrow files, or WebDataset shards."""
    for suffix, kind, place in (
        (".parquet", "parquet", folder), (".arrow", "arrow", folder), (".tar", "webdataset", folder / "*.tar")
    ):  # fmt: skip
        files = [name for name in names if name.endswith(suffix) and not name.endswith(_WEIGHTS)]
        if files:
            found = Found(kind)
            found.add("files", f"{len(files)}: {listed(files)}")
            found.suggested = data_line(f"{kind}:{place}") if can_be_read(kind) else None
            return found
    return None


def _one_file(folder: Path, names: list[str]) -> Found | None:
    """Any folder with files of weights: they are what to look at."""
    files = [name for name in names if name.endswith(_WEIGHTS)]
    if not files:
        return None
    found = Found("folder")
    for name in files:
        found.add("file", name)
    found.document["files"] = files
    found.suggested = pasted("inspect", str(folder / files[0]))
    return found


def _json(path: Path) -> dict[str, Any]:
    """What a small JSON file holds; nothing where it is no dictionary."""
    try:
        return read_object(path)
    except DataError:
        return {}
