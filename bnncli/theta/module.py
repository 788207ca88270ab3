"""How chosen parameters of a torch module lie in theta, and the module's logits under many theta.

All other parameters and the buffers stay as they are: the module is in evaluation mode, batch norm with it. theta is what
torch.nn.utils.parameters_to_vector gives for the chosen parameters, in the order in which the module names them.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood, likelihood_of, name_to_record, recorded_name
from bnncli.names import listed
from bnncli.theta.activations import activation_bytes, gradient_growth, laid_out_bytes, output_numbers
from bnncli.theta.head import HeadLayout
from bnncli.theta.layout import LogitMaker, ParamPart, consecutive, parts_to_json
from bnncli.theta.module_network import ModuleNetwork

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.theta.tensor_bytes import Growth

ALL, LAST = "all", "last"
STATE = "all+buffers"  # of networks that were trained apart: buffers of real numbers beside all parameters


@dataclass(frozen=True)
class ModuleLayout:
    """Where the chosen parameters of a module lie in theta.

    Args:
        parts: a name, shape and place each; the names are the module's own.
        num_outputs: K.
        input_shape: of one example.
        likelihood_name: of the outputs' likelihood, None where their number says it.
        network: what turns inputs into logits; None for a posterior as it is read, until `bound_to`.
    """

    parts: tuple[ParamPart, ...]
    num_outputs: int
    input_shape: tuple[int, ...]
    likelihood_name: str | None = None
    network: ModuleNetwork | None = field(default=None, compare=False, repr=False)
    head: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _ = self.likelihood  # an unknown name is told here

    def __str__(self) -> str:
        return f"{self.num_params:,} parameters of a network in {len(self.parts)} tensors"

    @classmethod
    def of(
        cls,
        network: ModuleNetwork,
        pattern: str = ALL,
        *,
        num_outputs: int,
        input_shape: Sequence[int],
        likelihood_name: str | None = None,
    ) -> ModuleLayout:
        """The layout of the parameters that a pattern names.

        Args:
            pattern: all, STATE, or shell patterns of parameter names with + between them (`fc2.*+*.bias`); a module's name stands
                for all parameters in it.

        Raises:
            UsageError: it names none.
        """
        chosen = chosen_parameters(network.module, pattern)
        parts = consecutive([(name, tuple(value.shape), is_bias(name)) for name, value in chosen.items()])
        return cls(parts, num_outputs, tuple(input_shape), likelihood_name, network)

    @property
    def num_params(self) -> int:
        """P."""
        return self.parts[-1].place.stop

    @property
    def num_features(self) -> int:
        """Numbers in one input."""
        return math.prod(self.input_shape)

    @property
    def takes_any_length(self) -> bool:
        """Whether an input may have more or fewer numbers: texts."""
        return self.network is not None and self.network.takes_tokens and bool(self.network.names)

    @property
    def likelihood(self) -> Likelihood:
        """What the K logits say of a label."""
        return likelihood_of(self.num_outputs, self.likelihood_name)

    @property
    def num_classes(self) -> int:
        """Classes that the likelihood tells apart."""
        return self.likelihood.num_classes

    @cached_property
    def working(self) -> Growth:
        """What a gradient by theta takes at its peak, float32, as measured on few examples."""
        return gradient_growth(self._bound, [part.name for part in self.parts], self.input_shape)

    @property
    def working_bytes(self) -> int:
        """Bytes of it that an example takes."""
        return max(4 * self.widest, self.working.each)

    @cached_property
    def laid_out_bytes(self) -> int:
        """Bytes of the largest output of a convolution, as a CPU's kernels lay it out anew; 0 without one."""
        return laid_out_bytes(self._bound, self.input_shape)

    @cached_property
    def outputs_of_owners(self) -> dict[str, int]:
        """Numbers that each module which has some of the chosen parameters gives of an example, as measured on one."""
        owners = {part.name.rpartition(".")[0] for part in self.parts}
        return output_numbers(self._bound, owners, self.input_shape)

    @property
    def own_outputs(self) -> int:
        """Those of all of them."""
        return sum(self.outputs_of_owners.values())

    @cached_property
    def widest(self) -> int:
        """Numbers that an example leaves in a forward pass, as measured on one; its classes at least."""
        return max(self.num_classes, activation_bytes(self._bound, self.input_shape) // 4)

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it: name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """Names, shapes and sizes as JSON."""
        return {
            "network_params": [[part.name, list(part.shape)] for part in self.parts],
            "num_outputs": self.num_outputs,
            "input_shape": list(self.input_shape),
            **name_to_record(self.likelihood_name),
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> ModuleLayout:
        """The inverse of to_meta, not bound to a network."""
        entries = [(str(name), tuple(int(size) for size in shape)) for name, shape in meta["network_params"]]
        parts = consecutive([(name, shape, is_bias(name)) for name, shape in entries])
        shape = tuple(int(size) for size in meta["input_shape"])
        return cls(parts, int(meta["num_outputs"]), shape, recorded_name(meta))

    def bound_to(self, network: ModuleNetwork) -> ModuleLayout:
        """The same with a network to compute logits by. Raises ValueError where the network has not these parameters, or buffers."""
        there = {name: tuple(value.shape) for name, value in _named_tensors(network.module).items()}
        odd = [part.name for part in self.parts if there.get(part.name) != part.shape]
        if odd:
            raise ValueError(f"the network has no parameters {listed(odd)} with these shapes")
        return replace(self, network=network)

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """Each parameter (..., *shape) by its name, views of theta (..., P)."""
        flat = theta.split([math.prod(part.shape) for part in self.parts], dim=-1)
        lead = theta.shape[:-1]
        return {part.name: one.reshape((*lead, *part.shape)) for part, one in zip(self.parts, flat, strict=True)}

    def join(self, params: Mapping[str, Tensor]) -> Tensor:
        """theta (..., P) of parameters (..., *shape) by their names: the inverse of split."""
        flat = []
        for part in self.parts:
            lead = params[part.name].shape[: params[part.name].ndim - len(part.shape)]
            flat.append(params[part.name].reshape(*lead, math.prod(part.shape)))
        return torch.cat(flat, dim=-1)

    def briefly(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Within, what theta does not have is held in this precision too; it is not held longer than that."""
        return self._bound.briefly(dtype, {part.name for part in self.parts})

    def trained(self) -> Tensor:
        """theta (P,) float64 of the network as it is."""
        found = _named_tensors(self._bound.module)
        return self.join({part.name: found[part.name].detach().double() for part in self.parts})

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of inputs (N, D), flat, or (N, ...), under theta (S, P)."""
        network = self._bound
        features = network.shaped(features, self.input_shape)
        if len(theta) == 1:
            return network(features, self.split(theta[0])).unsqueeze(0)
        at_once = network.draws_at_once(len(features), theta.device)
        one = torch.func.vmap(lambda draw: network(features, self.split(draw)), chunk_size=at_once)
        return one(theta)

    def features(self, inputs: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the last layer takes, (n, D), of inputs (n, ...) under one theta (P,); weight and bias are that layer's."""
        network = self._bound
        return network.features(network.shaped(inputs, self.input_shape), self.split(theta), weight, bias)

    def jacobian(self, features: Tensor, theta: Tensor, *, parts: Sequence[ParamPart] | None = None) -> Tensor:
        """The logits' derivatives by theta, (N, K, P), at inputs (N, D) or (N, ...), and one theta (P,).

        Args:
            parts: by these alone, one behind the other; None for all.
        """
        network, every = self._bound, self.split(theta)
        features = network.shaped(features, self.input_shape)
        parts = self.parts if parts is None else parts
        chosen = {part.name: every.pop(part.name) for part in parts}

        def logits(some: dict[str, Tensor], example: Tensor) -> Tensor:
            return network(example.unsqueeze(0), {**every, **some})[0]

        rows = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))(chosen, features)
        return torch.cat([rows[part.name].flatten(2) for part in parts], dim=2)

    def push(self, features: Tensor, theta: Tensor, directions: Tensor) -> Tensor:
        """J v, (S, N, K), of directions v (S, P) at one theta (P,), in forward mode: without J."""

        def logits(draw: Tensor) -> Tensor:
            return self.logits(features, draw.unsqueeze(0))[0]

        def along(direction: Tensor) -> Tensor:
            pushed: Tensor = torch.func.jvp(logits, (theta,), (direction,))[1]
            return pushed

        return torch.func.vmap(along)(directions)

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """The logits under each of theta (S, P); the center is the first draw's, whatever the weights."""

        def at(features: Tensor) -> tuple[Tensor, Callable[[slice], Tensor]]:
            def logits(some: slice) -> Tensor:
                return self.logits(features, theta[some]).transpose(1, 2)

            return logits(slice(0, 1))[0], logits

        return at

    def can_replace(self, head: HeadLayout) -> bool:
        """Whether a theta of this layout can stand where a network has such a head: it brings its own layers."""
        return True

    @property
    def _bound(self) -> ModuleNetwork:
        if self.network is None:
            raise ValueError("the layout is not bound to a network")
        return self.network


def bound(layout: Any, network: ModuleNetwork) -> Any:
    """A layout of a network's parameters, which its posterior does not know to be one, bound to that network.

    Raises:
        ValueError: it is another network's.
    """
    return cast(ModuleLayout, layout).bound_to(network)


def is_bias(name: str) -> bool:
    """Whether a parameter of this name has the prior of the biases."""
    return name.rpartition(".")[2].endswith("bias")


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def chosen_parameters(module: nn.Module, pattern: str) -> Mapping[str, Tensor]:
    """The parameters that a pattern names, in the module's order; see ModuleLayout.of. Raises UsageError for none.

    One that several modules share goes by the first of its names, and any of them names it.
    """
    every = {name: value for name, value in module.named_parameters() if value.is_floating_point()}
    shared: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(value), []).append(name)

    def is_named(first: str, pattern: str) -> bool:
        return any(_matches(name, pattern) for name in shared[id(every[first])])

    chosen: dict[str, Tensor]
    if pattern in (ALL, STATE):
        stored = {*module.state_dict()} if pattern == STATE else {*every}
        chosen = {
            name: value
            for name, value in _named_tensors(module).items()
            if name in stored and value.is_floating_point()
        }
    else:
        wanted = pattern.split("+")
        for one in wanted:
            if not any(is_named(name, one) for name in every):
                raise UsageError(
                    f"\0layers\0: expected {LAST}, {ALL} or patterns of parameter names; {one!r} matches none of "
                    f"{listed(every, limit=20)}"
                )
        chosen = {name: value for name, value in every.items() if any(is_named(name, one) for one in wanted)}
    if not chosen:
        raise UsageError("\0layers\0: the network has no parameters")
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
