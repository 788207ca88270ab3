"""fit-sghmc: features in, draws by stochastic gradients out, and what biases them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.inference import memory
from bnncli.inference.network_memory import Stepping
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.fit_sghmc import FitSghmcOptions
from bnncli.session import revisions as _revisions
from bnncli.session.posteriors import Fitted, Fitting, Report, TargetFit, produce_fit, weaker_prior
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import warn_if_worse
from bnncli.stages.fit_sghmc.report import summary

COMMAND = Command(
    "Sample by stochastic-gradient HMC, cyclical or not.",
    "This is a baseline for hmc without accept/reject steps, so its draws are biased by the step size and "
    "minibatch noise. The summary reports the bias along the stiffest direction. With --layers, batch norm "
    "statistics stay fixed. Writes posteriors/sghmc.nc, or sghmc-all.nc.",
    (FitSghmcOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-sghmc ckpt.pt",
        "bnncli fit-sghmc ckpt.pt --sampler sgld --name sgld",
        "bnncli fit-sghmc ckpt.pt --sampler cyclical --epochs 200 --batch-size 128 --learning-rate 0.1 --momentum-decay 0.9 --exploration 0.9 "
        "--draws 3 --preconditioner none --name published",
        "bnncli fit-sghmc ckpt.pt --layers all --chains 1 --resume",
    ),
    section="Fit",
    place=90,
)

# Of each chain: theta, momentum, gradient, noise, RMSprop's mean squares or whitened ones, products; twice for states to resume from.
_CHAIN_VECTORS = 12


def run(run: Run, options: FitSghmcOptions) -> Result:
    """Sample and publish; the result's metrics have R-hat, effective sample sizes and the bias of steps and minibatches."""
    num_draws = options.chains * options.num_cycles * options.num_draws

    def stepping(num_examples: int, num_params: int) -> Stepping:
        return Stepping(
            _CHAIN_VECTORS * options.chains,
            options.chains,
            options.examples_a_step,
            num_kept=num_draws,
            num_predicting=num_draws,
        )

    def work(fitting: Fitting) -> Fitted:
        from bnncli.stages.fit_sghmc import work

        return work.fit(fitting, options)

    asked = TargetFit(
        "sghmc",
        _revisions.FIT_SGHMC,
        stepping,
        lambda num_params: memory.sampled_bytes(num_params, num_draws),
        work,
        kind="samples",
        hint="use fewer \0chains\0 or a smaller \0batch_size\0",
        num_bases=2 if options.may_whiten else 0,  # as it is read, and in the precision of steps
    )
    return produce_fit(run, options, asked, lambda request, meta: _report(run, request, meta))


def _report(run: Run, request: Request, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    warn_if_worse(run, request.target, metrics, method="sghmc", also=weaker_prior(meta))
    return Report(metrics, summary(metrics))
