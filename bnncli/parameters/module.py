"""Chosen parameters of a torch module as theta: its logits under many thetas, and the memory of its activations."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood, likelihood_of, name_to_record, read_recorded_name
from bnncli.names import format_names
from bnncli.parameters.layouts import HeadLayout, LogitMaker, ParamLayout, ParamPart, consecutive_parts, parts_to_json

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def differentiable(embeddings: Sequence[nn.Embedding]) -> Iterator[None]:
    """Make attention plain products and give these embeddings their mathematical gradients, within this context.

    Fused attention kernels have neither forward-mode derivatives nor vmap rules.

    Args:
        embeddings: `uneven_embeddings` of the module.
    """
    from torch.nn import attention

    backends = torch.backends.mha
    was_enabled = backends.get_fastpath_enabled()
    backends.set_fastpath_enabled(False)
    for one in embeddings:
        one.forward = partial(_embed, one)  # type: ignore[method-assign]
    try:
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            yield
    finally:
        backends.set_fastpath_enabled(was_enabled)
        for one in embeddings:
            del one.forward


def is_of_transform(tensor: Tensor) -> bool:
    """Return whether a tensor was created within a transform of torch.func, after which it becomes invalid."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def uneven_embeddings(module: nn.Module) -> list[nn.Embedding]:
    """Return embeddings whose backward pass skips or rescales rows on which the logits nevertheless depend.

    torch's backward pass, unlike its forward mode, gives the padding row no gradient. Products with the Gauss-Newton
    matrix would not be symmetric, and the gradient not the log posterior's.
    """
    embedding = torch.nn.Embedding
    return [
        one
        for one in module.modules()
        if isinstance(one, embedding)
        and type(one).forward is embedding.forward
        and (one.padding_idx is not None or one.scale_grad_by_freq or one.sparse)
    ]


def _embed(module: nn.Embedding, indices: Tensor) -> Tensor:
    """Look up indices without the embedding's modifications of gradients."""
    return torch.nn.functional.embedding(indices, module.weight, max_norm=module.max_norm, norm_type=module.norm_type)


MOST_EXACT = 2**28  # parameters of a module that is copied to float64 for checks: 2 GiB
_PAIRS = 256  # pairs of draw and example that convolutions process at once on a CPU: thousands exceed its caches


