"""inspect: what a file is, without running anything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, check_is_file
from bnncli.errors import BnnError, DataError
from bnncli.models.checkpoint_files import sniff, sniff_zip
from bnncli.models.sharded import INDEX_SUFFIX
from bnncli.names import FORMATS, quoted
from bnncli.options.command import Argument, Command, CommonOptions
from bnncli.registry import has_name
from bnncli.session.run import Result, Run, Table
from bnncli.stages.inspect.data_files import idx_found, npz_found, table_found
from bnncli.stages.inspect.folders import folder_found
from bnncli.stages.inspect.found import MAX_ROWS, Found, short
from bnncli.stages.inspect.programs import PROGRAMS, program_found
from bnncli.system.input_files import open_regular, reading

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


def run(run: Run, options: Any) -> Result:
    """Facts about an artifact, a checkpoint, a saved model or data, and the line that would work with it."""
    path = _path_of(str(run.arguments["file"]))
    if path.is_dir():
        return folder_found(path).result(path)
    check_is_file(path)
    if (found := _by_name(path)) is not None:
        return found.result(path)
    try:
        header = read_header(path)
    except DataError as error:
        if error.code not in ("not_an_artifact", "wrong_kind"):
            raise
        return _other(path).result(path)
    return _artifact(header)


def _path_of(text: str) -> Path:
    """The path that was given, as it stands or behind the kind that --model or --data names it by (onnx:FILE)."""
    kind, _, place = text.partition(":")
    is_spec = place and not Path(text).exists() and any(has_name(family, kind) for family in ("models", "data"))
    return Path(place).expanduser() if is_spec else Path(text)


def recognised_model(path: Path) -> tuple[str, str] | None:
    """What --model would name a checkpoint or a saved model, and the line that runs it; None where that cannot be told."""
    try:
        found = folder_found(path) if path.is_dir() else _by_name(path) or _other(path)
    except (BnnError, OSError):  # said where it is used
        return None
    return None if found.model in (None, "hf:DIR") or found.suggested is None else (str(found.model), found.suggested)


def _by_name(path: Path) -> Found | None:
    """What a file of text is, which its name alone can tell."""
    with reading(path):
        if path.name.endswith(INDEX_SUFFIX):
            return _checkpoint(path)
        return table_found(path)


def _other(path: Path) -> Found:
    """What a file is that is none of ours. Raises what load_checkpoint raises where it is of no kind that is known."""
    with open_regular(path) as stream:
        head = stream.read(64)
        kind = sniff(stream)
        if kind == "zip":
            kind = sniff_zip(stream)
    if kind == "npz":
        return npz_found(path)
    if kind == "unknown" and (found := idx_found(path, head)) is not None:
        return found
    if kind in PROGRAMS:
        return program_found(path, kind)
    return _checkpoint(path)


def _checkpoint(path: Path) -> Found:
    from bnncli.stages.inspect.weights import checkpoint_found  # here, for torch

    return checkpoint_found(path)


def _artifact(header: Header) -> Result:
    provenance, meta = header.provenance, dict(header.meta)
    facts: list[list[str]] = [
        ["kind", header.kind],
        ["schema", header.schema],
        ["content digest", short(header.content_digest)],
        ["command", short(" ".join(str(word) for word in provenance["command"]), 2000)],
        [
            "created",
            f"{short(provenance.get('created_at'))} in {provenance.get('seconds')} s on {short(provenance.get('device'))}",
        ],
        ["bnncli", short(provenance.get("tool", {}).get("version"))],
        ["checkpoint", (header.weights_digest or "none")],
    ]
    facts += [["source", short(provenance["source"], 2000)]] if "source" in provenance else []
    facts += [
        [f"input {short(entry['role'])}", f"{short(entry['path'], 2000)} {short(entry['content_digest'])}"]
        for entry in header.inputs
    ]
    facts += [[f"param {short(name)}", short(value, 2000)] for name, value in sorted(provenance["params"].items())]
    shown = {
        name: value
        for name, value in meta.items()
        if name not in ("metrics", "rows", "curve", "classes", "param_layout", "predictions", "code")
    }
    facts += [
        [short(name), quoted(value, limit=120) if isinstance(value, str) else short(value)]
        for name, value in sorted(shown.items())
    ]
    metrics = meta.get("metrics") or {}
    facts += [[f"metric {short(name)}", short(value)] for name, value in metrics.items()]
    arrays = _arrays(header)
    facts += [[f"array {short(name)}", described] for name, described in arrays.items()]
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
    """Name to type and shape of everything stored; nothing for metrics and graphs."""
    is_tensors = header.path.suffix == FORMATS["torch"]
    if header.kind == "metrics" or (header.kind == "export" and not is_tensors):
        return {}
    if header.kind in ("posterior", "checkpoint", "decision", "export"):
        from bnncli.artifacts.posteriors import tensor_shapes

        return tensor_shapes(header.path)
    from bnncli.artifacts.hdf5 import array_shapes

    return array_shapes(header.path)
