"""Warnings, metrics and the summary that fits of a last layer and of a network share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bnncli.artifacts.features import label_counts
from bnncli.inference.laplace import LaplaceFit
from bnncli.inference.prior_search import SAMPLED, PriorSearch
from bnncli.inference.prior_variants import FoldSearch
from bnncli.names import percent
from bnncli.options.shared import LayersOptions
from bnncli.parameters.module import LAST
from bnncli.registry import list_declaring
from bnncli.session.fits import Method, Report
from bnncli.session.inputs import Split
from bnncli.session.metrics import LaplaceMetrics
from bnncli.session.produce import Request
from bnncli.session.row_spaces import span_line, span_metrics
from bnncli.session.run import Run
from bnncli.session.states import advise_predict, fresh_posterior
from bnncli.session.val_report import UNMEASURED, measure_on_val, val_lines, val_scores, warn_if_worse

if TYPE_CHECKING:
    from bnncli.commands.fit_laplace import FitLaplaceOptions
    from bnncli.inference.mode import Mode
    from bnncli.posteriors.gaussian import Gaussian


_MOST_NAMES = 10  # classes listed in a warning


_MEANINGS = {
    "val": "they do not count in the choice of the prior precision or in any score on val",
    "train": "their weights are learned only from examples of other classes, so they are rarely predicted",
}


def warn_of_missing_classes(run: Run, splits: Sequence[Split]) -> None:
    """Warn of classes without examples in a split, and say what that means for the fit."""
    for split in splits:
        if split.content.labels is None:
            continue
        classes = split.content.classes
        counts = label_counts(split.content.labels, len(classes))
        missing = [str(classes[place]) for place in np.flatnonzero(counts[: len(classes)] == 0)]
        if missing:
            shown = ", ".join(repr(name) for name in missing[:_MOST_NAMES]) + ", ..." * (len(missing) > _MOST_NAMES)
            name = split.content.name
            run.console.warn(
                f"{name} ({len(split.content.labels)} examples) has no examples of {len(missing)} of the "
                f"{len(classes)} classes ({shown}): {_MEANINGS[name]}"
            )


def warn_of_shortfall(run: Run, mode: Mode) -> None:
    """Warn where the climb stopped farther from the mode than requested."""
    if mode.shortfall is not None:
        run.console.warn(
            f"the centre is {mode.newton_decrement:.2g} posterior standard deviations from the mode (all {len(mode.theta):,} "
            f"parameters together; a draw is about {math.sqrt(len(mode.theta)):.0f} away): {mode.shortfall}"
        )


def warn_of_val(run: Run, path: Path, metrics: LaplaceMetrics) -> None:
    """Warn where the posterior scores worse on val than the network, and suggest a better fit."""
    if metrics.get("val") is None:
        return
    can_be_refined = "subnetwork_size" not in metrics and "solver_steps" not in metrics
    also, other = [], None if path.stem == "laplace" else path.stem
    if metrics.get("center") == "checkpoint":
        command = run.suggest("fit-laplace", center="mode", force=True, name=other)
        also.append(f"run {command} (not measured yet)")
    elif metrics["structure"] not in list_declaring("curvature", "is_exact") and can_be_refined:
        name = f"refine{LayersOptions(metrics.get('layers', LAST)).layers_suffix}"
        refined = fresh_posterior(run, name, {"flow": "affine", "base": path.stem})
        if refined is None:
            command = run.suggest("refine", flow="affine", base=other)
            also.append(f"run {command} (a {metrics['structure']} covariance is rough; not measured yet)")
        else:
            measured = (refined.meta["metrics"].get("val") or {}).get("refine")
            if measured and measured["nll"] < val_scores(metrics)["laplace"]["nll"]:
                command = advise_predict(run, name, measured["integrator"], is_default=True)
                also.append(f"{command} ({measured['nll']:.4f})")
    warn_if_worse(run, path, metrics, method="laplace", also=also)


def warn_of_edge(run: Run, found: PriorSearch | FoldSearch) -> None:
    """Warn where the best prior precision lies at the edge of the search range."""
    if found.at_edge:
        run.console.warn(
            f"the best prior precision found, {found.best:.4g}, is at the edge of the search range; set it with "
            "--prior-precision"
        )


JITTER_SHARE = 1e-3  # of the prior precision; a jitter below it changes nothing


def warn_of_jitter(run: Run, gaussian: Gaussian) -> None:
    """Warn where the jitter added to factorise the precision, which acts as a prior, outweighs the real prior."""
    jitter = getattr(gaussian.covariance, "jitter", 0.0)
    precision = float(gaussian.require_prior().diagonal(gaussian.layout).min())
    if jitter > JITTER_SHARE * precision:
        run.console.warn(
            f"the posterior precision is not positive definite in float64, so {jitter:.2g} was added to its "
            f"diagonal (prior precision {precision:.2g}). The marginal likelihood and the variances in "
            "directions that only the prior determines are wrong; use a larger --prior-precision or --structure "
            "kron"
        )


def fit_metrics(
    run: Run,
    fit: LaplaceFit,
    found: PriorSearch | FoldSearch | None,
    criterion: str,
    train: Split,
    val: Split | None,
    *,
    posterior: Any = None,
) -> dict[str, Any]:
    """Return the metrics of a fit and, with labelled val, its scores there.

    Args:
        posterior: posterior to score in place of the Gaussian, such as its folds or its draws.
    """
    gaussian, head = fit.gaussian, train.head()
    metrics: dict[str, Any] = {
        "structure": gaussian.covariance.structure,
        "num_params": gaussian.layout.num_params,
        **span_metrics(gaussian),
        **gaussian.require_prior().to_meta(),
        "prior_precision_by": criterion,
        "prior_precision_for": found.integrator if found is not None and criterion == "val" else None,
        "prior_precision_at_edge": bool(found.at_edge) if found else None,
        "log_marginal_likelihood": fit.log_marginal_likelihood,
        "log_marginal_likelihood_undefined": fit.no_evidence,
        "newton_decrement": fit.mode.newton_decrement if fit.mode else None,
        "mode_distance": None,
        "mode_distance_in_sd": None,
        "val_nll_network": None,
        "val_nll_laplace": None,
        **UNMEASURED,
    }
    if fit.mode is not None and head is not None:
        shift = head.to(gaussian.mean) - gaussian.mean
        metrics["mode_distance"] = float(shift.norm())
        whitened = gaussian.covariance.whiten(shift.unsqueeze(0))
        metrics["mode_distance_in_sd"] = float(whitened.norm() / math.sqrt(whitened.shape[1]))
    if val is not None and val.content.labels is not None:
        prefer = None if metrics["prior_precision_for"] in (None, SAMPLED) else metrics["prior_precision_for"]
        metrics |= measure_on_val(run, posterior or gaussian, val, method="laplace", prefer=prefer)
        metrics["val_nll_network"] = metrics["val"].get("network", {}).get("nll")
        metrics["val_nll_laplace"] = metrics["val"]["laplace"]["nll"]
    return metrics


def fit_meta(
    options: FitLaplaceOptions, criterion: str, gaussian: Gaussian, found: PriorSearch | FoldSearch | None
) -> dict[str, Any]:
    """Return what an artifact records of a fit."""
    return {
        "method": "laplace",
        "center": options.own_center,
        **gaussian.require_prior().to_meta(),
        "criterion": criterion,
        "param_layout": gaussian.layout.to_json(),
        "curve": [list(point) for point in found.curve] if found else None,
    }


@dataclass(frozen=True)
class Laplace(Method):
    """A fit of a Gaussian.

    Args:
        criterion: how the prior precision is chosen: number, val, loo or marglik.
    """

    name: ClassVar[str] = "laplace"
    options: FitLaplaceOptions
    criterion: str

    @property
    def params(self) -> dict[str, Any]:
        """Return what identifies the fit, besides its sources."""
        return self.options.params_of_fit(self.criterion, self.inputs.run.compute.seed)

    def summarize(self, metrics: LaplaceMetrics) -> list[str]:
        """Return the summary for people."""
        return _summary(metrics)

    def describe(self, request: Request, meta: Mapping[str, Any]) -> Report:
        """Return the metrics, the search's curve and the summary. Warn where the posterior scores worse than the network."""
        metrics = meta["metrics"]
        warn_of_val(self.inputs.run, request.target, metrics)
        return Report({**metrics, "prior_precision_curve": meta.get("curve")}, _summary(metrics))


