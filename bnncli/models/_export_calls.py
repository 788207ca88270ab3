"""Calls of an exported program: PyTorch's own operators on named values, made as its file says them.

Operators that draw random numbers or touch files, and anything that is no operator of PyTorch, are refused.

Source: torch/_export/serde/schema.py, version 8.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bnncli.errors import DataError, Untrusted
from bnncli.names import quoted

_FLOAT = torch.float32  # in place of every smaller or larger type of real numbers
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
# Checks of sizes and types, which hold for the sizes and types that the program was exported with.
CHECKS = re.compile(
    r"torch\.ops\.aten\.(_assert\w*|_functional_assert\w*|sym_constrain\w*|_functional_sym_constrain\w*)\.\w+"
)
_OPERATOR = re.compile(r"torch\.ops\.aten\.([a-z_]\w*)\.(\w+)")


class ExportCall:
    """One call of an operator."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        target = node["target"]
        self.operator, self.function = _function(target)
        self.arguments = [(one["name"], *only(one["arg"])) for one in node["inputs"]]
        self.outputs = [only(one) for one in node["outputs"]]
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
        """Names of the tensors that it takes, in the operator's order; None for other arguments."""
        return [value["name"] if kind == "as_tensor" else None for _, kind, value in self.arguments]

    @property
    def uses(self) -> set[str]:
        """Names of all the values that it takes."""
        return {name for _, kind, value in self.arguments for name in names_in(kind, value)}

    def run(self, values: dict[str, Any], device: torch.device) -> None:
        """Makes the call, and puts what it returns among the values."""
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
    """Name and function of an operator that may be called. Raises DataError for any other."""
    if target in _ON_NUMBERS:
        return target.rpartition(".")[2], _ON_NUMBERS[target]
    match = _OPERATOR.fullmatch(target)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    if match is None or not isinstance(packet, torch._ops.OpOverloadPacket) or match[2] not in packet.overloads():
        raise DataError(
            f"the program calls {quoted(target)}; expected only PyTorch's own operators (torch.ops.aten)",
            code="unknown_operator", hint="give the network as Python code with \0model\0 file.py:factory",
        )  # fmt: skip
    function = getattr(packet, match[2])
    if any(argument.name == "filename" for argument in function._schema.arguments):
        raise Untrusted(f"the program calls {quoted(target)}, which reads or writes files", code="program")
    is_dropout = match[1] in ("dropout", "dropout_", "feature_dropout", "native_dropout")
    if torch.Tag.nondeterministic_seeded in function.tags and not is_dropout:
        raise DataError(
            f"the program draws random numbers ({target}), so its features would change from run to run",
            code="in_training",
        )
    return match[1], function


def only(union: Mapping[str, Any]) -> tuple[str, Any]:
    """Kind and content of a value that may be of several kinds."""
    ((kind, content),) = union.items()
    return kind, content


def names_in(kind: str, content: Any) -> set[str]:
    """Names of the values that an argument refers to."""
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
    """What an argument stands for."""
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
    if kind == "as_float":  # which JSON has no word for where it is infinite
        return float(content)
    if kind in ("as_int", "as_bool", "as_string", "as_ints", "as_floats", "as_bools", "as_strings"):
        return content
    raise DataError(f"the program has an argument of kind {kind}, which is not supported", code="unknown_operator")
