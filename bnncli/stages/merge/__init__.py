"""merge: chains of hmc that were drawn apart in, one posterior of all of them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.inference import memory
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.hmc import HmcOptions
from bnncli.options.merge import MergeOptions
from bnncli.parameters.module import LAST
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import load_split
from bnncli.session.network_splits import network_sources
from bnncli.session.out_of_fold import fit_on, held_out_of, load_fitted, require_features, unique_sources
from bnncli.session.posteriors import Fitted, Report, posterior_request, produce_posterior
from bnncli.session.run import Result, Run
from bnncli.stages.hmc.report import summary, verdict
from bnncli.stages.merge.together import find_parts, require_together

COMMAND = Command(
    "Join the chains of separate hmc runs into one posterior.",
    "The runs must share checkpoint, train split, prior and sampler, and have different seeds. Recomputes R-hat, "
    "effective sample sizes and E-BFMI over all chains. Writes posteriors/merged.nc.",
    (MergeOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli merge ckpt.pt --posterior hmc-1 --posterior hmc-2",
        "bnncli merge ckpt.pt --posterior hmc --posterior elsewhere/ckpt.pt.bnn/posteriors/hmc.nc --max-rhat 1.01",
    ),
    section="Research",
    place=50,
)


def run(run: Run, options: MergeOptions) -> Result:
    """Join and publish; the result's metrics are those of hmc, over all chains."""
    require_features(run)
    parts = find_parts(run, options)
    train = load_fitted(run, fit_on(parts[0].header))
    held_out = held_out_of(train, load_split(run, "val") if "val" in run.folder.splits() else None)
    require_together(run, parts, train)
    run.require_device()
    layers, num_params = parts[0].layers, parts[0].num_params
    num_draws = min(part.num_draws for part in parts) * sum(part.num_chains for part in parts)
    stored = sum(part.num_draws * part.num_chains for part in parts)
    used = [split for split in (train, held_out) if split is not None]
    request = posterior_request(
        run,
        "merged",
        kind="samples",
        params={"posteriors": [part.path.stem for part in parts], "seed": run.compute.seed},
        algo_rev=_revisions.MERGE,
        sources=[
            *unique_sources(*used),
            *([] if layers == LAST else network_sources(used)),
            *(part.source for part in parts),
        ],
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: memory.sampled_bytes(num_params, num_draws) // 2,
        require=lambda: memory.require_draws(num_params, run.device_name, num_used=num_draws, num_stored=stored),
    )

    def fit() -> Fitted:
        from bnncli.stages.merge import work

        return work.fit(run, options, request, parts, train=train, held_out=held_out)

    return produce_posterior(run, request, fit, lambda meta: _report(meta, options))


def _report(meta: Mapping[str, Any], options: MergeOptions) -> Report:
    metrics, joined = meta["metrics"], meta["joined"]
    shown = ", ".join(
        f"{one['name']} (seed {'+'.join(map(str, one['seeds']))}, {one['chains']} x {one['draws']}"
        + (")" if one["max_rhat"] is None else f", R-hat {one['max_rhat']:.3f})")
        for one in joined
    )
    lines = [f"joined: {shown}"]
    if longer := [one for one in joined if one["draws"] > metrics["draws"]]:
        names = ", ".join(one["name"] for one in longer)
        lines.append(f"cut to the shortest run, {metrics['draws']} draws per chain: {names}")
    if stopped := [f"{one['name']} ({one['stopped_by']})" for one in joined if one["stopped_by"] is not None]:
        lines.append(f"stopped early by hmc --until: {', '.join(stopped)}; this makes the joint numbers optimistic too")
    return Report(metrics, [*lines, *summary(metrics)], verdict(metrics, HmcOptions(max_rhat=options.max_rhat)))
