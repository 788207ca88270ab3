"""inspect: identify a file or folder, without running anything in it."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bnncli import registry
from bnncli.artifacts.files import read_header
from bnncli.artifacts.hdf5 import array_shapes
from bnncli.artifacts.headers import Header, check_is_file
from bnncli.artifacts.posteriors import tensor_shapes
from bnncli.data import sound
from bnncli.data.arrays import npz_shapes
from bnncli.data.columns import Columns, find_roles
from bnncli.data.table_files import LIST, TEXT
from bnncli.errors import BnnError, DataError, MissingInput
from bnncli.models.answers import is_causal
from bnncli.models.build import recognise_networks
from bnncli.models.checkpoint_files import sniff, sniff_zip
from bnncli.models.checkpoints import Checkpoint, find_states, load_whole
from bnncli.models.huggingface import feature_extractor, num_labels, weight_files
from bnncli.models.output_folders import choose_checkpoint
from bnncli.models.recognition import guess, possible_heads
from bnncli.models.sharded import INDEX_SUFFIX, ShardedCheckpoint, find_sharded_folder, shards_of
from bnncli.names import FORMATS, format_names, prefixes_of, quote_name
from bnncli.options.command import Argument, Command, CommonOptions, format_command_line
from bnncli.options.declaration import spell_options
from bnncli.options.shared import IDENTITY
from bnncli.registry import has_name
from bnncli.session.run import Result, Run, Table
from bnncli.system.input_files import convert_read_errors, open_regular, read_object

COMMAND = Command(
    "Show what is in a file: kind, shapes, parameters, provenance, digests.",
    "Works on checkpoints, saved models, data, run folders and artifacts. Suggests an extract-features command for "
    "it. Never runs code from the file.",
    (CommonOptions,),
    ("bnncli inspect ckpt.pt", "bnncli inspect ckpt.pt.bnn/posteriors/laplace.safetensors --json"),
    (Argument("file", "A checkpoint, an artifact, data, or a folder of these; also KIND:PLACE."),),
    section="Start",
    place=20,
)


def execute(run: Run, options: Any) -> Result:
    """Print facts about an artifact, checkpoint, saved model or data, and a command that works with it."""
    path = _strip_kind(str(run.arguments["file"]))
    if path.is_dir():
        return identify_folder(path).result(path)
    check_is_file(path)
    if (found := _identify_by_name(path)) is not None:
        return found.result(path)
    try:
        header = read_header(path)
    except DataError as error:
        if error.code not in ("not_an_artifact", "wrong_kind"):
            raise
        return _identify_other(path).result(path)
    return _artifact(header)


def _strip_kind(text: str) -> Path:
    """Return the given path, without the kind that --model or --data puts before it (onnx:FILE)."""
    kind, _, place = text.partition(":")
    is_spec = place and not Path(text).exists() and any(has_name(family, kind) for family in ("models", "data"))
    return Path(place).expanduser() if is_spec else Path(text)


MAX_ROWS = 400


def _artifact(header: Header) -> Result:
    provenance, meta = header.provenance, dict(header.meta)
    facts: list[list[str]] = [
        ["kind", header.kind],
        ["schema", header.schema],
        ["content digest", shorten(header.content_digest)],
        ["command", shorten(" ".join(str(word) for word in provenance["command"]), 2000)],
        [
            "created",
            f"{shorten(provenance.get('created_at'))} in {provenance.get('seconds')} s on {shorten(provenance.get('device'))}",
        ],
        ["bnncli", shorten(provenance.get("tool", {}).get("version"))],
        ["checkpoint", (header.weights_digest or "none")],
    ]
    facts += [["source", shorten(provenance["source"], 2000)]] if "source" in provenance else []
    facts += [
        [f"input {shorten(entry['role'])}", f"{shorten(entry['path'], 2000)} {shorten(entry['content_digest'])}"]
        for entry in header.inputs
    ]
    facts += [[f"param {shorten(name)}", shorten(value, 2000)] for name, value in sorted(provenance["params"].items())]
    shown = {
        name: value
        for name, value in meta.items()
        if name not in ("metrics", "rows", "curve", "classes", "param_layout", "predictions", "code")
    }
    facts += [
        [shorten(name), quote_name(value, limit=120) if isinstance(value, str) else shorten(value)]
        for name, value in sorted(shown.items())
    ]
    metrics = meta.get("metrics") or {}
    facts += [[f"metric {shorten(name)}", shorten(value)] for name, value in metrics.items()]
    arrays = _arrays(header)
    facts += [[f"array {shorten(name)}", described] for name, described in arrays.items()]
    document = {
        "kind": header.kind,
        "content_digest": header.content_digest,
        "artifact_schema": header.schema,
        "meta": meta,
        "provenance": provenance,
        "arrays": arrays,
    }
    return Result(extra=document, tables=[Table(["what", "value"], facts[:MAX_ROWS], title=str(header.path))])


def _arrays(header: Header) -> dict[str, str]:
    """Return name to type and shape of each stored array; empty for metrics and graphs."""
    is_tensors = header.path.suffix == FORMATS["torch"]
    if header.kind == "metrics" or (header.kind == "export" and not is_tensors):
        return {}
    if header.kind in ("posterior", "checkpoint", "decision", "export", "calibration", "monitor"):
        return tensor_shapes(header.path)

    return array_shapes(header.path)


def recognise_model(path: Path) -> tuple[str, str] | None:
    """Return the value of --model for a checkpoint or saved model, and the command that runs it; None where unknown."""
    try:
        found = identify_folder(path) if path.is_dir() else _identify_by_name(path) or _identify_other(path)
    except (BnnError, OSError):  # said where it is used
        return None
    return None if found.model in (None, "hf:DIR") or found.suggested is None else (str(found.model), found.suggested)


NETWORK = "NET.py:FACTORY"  # stands for what only the user knows, as TRAIN and CKPT do
_NOT_LINEAR = ("torchvision:squeezenet", "timm:volo")  # in what they do after their last weights


@dataclass
class Finding:
    """Result of inspecting a path.

    Attributes:
        kind: kind in one or two words, stable for scripts.
        facts: rows of the table: name, value.
        document: further keys of the JSON document.
        model: value of --model; None where only the user knows it, or nothing runs it.
        suggested: command that works, filled in as far as known.
        then: command to continue with after the suggested one.
    """

    kind: str
    facts: list[list[str]] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    suggested: str | None = None
    then: str | None = None

    def add(self, what: str, value: object, *, key: str | None = None) -> None:
        """Add a row to the table, and to the document under `key`."""
        self.facts.append([what, shorten(value)])
        if key is not None:
            self.document[key] = value

    def suggest(
        self, path: Path, *, model: str | None, data: str, architecture: str | None = None, **options: Any
    ) -> None:
        """Suggest the extract-features command for a checkpoint, or for a model that has its own weights.

        Args:
            model: value of --model; None where only the user knows it.
            data: kind and path of a split.
            architecture: value of --model for the architecture, where `model` does not name it.
        """
        self.model = model
        if (architecture or model or "").startswith(_NOT_LINEAR):
            options["last_layer"] = IDENTITY
        split = [f"train={data}"]
        self.suggested = format_command_line(
            "extract-features", str(path), model=model or NETWORK, data=split, **options
        )

    def merge_first(self, sharded: ShardedCheckpoint) -> None:
        """Suggest merging a checkpoint into one file before the command suggested so far."""
        self.model, self.suggested, self.then = None, sharded.command, self.suggested

    def result(self, path: Path) -> Result:
        """Return the result, with the suggested command last."""
        document = {"kind": self.kind, **self.document, "suggested": self.suggested}
        document |= {} if self.then is None else {"then": self.then}
        rows = [["kind", self.kind], *self.facts][:MAX_ROWS]
        lines = [] if self.suggested is None else [self.suggested]
        summary = [] if self.then is None else [f"then: {self.then}"]
        summary += (
            ["add --data test=SPEC --hold-out val=test:N: auto and most fits need a validation split"]
            if " extract-features " in "".join(lines) and " --data " in lines[0]
            else []
        )
        return Result(
            summary=summary, extra=document, tables=[Table(["what", "value"], rows, title=str(path))], lines=lines
        )


def identify_folder(folder: Path) -> Finding:
    """Identify a folder.

    Raises:
        MissingInput: it holds nothing known.
        DataError: a metadata file in it is damaged.
    """
    if (choice := choose_checkpoint(folder)) is None:
        return _identify_contents(folder)
    found = _identify_other(choice.path) if choice.path.is_file() else _identify_contents(choice.path)
    found.kind = choice.kind if choice.path != folder else found.kind
    others = f"{len(choice.others)}: {format_names(choice.others)}" if choice.others else "none"
    found.facts[:0] = [
        ["checkpoint", shorten(str(choice.path), 2000)],
        ["reason", choice.reason],
        ["other checkpoints", others],
    ]
    found.document |= {"checkpoint": str(choice.path), "reason": choice.reason, "others": list(choice.others)}
    return found


def _identify_contents(folder: Path) -> Finding:
    """Identify a folder other than the output folder of a training run."""
    with convert_read_errors(folder):
        names = sorted(entry.name for entry in folder.iterdir())
        tellers: tuple[Callable[[Path, list[str]], Finding | None], ...] = (
            _identify_run, _identify_adapter, _identify_saved_model, _identify_data_set, _identify_distributed, _identify_shards, _identify_class_folders, _identify_clips, _identify_tables, _identify_weights_folder
        )  # fmt: skip
        for tell in tellers:
            if (found := tell(folder, names)) is not None:
                return found
    what = f"it holds {format_names(names)}" if names else "it is empty"
    raise MissingInput(f"bnncli does not recognise the folder {quote_name(folder, limit=300)}; {what}", path=folder)


_PARTS = ("features", "posteriors", "predictions", "metrics", "decisions", "monitor", "exports")
_LATER = ("decisions", "monitor", "exports")  # shown where they are


def _identify_run(folder: Path, names: list[str]) -> Finding | None:
    """Identify a run folder."""
    if folder.suffix != ".bnn" or not {*_PARTS} & {*names}:
        return None
    found = Finding("run")
    for part in [part for part in _PARTS if part not in _LATER or part in names]:
        files = sorted(file.name for file in (folder / part).glob("[!.]*")) if part in names else []
        found.add(part, ", ".join(files) or "none", key=part)
    found.suggested = format_command_line("status", str(folder.with_suffix("")))
    return found


def _identify_adapter(folder: Path, names: list[str]) -> Finding | None:
    """Identify a PEFT adapter."""
    if "adapter_config.json" not in names:
        return None
    config, found = _read_json(folder / "adapter_config.json"), Finding("peft adapter")
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
    data = {"SEQ_CLS": "csv:TRAIN.csv", "TOKEN_CLS": _DATA["Token"]}.get(str(config.get("task_type")), "SPEC")
    found.suggest(folder, model=f"peft:{folder}", data=data, base_model=local)
    return found


CHECKPOINT = "CKPT"
_DATA = {"Image": "images:TRAIN", "Sequence": "csv:TRAIN.csv", "Token": "jsonl:TRAIN.jsonl:words=tokens,label=tags"}
_CLASSIFIER = re.compile(r"For(Image|Sequence|Token|Audio)Classification$")


def _identify_saved_model(folder: Path, names: list[str]) -> Finding | None:
    """Identify a folder written by save_pretrained or by timm."""
    if "config.json" not in names:
        return None
    config = _read_json(folder / "config.json")
    if isinstance(config.get("architecture"), str):
        found = Finding("timm folder")
        found.add("architecture", config["architecture"], key="architecture")
        for name in ("num_classes", "label_names"):
            if config.get(name) is not None:
                found.add(name, config[name])
        architecture = f"timm:{config['architecture']}"
        found.suggest(folder, model=f"timm:{folder}", data="images:TRAIN", architecture=architecture)
        return found
    if not isinstance(config.get("model_type"), str):
        return None
    found = Finding("hugging face folder")
    architectures = [str(one) for one in config.get("architectures") or []]
    found.add("model type", config["model_type"], key="model_type")
    found.add("architecture", ", ".join(architectures) or "unknown", key="architecture")
    for name in ("transformers_version", "torch_dtype", "dtype", "problem_type"):
        if config.get(name) is not None:
            found.add(name, config[name], key=name)
    labels = config.get("id2label")
    if isinstance(labels, dict):
        classes = [str(labels[number]) for number in sorted(labels, key=lambda number: (len(number), number))]
        found.add("classes", f"{len(labels)}: {format_names(classes)}")
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
    sharded = None if weights else find_sharded_folder(folder)
    task = next((match[1] for one in architectures if (match := _CLASSIFIER.search(one))), None)
    if task is None and any(map(is_causal, architectures)):
        found.add("note", "a language model: name the answers that it chooses from")
        found.suggest(folder, model=f"hf:{folder}", data="csv:TRAIN.csv", model_arg=["answers=A,B,C,D"])
    elif task is None:
        found.add("note", "not a classifier: it has no head, so its outputs can only be features")
    else:
        is_audio = task == "Audio" or (task == "Sequence" and feature_extractor(folder) is not None)
        data = "audio:TRAIN" if is_audio else _DATA[task]
        merged = Path(CHECKPOINT) if sharded is None else sharded.merged
        if task == "Sequence" and not is_audio and num_labels(config) == 1:
            found.add(
                "note", "one output: if it is a reward model, add --model-arg pairs=yes to compare pairs of texts"
            )
        found.suggest(folder if weights else merged, model=f"hf:{folder}", data=data)
    if sharded is not None:
        found.add("note", sharded.what)
        found.merge_first(sharded)
    return found


def _identify_data_set(folder: Path, names: list[str]) -> Finding | None:
    """Identify a Hugging Face data set, saved to disk."""
    if not {"dataset_info.json", "dataset_dict.json"} & {*names}:
        return None
    found = Finding("hf-dataset")
    if "dataset_dict.json" in names:
        splits = _read_json(folder / "dataset_dict.json").get("splits") or []
        found.add("splits", ", ".join(map(str, splits)), key="splits")
    found.suggested = data_line(f"hf-dataset:{folder}") if is_readable_kind("hf-dataset") else None
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file; return an empty dictionary where it is not one."""
    try:
        return read_object(path)
    except DataError:
        return {}


