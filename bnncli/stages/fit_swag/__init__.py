"""fit-swag: features in, a Gaussian of SGD's iterates out, and how wide it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncli.inference.network_memory import Stepping
from bnncli.integrators.mc import Mc
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.fit_swag import FitSwagOptions
from bnncli.session import revisions as _revisions
from bnncli.session.posteriors import Fitted, Fitting, Report, TargetFit, produce_fit, weaker_prior
from bnncli.session.produce import Request
from bnncli.session.run import Result, Run
from bnncli.session.val_report import warn_if_worse
from bnncli.stages.fit_swag.report import summary

COMMAND = Command(
    "Fit a Gaussian to the iterates of SGD (SWAG).",
    "This is a baseline for fit-laplace. SGD starts at the network's weights; minibatch noise and the learning "
    "rate set the spread. With --layers, batch norm statistics stay fixed. Writes posteriors/swag.safetensors, "
    "or swag-all.",
    (FitSwagOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-swag ckpt.pt",
        "bnncli fit-swag ckpt.pt --learning-rate 0.05 --rank 30 --scale 0.5 --name wide",
        "bnncli fit-swag ckpt.pt --layers all --resume",
    ),
    section="Fit",
    place=80,
)

_VECTORS = 12  # of P numbers: theta, momentum, gradients, mean and squares, and these in a state to resume from


def run(run: Run, options: FitSwagOptions) -> Result:
    """Fit and publish; the result's metrics have the learning rate and the spread."""

    def stepping(num_examples: int, num_params: int) -> Stepping:
        num_predicting = Mc().default_for(num_params, is_last_layer=options.is_last_layer)
        # The deviations in two precisions, their orthonormal basis, and copies in a state.
        num_vectors = _VECTORS + 4 * options.num_columns
        return Stepping(num_vectors, 1, options.examples_a_step(num_examples), num_predicting=num_predicting)

    def work(fitting: Fitting) -> Fitted:
        from bnncli.stages.fit_swag import work

        return work.fit(fitting, options)

    asked = TargetFit(
        "swag",
        _revisions.FIT_SWAG,
        stepping,
        lambda num_params: (4 * options.num_columns + 24) * num_params,
        work,
        hint="use a smaller \0rank\0 or \0batch_size\0",
    )
    return produce_fit(run, options, asked, lambda request, meta: _report(run, request, meta))


def _report(run: Run, request: Request, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    warn_if_worse(run, request.target, metrics, method="swag", also=weaker_prior(meta))
    return Report(metrics, summary(metrics))
