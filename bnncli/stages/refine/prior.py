"""The prior precision of the target of refine: its base's, or another under which a short refinement predicts val better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bnncli.inference.prior_variants import PriorTrial, climb_prior
from bnncli.inference.refine import RefineFit
from bnncli.options.refine import RefineOptions
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split
from bnncli.session.posteriors import prior_metrics
from bnncli.session.run import Run


def choose_prior(
    run: Run,
    options: RefineOptions,
    prior: Prior,
    splits: tuple[Split, Split],
    fit_at: Callable[..., RefineFit],
    *,
    num_draws: int,
) -> dict[str, Any]:
    """Return the metrics of the search, the chosen prior among them.

    Args:
        prior: of the base: where the search starts.
        splits: train, and val, labelled.
        fit_at: a refinement under a prior, of so many epochs, which goes on from another posterior or none.
        num_draws: from a posterior, that predict val.
    """
    train, val = splits
    features, labels = val.features(run.device), val.labels(run.device)

    def try_at(precision: float, before: PriorTrial | None) -> PriorTrial:
        tried = prior.times(precision / prior.weight_precision)
        epochs = options.trial_epochs * (2 if before is None else 1)  # the first starts from the base
        fit = fit_at(tried, epochs=epochs, go_on=None if before is None else before.found[1])
        theta = fit.posterior.sample(num_draws, run.stream("refine/prior-draws"))
        losses = train.target(tried, run.device).held_out(features, labels).losses(theta)
        return PriorTrial(precision, losses.cpu(), len(fit.history), float(options.epochs or 0), (tried, fit.posterior))

    found = climb_prior(try_at, prior.weight_precision, progress=run.console)
    passes = sum(trial.cost for trial in found.trials) * (options.num_draws or 1)
    return prior_metrics(found, found.best.found[0], passes=passes)
