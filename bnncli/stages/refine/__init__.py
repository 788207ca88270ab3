"""refine: a Gaussian posterior in, a normalizing-flow posterior out, and whether it was worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bnncli.covariances._row_space import rows_of
from bnncli.covariances.diag import Diag
from bnncli.errors import DataError, UsageError
from bnncli.flows import build_layers, choose_recipe, choose_space, settings_of
from bnncli.flows.affine import Affine
from bnncli.inference import memory
from bnncli.inference.refine import RefineFit, fit_flow
from bnncli.machine.memory import budget, bytes_text
from bnncli.options import InputOptions, NameOptions, RefineOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.run import revisions as _revisions
from bnncli.run.inputs import (
    Split,
    load_split,
    open_posterior,
    posterior_prior,
    posterior_source,
)
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted, Report, posterior_request, produce_posterior
from bnncli.run.resumable import resumable_training
from bnncli.run.session import Result, Run
from bnncli.run.val_report import labeled_val, measure_on_val, warn_if_worse, worse_than
from bnncli.stages.refine.report import measure, summary
from bnncli.storage.artifacts import read_header
from bnncli.storage.headers import Header
from bnncli.storage.provenance import Source
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.theta.head import HeadLayout, reduced_layout
from bnncli.theta.prior import Prior

COMMAND = Command(
    "Refine a Gaussian posterior with a normalizing flow.",
    "Maximises the ELBO of a flow pushed from the base Gaussian and says, with standard errors, whether it helped. "
    "Writes posteriors/refine.safetensors.",
    (RefineOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli refine ckpt.pt",
        "bnncli refine ckpt.pt --flow radial --length 5 --epochs 20",
        "bnncli refine ckpt.pt --base prior --name naive",
    ),
    place=40,
)


def run(run: Run, options: RefineOptions) -> Result:
    """Refine and publish; the result's metrics have the ELBO before and after."""
    train = load_split(run, "train").check_labeled()
    val = labeled_val(run)
    sources = [train.source, *([val.source] if val is not None else [])]
    base_path, span, structure = None, None, ""
    if options.base != "prior":
        base_path = run.folder.find_posterior(options.base, flag="--base", maker=run.suggest("fit-laplace"))
        header, source = posterior_source(run, base_path, "base")
        _check_is_gaussian(run, base_path, header)
        structure, span = str(header.meta.get("structure")), _span(header)
        sources.append(source)
    layout, num_examples = span or train.layout, len(train.content.features)
    options = _choose_scale(run, options, layout, num_examples=num_examples)
    layer = _one_layer(options, layout)
    options = _resolve(options, layer)
    if base_path is not None:
        num_layer_params = (options.length or 0) * sum(part.numel() for part in layer.parameters())
        memory.require_refinement(
            structure,
            layout,
            run.device,
            num_draws=options.elbo_draws,
            training=_training_bytes(options, layout, num_layer_params, num_examples),
            whole=train.layout if span else None,
        )
    prior = _prior(run, options, base_path, sources)
    params = {**options.params(), "base": base_path.stem if base_path else "prior", "seed": run.compute.seed}
    num_stored = train.layout.num_params * 4 + (options.length or 0) * sum(part.numel() for part in layer.parameters())
    request = posterior_request(
        run,
        "refine",
        params=params,
        algo_rev=_revisions.of_refine(layer, getattr(layer, "scale", None)),
        sources=sources,
        checkpoint=train.checkpoint,
        estimated_bytes=(base_path.stat().st_size if base_path else 0) + 8 * num_stored,
    )

    def fit() -> Fitted:
        base = _base(run, train, base_path, prior)
        return _fit(run, options, (train, val), base, prior=prior, request=request)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request, meta))


def _span(header: Header) -> HeadLayout | None:
    """The layout inside the span of the features where the base was fitted there; None for one over all of theta."""
    rank = header.meta.get("row_space_rank")
    return None if rank is None else reduced_layout(HeadLayout.from_meta(header.meta), int(rank))


def _choose_scale(run: Run, options: RefineOptions, layout: HeadLayout, *, num_examples: int) -> RefineOptions:
    """The options with the linear part of an affine flow that fits in memory, where none was asked for."""
    if options.flow != "affine" or {"scale", "rank"} & options.settings.keys():
        return options
    length = choose_recipe("affine", length=options.length).length
    needed = {
        scale: _training_bytes(options, layout, length * Affine.num_elements(layout, scale), num_examples)
        for scale in ("kron", "low-rank")
    }
    there = budget(run.device)
    if needed["kron"] <= there or needed["low-rank"] >= needed["kron"]:
        return options
    run.console.warn(
        f"--scale low-rank: --scale kron, the default, needs about {bytes_text(needed['kron'])} of memory; "
        f"{bytes_text(there)} can be used on {run.device}"
    )
    return replace(options, settings={**options.settings, "scale": "low-rank"})


def _training_bytes(options: RefineOptions, layout: HeadLayout, num_layer_params: int, num_examples: int) -> int:
    """Bytes that the training takes with these options."""
    plan = choose_recipe(options.flow, batch_size=options.batch_size, num_draws=options.num_draws)
    batch_size = plan.batch_size if plan.batch_size < num_examples else 0
    sizes = {"num_layer_params": num_layer_params, "num_draws": plan.num_draws, "batch_size": batch_size}
    return memory.training_bytes(layout, **sizes)


def _one_layer(options: RefineOptions, layout: HeadLayout) -> Any:
    """A layer as the fit will build them: it knows its settings and its size. Raises UsageError for a wrong setting."""
    return build_layers(options.flow, layout, torch.Generator(), length=1, **options.settings)[0]