def _identify_distributed(folder: Path, names: list[str]) -> Finding | None:
    """Identify a checkpoint of torch.distributed.checkpoint or DeepSpeed, for convert."""
    sharded = find_sharded_folder(folder)
    if sharded is None:
        return None
    found = Finding("deepspeed checkpoint" if sharded.kind == "deepspeed" else "distributed checkpoint")
    found.add("files", len(list(sharded.folder.iterdir())), key="files")
    found.add("folder", str(sharded.folder))
    if sharded.kind == "distributed":
        if not (sharded.folder / ".metadata").is_file():
            found.add("note", "its .metadata file is missing; without it the other files cannot be read")
            return found
        from bnncli.models.sharded import describe_tensors

        arrays = describe_tensors(sharded.folder)
        found.document["arrays"] = arrays
        found.facts += [[f"tensor {quote_name(name)}", text] for name, text in arrays.items()]
    model = f"hf:{folder.parent}" if (folder.parent / "config.json").is_file() else None
    found.suggest(sharded.merged, model=model, data="SPEC")
    found.merge_first(sharded)
    return found


def _identify_shards(folder: Path, names: list[str]) -> Finding | None:
    """Identify a sharded checkpoint."""
    if shards_of(folder) is None:
        return None

    return identify_checkpoint(folder)


