"""PyTorch's operators as steps of a graph, by their names in exported and TorchScript programs: which have a head, and what
may stand behind one."""

from __future__ import annotations

from collections.abc import Sequence

from bnncli.models._graph_head import ADD, AFTER, CONV, LINEAR, POOL, SHAPE, GraphStep

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
# Where features, weight and bias stand among the arguments, and whether the weight is (D, K).
_LINEAR = {"linear": ((0, 1, 2), False), "addmm": ((1, 2, 0), True), "mm": ((0, 1), True), "matmul": ((0, 1), True)}
_WORDS = {
    ADD: ("add", "add_"),
    POOL: (
        "mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d",
        "avg_pool1d", "avg_pool2d", "avg_pool3d",
    ),
    SHAPE: (
        "view", "reshape", "_reshape_alias", "_unsafe_view", "flatten", "squeeze", "squeeze_", "unsqueeze", "contiguous",
        "clone", "alias", "detach", "dropout", "dropout_", "feature_dropout", "to", "_to_copy", "lift_fresh_copy",
        "type_as", "float",
    ),
    AFTER: (
        "softmax", "_softmax", "log_softmax", "_log_softmax", "sigmoid", "mul", "mul_", "div", "div_", "sub", "batch_norm",
        "_native_batch_norm_legit_no_training",
    ),
}  # fmt: skip
_DOES = {name: does for does, names in _WORDS.items() for name in names}


def aten_step(operator: str, output: str, inputs: Sequence[str | None], *, name: str = "") -> GraphStep:
    """The step that an operator such as `addmm` makes of its arguments; None among these for one that is no tensor."""
    if operator in _LINEAR:
        places, is_transposed = _LINEAR[operator]
        picked = tuple(inputs[place] if place < len(inputs) else None for place in places)
        return GraphStep(LINEAR, output, picked, name, is_transposed)
    if operator in _CONVOLUTIONS:
        return GraphStep(CONV, output, tuple(inputs[:3]), name)
    return GraphStep(_DOES.get(operator, ""), output, tuple(inputs), name)
