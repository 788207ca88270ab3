"""What a block of work on a network takes of memory, from measured sizes of the network, in bytes."""

from __future__ import annotations

from bnncli.lazy import torch
from bnncli.theta.module import ModuleLayout

_FIRST_USE = (
    20 * 2**20
)  # of a process on a CPU: libraries that work loads, their tables, and kernels it uses for the first time
_LAID_OUT_AT_PEAK = (
    2  # one part in so many of the largest layer is laid out anew where the tensors are at their own peak (LeNet-5)
)
_TRIED_VECTORS = 6  # of P numbers, float64, where uses of layers are tried: a Jacobian of two examples twice, and theta
_TRIED_PIECES = 8  # of the largest layer's: gradients of two examples, side by side and summed, and their distance


def first_use_bytes(device: torch.device) -> int:
    """Bytes that a process gets on a CPU by working at all, whatever the sizes."""
    return _FIRST_USE if device.type == "cpu" else 0


def with_kernels(tensors: int, layout: ModuleLayout, num_examples: int, device: torch.device) -> int:
    """Bytes of a process that works on tensors of so many, of a block of examples.

    On a CPU convolutions lay out their channels anew, for a while.
    """
    return tensors if device.type != "cpu" else tensors + num_examples * layout.laid_out_bytes // _LAID_OUT_AT_PEAK


def gradient_bytes(layout: ModuleLayout, num_pairs: int, device: torch.device, dtype: torch.dtype) -> int:
    """Of a block's gradient, of so many pairs of a draw and an example in all."""
    from bnncli.targets.network import activation_bytes_of, pairs_at_once

    count = min(num_pairs, pairs_at_once(layout, device, dtype))
    return with_kernels(count * activation_bytes_of(layout, dtype), layout, count, device)


def prediction_bytes(layout: ModuleLayout, num_examples: int, structure: str, device: torch.device) -> int:
    """While the logits' covariances of so many examples are made a layer at a time, beside the posterior.

    The places in which Sigma's blocks lie are tried in float64 first, on two examples: their Jacobian, and gradients of the
    largest block.
    """
    from bnncli.logits._by_layer import block_size
    from bnncli.logits._network import largest_root
    from bnncli.theta.modules import module_places

    size = layout.num_params
    sizes = [place.stop - place.start for place in module_places(layout).values()]
    count, each = block_size(layout, largest_root(structure, layout), device)
    if makes_no_products(layout, structure):
        each = layout.num_outputs * layout.own_outputs + 2 * layout.widest
    return max(4 * each * min(count, num_examples), 8 * (_TRIED_VECTORS * size + _TRIED_PIECES * max(sizes)))


def makes_no_products(layout: ModuleLayout, structure: str) -> bool:
    """Whether the logits' covariance takes no derivatives by weights: of linear layers that are called once, at one place."""
    from bnncli.logits._network import is_turned

    outputs = [part.shape[0] for part in layout.parts if len(part.shape) == 2]
    return is_turned(structure) and layout.own_outputs == sum(outputs)
