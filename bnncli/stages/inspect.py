"""inspect: what a file is, without running anything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.stages._run import Result, Run, Table
from bnncli.storage.headers import Header, check_is_file, read_header

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
        ["content digest", header.content_digest],
        ["command", " ".join(str(word) for word in provenance.get("command", []))],
        [
            "made",
            f"{provenance.get('created_at')} in {provenance.get('seconds')} s on {provenance.get('device')}",
        ],
        ["bnncli", str(provenance.get("tool", {}).get("version"))],
        ["checkpoint", (header.weights_digest or "none")],
    ]
    facts += [["source", str(provenance["source"])]] if "source" in provenance else []
    facts += [[f"input {entry['role']}", f"{entry['path']} {entry['content_digest']}"] for entry in header.inputs]
    facts += [[f"param {name}", str(value)] for name, value in sorted(provenance.get("params", {}).items())]
    shown = {
        name: value
        for name, value in meta.items()
        if name not in ("metrics", "rows", "curve", "classes", "param_layout", "predictions")
    }
    facts += [
        [name, quoted(value, limit=120) if isinstance(value, str) else str(value)[:160]]
        for name, value in sorted(shown.items())
    ]
    metrics = meta.get("metrics") or {}
    facts += [[f"metric {name}", str(value)[:160]] for name, value in metrics.items()]
    arrays = _arrays(header)
    facts += [[f"array {name}", described] for name, described in arrays.items()]
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
    """Name to type and shape of everything stored; nothing for metrics."""
    if header.kind == "metrics":
        return {}
    if header.kind == "posterior":
        from bnncli.storage.posteriors import tensor_shapes

        return tensor_shapes(header.path)
    from bnncli.storage.hdf5 import array_shapes

    return array_shapes(header.path)


def _checkpoint(path: Path) -> Result:
    from bnncli.storage.checkpoints import load_checkpoint

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
