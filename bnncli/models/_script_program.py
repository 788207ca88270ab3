"""TorchScript programs: looked through before they are loaded, then frozen to one graph that also returns the features.

A TorchScript program is code, in a language that can call PyTorch's operators and nothing else. Two of them write or map files;
a program that names one of these, or operators of other libraries, is not loaded.
"""

from __future__ import annotations

import ast
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from bnncli.checkpoints.sniff import sniff, sniff_zip
from bnncli.checkpoints.zip_checksums import check_checksums
from bnncli.errors import DataError, Untrusted
from bnncli.machine.input_files import open_regular
from bnncli.models._aten_steps import aten_step
from bnncli.models._graph_file import not_a_program
from bnncli.models._graph_head import GraphStep
from bnncli.names import listed, quoted

_ON_FILES = {"save", "from_file"}
_NAMESPACES = {"aten", "prim", "quantized", "_quantized"}
_TRAINS_AT = {"dropout": 2, "dropout_": 2, "feature_dropout": 2, "batch_norm": 5}  # which argument tells them to


class ScriptGraph:
    """The graph of a program's forward, its modules and weights inside it.

    Attributes:
        inputs: names of the tensors that it takes.
        outputs: names of the values that it returns, one by one where it returns several.
        keys: names of the entries where it returns a mapping; None otherwise.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        """Freezes a program. Raises DataError: it cannot be, or does not take and return tensors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            frozen = torch.jit.freeze(module.eval().float(), optimize_numerics=False)
        self.graph = frozen.graph.copy()
        self.kept = (module, frozen)  # errors say where in their source a call stands, and crash where that is gone
        self.inputs = []
        for value in list(self.graph.inputs())[1:]:
            name = re.sub(r"\.\d+$", "", value.debugName())
            if value.type().kind() != "TensorType":
                raise DataError(
                    f"the program takes an input {quoted(name)} of type {value.type()}, expected tensors alone", code="not_tensors",
                    hint="give the network as Python code with \0model\0 file.py:factory",
                )  # fmt: skip
            self.inputs.append(name)
        self._read_outputs()
        self._refuse_training()

    def _read_outputs(self) -> None:
        """What the graph returns: a tensor, or a tuple or mapping of tensors made by its last node."""
        (returned,) = self.graph.outputs()
        maker, self.keys = returned.node(), None
        values = [returned]
        if maker.kind() in ("prim::TupleConstruct", "prim::ListConstruct"):
            values = list(maker.inputs())
        elif maker.kind() == "prim::DictConstruct":
            parts = list(maker.inputs())
            self.keys, values = [str(part.toIValue()) for part in parts[::2]], parts[1::2]
        odd = [value for value in values if value.type().kind() != "TensorType"]
        if odd:
            raise DataError(f"the program returns {odd[0].type()}, expected a tensor of logits", code="no_logits")
        self.values = values
        self.outputs = [value.debugName() for value in values]

    def _refuse_training(self) -> None:
        """A program that was traced in training mode stays in it, whatever it is told later."""
        for name, place in _TRAINS_AT.items():
            for node in self.graph.findAllNodes(f"aten::{name}", True):
                if [*node.inputs()][place].toIValue() is True:
                    raise DataError(
                        f"the program was traced in training mode: its {name} is random or of the batch", code="in_training",
                        hint="trace the network after network.eval()",
                    )  # fmt: skip

    def steps(self) -> list[GraphStep]:
        """The calls of the graph, as far as they are not inside its branches and loops."""
        found = []
        for node in self.graph.nodes():
            if node.outputsSize():
                tensors = [
                    value.debugName() if value.type().kind() == "TensorType" else None for value in node.inputs()
                ]
                found.append(aten_step(node.kind().removeprefix("aten::"), node.outputsAt(0).debugName(), tensors))
        return found

    def constant(self, name: str) -> Any:
        """The tensor of that name as an array, where it is one of the program's own; None otherwise."""
        value = next((one.output() for one in self._constants() if one.output().debugName() == name), None)
        tensor = None if value is None else value.toIValue()
        return tensor.detach().numpy() if isinstance(tensor, Tensor) else None

    def _constants(self) -> list[Any]:
        return [
            node
            for node in self.graph.findAllNodes("prim::Constant", True)
            if isinstance(node.output().toIValue(), Tensor)
        ]


