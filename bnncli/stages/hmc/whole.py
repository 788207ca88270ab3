"""hmc of other layers than the last: what is asked for, before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from bnncli.errors import UsageError
from bnncli.inference import memory
from bnncli.options import HmcOptions
from bnncli.run import revisions as _revisions
from bnncli.run.inputs import Split
from bnncli.run.network_sources import network_sources
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted, posterior_request
from bnncli.run.session import Run
from bnncli.stages.hmc.base import Base, prior_of, request_params, request_sources, require_room
from bnncli.theta.module import ModuleLayout
from bnncli.theta.recorded import recorded_layout


def prepare_network(
    run: Run, options: HmcOptions, train: Split, held_out: Split | None, base: Base | None
) -> tuple[Request, Callable[[], Fitted]]:
    """The request for draws of the network's chosen parameters, and what makes them."""
    if train.content.head_weight is None:
        raise UsageError(f"--layers {options.layers}: this run has no network, only features")
    # Without a base only the network, which is opened for work alone, tells how many parameters there are.
    num_params = 0 if base is None else sum(math.prod(part["shape"]) for part in base.header.meta["param_layout"])
    is_recorded = base is not None and base.header.meta.get("type") == "gaussian"

    def require() -> None:
        if base is not None and is_recorded:
            require_room(run, options, train, cast(ModuleLayout, recorded_layout(base.header.meta)))

    used = [split for split in (train, held_out) if split is not None]
    request = posterior_request(
        run,
        f"hmc{options.layers_suffix}",
        kind="samples",
        params=request_params(run, options, base),
        algo_rev=_revisions.HMC_OF_LAYERS,
        sources=[*request_sources(train, held_out, base), *network_sources(used)],
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: memory.sampled_bytes(num_params, options.chains * options.draws),
        require=require,
    )

    def fit() -> Fitted:
        from bnncli.stages.hmc import whole_work

        return whole_work.fit(run, options, request, train, held_out, prior=prior_of(options, base), base=base)

    return request, fit
