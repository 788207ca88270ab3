"""Build a network from its name and load a checkpoint's tensors strictly: every name and shape must fit."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli import registry
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.names import format_names, is_averaged, prefixes_of, quote_name, unknown_value_error
from bnncli.system import user_code

if TYPE_CHECKING:
    from torch import Tensor, nn


COUNTER = ".num_batches_tracked"  # of batch norm; absent before torch 0.4.1 and not needed for prediction


class StatePlace(NamedTuple):
    """Corresponding prefixes of names: `theirs` in the state, `own` in the network."""

    theirs: str = ""
    own: str = ""


@dataclass(frozen=True)
class FilledState:
    """A state with the network's names.

    Attributes:
        state: tensors within the network's prefix: its own and possibly others.
        place: the prefixes where the names match.
        outside: names outside that prefix.
        copies: other prefixes under which all names of the network exist as well.
    """

    state: dict[str, Tensor]
    place: StatePlace
    outside: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        found = []
        if self.place.theirs:
            found.append(f"using the checkpoint's tensors under {quote_name(self.place.theirs)} for the network")
        if self.copies:
            several = [prefix.rstrip(".") for prefix in self.copies]
            found.append(f"the checkpoint has the same names under {format_names(several)} (choose with \0state\0)")
        others = [name for name in self.outside if not name.startswith(self.copies or ("\0",))]
        if others:
            found.append(
                f"ignoring {len(others)} tensors of the checkpoint that are not part of the network: {format_names(others)}"
            )
        return found


def fit_names(state: Mapping[str, Tensor], expected: Collection[str]) -> FilledState:
    """Map the state to the names that the network expects; unchanged if no prefix makes them fit.

    Args:
        expected: names of the network's state dict.

    Raises:
        DataError: they fit under several prefixes, and the choice is ambiguous.
    """
    needed = [name for name in expected if not name.endswith(COUNTER)]
    if not needed:
        return FilledState(dict(state), StatePlace())
    near: tuple[float, StatePlace] = (0.5, StatePlace())  # with fewer than half of the names it is another network
    for own in _common_prefixes(needed):
        counts = prefixes_before(state, {name.removeprefix(own) for name in needed})
        full = [prefix for prefix, count in counts.items() if count == len(needed)]
        if full:
            theirs = _choose_prefix(full)
            copies = tuple(sorted(prefix for prefix in full if prefix != theirs)) if theirs else ()
            return _rename_state(state, StatePlace(theirs, own), copies)
        near = max(
            [near, *((count / len(needed), StatePlace(prefix, own)) for prefix, count in counts.items())], key=_rank
        )
    return _rename_state(state, near[1], ())


def describe_name_mapping(state: Mapping[str, Tensor], network: nn.Module) -> list[str]:
    """Return notes on how a state's names were mapped to those of the network that it filled."""
    return fit_names(state, network.state_dict()).notes if state else []


def prefixes_before(names: Iterable[str], wanted: Collection[str]) -> Counter[str]:
    """Count the wanted names after each prefix; a prefix is empty or ends with a dot."""
    found: Counter[str] = Counter()
    for name in names:
        place = 0
        while True:
            if name[place:] in wanted:
                found[name[:place]] += 1
            place = name.find(".", place) + 1
            if not place:
                break
    return found


def _rank(near: tuple[float, StatePlace]) -> tuple[float, int]:
    return near[0], -len(near[1].own) - len(near[1].theirs)


def _choose_prefix(prefixes: list[str]) -> str:
    """Choose among several prefixes: the empty one, or the only one that is not an average."""
    raw = [prefix for prefix in prefixes if not is_averaged(prefix)] or prefixes
    if "" in prefixes or len(raw) == 1:
        return "" if "" in prefixes else raw[0]
    names = sorted(prefix.rstrip(".") for prefix in raw)
    raise DataError(
        f"the checkpoint contains the network's names {len(raw)} times, under {format_names(names)}", code="several_states",
        hint=f"choose one: \0state\0 {names[0]}",
    )  # fmt: skip


def _common_prefixes(names: list[str]) -> Iterator[str]:
    """Yield the prefixes common to all names, the empty one first."""
    yield ""
    if names:
        parts = names[0].split(".")
        for count in range(1, len(parts)):
            prefix = ".".join(parts[:count]) + "."
            if not all(name.startswith(prefix) for name in names):
                return
            yield prefix


def _rename_state(state: Mapping[str, Tensor], place: StatePlace, copies: tuple[str, ...]) -> FilledState:
    """Rename the state within this place to the network's own names."""
    length = len(place.theirs)
    inside = {place.own + name[length:]: tensor for name, tensor in state.items() if name.startswith(place.theirs)}
    outside = tuple(name for name in state if not name.startswith(place.theirs))
    return FilledState(inside, place, outside, copies)


_FAMILY = "networks"


def load_network(spec: str, model_args: Mapping[str, str], state: Mapping[str, Tensor] | None) -> nn.Module:
    """Build the network that `spec` names, with the weights of `state`, in evaluation mode, float32, on the CPU.

    Args:
        spec: a built-in name, `package.module:factory` or `file.py:factory`; the last two run the user's code.
        model_args: arguments of the factory, as typed; missing ones are inferred from the shapes in `state` (built-in
            networks) or left to the factory's defaults.
        state: tensors by name, after prefix clean-up; None for a network without weights.

    Raises:
        UsageError: name, argument or value is unknown.
        MissingInput: the Python file does not exist.
        DataError: names or shapes of `state` do not fit the network.
    """
    factory, inferred = _factory(spec, state or {})
    given = user_code.convert_arguments(factory, model_args, option=f"\0model_arg\0 for {spec}")
    arguments = {**inferred, **given}
    user_code.check_arguments(factory, arguments, option=f"\0model_arg\0 for {spec}")
    with user_code.running_user_code(f"\0model\0: {spec!r}"):
        network = factory(**arguments)
    if not isinstance(network, torch.nn.Module):
        raise UsageError(f"\0model\0: {spec!r} returned {type(network).__name__}, expected a torch.nn.Module")
    network = network.float()
    if state is not None and (state or network.state_dict()):
        fill_network(network, state, spec)
    return network.eval()


