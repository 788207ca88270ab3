"""ONNX graphs, run by onnxruntime: features come out as one more output of the same pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, external_data_helper, numpy_helper
from torch import Tensor, nn

from bnncli.errors import DataError, DeviceError
from bnncli.models.graphs import ADD, AFTER, CONV, LINEAR, POOL, SHAPE, GraphInput, GraphStep
from bnncli.names import quote_name
from bnncli.system.devices import available_memory

# Largest difference that rounding explains, of each number and in units of 1 + the largest.
RELATIVE, ABSOLUTE = 1e-3, 1e-6
_OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
}
_OF_ALL: dict[str, Callable[[Tensor, int], Tensor]] = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}


class TailStep(NamedTuple):
    """A step after a head.

    Attributes:
        does: as GraphStep.does.
        operator: such as Softmax.
        inputs: constants in order; None for what comes from the head.
        attributes: of the node.
    """

    does: str
    operator: str
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any]


class Tail(nn.Module):
    """The steps between the logits (n, K) and an output of the graph."""

    def __init__(self, steps: Sequence[TailStep]) -> None:
        super().__init__()
        self._steps = steps

    def forward(self, logits: Tensor, output: Tensor) -> Tensor:
        """Apply the steps to the logits, if that reproduces the output; otherwise return the output itself."""
        if not any(step.does not in (SHAPE, POOL) for step in self._steps) or logits.numel() != output.numel():
            return output
        found: Tensor | None = logits
        for step in self._steps:
            found = None if found is None else _done(step, found)
        if found is None:
            return output
        found = found.reshape(output.shape)
        allowed = ABSOLUTE * (1 + output.abs().max()) + RELATIVE * output.abs()
        return found if bool(((found - output).abs() <= allowed).all()) else output


def _done(step: TailStep, logits: Tensor) -> Tensor | None:
    """Apply a step to logits (n, K); None if unsupported."""
    if step.does in (SHAPE, POOL):
        return logits
    if step.operator == "Sigmoid":
        return logits.sigmoid()
    if step.operator in _OF_ALL:
        return _OF_ALL[step.operator](logits, 1) if step.attributes.get("axis", -1) in (1, -1) else None
    arrays = [None if array is None else torch.from_numpy(np.array(array)).to(logits) for array in step.inputs]
    if step.operator in _OF_TWO and len(arrays) == 2:
        first, second = (logits if array is None else _as_row(array, logits.shape[1]) for array in arrays)
        return None if first is None or second is None else _OF_TWO[step.operator](first, second)
    if step.operator == "BatchNormalization":
        scale, shift, mean, variance = (array for array in arrays[1:5])
        if scale is None or shift is None or mean is None or variance is None:
            return None
        return (logits - mean) / (variance + step.attributes.get("epsilon", 1e-5)).sqrt() * scale + shift
    return None


def _as_row(array: Tensor, num_outputs: int) -> Tensor | None:
    """Return a constant as one value for all logits or one per logit; None for other shapes."""
    return array.reshape(-1) if array.numel() in (1, num_outputs) else None


_DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16, TensorProto.DOUBLE: torch.float64,
    TensorProto.INT32: torch.int32, TensorProto.INT64: torch.int64, TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8, TensorProto.BOOL: torch.bool,
}  # fmt: skip
_WORDS = {
    "Add": ADD, "Conv": CONV, "Gemm": LINEAR, "MatMul": LINEAR,
    **dict.fromkeys(("GlobalAveragePool", "AveragePool", "ReduceMean"), POOL),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast", "Dropout"), SHAPE),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Sigmoid", "Mul", "Div", "Sub", "BatchNormalization"), AFTER),
}  # fmt: skip
_RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
_FOLDER_OF_TENSORS = "session.model_external_initializers_file_folder_path"


class OnnxGraph:
    """An ONNX file: its nodes, inputs, outputs and tensors.

    Attributes:
        model: without the tensors in external files.
        inputs: by name.
        outputs: names of the returned values.
    """

    def __init__(self, path: Path) -> None:
        """Read a file. Raises DataError if it is damaged, or inputs or outputs are not tensors."""
        try:
            self.model = onnx.load(path, load_external_data=False)
        except Exception as error:  # protobuf's errors have no common base
            raise DataError(
                f"{quote_name(path, limit=300)} is not an ONNX graph, or is damaged", code="not_onnx", path=path
            ) from error
        self.path, graph = path, self.model.graph
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: node for node in graph.node for name in node.output if name}
        taken = [value for value in graph.input if value.name not in self._stored]
        self.inputs = {value.name: self._input(value) for value in taken}
        self.outputs = [value.name for value in graph.output]
        self._known: dict[str, np.ndarray | None] = {}
        random = [node.op_type for node in graph.node if node.op_type in _RANDOM]
        if random:
            raise self._error(
                f"the graph draws random numbers ({random[0]}), so its features would change from run to run",
                "in_training",
            )

    def steps(self) -> list[GraphStep]:
        """Return the nodes of the graph that are not inside branches and loops."""
        return [self._step(self._named(node)) for node in self.model.graph.node if node.output]

    def constant(self, name: str) -> np.ndarray | None:
        """Return the value of that name; None if it depends on the inputs."""
        if name not in self._known:
            self._known[name] = None
            if name in self._stored:
                self._known[name] = self._array(self._stored[name])
            elif (node := self._makers.get(name)) is not None:
                values = {one: self.constant(one) for one in node.input if one}
                if node.op_type == "Constant" or (values and all(value is not None for value in values.values())):
                    self._known[name] = self._evaluated(node, name, values)
        return self._known[name]

    def tail(self, values: Sequence[str]) -> Tail:
        """Return the steps after the head that give these values."""
        steps = []
        for node in (self._named(self._makers[value]) for value in values):
            arrays = [None if name == "" else self.constant(name) for name in node.input]
            steps.append(TailStep(_WORDS[node.op_type], node.op_type, arrays, _attributes(node)))
        return Tail(steps)

    def _named(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Return a softmax or log-softmax for the last node of an expanded one; else the node itself.

        As written by jax2tf and tf2onnx: exp(x - max) over its sum, and x - max minus the logarithm of that sum.
        """
        if node.op_type not in ("Div", "Sub"):
            return node
        first, second = self._maker_of(node, 0), self._maker_of(node, 1)
        if first is None or second is None:
            return node
        shifted: Any
        total: Any
        if node.op_type == "Div" and first.op_type == "Exp":
            operator, shifted, total = "Softmax", self._maker_of(first, 0), second
        elif node.op_type == "Sub" and first.op_type == "Sub" and second.op_type == "Log":
            operator, shifted, total = "LogSoftmax", first, self._maker_of(second, 0)
        else:
            return node
        if shifted is None or shifted.op_type != "Sub" or total is None or total.op_type != "ReduceSum":
            return node
        exponential, most = self._maker_of(total, 0), self._maker_of(shifted, 1)
        if most is not None and most.op_type == "Max":  # of minus infinity and the largest
            parts = [self._maker_of(most, place) for place in range(len(most.input))]
            most = next((one for one in parts if one is not None and one.op_type == "ReduceMax"), None)
        if exponential is None or exponential.op_type != "Exp" or most is None or most.op_type != "ReduceMax":
            return node
        axes = {self._axis(one) for one in (total, most)}
        own, top = self._way_to(shifted.input[0]), self._way_to(most.input[0])
        is_one = (
            self._maker_of(exponential, 0) is shifted
            and (operator != "Softmax" or exponential is first)
            and own == top
            and len(axes) == 1
            and None not in axes
        )
        if not is_one:
            return node
        return onnx.helper.make_node(operator, [shifted.input[0]], [node.output[0]], name=node.name, axis=axes.pop())

    def _way_to(self, name: str) -> str:
        """Return the value that a name is a copy of."""
        while (node := self._makers.get(name)) is not None and node.op_type == "Identity":
            name = node.input[0]
        return name

    def _maker_of(self, node: onnx.NodeProto, place: int) -> onnx.NodeProto | None:
        """Return the node that gives an input of another, or None."""
        return self._makers.get(self._way_to(node.input[place]))

    def _axis(self, node: onnx.NodeProto) -> int | None:
        """Return the single axis that a reduction reduces and keeps; else None."""
        own = _attributes(node)
        axes = own.get("axes")
        if axes is None and len(node.input) > 1 and node.input[1]:
            axes = self.constant(node.input[1])
        if axes is None or np.size(axes) != 1 or own.get("keepdims", 1) != 1:
            return None
        return int(np.reshape(axes, -1)[0])

    def _step(self, node: onnx.NodeProto) -> GraphStep:
        does, inputs = _WORDS.get(node.op_type, ""), tuple(name or None for name in node.input)
        own = _attributes(node)
        is_scaled = (
            own.get("alpha", 1) != 1 or own.get("beta", 1) != 1 or own.get("transA", 0) or own.get("group", 1) != 1
        )
        if node.op_type in ("Gemm", "Conv") and is_scaled:
            does = ""
        is_transposed = does == LINEAR and not own.get("transB", 0)
        return GraphStep(does, node.output[0], inputs, node.name, is_transposed)

    def _input(self, value: onnx.ValueInfoProto) -> GraphInput:
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or kind.elem_type not in _DTYPES:
            what = onnx.helper.printable_type(value.type)
            raise self._error(
                f"the graph's input {quote_name(value.name)} is {what}, expected a numeric tensor", "not_tensors"
            )
        sizes = [
            size.dim_value if size.HasField("dim_value") and size.dim_value > 0 else None for size in kind.shape.dim
        ]
        return GraphInput(_DTYPES[kind.elem_type], tuple(sizes) if kind.HasField("shape") else None)

    def _array(self, tensor: onnx.TensorProto) -> np.ndarray:
        whole = onnx.TensorProto()
        whole.CopyFrom(tensor)
        try:
            if external_data_helper.uses_external_data(whole):
                external_data_helper.load_external_data_for_tensor(whole, str(self.path.parent))
            return numpy_helper.to_array(whole)
        # an external file is shorter than expected
        except (ValueError, TypeError, onnx.checker.ValidationError) as error:
            raise self._error(
                f"its tensor {quote_name(tensor.name)} is incomplete; copy the graph's files again", "truncated"
            ) from error

    def _evaluated(self, node: onnx.NodeProto, name: str, values: Mapping[str, Any]) -> np.ndarray:
        """Evaluate one output of a node with known inputs."""
        tensors = [numpy_helper.from_array(value, one) for one, value in values.items()]
        graph = onnx.helper.make_graph([node], "constant", [], [onnx.ValueInfoProto(name=name)], tensors)
        model = onnx.helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        self._require_memory(model, name)
        session = _session(model.SerializeToString(), self.path, is_on_gpu=False)
        try:
            (array,) = session.run([name], {})
        except Exception as error:  # onnxruntime's errors have no common base
            why = " ".join(str(error).split())[:200]
            raise self._error(f"cannot compute its constant {quote_name(name)}: {why}", "bad_program") from error
        return np.asarray(array)

    def _require_memory(self, model: onnx.ModelProto, name: str) -> None:
        """Raise DeviceError if a constant would exceed the free memory, as far as its shape can be inferred."""
        try:
            (value,) = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output
            sizes = [size.dim_value for size in value.type.tensor_type.shape.dim]
            item = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).itemsize
        except Exception:  # an unknown node; onnxruntime decides
            return
        num_bytes, free = math.prod(sizes) * item, available_memory("cpu")
        if num_bytes > free:
            raise DeviceError(
                f"{quote_name(self.path, limit=300)}: its constant {quote_name(name)} needs {num_bytes >> 20} MiB, but "
                    f"only {free >> 20} MiB of memory are free",
                code="out_of_memory", hint="export the network again with constant folding", path=self.path,
            )  # fmt: skip

    def _error(self, message: str, code: str) -> DataError:
        return DataError(f"{quote_name(self.path, limit=300)}: {message}", code=code, path=self.path)


