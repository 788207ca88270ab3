"""refine: a Gaussian posterior in, a normalizing-flow posterior out, and whether it was worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.options import InputOptions, NameOptions, RefineOptions
from bnncli.options.command import COMPUTE, Command
from bnncli.options.refine import BASE
from bnncli.run import revisions as _revisions
from bnncli.run.inputs import load_split, posterior_prior, posterior_source
from bnncli.run.network_sources import network_sources
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted, Report, posterior_request, produce_posterior
from bnncli.run.row_space import span_of
from bnncli.run.session import Result, Run
from bnncli.run.val_report import labeled_val, warn_if_worse, worse_than
from bnncli.stages.refine.plan import Sizes, require_network_room, require_room, resolve
from bnncli.stages.refine.report import summary
from bnncli.storage.artifacts import read_header
from bnncli.storage.headers import Header
from bnncli.storage.provenance import Source
from bnncli.theta.module import LAST
from bnncli.theta.prior import Prior
from bnncli.theta.recorded import recorded_layout

if TYPE_CHECKING:
    from bnncli.run.network_splits import NetworkReader

COMMAND = Command(
    "Refine a Gaussian posterior with a normalizing flow.",
    "Maximises the ELBO of a flow pushed from the base Gaussian and says, with standard errors, whether it helped. "
    "The flow is over the layers of its base, the last one by default. Writes posteriors/refine.safetensors, or refine-all "
    "of all layers.",
    (RefineOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli refine ckpt.pt",
        "bnncli refine ckpt.pt --flow radial --length 5 --epochs 20",
        "bnncli refine ckpt.pt --base prior --name naive",
        "bnncli refine ckpt.pt --layers all --subspace 20",
    ),
    place=40,
)


def run(run: Run, options: RefineOptions) -> Result:
    """Refine and publish; the result's metrics have the ELBO before and after."""
    train = load_split(run, "train").check_labeled()
    val = labeled_val(run)
    sources = [train.source, *([val.source] if val is not None else [])]
    base_path, header, span = None, None, None
    if options.base != "prior":
        base_path = _base_path(run, options)
        header, source = posterior_source(run, base_path, "base")
        _check_is_gaussian(run, base_path, header)
        options = _with_layers_of(options, header)
        span = span_of(header.meta)
        sources.append(source)
    options.check_trust()
    if not options.is_last_layer:
        sources += network_sources([split for split in (train, val) if split is not None])
    if base_path is not None:
        run.require_device()
    layout = train.layout if options.is_last_layer else recorded_layout((header or _laplace(run, options)).meta)
    sizes = Sizes.of(span or layout, options.subspace, len(train.content.features))
    options = resolve(run, options, sizes)
    prior = _prior(run, options, base_path, sources)
    params = {**options.params(), "base": base_path.stem if base_path else "prior", "seed": run.compute.seed}

    @cache
    def num_layer_params() -> int:
        from bnncli.stages.refine import work

        return work.num_layer_params(options, sizes.acted)

    @cache
    def reader() -> NetworkReader | None:
        from bnncli.run.network_splits import NetworkReader

        return None if options.is_last_layer else NetworkReader.of(run, options)

    @cache
    def planned_memory() -> int | None:
        known = {
            "num_layer_params": num_layer_params(),
            "base_bytes": 0 if base_path is None else base_path.stat().st_size,
        }
        if not options.is_last_layer:
            return require_network_room(run, options, sizes, reader(), splits=(train, val), **known)
        if header is not None:
            whole = train.layout if span else None
            require_room(run, options, sizes, header, num_layer_params=num_layer_params(), whole=whole)
        return None

    def estimated_bytes() -> int:
        num_stored = layout.num_params * (4 + (options.subspace or 0)) + num_layer_params()
        return (base_path.stat().st_size if base_path else 0) + 8 * num_stored

    request = posterior_request(
        run,
        f"refine{options.layers_suffix}",
        params=params,
        algo_rev=_revisions.of_refine(options.chosen_flow, options.settings.get("scale")),
        sources=sources,
        checkpoint=train.checkpoint,
        estimated_bytes=estimated_bytes,
        require=planned_memory,
        estimated_memory=planned_memory,
    )

    def fit() -> Fitted:
        from bnncli.stages.refine import work

        with work.seen(options, reader(), train, val) as splits:
            base = work.base_of(run, splits[0], base_path, prior)
            return work.fit(run, options, splits, base, prior=prior, request=request)

    return produce_posterior(run, request, fit, lambda meta: _report(run, request, meta))


def _base_path(run: Run, options: RefineOptions) -> Path:
    """The file of the base that was named, or of the default one of the layers."""
    if options.is_last_layer or options.base != BASE:
        return run.folder.find_posterior(options.base, flag="--base", maker=run.suggest("fit-laplace"))
    return _laplace(run, options).path


def _laplace(run: Run, options: RefineOptions) -> Header:
    """Of the Gaussian that fit-laplace makes of these layers. Raises MissingInput without one."""
    path = run.folder.posterior(options.default_base)
    if not path.is_file():
        maker = run.suggest("fit-laplace", layers=options.layers, trust_code=options.trust_code)
        raise MissingInput(
            f"--layers {options.layers}: no posterior {path.stem!r} for {run.checkpoint_path} (looked for {path})",
            hint=maker,
            path=path,
        )
    return read_header(path)


def _with_layers_of(options: RefineOptions, header: Header) -> RefineOptions:
    """The options with the layers that the base is over. Raises UsageError where others were asked for."""
    layers = str(header.meta.get("layers", LAST))
    if not options.is_last_layer and layers != options.layers:
        raise UsageError(
            f"--layers {options.layers}: the base {header.path} is over --layers {layers}; leave --layers out to refine it as it is"
        )
    return replace(options, layers=layers)


def _prior(run: Run, options: RefineOptions, base_path: Path | None, sources: list[Source]) -> Prior:
    """The target's prior: as given, or the base's; with --base prior, that of the run's laplace."""
    if options.prior_precision is not None:
        return Prior(options.prior_precision)
    path = base_path
    if path is None:
        path = run.folder.posterior(options.default_base)
        if not path.is_file():
            raise UsageError("--base prior: give --prior-precision NUMBER, or run fit-laplace first")
        sources.append(posterior_source(run, path, "prior_precision")[1])
    return posterior_prior(path, read_header(path))


def _check_is_gaussian(run: Run, path: Path, header: Header) -> None:
    kind = "samples" if header.kind == "samples" else header.meta.get("type")
    if kind != "gaussian":
        layers = header.meta.get("layers", LAST)
        also = {} if layers == LAST else {"layers": layers, "trust_code": True}
        raise DataError(
            f"--base: expected a gaussian posterior; {path} is of type {kind}",
            code="wrong_type",
            hint=run.suggest("fit-laplace", **also),
            path=path,
        )
    if "num_varying" in header.meta:
        raise UsageError(
            f"--base: {path.stem} fixes all but {header.meta['num_varying']:,} parameters, which a flow would not move; expected a base "
            "that fixes none",
            hint=run.suggest("fit-laplace", layers=header.meta["layers"], trust_code=True),
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
