"""hmc of other layers than the last: what is asked for, before any work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.inference import memory
from bnncli.options.hmc import HmcOptions
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split
from bnncli.session.network_splits import network_sources
from bnncli.session.posteriors import Base, Fitted, posterior_request, prior_of, request_params, request_sources
from bnncli.session.produce import Request
from bnncli.session.run import Run

if TYPE_CHECKING:
    from bnncli.stages.hmc.whole_work import PreparedChains


def prepare_network(
    run: Run, options: HmcOptions, train: Split, held_out: Split | None, base: Base | None
) -> tuple[Request, Callable[[], Fitted]]:
    """The request for draws of the network's chosen parameters, and what makes them."""
    if train.content.head_weight is None:
        raise UsageError(f"--layers {options.layers}: this run has only features, no network")

    @cache
    def prepared() -> PreparedChains:
        from bnncli.stages.hmc import whole_work

        return whole_work.prepare(run, options, train, held_out, base)

    def estimated_bytes() -> int:
        if request.target.is_file() and not run.write.force:
            return request.target.stat().st_size  # up to date: no code runs for that
        return memory.sampled_bytes(prepared().layout.num_params, options.chains * options.draws)

    used = [split for split in (train, held_out) if split is not None]
    request = posterior_request(
        run,
        f"hmc{options.layers_suffix}",
        kind="samples",
        params=request_params(run, options, base),
        algo_rev=_revisions.HMC_OF_LAYERS,
        sources=[*request_sources(train, held_out, base), *network_sources(used)],
        checkpoint=train.checkpoint,
        estimated_bytes=estimated_bytes,
        require=prepared,
        estimated_memory=lambda: prepared().planned_bytes,
    )

    def fit() -> Fitted:
        from bnncli.stages.hmc import whole_work

        prior = prior_of(options, base)
        return whole_work.fit(run, options, request, train, held_out, prior=prior, base=base, prepared=prepared())

    return request, fit