class OnnxProgram(nn.Module):
    """An onnxruntime session, on the device of the inputs if onnxruntime supports it.

    Args:
        features: name of their value.
        digest: of the graph's files; identifies the network, whose tensors are not PyTorch's.
    """

    def __init__(self, graph: OnnxGraph, features: str, *, digest: str) -> None:
        super().__init__()
        self._features, self._inputs, self._outputs, self._path = features, [*graph.inputs], graph.outputs, graph.path
        if features not in graph.outputs and features not in graph.inputs:
            graph.model.graph.output.append(onnx.ValueInfoProto(name=features))
        self._model = graph.model.SerializeToString()
        self.register_buffer("digest", torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8))
        self._sessions: dict[bool, Any] = {}
        self._number = next(_NUMBERS)
        _PROGRAMS[self._number] = self

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the outputs and the features, floats as float32."""
        wanted = [*self._outputs, *([] if self._features in (*self._outputs, *inputs) else [self._features])]
        found = _operator()([*inputs.values()], self._number, wanted)
        values = dict(zip(wanted, found, strict=True))
        return [values[name] for name in self._outputs], {**inputs, **values}[self._features]

    def run(self, inputs: Sequence[Tensor], wanted: Sequence[str]) -> list[Tensor]:
        """Return values by name, for inputs in the graph's order."""
        device = inputs[0].device
        is_on_gpu = device.type == "cuda"
        if is_on_gpu not in self._sessions:
            self._sessions[is_on_gpu] = _session(self._model, self._path, is_on_gpu=is_on_gpu)
        given = {name: tensor.cpu().numpy() for name, tensor in zip(self._inputs, inputs, strict=True)}
        try:
            found = self._sessions[is_on_gpu].run(wanted, given)
        except Exception as error:  # onnxruntime's errors have no common base
            raise RuntimeError(f"onnxruntime: {' '.join(str(error).split())[:200]}") from error
        return [_tensor(array, name).to(device) for name, array in zip(wanted, found, strict=True)]


