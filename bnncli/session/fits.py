"""The path of every fit: open inputs, plan, fit, judge on val, publish, report.

`run_fit` does that for a `Method`, which has what differs between methods: an estimate of memory and disk, the fit and the
summary. A method receives the opened inputs as a `Fitting` and returns a `FitOutput`. Posteriors that are made without a
target, such as a stack, use `posterior_request` and `produce_posterior` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import write_posterior
from bnncli.artifacts.provenance import Source
from bnncli.errors import BnnError, NumericError, UsageError
from bnncli.inference.memory import StochasticFitPlan
from bnncli.likelihoods import name_to_record
from bnncli.options.shared import LayersOptions, TargetOptions
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.session import predictions
from bnncli.session.inputs import (
    Split,
    head_tensors,
    keep_if_held_out,
    load_fitted,
    open_posterior,
    posterior_prior,
    posterior_source,
    require_features,
    unique_sources,
)
from bnncli.session.metrics import BaseMetrics
from bnncli.session.network_splits import network_sources
from bnncli.session.out_of_fold import fit_on_meta, read_fitted_splits
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.run import Result, Run
from bnncli.session.val_report import load_labeled_val, warn_if_worse
from bnncli.system.memory import require

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.posteriors.gaussian import Gaussian
    from bnncli.session.network_splits import NetworkReader


@dataclass(frozen=True)
class Method(ABC):
    """One way to fit a posterior, with its inputs and options.

    Attributes:
        name: start of the posterior's default name.
        kind: of the file: posterior or samples.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "posterior"
    inputs: FitInputs
    options: Any

    @property
    def target(self) -> Path:
        """Return the path of the posterior."""
        return posterior_path(self.inputs.run, self.default_name, kind=self.kind)

    @property
    def default_name(self) -> str:
        return f"{self.name}{self.inputs.options.layers_suffix}"

    @property
    @abstractmethod
    def algo_rev(self) -> int:
        """Return the revision of the algorithm."""

    @property
    def params(self) -> dict[str, Any]:
        """Return what identifies the fit, besides its sources."""
        base = self.inputs.base
        return {
            **self.options.params(),
            "base": None if base is None else base.path.stem,
            "seed": self.inputs.run.compute.seed,
        }

    @abstractmethod
    def estimate_memory(self) -> int | None:
        """Return the peak memory of the work in bytes; None if it was only checked.

        Raises:
            DeviceError: memory is short.
        """

    @abstractmethod
    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""

    @abstractmethod
    def fit(self, fitting: Fitting) -> FitOutput:
        """Do the work."""

    @abstractmethod
    def summarize(self, metrics: Any) -> list[str]:
        """Return the summary for people."""

    def describe(self, request: Request, meta: Mapping[str, Any]) -> Report:
        """Report on a new or existing posterior. Warn where the network predicts val better."""
        metrics = meta["metrics"]
        warn_if_worse(self.inputs.run, request.target, metrics, method=self.name, also=weaker_prior(meta))
        return Report(metrics, self.summarize(metrics))


def run_fit(method: Method) -> Result:
    """Fit and publish a posterior, unless it is up to date.

    Raises:
        BnnError: an input is missing or does not fit, or memory is short.
    """
    inputs, run = method.inputs, method.inputs.run

    @cache
    def estimated_memory() -> int | None:
        with inputs.visible():
            return method.estimate_memory()

    def estimated_bytes() -> int:
        if method.target.is_file() and not run.write.force:
            return method.target.stat().st_size  # up to date, so no code runs
        with inputs.visible():
            return method.estimate_disk()

    request = posterior_request(
        run,
        method.default_name,
        kind=method.kind,
        params=method.params,
        algo_rev=method.algo_rev,
        sources=inputs.sources,
        checkpoint=inputs.train.checkpoint,
        estimated_bytes=estimated_bytes,
        require=estimated_memory,
        estimated_memory=estimated_memory,
    )

    def fit() -> FitOutput:
        with inputs.read() as (train, val):
            return method.fit(Fitting(inputs, request, train, val))

    return produce_posterior(run, request, fit, partial(method.describe, request))


@dataclass(frozen=True)
class FitInputs:
    """Opened inputs of a fit.

    Attributes:
        options: layers of the posterior, and whether the network's code may run.
        train: rows to fit to.
        val: labelled rows to judge the posterior on, none of which it is fitted to; None without any.
        base: source of the prior; None if the options give a precision.
        more: further sources.
    """

    run: Run
    options: LayersOptions
    train: Split
    val: Split | None
    base: Base | None = None
    more: tuple[Source, ...] = ()

    @property
    def num_examples(self) -> int:
        """Return the number of rows to fit to."""
        return len(self.train.content.features)

    @property
    def num_val(self) -> int:
        """Return the number of rows to judge on."""
        return 0 if self.val is None else len(self.val.content.features)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Return the sources of the splits, the base and the network."""
        found = unique_sources(self.train, self.val) + ([self.base.source] if self.base else [])
        if not self.options.is_last_layer:
            found += network_sources([split for split in (self.train, self.val) if split is not None])
        return *found, *self.more

    @cached_property
    def reader(self) -> NetworkReader:
        """Return the reader of the network and its inputs, for other layers than the last."""
        from bnncli.session.network_splits import NetworkReader

        return NetworkReader.of(self.run, self.options)

    def visible(self) -> AbstractContextManager[object]:
        """Return a context in which the network's code can be imported."""
        return nullcontext() if self.options.is_last_layer else self.reader.recorded.visible()

    @cached_property
    def layout(self) -> HeadLayout | ModuleLayout:
        """Return the layout of the parameters, read from the network for other layers than the last."""
        if self.options.is_last_layer:
            return self.train.layout
        with self.visible():
            return self.reader.layout(self.train, self.options.layers)

    @contextmanager
    def read(self) -> Iterator[tuple[Split, Split | None]]:
        """Yield train and val as the posterior sees them: their features, or the network's inputs."""
        if self.options.is_last_layer:
            yield self.train, self.val
            return
        reader, layers = self.reader, self.options.layers
        with self.visible():
            yield reader.split(self.train, layers), None if self.val is None else reader.split(self.val, layers)


