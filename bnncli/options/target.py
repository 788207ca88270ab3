"""Options of commands that fit a posterior to a target: over which parameters it is, and what its prior is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.options.declaration import option
from bnncli.options.layers import LayersOptions


@dataclass(frozen=True)
class TargetOptions(LayersOptions):
    """The layers and the prior of a target."""

    base: str | None = option(
        None,
        "Artifact whose prior defines the target: laplace by default, or for \0layers\0 all or a pattern the one that fit-laplace makes of these layers (laplace-all).",
        metavar="NAME|FILE",
        numeric=False,
    )
    prior_precision: float | None = option(
        None, "Prior precision of the target, biases included, instead of the base's prior.", minimum=1e-30
    )

    @property
    def default_base(self) -> str:
        """The base where none was named."""
        return f"laplace{self.layers_suffix}"

    def params(self) -> dict[str, Any]:
        """The options that change numbers."""
        return {**super().params(), **self.layers_params}