_NUMBERS = count()
_PROGRAMS: WeakValueDictionary[int, OnnxProgram] = WeakValueDictionary()


@cache
def _operator() -> Any:
    """Register a session as a PyTorch operator, so that tracers see the dependence of outputs on inputs."""

    def run(inputs: list[Tensor], number: int, wanted: list[str]) -> list[Tensor]:
        return _PROGRAMS[number].run(inputs, wanted)

    schema = "(Tensor[] inputs, int number, str[] wanted) -> Tensor[]"
    return torch.library.custom_op("bnncli::onnx", run, mutates_args=(), schema=schema)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


def keys_of(outputs: Sequence[str]) -> list[str] | None:
    """Return the names of the outputs if there are several."""
    return list(outputs) if len(outputs) > 1 else None


def _tensor(array: Any, name: str) -> Tensor:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        raise DataError(f"the graph's output {quote_name(name)} is not a numeric tensor", code="no_logits")
    tensor = torch.from_numpy(array)
    return tensor.float() if tensor.is_floating_point() else tensor


def _session(model: bytes, path: Path, *, is_on_gpu: bool) -> Any:
    """Create a session for a graph. Raises DataError if onnxruntime cannot run it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only, which are raised as well
    options.add_session_config_entry(_FOLDER_OF_TENSORS, str(path.parent.resolve()))
    providers = ["CPUExecutionProvider"]
    if is_on_gpu and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        providers.insert(0, "CUDAExecutionProvider")
    try:
        # a fallback would be printed
        return onnxruntime.InferenceSession(model, options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's errors have no common base
        why = " ".join(str(error).split())[:200]
        raise DataError(
            f"{quote_name(path, limit=300)}: onnxruntime cannot run the graph: {why}", code="bad_program", path=path
        ) from error
