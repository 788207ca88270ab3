"""fit-laplace of other layers than the last: what is asked for, before any work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.options.fit_laplace import FitLaplaceOptions
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split
from bnncli.session.network_splits import network_sources
from bnncli.session.posteriors import Fitted, posterior_request
from bnncli.session.produce import Request
from bnncli.session.run import Run
from bnncli.stages.fit_laplace.warnings import warn_of_missing_classes
from bnncli.targets.curvature_choice import kinds_of, structures_of

if TYPE_CHECKING:
    from bnncli.stages.fit_laplace.whole_work import Prepared


def prepare_network(
    run: Run, options: FitLaplaceOptions, criterion: str, train: Split, val: Split | None
) -> tuple[Request, Callable[[], Fitted]]:
    """The request for a posterior over the network's chosen parameters, and what fits it."""
    if train.content.head_weight is None:
        raise UsageError(f"--layers {options.layers}: this run has only features, no network")
    used = [split for split in (train, val) if split is not None]
    sources = [*(split.source for split in used), *network_sources(used)]
    params = {**options.params(), "seed": run.compute.seed}
    if criterion == "number":
        params["prior_precision"] = float(options.prior_precision)
    if options.own_bias_precision is not None:
        params["bias_precision"] = options.own_bias_precision
    warn_of_missing_classes(run, used)

    @cache
    def prepared() -> Prepared:
        from bnncli.stages.fit_laplace import whole_work

        structures = [name for name in structures_of(is_last_layer=False) if options.curvature in kinds_of(name)]
        return whole_work.prepare(run, options, criterion, train, val, structures=structures)

    def estimated_bytes() -> int:
        if request.target.is_file() and not run.write.force:
            return request.target.stat().st_size  # up to date: no code runs for that
        return prepared().plan.stored_bytes(prepared().structure)

    request = posterior_request(
        run,
        f"laplace{options.layers_suffix}",
        params=params,
        algo_rev=_revisions.of_laplace(in_span=False),
        sources=sources,
        checkpoint=train.checkpoint,
        estimated_bytes=estimated_bytes,
        require=prepared,
        estimated_memory=lambda: prepared().planned_bytes,
    )

    @cache
    def fit() -> Fitted:
        from bnncli.stages.fit_laplace import whole_work

        return whole_work.fit(run, options, criterion, train, val, prepared=prepared())

    return request, fit
