"""Exported programs (.pt2), read and run without torch.export.load.

That unpickles constants, evaluates expressions and compiles the file's own checks, all of which a file may fill with code. Here
its graph is read as data: a list of calls of PyTorch's operators on named values, and tensors as raw bytes. Calls are made one
after the other; of anything but these operators, and of operators that draw random numbers or touch files, the file is refused.

Source: torch/_export/serde/schema.py, version 8, and torch/export/pt2_archive.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from bnncli.checkpoints.load import check_sizes
from bnncli.checkpoints.sniff import check_members, sniff, sniff_zip
from bnncli.checkpoints.zip_checksums import check_checksums
from bnncli.errors import DataError, Untrusted
from bnncli.models._export_calls import CHECKS, DTYPES, STORED, ExportCall, names_in
from bnncli.models._graph_file import not_a_program
from bnncli.names import quoted
from bnncli.system.input_files import open_regular

_MAJOR = 8


class ExportedGraph:
    """What an exported program says: tensors by their place in the file, calls, and names of inputs and outputs.

    Attributes:
        tensors: by the name of the value that holds each in the graph.
        inputs: what the program takes, by name: the JSON of the type and shape.
        outputs: names of the values that it returns.
        keys: names of the entries where it returns a mapping; None otherwise.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        """Reads an open file. Raises DataError, Untrusted: it is damaged, or not such a program."""
        with zipfile.ZipFile(stream) as archive:
            check_members(archive.infolist(), start_dir=archive.start_dir, size=stream.seek(0, 2))
            program = self._json(archive, r"[^/]+/models/[^/]+\.json")
            module = program["graph_module"]
            if program["schema_version"]["major"] != _MAJOR:
                raise DataError(
                    f"the program has schema version {program['schema_version']['major']}, expected {_MAJOR}", code="wrong_version",
                    hint="export it again with a current version of torch",
                )  # fmt: skip
            self.graph = module["graph"]
            stored = {
                **_payload(archive, self._json(archive, r"[^/]+/data/constants/[^/]+_config\.json"), "constants"),
                **_payload(archive, self._json(archive, r"[^/]+/data/weights/[^/]+_config\.json"), "weights"),
            }
        self._read_signature(module["signature"], stored)
        self.keys = _keys(module["module_call_graph"], len(self.outputs))
        self.nodes = [ExportCall(node) for node in self.graph["nodes"] if not CHECKS.fullmatch(node["target"])]

    def _json(self, archive: zipfile.ZipFile, pattern: str) -> dict[str, Any]:
        found = [name for name in archive.namelist() if re.fullmatch(pattern, name)]
        if len(found) != 1:
            what = "no" if not found else "more than one"
            raise DataError(
                f"the archive has {what} member matching {pattern.replace(chr(92), '').replace('[^/]+', '*')}", code="bad_program",
                hint="export it again with torch.export.save from torch 2.9 or newer",
            )  # fmt: skip
        content: dict[str, Any] = json.loads(archive.read(found[0]))
        return content

    def _read_signature(self, signature: Mapping[str, Any], stored: Mapping[str, Tensor]) -> None:
        """Which values are the program's own tensors, which it takes, and which it returns."""
        self.tensors: dict[str, Tensor] = {}
        self.inputs: dict[str, Any] = {}
        for spec in signature["input_specs"]:
            ((kind, content),) = spec.items()
            if kind in ("parameter", "buffer", "tensor_constant"):
                key = content.get("parameter_name") or content.get("buffer_name") or content.get("tensor_constant_name")
                self.tensors[content["arg"]["name"]] = stored[key]
            elif kind == "user_input" and "as_tensor" in content["arg"]:
                name = content["arg"]["as_tensor"]["name"]
                self.inputs[name] = self.graph["tensor_values"][name]
            elif kind not in ("user_input", "constant_input") or "as_none" not in content.get("arg", {"as_none": True}):
                raise DataError(f"the program has an input of kind {kind}, expected tensors", code="bad_program")
        self.outputs: list[str] = []
        for spec in signature["output_specs"]:
            ((kind, content),) = spec.items()
            if kind != "user_output":
                raise DataError(
                    f"the program modifies its own state ({kind}) when it runs", code="in_training",
                    hint="export the network after network.eval()",
                )  # fmt: skip
            if "as_tensor" in content["arg"]:
                self.outputs.append(content["arg"]["as_tensor"]["name"])


