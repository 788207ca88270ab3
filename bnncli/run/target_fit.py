"""How a fit to a target, of the last layer or of a network's parameters, becomes a request and is worked on: one shape for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from bnncli.errors import UsageError
from bnncli.inference.network_memory import Stepping, require_steps
from bnncli.likelihoods import name_to_record
from bnncli.options.target import TargetOptions
from bnncli.parameters.prior import Prior
from bnncli.run.inputs import Split
from bnncli.run.network_sources import network_sources
from bnncli.run.out_of_fold import fit_on, fit_on_meta, held_out_of, load_fitted, require_features
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted, Report, posterior_request, produce_posterior
from bnncli.run.session import Result, Run
from bnncli.run.target_base import Base, find_base, prior_of, request_params, request_sources
from bnncli.run.val_report import labeled_val

if TYPE_CHECKING:
    import torch

    from bnncli.parameters.layouts import HeadLayout
    from bnncli.parameters.module import ModuleLayout
    from bnncli.run.network_splits import NetworkReader


@dataclass(frozen=True)
class Fitting:
    """What the work of a fit is given.

    Attributes:
        request: what the fit is for.
        prior: of the target.
        base: whose prior it is; None where its precision was given.
        train, val: as the posterior sees them: their features, or the inputs of the network, which is at hand. val is labelled, or None.
        target: the log posterior of train, on the device.
        meta: what the artifact records of all that.
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
        """Whether it is one."""
        return self.train.is_last_layer

    @property
    def start(self) -> torch.Tensor:
        """The network's parameters as trained, (P,) float64 on the device; zeros without a network."""
        return self.train.start().to(self.run.device)


@dataclass(frozen=True)
class TargetFit:
    """What a command asks of a fit to a target.

    Attributes:
        method: its name, which the posterior's default name begins with.
        kind: of the file: posterior or samples.
        algo_rev: of the numbers.
        stepping: its memory, of the number of examples and of parameters.
        stored_bytes: of the file, of the number of parameters.
        work: does it.
        params: what the request records besides the options.
        hint: what to do where memory is short.
        num_bases: copies of a Gaussian base, as large as its file, that the work holds.
    """

    method: str
    algo_rev: int
    stepping: Callable[[int, int], Stepping]
    stored_bytes: Callable[[int], int]
    work: Callable[[Fitting], Fitted]
    kind: str = "posterior"
    params: Mapping[str, Any] = field(default_factory=dict)
    hint: str = "use a smaller \0batch_size\0"
    num_bases: int = 0


def produce_fit(
    run: Run, options: TargetOptions, asked: TargetFit, report: Callable[[Request, Mapping[str, Any]], Report]
) -> Result:
    """The result of one fit to a target.

    Args:
        report: says what is to be said of the artifact, of its request and its meta.

    Raises:
        BnnError: an input is missing or does not fit, or the work has no room.
    """
    require_features(run)
    base = find_base(run, options)
    train = load_fitted(run, fit_on(base.header if base else None))
    val = held_out_of(train, labeled_val(run))
    if not options.is_last_layer and train.content.head_weight is None:
        raise UsageError(f"\0layers\0 {options.layers}: this run has only features, no network")
    run.require_device()
    job = _Job(run, options, asked, train, val, base)
    request = job.request()
    return produce_posterior(run, request, lambda: job.fit(request), lambda meta: report(request, meta))


def weaker_prior(meta: Mapping[str, Any]) -> list[str]:
    """What may help a posterior over a network that predicts worse than it, in words; nothing over the last layer.

    A precision that was chosen for predictions of the linearised network, as fit-laplace does, may be far too large for draws of it.
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
    """One request, its inputs loaded."""

    run: Run
    options: TargetOptions
    asked: TargetFit
    train: Split
    val: Split | None
    base: Base | None

    def request(self) -> Request:
        """What is asked for, with what it takes."""
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
                return request.target.stat().st_size  # up to date: no code runs for that
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
        from bnncli.run.network_splits import NetworkReader

        return NetworkReader.of(self.run, self.options)

    def _prepared(self) -> tuple[HeadLayout | ModuleLayout, int]:
        """The layout, and the bytes that the work takes. Raises DeviceError where it has no room."""
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

    def fit(self, request: Request) -> Fitted:
        """The work, on the splits as the posterior sees them."""
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
