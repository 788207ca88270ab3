"""`export:FILE.pt2`: a program saved by torch.export.save, read as data; it may call only PyTorch's own operators."""

from __future__ import annotations

import json
import math
import operator
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnncli.errors import DataError, Untrusted
from bnncli.models import ModelRequest
from bnncli.models.checkpoint_files import check_checksums, check_members, sniff, sniff_zip
from bnncli.models.checkpoints import check_sizes
from bnncli.models.graphs import GraphFile, wrong_program_error
from bnncli.names import quote_name
from bnncli.options.declaration import Form
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    import numpy as np


_FLOAT = torch.float32  # replaces all other floating-point types
DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: _FLOAT, 7: _FLOAT, 8: _FLOAT,
    9: torch.complex64, 10: torch.complex64, 11: torch.complex64, 12: torch.bool, 13: _FLOAT,
}  # fmt: skip
STORED = {**DTYPES, 6: torch.float16, 8: torch.float64, 11: torch.complex128, 13: torch.bfloat16}
_FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format,
}  # fmt: skip
_STRIDED = 7
_ON_NUMBERS: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")
} | {
    "math.trunc": math.trunc, "torch.sym_max": max, "torch.sym_min": min, "torch.sym_float": float, "torch.sym_int": int,
    "torch.sym_not": operator.not_, "torch._sym_sqrt": math.sqrt, "torch.sym_sqrt": math.sqrt,
}  # fmt: skip
# Checks of sizes and types, which hold for those that the program was exported with.
CHECKS = re.compile(
    r"torch\.ops\.aten\.(_assert\w*|_functional_assert\w*|sym_constrain\w*|_functional_sym_constrain\w*)\.\w+"
)
_OPERATOR = re.compile(r"torch\.ops\.aten\.([a-z_]\w*)\.(\w+)")


class ExportCall:
    """A call of an operator."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        target = node["target"]
        self.operator, self.function = _function(target)
        self.arguments = [(one["name"], *unpack_union(one["arg"])) for one in node["inputs"]]
        self.outputs = [unpack_union(one) for one in node["outputs"]]
        self.name = str(node.get("name") or "")
        if self.operator in ("dropout", "batch_norm", "feature_dropout") and self._is_training():
            raise DataError(
                f"the program was exported in training mode: its {self.operator} is random or depends on the batch", code="in_training",
                hint="export the network after network.eval()",
            )  # fmt: skip

    def _is_training(self) -> bool:
        return any(name in ("train", "training") and value is True for name, _, value in self.arguments)

    @property
    def tensors(self) -> list[str | None]:
        """Names of its tensor arguments, in the operator's order; None for other arguments."""
        return [value["name"] if kind == "as_tensor" else None for _, kind, value in self.arguments]

    @property
    def uses(self) -> set[str]:
        """Names of all values in its arguments."""
        return {name for _, kind, value in self.arguments for name in names_in(kind, value)}

    def run(self, values: dict[str, Any], device: torch.device) -> None:
        """Make the call, and add its results to the values."""
        given = {name: _argument(kind, value, values, device) for name, kind, value in self.arguments}
        is_on_numbers = not isinstance(self.function, torch._ops.OpOverload)
        result = self.function(*given.values()) if is_on_numbers else self.function(**given)
        results = result if len(self.outputs) > 1 else [result]
        for (kind, content), one in zip(self.outputs, results, strict=True):
            if kind == "as_tensors":
                values |= {part["name"]: tensor for part, tensor in zip(content, one, strict=True)}
            elif kind != "as_none":
                values[content["as_name"] if kind.startswith("as_sym") else content["name"]] = one