_OF_CLASSES = {
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"),
    "audio": tuple(sound.SUFFIXES),
}


def _identify_class_folders(folder: Path, names: list[str]) -> Finding | None:
    """Identify class folders with images or sound."""
    for kind, suffixes in _OF_CLASSES.items():
        classes = [name for name in names if (folder / name).is_dir() and _has(folder / name, suffixes)]
        if classes:
            found = Finding(kind)
            found.add("classes", f"{len(classes)}: {format_names(classes)}")
            found.document["classes"] = classes
            found.suggested = data_line(f"{kind}:{folder}")
            return found
    return None


def _has(folder: Path, suffixes: tuple[str, ...]) -> bool:
    return any(file.suffix.lower() in suffixes for file in folder.iterdir())


def _identify_clips(folder: Path, names: list[str]) -> Finding | None:
    """Identify sound files without labels."""
    files = [name for name in names if Path(name).suffix.lower() in _OF_CLASSES["audio"]]
    if not files:
        return None
    found = Finding("audio")
    found.add("files", f"{len(files)}: {format_names(files)}")
    found.suggested = data_line(f"audio:{folder}")
    return found


_WEIGHTS = (".safetensors", ".pt", ".pth", ".pth.tar", ".ckpt", ".bin", ".onnx", ".pt2", ".skops")


