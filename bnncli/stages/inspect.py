"""inspect: what a file is, without running anything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.options import CommonOptions
from bnncli.options.command import Argument, Command
from bnncli.run.session import Result, Run, Table
from bnncli.storage.artifacts import read_header
from bnncli.storage.headers import Header, check_is_file

COMMAND = Command(
    "Show what a file is: kind, shapes, parameters, provenance, digests.",
    "Works on checkpoints and artifacts. Never runs code from the file.",
    (CommonOptions,),
    ("bnncli inspect ckpt.pt", "bnncli inspect ckpt.pt.bnn/posteriors/laplace.safetensors --json"),
    (Argument("file", "A checkpoint or an artifact."),),
    place=140,
)

MAX_ROWS = 400


def run(run: Run, options: Any) -> Result:
    """Facts about an artifact, or about a checkpoint."""
    path = Path(run.arguments["file"])
    check_is_file(path)
    try:
        header = read_header(path)
    except DataError as error:
        if error.code not in ("not_an_artifact", "wrong_kind"):
            raise
        return _checkpoint(path)
    return _artifact(header)


def _artifact(header: Header) -> Result:
    provenance, meta = header.provenance, dict(header.meta)
    facts: list[list[str]] = [
        ["kind", header.kind],
        ["schema", header.schema],
        ["content digest", _short(header.content_digest)],
        ["command", _short(" ".join(str(word) for word in provenance["command"]), 2000)],
        [
            "made",
            f"{_short(provenance.get('created_at'))} in {provenance.get('seconds')} s on {_short(provenance.get('device'))}",
        ],
        ["bnncli", _short(provenance.get("tool", {}).get("version"))],
        ["checkpoint", (header.weights_digest or "none")],
    ]
    facts += [["source", _short(provenance["source"], 2000)]] if "source" in provenance else []
    facts += [
        [f"input {_short(entry['role'])}", f"{_short(entry['path'], 2000)} {_short(entry['content_digest'])}"]
        for entry in header.inputs
    ]
    facts += [[f"param {_short(name)}", _short(value, 2000)] for name, value in sorted(provenance["params"].items())]
    shown = {
        name: value
        for name, value in meta.items()
        if name not in ("metrics", "rows", "curve", "classes", "param_layout", "predictions")
    }
    facts += [
        [_short(name), quoted(value, limit=120) if isinstance(value, str) else _short(value)]
        for name, value in sorted(shown.items())
    ]
    metrics = meta.get("metrics") or {}
    facts += [[f"metric {_short(name)}", _short(value)] for name, value in metrics.items()]
    arrays = _arrays(header)
    facts += [[f"array {_short(name)}", described] for name, described in arrays.items()]
    document = {
        "kind": header.kind,
        "content_digest": header.content_digest,
        "artifact_schema": header.schema,
        "meta": meta,
        "provenance": provenance,
        "arrays": arrays,
    }
    return Result(extra=document, tables=[Table(["what", "value"], facts[:MAX_ROWS], title=str(header.path))])


def _short(value: Any, limit: int = 160) -> str:
    """A value of a file in a cell: cut after `limit` characters."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _arrays(header: Header) -> dict[str, str]:
    """Name to type and shape of everything stored; nothing for metrics."""
    if header.kind == "metrics":
        return {}
    if header.kind == "posterior":
        from bnncli.storage.posteriors import tensor_shapes

        return tensor_shapes(header.path)
    from bnncli.storage.hdf5 import array_shapes

    return array_shapes(header.path)


def _checkpoint(path: Path) -> Result:
    from bnncli.checkpoints.load import load_checkpoint

    checkpoint = load_checkpoint(path)
    facts = [
        ["kind", "checkpoint"],
        ["format", checkpoint.format],
        ["selected key", str(checkpoint.selected_key)],
        ["stripped prefixes", ", ".join(checkpoint.stripped_prefixes) or "none"],
        ["weights digest", checkpoint.weights_digest],
        ["file sha256", checkpoint.file_sha256],
        ["parameters", str(sum(tensor.numel() for tensor in checkpoint.state.values()))],
    ]
    facts += [["note", note] for note in checkpoint.notes]
    arrays = {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in checkpoint.state.items()
    }
    facts += [[f"tensor {quoted(name)}", described] for name, described in arrays.items()]
    document = {
        "kind": "checkpoint",
        "format": checkpoint.format,
        "selected_key": checkpoint.selected_key,
        "stripped_prefixes": list(checkpoint.stripped_prefixes),
        "weights_digest": checkpoint.weights_digest,
        "file_sha256": checkpoint.file_sha256,
        "notes": list(checkpoint.notes),
        "arrays": arrays,
    }
    return Result(extra=document, tables=[Table(["what", "value"], facts[:MAX_ROWS], title=str(path))])
