"""The logits of a network linearised at theta: one layer at a time if Sigma has blocks, else through all of J."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.logits import LogitCovariance
from bnncli.logits._by_layer import Blocks, by_layer, by_layer_together
from bnncli.logits._pulled import Pulled
from bnncli.logits.block import PulledBlock
from bnncli.parameters.layouts import LogitLayout
from bnncli.parameters.module import ModuleLayout, module_places
from bnncli.targets.blocks import BLOCK_ELEMENTS, slices

if TYPE_CHECKING:
    from torch import Tensor


def network_spread(covariance: Covariance, layout: LogitLayout, theta: Tensor) -> LogitCovariance:
    """Return J Sigma J^T at inputs (n, ...), J the Jacobian at theta (P,), by the structure's fast path if any.

    If the logits do not come from a module with layers, J comes from the layout.
    """
    if layout.network is None:
        return Pulled(partial(_whole_roots, covariance, layout, theta))
    layout = cast(ModuleLayout, layout)  # only ModuleLayout has a module
    if is_by_layer(covariance.structure):
        return by_layer(layout, theta, _blocks_of(covariance))
    return by_layer(layout, theta, lambda places: [(slice(0, layout.num_params), PulledBlock(covariance))])


def covariances_together(
    candidates: Sequence[Covariance], layout: LogitLayout, theta: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return a function from inputs (n, ...) to J Sigma J^T for several Sigma with blocks, (C, n, K, K) float64.

    J is computed once for all, and transformed once into shared bases.
    """
    return by_layer_together(cast(ModuleLayout, layout), theta, [_blocks_of(one) for one in candidates])


def _blocks_of(covariance: Covariance) -> Blocks:
    found: Blocks = registry.load_module("logits", covariance.structure).blocks_of(covariance)
    return found


def is_by_layer(structure: str) -> bool:
    """Return whether Sigma of this structure has blocks, which avoids K P numbers per example."""
    return structure in registry.names("logits") and hasattr(registry.load_module("logits", structure), "blocks_of")


def is_turned(structure: str) -> bool:
    """Return whether Sigma's blocks are diagonal in bases into which Jacobians are transformed."""
    return is_by_layer(structure) and hasattr(registry.load_module("logits", structure), "network_root")


def largest_root(structure: str, layout: ModuleLayout) -> int:
    """Return the approximate number of four-byte values per output and example for the largest block of Sigma."""
    if not is_by_layer(structure):
        return PulledBlock.num_copies * layout.num_params
    largest = max(place.stop - place.start for place in module_places(layout).values())
    kind = getattr(registry.load_module("logits", structure), "network_root", PulledBlock)
    return int(kind.num_copies) * largest


def _whole_roots(
    covariance: Covariance, layout: LogitLayout, theta: Tensor, inputs: Tensor
) -> Iterator[Iterable[Tensor]]:
    """Yield J L, (b, K, P), for blocks of examples."""
    theta = theta.to(inputs.dtype)
    size = max(1, BLOCK_ELEMENTS.get(inputs.device.type, 2**19) // (layout.num_outputs * layout.num_params))
    for some in slices(0, max(1, len(inputs)), size):
        rows = layout.jacobian(inputs[some], theta)
        yield [covariance.pull_back(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])]