def _identify_tables(folder: Path, names: list[str]) -> Finding | None:
    """Identify Parquet or Arrow files, or WebDataset shards."""
    for suffix, kind, place in (
        (".parquet", "parquet", folder), (".arrow", "arrow", folder), (".tar", "webdataset", folder / "*.tar")
    ):  # fmt: skip
        files = [name for name in names if name.endswith(suffix) and not name.endswith(_WEIGHTS)]
        if files:
            found = Finding(kind)
            found.add("files", f"{len(files)}: {format_names(files)}")
            found.suggested = data_line(f"{kind}:{place}") if is_readable_kind(kind) else None
            return found
    return None


def _identify_weights_folder(folder: Path, names: list[str]) -> Finding | None:
    """Point to the files of weights in any other folder."""
    files = [name for name in names if name.endswith(_WEIGHTS)]
    if not files:
        return None
    found = Finding("folder")
    for name in files:
        found.add("file", name)
    found.document["files"] = files
    found.suggested = format_command_line("inspect", str(folder / files[0]))
    return found


def _identify_by_name(path: Path) -> Finding | None:
    """Identify a text file by its name."""
    with convert_read_errors(path):
        if path.name.endswith(INDEX_SUFFIX):
            return _checkpoint(path)
        return identify_table(path)


