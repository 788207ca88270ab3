"""What an example's activations take, measured on the network: kept for a gradient, and at the peak of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.theta.module_network import ModuleNetwork
    from bnncli.theta.tensor_bytes import Growth

_CHANNELS = {"AVX512": 16}  # that a CPU's convolutions work on at once, float32; 8 on all others
_FEW, _MORE = 2, 6  # examples that are measured: what does not grow with them is not counted


def activation_bytes(network: ModuleNetwork, input_shape: Sequence[int]) -> int:
    """Bytes that a forward pass of one example keeps for its gradient, measured on examples of zeros, float32."""
    more, few = (_kept_bytes(network, input_shape, count) for count in (_MORE, _FEW))
    return max(0, (more - few) // (_MORE - _FEW))


def gradient_growth(network: ModuleNetwork, names: Collection[str], input_shape: Sequence[int]) -> Growth:
    """What a gradient by the parameters of these names takes at its peak, float32: what is kept and what comes back."""
    params = {name: value.detach().float() for name, value in network.module.named_parameters() if name in names}

    def gradient(count: int) -> None:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        with torch.enable_grad():
            logits = network(torch.zeros(count, *input_shape, device=network.device), leaves)
            torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True)

    return _growth(gradient)


def forward_growth(network: ModuleNetwork, input_shape: Sequence[int]) -> Growth:
    """What a forward pass without gradients takes at its peak, the inputs among it, float32."""
    params = {name: value.detach().float() for name, value in network.module.named_parameters()}

    def forward(count: int) -> None:
        with torch.no_grad():
            network(torch.zeros(count, *input_shape, device=network.device), params)

    return _growth(forward)


def laid_out_bytes(network: ModuleNetwork, input_shape: Sequence[int]) -> int:
    """Bytes of the largest output of a convolution that an example has, its channels filled up to eights or sixteens, float32.

    So a CPU's kernels lay it out anew, beside what the tensors take.
    """
    together = _CHANNELS.get(torch.backends.cpu.get_cpu_capability(), 8)
    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    modules = {name: one for name, one in network.module.named_modules() if isinstance(one, convolutions)}
    shapes = _output_shapes(network, modules, input_shape)[1]
    return max((4 * -(-shape[0] // together) * together * math.prod(shape[1:]) for shape in shapes), default=0)


def output_numbers(network: ModuleNetwork, owners: Collection[str], input_shape: Sequence[int]) -> dict[str, int]:
    """Numbers that each module of these names gives of one example, all its calls together."""
    modules = {name: module for name, module in network.module.named_modules() if name in owners}
    found = dict.fromkeys(modules, 0)
    for name, shape in zip(*_output_shapes(network, modules, input_shape), strict=True):
        found[name] += math.prod(shape)
    return found


def _growth(work: Callable[[int], object]) -> Growth:
    from bnncli.theta.tensor_bytes import growth

    work(1)  # what a network keeps from its first call on is no part of it
    return growth(work, _FEW, _MORE)


def _output_shapes(
    network: ModuleNetwork, modules: Mapping[str, Any], input_shape: Sequence[int]
) -> tuple[list[str], list[tuple[int, ...]]]:
    """What the modules give of one example: a name and a shape for each call."""
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []

    def note(name: str, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            names.append(name)
            shapes.append(tuple(output.shape[1:]))

    handles = [module.register_forward_hook(partial(note, name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            params = {name: value.detach().float() for name, value in network.module.named_parameters()}
            network(torch.zeros(1, *input_shape, device=network.device), params)
    finally:
        for handle in handles:
            handle.remove()
    return names, shapes


def _kept_bytes(network: ModuleNetwork, input_shape: Sequence[int], count: int) -> int:
    device = network.device
    inputs = torch.zeros(count, *input_shape, device=device)
    kept: dict[tuple[int, int], int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
        return tensor.detach()  # an output that its own node kept as it is would never be freed

    params = {name: value.detach().float().requires_grad_() for name, value in network.module.named_parameters()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = network(inputs, params)
    return sum(kept.values()) + logits.nbytes
