"""hmc: features in, draws from the exact posterior out, and whether the chains agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.errors import UsageError
from bnncli.inference import memory
from bnncli.options import HmcOptions, InputOptions, NameOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.run import revisions as _revisions
from bnncli.run.inputs import load_split, posterior_prior, posterior_source
from bnncli.run.produce_posterior import Fitted, Report, posterior_request, produce_posterior
from bnncli.run.row_space import span_to_fit
from bnncli.run.session import Result, Run
from bnncli.stages.hmc.report import summary, verdict
from bnncli.theta.prior import Prior

COMMAND = Command(
    "Draw from the exact posterior by Hamiltonian Monte Carlo.",
    "All chains run as one batch, in coordinates whitened by the Gaussian at the mode. Reports the largest "
    "rank-normalised split R-hat and the smallest effective sample size, of parameters and of predictions on the val "
    "split. An interrupted run is continued with --resume. Writes posteriors/hmc.nc, which ArviZ opens.",
    (HmcOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli hmc ckpt.pt",
        "bnncli hmc ckpt.pt --chains 32 --draws 100 --max-rhat 1.01",
        "bnncli hmc ckpt.pt --until 'rhat<=1.01,ess>=1000' --resume",
    ),
    place=50,
)


def run(run: Run, options: HmcOptions) -> Result:
    """Sample and publish; the result's metrics have R-hat, effective sample sizes, acceptance and divergences."""
    if options.max_draws is not None and options.until is None:
        raise UsageError("--max-draws says where --until gives up: give that too")
    train = load_split(run, "train").check_labeled()
    held_out = load_split(run, "val") if "val" in run.folder.splits() else None
    sources = [train.source] + ([held_out.source] if held_out else [])
    base = None
    if options.prior_precision is None:
        path = run.folder.find_posterior(options.base, flag="--base", maker=run.suggest("fit-laplace"))
        header, source = posterior_source(run, path, "base")
        prior = posterior_prior(path, header)
        sources.append(source)
        base = path.stem
    elif options.base != "laplace":
        raise UsageError("--prior-precision and --base exclude each other: both say what the prior precision is")
    else:
        prior = Prior(options.prior_precision)
    params = {**options.params(), "base": base, "seed": run.compute.seed}
    run.require_device()
    span = span_to_fit(run, train)
    sizes: dict[str, Any] = {"num_chains": options.chains, "whole": train.layout if span else None}
    request = posterior_request(
        run,
        "hmc",
        kind="samples",
        params=params,
        algo_rev=_revisions.of_hmc(in_span=span is not None, num_params=train.layout.num_params),
        sources=sources,
        checkpoint=train.checkpoint,
        # Once as raw draws while the chains run, once as the artifact.
        estimated_bytes=lambda: 2 * options.chains * options.draws * (train.layout.num_params * 4 + 64),
        require=lambda: memory.require_sampling(span or train.layout, run.device_name, **sizes),
    )

    def fit() -> Fitted:
        from bnncli.stages.hmc.work import Sampling

        return Sampling(run, options, request, train, held_out, prior, span).fit()

    return produce_posterior(run, request, fit, lambda meta: _report(meta, options))


def _report(meta: Mapping[str, Any], options: HmcOptions) -> Report:
    metrics = meta["metrics"]
    return Report(metrics, summary(metrics), verdict(metrics, options))