def _function(target: str) -> tuple[str, Callable[..., Any]]:
    """Return name and function of an allowed operator. Raises DataError for any other."""
    if target in _ON_NUMBERS:
        return target.rpartition(".")[2], _ON_NUMBERS[target]
    match = _OPERATOR.fullmatch(target)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    if match is None or not isinstance(packet, torch._ops.OpOverloadPacket) or match[2] not in packet.overloads():
        raise DataError(
            f"the program calls {quote_name(target)}; expected only PyTorch's own operators (torch.ops.aten)",
            code="unknown_operator", hint="give the network as Python code with \0model\0 file.py:factory",
        )  # fmt: skip
    function = getattr(packet, match[2])
    if any(argument.name == "filename" for argument in function._schema.arguments):
        raise Untrusted(f"the program calls {quote_name(target)}, which reads or writes files", code="program")
    is_dropout = match[1] in ("dropout", "dropout_", "feature_dropout", "native_dropout")
    if torch.Tag.nondeterministic_seeded in function.tags and not is_dropout:
        raise DataError(
            f"the program draws random numbers ({target}), so its features would change from run to run",
            code="in_training",
        )
    return match[1], function


def unpack_union(union: Mapping[str, Any]) -> tuple[str, Any]:
    """Return kind and content of a union value."""
    ((kind, content),) = union.items()
    return kind, content


def names_in(kind: str, content: Any) -> set[str]:
    """Return the names of values that an argument refers to."""
    if kind in ("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float", "as_optional_tensor"):
        content = content.get("as_tensor", content) if kind == "as_optional_tensor" else content
        name = content.get("name", content.get("as_name"))
        return set() if name is None else {name}
    if kind in (
        "as_tensors",
        "as_sym_ints",
        "as_sym_bools",
        "as_sym_floats",
        "as_optional_tensors",
        "as_nested_tensors",
    ):
        flat = [part for one in content for part in one] if kind == "as_nested_tensors" else content
        single = {"as_optional_tensors": "as_optional_tensor", "as_nested_tensors": "as_tensor"}.get(kind, kind[:-1])
        return {name for one in flat for name in names_in(single, one)}
    return set()


