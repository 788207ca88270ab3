"""Serialise modules as graphs: ONNX and torch exported programs."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bnncli.data.splits import Inputs
from bnncli.errors import DataError
from bnncli.export.steps import OUTPUTS, Values
from bnncli.system.memory import bytes_text

FEATURES, INPUTS = "features", "inputs"  # input names in a file
MOST_ONNX_BYTES = 2**31 - 2**20  # limit of a protocol buffer, less room for metadata
_OF_THE_MACHINE = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")


@dataclass(frozen=True)
class ExportedModel:
    """A module as written to a file.

    Attributes:
        content: of the file; empty if the tensors themselves are stored.
        runtime: that runs it.
        run: maps inputs (B, ...), or several by name, to named outputs with that runtime on the CPU.
    """

    content: bytes
    runtime: str
    run: Callable[[Inputs], Values]


def export_program(module: nn.Module, example: Inputs, *, input_name: str) -> ExportedModel:
    """Export the module with torch.export for any batch size; it runs in torch.

    Args:
        example: inputs (B, ...), B at least 2. Several inputs by name keep their names; token IDs may have any length.
        input_name: of a single input.

    Raises:
        DataError: torch cannot trace the module.
    """
    program, stream = _trace_program(module, example, input_name), io.BytesIO()
    torch.export.save(program, stream)
    loaded = torch.export.load(io.BytesIO(stream.getvalue())).module()

    def run(inputs: Inputs) -> Values:
        with torch.no_grad():
            outputs: Values = loaded(**inputs) if isinstance(inputs, dict) else loaded(inputs)
        return outputs

    return ExportedModel(stream.getvalue(), "torch", run)


def export_onnx(module: nn.Module, example: Inputs, *, input_name: str, threads: int | None = None) -> ExportedModel:
    """Export the module to ONNX for any batch size; it runs in onnxruntime.

    Args:
        example, input_name: see to_program.
        threads: of onnxruntime; None for all cores.

    Raises:
        DataError: torch cannot trace the module, ONNX lacks an operator, or the graph is too large.
    """
    program = _trace_program(module, example, input_name)
    input_names = [*example] if isinstance(example, dict) else [input_name]
    with torch.no_grad():
        outputs = module(example)
        names = [name for name in OUTPUTS if name in outputs]
    try:
        with _ExporterSilence():
            made: Any = torch.onnx.export(
                program, dynamo=True, optimize=True, verbose=False, input_names=input_names, output_names=names
            )
    except Exception as error:  # the exporter may raise anything on foreign code
        raise _export_error("ONNX", error) from error
    _name_batch(made.model)
    num_bytes = sum(value.const_value.nbytes for value in made.model.graph.initializers.values())
    if num_bytes > MOST_ONNX_BYTES:
        raise DataError(
            f"the graph has {bytes_text(num_bytes)}, but one ONNX file holds at most {bytes_text(MOST_ONNX_BYTES)}",
            hint="use fewer \0draws\0 or \0dtype\0 float16, or export with \0head_only\0",
            code="too_large",
        )
    content = made.model_proto.SerializeToString(deterministic=True)
    return ExportedModel(content, "onnxruntime", _session(content, input_names, names, threads))


def _session(
    content: bytes, input_names: list[str], names: list[str], threads: int | None
) -> Callable[[Inputs], Values]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> Values:
        given = inputs if isinstance(inputs, dict) else {input_names[0]: inputs}
        outputs = session.run(names, {name: tensor.numpy() for name, tensor in given.items()})
        return {name: torch.from_numpy(output) for name, output in zip(names, outputs, strict=True)}

    return run


def _trace_program(module: nn.Module, example: Inputs, input_name: str) -> torch.export.ExportedProgram:
    """Return the program with named inputs and without traces of this machine."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim.DYNAMIC
    keywords = example if isinstance(example, dict) else None
    arguments = () if isinstance(example, dict) else (example,)
    sizes: Any = ({0: batch},)
    if keywords is not None:
        sizes = {
            name: {0: batch, one.ndim - 1: length} if has_length(one) else {0: batch} for name, one in keywords.items()
        }
    try:
        with torch.no_grad(), _ExporterSilence():
            named = _wrap_named_inputs(module, input_name, list(keywords or ()))
            program = torch.export.export(named.eval(), arguments, keywords, dynamic_shapes=sizes, strict=False)
    except Exception as error:  # foreign code may raise anything
        raise _export_error("torch.export", error) from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            for name in _OF_THE_MACHINE:
                node.meta.pop(name, None)
    return program


class _FeatureModule(nn.Module):
    """A module whose argument has the name of the file's input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Values:
        outputs: Values = self.model(features)
        return outputs


class _InputModule(_FeatureModule):
    """A module for a network's inputs whose argument has the name of the file's input."""

    def forward(self, inputs: Tensor) -> Values:
        outputs: Values = self.model(inputs)
        return outputs


class _NamedInputModule(nn.Module):
    """A module for inputs by name. torch.export needs a signature with the names."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model

        def forward(**inputs: Tensor) -> Values:
            outputs: Values = model(inputs)
            return outputs

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _wrap_named_inputs(module: nn.Module, input_name: str, names: Sequence[str]) -> nn.Module:
    """Wrap the module so that its inputs have these names."""
    if names:
        return _NamedInputModule(module, names)
    return _FeatureModule(module) if input_name == FEATURES else _InputModule(module)


def has_length(one: Tensor) -> bool:
    """Return whether a named input may have any length: token IDs of texts or pairs, and the tensors that accompany them."""
    return one.ndim in (2, 3) and not one.is_floating_point()


def _name_batch(model: Any) -> None:
    """Name the dynamic axes of inputs and outputs `batch` and `sequence`, and remove source metadata of the exporter."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        sizes = [size if isinstance(size, int) else "sequence" for size in list(value.shape)[1:]]
        value.shape = type(value.shape)(["batch", *sizes])
        value.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name, model.producer_version = "bnncli", None


def _export_error(what: str, error: Exception) -> DataError:
    why = " ".join(str(error).split())[:200]
    return DataError(
        f"{what} cannot export the network: {type(error).__name__}: {why}",
        hint="export only the head: \0head_only\0",
        code="not_exportable",
    )


class _ExporterSilence:
    """Silence exporter messages, which users cannot act on."""

    def __enter__(self) -> None:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")
        self._disabled = logging.root.manager.disable
        logging.disable(logging.ERROR)

    def __exit__(self, *error: object) -> None:
        logging.disable(self._disabled)
        self._caught.__exit__(None, None, None)
