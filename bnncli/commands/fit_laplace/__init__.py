"""fit-laplace: fit a Gaussian posterior to the last layer or to other layers.

`execute` opens the inputs and hands a `Method` to `run_fit` (session/fits.py), for the last layer (last_layer.py) or for
other layers (network.py). `run_fit` makes the request, and `produce` (session/produce.py) locks, decides whether there
is work, fits, and publishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli import registry
from bnncli.artifacts.files import read_header
from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import UsageError, WriteError
from bnncli.figures import render
from bnncli.figures.fits import draw_prior_precision
from bnncli.inference.structure_choice import MOST_LEFT_OUT
from bnncli.options.command import COMPUTE, Command, NameOptions
from bnncli.options.declaration import check_suffix, option, parse_positive
from bnncli.options.shared import LayersOptions
from bnncli.session.fits import FitInputs, run_fit
from bnncli.session.inputs import Split, load_fitted, load_split
from bnncli.session.run import Result, Run
from bnncli.session.val_report import has_labeled_val
from bnncli.targets.curvature_choice import (
    DEFAULT_RANK,
    DEFAULT_SIZE,
    GGN,
    KINDS,
    RANKED,
    STRUCTURE_FAMILIES,
    CurvatureChoice,
    kinds_of,
    structures_of,
)

LOO = "loo"


def _describe_family(family: str) -> str:
    """List the structures of a family, each with its description."""
    about = {name: registry.read_declared(family, name, "about") for name in registry.in_order(family)}
    return "; ".join(f"{name} ({text})" if text else name for name, text in about.items())


def _list_structures() -> tuple[str, ...]:
    return "auto", *dict.fromkeys(name for family in reversed(STRUCTURE_FAMILIES) for name in registry.in_order(family))


def _structure_help() -> str:
    return (
        "Covariance structure; auto takes the richest affordable one, and may compare it with simpler ones on "
        f"val. Last layer: {_describe_family('curvature')}; other layers: {_describe_family('network_curvature')}."
    )


@dataclass(frozen=True)
class FitLaplaceOptions(LayersOptions):
    """Options of fit-laplace."""

    structure: str = option("auto", _structure_help, choices=_list_structures, group="Gaussian")
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
        f"Number of eigenvectors kept by \0structure\0 low-rank (default: {DEFAULT_RANK}), or of each large Kronecker "
        "factor by kron and ekfac with \0layers\0 (default: all).",
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
        if self.rank is not None and (self.structure not in RANKED or self.is_last_layer):
            raise UsageError(f"\0rank\0 is for \0structure\0 {', '.join(RANKED)} with \0layers\0 all or a pattern")
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
        """Refuse a search under which the set of varying parameters would depend on the precision it tries."""
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
        """True where leave-one-out losses need no further fits."""
        return self.is_last_layer and self.own_center == "mode"

    @property
    def curvature_choice(self) -> CurvatureChoice:
        """Return the kind of curvature and the sizes of its low-rank and subnetwork structures."""
        return CurvatureChoice(self.curvature, self.rank, self.size or DEFAULT_SIZE)

    @property
    def own_center(self) -> str:
        """Return mode or checkpoint, with the default filled in."""
        return self.center or ("mode" if self.is_last_layer else "checkpoint")

    def params(self) -> dict[str, Any]:
        """Return the options that change numbers."""
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
            found["rank"] = self.curvature_choice.low_rank
        elif self.rank is not None:
            found["rank"] = self.rank
        if self.draws is not None:
            found["draws"] = self.draws
        if self.structure == "subnetwork":
            found["size"] = self.curvature_choice.size
        return found

    @property
    def own_bias_precision(self) -> float | None:
        """Return the number given by --bias-precision; None where biases share the weights' precision."""
        return None if self.bias_precision == "same" else float(self.bias_precision)

    def params_of_fit(self, criterion: str, seed: int) -> dict[str, Any]:
        """Return the parameters that identify a fit: options and seed, with given precisions as numbers."""
        params = {**self.params(), "seed": seed}
        if criterion == "number":
            params["prior_precision"] = float(self.prior_precision)
        if self.own_bias_precision is not None:
            params["bias_precision"] = self.own_bias_precision
        return params


