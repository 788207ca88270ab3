"""How fits of fit-lbbnn without hidden layers are tried: truths from their spike and slab, and the fit as its file records it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from bnncli.artifacts.headers import Header, interpreting
from bnncli.inference.simulation import LOG_LIKELIHOOD, LatentRefit, Problem, prior_draws
from bnncli.latent.fit import Scaling
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.lazy import torch
from bnncli.options.fit_lbbnn import FitLbbnnOptions
from bnncli.parameters.layouts import NetworkLayout
from bnncli.parameters.prior import Prior
from bnncli.session.run import Run
from bnncli.stages.fit_lbbnn.plan import check_memory, plan_of, start_of
from bnncli.stages.fit_lbbnn.underfitting import short_plan
from bnncli.stages.sbc.trial import Trial

if TYPE_CHECKING:
    from torch import Tensor

_NOT_ASKED = Prior(1.0)  # a target has one; the refit has its own, and the log likelihood is ranked, which needs none


def latent_trial(
    run: Run, header: Header, features: Tensor, *, of_all: Tensor, num: int, generator: torch.Generator
) -> Trial:
    """So many truths from the posterior's prior, and its fit to labels simulated at features (n, D); warns of too few steps.

    The prior is that of features standardised as those `of_all` (N, D) are, where the fit's were.

    Raises:
        DeviceError: a fit has no room.
    """
    layout, options = NetworkLayout.from_meta(header.meta), options_of(header, len(features))
    assert layout.head is not None  # checked
    check_memory(options, layout, run.device, num_examples=len(features))
    plan = plan_of(options, len(features))
    with interpreting(header.path):
        (slab_sd,) = header.meta["metrics"]["slab_sd"]
    warning = short_plan(options, plan, len(features))
    if warning is not None:
        run.console.warn(f"fitting {header.path.stem} to {len(features)} simulated labels: {warning}")
    scaling = Scaling.of(of_all, run.device) if options.standardize else None

    def start(num_targets: int, stream: torch.Generator) -> LatentModel:
        count = num_targets * options.repeats
        return start_of(options, layout, [slab_sd], num_repeats=count, generator=stream, device=run.device)

    prior = SpikeAndSlab.constant(
        layout.num_layers,
        inclusion=options.prior_inclusion,
        slab_mean=options.slab_mean,
        slab_sd=slab_sd,
        bias_sd=options.bias_sd,
    ).to(run.device)
    thetas = prior_draws(layout, prior, num, generator, scaling)
    return Trial(Problem(features, layout.head, _NOT_ASKED), thetas, LatentRefit(start, plan, scaling), LOG_LIKELIHOOD)


def options_of(header: Header, num_examples: int) -> FitLbbnnOptions:
    """The fit's, as recorded; epochs that fit-lbbnn chose by the number of its examples are chosen by this one."""
    names = {spec.name for spec in fields(FitLbbnnOptions)}
    with interpreting(header.path):
        params = header.provenance["params"]
        recorded = FitLbbnnOptions(**{name: value for name, value in params.items() if name in names})
        left_open = replace(recorded, epochs=None)
        was_chosen = recorded.epochs == left_open.resolved(header.meta["num_examples"]).epochs
    return left_open.resolved(num_examples) if was_chosen else recorded