_TABLES = {kind: kind for kind in ("csv", "tsv", "jsonl", "conll", "parquet", "arrow")} | {"conllu": "conll"}


def identify_table(path: Path) -> Finding | None:
    """Identify a table by its name; return None for other files."""
    kind = _TABLES.get(path.suffix.lower().removeprefix("."))
    if kind is None or not is_readable_kind(kind):
        return None
    found, columns = Finding(kind), _columns(path, kind)
    if columns:
        found.add("columns", ", ".join(columns), key="columns")
    named = ""
    for takes in ("texts", "words"):
        with suppress(BnnError):  # several columns could be the text, or none
            roles = find_roles(Columns(columns, str(path), kind), {}, takes=takes)
            named = f":{roles.kind}={'+'.join(roles.inputs)},label={'+'.join(roles.labels)}" if roles.labels else ""
            break
    found.suggested = data_line(f"{kind}:{path}{named}")
    return found


def is_readable_kind(kind: str) -> bool:
    """True where this kind of data exists."""
    return registry.has_name("data", kind)


_LINE = 1 << 20


def _columns(path: Path, kind: str) -> dict[str, str]:
    """Return the columns of text and lists, with what they hold; none for other tables."""
    if kind in ("conll", "parquet", "arrow"):
        return {}
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as stream:
        first = stream.readline(_LINE)
    if kind == "jsonl":
        try:
            row = json.loads(first)
        except (ValueError, RecursionError):
            return {}
        is_object = isinstance(row, dict)
        return (
            {str(name): LIST if isinstance(value, list) else TEXT for name, value in row.items()} if is_object else {}
        )
    csv.field_size_limit(_LINE)
    return dict.fromkeys(next(iter(csv.reader([first], delimiter="\t" if kind == "tsv" else ",")), []), TEXT)


PROGRAMS = {
    "torchscript": "TorchScript program",
    "pt2": "exported program",
    "onnx": "ONNX graph",
    "skops": "skops file",
}


