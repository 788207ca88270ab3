"""refine: a Gaussian posterior in, a normalizing-flow posterior out, and whether it was worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bnncli.errors import DataError, UsageError
from bnncli.flows import choose_recipe, choose_space, resolved_settings
from bnncli.flows._affine_sizes import num_elements
from bnncli.inference import memory
from bnncli.machine.memory import budget, bytes_text
from bnncli.options import InputOptions, NameOptions, RefineOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.run import revisions as _revisions
from bnncli.run.inputs import load_split, posterior_prior, posterior_source
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted, Report, posterior_request, produce_posterior
from bnncli.run.row_space import span_of
from bnncli.run.session import Result, Run
from bnncli.run.val_report import labeled_val, warn_if_worse, worse_than
from bnncli.stages.refine.report import summary
from bnncli.storage.artifacts import read_header
from bnncli.storage.headers import Header
from bnncli.storage.provenance import Source
from bnncli.theta.layout import MatrixLayout
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
        structure, span = str(header.meta.get("structure")), span_of(header.meta)
        sources.append(source)
    layout, num_examples = span or train.layout, len(train.content.features)
    if base_path is not None:
        run.require_device()
    options = _resolve(_choose_scale(run, options, layout, num_examples=num_examples), layout)
    prior = _prior(run, options, base_path, sources)
    params = {**options.params(), "base": base_path.stem if base_path else "prior", "seed": run.compute.seed}

    @cache
    def num_layer_params() -> int:
        from bnncli.stages.refine import work

        return work.num_layer_params(options, layout)

    def require() -> None:
        if base_path is not None:
            memory.require_refinement(
                structure,
                layout,
                run.device_name,
                num_draws=options.elbo_draws,
                training=_training_bytes(options, layout, num_layer_params(), num_examples),
                whole=train.layout if span else None,
            )

    def estimated_bytes() -> int:
        num_stored = train.layout.num_params * 4 + num_layer_params()
        return (base_path.stat().st_size if base_path else 0) + 8 * num_stored

    request = posterior_request(
        run,
        "refine",
        params=params,
        algo_rev=_revisions.of_refine(options.flow, options.settings.get("scale")),
        sources=sources,
        checkpoint=train.checkpoint,
        estimated_bytes=estimated_bytes,
        require=require,
    )

    def fit() -> Fitted:
        from bnncli.stages.refine import work

        base = work.base_of(run, train, base_path, prior)
        return work.fit(run, options, (train, val), base, prior=prior, request=request)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request, meta))


def _choose_scale(run: Run, options: RefineOptions, layout: MatrixLayout, *, num_examples: int) -> RefineOptions:
    """The options with the linear part of an affine flow that fits in memory, where none was asked for."""
    if options.flow != "affine" or {"scale", "rank"} & options.settings.keys():
        return options
    length = choose_recipe("affine", length=options.length).length
    needed = {
        scale: _training_bytes(options, layout, length * num_elements(layout, scale), num_examples)
        for scale in ("kron", "low-rank")
    }
    there = budget(run.device_name)
    if needed["kron"] <= there or needed["low-rank"] >= needed["kron"]:
        return options
    run.console.warn(
        f"--scale low-rank: --scale kron, the default, needs about {bytes_text(needed['kron'])} of memory; "
        f"{bytes_text(there)} can be used on {run.device_name}"
    )
    return replace(options, settings={**options.settings, "scale": "low-rank"})


def _training_bytes(options: RefineOptions, layout: MatrixLayout, num_layer_params: int, num_examples: int) -> int:
    """Bytes that the training takes with these options."""
    recipe = choose_recipe(options.flow, batch_size=options.batch_size, num_draws=options.num_draws)
    batch_size = recipe.batch_size if recipe.batch_size < num_examples else 0
    sizes = {"num_layer_params": num_layer_params, "num_draws": recipe.num_draws, "batch_size": batch_size}
    return memory.training_bytes(layout, **sizes)


def _resolve(options: RefineOptions, layout: MatrixLayout) -> RefineOptions:
    """The options with the flow's own choices in place of those that were left open."""
    settings = resolved_settings(options.flow, layout, **options.settings)
    own = choose_recipe(
        options.flow,
        length=options.length,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        num_draws=options.num_draws,
    )
    space = choose_space(options.flow, options.space)
    return replace(options, space=space, **own._asdict(), settings={**options.settings, **settings})


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
