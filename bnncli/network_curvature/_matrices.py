"""The weights of a network that multiply as matrices, and what goes into and comes back to them.

A linear layer, or a convolution on patches of its input, makes y = W x + b at each of T positions of an example. Its gradient is
sum_t g_t (x_t, 1)^T, g the gradient at y: all that Kronecker factors are made of (Grosse and Martens 2016, arXiv:1602.01407).
Both are noted by hooks during a forward pass. Which weights are so used is tried: a weight whose gradient, as autograd has
it, is not that sum (grouped convolutions, tied weights, weights that another module reads) is no matrix here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.lazy import torch
from bnncli.theta.layout import ParamPart

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.theta.module import ModuleLayout

_PROBES = 2  # examples that a weight's gradient is tried on
_TOLERANCE = 1e-6  # in float64, relative to the largest


@dataclass(frozen=True)
class Matrix:
    """A weight (K, D) with its bias, used by one module.

    Args:
        module: its name.
        parts: of theta: the weight, and the bias directly behind it, where both are chosen.
    """

    module: str
    parts: tuple[ParamPart, ...]

    @property
    def name(self) -> str:
        """The weight's."""
        return self.parts[0].name

    @property
    def has_bias(self) -> bool:
        """Whether the bias is with it."""
        return len(self.parts) > 1

    @property
    def num_outputs(self) -> int:
        """K."""
        return self.parts[0].shape[0]

    @property
    def num_columns(self) -> int:
        """F: D, and one for the bias."""
        place = self.place
        return (place.stop - place.start) // self.num_outputs

    @property
    def place(self) -> slice:
        """In theta."""
        return slice(self.parts[0].place.start, self.parts[-1].place.stop)


class Use(NamedTuple):
    """One call of a module.

    Args:
        module: whose weight is the matrix.
        has_bias: whether the bias is with it.
        inputs: as it was given them, (n, ...).
        edge: where the gradient by its output comes back.
    """

    module: Any
    has_bias: bool
    inputs: Tensor
    edge: Any

    def columns(self) -> Tensor:
        """What the matrix multiplies, (n, F, T): the inputs' features or patches, and ones for the bias."""
        columns = _columns(self.module, self.inputs)
        if not self.has_bias:
            return columns
        return torch.cat([columns, columns.new_ones(len(columns), 1, columns.shape[2])], dim=1)

    def outputs(self, gradient: Tensor) -> Tensor:
        """The gradient by the output as (n, K, T)."""
        return gradient.flatten(2) if gradient.ndim == 4 and _is_convolution(self.module) else _features_first(gradient)


Uses = dict[str, list[Use]]  # by the names of matrices


def matrices_of(layout: ModuleLayout) -> list[Matrix]:
    """The weights that look like matrices, in theta's order: of linear layers and plain convolutions, each with one name."""
    nn, network = torch.nn, layout.network
    assert network is not None
    names: dict[int, int] = {}
    for _, value in network.module.named_parameters(remove_duplicate=False):
        names[id(value)] = names.get(id(value), 0) + 1
    modules = dict(network.module.named_modules())
    found = []
    for index, part in enumerate(layout.parts):
        name, _, last = part.name.rpartition(".")
        module = modules.get(name)
        is_matrix = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        if last != "weight" or not is_matrix or module is None or names[id(module.weight)] > 1:
            continue
        after = layout.parts[index + 1 : index + 2]
        bias = [
            one for one in after if one.name.rpartition(".") == (name, part.name[len(name)] if name else "", "bias")
        ]
        found.append(Matrix(name, (part, *bias)))
    return found


def forward(layout: ModuleLayout, theta: Tensor, inputs: Tensor, matrices: Sequence[Matrix]) -> tuple[Tensor, Uses]:
    """Logits (n, K) of inputs (n, ...) under theta (P,), with a graph that reaches each matrix, and their uses."""
    network = layout.network
    assert network is not None
    modules = dict(network.module.named_modules())
    uses: Uses = {matrix.name: [] for matrix in matrices}
    handles = [
        modules[matrix.module].register_forward_hook(_noting(uses[matrix.name], matrix), with_kwargs=True)
        for matrix in matrices
    ]
    try:
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            logits = layout.logits(inputs, leaf.unsqueeze(0))[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits, uses


def gradients(logits: Tensor, uses: Uses, cotangent: Tensor, *, keep: bool) -> dict[str, list[Tensor]]:
    """The gradients (n, K, T) by the outputs of each use, of the sum of cotangent (n, K) times logits.

    Args:
        keep: whether another one of the same logits follows.
    """
    edges = [use.edge for of in uses.values() for use in of]
    found = iter(torch.autograd.grad(logits, edges, cotangent, retain_graph=keep, materialize_grads=True))
    return {name: [use.outputs(next(found)) for use in of] for name, of in uses.items()}


def used_as_matrices(layout: ModuleLayout, theta: Tensor, inputs: Tensor) -> list[Matrix]:
    """Those of matrices_of whose gradients at theta (P,), on the first of inputs (n, ...), are the sum over positions."""
    candidates = matrices_of(layout)
    if not candidates:
        return []
    inputs, theta = inputs[:_PROBES], theta.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    logits, uses = forward(layout, theta, inputs, candidates)
    uses = {name: of for name, of in uses.items() if of and all(len(use.inputs) == len(inputs) for use in of)}
    if not uses:
        return []
    cotangent = torch.linspace(1, 2, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits)
    cotangent = cotangent * torch.arange(logits.shape[1], device=logits.device).sin()
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        again = layout.logits(inputs, leaf.unsqueeze(0))[0]
        sums = (again * cotangent).sum(dim=1)
        expected = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in sums]
    back = gradients(logits, uses, cotangent, keep=False)
    found = []
    for matrix in candidates:
        if matrix.name not in uses:
            continue
        pairs = zip(uses[matrix.name], back[matrix.name], strict=True)
        own = torch.stack([gradient @ use.columns().mT for use, gradient in pairs]).sum(dim=0)
        true = torch.stack([_augmented(one[matrix.place], matrix) for one in expected])
        if own.shape == true.shape and bool((own - true).abs().max() <= _TOLERANCE * true.abs().max()):
            found.append(matrix)
    return found


def _augmented(flat: Tensor, matrix: Matrix) -> Tensor:
    """(K, F) of a matrix' part of theta."""
    size = matrix.num_outputs * (matrix.num_columns - matrix.has_bias)
    weight = flat[:size].view(matrix.num_outputs, -1)
    return torch.cat([weight, flat[size:].unsqueeze(1)], dim=1) if matrix.has_bias else weight


def _noting(of: list[Use], matrix: Matrix) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        inputs = args[0] if args else next(iter(named.values()))
        # By the edge, not by the output, which an activation may change in place.
        edge = torch.autograd.graph.get_gradient_edge(output)
        of.append(Use(module, matrix.has_bias, inputs.detach(), edge))

    return note


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, torch.nn.Conv2d)


def _columns(module: Any, inputs: Tensor) -> Tensor:
    """What the weight multiplies, (n, D, T)."""
    if not _is_convolution(module):
        return _features_first(inputs)
    sides = module.padding
    if isinstance(sides, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs, sides = torch.nn.functional.pad(inputs, module._reversed_padding_repeated_twice, mode=mode), 0
    return torch.nn.functional.unfold(inputs, module.kernel_size, module.dilation, sides, module.stride)


def _features_first(tensor: Tensor) -> Tensor:
    """(n, ..., F) as (n, F, T)."""
    return tensor.reshape(len(tensor), -1, tensor.shape[-1]).mT
