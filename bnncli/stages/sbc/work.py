"""The work of sbc: what is simulated, the fit made anew, the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnncli.evaluation.rank_uniformity import RankLaw
from bnncli.inference.refits import FlowRefit, GaussianRefit, HmcRefit, Refit, TrainedRefit
from bnncli.inference.simulations import Problem, quantities, ranks_of
from bnncli.inference.swag import SwagPlan, fit_swag
from bnncli.inference.vi import ViPlan, fit_vi
from bnncli.options import SbcOptions
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import Progress
from bnncli.run.inputs import Split, load_split, open_posterior, recorded_prior
from bnncli.run.session import Run
from bnncli.stages.sbc.judged import RankedQuantity
from bnncli.storage.headers import Header
from bnncli.targets.last_layer import LastLayerTarget

_OF_FLOWS = ("length", "epochs", "batch_size", "learning_rate", "num_draws", "patience")


def ranked(run: Run, options: SbcOptions, train: Split, header: Header, truth: Path | None) -> list[RankedQuantity]:
    """The quantities with their ranks and p-values."""
    prior, layout = recorded_prior(header), train.layout
    assert prior is not None  # checked
    generator = run.stream("sbc/simulations")
    features = train.resident(run.device).float()
    rows = torch.randperm(len(features), generator=generator)[: options.examples].sort().values
    observed = None if truth is None else (features, train.labels(run.device))
    problem = Problem(features[rows.to(features.device)], layout, prior, observed)
    if truth is None:
        normal = torch.randn(options.simulations, layout.num_params, generator=generator, dtype=torch.float64)
        thetas = normal / prior.diagonal(layout).sqrt()
    else:
        thetas = _truths(truth, options.simulations, generator)
    chosen = quantities(layout, _held_out(run, train, rows), run.stream("sbc/quantities"))
    ranks = ranks_of(
        problem,
        thetas,
        refit_of(header),
        ranked=chosen,
        num_draws=options.draws,
        generator=generator,
        progress=run.console,
    )
    law = RankLaw(options.simulations, options.draws)
    return [
        RankedQuantity(quantity.name, one, options.draws, law.p_value(one))
        for quantity, one in zip(chosen, ranks.numpy(), strict=True)
    ]


def refit_of(header: Header) -> Refit:
    """What makes a posterior's fit anew, with its own options."""
    meta, params = header.meta, header.provenance.get("params", {})
    if meta["method"] == "hmc":
        return HmcRefit(dynamics=str(params.get("dynamics", "split")))
    if meta["method"] in _TRAINED:
        return TrainedRefit(_TRAINED[meta["method"]](meta["metrics"]))
    structure = str(meta.get("structure", "full"))
    if meta["method"] == "laplace":
        return GaussianRefit(structure)
    given: dict[str, Any] = {name: params[name] for name in _OF_FLOWS}
    given |= {"flow": meta["flow"], "space": meta["space"], "settings": meta["settings"]}
    return FlowRefit(structure, given)


def _vi(metrics: dict[str, Any]) -> Callable[..., Gaussian]:
    """Mean-field variational inference as the posterior's, to the end of its epochs."""

    def fit(target: LastLayerTarget, start: Tensor, generator: torch.Generator, progress: Progress) -> Gaussian:
        plan = ViPlan(
            metrics["epochs"],
            min(metrics["batch_size"], target.num_examples),
            **{name: metrics[name] for name in ("learning_rate", "num_draws", "estimator", "optimizer", "kl_weight")},
        )
        return fit_vi(target, plan, start=start, generator=generator, progress=progress).gaussian

    return fit


def _swag(metrics: dict[str, Any]) -> Callable[..., Gaussian]:
    """SWAG as the posterior's, at its learning rate."""

    def fit(target: LastLayerTarget, start: Tensor, generator: torch.Generator, progress: Progress) -> Gaussian:
        plan = SwagPlan(
            warmup=metrics["warmup"],
            epochs=metrics["iterates"],
            batch_size=min(metrics["batch_size"], target.num_examples),
            **{name: metrics[name] for name in ("rank", "learning_rate", "momentum", "scale")},
        )
        return fit_swag(target, plan, start=start, generator=generator, progress=progress).gaussian

    return fit


_TRAINED = {"vi": _vi, "swag": _swag}


def _truths(path: Path, num: int, generator: torch.Generator) -> Tensor:
    """theta (M, P) of a posterior; its draws again where they are fewer."""
    posterior, _ = open_posterior(path)
    drawn: Tensor = posterior.sample(num, generator).double()
    order = (
        torch.randint(len(drawn), (num,), generator=generator)
        if len(drawn) < num
        else torch.randperm(num, generator=generator)
    )
    return drawn[order]


def _held_out(run: Run, train: Split, rows: Tensor) -> Tensor:
    """Features (R, D) of examples without simulated labels: of val, or of train where there is none."""
    if run.folder.features("val").is_file():
        return load_split(run, "val").features(torch.device("cpu"))
    features = train.features(torch.device("cpu"))
    others = torch.ones(len(features), dtype=torch.bool)
    others[rows] = False
    return features[others] if bool(others.any()) else features
