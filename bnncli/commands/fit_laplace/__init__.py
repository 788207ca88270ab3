"""fit-laplace: fit a Gaussian posterior to the last layer or to other layers.

`run` prepares a request and a function that fits: of the last layer (last_layer.py) or of other layers (network.py).
`produce_posterior` (session/posteriors.py) turns the function's result into a file through `produce` (session/produce.py), which
locks, decides whether there is work, fits, and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bnncli import registry
from bnncli.artifacts.files import read_header
from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import UsageError, WriteError
from bnncli.figures import render
from bnncli.figures.fits import draw_prior_precision
from bnncli.inference import memory
from bnncli.inference.memory import MOST_LEFT_OUT, NUM_DRAWS, NUM_FOLDS
from bnncli.inference.prior_search import search_size
from bnncli.names import percent
from bnncli.options.command import COMPUTE, Command, NameOptions
from bnncli.options.declaration import check_suffix, option, parse_positive
from bnncli.options.shared import LayersOptions
from bnncli.registry import declaring
from bnncli.session import revisions as _revisions
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior, span_line, span_to_fit
from bnncli.session.inputs import Split, load_split
from bnncli.session.out_of_fold import VAL, load_fitted, unique_sources
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import has_labeled_val, val_lines
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


def _describe_family(family: str) -> str:
    """List the structures of a family, each with its description."""
    about = {name: registry.declared(family, name, "about") for name in registry.in_order(family)}
    return "; ".join(f"{name} ({text})" if text else name for name, text in about.items())


def _list_structures() -> tuple[str, ...]:
    return "auto", *dict.fromkeys(name for family in reversed(_FAMILIES) for name in registry.in_order(family))


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
        return CurvatureChoice(self.curvature, self.rank or DEFAULT_RANK, self.size or DEFAULT_SIZE)

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
            found["rank"] = self.curvature_choice.rank
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


def run(run: Run, options: FitLaplaceOptions) -> Result:
    """Fit and publish the posterior. The result's metrics record the prior precision and the structure chosen."""
    from bnncli.commands.fit_laplace.network import prepare_network

    train = load_fitted(run, options.fit_on)
    criterion = _choose_criterion(run, options, train)
    val = load_split(run, "val") if criterion == "val" or has_labeled_val(run) else None
    run.require_device()
    prepare = _last_layer if options.is_last_layer else prepare_network
    request, fit = prepare(run, options, criterion, train, val)
    if options.plot is not None:
        others = [request.target, run.checkpoint_path, *(source.path for source in request.sources)]
        check_figure_path(Path(options.plot), "--plot", force=run.write.force, others=others)

    result = produce_posterior(run, request, fit, lambda meta: _report(run, request.target, meta))
    if options.plot is not None:
        result.add(_plot(run, Path(options.plot), request.target))
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


def _last_layer(
    run: Run, options: FitLaplaceOptions, criterion: str, train: Split, val: Split | None
) -> tuple[Request, Callable[[], FitOutput]]:
    """Return the request for a posterior over the last layer, and the function that fits it."""
    from bnncli.commands.fit_laplace.last_layer import fit_last_layer, structure_to_fit, warn_of_missing_classes

    # With fewer examples than features, the mode lies in the span of the features. A checkpoint's head need not.
    is_at_mode = options.own_center == "mode"
    span = span_to_fit(run, train, structure=options.structure, num_draws=NUM_DRAWS) if is_at_mode else None
    whole = train.layout if span else None

    @cache
    def structure() -> str:
        return structure_to_fit(
            options.structure,
            span or train.layout,
            run,
            num_examples=len(train.content.features),
            is_search=criterion != "number",
            whole=whole,
        )

    if options.own_bias_precision is not None and not train.layout.has_bias:
        raise UsageError("--bias-precision: the head has no bias")
    if options.own_center == "checkpoint" and train.content.head_weight is None:
        raise UsageError("--center checkpoint: this run has only features, no network; use --center mode")
    if options.prior_mean == "checkpoint" and train.content.head_weight is None:
        raise UsageError("--prior-mean checkpoint: this run has only features, no network; use --prior-mean zero")
    if len(train.content.features) < train.layout.num_features:
        run.console.warn(
            f"there are fewer training examples ({len(train.content.features)}) than features "
            f"({train.layout.num_features}), so the prior determines most of the posterior"
        )
    warn_of_missing_classes(run, [train] if val is None or VAL in options.fit_on else [train, val])
    folds_bytes = 8 * NUM_FOLDS * train.layout.num_params if VAL in options.fit_on else 0

    def require() -> None:
        if VAL in options.fit_on:
            _require_folds(run, train)
        structure()

    request = posterior_request(
        run,
        "laplace",
        params=options.params_of_fit(criterion, run.compute.seed),
        algo_rev=_revisions.of_laplace(in_span=span is not None),
        sources=unique_sources(train, val),
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: memory.stored_bytes(structure(), span or train.layout, whole=whole) + folds_bytes,
        require=require,
    )

    def fit() -> FitOutput:
        return fit_last_layer(run, options, criterion, structure(), train, val, in_span=span is not None)

    return request, fit


def _require_folds(run: Run, fitted: Split) -> None:
    """Raise DeviceError where memory cannot hold one copy per fold of the features that the search reads."""
    num_examples, num_features = fitted.content.features.shape
    layout = fitted.layout
    searched = search_size(
        num_examples, num_params=layout.num_params, num_outputs=layout.num_outputs, device=run.device
    )
    memory.require(
        4 * NUM_FOLDS * searched * num_features,
        run.device_name,
        what=f"{NUM_FOLDS} folds of {searched:,} rows of {num_features:,} features",
        hint="use \0fit_on\0 val, or hold out fewer rows",
    )


