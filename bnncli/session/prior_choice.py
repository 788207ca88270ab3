"""Search for a prior precision by the NLL on val: when a search is possible, its record and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from bnncli.artifacts.resume import read_recorded_choice, state_path
from bnncli.options.shared import AUTO, INHERIT, SearchedPriorOptions
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split
from bnncli.session.metrics import SearchMetrics
from bnncli.session.produce import Request
from bnncli.session.run import Run

if TYPE_CHECKING:
    from bnncli.inference.prior_variants import PriorTrials


Options = TypeVar("Options", bound=SearchedPriorOptions)


_SEARCH = "prior_search"


_MAX_NUMBERS_PER_TRIAL = 2**28  # numbers drawn in a trial: 1 GiB


def resolve_prior_choice(
    run: Run, options: Options, val: Split | None, *, num_drawn: int, too_short: str | None = None
) -> Options:
    """Return the options, with inherit in place of auto and the reason reported if no search is possible.

    Args:
        val: labelled split to judge by, if any.
        num_drawn: draws per trial.
        too_short: what is too short for trials, if anything.
    """
    if options.prior_precision != AUTO:
        return options
    why = None
    if not options.is_last_layer:
        why = f"no search over \0layers\0 {options.layers}"
    elif val is None:
        why = "no labelled val split to search on"
    elif num_drawn * val.layout.num_params > _MAX_NUMBERS_PER_TRIAL:
        why = f"draws of {val.layout.num_params:,} parameters are too large to search"
    elif too_short is not None:
        why = f"{too_short}, too short to search"
    if why is None:
        return options
    run.console.info(f"using the base's prior precision: {why}")
    return replace(options, prior_precision=INHERIT)


def read_stored_search(request: Request) -> dict[str, Any] | None:
    """Return the metrics of a search from an interrupted run; None without one."""
    found = read_recorded_choice(state_path(request.target), _SEARCH)
    return found if isinstance(found, dict) and "prior_precision" in found else None


def search_identity(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resume state records of a search; empty without one."""
    return {_SEARCH: dict(told)} if told else {}


def prior_metrics(found: PriorTrials, prior: Prior, *, passes: float) -> dict[str, Any]:
    """Return the metrics of a prior search for an artifact.

    Args:
        prior: the chosen one.
        passes: gradient passes over the data of all trials.
    """
    return {
        **prior.to_meta(),
        "prior_precision_by": "val",
        "prior_precision_base": found.trials[0].precision,
        "prior_precision_curve": found.curve,
        "prior_precision_search_cut": found.is_cut,
        "prior_precision_search_passes": passes,
        "prior_precision_by_gaussians": sum(trial.is_gaussian for trial in found.trials),
    }


def prior_line(metrics: SearchMetrics) -> list[str]:
    """Return the search as a line for people; empty without a search."""
    curve = metrics.get("prior_precision_curve")
    if curve is None:
        return []
    nll, base = dict(curve), metrics["prior_precision_base"]
    chosen = min(nll, key=lambda one: abs(one - metrics["prior_precision"]))
    tried = ", ".join(f"{precision:.3g} {value:.4f}" for precision, value in curve)
    by_gaussians = metrics.get("prior_precision_by_gaussians", 0)
    if by_gaussians == len(curve):
        tried = f"NLL of the Gaussians, which are close to the posteriors: {tried}"
    elif by_gaussians:
        tried = f"NLL in short runs, or of Gaussians that are close to the posteriors: {tried}"
    else:
        tried = f"NLL in short runs: {tried}"
    cut = (
        "; the search stopped because it had taken as long as the run itself"
        if metrics["prior_precision_search_cut"]
        else ""
    )
    if chosen == base:
        return [
            f"prior precision {chosen:.4g}, from the base: no other precision predicts val significantly better "
            f"({tried}){cut}"
        ]
    return [f"prior precision {chosen:.4g}, which predicts val better than the base's {base:.4g} ({tried}){cut}"]
