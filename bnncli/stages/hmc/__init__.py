"""hmc: features in, draws from the exact posterior out, and whether the chains agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bnncli.errors import UsageError
from bnncli.inference import memory
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.hmc import HmcOptions
from bnncli.options.shared import AUTO
from bnncli.parameters.prior import Prior
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split
from bnncli.session.out_of_fold import fit_on, held_out_of, load_fitted, require_features
from bnncli.session.posteriors import (
    Base,
    Fitted,
    Report,
    find_base,
    posterior_request,
    prior_of,
    produce_posterior,
    request_params,
    request_sources,
    span_to_fit,
    stored_search,
    weaker_prior,
    with_prior_choice,
)
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import warn_if_worse
from bnncli.stages.hmc.report import summary, verdict
from bnncli.stages.hmc.whole import prepare_network

COMMAND = Command(
    "Sample the exact posterior by Hamiltonian Monte Carlo.",
    "Runs all chains as one batch, in coordinates whitened by the Gaussian at the mode. Reports R-hat and "
    "effective sample sizes for the parameters and for predictions on val; with --layers, convergence is judged "
    "by the predictions. Writes posteriors/hmc.nc, or hmc-all.nc, which ArviZ can open.",
    (HmcOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli hmc ckpt.pt",
        "bnncli hmc ckpt.pt --chains 32 --draws 100 --max-rhat 1.01",
        "bnncli hmc ckpt.pt --until 'rhat<=1.01,ess>=1000' --resume",
        "bnncli hmc ckpt.pt --layers all --chains 4 --warmup 100",
    ),
    section="Fit",
    place=50,
)

_LEAST_TRIED = 64  # draws: of fewer the val NLL is noise


def run(run: Run, options: HmcOptions) -> Result:
    """Sample and publish; the result's metrics have R-hat, effective sample sizes, acceptance and divergences."""
    if options.max_draws is not None and options.until is None:
        raise UsageError("--max-draws is a limit for --until; give --until too")
    require_features(run)
    base = find_base(run, options)
    train = load_fitted(run, fit_on(base.header if base else None))
    held_out = held_out_of(train, load_split(run, "val") if "val" in run.folder.splits() else None)
    val = held_out if held_out is not None and held_out.content.labels is not None else None
    num_tried = options.chains * options.tried[1]
    too_short = f"a quarter of the draws is {num_tried}" if num_tried < _LEAST_TRIED else None
    options = with_prior_choice(run, options, val, num_drawn=num_tried, too_short=too_short)
    run.require_device()
    prepare = _last_layer if options.is_last_layer else prepare_network
    request, fit = prepare(run, options, train, held_out, base)
    return produce_posterior(run, request, fit, lambda meta: _report(run, request, meta, options))


def _last_layer(
    run: Run, options: HmcOptions, train: Split, held_out: Split | None, base: Base | None
) -> tuple[Request, Callable[[], Fitted]]:
    """The request for draws of the last layer, and what makes them."""
    span = span_to_fit(run, train)
    sizes: dict[str, Any] = {"num_chains": options.chains, "whole": train.layout if span else None}
    request = posterior_request(
        run,
        "hmc",
        kind="samples",
        params=request_params(run, options, base),
        algo_rev=_revisions.of_hmc(in_span=span is not None, num_params=train.layout.num_params),
        sources=request_sources(train, held_out, base),
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: memory.sampled_bytes(train.layout.num_params, options.chains * options.draws),
        require=lambda: memory.require_sampling(span or train.layout, run.device_name, **sizes),
    )

    def fit() -> Fitted:
        from bnncli.stages.hmc.prior import choose_prior
        from bnncli.stages.hmc.work import Sampling, Space, last_layer

        def space_at(prior: Prior, before: Space | None) -> Space:
            return last_layer(run, options, train, held_out, prior=prior, base=base, span=span, before=before)

        prior, told = prior_of(options, base), dict[str, Any]()
        if options.prior_precision == AUTO and held_out is not None:
            told = (stored_search(request) if options.resume else None) or choose_prior(
                run, options, prior, held_out, space_at
            )
            prior = Prior.from_meta(told, mean=prior.mean) or prior
        space = space_at(prior, None)
        space = replace(space, passes=space.passes + told.get("prior_precision_search_passes", 0))
        return Sampling(run, options, request, prior, space, told).fit()

    return request, fit


def _report(run: Run, request: Request, meta: Mapping[str, Any], options: HmcOptions) -> Report:
    metrics = meta["metrics"]
    warn_if_worse(run, request.target, metrics, method="hmc", also=weaker_prior(meta))
    return Report(metrics, summary(metrics), verdict(metrics, options))
