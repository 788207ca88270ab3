"""`jit:FILE.pt`: a TorchScript program, scripted or traced; it runs if it calls only PyTorch's own operators."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from bnncli.errors import DataError, Untrusted
from bnncli.models import Asked
from bnncli.models.checkpoint_files import check_checksums, sniff, sniff_zip
from bnncli.models.graphs import GraphFile, GraphStep, aten_step, not_a_program
from bnncli.names import listed, quoted
from bnncli.options.declaration import Form
from bnncli.system import signals
from bnncli.system.input_files import open_regular
from bnncli.system.signals import interruptible

_OPERATOR = re.compile(r"(aten|prim|quantized|_quantized)::(?!(save|from_file|rpc_\w+|PythonOp)$)\w+")  # that may run
_CALLS_UNKNOWN = {"prim::CallMethod", "prim::CallFunction"}  # of objects that are known only while it runs
_CLASSES = {"quantized", "rnn"}  # libraries of classes in C++ whose objects a program may hold
_CLASS = re.compile(rb"torch\s*\.\s*classes\s*\.\s*(\w+)|torch[.\n]classes[.\n](\w+)")
_SOURCE_FAULTS = (  # in the text, where names are followed through no variable
    r"(?<![\w.])[\w.]*\.\s*(?:save|from_file)\b",
    r"\brpc_\w+",
    r"(?<![\w.])ops\b(?!\.(?:aten|prim|quantized|_quantized)\.\w)[\w.]*",
    r"\bgetattr\b(?!\(\(*[\w.]+(?:\)\.[\w.]+)*, \"(?!(?:save|from_file)\")[^\"\\]*\"\))",
)
_SOURCE_FAULT = re.compile("|".join(_SOURCE_FAULTS), re.ASCII)
_WITH_COMMENTS = re.compile(
    "|".join((*_SOURCE_FAULTS, r"\b(?:save|from_file)\b")), re.ASCII
)  # or escapes, before a name
_LOOP = re.compile(rb"^\s*(?:while|for)\b", re.MULTILINE)
_LOAD_SECONDS = 60.0  # that loading may take where it may loop
_LOAD = (  # the alarm is for the case that nobody is left to end it
    "import io, signal, sys; signal.alarm(90); import torch; torch.jit.load(io.BytesIO(sys.stdin.buffer.read()), map_location='cpu')"
)
_MAX_UNPACKED = 1 << 28  # bytes that compressed members may take beyond their own
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
                    f"the program's input {quoted(name)} has type {value.type()}, expected only tensors", code="not_tensors",
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
                        f"the program was traced in training mode: its {name} is random or depends on the batch", code="in_training",
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
        self._operations = math.inf if body.findAllNodes("prim::Loop", True) else 0.0

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """The outputs and the features."""
        device = next(iter(inputs.values())).device
        if device not in self._functions:
            self._functions[device] = _function_on(self._body, device)
        try:
            *outputs, features = interruptible(
                lambda: self._functions[device](*inputs.values(), *self.buffers()),
                operations=self._operations, device=device, name="the network's program",
            )  # fmt: skip
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
            archive = _checked_archive(stream)
            _check_loading_ends(archive)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = torch.jit.load(archive, map_location="cpu")
                for part in module.modules():
                    for name in part._c._method_names():
                        _check_operators(part._c._get_method(name).inlined_graph)
                program = ScriptGraph(module)
                _check_operators(program.graph, _CALLS_UNKNOWN)
                return program
        except (DataError, Untrusted) as error:
            raise type(error)(
                f"{quoted(path, limit=300)}: {error.message}", hint=error.hint, code=error.code, path=path
            ) from error
        except (RuntimeError, ValueError, SyntaxError, zipfile.BadZipFile) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = f"{type(error).__name__}: {' '.join(lines)[:120]}"
            raise DataError(
                f"{quoted(path, limit=300)}: cannot read the program ({why})", code="bad_program", path=path
            ) from error


def _checked_archive(stream: IO[bytes]) -> io.BytesIO:
    """Return the program's archive, written anew after its source has been checked.

    Raises:
        DataError: its names or its source are not what torch.jit.save writes.
        Untrusted: its source names what touches files or the network, or operators that are not PyTorch's own.
    """
    checked = io.BytesIO()
    found: set[str] = set()
    with zipfile.ZipFile(stream) as archive, zipfile.ZipFile(checked, "w") as copy:
        names = [name.lower() for name in archive.namelist()]
        if len({*names}) < len(names) or any(name.endswith("/model.json") for name in names):
            raise DataError(
                "expected an archive written by torch.jit.save; found duplicate members or the 2018 format",
                code="bad_program", hint="save the program again with torch.jit.save",
            )  # fmt: skip
        unpacked = sum(member.file_size - member.compress_size for member in archive.infolist())
        if unpacked > _MAX_UNPACKED:
            raise DataError(
                f"its members unpack to {unpacked / 1e6:,.0f} MB more than the archive; torch.jit.save "
                "compresses only source code",
                code="bad_program",
            )
        for member in archive.infolist():
            content = archive.read(member)
            kind = member.filename.lower().rpartition(".")[2]
            if kind == "py":
                found |= _source_faults(content)
            if kind in ("py", "pkl"):
                classes = {(one or other).decode() for one, other in _CLASS.findall(content)}
                found |= {f"torch.classes.{name}" for name in classes - _CLASSES}
            copy.writestr(member.filename, content)
    _refuse(found)
    checked.seek(0)
    return checked


def _check_loading_ends(archive: io.BytesIO) -> None:
    """Pass where loading the program runs no loop, or ends in a process of its own.

    Raises:
        DataError: it does not end in time.
        Interrupted: a signal has come.
    """
    with zipfile.ZipFile(archive) as members:
        sources = b"".join(members.read(name) for name in members.namelist() if name.lower().endswith(".py"))
    archive.seek(0)
    if b"__setstate__" not in sources or not _LOOP.search(sources):
        return
    with tempfile.TemporaryFile() as copy:
        copy.write(archive.getbuffer())
        copy.seek(0)
        words = [sys.executable, "-W", "ignore", "-c", _LOAD]
        process = subprocess.Popen(words, stdin=copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + _LOAD_SECONDS
        try:
            while process.poll() is None:  # an error there comes again here, and is reported then
                signals.raise_if_interrupted("loading the network's program")
                if time.monotonic() > end:
                    raise DataError(
                        f"loading the program did not finish in {_LOAD_SECONDS:g} s: its __setstate__ contains a loop",
                        code="bad_program",
                        hint="give the network as Python code with \0model\0 file.py:factory",
                    )
                time.sleep(0.05)
            signals.raise_if_interrupted("loading the network's program")
            if process.returncode < 0:  # and not by itself
                raise DataError(
                    f"the process loading the program was killed by signal {-process.returncode}", code="bad_program"
                )
        finally:
            process.kill()
            process.wait()


def _source_faults(source: bytes) -> set[str]:
    """Return what a file of source names that is not to be called.

    Raises:
        ValueError: it is not UTF-8.
        DataError: it declares another encoding: TorchScript reads UTF-8 whatever a source says.
    """
    text = source.decode()
    if re.match(r"(?:[^\n]*\n)?[ \t\f]*#.*?coding[:=]", text):
        raise DataError("its source declares an encoding, expected plain UTF-8", code="bad_program")
    pattern = _WITH_COMMENTS if "#" in text or "\\" in text else _SOURCE_FAULT
    return {re.sub(r"\s", "", fault[0]) for fault in pattern.finditer(text)}


def _check_operators(graph: Any, refused: Iterable[str] = ()) -> None:
    """Raise Untrusted where a graph, or one inside it, calls an operator that is not known to keep to tensors."""
    kinds = {node.kind() for node in _nodes(graph)}
    _refuse({kind for kind in kinds if kind in refused or not _OPERATOR.fullmatch(kind)})


def _nodes(block: Any) -> Iterator[Any]:
    """Yield all nodes of a graph or block, with those inside them."""
    for node in block.nodes():
        yield node
        graphs = [node.g(name) for name in node.attributeNames() if node.kindOf(name) == "g"]
        for inner in (*node.blocks(), *graphs):
            yield from _nodes(inner)


def _refuse(found: set[str]) -> None:
    if found:
        raise Untrusted(
            f"the program calls {listed(sorted(found))}, which can do more than PyTorch's operators on tensors; "
                "it was not run",
            code="program", hint="give the network as Python code with \0model\0 file.py:factory",
        )  # fmt: skip


def _function_on(body: Any, device: torch.device) -> Any:
    """The graph as a function, whose constants that are devices are this one."""
    graph = body.copy()
    for node in graph.findAllNodes("prim::Constant", True):
        if node.output().type().kind() == "DeviceObjType":
            node.s_("value", str(device))
    return torch._C._create_function_from_graph("forward", graph)


FORM = Form("jit:FILE.pt", 60, "A TorchScript program.")
EXTRA: str | None = None
TAKES = ("feature_node",)


class ScriptFile(GraphFile):
    """A TorchScript program in a file."""

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """The program as a network. Raises DataError, Untrusted, UsageError: it cannot be run, or has no head."""
        from bnncli.models.graphs import GraphInput, GraphNetwork, HeadSearch, outputs_in_order

        self.refuse(state)
        path = self.files[0]
        graph = read_program(path)
        search = HeadSearch(str(path), graph.steps(), graph.constant)
        head = search.find(outputs_in_order(graph.outputs, graph.keys), self.feature_node)
        inputs = dict.fromkeys(graph.inputs, GraphInput(None, None))
        return GraphNetwork(ScriptProgram(graph, head.features), inputs, graph.keys, head).eval()


def open_model(place: str, asked: Asked) -> ScriptFile:
    """The program in a file. Raises MissingInput: there is no such file."""
    path = Path(place).expanduser()
    with open_regular(path):
        pass
    return ScriptFile((path,), asked.feature_node)
