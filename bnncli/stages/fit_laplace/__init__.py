"""fit-laplace: features in, a Gaussian posterior over the head out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import UsageError, WriteError
from bnncli.inference import memory
from bnncli.inference.memory import MOST_LEFT_OUT, NUM_DRAWS, NUM_FOLDS
from bnncli.inference.prior_search import search_size
from bnncli.names import percent
from bnncli.options.command import COMPUTE, Command, NameOptions
from bnncli.options.fit_laplace import LOO, FitLaplaceOptions
from bnncli.parameters.layouts import MatrixLayout
from bnncli.registry import declaring
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split
from bnncli.session.out_of_fold import VAL, load_fitted, unique_sources
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior, span_line, span_to_fit
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import has_labeled_val, val_lines
from bnncli.stages.fit_laplace.structure import structure_to_fit
from bnncli.stages.fit_laplace.warnings import warn_of_missing_classes, warn_of_val
from bnncli.stages.fit_laplace.whole import prepare_network

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

_BETTER = "a val split of data that the network was not trained on would be better (--hold-out val=test:2000)"
WITHOUT_VAL = {
    LOO: "no labelled val split: choosing the prior precision by leave-one-out on train, although its labels may "
    f"have shaped the features; {_BETTER}",
    "marglik": "no labelled val split: choosing the prior precision by the marginal likelihood, which may prefer far too "
    f"weak priors if the features were trained on the same data; {_BETTER}",
}


def run(run: Run, options: FitLaplaceOptions) -> Result:
    """Fit and publish; the result's metrics say what was chosen."""
    train = load_fitted(run, options.fit_on)
    criterion = _criterion(run, options, train)
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


def _last_layer(
    run: Run, options: FitLaplaceOptions, criterion: str, train: Split, val: Split | None
) -> tuple[Request, Callable[[], Fitted]]:
    """The request for a posterior over the last layer, and what fits it."""
    span = _span(options, train, run)
    known: dict[str, Any] = {"num_examples": len(train.content.features), "is_search": criterion != "number"}
    whole = train.layout if span else None

    @cache
    def structure() -> str:
        return structure_to_fit(options.structure, span or train.layout, run, whole=whole, **known)

    if options.own_bias_precision is not None and not train.layout.has_bias:
        raise UsageError("--bias-precision: the head has no bias")
    if options.own_center == "checkpoint" and train.content.head_weight is None:
        raise UsageError("--center checkpoint: this run has only features, no network; use --center mode")
    if options.prior_mean == "checkpoint" and train.content.head_weight is None:
        raise UsageError("--prior-mean checkpoint: this run has only features, no network; use --prior-mean zero")
    sources = unique_sources(train, val)
    params = {**options.params(), "seed": run.compute.seed}
    if criterion == "number":
        params["prior_precision"] = float(options.prior_precision)
    if options.own_bias_precision is not None:
        params["bias_precision"] = options.own_bias_precision
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
        params=params,
        algo_rev=_revisions.of_laplace(in_span=span is not None),
        sources=sources,
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: memory.stored_bytes(structure(), span or train.layout, whole=whole) + folds_bytes,
        require=require,
    )

    def fit() -> Fitted:
        from bnncli.stages.fit_laplace import work

        return work.fit(run, options, criterion, structure(), train, val, in_span=span is not None)

    return request, fit


def _require_folds(run: Run, fitted: Split) -> None:
    """Pass where the features that a search reads have room once for each fold. Raises DeviceError otherwise."""
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


def _plot(run: Run, path: Path, artifact: Path) -> Result:
    """The figure of the search that the artifact has stored, drawn anew whether it was fitted now or before."""
    role = f"{artifact.stem}.plot"
    if run.write.dry_run:
        size = 1 << 17
        output: dict[str, Any] = {"role": role, "path": str(path), "planned": "compute", "estimated_bytes": size}
        return Result("planned", [output], lines=[f"draw: {path}"])
    from bnncli.figures import render
    from bnncli.figures.fits import draw_prior_precision

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


def _criterion(run: Run, options: FitLaplaceOptions, train: Split) -> str:
    """number, val, loo or marglik: how the prior precision is chosen."""
    wanted = options.prior_precision
    if options.precision_per == "layer":
        return "marglik"
    if wanted == "auto" and has_labeled_val(run):
        return "val"
    if wanted == "auto":
        wanted = LOO if options.has_left_out and train.layout.num_outputs <= MOST_LEFT_OUT else "marglik"
        run.console.warn(WITHOUT_VAL[wanted])
    elif wanted == LOO and train.layout.num_outputs > MOST_LEFT_OUT:
        raise UsageError(
            f"--prior-precision loo: expected at most {MOST_LEFT_OUT} outputs; the head has {train.layout.num_outputs}"
        )
    return wanted if wanted in ("val", LOO, "marglik") else "number"


def _span(options: FitLaplaceOptions, train: Split, run: Run) -> MatrixLayout | None:
    """The layout inside the span of the features where the fit runs there; elsewhere a checkpoint's head may lie."""
    if options.own_center != "mode":
        return None
    return span_to_fit(run, train, structure=options.structure, num_draws=NUM_DRAWS)


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
            f"the data determine about {rounded(metrics['effective_params'])} parameters (the effective number); "
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
        lines += _subnetwork(metrics)
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


def rounded(count: float) -> str:
    """A number that is not whole, as people read it: three digits, and all before the point."""
    return f"{count:,.0f}" if abs(count) >= 100 else f"{count:.3g}"


def _subnetwork(metrics: dict[str, Any]) -> list[str]:
    """Which parameters vary, and of how many of them the data say something."""
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


def _report(run: Run, path: Path, meta: Mapping[str, Any]) -> Report:
    """The metrics as the result gives them: with the curve, which the artifact has beside its metrics."""
    metrics = meta["metrics"]
    warn_of_val(run, path, metrics)
    return Report({**metrics, "prior_precision_curve": meta.get("curve")}, _summary(metrics))
