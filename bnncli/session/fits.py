"""Fit posteriors and store them: the target, its prior and base, the request, publication and report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import write_posterior
from bnncli.artifacts.provenance import Source
from bnncli.errors import BnnError, NumericError, UsageError
from bnncli.inference import memory
from bnncli.inference.network_memory import StochasticFitPlan, require_steps
from bnncli.likelihoods import name_to_record
from bnncli.options.shared import TargetOptions
from bnncli.parameters.layouts import HeadLayout, reduced_layout
from bnncli.parameters.prior import Prior
from bnncli.session import predictions
from bnncli.session.inputs import Split, head_tensors, open_posterior, posterior_prior, posterior_source
from bnncli.session.network_splits import network_sources
from bnncli.session.out_of_fold import (
    fit_on_meta,
    keep_if_held_out,
    load_fitted,
    read_fitted_splits,
    require_features,
    unique_sources,
)
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.run import Result, Run
from bnncli.session.val_report import load_labeled_val
from bnncli.system.memory import budget

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.posteriors.gaussian import Gaussian
    from bnncli.session.network_splits import NetworkReader
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.row_space import RowSpace


_SUFFIXES = {"posterior": ".safetensors", "samples": ".nc"}


@dataclass(frozen=True)
class FitOutput:
    """Output of a fit.

    Attributes:
        tensors: all arrays; empty if `write` has them.
        meta: type, method, param_layout and whatever else distinguishes this posterior.
        metrics: numbers of the fit to store.
        split: source of the stored head, classes and number of examples; None if tensors and meta have them.
        told: further numbers for the result that are not stored, because they may differ between runs of one request.
        write: publishes something other than a safetensors file; maps (meta, provenance, may_replace) to the content digest.
        publishing: context to enter while the file is published.
    """

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    metrics: Mapping[str, Any]
    split: Split | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[dict[str, Any], dict[str, Any], bool], str] | None = None
    publishing: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Report:
    """Report on a new or existing posterior: numbers for the result, lines for people, and a negative verdict if any."""

    metrics: dict[str, Any]
    summary: list[str]
    failure: BnnError | None = None


def posterior_request(
    run: Run,
    default: str,
    *,
    kind: str = "posterior",
    params: Mapping[str, Any],
    algo_rev: int,
    sources: Sequence[Source],
    checkpoint: Mapping[str, Any] | None,
    estimated_bytes: Callable[[], int],
    require: Callable[[], object] = lambda: None,
    estimated_memory: Callable[[], int | None] = lambda: None,
) -> Request:
    """Return the request for a posterior, at the given path or in the run folder by its given or default name.

    Raises:
        UsageError, OutputExists: the name is not allowed.
    """
    named = run.folder.posterior(run.naming.name or default, suffix=_SUFFIXES[kind])
    target = Path(run.naming.out) if run.naming.out else named
    run.folder.check_name_is_free(target)
    return Request(
        target,
        kind,
        target.stem,
        params,
        algo_rev,
        sources,
        checkpoint,
        estimated_bytes,
        require,
        estimated_memory=estimated_memory,
    )


def produce_posterior(
    run: Run, request: Request, fit: Callable[[], FitOutput], report: Callable[[Mapping[str, Any]], Report]
) -> Result:
    """Produce a posterior: up to date, fitted, replaced or planned.

    Args:
        fit: does the work; called with the lock held, only if there is work.
        report: reports on a posterior with this meta, and warns.

    Raises:
        BnnError: see `produce`.
    """

    def compute() -> ComputationOutput:
        fitted = fit()
        tensors, meta = _content(fitted)
        said = report({**meta, "metrics": {**meta["metrics"], **fitted.told}})

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            with fitted.publishing():
                if fitted.write is not None:
                    return fitted.write(meta, provenance, may_replace)
                return write_posterior(
                    request.target, tensors, meta=meta, provenance=provenance, may_replace=may_replace
                )

        return ComputationOutput(publish, said.metrics, said.summary, said.failure)

    def when_fresh(header: Header) -> ComputationOutput:
        said = report({**header.meta, "metrics": header.meta.get("metrics", {})})
        return ComputationOutput(
            lambda provenance, may_replace: header.content_digest, said.metrics, said.summary, said.failure
        )

    return produce(run, request, compute, when_fresh=when_fresh)


def _content(fitted: FitOutput) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and meta to store."""
    tensors, meta = dict(fitted.tensors), {**fitted.meta, "metrics": dict(fitted.metrics)}
    if fitted.split is not None:
        content = fitted.split.content
        tensors |= head_tensors(fitted.split)
        meta |= {"num_examples": len(content.features), "classes": content.classes}
    return tensors, meta