def _identify_other(path: Path) -> Finding:
    """Identify a file that is not an artifact. Raises what load_checkpoint raises for an unknown kind."""
    with open_regular(path) as stream:
        head = stream.read(64)
        kind = sniff(stream)
        if kind == "zip":
            kind = sniff_zip(stream)
    if kind == "npz":
        return identify_npz(path)
    if kind == "unknown" and (found := identify_idx(path, head)) is not None:
        return found
    if kind in PROGRAMS:
        return identify_program(path, kind)
    return _checkpoint(path)


def identify_npz(path: Path) -> Finding:
    """Identify an archive of arrays: inputs and labels, ready features, or a linear classifier.

    Raises:
        DataError: the archive is damaged.
    """
    shapes = {name: (str(dtype), shape) for name, (shape, dtype) in npz_shapes(path).items()}
    found = Finding("npz")
    for name, described in shapes.items():
        found.add(f"array {quote_name(name)}", f"{described[0]} {described[1]}")
    found.document["arrays"] = {name: f"{kind} {shape}" for name, (kind, shape) in shapes.items()}
    if "coef_" in shapes and registry.has_name("models", "sklearn"):
        found.suggest(path, model=f"sklearn:{path}", data="npz:TRAIN.npz")
    elif any(name.startswith("features_") for name in shapes):
        found.suggested = format_command_line("extract-features", str(path.with_suffix("")), from_npz=str(path))
    else:
        found.suggested = _suggest_split_command(path, shapes)
    return found


