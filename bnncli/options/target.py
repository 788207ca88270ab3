"""Options of commands that fit a posterior to a target: over which parameters it is, and what its prior is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli.options.declaration import option, parse_positive
from bnncli.options.layers import LayersOptions

AUTO, INHERIT = "auto", "inherit"


@dataclass(frozen=True)
class TargetOptions(LayersOptions):
    """The layers of a target, and the base whose prior it has."""

    base: str | None = option(
        None,
        "Artifact whose prior defines the target. Default: laplace, or laplace-all for \0layers\0 all.",
        metavar="NAME|FILE",
        numeric=False,
        group="Target",
    )

    @property
    def default_base(self) -> str:
        """The base where none was named."""
        return f"laplace{self.layers_suffix}"

    @property
    def given_precision(self) -> float | None:
        """The prior precision that was given as a number."""
        return None

    def params(self) -> dict[str, Any]:
        """The options that change numbers."""
        return {**super().params(), **self.layers_params}


@dataclass(frozen=True)
class GivenPriorOptions(TargetOptions):
    """The same, and a prior precision in place of the base's."""

    prior_precision: float | None = option(
        None,
        "Prior precision of the target, biases included. Default: the base's prior.",
        minimum=1e-30,
        group="Target",
    )

    @property
    def given_precision(self) -> float | None:
        """The prior precision that was given as a number."""
        return self.prior_precision


@dataclass(frozen=True)
class SearchedPriorOptions(LayersOptions):
    """A prior precision that is searched for, taken from the base, or given."""

    prior_precision: str = option(
        AUTO,
        "Prior precision of the target, biases included: a number, inherit (the base's), or auto (searched for "
        "on val). For other layers or without a labelled val split, auto means inherit.",
        metavar="NUMBER|inherit|auto",
        group="Target",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior_precision not in (AUTO, INHERIT):
            parse_positive(self.prior_precision, "\0prior_precision\0", "auto, inherit or a positive number")

    @property
    def given_precision(self) -> float | None:
        """The prior precision that was given as a number."""
        return None if self.prior_precision in (AUTO, INHERIT) else float(self.prior_precision)

    def params(self) -> dict[str, Any]:
        """The options that change numbers; a prior that is the base's is recorded as none of its own."""
        own = AUTO if self.prior_precision == AUTO else self.given_precision
        return {**super().params(), "prior_precision": own}