def _resolve(options: RefineOptions, layer: Any) -> RefineOptions:
    """The options with the flow's own choices in place of those that were left open."""
    own = choose_recipe(
        options.flow,
        length=options.length,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        num_draws=options.num_draws,
    )
    space = choose_space(options.flow, options.space)
    return replace(options, space=space, **own._asdict(), settings={**options.settings, **settings_of(layer)})


def _prior(run: Run, options: RefineOptions, base_path: Path | None, sources: list[Source]) -> Prior:
    """The target's prior: as given, or the base's; with --base prior, that of the run's laplace."""
    if options.prior_precision is not None:
        return Prior(options.prior_precision)
    path = base_path
    if path is None:
        path = run.folder.posterior("laplace")
        if not path.is_file():
            raise UsageError("--base prior: give --prior-precision NUMBER, or run fit-laplace first")
        sources.append(posterior_source(run, path, "prior_precision")[1])
    return posterior_prior(path, read_header(path))


def _check_is_gaussian(run: Run, path: Path, header: Header) -> None:
    kind = "samples" if header.kind == "samples" else header.meta.get("type")
    if kind != "gaussian":
        raise DataError(
            f"--base: expected a gaussian posterior; {path} is of type {kind}",
            code="wrong_type",
            hint=run.suggest("fit-laplace"),
            path=path,
        )


def _base(run: Run, train: Split, base_path: Path | None, prior: Prior) -> Gaussian:
    """The Gaussian that the flow starts from: the artifact's, or the prior itself."""
    if base_path is None:
        zeros = torch.zeros(train.layout.num_params, dtype=torch.float64)
        covariance = Diag.from_hessian({"hessian.diag": zeros}, prior, train.layout)
        return Gaussian(zeros, covariance, train.layout, prior).to(run.device)
    base, _ = open_posterior(base_path)
    if base.layout != train.layout:
        raise DataError(
            f"--base: {base_path} has {base.layout}, the features {train.layout}",
            code="wrong_layout",
            path=base_path,
        )
    return _within_rows(run, base, train, prior=prior, path=base_path).to(run.device)


def _within_rows(run: Run, base: Gaussian, train: Split, *, prior: Prior, path: Path) -> Gaussian:
    """The base itself; where it was fitted in the row space, with the target's prior outside, which is exact there.

    Raises:
        DataError: the features lie outside the space that it was fitted in.
    """
    within = rows_of(base.covariance)
    if within is None:
        return base
    if not within.rows.has(torch.from_numpy(train.content.features)):
        raise DataError(
            f"--base: {path} was fitted in the row space of other training features",
            code="wrong_row_space",
            hint=run.suggest("fit-laplace"),
            path=path,
        )
    return replace(base, covariance=replace(within, precision=prior.weight_precision))


def _fit_flow(target: LastLayerTarget, base: Gaussian, **choices: Any) -> RefineFit:
    """The flow on the base; where that was fitted in the row space the layers are trained and act there."""
    within = rows_of(base.covariance)
    if within is None:
        return fit_flow(target, base, **choices)
    rows = within.rows
    inner = Gaussian(rows.reduce(base.mean), within.inner, rows.reduced, base.prior)
    fit = fit_flow(rows.target(target), inner, **choices)
    flow = fit.posterior
    return replace(fit, posterior=Flow(base, flow.layers, flow.kind, flow.space))


def _fit(
    run: Run,
    options: RefineOptions,
    splits: tuple[Split, Split | None],
    base: Gaussian,
    *,
    prior: Prior,
    request: Request,
) -> Fitted:
    train, val = splits
    target = train.target(prior, run.device)
    resumable = resumable_training(run, request, resume=options.resume, save_every=options.save_every)
    with resumable.hint():
        fit = _fit_flow(
            target,
            base,
            flow=options.flow,
            length=options.length,
            epochs=options.epochs,
            batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            num_draws=options.num_draws,
            patience=options.patience,
            space=options.space,
            settings=options.settings,
            generator=run.stream("refine/train"),
            state=resumable.restore(),
            save=resumable.save,
            progress=run.console,
        )
    metrics = measure(run, options, fit, base, target)
    if val is not None:
        others = {} if options.base == "prior" else {"base": base}
        metrics |= measure_on_val(run, fit.posterior, val, method="refine", others=others)
    if metrics["verdict"] == "hurt":
        run.console.warn("the refined posterior is further from the target than its base")
    tensors, meta = fit.posterior.to_tensors()
    tensors |= prior.to_tensors()
    tensors["history.elbo"] = fit.history.double().cpu()
    meta |= {
        "method": "refine",
        **prior.to_meta(),
        "param_layout": train.layout.to_json(),
        "maps": fit.posterior.layers[0].maps,
    }
    return Fitted(tensors, meta, metrics, train, publishing=resumable.publishing)


def _warn_of_val(run: Run, path: Path, metrics: dict[str, Any], *, base: str) -> None:
    """Say so where the refined posterior is worse on val than the network, its best temperature or the base."""
    also = []
    if "base" in worse_than(metrics):
        also.append(f"{run.suggest('predict', posterior=base)} ({metrics['val']['base']['nll']:.4f})")
    warn_if_worse(run, path, metrics, method="refine", also=also)


def _report(run: Run, request: Request, meta: Mapping[str, Any]) -> Report:
    metrics = meta["metrics"]
    _warn_of_val(run, request.target, metrics, base=str(request.params["base"]))
    return Report(metrics, summary(metrics))
