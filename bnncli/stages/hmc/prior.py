"""The prior precision of the target of hmc: its base's, or another under which short chains predict val better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bnncli.inference.hmc import sample_hmc
from bnncli.inference.prior_variants import PriorTrial, climb_prior
from bnncli.options.hmc import HmcOptions
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split
from bnncli.session.posteriors import prior_metrics
from bnncli.session.run import Run
from bnncli.stages.hmc.work import Space

_ACCEPT = 0.8  # that short runs aim at: the most draws a second


def choose_prior(
    run: Run,
    options: HmcOptions,
    prior: Prior,
    val: Split,
    space_at: Callable[[Prior, Space | None], Space],
) -> dict[str, Any]:
    """Return the metrics of the search, the chosen prior among them.

    Args:
        prior: of the base: where the search starts.
        val: labelled.
        space_at: where chains of a prior move, whose mode may be found from that of another.
    """
    features, labels = val.features(run.device), val.labels(run.device)
    limit = options.warmup + options.draws
    num_warmup, num_draws = options.tried
    passes = 0.0

    def try_at(precision: float, before: PriorTrial | None) -> PriorTrial:
        nonlocal passes
        tried = prior.times(precision / prior.weight_precision)
        space = space_at(tried, None if before is None else before.found[1])
        drawn = sample_hmc(
            space.target,
            mode=space.center,
            covariance=space.covariance,
            generator=run.stream("hmc/prior"),
            num_chains=options.chains,
            num_warmup=num_warmup,
            num_draws=num_draws,
            target_accept=min(_ACCEPT, options.target_accept),
            dispersion=1.0,
            go_on=None if before is None else before.found[2],
            dynamics=options.dynamics,
            coarse=space.coarse,
            complete=space.complete,
            progress=run.console,
        )
        held_out = space.train.target(tried, run.device).held_out(features, labels)
        losses = held_out.losses(drawn.draws.flatten(0, 1).to(run.device))
        passes += space.passes + options.chains * (drawn.num_gradients or 0)
        steps = float(drawn.n_steps.double().mean())
        return PriorTrial(
            precision, losses.cpu(), float(drawn.num_gradients or 0), limit * steps, (tried, space, drawn)
        )

    found = climb_prior(try_at, prior.weight_precision, progress=run.console)
    return prior_metrics(found, found.best.found[0], passes=passes)
