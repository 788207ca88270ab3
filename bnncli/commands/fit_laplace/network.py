"""Fit a Laplace approximation over other layers than the last."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bnncli import registry
from bnncli.commands.fit_laplace.shared import (
    Laplace,
    fit_meta,
    fit_metrics,
    warn_of_edge,
    warn_of_jitter,
    warn_of_missing_classes,
    warn_of_shortfall,
)
from bnncli.errors import NumericError, UsageError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian, num_effective
from bnncli.inference.linear_draws import draw_linearised
from bnncli.inference.memory import NetworkPlan
from bnncli.inference.prior_search import PriorSearch, search
from bnncli.inference.prior_variants import choose_layer_precisions
from bnncli.lazy import torch
from bnncli.parameters.module import ModuleLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.linear_draws import LinearDraws
from bnncli.session import revisions as _revisions
from bnncli.session.costs import Cost
from bnncli.session.fits import FitInputs, FitOutput, Fitting
from bnncli.session.inputs import Split
from bnncli.session.run import Run
from bnncli.structures.network_logits import keeping
from bnncli.targets.curvature_choice import HESSIAN, kinds_of, structures_of
from bnncli.targets.network import NetworkTarget
from bnncli.targets.target import counting_passes

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.commands.fit_laplace import FitLaplaceOptions


def check_network(inputs: FitInputs, options: FitLaplaceOptions) -> None:
    """Refuse a run without a network, and warn of missing classes."""
    if inputs.train.content.head_weight is None:
        raise UsageError(f"--layers {options.layers}: this run has only features, no network")
    warn_of_missing_classes(inputs.run, [split for split in (inputs.train, inputs.val) if split is not None])


@dataclass(frozen=True)
class NetworkLaplace(Laplace):
    """A fit over the network's chosen parameters."""

    algo_rev: ClassVar[int] = _revisions.LAPLACE_OF_LAYERS

    @cached_property
    def planned(self) -> PlannedFit:
        """Return the plan. Raises DeviceError where the fit does not fit in memory."""
        return plan_fit(self.inputs, self.options, is_search=self.criterion == "val")

    def estimate_memory(self) -> int:
        """Return the memory at the peak of the fit in bytes."""
        return self.planned.planned_bytes

    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""
        return self.planned.plan.stored_bytes(self.planned.structure)

    def fit(self, fitting: Fitting) -> FitOutput:
        """Fit the Gaussian, or draw from it, and measure it on val."""
        return fit_network(fitting, self.options, self.criterion, self.planned)


@dataclass(frozen=True)
class PlannedFit:
    """A fit that has been planned but has not read its data.

    Attributes:
        plan: sizes of the fit in memory.
        structure: covariance structure to fit.
        planned_bytes: memory at the peak of the fit.
        num_judged: validation examples that choose the prior precision and measure the fit.
        num_kept: of these, whose Jacobians are computed once and kept; 0 where memory is short.
        num_on_path: of these, whose logits' covariances are computed once for all prior precisions; 0 where Jacobians are
            kept, or memory is short.
    """

    plan: NetworkPlan
    structure: str
    planned_bytes: int
    num_judged: int
    num_kept: int
    num_on_path: int


def plan_fit(inputs: FitInputs, options: FitLaplaceOptions, *, is_search: bool) -> PlannedFit:
    """Plan a fit from the network and the first example.

    Raises:
        DeviceError: the fit does not fit in memory.
        UsageError: --size exceeds the number of parameters.
    """
    layout, device = cast(ModuleLayout, inputs.layout), inputs.run.device
    structures = [name for name in structures_of(is_last_layer=False) if options.curvature in kinds_of(name)]
    plan = NetworkPlan(
        layout,
        inputs.num_examples,
        inputs.num_val,
        options.curvature_choice,
        tuple(structures),
        is_search=is_search,
        num_drawn=options.draws or 0,
        is_climb=options.own_center == "mode",
    )
    structure = options.structure
    if structure == "auto":
        structure = plan.automatic_structure(device)
    if options.size is not None and options.size > layout.num_params:
        raise UsageError(f"\0size\0: expected 1 to {layout.num_params} (the number of parameters); got {options.size}")
    planned = plan.require_fit(structure, device)
    num_judged = plan.num_judged(structure, device)
    num_kept, num_on_path = (
        num_judged if there else 0 for there in (plan.kept_bytes(structure, device), plan.path_bytes(structure, device))
    )
    return PlannedFit(plan, structure, planned, num_judged, num_kept, num_on_path)


