"""How the fit of a posterior is made anew: by its method, with its own options, as its file records them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError
from bnncli.inference.sghmc import SghmcPlan
from bnncli.inference.simulation import FlowRefit, GaussianRefit, HmcRefit, Refit, SghmcRefit, TrainedRefit
from bnncli.inference.swag import SwagPlan, fit_swag
from bnncli.inference.vi import ViPlan, fit_vi
from bnncli.lazy import torch
from bnncli.options.fit_sghmc import BASE, CYCLICAL, RMSPROP
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import Progress
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from torch import Tensor

_OF_FLOWS = ("length", "epochs", "batch_size", "learning_rate", "num_draws", "patience")


def refit_of(header: Header) -> Refit:
    """What makes a posterior's fit anew, with its own options.

    Raises:
        DataError: it was preconditioned by a base that is no longer there as it was.
    """
    meta, params = header.meta, header.provenance.get("params", {})
    if meta["method"] == "hmc":
        return HmcRefit(dynamics=str(params.get("dynamics", "split")))
    if meta["method"] == "sghmc":
        return _sghmc(header)
    if meta["method"] != "refine":
        return _gaussian(meta)
    given: dict[str, Any] = {name: params[name] for name in _OF_FLOWS}
    given |= {"flow": meta["flow"], "space": meta["space"], "settings": meta["settings"]}
    return FlowRefit(str(meta.get("structure", "full")), given)


def _gaussian(meta: dict[str, Any]) -> GaussianRefit | TrainedRefit:
    """Of a Gaussian's header."""
    if meta["method"] in _TRAINED:
        return TrainedRefit(_TRAINED[meta["method"]](meta["metrics"]))
    return GaussianRefit(str(meta.get("structure", "full")))


def _sghmc(header: Header) -> SghmcRefit:
    """Chains as the posterior's; batches of all its examples are of all the simulated ones."""
    metrics = header.meta["metrics"]
    cycles, batch_size = metrics["cycles"], metrics["batch_size"]
    plan = SghmcPlan(
        metrics["epochs"],
        cycles,
        metrics["draws"] // cycles,
        metrics["exploring_epochs"],
        batch_size if batch_size < header.meta["num_examples"] else sys.maxsize,
        metrics["learning_rate"],
        metrics["momentum_decay"],
        metrics["temperature"],
        is_cyclical=metrics["sampler"] == CYCLICAL,
        is_preconditioned=metrics["preconditioner"] == RMSPROP,
    )
    return SghmcRefit(
        plan,
        metrics["chains"],
        is_given=metrics["learning_rate_by"] == "given",
        from_initialisation=metrics["start"] == "init",
        base=_gaussian(base_of(header).meta) if metrics["preconditioner"] == BASE else None,
    )


def base_of(header: Header) -> Header:
    """The header of the Gaussian whose covariance preconditions a posterior's chains.

    Raises:
        DataError: it is not where it was, or another.
    """
    entry = next(one for one in header.inputs if one["role"] == "base")
    path = header.input_path(entry)
    found = read_header(path) if path.is_file() else None
    if found is None or found.content_digest != entry["content_digest"]:
        raise DataError(
            f"\0posterior\0: {header.path.stem} is preconditioned by {path.stem}, which must be fitted again "
            f"too; expected it at {path}, found {'nothing' if found is None else 'another file'}",
            hint="run fit-sghmc again, or with \0preconditioner\0 none",
            path=path,
        )
    return found


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
