"""Record inputs and output gradients of modules with hooks during one pass, for per-example gradients.

A probe checks that modules use their parameters as assumed. A module is left out if its gradient for either of two
examples differs from autograd's, for example because another module shares the weight or the batch dimension is not the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamPart
from bnncli.system.memory import give_back_freed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.parameters.module import ModuleLayout, ModuleNetwork

_PROBES = 2  # examples used for the check
_TOLERANCE = 1e-6  # in float64, relative to the largest gradient


class Use(Protocol):
    """One call of a module."""

    @property
    def num_examples(self) -> int:
        """Number of examples, from the first dimension of the inputs."""

    def of(self, some: slice) -> Use:
        """Restrict to some of the examples."""

    def per_example(self, gradient: Tensor) -> Tensor:
        """Return the gradients (n, P) of the piece's parameters, given the gradient at the output."""


class Piece(Protocol):
    """Parameters of one module that are adjacent in theta."""

    @property
    def module(self) -> str:
        """Name of the module."""

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """The parts of theta, weight first."""

    def use(self, module: Any, inputs: Tensor) -> Use:
        """Record a call of the module with inputs (n, ...)."""


# signature of `tried` and `called`
Finder: TypeAlias = "Callable[[ModuleLayout, Tensor, Tensor, Sequence[Piece]], list[Piece]]"
Noted = dict[
    str, list[tuple[Any, Any]]
]  # weight name of each piece to its uses, each with the autograd edge of the output


def place_of(piece: Piece) -> slice:
    """Return the piece's place in theta."""
    return slice(piece.parts[0].place.start, piece.parts[-1].place.stop)


def with_bias(layout: ModuleLayout, index: int) -> tuple[ParamPart, ...]:
    """Return the weight with this index, and the bias of the same module if it directly follows."""
    part, after = layout.parts[index], layout.parts[index + 1 : index + 2]
    return part, *(one for one in after if one.name == f"{part.name.removesuffix('weight')}bias")


def own_weights(layout: ModuleLayout) -> list[tuple[int, str, Any]]:
    """Return index, module name and module of each part that is the weight of a module with torch's own forward.

    Subclasses in libraries may expect other inputs: a norm with channels first, a convolution that pads.
    """
    every = network_of(layout).module.named_modules()
    modules = {name: one for name, one in every if type(one).forward.__module__.startswith("torch.nn.")}
    split = [(index, *part.name.rpartition(".")[::2]) for index, part in enumerate(layout.parts)]
    return [(index, owner, modules[owner]) for index, owner, last in split if last == "weight" and owner in modules]


def network_of(layout: ModuleLayout) -> ModuleNetwork:
    """Return the network that the layout is bound to."""
    assert layout.network is not None
    return layout.network


def forward(layout: ModuleLayout, theta: Tensor, inputs: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, Noted]:
    """Return logits (n, K) of inputs (n, ...) under theta (P,), with a graph to each piece, and the pieces' uses."""
    modules = dict(network_of(layout).module.named_modules())
    noted: Noted = {piece.parts[0].name: [] for piece in pieces}
    handles = [
        modules[piece.module].register_forward_hook(_noting(noted[piece.parts[0].name], piece), with_kwargs=True)
        for piece in pieces
    ]
    try:
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            logits = layout.logits(inputs, leaf.unsqueeze(0))[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits, noted


def called(layout: ModuleLayout, theta: Tensor, inputs: Tensor, pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces that a pass of inputs (n, ...) calls and that the logits depend on, without checking gradients."""
    logits, noted = forward(layout, theta, inputs[:1], pieces)
    back = gradients(logits, noted, torch.ones_like(logits), is_last=True)
    return [piece for piece in pieces if back[piece.parts[0].name]]


def gradients(logits: Tensor, noted: Noted, cotangent: Tensor, *, is_last: bool) -> dict[str, list[tuple[Any, Tensor]]]:
    """Return the uses that affect the logits, with the gradients at their outputs for a cotangent (n, K).

    Args:
        is_last: whether this is the last cotangent for these logits, so that the graph may be freed.
    """
    edges = [edge for of in noted.values() for _, edge in of]
    if not edges:  # autograd raises an error for an empty list
        return {name: [] for name in noted}
    found = iter(torch.autograd.grad(logits, edges, cotangent, retain_graph=not is_last, allow_unused=True))
    pairs = {name: [(use, next(found)) for use, _ in of] for name, of in noted.items()}
    return {name: [(use, one) for use, one in of if one is not None] for name, of in pairs.items()}


def tried(layout: ModuleLayout, theta: Tensor, inputs: Tensor, pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces whose gradients at theta (P,), for the first of inputs (n, ...), agree with autograd."""
    inputs, theta = inputs[:_PROBES], theta.detach().double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    with layout.briefly(theta.dtype):
        found = _tried(layout, theta, inputs, pieces)
    give_back_freed()
    return found


def _tried(layout: ModuleLayout, theta: Tensor, inputs: Tensor, pieces: Sequence[Piece]) -> list[Piece]:
    logits, noted = forward(layout, theta, inputs, pieces)
    noted = {name: of for name, of in noted.items() if of and all(use.num_examples == len(inputs) for use, _ in of)}
    if not noted:
        return []
    numbers = torch.arange(1, logits.numel() + 1, dtype=logits.dtype, device=logits.device)
    cotangent = numbers.sin().view_as(logits)  # distinct for all outputs, and not constant, which softmax would lose
    with torch.enable_grad():
        leaf = theta.clone().requires_grad_()
        sums = (layout.logits(inputs, leaf.unsqueeze(0))[0] * cotangent).sum(dim=1)
        true = torch.stack([torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in sums])
    back = gradients(logits, noted, cotangent, is_last=True)
    return [piece for piece in pieces if _is_gradient(back.get(piece.parts[0].name, []), true[:, place_of(piece)])]


def _is_gradient(pairs: list[tuple[Any, Tensor]], true: Tensor) -> bool:
    if not pairs:
        return False
    found = torch.stack([use.per_example(gradient) for use, gradient in pairs]).sum(dim=0)
    return bool((found - true).abs().max() <= _TOLERANCE * true.abs().max())


def _noting(of: list[tuple[Any, Any]], piece: Piece) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        inputs = args[0] if args else next(iter(named.values()))
        # Keep the edge instead of the output, which an activation may change in place.
        of.append((piece.use(module, inputs.detach()), torch.autograd.graph.get_gradient_edge(output)))

    return note