@dataclass(frozen=True, eq=False)
class ModuleNetwork:
    """A module as a function of inputs and parameters.

    Args:
        module: in evaluation mode, on the device; never changed.
        logits_of: returns the logits (n, K), given a function that runs the module.
        names: argument names of packed inputs (n, arguments, ...); empty for a single input tensor.
        takes_tokens: whether inputs are integers, such as token ids; they are passed as floats, exact below 2^24.
            Packed ones (n, arguments, length) may have any length.
        features_of: returns the last layer's input, (n, D), given the module, the same function and that layer's weight
            (K, D) and bias (K,); None if unknown.
        kept: cache of logits linearised at one theta, while `logits._kept.keeping` requests it.
    """

    module: nn.Module
    logits_of: Callable[[Callable[[], Any]], Tensor] = lambda run: run()
    names: tuple[str, ...] = ()
    takes_tokens: bool = False
    features_of: Callable[[nn.Module, Callable[[], Any], Tensor, Tensor | None], Tensor] | None = None
    kept: dict[str, Any] = field(default_factory=dict, repr=False)
    _states: dict[Any, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    def __call__(self, inputs: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Return logits (n, K) for inputs (n, ...) under these parameters, in their precision; supports autograd and vmap."""
        with differentiable(self._embeddings):
            return self.logits_of(self._pass(inputs, params))

    def features(self, inputs: Tensor, params: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the last layer's input, (n, D), for inputs (n, ...) under these parameters.

        Args:
            weight, bias: of that layer, (K, D) and (K,).
        """
        assert self.features_of is not None
        return self.features_of(self.module, self._pass(inputs, params), weight, bias)

    def _pass(self, inputs: Tensor, params: Mapping[str, Tensor]) -> Callable[[], Any]:
        """Return a function that runs the module on inputs (n, ...) under these parameters."""
        dtype = next(iter(params.values())).dtype
        state = {**self._frozen(dtype, params), **params}
        inputs = inputs.long() if self.takes_tokens else inputs.to(dtype)
        named = dict(zip(self.names, inputs.unbind(1), strict=True)) if self.names else {}
        return partial(torch.func.functional_call, self.module, state, () if named else (inputs,), named)

    def draws_at_once(self, num_examples: int, device: torch.device) -> int | None:
        """Return the number of draws to pass through the network at once with num_examples examples; None for all."""
        if device.type != "cpu" or not self._convolves:
            return None
        return max(1, _PAIRS // max(1, num_examples))

    @cached_property
    def _convolves(self) -> bool:
        """Return whether it has convolutions, which are slow on a CPU with many weights at once."""
        kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        return any(isinstance(module, kinds) for module in self.module.modules())

    def shaped(self, features: Tensor, input_shape: Sequence[int]) -> Tensor:
        """Return inputs (N, D), flat, or (N, ...), in the network's shape; packed token ids may have any length."""
        return features.reshape(
            len(features), *((*input_shape[:-1], -1) if self.names and self.takes_tokens else input_shape)
        )

    def _frozen(self, dtype: torch.dtype, varying: Collection[str]) -> dict[str, Tensor]:
        """Return all other parameters and buffers, floats in this precision; created once each."""
        state = self._states.setdefault(dtype, {})
        missing = [name for name in self._every if name not in varying and name not in state]
        found = {name: self._every[name].detach() for name in missing}
        found = {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}
        if any(map(is_of_transform, found.values())):  # invalid after the torch.func transform that created it
            return {**state, **found}
        state.update(found)
        return state

    @cached_property
    def check_dtype(self) -> torch.dtype:
        """Precision in which derivatives are checked: float64, or float32 for a module too large to copy."""
        count = sum(value.numel() for value in self.module.parameters())
        return torch.float64 if count <= MOST_EXACT else torch.float32

    @property
    def check_tolerance(self) -> float:
        """Largest relative difference of derivatives that is rounding in that precision."""
        return 1e-6 if self.check_dtype == torch.float64 else 1e-3

    @cached_property
    def _every(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    @cached_property
    def _embeddings(self) -> list[nn.Embedding]:
        return uneven_embeddings(self.module)

    @property
    def device(self) -> torch.device:
        """Device of the module."""
        return next(self.module.parameters()).device


_FEW, _MORE = 2, 6  # examples to measure on; what does not grow with them is not counted


def activation_bytes(network: ModuleNetwork, input_shape: Sequence[int]) -> int:
    """Measure the bytes that a forward pass stores per example for its gradient, on zeros, float32."""
    more, few = (_kept_bytes(network, input_shape, count) for count in (_MORE, _FEW))
    return max(0, (more - few) // (_MORE - _FEW))


def pass_bytes(network: ModuleNetwork, input_shape: Sequence[int], names: Collection[str] = ()) -> int:
    """Measure the bytes per example at the peak of a pass on zeros, float32, with a gradient in the named parameters, if any."""
    from bnncli.parameters.tensor_bytes import bytes_per_example  # it imports torch

    params = {name: value.detach().float() for name, value in network.module.named_parameters()}

    def work(count: int) -> None:
        leaves = {name: params[name].requires_grad_() for name in names if name in params}
        with torch.set_grad_enabled(bool(names)):
            logits = network(torch.zeros(count, *input_shape, device=network.device), params)
            if leaves:
                torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True)

    return bytes_per_example(work)


def output_numbers(network: ModuleNetwork, owners: Collection[str], input_shape: Sequence[int]) -> dict[str, int]:
    """Return the output values per example of each named module, over all its calls."""
    modules = {name: module for name, module in network.module.named_modules() if name in owners}
    found = dict.fromkeys(modules, 0)
    for name, shape in zip(*_output_shapes(network, modules, input_shape), strict=True):
        found[name] += math.prod(shape)
    return found


def _output_shapes(
    network: ModuleNetwork, modules: Mapping[str, Any], input_shape: Sequence[int]
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return the output of modules for one example: a name and a shape per call."""
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
        return tensor.detach()  # an output kept by its own node would never be freed

    params = {name: value.detach().float().requires_grad_() for name, value in network.module.named_parameters()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = network(inputs, params)
    return sum(kept.values()) + logits.nbytes


ALL, LAST = "all", "last"
STATE = "all+buffers"  # of separately trained networks: floating-point buffers besides all parameters


@dataclass(frozen=True)
class ModuleLayout:
    """The layout of chosen parameters of a module in theta.

    Args:
        parts: names, shapes and places; the names are the module's own.
        num_outputs: K.
        input_shape: of one example.
        likelihood_name: of the outputs; None if implied by their number.
        network: computes logits; None for a posterior as read, until `bound_to`.
    """

    parts: tuple[ParamPart, ...]
    num_outputs: int
    input_shape: tuple[int, ...]
    likelihood_name: str | None = None
    network: ModuleNetwork | None = field(default=None, compare=False, repr=False)
    head: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _ = self.likelihood  # raises for an unknown name

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
        """Build the layout of the parameters that match a pattern.

        Args:
            pattern: all, STATE, or shell patterns of parameter names with + between them (`fc2.*+*.bias`); a module's
                name matches all its parameters.

        Raises:
            UsageError: nothing matches.
        """
        chosen = choose_parameters(network.module, pattern)
        parts = consecutive_parts([(name, tuple(value.shape), is_bias(name)) for name, value in chosen.items()])
        return cls(parts, num_outputs, tuple(input_shape), likelihood_name, network)

    @property
    def num_params(self) -> int:
        """Number of parameters, P."""
        return self.parts[-1].place.stop

    @property
    def num_features(self) -> int:
        """Number of values in one input."""
        return math.prod(self.input_shape)

    @property
    def takes_any_length(self) -> bool:
        """Return whether inputs may have another length: texts."""
        return self.network is not None and self.network.takes_tokens and bool(self.network.names)

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the labels given the K logits."""
        return likelihood_of(self.num_outputs, self.likelihood_name)

    @property
    def num_classes(self) -> int:
        """Number of classes of the likelihood."""
        return self.likelihood.num_classes

    @cached_property
    def working_bytes(self) -> int:
        """Bytes per example at the peak of a gradient with respect to theta, float32, as measured on few examples."""
        return max(4 * self.widest, pass_bytes(self._bound, self.input_shape, [part.name for part in self.parts]))

    @cached_property
    def forward_bytes(self) -> int:
        """Bytes per example at the peak of a pass without gradients, likewise."""
        return pass_bytes(self._bound, self.input_shape)

    @cached_property
    def outputs_of_owners(self) -> dict[str, int]:
        """Output values per example of each module with chosen parameters, as measured."""
        owners = {part.name.rpartition(".")[0] for part in self.parts}
        return output_numbers(self._bound, owners, self.input_shape)

    @property
    def own_outputs(self) -> int:
        """Total of these."""
        return sum(self.outputs_of_owners.values())

    @cached_property
    def widest(self) -> int:
        """Values that an example leaves in a forward pass, as measured; at least the number of classes."""
        return max(self.num_classes, activation_bytes(self._bound, self.input_shape) // 4)

    def to_json(self) -> list[dict[str, object]]:
        """Return the layout for posterior files: name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """Return names, shapes and sizes as JSON."""
        return {
            "network_params": [[part.name, list(part.shape)] for part in self.parts],
            "num_outputs": self.num_outputs,
            "input_shape": list(self.input_shape),
            **name_to_record(self.likelihood_name),
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> ModuleLayout:
        """Invert to_meta, without a network."""
        entries = [(str(name), tuple(int(size) for size in shape)) for name, shape in meta["network_params"]]
        parts = consecutive_parts([(name, shape, is_bias(name)) for name, shape in entries])
        shape = tuple(int(size) for size in meta["input_shape"])
        return cls(parts, int(meta["num_outputs"]), shape, read_recorded_name(meta))

    def bound_to(self, network: ModuleNetwork) -> ModuleLayout:
        """Return the layout bound to a network. Raises ValueError if the network lacks these parameters or buffers."""
        there = {name: tuple(value.shape) for name, value in _named_tensors(network.module).items()}
        odd = [part.name for part in self.parts if there.get(part.name) != part.shape]
        if odd:
            raise ValueError(f"the network has no parameters {format_names(odd)} with these shapes")
        return replace(self, network=network)

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """Return each parameter (..., *shape) by name, as views of theta (..., P)."""
        flat = theta.split([math.prod(part.shape) for part in self.parts], dim=-1)
        lead = theta.shape[:-1]
        return {part.name: one.reshape((*lead, *part.shape)) for part, one in zip(self.parts, flat, strict=True)}

    def join(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return theta (..., P) from parameters (..., *shape) by name: the inverse of split."""
        flat = []
        for part in self.parts:
            lead = params[part.name].shape[: params[part.name].ndim - len(part.shape)]
            flat.append(params[part.name].reshape(*lead, math.prod(part.shape)))
        return torch.cat(flat, dim=-1)

    def trained(self) -> Tensor:
        """Return theta (P,) float64 of the network as it is."""
        found = _named_tensors(self._bound.module)
        return self.join({part.name: found[part.name].detach().double() for part in self.parts})

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Return logits (S, N, K) for inputs (N, D), flat, or (N, ...), under theta (S, P)."""
        network = self._bound
        features = network.shaped(features, self.input_shape)
        if len(theta) == 1:
            return network(features, self.split(theta[0])).unsqueeze(0)
        at_once = network.draws_at_once(len(features), theta.device)
        one = torch.func.vmap(lambda draw: network(features, self.split(draw)), chunk_size=at_once)
        return one(theta)

    def features(self, inputs: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the last layer's input, (n, D), for inputs (n, ...) under one theta (P,), given that layer's weight and bias."""
        network = self._bound
        return network.features(network.shaped(inputs, self.input_shape), self.split(theta), weight, bias)

    def jacobian(self, features: Tensor, theta: Tensor, *, parts: Sequence[ParamPart] | None = None) -> Tensor:
        """Return the derivatives of the logits with respect to theta, (N, K, P), at inputs (N, D) or (N, ...), and one theta (P,).

        Args:
            parts: only with respect to these, consecutively; None for all.
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
        """Return J v, (S, N, K), for directions v (S, P) at one theta (P,), in forward mode without forming J."""

        def logits(draw: Tensor) -> Tensor:
            return self.logits(features, draw.unsqueeze(0))[0]

        def along(direction: Tensor) -> Tensor:
            pushed: Tensor = torch.func.jvp(logits, (theta,), (direction,))[1]
            return pushed

        return torch.func.vmap(along)(directions)

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """Return the logits under each theta (S, P); the centre is the first draw's, for any weights."""

        def at(features: Tensor) -> tuple[Tensor, Callable[[slice], Tensor]]:
            def logits(some: slice) -> Tensor:
                return self.logits(features, theta[some]).transpose(1, 2)

            return logits(slice(0, 1))[0], logits

        return at

    def can_replace(self, head: HeadLayout) -> bool:
        """Return True: it replaces all layers."""
        return True

    @property
    def _bound(self) -> ModuleNetwork:
        if self.network is None:
            raise ValueError("the layout is not bound to a network")
        return self.network


def bind_layout(layout: Any, network: ModuleNetwork) -> Any:
    """Bind the layout of a network posterior to that network.

    Raises:
        ValueError: it is of another network.
    """
    return cast(ModuleLayout, layout).bound_to(network)


def is_bias(name: str) -> bool:
    """Return whether a parameter of this name has the prior of the biases."""
    return name.rpartition(".")[2].endswith("bias")


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def choose_parameters(module: nn.Module, pattern: str) -> Mapping[str, Tensor]:
    """Return the parameters that match a pattern, in the module's order; see ModuleLayout.of. Raises UsageError for none.

    A shared parameter has the first of its names, and any of them matches it.
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
                    f"{format_names(every, limit=20)}"
                )
        chosen = {name: value for name, value in every.items() if any(is_named(name, one) for one in wanted)}
    if not chosen:
        raise UsageError("\0layers\0: the network has no parameters")
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def module_places(layout: ParamLayout) -> dict[str, slice]:
    """Return the slice of each module's own parameters in theta; a module's name precedes the last dot of theirs."""
    places = {}
    for module, group in groupby(layout.parts, key=lambda part: part.name.rpartition(".")[0]):
        parts = list(group)
        places[module] = slice(parts[0].place.start, parts[-1].place.stop)
    return places


def recorded_layout(meta: Mapping[str, Any]) -> HeadLayout | ModuleLayout:
    """Return the recorded layout of a head, or of a network's parameters."""
    return ModuleLayout.from_meta(meta) if "network_params" in meta else HeadLayout.from_meta(meta)