COMMAND = Command(
    "Fit a Gaussian (Laplace) posterior over the last layer, or over other layers.",
    "For the last layer, finds the mode by Newton's method and fits the Gaussian there. For other layers "
    "(--layers), fits it at the network's weights unless you add --center mode. Chooses the prior precision "
    "unless you give a number. Writes posteriors/laplace.safetensors, or laplace-all.",
    (FitLaplaceOptions, NameOptions, *COMPUTE),
    (
        "bnncli fit-laplace ckpt.pt",
        "bnncli fit-laplace ckpt.pt --structure kron --prior-precision 510 --name kron",
        "bnncli fit-laplace ckpt.pt --fit-on val --prior-mean checkpoint --name about",
        "bnncli fit-laplace ckpt.pt --layers all --structure kron",
        "bnncli fit-laplace ckpt.pt --layers 'layer4*+fc*' --name top",
    ),
    section="Fit",
    place=30,
)


def execute(run: Run, options: FitLaplaceOptions) -> Result:
    """Fit and publish the posterior. The result's metrics record the prior precision and the structure chosen."""
    from bnncli.commands.fit_laplace.last_layer import LastLayerLaplace, check_last_layer
    from bnncli.commands.fit_laplace.network import NetworkLaplace, check_network

    train = load_fitted(run, options.fit_on)
    criterion = _choose_criterion(run, options, train)
    val = load_split(run, "val") if criterion == "val" or has_labeled_val(run) else None
    run.require_device()
    inputs = FitInputs(run, options, train, val)
    check_inputs, kind = (
        (check_last_layer, LastLayerLaplace) if options.is_last_layer else (check_network, NetworkLaplace)
    )
    check_inputs(inputs, options)
    method = kind(inputs, options, criterion)
    if options.plot is not None:
        others = [method.target, run.checkpoint_path, *(source.path for source in inputs.sources)]
        check_figure_path(Path(options.plot), "--plot", force=run.write.force, others=others)
    result = run_fit(method)
    if options.plot is not None:
        result.add(_plot(run, Path(options.plot), method.target))
    return result


_BETTER = "a val split of data that the network was not trained on would be better (--hold-out val=test:2000)"


_WITHOUT_VAL = {
    LOO: "no labelled val split: choosing the prior precision by leave-one-out on train, although its labels may "
    f"have shaped the features; {_BETTER}",
    "marglik": "no labelled val split: choosing the prior precision by the marginal likelihood, which may prefer far too "
    f"weak priors if the features were trained on the same data; {_BETTER}",
}


def _choose_criterion(run: Run, options: FitLaplaceOptions, train: Split) -> str:
    """Return how the prior precision is chosen: number, val, loo or marglik."""
    criterion, num_outputs = options.prior_precision, train.layout.num_outputs
    if options.precision_per == "layer":
        return "marglik"
    if criterion == "auto" and has_labeled_val(run):
        return "val"
    if criterion == "auto":
        criterion = LOO if options.has_left_out and num_outputs <= MOST_LEFT_OUT else "marglik"
        run.console.warn(_WITHOUT_VAL[criterion])
    elif criterion == LOO and num_outputs > MOST_LEFT_OUT:
        raise UsageError(f"--prior-precision loo: expected at most {MOST_LEFT_OUT} outputs; the head has {num_outputs}")
    return criterion if criterion in ("val", LOO, "marglik") else "number"


def _plot(run: Run, path: Path, artifact: Path) -> Result:
    """Draw the search that the artifact stores, whether it was fitted now or before."""
    role = f"{artifact.stem}.plot"
    if run.write.dry_run:
        size = 1 << 17
        output: dict[str, Any] = {"role": role, "path": str(path), "planned": "compute", "estimated_bytes": size}
        return Result("planned", [output], lines=[f"draw: {path}"])

    meta = read_header(artifact).meta
    figure = draw_prior_precision(
        [(precision, value) for precision, value in meta["curve"]],
        criterion=meta["criterion"],
        at_edge=meta["metrics"]["prior_precision_at_edge"],
        network=meta["metrics"]["val_nll_network"] if meta["criterion"] == "val" else None,
    )
    try:
        digest = write_figure(path, render(figure, path.suffix[1:].lower()))
    except WriteError as error:
        message = f"--plot: cannot write {path}; {artifact} is complete, and --plot FILE draws it without fitting again"
        raise WriteError(message, hint=error.hint, path=path) from None
    return Result("", [{"role": role, "path": str(path), "content_digest": digest}])