class ExportedProgram(nn.Module):
    """The calls of an exported program, one after the other; values are let go after their last use."""

    def __init__(self, graph: ExportedGraph, features: str) -> None:
        super().__init__()
        self._wanted = [*graph.outputs, features]
        self._calls = _needed(graph.nodes, {*self._wanted})
        used = {name for call in self._calls for name in call.uses} | {*self._wanted}
        self._names = [name for name in graph.tensors if name in used]
        for index, name in enumerate(self._names):
            self.register_buffer(f"tensor_{index}", graph.tensors[name])
        last = {name: index for index, call in enumerate(self._calls) for name in call.uses}
        self._done = [
            {name for name, at in last.items() if at == index} - {*self._wanted} for index in range(len(self._calls))
        ]

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """The outputs and the features."""
        device = next(iter(inputs.values())).device
        own = dict(zip(self._names, self.buffers(), strict=True))
        values: dict[str, Any] = {**own, **inputs}
        for call, done in zip(self._calls, self._done, strict=True):
            call.run(values, device)
            for name in done:
                values.pop(name, None)
        *outputs, features = [values[name] for name in self._wanted]
        return outputs, features


def read_graph(path: Path) -> ExportedGraph:
    """The exported program in a file.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged, or another kind of file.
        Untrusted: it holds pickles, which are not loaded.
    """
    with open_regular(path) as stream:
        try:
            kind = sniff(stream)
            kind = sniff_zip(stream) if kind == "zip" else kind
            if kind != "pt2":
                raise not_a_program("pt2", kind)
            check_checksums(stream)
            return ExportedGraph(stream)
        except (DataError, Untrusted) as error:
            raise type(error)(
                f"{quoted(path, limit=300)}: {error.message}", hint=error.hint, code=error.code, path=path
            ) from error
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, RuntimeError, IndexError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise DataError(
                f"{quoted(path, limit=300)}: cannot read the program ({why})", code="bad_program", path=path
            ) from error


def constants_of(graph: ExportedGraph) -> Callable[[str], Tensor | None]:
    """The value of a name where it does not depend on the inputs; None where it does."""
    makers = {content["name"]: call for call in graph.nodes for kind, content in call.outputs if kind == "as_tensor"}
    known: dict[str, Tensor | None] = {**graph.tensors, **dict.fromkeys(graph.inputs)}

    def constant(name: str) -> Tensor | None:
        if name not in known:
            call = makers.get(name)
            known[name] = None
            if call is not None and None not in [constant(one) for one in call.uses] and call.uses:
                values: dict[str, Any] = {one: known[one] for one in call.uses}
                with torch.no_grad():
                    call.run(values, torch.device("cpu"))
                known[name] = values[name]
        return known[name]

    return constant


def _needed(calls: list[ExportCall], wanted: set[str]) -> list[ExportCall]:
    """The calls that the wanted values depend on, in their order; others, such as calls that change a value in place, too."""
    kept: list[ExportCall] = []
    for call in reversed(calls):
        gives = {name for kind, content in call.outputs for name in names_in(kind, content)}
        if gives & wanted or not gives or call.operator.endswith("_"):
            kept.append(call)
            wanted |= call.uses
    return kept[::-1]


def _payload(archive: zipfile.ZipFile, config: Mapping[str, Any], folder: str) -> dict[str, Tensor]:
    """The tensors of a folder of the archive by their names, real numbers in float32."""
    root = archive.namelist()[0].partition("/")[0]
    found = {}
    for name, entry in config["config"].items():
        if entry["use_pickle"] or entry["tensor_meta"] is None:
            raise Untrusted(
                f"{quoted(name)} is stored as a pickle; unpickling can run code, so it was not loaded", code="needs_code",
                hint="export a network that contains only plain tensors",
            )  # fmt: skip
        meta = entry["tensor_meta"]
        content = bytearray(archive.read(f"{root}/data/{folder}/{entry['path_name']}"))
        stored = STORED[meta["dtype"]]
        flat = torch.frombuffer(content, dtype=stored) if content else torch.zeros(0, dtype=stored)
        sizes, strides = ([one["as_int"] for one in meta[key]] for key in ("sizes", "strides"))
        found[name] = flat.as_strided(sizes, strides, meta["storage_offset"]["as_int"])
    check_sizes(found, sum(member.file_size for member in archive.infolist()))
    return {name: tensor.to(_read_as(tensor.dtype)).contiguous() for name, tensor in found.items()}


def _read_as(stored: torch.dtype) -> torch.dtype:
    """The type that a stored one is computed in."""
    return next(DTYPES[number] for number, dtype in STORED.items() if dtype == stored)


def _keys(calls: list[Mapping[str, Any]], num_outputs: int) -> list[str] | None:
    """Names of the entries where the program returns a mapping."""
    signature = calls[0].get("signature") if calls else None
    tree = json.loads(signature["out_spec"])[1] if signature else {}
    if not tree.get("children_spec") or tree.get("type") in ("builtins.tuple", "builtins.list"):
        return None
    keys = json.loads(tree["context"]) if isinstance(tree.get("context"), str) else tree.get("context")
    is_flat = all(not child["children_spec"] for child in tree["children_spec"])
    return [str(key) for key in keys] if is_flat and isinstance(keys, list) and len(keys) == num_outputs else None
