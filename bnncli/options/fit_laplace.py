"""Options of fit-laplace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.options.declaration import check_suffix, option, parse_positive
from bnncli.options.shared import LayersOptions
from bnncli.targets.curvature_choice import (
    _FAMILIES,
    DEFAULT_RANK,
    DEFAULT_SIZE,
    GGN,
    KINDS,
    CurvatureChoice,
    kinds_of,
    structures_of,
)

LOO = "loo"


def _named(family: str) -> str:
    """The structures of a family, each with a few words where it has some."""
    about = {name: registry.declared(family, name, "about") for name in registry.in_order(family)}
    return "; ".join(f"{name} ({text})" if text else name for name, text in about.items())


def _structures() -> tuple[str, ...]:
    every = (
        name for family in reversed(_FAMILIES) for name in registry.in_order(family)
    )  # all that the last layer has too
    return "auto", *dict.fromkeys(every)


def _structure_help() -> str:
    return (
        "Covariance structure; auto takes the richest affordable one, and may compare it with simpler ones on "
        f"val. Last layer: {_named('curvature')}; other layers: {_named('network_curvature')}."
    )


@dataclass(frozen=True)
class FitLaplaceOptions(LayersOptions):
    """Options of fit-laplace."""

    structure: str = option("auto", _structure_help, choices=_structures, group="Gaussian")
    center: str | None = option(
        None,
        "Centre of the Gaussian: the exact mode, or the checkpoint's weights. Default: mode for the last layer, "
        "else checkpoint.",
        choices=("mode", "checkpoint"),
        group="Gaussian",
    )
    prior_precision: str = option(
        "auto",
        "Prior precision: a number, or how to choose it: by NLL on val, by leave-one-out NLL on train (loo), or "
        "by marginal likelihood. auto takes the first of these that applies.",
        metavar="NUMBER|val|loo|marglik|auto",
        group="Target",
    )
    bias_precision: str = option(
        "same",
        "Prior precision of the biases: a fixed number, or same as the weights'.",
        metavar="NUMBER|same",
        group="Target",
    )
    prior_mean: str = option(
        "zero",
        "Prior mean of the last layer: zero, or the network's own layer scaled by the best temperature on val.",
        choices=("zero", "checkpoint"),
        numeric=False,  # recorded where it counts: `params`
        group="Target",
        is_rare=True,
    )
    fit_on: str = option(
        "train",
        "Examples to fit the last layer to. With val, cross-validation chooses the prior precision.",
        choices=("train", "val", "train+val"),
        numeric=False,  # recorded where it counts: `params`
        group="Target",
    )
    curvature: str = option(
        GGN,
        "Curvature for layers other than the last: generalised Gauss-Newton, full Hessian, or empirical Fisher.",
        choices=KINDS,
        numeric=False,  # recorded where it counts: `params`
        group="Gaussian",
        is_rare=True,
    )
    rank: int | None = option(
        None,
        f"Number of eigenvectors kept by \0structure\0 low-rank. Default: {DEFAULT_RANK}.",
        minimum=1,
        numeric=False,
        group="Gaussian",
        is_rare=True,
    )
    size: int | None = option(
        None,
        "Number of parameters with the largest marginal variances kept by \0structure\0 subnetwork. Default: "
        f"{DEFAULT_SIZE:,}.",
        minimum=1,
        numeric=False,
        group="Gaussian",
        is_rare=True,
    )
    draws: int | None = option(
        None,
        "Draw this many samples by sample-then-optimise, without forming a covariance. \0structure\0 is then "
        "used to choose the prior precision and as a preconditioner.",
        minimum=1,
        numeric=False,
        group="Gaussian",
        is_rare=True,
    )
    precision_per: str = option(
        "network",
        "Use one prior precision for the network, or one per layer, chosen by marginal likelihood (\0center\0 "
        "checkpoint).",
        choices=("network", "layer"),
        numeric=False,
        group="Target",
        is_rare=True,
    )
    plot: str | None = option(
        None,
        "Plot the search for the prior precision as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
        numeric=False,
        group="Output",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))
        fitting = structures_of(is_last_layer=self.is_last_layer)
        if self.structure != "auto" and self.structure not in fitting:
            raise UsageError(
                f"\0structure\0: with \0layers\0 {self.layers} expected auto or one of {', '.join(fitting)}; got {self.structure!r}",
                hint="add \0layers\0 all or a pattern" if self.is_last_layer else None,
            )
        self._check_curvature()
        if self.prior_mean == "checkpoint" and not self.is_last_layer:
            raise UsageError(f"\0prior_mean\0 checkpoint is for \0layers\0 last; got \0layers\0 {self.layers}")
        if self.fit_on != "train" and (not self.is_last_layer or self.own_center != "mode"):
            raise UsageError(f"\0fit_on\0 {self.fit_on} is for \0layers\0 last at \0center\0 mode")
        if self.bias_precision != "same":
            parse_positive(self.bias_precision, "\0bias_precision\0", "same or a positive number")
        if self.prior_precision == LOO and (not self.has_left_out or self.fit_on != "train"):
            raise UsageError("\0prior_precision\0 loo is for \0layers\0 last at \0center\0 mode and \0fit_on\0 train")
        if self.prior_precision not in ("auto", "val", LOO, "marglik"):
            parse_positive(self.prior_precision, "\0prior_precision\0", "auto, val, loo, marglik or a positive number")
            if self.plot is not None:
                raise UsageError("\0plot\0 draws the search for the prior precision; a fixed number needs no search")

    def _check_curvature(self) -> None:
        if self.curvature != GGN:
            if self.is_last_layer:
                raise UsageError(
                    f"\0curvature\0 {self.curvature} is for \0layers\0 all or a pattern; for the last layer, ggn "
                    "equals the Hessian"
                )
            if self.own_center != "checkpoint":
                raise UsageError(
                    f"\0curvature\0 {self.curvature} works only with \0center\0 checkpoint; when centred at a mode, "
                    "use ggn"
                )
            fitting = [name for name in structures_of(is_last_layer=False) if self.curvature in kinds_of(name)]
            if self.structure not in ("auto", *fitting):
                raise UsageError(
                    f"\0structure\0: with \0curvature\0 {self.curvature} expected {' or '.join(fitting)}; got "
                    f"{self.structure!r}"
                )
        if self.precision_per == "layer":
            if self.is_last_layer or self.own_center != "checkpoint":
                raise UsageError("\0precision_per\0 layer is for \0layers\0 all or a pattern, at \0center\0 checkpoint")
            if self.prior_precision not in ("auto", "marglik") or self.bias_precision != "same":
                raise UsageError(
                    "\0precision_per\0 layer chooses all precisions by marginal likelihood: drop "
                    "\0bias_precision\0, and give \0prior_precision\0 marglik or nothing"
                )
        if self.rank is not None and self.structure != "low-rank":
            raise UsageError("\0rank\0 is for \0structure\0 low-rank")
        if self.size is not None and self.structure != "subnetwork":
            raise UsageError("\0size\0 is for \0structure\0 subnetwork")
        if self.structure == "subnetwork":
            self._check_subnetwork()
        if self.draws is not None:
            if self.is_last_layer:
                raise UsageError(
                    "\0draws\0 is for \0layers\0 all or a pattern; for the last layer the Gaussian itself is stored"
                )
            if self.curvature != GGN or self.structure == "subnetwork":
                raise UsageError(
                    "\0draws\0 samples the full Gauss-Newton Gaussian: drop \0curvature\0 and \0structure\0 subnetwork"
                )

    def _check_subnetwork(self) -> None:
        """Which parameters vary must not depend on the precision that is looked for."""
        if self.bias_precision != "same" and self.prior_precision in ("auto", "val", "marglik"):
            raise UsageError(
                "\0structure\0 subnetwork: with \0bias_precision\0 the weights' precision decides which "
                "parameters vary: give \0prior_precision\0 a number"
            )
        if self.own_center == "mode" and self.prior_precision in ("auto", "marglik"):
            raise UsageError(
                "\0structure\0 subnetwork at \0center\0 mode: marginal likelihoods of different subnetworks are "
                "not comparable: give \0prior_precision\0 val or a number"
            )

    @property
    def has_left_out(self) -> bool:
        """Whether the loss of a left-out example is known without another fit."""
        return self.is_last_layer and self.own_center == "mode"

    @property
    def curvature_choice(self) -> CurvatureChoice:
        """What H is, and what is kept of it."""
        return CurvatureChoice(self.curvature, self.rank or DEFAULT_RANK, self.size or DEFAULT_SIZE)

    @property
    def own_center(self) -> str:
        """mode or checkpoint."""
        return self.center or ("mode" if self.is_last_layer else "checkpoint")

    def params(self) -> dict[str, Any]:
        """The options that change numbers."""
        found = {**super().params(), "center": self.own_center, **self.layers_params}
        if not self.is_last_layer:
            found["curvature"] = self.curvature
        if self.prior_mean != "zero":
            found["prior_mean"] = self.prior_mean
        if self.fit_on != "train":
            found["fit_on"] = self.fit_on
        if self.precision_per == "layer":
            found["precision_per"] = self.precision_per
        if self.structure == "low-rank":
            found["rank"] = self.curvature_choice.rank
        if self.draws is not None:
            found["draws"] = self.draws
        if self.structure == "subnetwork":
            found["size"] = self.curvature_choice.size
        return found

    @property
    def own_bias_precision(self) -> float | None:
        """The number that --bias-precision gives; None for the weights'."""
        return None if self.bias_precision == "same" else float(self.bias_precision)
