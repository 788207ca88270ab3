"""How a latent binary fit begins and goes on, as the options of fit-lbbnn say, and whether it has room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bnncli.inference import memory
from bnncli.latent.factors import initial_factors, initial_model, num_params
from bnncli.latent.fit import CANDIDATES, EstimatorSettings, Plan, largest_group
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.lazy import torch
from bnncli.options.fit_lbbnn import HEAD_RATE, MEAN_RANGES, FitLbbnnOptions
from bnncli.parameters.layouts import NetworkLayout
from bnncli.system.workers import team


def start_of(
    options: FitLbbnnOptions,
    layout: NetworkLayout,
    slab_sds: Sequence[float],
    *,
    num_repeats: int,
    generator: torch.Generator,
    device: torch.device,
) -> LatentModel:
    """What a fit starts from, on the device; one standard deviation for all repeats, or one for each."""
    factors = initial_factors(
        layout,
        num_repeats,
        generator,
        mean_range=MEAN_RANGES[options.estimator],
        logit_range=options.start_logits,
        device=device,
    )
    prior = SpikeAndSlab.constant(
        layout.num_layers,
        inclusion=options.prior_inclusion,
        slab_mean=options.slab_mean,
        bias_sd=options.bias_sd,
    ).to(device)
    sds = torch.tensor(slab_sds, dtype=torch.float64, device=device).unsqueeze(1)
    prior = replace(prior, slab_sd=sds.expand(-1, layout.num_layers).clone())
    multipliers = []
    if options.estimator == "mnf":
        multipliers = [
            initial_model(
                inputs,
                num_repeats,
                generator,
                length=options.flow_length or 2,
                hidden=options.flow_sizes,
                device=device,
            )
            for _, inputs in layout.shapes
        ]
    return LatentModel(layout, factors, prior, tuple(multipliers))


def check_memory(
    options: FitLbbnnOptions,
    layout: NetworkLayout,
    device: torch.device | str,
    *,
    num_examples: int,
    is_searched: bool = False,
) -> None:
    """Pass when the fit, and the search before it, have room. Raises DeviceError otherwise."""
    sizes = {"batch_size": min(options.batch_size, num_examples), "num_flow_params": 0}
    if options.estimator == "mnf":
        length, hidden = options.flow_length or 2, options.flow_sizes
        sizes["num_flow_params"] = sum(num_params(n, length=length, hidden=hidden) for _, n in layout.shapes)
    smaller = ["--hidden layers"] * bool(options.hidden) + ["--flow-hidden"] * (options.estimator == "mnf")
    hint = f"use smaller {', '.join([*smaller, '--batch-size'])}"
    fits = [(options.repeats, "use fewer --repeats" if options.repeats > 1 else hint)]
    if is_searched:
        fits.append((len(CANDIDATES), "give --slab-sd as a number; its search fits ten networks"))
    for repeats, advice in fits:
        at_once = None if team() is None else largest_group(layout, repeats, torch.device(device))
        memory.require_latent(layout, device, num_repeats=repeats, most_at_once=at_once, hint=advice, **sizes)


def epochs_of(options: FitLbbnnOptions) -> int:
    """Of resolved options."""
    assert options.epochs is not None  # resolved
    return options.epochs


def plan_of(options: FitLbbnnOptions, num_examples: int) -> Plan:
    """How resolved options say that so many examples are fitted."""
    return Plan(
        epochs=epochs_of(options),
        batch_size=min(options.batch_size, num_examples),
        learning_rate=options.learning_rate or HEAD_RATE,
        schedule=options.schedule or "constant",
        inclusion_rate=options.inclusion_rate,
        flow_rate=options.flow_rate,
        early_epochs=options.early_epochs or 0,
        hyper_prior=options.estimator == "concrete",
        prior_weight=Plan.prior_weight if options.prior_weight is None else options.prior_weight,
        settings=EstimatorSettings(
            options.estimator,
            options.variance or "exact",
            options.temperature or EstimatorSettings().temperature,
            options.multiplier_draws or EstimatorSettings().multiplier_draws,
        ),
        shuffles=not options.no_shuffle,
    )