def _summary(metrics: LaplaceMetrics) -> list[str]:
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
    nlls = ", ".join(f"{name} {value:.4f}" for name, value in compared.items())
    why = f" (val NLL at one precision: {nlls}; the closest structure with a near-best NLL)" if nlls else ""
    lines = [
        f"prior precision {metrics['prior_precision']:.4g} ({chosen}){bias}{about}; structure {metrics['structure']}{why}, {metrics['num_params']} parameters"
    ]
    lines += span_line(metrics)
    if "fit_on" in metrics:
        lines.append(f"fitted to {metrics['fit_on']}; scores on val are {metrics['num_folds']}-fold cross-validated")
    if "effective_params" in metrics and "subnetwork_size" not in metrics:
        lines.append(
            f"the data determine about {format_count(metrics['effective_params'])} parameters (the effective number); "
            "all other directions keep the prior's variance"
        )
    lines += _network_lines(metrics)
    if metrics["mode_distance"] is not None:
        lines.append(
            f"the mode is {metrics['mode_distance']:.3g} from the checkpoint's "
            f"{'weights' if 'layers' in metrics else 'head'}, {metrics['mode_distance_in_sd']:.1f} posterior "
            "standard deviations (rms over parameters)"
        )
    if metrics["log_marginal_likelihood"] is not None:
        kind = metrics.get("curvature", "hessian")  # of a last layer the two are the same
        is_exact = kind == "hessian" and metrics["structure"] in list_declaring("curvature", "is_exact")
        named = metrics["structure"] if kind == "hessian" else f"{metrics['structure']} {kind}"
        of = "" if is_exact else f", with the {named} approximation of the Hessian"
        lines.append(f"log marginal likelihood {metrics['log_marginal_likelihood']:.2f} nats{of}")
    elif metrics.get("log_marginal_likelihood_undefined"):
        lines.append(
            f"no log marginal likelihood ({metrics['log_marginal_likelihood_undefined']}); use --center mode for one"
        )
    whole, where = metrics.get("val_drawn_from"), ""
    if whole is not None and metrics["val"] is not None:
        error = metrics["val"]["laplace"]["standard_error"]
        where = (
            f" on {metrics['val_num_examples']:,} random examples of {whole:,} (standard error of the NLL {error:.4f})"
        )
    lines += val_lines(metrics, where=where)
    return lines


def _network_lines(metrics: LaplaceMetrics) -> list[str]:
    """Return what only fits of other layers than the last report."""
    lines = []
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
        is_elsewhere = metrics["prior_precision_compared_at"] == "checkpoint"
        where = "; the prior precision was chosen around the checkpoint's weights" if is_elsewhere else ""
        lines.append(
            f"the centre is {metrics['newton_decrement']:.2g} posterior standard deviations (all parameters together) from the "
            f"mode, after {metrics['mode_passes']:,} passes over the data{where}"
        )
    return lines


def format_count(count: float) -> str:
    """Format a count that need not be whole with three significant digits, or all digits before the point."""
    return f"{count:,.0f}" if abs(count) >= 100 else f"{count:.3g}"


def _describe_subnetwork(metrics: LaplaceMetrics) -> list[str]:
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