def span_to_fit(run: Run, train: Split, *, structure: str = "auto", **sizes: Any) -> HeadLayout | None:
    """Return the largest layout of theta within the span of the features; None to fit all of theta.

    Args:
        structure: as requested; auto means full or block only if one of them can be fitted in the span.
        sizes: see memory.fit_bytes.
    """
    num_examples, num_features = train.content.features.shape
    if num_examples >= num_features or structure not in ("auto", *registry.declaring("curvature", "is_fitted_in_span")):
        return None
    span = reduced_layout(train.layout, num_examples)
    if structure == "auto":
        structure = memory.automatic_structure(
            span, budget(run.device_name), device=run.device_name, whole=train.layout, **sizes
        )
    return span if registry.declared("curvature", structure, "is_fitted_in_span") else None


def span_of(meta: Mapping[str, Any]) -> HeadLayout | None:
    """Return the layout within the span of the features from a header; None for a fit of all of theta."""
    rank = meta.get("row_space_rank")
    return None if rank is None else reduced_layout(HeadLayout.from_meta(meta), int(rank))


def row_space(target: LastLayerTarget) -> RowSpace:
    """Return the span of a target's features, on the target's device."""
    from bnncli.targets.row_space import RowSpace

    return RowSpace.of(target.features.to(target.device), target.layout)


def span_metrics(gaussian: Gaussian) -> dict[str, int]:
    """Return rank and number of the features for a Gaussian fitted in their span; empty otherwise."""
    from bnncli.structures.row_space import rows_of

    within = rows_of(gaussian.covariance)
    if within is None:
        return {}
    return {"row_space_rank": within.rows.rank, "num_features": within.rows.layout.num_features}


def span_line(metrics: Mapping[str, Any]) -> list[str]:
    """Return `span_metrics` as a line for people."""
    rank = metrics.get("row_space_rank")
    if rank is None:
        return []
    reached = f"the training features span {rank:,} of {metrics['num_features']:,} directions"
    return [f"{reached}: the fit is exact in these directions, and all others keep the prior"]


LEAVE_OUT = "omit \0learning_rate\0 to let bnncli choose one"


@contextmanager
def suggest_default_learning_rate(learning_rate: float | None) -> Iterator[None]:
    """Suggest dropping --learning-rate if training in the block diverges with a given rate."""
    try:
        yield
    except NumericError as error:
        if learning_rate is not None:
            error.hint = LEAVE_OUT
        raise


_LARGE = 1 << 30  # bytes; a larger base file is not read a second time


@dataclass(frozen=True)
class BaseComparison:
    """Comparison of a Gaussian with its base, by parameter.

    Args:
        name: of the base.
        median_share: median ratio of variances, Gaussian over base.
        rms_distance, largest_distance: between the means, in standard deviations of the base.
    """

    name: str
    median_share: float
    rms_distance: float
    largest_distance: float


@dataclass(frozen=True)
class Base:
    """A posterior that provides the target's prior."""

    path: Path
    header: Header
    source: Source
    prior: Prior

    @property
    def is_gaussian(self) -> bool:
        """Return whether the base can whiten."""
        return self.header.meta.get("type") == "gaussian"


def find_base(run: Run, options: TargetOptions) -> Base | None:
    """Return the base named by the options or the default; None if they give a prior precision.

    Raises:
        MissingInput: there is none.
        DataError: it has no prior.
        UsageError: it is over other layers, or a prior precision is given as well.
    """
    if options.given_precision is not None:
        if options.base not in (None, options.default_base):
            raise UsageError("give only one of \0prior_precision\0 and \0base\0: both set the prior precision")
        return None
    path = predictions.find_base(run, options, options.base)
    header, source = posterior_source(run, path, "base")
    layers = str(header.meta.get("layers") or "last")
    if layers != options.layers:
        raise UsageError(
            f"\0base\0 {path.stem} is over \0layers\0 {layers}, but got \0layers\0 {options.layers}",
            hint="name a base over these layers, or give \0prior_precision\0 NUMBER",
        )
    if "num_varying" in header.meta:
        raise UsageError(
            f"\0base\0 {path.stem} fixes all but {header.meta['num_varying']:,} parameters, but this method "
            "moves all of them",
            hint="name a base that fixes none, or give \0prior_precision\0 NUMBER",
        )
    return Base(path, header, source, posterior_prior(path, header))


