"""The diagonal blocks of the Gauss-Newton matrix, one per module: a layer's weight with its bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.network_curvature._rows import examples_at_once, weighted_rows
from bnncli.parameters.module import module_places

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget


class Block:
    """`hessian.block.<module>`, (F, F) each, for the F parameters of the module itself."""

    order: ClassVar[int] = 20
    about: ClassVar[str] = "all pairs of one module's parameters"
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.block.<module>`, (F, F) float64 each."""
        places = module_places(target.layout)
        totals = {
            module: torch.zeros(place.stop - place.start, place.stop - place.start, dtype=torch.float64).to(
                target.device
            )
            for module, place in places.items()
        }
        for rows in weighted_rows(target, theta):
            for module, place in places.items():
                totals[module] += rows[:, place].T @ rows[:, place]
        return {f"hessian.block.{module}": total * target.likelihood_scale for module, total in totals.items()}

    @staticmethod
    def examples_at_once(target: NetworkTarget) -> int:
        """Return the number of examples whose rows fit at once."""
        return examples_at_once(target)

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return the sum of F^2."""
        return sum((place.stop - place.start) ** 2 for place in module_places(layout).values())
