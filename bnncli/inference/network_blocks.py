"""What a block of work on a network takes of memory, from measured sizes of the network, in bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.machine.memory import LARGE_BLOCK
from bnncli.theta.module import ModuleLayout

if TYPE_CHECKING:
    from bnncli.network_curvature._uses import Piece
    from bnncli.theta.tensor_bytes import Growth

# Of a process on a CPU: libraries that work loads, their tables, and kernels that it uses for the first time.
_FIRST_USE = 20 * 2**20
# One part in so many of the largest layer is laid out anew where the tensors are at their own peak (LeNet-5).
_LAID_OUT_AT_PEAK = 2
_HOLES = 2  # times what comes back to the layers: one to three (ResNet-20)
_TRIED_VECTORS = 6  # of P numbers, float64, where layers are tried: a Jacobian of two examples twice, and theta
_TRIED_PASSES = 8  # of an example, float32, and its gradient: two examples in float64, twice
_TRIED_PIECES = 8  # of the largest layer's: gradients of two examples, side by side and summed, and their distance


def first_use_bytes(device: torch.device) -> int:
    """Bytes that a process gets on a CPU by working at all, whatever the sizes."""
    return _FIRST_USE if device.type == "cpu" else 0


def with_kernels(work: Growth, layout: ModuleLayout, num_examples: int, device: torch.device) -> int:
    """Bytes of a process that works on a block of examples, of what its tensors take.

    On a CPU convolutions lay out their channels anew, for a while; and where blocks are freed that the C library does not give back,
    holes stay between those in use, in the end about as much again (measured: 70 MiB for 69 of a ResNet-20's factors).
    """
    tensors = work.of(num_examples)
    if device.type != "cpu":
        return tensors
    laid_out = num_examples * layout.laid_out_bytes // _LAID_OUT_AT_PEAK
    return tensors + laid_out + work.holes(num_examples, LARGE_BLOCK)


def gradient_bytes(layout: ModuleLayout, num_pairs: int, device: torch.device, dtype: torch.dtype) -> int:
    """Of a block's gradient, of so many pairs of a draw and an example in all, less the gradient itself.

    In float64 the parameters that do not vary are held in it as long.
    """
    from bnncli.targets.activation_room import pairs_at_once

    count = min(num_pairs, pairs_at_once(layout, device, dtype))
    work = replace(layout.working, fixed=max(0, layout.working.fixed - 4 * layout.num_params))
    beside = 8 * _num_frozen(layout) if dtype == torch.float64 else 0
    return beside + with_kernels(work.times(dtype.itemsize // 4), layout, count, device)


def prediction_bytes(layout: ModuleLayout, num_examples: int, structure: str, device: torch.device) -> int:
    """While the logits' covariances of so many examples are made a layer at a time, beside the posterior.

    The places in which Sigma's blocks lie are tried first, which takes trying_bytes. On a CPU what comes back to the layers lies in
    small blocks, which leave holes.
    """
    from bnncli.logits._by_layer import block_size
    from bnncli.logits._network import is_turned, largest_root

    num_others, root = _num_beside_layers(layout), largest_root(structure, layout)
    count, each = block_size(layout, root, device, num_others)
    if is_turned(structure):
        root = root // _largest_module(layout) * largest_product(layout)
        each = block_size(layout, root, device, num_others)[1]
    holes = _HOLES * layout.num_outputs * layout.own_outputs if device.type == "cpu" else 0
    return 4 * (each + holes) * min(count, num_examples)


def trying_bytes(layout: ModuleLayout) -> int:
    """While it is tried in float64, on two examples, what derivatives the network has, and by which layers they are made.

    The other parameters are held in float64 as long as that takes; beside them a Jacobian, and gradients of the largest module.
    """
    tried = _TRIED_VECTORS * layout.num_params + _TRIED_PIECES * _largest_module(layout)
    return 8 * (_num_frozen(layout) + tried) + _TRIED_PASSES * layout.working.each


def _num_beside_layers(layout: ModuleLayout) -> int:
    """Parameters of theta that are those of no linear layer, convolution or norm, such as attention's own."""
    from bnncli.network_curvature._matrices import matrices_of
    from bnncli.network_curvature._scales import scales_of

    pieces: list[Piece] = [*matrices_of(layout), *scales_of(layout)]
    taken = {part.name for piece in pieces for part in piece.parts}
    return sum(part.place.stop - part.place.start for part in layout.parts if part.name not in taken)


def _num_frozen(layout: ModuleLayout) -> int:
    """Parameters of the network that theta does not have."""
    assert layout.network is not None
    return sum(value.numel() for value in layout.network.module.parameters()) - layout.num_params


def _largest_module(layout: ModuleLayout) -> int:
    """Parameters of the module that has most of the chosen ones."""
    from bnncli.theta.modules import module_places

    return max(place.stop - place.start for place in module_places(layout).values())


def kept_bytes(layout: ModuleLayout, structure: str) -> int:
    """Of an example whose linearised logits are kept, in float32: what goes into a layer that is called once, else derivatives."""
    from bnncli.logits._network import is_turned
    from bnncli.theta.modules import module_places

    once = _called_once(layout) if is_turned(structure) else {}
    sizes = {name: place.stop - place.start for name, place in module_places(layout).items()}
    each = (
        layout.num_outputs * once[name] + size // once[name] if name in once else layout.num_outputs * size
        for name, size in sizes.items()
    )
    return 4 * (layout.num_outputs + sum(each))


def largest_product(layout: ModuleLayout) -> int:
    """Parameters of the largest module that derivatives are made by: linear layers that are called once, at one place, need none."""
    from bnncli.theta.modules import module_places

    once = _called_once(layout)
    return max(
        (place.stop - place.start for name, place in module_places(layout).items() if name not in once), default=0
    )


def _called_once(layout: ModuleLayout) -> dict[str, int]:
    """Outputs of each linear layer that is called once, at one place of an example."""
    shapes = {part.name.rpartition(".")[0]: part.shape for part in layout.parts if len(part.shape) == 2}
    return {name: shape[0] for name, shape in shapes.items() if layout.outputs_of_owners.get(name) == shape[0]}