def compare_with_base(base: Base | None, gaussian: Gaussian) -> BaseComparison | None:
    """Compare a Gaussian with its base; None if the base is no Gaussian, has no variances at hand, or is large."""
    if base is None or not base.is_gaussian or base.path.stat().st_size > _LARGE:
        return None
    other = open_posterior(base.path)[0]
    if not hasattr(other.covariance, "marginal_variances"):
        return None
    variances = other.covariance.marginal_variances()
    own: Tensor = gaussian.covariance.marginal_variances()  # type: ignore[attr-defined]
    distances = (gaussian.mean.cpu() - other.mean) / variances.sqrt()
    return BaseComparison(
        base.path.stem,
        float((own.cpu() / variances).median()),
        float(distances.square().mean().sqrt()),
        float(distances.abs().max()),
    )


def prior_of(options: TargetOptions, base: Base | None) -> Prior:
    """Return the target's prior: the base's, or the given precision."""
    if base is not None:
        return base.prior
    assert options.given_precision is not None
    return Prior(options.given_precision)


def request_params(run: Run, options: TargetOptions, base: Base | None) -> dict[str, Any]:
    """Return the options that the request records."""
    return {**options.params(), "base": None if base is None else base.path.stem, "seed": run.compute.seed}


def request_sources(train: Split, held_out: Split | None, base: Base | None) -> Sequence[Source]:
    """Return the sources of the posterior: features and base."""
    return unique_sources(train, held_out) + ([base.source] if base else [])


@dataclass(frozen=True)
class Fitting:
    """Inputs of a fit.

    Attributes:
        request: of the artifact.
        prior: of the target.
        base: source of the prior; None if the precision was given.
        train, val: features, or inputs of the loaded network, depending on the posterior; val is labelled, or None.
        target: log posterior of train, on the device.
        meta: what the artifact records of the above.
    """

    run: Run
    request: Request
    prior: Prior
    base: Base | None
    train: Split
    val: Split | None
    target: Any
    meta: Mapping[str, Any]

    @property
    def is_last_layer(self) -> bool:
        """Return whether the target is over the last layer."""
        return self.train.is_last_layer

    @property
    def start(self) -> torch.Tensor:
        """Return the trained network's parameters, (P,) float64 on the device; zeros without a network."""
        return self.train.start().to(self.run.device)


@dataclass(frozen=True)
class TargetFit:
    """What a command requests from a fit to a target.

    Attributes:
        method: its name, which starts the posterior's default name.
        kind: of the file: posterior or samples.
        algo_rev: revision of the algorithm.
        stepping: memory of the work, from the numbers of examples and parameters.
        stored_bytes: of the file, from the number of parameters.
        work: does the fit.
        params: what the request records besides the options.
        hint: what to do if memory is short.
        num_bases: copies of a Gaussian base, each as large as its file, that the work holds.
    """

    method: str
    algo_rev: int
    stepping: Callable[[int, int], StochasticFitPlan]
    stored_bytes: Callable[[int], int]
    work: Callable[[Fitting], FitOutput]
    kind: str = "posterior"
    params: Mapping[str, Any] = field(default_factory=dict)
    hint: str = "use a smaller \0batch_size\0"
    num_bases: int = 0


def produce_fit(
    run: Run, options: TargetOptions, asked: TargetFit, report: Callable[[Request, Mapping[str, Any]], Report]
) -> Result:
    """Run one fit to a target and return its result.

    Args:
        report: reports on the artifact from its request and meta.

    Raises:
        BnnError: an input is missing or does not fit, or memory is short.
    """
    require_features(run)
    base = find_base(run, options)
    train = load_fitted(run, read_fitted_splits(base.header if base else None))
    val = keep_if_held_out(train, load_labeled_val(run))
    if not options.is_last_layer and train.content.head_weight is None:
        raise UsageError(f"\0layers\0 {options.layers}: this run has only features, no network")
    run.require_device()
    job = _Job(run, options, asked, train, val, base)
    request = job.request()
    return produce_posterior(run, request, lambda: job.fit(request), lambda meta: report(request, meta))


