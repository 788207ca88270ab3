"""fit-vi: features in, independent Gaussians that maximise the ELBO out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.inference.network_memory import Stepping
from bnncli.integrators.mc import Mc
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.fit_vi import FitViOptions
from bnncli.session import revisions as _revisions
from bnncli.session.posteriors import Fitted, Fitting, Report, TargetFit, produce_fit, weaker_prior
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import warn_if_worse
from bnncli.stages.fit_vi.report import summary

COMMAND = Command(
    "Fit independent Gaussians by variational inference.",
    "This is a baseline for fit-laplace and refine. Maximises the ELBO over a mean and a variance per "
    "parameter. With --layers, batch norm statistics stay fixed. Writes posteriors/vi.safetensors, or vi-all.",
    (FitViOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-vi ckpt.pt",
        "bnncli fit-vi ckpt.pt --optimizer ivon --name ivon",
        "bnncli fit-vi ckpt.pt --layers all --estimator flipout --resume",
    ),
    section="Fit",
    place=70,
)

_VECTORS = (
    24  # of P numbers: means, standard deviations, gradients, the optimizer's, and these in a state to resume from
)


def run(run: Run, options: FitViOptions) -> Result:
    """Fit and publish; the result's metrics have the ELBO."""

    def stepping(num_examples: int, num_params: int) -> Stepping:
        return Stepping(
            _VECTORS + 3 * options.draws_a_step,
            options.draws_a_step,
            options.examples_a_step,
            num_predicting=Mc().default_for(num_params, is_last_layer=options.is_last_layer),
            num_judging=options.num_elbo_draws,
        )

    def work(fitting: Fitting) -> Fitted:
        from bnncli.stages.fit_vi import work

        return work.fit(fitting, options)

    asked = TargetFit(
        "vi",
        _revisions.FIT_VI,
        stepping,
        lambda num_params: 24 * num_params,
        work,
        hint=("use a smaller \0num_draws\0, or " if options.chosen_estimator == "reparam" else "use ")
        + "a smaller \0batch_size\0",
    )
    return produce_fit(run, options, asked, lambda request, meta: _report(run, request, meta))


def _report(run: Run, request: Request, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    warn_if_worse(run, request.target, metrics, method="vi", also=weaker_prior(meta))
    return Report(metrics, summary(metrics))