def _suggest_split_command(path: Path, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """Suggest the command for inputs x and labels y, or for arrays that could be them."""
    if "x" in shapes:
        return data_line(f"npz:{path}")
    inputs = [name for name, (_, shape) in shapes.items() if len(shape) >= 2]
    labels = [
        name for name, (kind, shape) in shapes.items()
        if len(shape) == 1 and kind.startswith(("int", "uint")) and inputs and shape[0] == shapes[inputs[0]][1][0]
    ]  # fmt: skip
    if not inputs:
        return None
    return data_line(f"npz:{path}:{','.join([inputs[0], *labels[:1]])}")


_IDX = {b"\0\0\x08\x01": "labels", b"\0\0\x08\x03": "images"}


def identify_idx(path: Path, head: bytes) -> Finding | None:
    """Identify an MNIST-style file and its partner; return None for other files."""
    what = _IDX.get(head[:4])
    if what is None:
        return None
    found = Finding(f"idx {what}")
    shape = [int.from_bytes(head[place : place + 4], "big") for place in range(4, 4 + 4 * head[3], 4)]
    found.add("shape", str(tuple(shape)), key="shape")
    other = {"images": ("images-idx3", "labels-idx1"), "labels": ("labels-idx1", "images-idx3")}[what]
    partner = path.with_name(path.name.replace(*other))
    pair = [
        str(path),
        str(partner) if partner != path and partner.is_file() else "LABELS" if what == "images" else "IMAGES",
    ]
    found.suggested = data_line(f"idx:{','.join(pair if what == 'images' else pair[::-1])}")
    return found


MODEL = "MODEL"


def data_line(spec: str) -> str:
    """Return the extract-features command for data."""
    return format_command_line("extract-features", CHECKPOINT, model=MODEL, data=[f"train={spec}"])


_MODEL = {"torchscript": "jit", "pt2": "export", "onnx": "onnx", "skops": "sklearn"}


def identify_program(path: Path, kind: str) -> Finding:
    """Identify a program, and suggest the command that runs its graph.

    Args:
        kind: torchscript, pt2, onnx or skops.
    """
    found = Finding(PROGRAMS[kind])
    if kind == "onnx":
        _add_onnx(found, path)
    else:
        with zipfile.ZipFile(path) as archive:
            _add_members(found, archive, kind)
    model = _MODEL[kind]
    if registry.has_name("models", model):
        found.suggest(path, model=f"{model}:{path}", data="npz:TRAIN.npz")
    return found


def _add_onnx(found: Finding, path: Path) -> None:
    """Add the versions in the header of an ONNX model."""
    names = {1: "ir version", 2: "producer", 3: "producer version"}
    with open(path, "rb") as stream:
        for field, value in _fields(stream):
            if field in names:
                found.add(names[field], value if isinstance(value, int) else value.decode("utf-8", "replace"))
            elif field == 8 and isinstance(value, bytes):
                opset = dict(_parse_fields(value))
                domain, version = opset.get(1, b""), opset.get(2)
                text = domain.decode("utf-8", "replace") if isinstance(domain, bytes) else ""
                found.add("opset", f"{version if isinstance(version, int) else 0} {text}".strip())


def _fields(stream: IO[bytes]) -> Iterator[tuple[int, int | bytes]]:
    """Yield the short fields of a protobuf message, and skip long ones."""
    size = os.fstat(stream.fileno()).st_size
    while (tag := _read_varint(stream)) is not None:
        wire = tag & 7
        length = _read_varint(stream)
        if length is None or wire not in (0, 2) or (wire == 2 and length > size - stream.tell()):
            return
        if wire == 0:
            yield tag >> 3, length
        elif length <= 4096:
            yield tag >> 3, stream.read(length)
        else:
            stream.seek(length, os.SEEK_CUR)


def _read_varint(stream: IO[bytes]) -> int | None:
    """Read the next number; return None at the end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None


def _parse_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Return the fields of a short message."""
    place = 0
    while place < len(message):
        tag, place = _number(message, place)
        value, place = _number(message, place)
        if tag & 7 == 2:
            yield tag >> 3, message[place : place + value]
            place += value
        else:
            yield tag >> 3, value


def _number(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message):
        byte = message[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            break
    return value, place


_MAX_VERSION = 64


def _add_members(found: Finding, archive: zipfile.ZipFile, kind: str) -> None:
    """Add what a zip archive records about itself."""
    members = {member.filename: member.file_size for member in archive.infolist()}
    found.add("members", f"{len(members)}, {sum(members.values()) / 1e6:.1f} MB")
    for name in members:
        last = name.rpartition("/")[2]
        if last in ("version", "archive_version", ".format_version") and members[name] <= _MAX_VERSION:
            found.add(last, archive.read(name).decode("utf-8", "replace").strip())
    if kind == "torchscript":
        code = [name for name in members if "/code/" in name and name.endswith(".py")]
        found.add("code", f"{len(code)} files: {format_names([name.partition('/code/')[2] for name in code])}")
    if kind == "skops" and members["schema.json"] < 1 << 24:
        schema = json.loads(archive.read("schema.json"))
        for name in ("__class__", "__module__", "_skops_version", "protocol"):
            if name in schema:
                found.add(name.strip("_"), schema[name])


def _checkpoint(path: Path) -> Finding:
    return identify_checkpoint(path)


def identify_checkpoint(path: Path) -> Finding:
    """Identify a checkpoint. Raises what load_checkpoint raises."""
    checkpoint, saved = load_whole(path)
    found = Finding("checkpoint")
    found.add("format", checkpoint.format, key="format")
    found.add("selected key", str(checkpoint.selected_key))
    found.document["selected_key"] = checkpoint.selected_key
    found.add("stripped prefixes", ", ".join(checkpoint.stripped_prefixes) or "none")
    found.document["stripped_prefixes"] = list(checkpoint.stripped_prefixes)
    found.add("weights digest", checkpoint.weights_digest, key="weights_digest")
    found.add("file sha256", checkpoint.file_sha256, key="file_sha256")
    found.add("parameters", str(sum(tensor.numel() for tensor in checkpoint.state.values())))
    notes = [spell_options(note) for note in checkpoint.notes]
    for note in notes:
        found.add("note", note)
    found.document["notes"] = notes
    _add_origin(found, saved)
    _add_states(found, saved)
    _add_network(found, checkpoint, saved)
    arrays = {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in checkpoint.state.items()
    }
    found.facts += [[f"tensor {quote_name(name)}", described] for name, described in arrays.items()]
    found.document["arrays"] = arrays
    return found


def shorten(value: Any, limit: int = 160) -> str:
    """Format a value for a cell: on one line, cut after `limit` characters."""
    text = quote_name(value, limit=limit)[1:-1] if isinstance(value, str) else str(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


_HYPER_PARAMETERS = ("hyper_parameters", "hparams", "args", "config", "cfg", "opt", "model_args", "model_kwargs")
_MAX_HYPER_PARAMETERS, _MAX_HEADS, _MAX_DEPTH = 60, 6, 4


def _add_origin(found: Finding, saved: Any) -> None:
    """Add what wrote the file and the settings it recorded."""
    if not isinstance(saved, Mapping):
        return
    version = saved.get("pytorch-lightning_version")
    if isinstance(version, str):
        found.add("created by", f"Lightning {version}", key="made_by")
    elif isinstance(saved.get("arch"), str) and "state_dict" in saved:
        found.add("created by", f"a timm-style training script, arch {saved['arch']}", key="made_by")
    for name in ("epoch", "global_step", "step", "iteration"):
        if isinstance(saved.get(name), int):
            found.add(name, saved[name])
    told = {
        key: value for name in _HYPER_PARAMETERS for key, value in _flatten(saved.get(name), name)
    }  # fmt: skip
    for key, value in list(told.items())[:_MAX_HYPER_PARAMETERS]:
        found.add(key if len(key) <= 80 else f"{key[:80]}...", value)
    if told:
        found.document["hyper_parameters"] = dict(list(told.items())[:_MAX_HYPER_PARAMETERS])


_PLAIN = (str, int, float, bool, type(None))


def _flatten(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Return plain values by dotted name, with lists on one line."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}", depth + 1)
    elif isinstance(value, _PLAIN) and depth:
        yield name, value
    elif isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value):
        yield name, ", ".join(map(str, value[:20]))


def _add_states(found: Finding, saved: Any) -> None:
    """Add the states to choose from, if there are several."""
    states = find_states(saved)
    if len(states) > 1:
        for one in states:
            averaged = ", averaged" if one.is_averaged else ""
            found.add(f"state {quote_name(one.key)}", f"{one.num_tensors} tensors{averaged} (--state {one.key})")
    found.document["states"] = [one._asdict() for one in states]


def _add_network(found: Finding, checkpoint: Checkpoint, saved: Any) -> None:
    """Add a description of the network and the command that runs it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.state.items()}
    heads = possible_heads(shapes)
    for place, head in enumerate(heads[:_MAX_HEADS]):
        outputs = "1 output" if head.num_classes == 1 else f"{head.num_classes} classes"
        found.add(
            "head" if not place else "or head", f"{quote_name(head.name)}: {outputs}, {head.num_features} features"
        )
    if len(heads) > _MAX_HEADS:
        found.add("or head", f"one of {len(heads) - _MAX_HEADS} more")
    found.document["heads"] = [head._asdict() for head in heads]
    network, model, data = _describe_network(checkpoint, saved, shapes)
    found.add("network", network, key="network")
    found.suggest(checkpoint.path, model=model, data=data)


def _describe_network(
    checkpoint: Checkpoint, saved: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, str | None, str]:
    """Return the network in words, the value of --model (None where unknown), and a split of its kind."""
    images = "images:TRAIN"
    built_in = recognise_networks(checkpoint.state)
    if built_in:
        name, arguments = built_in[0]
        sizes = ", ".join(f"{key} {value}" for key, value in arguments.items())
        unsure = "; activation=relu is a guess" if name == "mlp" else ""
        return f"{name} ({sizes}){unsure}", name, "npz:TRAIN.npz"
    if (config := checkpoint.path.parent / "config.json").is_file() and '"model_type"' in _text(config):
        folder = checkpoint.path.parent
        return f"weights of the Hugging Face folder {folder}", f"hf:{folder}", "SPEC"
    arch = saved.get("arch") if isinstance(saved, Mapping) else None
    told = guess(shapes)
    if isinstance(arch, str) and arch.isidentifier() and (told is None or told.model is None):
        return f"arch {arch}, according to the file", f"timm:{arch}", images
    if told is not None:
        is_text = told.model is None and "Hugging Face" in told.text
        return told.text, "hf:DIR" if is_text else told.model, "SPEC" if told.model is None else images
    parts = [prefix[:-1] for prefix in prefixes_of(shapes) if prefix.count(".") == 1]
    return f"unknown; its parts: {format_names(parts)}" if parts else "unknown", None, "SPEC"


def _text(path: Path) -> str:
    """Read the start of a small file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 20)
    except OSError:
        return ""
