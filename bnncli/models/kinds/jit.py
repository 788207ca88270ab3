"""`jit:FILE.pt`: a TorchScript program, scripted or traced; it may call only PyTorch's own operators."""

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
from bnncli.models import ModelRequest
from bnncli.models.checkpoint_files import check_checksums, sniff, sniff_zip
from bnncli.models.graphs import GraphFile, GraphStep, convert_aten_operator, wrong_program_error
from bnncli.names import format_names, quote_name
from bnncli.options.declaration import Form
from bnncli.system import signals
from bnncli.system.input_files import open_regular
from bnncli.system.signals import interruptible

# allowed operators
_OPERATOR = re.compile(r"(aten|prim|quantized|_quantized)::(?!(save|from_file|rpc_\w+|PythonOp)$)\w+")
_CALLS_UNKNOWN = {"prim::CallMethod", "prim::CallFunction"}  # calls of objects known only at run time
_CLASSES = {"quantized", "rnn"}  # libraries of C++ classes whose objects a program may hold
_CLASS = re.compile(rb"torch\s*\.\s*classes\s*\.\s*(\w+)|torch[.\n]classes[.\n](\w+)")
_SOURCE_FAULTS = (  # patterns in the source, where names are not followed through variables
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
_LOAD_SECONDS = 60.0  # limit on loading a program that may loop
_LOAD = (  # the alarm ends it if the parent is gone
    "import io, signal, sys; signal.alarm(90); import torch; torch.jit.load(io.BytesIO(sys.stdin.buffer.read()), map_location='cpu')"
)
_MAX_UNPACKED = 1 << 28  # bytes that compressed members may take beyond their own
# index of the argument that sets training mode
_TRAINS_AT = {"dropout": 2, "dropout_": 2, "feature_dropout": 2, "batch_norm": 5}


class ScriptGraph:
    """The graph of a program's forward, with its modules and weights inlined.

    Attributes:
        inputs: names of the input tensors.
        outputs: names of the returned values.
        keys: names of the entries if it returns a mapping; else None.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        """Freeze a program. Raises DataError if that fails, or if inputs or outputs are not tensors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            frozen = torch.jit.freeze(module.eval().float(), optimize_numerics=False)
        self.graph = frozen.graph.copy()
        self.kept = (module, frozen)  # errors refer to their source, and crash if it is freed
        self.inputs = []
        for value in list(self.graph.inputs())[1:]:
            name = re.sub(r"\.\d+$", "", value.debugName())
            if value.type().kind() != "TensorType":
                raise DataError(
                    f"the program's input {quote_name(name)} has type {value.type()}, expected only tensors", code="not_tensors",
                    hint="give the network as Python code with \0model\0 file.py:factory",
                )  # fmt: skip
            self.inputs.append(name)
        self._read_outputs()
        self._refuse_training()

    def _read_outputs(self) -> None:
        """Read what the graph returns: a tensor, or a tuple or mapping of tensors built by its last node."""
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
        """Refuse a program traced in training mode, which cannot leave it."""
        for name, place in _TRAINS_AT.items():
            for node in self.graph.findAllNodes(f"aten::{name}", True):
                if [*node.inputs()][place].toIValue() is True:
                    raise DataError(
                        f"the program was traced in training mode: its {name} is random or depends on the batch", code="in_training",
                        hint="trace the network after network.eval()",
                    )  # fmt: skip

    def steps(self) -> list[GraphStep]:
        """Return the calls of the graph that are not inside branches and loops."""
        found = []
        for node in self.graph.nodes():
            if node.outputsSize():
                tensors = [
                    value.debugName() if value.type().kind() == "TensorType" else None for value in node.inputs()
                ]
                found.append(
                    convert_aten_operator(node.kind().removeprefix("aten::"), node.outputsAt(0).debugName(), tensors)
                )
        return found

    def constant(self, name: str) -> Any:
        """Return the program's own tensor of that name as an array; else None."""
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
    """A graph whose weights are buffers, so that they move like those of any network."""

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
        """Return the outputs and the features."""
        device = next(iter(inputs.values())).device
        if device not in self._functions:
            self._functions[device] = _move_function(self._body, device)
        try:
            *outputs, features = interruptible(
                lambda: self._functions[device](*inputs.values(), *self.buffers()),
                operations=self._operations, device=device, name="the network's program",
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # its last line says what happened, after a trace of the program's source
            raise RuntimeError(str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")) from error
        return outputs, features


def read_program(path: Path) -> ScriptGraph:
    """Read the TorchScript program in a file.

    Raises:
        MissingInput: there is no such file.
        DataError: it is damaged, of another kind, or has no graph of tensors.
        Untrusted: it calls operators that access files or belong to other libraries.
    """
    with open_regular(path) as stream:
        try:
            kind = sniff(stream)
            kind = sniff_zip(stream) if kind == "zip" else kind
            if kind != "torchscript":
                raise wrong_program_error("torchscript", kind)
            check_checksums(stream)
            archive = _check_archive(stream)
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
                f"{quote_name(path, limit=300)}: {error.message}", hint=error.hint, code=error.code, path=path
            ) from error
        except (RuntimeError, ValueError, SyntaxError, zipfile.BadZipFile) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = f"{type(error).__name__}: {' '.join(lines)[:120]}"
            raise DataError(
                f"{quote_name(path, limit=300)}: cannot read the program ({why})", code="bad_program", path=path
            ) from error


def _check_archive(stream: IO[bytes]) -> io.BytesIO:
    """Check a program's source, and return its archive rewritten.

    Raises:
        DataError: names or source are not what torch.jit.save writes.
        Untrusted: the source refers to file or network access, or to operators other than PyTorch's own.
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
    """Check that loading the program runs no loop, or ends when tried in a separate process.

    Raises:
        DataError: it does not end in time.
        Interrupted: a signal arrived.
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
            while process.poll() is None:  # an error there recurs and is reported below
                signals.raise_if_interrupted("loading the network's program")
                if time.monotonic() > end:
                    raise DataError(
                        f"loading the program did not finish in {_LOAD_SECONDS:g} s: its __setstate__ contains a loop",
                        code="bad_program",
                        hint="give the network as Python code with \0model\0 file.py:factory",
                    )
                time.sleep(0.05)
            signals.raise_if_interrupted("loading the network's program")
            if process.returncode < 0:  # killed by a signal
                raise DataError(
                    f"the process loading the program was killed by signal {-process.returncode}", code="bad_program"
                )
        finally:
            process.kill()
            process.wait()


def _source_faults(source: bytes) -> set[str]:
    """Return the forbidden names in a source file.

    Raises:
        ValueError: it is not UTF-8.
        DataError: it declares another encoding; TorchScript always reads UTF-8.
    """
    text = source.decode()
    if re.match(r"(?:[^\n]*\n)?[ \t\f]*#.*?coding[:=]", text):
        raise DataError("its source declares an encoding, expected plain UTF-8", code="bad_program")
    pattern = _WITH_COMMENTS if "#" in text or "\\" in text else _SOURCE_FAULT
    return {re.sub(r"\s", "", fault[0]) for fault in pattern.finditer(text)}


def _check_operators(graph: Any, refused: Iterable[str] = ()) -> None:
    """Raise Untrusted if a graph, or a nested one, calls an operator not known to be limited to tensors."""
    kinds = {node.kind() for node in _nodes(graph)}
    _refuse({kind for kind in kinds if kind in refused or not _OPERATOR.fullmatch(kind)})


def _nodes(block: Any) -> Iterator[Any]:
    """Yield all nodes of a graph or block, including nested ones."""
    for node in block.nodes():
        yield node
        graphs = [node.g(name) for name in node.attributeNames() if node.kindOf(name) == "g"]
        for inner in (*node.blocks(), *graphs):
            yield from _nodes(inner)


def _refuse(found: set[str]) -> None:
    if found:
        raise Untrusted(
            f"the program calls {format_names(sorted(found))}, which can do more than PyTorch's operators on tensors; "
                "it was not run",
            code="program", hint="give the network as Python code with \0model\0 file.py:factory",
        )  # fmt: skip


def _move_function(body: Any, device: torch.device) -> Any:
    """Return the graph as a function on a device, replacing device constants."""
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
        """Build the network. Raises DataError, Untrusted or UsageError if it cannot run or has no head."""
        from bnncli.models.graphs import GraphInput, GraphNetwork, HeadSearch, outputs_in_order

        self.refuse(state)
        path = self.files[0]
        graph = read_program(path)
        search = HeadSearch(str(path), graph.steps(), graph.constant)
        head = search.find(outputs_in_order(graph.outputs, graph.keys), self.feature_node)
        inputs = dict.fromkeys(graph.inputs, GraphInput(None, None))
        return GraphNetwork(ScriptProgram(graph, head.features), inputs, graph.keys, head).eval()


def open_model(place: str, asked: ModelRequest) -> ScriptFile:
    """Open the program in a file. Raises MissingInput if there is no such file."""
    path = Path(place).expanduser()
    with open_regular(path):
        pass
    return ScriptFile((path,), asked.feature_node)