def fit_network(fitting: Fitting, options: FitLaplaceOptions, criterion: str, planned: PlannedFit) -> FitOutput:
    """Fit the Gaussian, or draw from it, and measure it on val."""
    run, whole, held = fitting.run, fitting.train, fitting.val
    structure, network = planned.structure, planned.plan.layout.network
    assert network is not None
    counts = {}
    if held is not None and planned.num_judged < len(held.stored):
        counts = {"val_drawn_from": len(held.stored)}
        if criterion == "val":
            counts["prior_precision_val_examples"] = planned.num_judged
        held = _some_examples(run, held, planned.num_judged)
    room = {"most_derivatives": planned.num_kept, "most_covariances": planned.num_on_path}
    with keeping(network, fitting.inputs.num_val, **room):
        weight_precision = float(options.prior_precision) if criterion == "number" else 1.0
        target = cast(NetworkTarget, whole.target(Prior(weight_precision, options.own_bias_precision), run.device))
        target = target.with_choice(options.curvature_choice)
        with counting_passes() as tally:
            fit, found, facts = _fit_gaussian(
                run,
                options,
                criterion,
                target,
                start=fitting.start,
                structure=structure,
                held=held,
            )
        facts |= counts | _mode_metrics(run, fit, found)
        posterior: Gaussian[Any] | LinearDraws = fit.gaussian
        if options.draws is not None:
            with counting_passes() as drawing:
                posterior, draw_metrics = _draw(run, target, fit.gaussian, options.draws)
            tally.passes += drawing.passes
            facts |= draw_metrics
        else:
            facts["effective_params"] = round(num_effective(target, fit), 6)  # rounding errors become 0
        metrics = fit_metrics(run, fit, found, criterion, whole, held, posterior=posterior)
    facts |= Cost.of_fit(tally.passes, is_last_layer=False).to_metrics()
    over = {"layers": options.layers, "curvature": options.curvature}
    metrics |= {
        "center": options.own_center,
        "structure_nll": None,
        **over,
        **facts,
        **_structure_metrics(fit, structure),
    }
    tensors, meta = posterior.to_tensors()
    meta |= fit_meta(options, criterion, fit.gaussian, found) | over
    return FitOutput(tensors, meta, metrics, fitting.inputs.train)


def _fit_gaussian(
    run: Run,
    options: FitLaplaceOptions,
    criterion: str,
    target: NetworkTarget,
    *,
    start: Tensor,
    structure: str,
    held: Split | None,
) -> tuple[LaplaceFit, PriorSearch | None, dict[str, Any]]:
    """Fit at the given prior precision, or at the one that `criterion` chooses (on `held`, for val).

    Returns:
        The fit, the search for the prior precision if there was one, and metrics of the layers' own precisions.
    """
    common: dict[str, Any] = {
        "structure": structure,
        "center": options.own_center,
        "start": start,
        "progress": run.console,
    }
    try:
        if criterion == "number":
            return fit_gaussian(target, **common), None, {}
        held_out = None
        if criterion == "val" and held is not None:
            held_out = target.held_out(held.stored, held.labels(run.device))
        found = search(
            target, criterion=criterion, held_out=held_out, generator=run.stream("fit-laplace/val"), **common
        )
        if options.precision_per == "layer":
            chosen = choose_layer_precisions(target, found.fit, structure)
            return (
                chosen.fit,
                found,
                {"layer_precisions": chosen.precisions, "layer_precisions_gain": chosen.gain},
            )
    except NumericError as error:
        if options.curvature != HESSIAN:
            raise
        hint = "away from a mode the Hessian may be indefinite: use --curvature ggn or a larger --prior-precision"
        raise NumericError(error.message, hint=hint) from None
    warn_of_edge(run, found)
    return found.fit, found, {}


def _some_examples(run: Run, held: Split, count: int) -> Split:
    """Return random examples of val."""
    run.console.info(
        f"using {count:,} of the {len(held.stored):,} val examples, drawn at random, because each takes a pass of the "
        "network for every class"
    )
    rows = torch.randperm(len(held.stored), generator=run.stream("fit-laplace/search"))[:count]
    return held.take(rows.sort().values)


def _mode_metrics(run: Run, fit: LaplaceFit, found: PriorSearch | None) -> dict[str, Any]:
    """Return metrics of the mode, if the fit has one. Warn where it was not reached or a jitter was added."""
    warn_of_jitter(run, fit.gaussian)
    if fit.mode is None:
        return {}
    warn_of_shortfall(run, fit.mode)
    return {
        "mode_passes": fit.mode.num_passes,
        "mode_shortfall": fit.mode.shortfall,
        "prior_precision_compared_at": found.compared_at if found else None,
    }


def _structure_metrics(fit: LaplaceFit, structure: str) -> dict[str, Any]:
    """Return the metrics that the structure's curvature and covariance declare."""
    metrics: dict[str, Any] = {}
    if registry.has_attribute("network_curvature", structure, "metrics"):
        metrics |= registry.load_class("network_curvature", structure).metrics(fit.hessian)
    if registry.has_attribute("covariances", structure, "metrics"):
        covariance: Any = fit.gaussian.covariance
        metrics |= covariance.metrics(fit.gaussian.require_prior(), fit.gaussian.layout)
    return metrics


def _draw(
    run: Run, target: NetworkTarget, gaussian: Gaussian[Any], num_draws: int
) -> tuple[LinearDraws, dict[str, Any]]:
    """Draw from the full Gauss-Newton Gaussian, with `gaussian` as the preconditioner, and return the solver's metrics."""
    prior = gaussian.require_prior()
    found = draw_linearised(
        target.with_prior(prior),
        gaussian.mean,
        gaussian.covariance,
        num_draws=num_draws,
        generator=run.stream("fit-laplace/draws"),
        progress=run.console,
    )
    metrics = {
        "draws": num_draws,
        "solver_steps": found.num_steps,
        "solver_residual": found.residual,
        "solver_passes": found.num_passes,
    }
    return LinearDraws(gaussian.mean, found.values.float(), gaussian.layout, prior), metrics