def takes_argument(spec: str, name: str) -> bool:
    """Return whether a built-in network has an argument of this name, without running user code."""
    return registry.has_name(_FAMILY, spec) and name in signature(registry.load_module(_FAMILY, spec).build).parameters


def _factory(spec: str, state: Mapping[str, Tensor]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the factory and the arguments that the checkpoint's shapes imply."""
    if ":" in spec:
        return user_code.load_factory(spec, option="\0model\0"), {}
    if not registry.has_name(_FAMILY, spec):
        also = ["package.module:factory", "file.py:factory"]
        raise unknown_value_error("\0model\0", spec, registry.names(_FAMILY), also=also)
    module = registry.load_module(_FAMILY, spec)
    infer: Callable[[Mapping[str, Tensor]], dict[str, Any]] = getattr(module, "arguments_from", lambda state: {})
    return module.build, _infer_arguments(infer, state)


def _infer_arguments(
    infer: Callable[[Mapping[str, Tensor]], dict[str, Any]], state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Infer arguments from the shapes, below a prefix of the names if that allows more."""
    found = infer(state)
    if not found:
        below = (
            {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
            for prefix in prefixes_of(state)
        )
        found = max(map(infer, below), key=len, default={})  # the first among equals
    return found


def recognise_networks(state: Mapping[str, Tensor]) -> list[tuple[str, dict[str, Any]]]:
    """Return the built-in networks that match these names and shapes, each with the inferred arguments.

    Networks are built without allocating weights.
    """
    found = []
    for name in registry.own_names(_FAMILY):
        module = registry.load_module(_FAMILY, name)
        arguments = _infer_arguments(getattr(module, "arguments_from", lambda state: {}), state)
        if not arguments:
            continue
        with suppress(UsageError, DataError, ValueError, RuntimeError), torch.device("meta"):
            expected = module.build(**arguments).state_dict()
            theirs = _add_counters(fit_names(state, expected).state, expected)
            if {key: value.shape for key, value in theirs.items()} == {
                key: value.shape for key, value in expected.items()
            }:
                found.append((name, arguments))
    return found


def fill_network(network: nn.Module, state: Mapping[str, Tensor], spec: str) -> None:
    """Copy tensors into the network; all names and shapes must fit, after removing prefixes that the two do not share.

    Args:
        spec: name of the network in messages.

    Raises:
        DataError: names or shapes do not fit; lists them.
    """
    expected, given = network.state_dict(), state
    state = _add_counters(fit_names(state, expected).state, expected)
    if not state.keys() & expected.keys() and not expected:
        raise DataError(f"the checkpoint has {len(state)} tensors, but the network {spec!r} has none")
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    if missing or unexpected:
        others = [name for name, _ in recognise_networks(given) if name != spec]
        hint = f"the tensors match {others[0]}: use \0model\0 {others[0]}" if others else None
        raise DataError(
            _mismatch(spec, missing, unexpected), hint=hint or _rename(missing, unexpected, expected, state)
        )
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor) and state[name].shape != tensor.shape:
            raise DataError(
                f"{quote_name(name)} has shape {tuple(state[name].shape)} in the checkpoint, {tuple(tensor.shape)} "
                f"in the network {spec!r}",
                hint="pass the network's sizes with \0model_arg\0 NAME=VALUE",
            )
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not state[name].is_floating_point():
            kind = str(state[name].dtype).removeprefix("torch.")
            raise DataError(
                f"{quote_name(name)} is {kind} in the checkpoint, but floating-point in the network {spec!r}", code="quantised",
                hint="save the network before quantisation",
            )  # fmt: skip
    expected.update(state)  # keeps the modules' version metadata, which some require
    network.load_state_dict(expected, strict=True)


def _add_counters(state: Mapping[str, Tensor], expected: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Add the batch-norm counters that checkpoints from before torch 0.4.1 lack; prediction does not need them."""
    return {**{name: value for name, value in expected.items() if name.endswith(COUNTER)}, **state}


def _mismatch(spec: str, missing: list[str], unexpected: list[str]) -> str:
    parts = [f"the checkpoint does not match the network {spec!r}"]
    if missing:
        parts.append(f"missing from the checkpoint ({len(missing)}): {format_names(missing)}")
    if unexpected:
        parts.append(f"not in the network ({len(unexpected)}): {format_names(unexpected)}")
    return "; ".join(parts)


def _rename(
    missing: list[str], unexpected: list[str], expected: Mapping[str, Any], state: Mapping[str, Tensor]
) -> str | None:
    """Suggest a rename: the first missing name with a similar unexpected one of the same shape."""
    for name in missing:
        same_shape = [other for other in unexpected if state[other].shape == getattr(expected[name], "shape", None)]
        nearest = difflib.get_close_matches(name, same_shape, n=1)
        if nearest:
            return f"{quote_name(nearest[0])} in the checkpoint may be {quote_name(name)} in the network"
    return None