def open_inputs(run: Run, options: TargetOptions) -> FitInputs:
    """Open the base, the rows it was fitted to, and labelled val.

    Raises:
        BnnError: one is missing or does not fit.
    """
    require_features(run)
    base = find_base(run, options)
    train = load_fitted(run, read_fitted_splits(base.header if base else None))
    val = keep_if_held_out(train, load_labeled_val(run))
    if not options.is_last_layer and train.content.head_weight is None:
        raise UsageError(f"\0layers\0 {options.layers}: this run has only features, no network")
    return FitInputs(run, options, train, val, base)


@dataclass(frozen=True)
class Fitting:
    """A fit in progress.

    Attributes:
        request: of the artifact.
        train, val: rows as the posterior sees them: features, or inputs of the loaded network.
    """

    inputs: FitInputs
    request: Request
    train: Split
    val: Split | None

    @property
    def run(self) -> Run:
        """Return the run."""
        return self.inputs.run

    @property
    def base(self) -> Base | None:
        """Return the source of the prior."""
        return self.inputs.base

    @property
    def is_last_layer(self) -> bool:
        """Return whether the target is over the last layer."""
        return self.train.is_last_layer

    @cached_property
    def prior(self) -> Prior:
        """Return the prior of the target, from the base or the options."""
        if self.base is not None:
            return self.base.prior
        precision = cast(TargetOptions, self.inputs.options).given_precision
        assert precision is not None
        return Prior(precision)

    @cached_property
    def target(self) -> Any:
        """Return the log posterior of train, on the device."""
        return self.train.target(self.prior, self.run.device)

    @property
    def start(self) -> torch.Tensor:
        """Return the trained network's parameters, (P,) float64 on the device; zeros without a network."""
        return self.train.start().to(self.run.device)

    def describe_target(self, method: str) -> dict[str, Any]:
        """Return what the artifact records of the target."""
        layout = self.train.layout
        meta = {
            "method": method,
            **self.inputs.options.layers_params,
            **self.prior.to_meta(),
            **fit_on_meta(self.base.header if self.base else None),
            **name_to_record(layout.likelihood_name),
            "param_layout": layout.to_json(),
        }
        return meta if self.is_last_layer else meta | layout.to_meta()


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


_SUFFIXES = {"posterior": ".safetensors", "samples": ".nc"}


def posterior_path(run: Run, default: str, *, kind: str = "posterior") -> Path:
    """Return the given path of a posterior, or that in the run folder by its given or default name."""
    named = run.folder.posterior(run.naming.name or default, suffix=_SUFFIXES[kind])
    return Path(run.naming.out) if run.naming.out else named


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
    target = posterior_path(run, default, kind=kind)
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


_LARGE = 1 << 30  # bytes; a larger base file is not read a second time


def compare_with_base(base: Base | None, gaussian: Gaussian) -> BaseMetrics | None:
    """Compare a Gaussian with its base; None if the base is no Gaussian, has no variances at hand, or is large."""
    if base is None or not base.is_gaussian or base.path.stat().st_size > _LARGE:
        return None
    other = open_posterior(base.path)[0]
    if not hasattr(other.covariance, "marginal_variances"):
        return None
    variances = other.covariance.marginal_variances()
    own: Tensor = gaussian.covariance.marginal_variances()  # type: ignore[attr-defined]
    distances = (gaussian.mean.cpu() - other.mean) / variances.sqrt()
    return {
        "name": base.path.stem,
        "median_share": float((own.cpu() / variances).median()),
        "rms_distance": float(distances.square().mean().sqrt()),
        "largest_distance": float(distances.abs().max()),
    }


def require_steps(inputs: FitInputs, plan: StochasticFitPlan, *, method: str, hint: str, num_bases: int = 0) -> int:
    """Return the peak memory of a stochastic fit in bytes.

    Args:
        num_bases: copies of a Gaussian base, each as large as its file, that the work holds.

    Raises:
        DeviceError: memory is short.
    """
    layout, num_examples = inputs.layout, inputs.num_examples
    needed = plan.fit_bytes(layout, num_examples, inputs.num_val, inputs.run.device)
    if inputs.base is not None and inputs.base.is_gaussian:
        needed += num_bases * inputs.base.path.stat().st_size
    require(needed, inputs.run.device_name, what=f"fit-{method} of {layout.num_params:,} parameters", hint=hint)
    return needed


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
