"""Which tensors of a state dict are a network's, when the two do not agree in what stands before the names.

Lightning saves a module that holds the network (`model.conv.weight`, `net.model.conv.weight`), often beside things that are
none of it: the weights of a loss, metrics, a teacher, an averaged copy. The network's own names decide: a prefix is taken off
when what is left are all names of the network; what lies outside of that prefix is not the network's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bnncli.errors import DataError
from bnncli.names import is_averaged, listed, quoted

if TYPE_CHECKING:
    from torch import Tensor, nn

COUNTER = ".num_batches_tracked"  # of batch norm; absent before torch 0.4.1, and prediction needs none


class StatePlace(NamedTuple):
    """Where a network's names are: `own` of the network, in the place of which the state has `theirs`."""

    theirs: str = ""
    own: str = ""


@dataclass(frozen=True)
class FilledState:
    """A state by the network's names.

    Attributes:
        state: what lies in the network's place, the network's own tensors and perhaps others.
        place: in which the names were found.
        outside: names that lie elsewhere.
        copies: other prefixes under which all names of the network are there too.
    """

    state: dict[str, Tensor]
    place: StatePlace
    outside: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What a reader should be told."""
        found = []
        if self.place.theirs:
            found.append(f"using the checkpoint's tensors under {quoted(self.place.theirs)} for the network")
        if self.copies:
            several = [prefix.rstrip(".") for prefix in self.copies]
            found.append(f"the checkpoint has the same names under {listed(several)} (choose with \0state\0)")
        others = [name for name in self.outside if not name.startswith(self.copies or ("\0",))]
        if others:
            found.append(
                f"ignoring {len(others)} tensors of the checkpoint that are not part of the network: {listed(others)}"
            )
        return found


def fitted(state: Mapping[str, Tensor], expected: Collection[str]) -> FilledState:
    """The state by the names that the network expects; as it is where no prefix makes them fit.

    Args:
        expected: names of the network's state dict.

    Raises:
        DataError: they fit under several prefixes, and nothing tells which is meant.
    """
    needed = [name for name in expected if not name.endswith(COUNTER)]
    if not needed:
        return FilledState(dict(state), StatePlace())
    near: tuple[float, StatePlace] = (0.5, StatePlace())  # below half of the names another network is meant
    for own in _common_prefixes(needed):
        counts = prefixes_before(state, {name.removeprefix(own) for name in needed})
        full = [prefix for prefix, count in counts.items() if count == len(needed)]
        if full:
            theirs = _chosen(full)
            copies = tuple(sorted(prefix for prefix in full if prefix != theirs)) if theirs else ()
            return _placed(state, StatePlace(theirs, own), copies)
        near = max(
            [near, *((count / len(needed), StatePlace(prefix, own)) for prefix, count in counts.items())], key=_rank
        )
    return _placed(state, near[1], ())


def notes_on_names(state: Mapping[str, Tensor], network: nn.Module) -> list[str]:
    """What a reader should be told of how a state's names became those of the network that it has filled."""
    return fitted(state, network.state_dict()).notes if state else []


def prefixes_before(names: Iterable[str], wanted: Collection[str]) -> Counter[str]:
    """How many of the wanted names are there behind each prefix, which is empty or ends with a dot."""
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


def _chosen(prefixes: list[str]) -> str:
    """The one of several prefixes that is the network's: the one that is no average; the empty one whatever others there are."""
    raw = [prefix for prefix in prefixes if not is_averaged(prefix)] or prefixes
    if "" in prefixes or len(raw) == 1:
        return "" if "" in prefixes else raw[0]
    names = sorted(prefix.rstrip(".") for prefix in raw)
    raise DataError(
        f"the checkpoint contains the network's names {len(raw)} times, under {listed(names)}", code="several_states",
        hint=f"choose one: \0state\0 {names[0]}",
    )  # fmt: skip


def _common_prefixes(names: list[str]) -> Iterator[str]:
    """The prefixes that all names have, the empty one first."""
    yield ""
    if names:
        parts = names[0].split(".")
        for count in range(1, len(parts)):
            prefix = ".".join(parts[:count]) + "."
            if not all(name.startswith(prefix) for name in names):
                return
            yield prefix


def _placed(state: Mapping[str, Tensor], place: StatePlace, copies: tuple[str, ...]) -> FilledState:
    """The state with the network's own names for those in this place."""
    length = len(place.theirs)
    inside = {place.own + name[length:]: tensor for name, tensor in state.items() if name.startswith(place.theirs)}
    outside = tuple(name for name in state if not name.startswith(place.theirs))
    return FilledState(inside, place, outside, copies)