def _argument(kind: str, content: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """Return the value of an argument."""
    if kind == "as_none":
        return None
    if kind == "as_scalar_type":
        return DTYPES[content]
    if kind == "as_memory_format":
        return _FORMATS[content]
    if kind == "as_device":
        return device
    if kind == "as_layout" and content == _STRIDED:
        return torch.strided
    if kind in ("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float", "as_optional_tensor"):
        names = names_in(kind, content)
        return values[names.pop()] if names else next(iter(content.values())) if kind != "as_optional_tensor" else None
    plural = {
        "as_tensors": "as_tensor", "as_sym_ints": "as_sym_int", "as_sym_bools": "as_sym_bool", "as_sym_floats": "as_sym_float",
        "as_optional_tensors": "as_optional_tensor",
    }  # fmt: skip
    if kind in plural:
        return [_argument(plural[kind], one, values, device) for one in content]
    if kind == "as_float":  # JSON has no infinite numbers
        return float(content)
    if kind in ("as_int", "as_bool", "as_string", "as_ints", "as_floats", "as_bools", "as_strings"):
        return content
    raise DataError(f"the program has an argument of kind {kind}, which is not supported", code="unknown_operator")


_MAJOR = 8


class ExportedGraph:
    """An exported program: tensors, calls, and names of inputs and outputs.

    Attributes:
        tensors: by the name of their value in the graph.
        inputs: by name, the JSON of type and shape.
        outputs: names of the returned values.
        keys: names of the entries if it returns a mapping; else None.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        """Read an open file. Raises DataError or Untrusted if it is damaged or not such a program."""
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
        """Find which values are the program's own tensors, its inputs and its outputs."""
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
    """Runs the calls of an exported program in order, freeing values after their last use."""

    def __init__(self, graph: ExportedGraph, features: str) -> None:
        super().__init__()
        self._wanted = [*graph.outputs, features]
        self._calls = _select_needed_calls(graph.nodes, {*self._wanted})
        used = {name for call in self._calls for name in call.uses} | {*self._wanted}
        self._names = [name for name in graph.tensors if name in used]
        for index, name in enumerate(self._names):
            self.register_buffer(f"tensor_{index}", graph.tensors[name])
        last = {name: index for index, call in enumerate(self._calls) for name in call.uses}
        self._done = [
            {name for name, at in last.items() if at == index} - {*self._wanted} for index in range(len(self._calls))
        ]

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the outputs and the features."""
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
    """Read the exported program in a file.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged, or of another kind.
        Untrusted: it contains pickles, which are not loaded.
    """
    with open_regular(path) as stream:
        try:
            kind = sniff(stream)
            kind = sniff_zip(stream) if kind == "zip" else kind
            if kind != "pt2":
                raise wrong_program_error("pt2", kind)
            check_checksums(stream)
            return ExportedGraph(stream)
        except (DataError, Untrusted) as error:
            raise type(error)(
                f"{quote_name(path, limit=300)}: {error.message}", hint=error.hint, code=error.code, path=path
            ) from error
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, RuntimeError, IndexError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise DataError(
                f"{quote_name(path, limit=300)}: cannot read the program ({why})", code="bad_program", path=path
            ) from error


def constants_of(graph: ExportedGraph) -> Callable[[str], Tensor | None]:
    """Return a function that returns a value by name; None if it depends on the inputs."""
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


def _select_needed_calls(calls: list[ExportCall], wanted: set[str]) -> list[ExportCall]:
    """Return the calls that the wanted values depend on, in order, including in-place operations."""
    kept: list[ExportCall] = []
    for call in reversed(calls):
        gives = {name for kind, content in call.outputs for name in names_in(kind, content)}
        if gives & wanted or not gives or call.operator.endswith("_"):
            kept.append(call)
            wanted |= call.uses
    return kept[::-1]


def _payload(archive: zipfile.ZipFile, config: Mapping[str, Any], folder: str) -> dict[str, Tensor]:
    """Return the tensors in a folder of the archive by name, floats as float32."""
    root = archive.namelist()[0].partition("/")[0]
    found = {}
    for name, entry in config["config"].items():
        if entry["use_pickle"] or entry["tensor_meta"] is None:
            raise Untrusted(
                f"{quote_name(name)} is stored as a pickle; unpickling can run code, so it was not loaded", code="needs_code",
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
    """Return the type in which a stored type is computed."""
    return next(DTYPES[number] for number, dtype in STORED.items() if dtype == stored)


def _keys(calls: list[Mapping[str, Any]], num_outputs: int) -> list[str] | None:
    """Return the names of the entries if the program returns a mapping."""
    signature = calls[0].get("signature") if calls else None
    tree = json.loads(signature["out_spec"])[1] if signature else {}
    if not tree.get("children_spec") or tree.get("type") in ("builtins.tuple", "builtins.list"):
        return None
    keys = json.loads(tree["context"]) if isinstance(tree.get("context"), str) else tree.get("context")
    is_flat = all(not child["children_spec"] for child in tree["children_spec"])
    return [str(key) for key in keys] if is_flat and isinstance(keys, list) and len(keys) == num_outputs else None


FORM = Form("export:FILE.pt2", 50, "A program saved by torch.export.")
EXTRA: str | None = None
TAKES = ("feature_node",)


class ExportedFile(GraphFile):
    """An exported program in a file."""

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network. Raises DataError, Untrusted or UsageError if it cannot run or has no head."""
        from bnncli.models.graphs import GraphInput, GraphNetwork, HeadSearch, convert_aten_operator, outputs_in_order

        self.refuse(state)
        path = self.files[0]
        graph = read_graph(path)
        find = constants_of(graph)
        steps = [
            convert_aten_operator(call.operator, content["name"], call.tensors, name=call.name)
            for call in graph.nodes
            for kind, content in call.outputs[:1]
            if kind == "as_tensor"
        ]

        def constant(name: str) -> np.ndarray | None:
            value = find(name)
            return None if value is None else value.numpy()

        search = HeadSearch(str(path), steps, constant)
        head = search.find(outputs_in_order(graph.outputs, graph.keys), self.feature_node)
        inputs = {
            name: GraphInput(DTYPES[meta["dtype"]], tuple(size.get("as_int") for size in meta["sizes"]))
            for name, meta in graph.inputs.items()
        }
        return GraphNetwork(ExportedProgram(graph, head.features), inputs, graph.keys, head).eval()


def open_model(place: str, asked: ModelRequest) -> ExportedFile:
    """Open the program in a file. Raises MissingInput if there is no such file."""
    path = Path(place).expanduser()
    with open_regular(path):
        pass
    return ExportedFile((path,), asked.feature_node)
