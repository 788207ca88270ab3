"""The Gaussian of the logits under a Gaussian over theta: the entry point, for a last layer and for a network.

Their mean is the network's output at the mean of theta, and their covariance is J Sigma J^T, with J the Jacobian of the
logits in theta. A last layer is linear in theta, so this is exact. A network is linearised: one layer at a time if
Sigma has blocks, else through all of J.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from bnncli import registry
from bnncli.parameters.layouts import LogitLayout
from bnncli.parameters.module import ModuleLayout, module_places
from bnncli.structures import Covariance
from bnncli.structures.logits import LogitCovariance, LogitGaussian, LogitRoot, Pulled, head_spread
from bnncli.structures.network_logits import (
    COVARIANCES,
    BlockRoot,
    Blocks,
    CovariancePath,
    PulledBlock,
    by_layer,
    by_layer_together,
    find_cache,
    find_path,
    logits_at,
)
from bnncli.targets.blocks import BLOCK_ELEMENTS, slices

if TYPE_CHECKING:
    from torch import Tensor


def logit_gaussian(theta: Tensor, layout: LogitLayout, covariance: Covariance | None = None) -> LogitGaussian:
    """Return the Gaussian of the logits of inputs (n, ...), for theta (P,) with this covariance; no spread for None.

    Exact for a last layer; otherwise for the network linearised at theta.
    """

    def mean(inputs: Tensor) -> Tensor:
        if layout.network is not None:
            return logits_at(cast(ModuleLayout, layout), inputs, theta.to(inputs.dtype))
        return layout.logits(inputs, theta.to(inputs.dtype).unsqueeze(0))[0]

    def push(inputs: Tensor, deviations: Tensor) -> Tensor:
        return cast(ModuleLayout, layout).push(inputs, theta.to(inputs.dtype), deviations.to(inputs.dtype))

    is_linearised = covariance is not None and layout.head is None
    return LogitGaussian(mean, _choose_spread(theta, layout, covariance), push if is_linearised else None)


def _choose_spread(theta: Tensor, layout: LogitLayout, covariance: Covariance | None) -> LogitCovariance:
    if covariance is None:
        return NoSpread(layout.num_outputs)
    if layout.head is not None:
        return head_spread(covariance, layout.head)
    return network_spread(covariance, layout, theta)


@dataclass(frozen=True)
class NoSpread:
    """A point estimate of theta: the logits have no variance.

    Args:
        num_outputs: K.
    """

    num_outputs: int
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Return zeros, (n, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return zeros, (n, K)."""
        return self.variance(inputs)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return zeros, (n, K, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs, self.num_outputs)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return zero standard deviations."""
        return LogitRoot(self.variance(inputs))


def network_spread(covariance: Covariance, layout: LogitLayout, theta: Tensor) -> LogitCovariance:
    """Return J Sigma J^T at inputs (n, ...), J the Jacobian at theta (P,), by the structure's fast path if any.

    If the logits do not come from a module with layers, J comes from the layout.
    """
    if layout.network is None:
        return Pulled(partial(_whole_roots, covariance, layout, theta))
    layout = cast(ModuleLayout, layout)  # only ModuleLayout has a module
    if is_by_layer(covariance.structure):
        path = find_path(layout, theta)
        known = None if path is None else path.find(covariance)
        return by_layer(layout, theta, _logit_blocks(covariance), known)
    return by_layer(layout, theta, lambda places: [(slice(0, layout.num_params), PulledBlock(covariance))])


def covariances_together(
    candidates: Sequence[Covariance], layout: LogitLayout, theta: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return a function from inputs (n, ...) to J Sigma J^T for several Sigma with blocks, (C, n, K, K) float64.

    J is computed once for all, and transformed once into shared bases.
    """
    return by_layer_together(cast(ModuleLayout, layout), theta, [_logit_blocks(one) for one in candidates])


def keeps_path(layout: LogitLayout) -> bool:
    """Return whether covariances along a path of prior precisions are cached for this network."""
    return layout.network is not None and COVARIANCES in layout.network.kept


def make_path(
    candidates: Sequence[Covariance], log_precisions: Sequence[float], layout: LogitLayout, theta: Tensor
) -> CovariancePath | None:
    """Return the path through the covariances of one curvature under several precisions, where one is kept."""
    kept = find_cache(cast(ModuleLayout, layout), theta, COVARIANCES)
    return (
        None if kept is None else CovariancePath(log_precisions, covariances_together(candidates, layout, theta), kept)
    )


def _logit_blocks(covariance: Covariance) -> Blocks:
    found: Blocks = covariance.logit_blocks()  # type: ignore[attr-defined]
    return found


def is_by_layer(structure: str) -> bool:
    """Return whether Sigma of this structure has blocks, which avoids K P numbers per example."""
    if not registry.has_name("covariances", structure):  # such as draws
        return False
    return hasattr(registry.load_class("covariances", structure), "network_root")


def is_turned(structure: str) -> bool:
    """Return whether Sigma's blocks are diagonal in bases into which Jacobians are transformed."""
    return is_by_layer(structure) and _network_root(structure) is not PulledBlock


def largest_root(structure: str, layout: ModuleLayout) -> int:
    """Return the approximate number of four-byte values per output and example for the largest block of Sigma."""
    if not is_by_layer(structure):
        return PulledBlock.num_copies * layout.num_params
    largest = max(place.stop - place.start for place in module_places(layout).values())
    return _network_root(structure).num_copies * largest


def _network_root(structure: str) -> type[BlockRoot]:
    found: type[BlockRoot] = registry.load_class("covariances", structure).network_root()
    return found


def _whole_roots(
    covariance: Covariance, layout: LogitLayout, theta: Tensor, inputs: Tensor
) -> Iterator[Iterable[Tensor]]:
    """Yield J L, (b, K, P), for blocks of examples."""
    theta = theta.to(inputs.dtype)
    size = max(1, BLOCK_ELEMENTS.get(inputs.device.type, 2**19) // (layout.num_outputs * layout.num_params))
    for some in slices(0, max(1, len(inputs)), size):
        rows = layout.jacobian(inputs[some], theta)
        yield [covariance.pull_back(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])]


_DRAW_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}  # of a block: intermediate values of all draws in a forward pass


def drawn_spread(layout: ModuleLayout, theta: Tensor, deviations: Tensor) -> Pulled:
    """Return the covariance from deviations D (S, P) of theta (P,), each pushed through the network in forward mode."""

    def roots(inputs: Tensor) -> Iterator[Iterable[Tensor]]:
        size = max(1, _DRAW_ELEMENTS.get(inputs.device.type, 2**25) // (len(deviations) * layout.widest))
        for some in slices(0, max(1, len(inputs)), size):
            pushed = layout.push(inputs[some], theta.to(inputs.dtype), deviations.to(inputs.dtype))
            yield (pushed.permute(1, 2, 0) * len(deviations) ** -0.5,)

    return Pulled(roots)