class ScriptProgram(nn.Module):
    """A graph whose weights are buffers, so that they are moved as those of any network."""

    def __init__(self, graph: ScriptGraph, features: str) -> None:
        super().__init__()
        body = graph.graph
        found = {value.debugName(): value for node in body.nodes() for value in node.outputs()}
        found |= {value.debugName(): value for value in body.inputs()}
        wanted = [*graph.values, found[features]]
        together = body.create("prim::TupleConstruct", wanted, 1)
        body.appendNode(together)
        together.output().setType(torch._C.TupleType([value.type() for value in wanted]))
        body.eraseOutput(0)
        body.registerOutput(together.output())
        for index, node in enumerate(graph._constants()):
            self.register_buffer(f"tensor_{index}", node.output().toIValue().detach())
            node.output().replaceAllUsesWith(body.addInput())
            node.destroy()
        body.eraseInput(0)
        self._body, self._kept = body, graph.kept
        self._functions: dict[torch.device, Any] = {}

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """The outputs and the features."""
        device = next(iter(inputs.values())).device
        if device not in self._functions:
            self._functions[device] = _function_on(self._body, device)
        try:
            *outputs, features = self._functions[device](*inputs.values(), *self.buffers())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a trace of the program's source, and in its last line what happened
            raise RuntimeError(str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")) from error
        return outputs, features


def read_program(path: Path) -> ScriptGraph:
    """The TorchScript program in a file.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged, or another kind of file, or has no graph of tensors.
        Untrusted: it calls operators that touch files, or of other libraries.
    """
    with open_regular(path) as stream:
        try:
            kind = sniff(stream)
            kind = sniff_zip(stream) if kind == "zip" else kind
            if kind != "torchscript":
                raise not_a_program("torchscript", kind)
            check_checksums(stream)
            _check_calls(stream)
            stream.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ScriptGraph(torch.jit.load(stream, map_location="cpu"))
        except (DataError, Untrusted) as error:
            raise type(error)(
                f"{quoted(path, limit=300)}: {error.message}", hint=error.hint, code=error.code, path=path
            ) from error
        except (RuntimeError, ValueError, SyntaxError, zipfile.BadZipFile) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = f"{type(error).__name__}: {' '.join(lines)[:120]}"
            raise DataError(
                f"{quoted(path, limit=300)}: the program cannot be read ({why})", code="bad_program", path=path
            ) from error


def _check_calls(stream: IO[bytes]) -> None:
    """Raise Untrusted where the program's text names what touches files, or operators that are not PyTorch's own."""
    found: set[str] = set()
    with zipfile.ZipFile(stream) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+/code/.*\.py", name):
                for node in ast.walk(ast.parse(archive.read(name))):
                    if isinstance(node, ast.Attribute):
                        found |= _calls(node)
    if found:
        raise Untrusted(
            f"the program calls {listed(sorted(found))}: it can reach beyond PyTorch's own operators on tensors",
            code="program",
        )


def _calls(node: ast.Attribute) -> set[str]:
    """The name of an operator that is not to be called; nothing for any other name."""
    name = ast.unparse(node)
    root, _, rest = name.partition(".")
    is_on_files = root in ("torch", "ops") and node.attr in _ON_FILES
    is_foreign = root == "ops" and "." in rest and rest.split(".")[0] not in _NAMESPACES
    return {name} if is_on_files or is_foreign or node.attr.startswith("rpc_") else set()


def _function_on(body: Any, device: torch.device) -> Any:
    """The graph as a function, whose constants that are devices are this one."""
    graph = body.copy()
    for node in graph.findAllNodes("prim::Constant", True):
        if node.output().type().kind() == "DeviceObjType":
            node.s_("value", str(device))
    return torch._C._create_function_from_graph("forward", graph)
