"""Options of fit-laplace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.options.declaration import check_suffix, option, parse_positive
from bnncli.options.layers import LayersOptions
from bnncli.targets.curvature_choice import DEFAULT_RANK, DEFAULT_SIZE, GGN, KINDS, CurvatureChoice

LOO = "loo"
_FAMILIES = ("curvature", "network_curvature")  # of the last layer, of other layers


def _named(family: str) -> str:
    """The structures of a family, each with a few words where it has some."""
    about = {name: registry.declared(family, name, "about") for name in registry.in_order(family)}
    return "; ".join(f"{name} ({text})" if text else name for name, text in about.items())


def _structures() -> tuple[str, ...]:
    every = (
        name for family in reversed(_FAMILIES) for name in registry.in_order(family)
    )  # all that the last layer has too
    return "auto", *dict.fromkeys(every)


def structures_of(*, is_last_layer: bool) -> list[str]:
    """Those of the last layer, or of other layers, from the one that says most of the posterior to the least."""
    return registry.in_order(_FAMILIES[not is_last_layer])


def kinds_of(structure: str) -> tuple[str, ...]:
    """The kinds of curvature that a structure of a whole network is made of: the first alone where its file names none."""
    if registry.declaration_of("network_curvature", structure, "kinds") is None:
        return (GGN,)
    found: tuple[str, ...] = registry.declared("network_curvature", structure, "kinds")
    return found


def _structure_help() -> str:
    return f"Structure of the covariance. Of the last layer: {_named('curvature')}. Of other layers (\0layers\0): {_named('network_curvature')}; auto there is full up to 2,000 parameters, else kron, as far as they fit. Of the last layer auto is full where it fits in memory and has at most 6,000 parameters, else block where it is no slower than that, else kron; where it is not full and val chooses the prior precision, the first of these and the rougher ones whose val NLL is within a standard error, or a hundredth, of the lowest. Of fewer examples than features full and block are fitted in the space that these span, exactly: that is much smaller."


@dataclass(frozen=True)
class FitLaplaceOptions(LayersOptions):
    """Options of fit-laplace."""

    structure: str = option(
        "auto",
        _structure_help,
        choices=_structures,
    )
    center: str | None = option(
        None,
        "Where the Gaussian is centred: the exact mode of the target, or the checkpoint's weights; by default the mode of the last layer, and for \0layers\0 all or a pattern the checkpoint. The mode of more than 2,048 parameters of a network takes some hundred passes over the data, and its prior precision is chosen about the checkpoint's weights first.",
        choices=("mode", "checkpoint"),
    )
    prior_precision: str = option(
        "auto",
        "Of the weights (and of the biases, see \0bias_precision\0): a number; val (lowest NLL on the val split, which must be data the network was not trained on: of draws, or of the mode alone where that predicts better); loo (lowest leave-one-out NLL on train, of a last layer at its mode, in closed form); marglik (log marginal likelihood); auto is val where there is a val split, else loo, and marglik where that is not for the layers, the centre or more than 300 classes.",
        metavar="NUMBER|val|loo|marglik|auto",
    )
    bias_precision: str = option(
        "same",
        "Prior precision of the biases: same as the weights', or a number, which stays while the weights' is chosen.",
        metavar="NUMBER|same",
    )
    prior_mean: str = option(
        "zero",
        "Mean of the prior of the last layer: zero, or checkpoint, the network's own last layer divided by the temperature that val prefers (by 1 "
        "without a val split). The strongest precisions searched then leave the network at that temperature.",
        choices=("zero", "checkpoint"),
        numeric=False,  # recorded where it counts: `params`
    )
    fit_on: str = option(
        "train",
        "Rows whose likelihood the last layer is fitted to: train, val, or both (train+val). Where val is among them, the prior precision is "
        "chosen by 5-fold cross-validation over its rows, and predict gives its rows out of fold; see \0prior_mean\0 checkpoint for few rows.",
        choices=("train", "val", "train+val"),
        numeric=False,  # recorded where it counts: `params`
    )
    curvature: str = option(
        GGN,
        "Second derivatives of a whole network's loss: ggn (the generalised Gauss-Newton matrix, positive semidefinite everywhere), hessian (all of them: \0structure\0 full, for small networks, or subnetwork), or fisher (the empirical Fisher matrix, of the gradients at the labels). Of the last layer ggn is the Hessian.",
        choices=KINDS,
        numeric=False,  # recorded where it counts: `params`
    )
    rank: int | None = option(
        None,
        f"Eigenvectors of \0structure\0 low-rank, those of the largest eigenvalues; {DEFAULT_RANK} by default.",
        minimum=1,
        numeric=False,
    )
    size: int | None = option(
        None,
        f"Parameters of \0structure\0 subnetwork, those of the largest marginal variances, as the diagonal Gaussian has them; all others stay fixed. {DEFAULT_SIZE:,} by default, or all where there are fewer.",
        minimum=1,
        numeric=False,
    )
    draws: int | None = option(
        None,
        "Make so many draws of the Gaussian of the whole Gauss-Newton matrix, which is never formed (sample-then-optimise, for networks "
        "of any size), in the place of the Gaussian of \0structure\0: that one chooses the prior precision and whitens the conjugate gradients.",
        minimum=1,
        numeric=False,
    )
    precision_per: str = option(
        "network",
        "One prior precision for the whole network, or one for each layer (a module's own parameters), chosen together by the marginal likelihood at \0center\0 checkpoint.",
        choices=("network", "layer"),
        numeric=False,
    )
    plot: str | None = option(
        None,
        "Draw the search for the prior precision, criterion against precision, as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
        numeric=False,
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
            raise UsageError(f"\0prior_mean\0 checkpoint is for \0layers\0 last, got \0layers\0 {self.layers}")
        if self.fit_on != "train" and (not self.is_last_layer or self.own_center != "mode"):
            raise UsageError(f"\0fit_on\0 {self.fit_on} is for \0layers\0 last at \0center\0 mode")
        if self.bias_precision != "same":
            parse_positive(self.bias_precision, "\0bias_precision\0", "same or a positive number")
        if self.prior_precision == LOO and (not self.has_left_out or self.fit_on != "train"):
            raise UsageError(
                "\0prior_precision\0 loo leaves out examples of train: it is for \0layers\0 last at \0center\0 mode, \0fit_on\0 train"
            )
        if self.prior_precision not in ("auto", "val", LOO, "marglik"):
            parse_positive(self.prior_precision, "\0prior_precision\0", "auto, val, loo, marglik or a positive number")
            if self.plot is not None:
                raise UsageError("\0plot\0 draws the search for the prior precision; there is none with a number given")

    def _check_curvature(self) -> None:
        if self.curvature != GGN:
            if self.is_last_layer:
                raise UsageError(
                    f"\0curvature\0 {self.curvature} is for \0layers\0 all or a pattern: of the last layer ggn is the Hessian"
                )
            if self.own_center != "checkpoint":
                raise UsageError(f"\0curvature\0 {self.curvature} is for \0center\0 checkpoint: at a mode it is ggn")
            fitting = [name for name in structures_of(is_last_layer=False) if self.curvature in kinds_of(name)]
            if self.structure not in ("auto", *fitting):
                raise UsageError(
                    f"\0structure\0: with \0curvature\0 {self.curvature} expected {' or '.join(fitting)}, got {self.structure!r}"
                )
        if self.precision_per == "layer":
            if self.is_last_layer or self.own_center != "checkpoint":
                raise UsageError("\0precision_per\0 layer is for \0layers\0 all or a pattern, at \0center\0 checkpoint")
            if self.prior_precision not in ("auto", "marglik") or self.bias_precision != "same":
                raise UsageError(
                    "\0precision_per\0 layer chooses all precisions by the marginal likelihood: leave out \0bias_precision\0, and give "
                    "\0prior_precision\0 marglik or nothing"
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
                    "\0draws\0 is for \0layers\0 all or a pattern: of the last layer the Gaussian itself is made"
                )
            if self.curvature != GGN or self.structure == "subnetwork":
                raise UsageError(
                    "\0draws\0 is of all of the Gauss-Newton matrix: leave out \0curvature\0 and \0structure\0 subnetwork"
                )

    def _check_subnetwork(self) -> None:
        """Which parameters vary must not depend on the precision that is looked for."""
        if self.bias_precision != "same" and self.prior_precision in ("auto", "val", "marglik"):
            raise UsageError(
                "\0structure\0 subnetwork: with \0bias_precision\0 the precision of the weights decides which parameters vary: give "
                "\0prior_precision\0 a number"
            )
        if self.own_center == "mode" and self.prior_precision in ("auto", "marglik"):
            raise UsageError(
                "\0structure\0 subnetwork at \0center\0 mode: each precision has a subnetwork of its own, whose marginal likelihoods do "
                "not compare; give \0prior_precision\0 val or a number"
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