def weaker_prior(meta: Mapping[str, Any]) -> list[str]:
    """Return remedies for a network posterior that predicts worse than the network; empty for the last layer.

    A precision chosen for the linearised network, as in fit-laplace, may be far too large for draws of the network
    itself.
    """
    precision = meta["metrics"].get("prior_precision")
    if meta.get("layers") is None or precision is None:
        return []
    return [
        f"run it again with a weaker prior than \0prior_precision\0 {precision:.3g}, which may suit only the "
        "linearised network"
    ]


@dataclass(frozen=True)
class _Job:
    """One request with its inputs loaded."""

    run: Run
    options: TargetOptions
    asked: TargetFit
    train: Split
    val: Split | None
    base: Base | None

    def request(self) -> Request:
        """Return the request with its memory estimate."""
        run, options, asked = self.run, self.options, self.asked
        used = [split for split in (self.train, self.val) if split is not None]
        sources = [*request_sources(self.train, self.val, self.base)]
        sources += [] if options.is_last_layer else network_sources(used)
        params = {**request_params(run, options, self.base), **asked.params}

        @cache
        def prepared() -> tuple[HeadLayout | ModuleLayout, int]:
            return self._prepared()

        def estimated_bytes() -> int:
            if request.target.is_file() and not run.write.force:
                return request.target.stat().st_size  # up to date, so no code runs
            return asked.stored_bytes(prepared()[0].num_params)

        request = posterior_request(
            run,
            f"{asked.method}{options.layers_suffix}",
            kind=asked.kind,
            params=params,
            algo_rev=asked.algo_rev,
            sources=sources,
            checkpoint=self.train.checkpoint,
            estimated_bytes=estimated_bytes,
            require=prepared,
            estimated_memory=lambda: prepared()[1],
        )
        return request

    @cached_property
    def _reader(self) -> NetworkReader:
        from bnncli.session.network_splits import NetworkReader

        return NetworkReader.of(self.run, self.options)

    def _prepared(self) -> tuple[HeadLayout | ModuleLayout, int]:
        """Return the layout and the bytes the work needs.

        Raises:
            DeviceError: memory is short.
        """
        num_examples = len(self.train.content.features)
        layout: HeadLayout | ModuleLayout
        if self.options.is_last_layer:
            layout = self.train.layout
            stepping = self.asked.stepping(num_examples, layout.num_params)
            needed, device = stepping.head_bytes(layout, num_examples), self.run.device_name
        else:
            reader = self._reader
            with reader.recorded.visible():
                layout = reader.layout(self.train, self.options.layers)
                stepping = self.asked.stepping(num_examples, layout.num_params)
                held = 0 if self.val is None else len(self.val.content.features)
                needed = stepping.network_bytes(layout, num_examples, held, self.run.device)
                device = self.run.device_name
        if self.base is not None and self.base.is_gaussian:
            needed += self.asked.num_bases * self.base.path.stat().st_size
        what = f"fit-{self.asked.method} of {layout.num_params:,} parameters"
        return layout, require_steps(needed, device, what=what, hint=self.asked.hint)

    def fit(self, request: Request) -> FitOutput:
        """Fit to the splits as the posterior sees them."""
        if self.options.is_last_layer:
            return self.asked.work(self._fitting(request, self.train, self.val))
        reader, layers = self._reader, self.options.layers
        with reader.recorded.visible():
            val = None if self.val is None else reader.split(self.val, layers)
            return self.asked.work(self._fitting(request, reader.split(self.train, layers), val))

    def _fitting(self, request: Request, train: Split, val: Split | None) -> Fitting:
        prior = prior_of(self.options, self.base)
        layout = train.layout
        meta = {
            "method": self.asked.method,
            **self.options.layers_params,
            **prior.to_meta(),
            **fit_on_meta(self.base.header if self.base else None),
            **name_to_record(layout.likelihood_name),
            "param_layout": layout.to_json(),
        }
        if not self.options.is_last_layer:
            meta |= layout.to_meta()
        target = train.target(prior, self.run.device)
        return Fitting(self.run, request, prior, self.base, train, val, target, meta)