def _report(run: Run, path: Path, meta: Mapping[str, Any]) -> Report:
    """Return the metrics, the search's curve and the summary. Warn where the posterior scores worse than the network."""
    from bnncli.commands.fit_laplace.last_layer import warn_of_val

    metrics = meta["metrics"]
    warn_of_val(run, path, metrics)
    return Report({**metrics, "prior_precision_curve": meta.get("curve")}, _summary(metrics))


def _summary(metrics: dict[str, Any]) -> list[str]:
    scale = metrics.get("prior_mean_scale")
    about = "" if scale is None else f", centred on {scale:.4g} times the checkpoint's last layer"
    by_val = "lowest val NLL" + (f", {metrics['num_folds']}-fold cross-validated" if "num_folds" in metrics else "")
    chosen = {
        "val": by_val,
        "loo": "lowest leave-one-out NLL on train",
        "marglik": "marginal likelihood",
        "number": "as given",
    }[metrics["prior_precision_by"]]
    if metrics.get("prior_precision_for") == "plug-in":
        chosen += " of the mode, which predicts better than draws at every precision"
    bias = f", {metrics['bias_precision']:.4g} for the biases" if "bias_precision" in metrics else ""
    compared = metrics.get("structure_nll") or {}
    by_val = ", ".join(f"{name} {value:.4f}" for name, value in compared.items())
    by_val = f" (val NLL at one precision: {by_val}; the closest structure with a near-best NLL)" if by_val else ""
    lines = [
        f"prior precision {metrics['prior_precision']:.4g} ({chosen}){bias}{about}; structure {metrics['structure']}{by_val}, {metrics['num_params']} parameters"
    ]
    lines += span_line(metrics)
    if "fit_on" in metrics:
        lines.append(f"fitted to {metrics['fit_on']}; scores on val are {metrics['num_folds']}-fold cross-validated")
    if "effective_params" in metrics and "subnetwork_size" not in metrics:
        lines.append(
            f"the data determine about {format_count(metrics['effective_params'])} parameters (the effective number); "
            "all other directions keep the prior's variance"
        )
    if "layer_precisions" in metrics:
        each = ", ".join(f"{name} {value:.4g}" for name, value in metrics["layer_precisions"].items())
        lines.append(
            f"prior precision per layer: {each}; the log marginal likelihood is "
            f"{metrics['layer_precisions_gain']:.2f} nats higher than with one precision for all layers"
        )
    if "captured_trace" in metrics:
        lines.append(
            f"the {metrics['rank']} largest eigenvalues hold {percent(metrics['captured_trace'])} of the "
            f"curvature's trace (+- {percent(metrics['captured_trace_standard_error'])}); other directions keep "
            "the prior's variance"
        )
    if "solver_steps" in metrics:
        lines.append(
            f"{metrics['draws']} draws from the full Gauss-Newton Gaussian by conjugate gradients, "
            f"preconditioned by {metrics['structure']}: {metrics['solver_steps']} steps, "
            f"{metrics['solver_passes']} passes over the data, relative residual {metrics['solver_residual']:.2g}"
        )
    if metrics.get("num_diagonal_params"):
        lines.append(
            f"{metrics['num_diagonal_params']:,} of {metrics['num_params']:,} parameters have no Kronecker "
            "factors and use only their diagonal"
        )
    if "subnetwork_size" in metrics:
        lines += _describe_subnetwork(metrics)
    if "mode_passes" in metrics:
        chosen = "; the prior precision was chosen around the checkpoint's weights"
        lines.append(
            f"the centre is {metrics['newton_decrement']:.2g} posterior standard deviations (all parameters together) from the "
            f"mode, after {metrics['mode_passes']:,} passes over the data"
            f"{chosen if metrics['prior_precision_compared_at'] == 'checkpoint' else ''}"
        )
    if metrics["mode_distance"] is not None:
        lines.append(
            f"the mode is {metrics['mode_distance']:.3g} from the checkpoint's "
            f"{'weights' if 'layers' in metrics else 'head'}, {metrics['mode_distance_in_sd']:.1f} posterior "
            "standard deviations (rms over parameters)"
        )
    if metrics["log_marginal_likelihood"] is not None:
        kind = metrics.get("curvature", "hessian")  # of a last layer the two are the same
        is_exact = kind == "hessian" and metrics["structure"] in declaring("curvature", "is_exact")
        named = metrics["structure"] if kind == "hessian" else f"{metrics['structure']} {kind}"
        of = "" if is_exact else f", with the {named} approximation of the Hessian"
        lines.append(f"log marginal likelihood {metrics['log_marginal_likelihood']:.2f} nats{of}")
    elif metrics.get("log_marginal_likelihood_undefined"):
        lines.append(
            f"no log marginal likelihood ({metrics['log_marginal_likelihood_undefined']}); use --center mode for one"
        )
    lines += val_lines(metrics)
    return lines


def format_count(count: float) -> str:
    """Format a count that need not be whole with three significant digits, or all digits before the point."""
    return f"{count:,.0f}" if abs(count) >= 100 else f"{count:.3g}"


def _describe_subnetwork(metrics: dict[str, Any]) -> list[str]:
    """Return lines on which parameters vary and how many of them the data inform."""
    each = ", ".join(f"{name} {count:,}" for name, count in metrics["subnetwork_params"].items())
    lines = [
        f"{metrics['subnetwork_size']:,} of {metrics['num_params']:,} parameters vary, those with the largest "
        f"marginal variances ({each}); the others are fixed"
    ]
    if metrics["subnetwork_as_prior"]:
        lines.append(
            f"{metrics['subnetwork_as_prior']:,} of them keep nearly all of the prior's variance: the data say "
            "almost nothing about them"
        )
    return lines


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
