"""hmc: draw from the exact posterior, and report whether the chains agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any, ClassVar, cast

from bnncli import __version__, registry
from bnncli.artifacts.resume import DrawFile
from bnncli.artifacts.samples import SampleFile, write_samples
from bnncli.errors import CheckFailed, DataError, UsageError
from bnncli.evaluation.convergence import GOOD_RHAT, STUCK_ACCEPTANCE, Convergence, deciding_numbers
from bnncli.evaluation.verdict import LOW_BFMI, lowest_bfmi
from bnncli.inference import memory, structure_choice
from bnncli.inference.elbo import JUDGING_DRAWS
from bnncli.inference.hmc import (
    OVERDISPERSION,
    Completion,
    HmcRun,
    Workers,
    choose_residual,
    draw_goals,
    sample_hmc,
)
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.memory import NetworkDraws
from bnncli.inference.mode import covariance_at
from bnncli.inference.nuts import sample_nuts
from bnncli.inference.prior_variants import PriorTrial, losses_if_close, search_prior
from bnncli.inference.row_space import complete_draws
from bnncli.lazy import torch
from bnncli.likelihoods import name_to_record
from bnncli.names import count_noun, format_duration, percent
from bnncli.numerics.digests import tensor_digest
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import option
from bnncli.options.shared import (
    AUTO,
    Condition,
    SearchedPriorOptions,
    TargetOptions,
    find_unmet_conditions,
    parse_until,
)
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.samples import Samples
from bnncli.session import revisions as _revisions
from bnncli.session.chains import (
    Judge,
    format_deciding_diagnostic,
    format_other_diagnostics,
    head_judges,
    network_judge,
    parameter_judge,
    parameter_metrics,
    prediction_metrics,
)
from bnncli.session.costs import Cost
from bnncli.session.fits import Base, FitOutput, Fitting, Method, Report, open_inputs, run_fit
from bnncli.session.inputs import Split, open_posterior
from bnncli.session.metrics import HmcMetrics
from bnncli.session.out_of_fold import fit_on_meta
from bnncli.session.prior_choice import (
    prior_line,
    prior_metrics,
    read_stored_search,
    resolve_prior_choice,
    search_identity,
)
from bnncli.session.produce import Request, Resumable, ResumableDraws
from bnncli.session.row_spaces import row_space, span_to_fit
from bnncli.session.run import Result, Run
from bnncli.session.val_report import measure_on_val, val_lines
from bnncli.structures import Covariance
from bnncli.system.devices import estimate_speed
from bnncli.system.memory import budget
from bnncli.system.workers import team
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.network import NetworkTarget
from bnncli.targets.target import Target, counting_passes
from bnncli.targets.variants import SubsetResidual, choose_gradient

_TRIAL_DRAWS = 256  # in a trial, over all chains


@dataclass(frozen=True)
class HmcOptions(SearchedPriorOptions, TargetOptions):
    """Options of hmc."""

    base: str | None = option(
        None,
        "Artifact whose prior defines the target, and whose Gaussian whitens the parameters. Default: laplace, "
        "or laplace-all for \0layers\0 all.",
        metavar="NAME|FILE",
        numeric=False,
        group="Target",
    )
    chains: int = option(16, "Number of chains, run as one batch.", minimum=1, group="Sampling")
    warmup: int = option(60, "Number of warm-up draws per chain, which are discarded.", minimum=1, group="Sampling")
    draws: int = option(260, "Draws to keep per chain.", minimum=4, group="Sampling")
    until: str | None = option(
        None,
        "Keep drawing until these conditions hold, such as rhat<=1.01,ess>=400 (also ess-tail>=NUMBER). Exit 3 "
        "if \0max_draws\0 is reached first.",
        metavar="CONDITIONS",
        group="Sampling",
    )
    max_draws: int | None = option(
        None, "Maximum draws per chain with \0until\0. Default: 20 times \0draws\0.", minimum=4, group="Sampling"
    )
    target_accept: float = option(
        0.9,
        "Target acceptance rate for step size adaptation.",
        minimum=0.1,
        maximum=0.99,
        group="Sampling",
        is_rare=True,
    )
    dynamics: str = option(
        "split",
        "Integrator of the dynamics: split (exact Gaussian part) or leapfrog.",
        choices=("split", "leapfrog"),
        group="Sampling",
        is_rare=True,
    )
    gradients: str = option(
        "float32",
        "Precision of the gradients that move the chains. The acceptance step stays in float32, so the "
        "posterior does not change.",
        choices=("float32", "tf32", "bfloat16"),
        group="Sampling",
        is_rare=True,
    )
    sampler: str = option(
        "hmc",
        "Sampler. nuts is Pyro's implementation, a slow independent reference.",
        choices=("hmc", "nuts"),
        group="Sampling",
        is_rare=True,
    )
    max_rhat: float | None = option(
        None, "Exit 3 if the largest R-hat is above this value.", minimum=1.0, numeric=False, group="Sampling"
    )
    spread: str | None = option(
        None,
        "What torchrun workers split: chains, or examples. Default: chains, unless the data do not fit on one GPU.",
        choices=("chains", "examples"),
        numeric=False,
        group="Sampling",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Sampling"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every draw.",
        minimum=0,
        numeric=False,
        group="Sampling",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler == "nuts" and self.dynamics != "split":
            raise UsageError("\0dynamics\0 is for \0sampler\0 hmc")
        if self.sampler == "nuts" and self.gradients != "float32":
            raise UsageError("\0gradients\0 is for \0sampler\0 hmc")
        if not self.is_last_layer and self.gradients != "float32":
            raise UsageError("\0gradients\0 is for the last layer; other layers use float32")
        if self.sampler == "nuts" and (self.until is not None or self.resume):
            raise UsageError("\0until\0 and \0resume\0 are for \0sampler\0 hmc; nuts runs its chains one after another")
        if self.sampler == "nuts" and self.spread == "chains":
            raise UsageError("\0spread\0 chains is for \0sampler\0 hmc; workers of nuts split the examples")
        if not self.is_last_layer and self.spread == "examples":
            raise UsageError("\0spread\0 examples is for the last layer; use chains for other layers")
        if self.max_draws is not None and self.max_draws < self.draws:
            raise UsageError(f"\0max_draws\0: expected at least \0draws\0 ({self.draws}); got {self.max_draws}")
        if any(condition.name == "rhat" for condition in self.conditions) and self.chains == 1:
            raise UsageError("\0until\0: rhat needs at least two \0chains\0")

    @property
    def trial_draws(self) -> tuple[int, int]:
        """Return the warm-up and the draws per chain of a short run that tries a prior precision.

        Chains continue from those of a neighbouring prior, so a dozen transitions settle them. On 397 digits the val NLL is within
        0.005 of that of 260 draws.
        """
        return min(12, self.warmup), min(self.draws // 4, -(-_TRIAL_DRAWS // self.chains))

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Return the conditions of --until; none without it."""
        return () if self.until is None else parse_until(self.until, "\0until\0")


COMMAND = Command(
    "Sample the exact posterior by Hamiltonian Monte Carlo.",
    "Runs all chains as one batch, in coordinates whitened by the Gaussian at the mode. Reports R-hat and "
    "effective sample sizes for the parameters and for predictions on val; with --layers, convergence is judged "
    "by the predictions. Writes posteriors/hmc.nc, or hmc-all.nc, which ArviZ can open.",
    (HmcOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli hmc ckpt.pt",
        "bnncli hmc ckpt.pt --chains 32 --draws 100 --max-rhat 1.01",
        "bnncli hmc ckpt.pt --until 'rhat<=1.01,ess>=1000' --resume",
        "bnncli hmc ckpt.pt --layers all --chains 4 --warmup 100",
    ),
    section="Fit",
    place=50,
)


_LEAST_DRAWS = 64  # in a trial, over all chains; with fewer the val NLL is noise


def execute(run: Run, options: HmcOptions) -> Result:
    """Sample and publish. The result's metrics have R-hat, effective sample sizes, acceptance and divergences."""
    if options.max_draws is not None and options.until is None:
        raise UsageError("--max-draws is a limit for --until; give --until too")
    inputs = open_inputs(run, options)
    num_drawn = options.chains * options.trial_draws[1]
    too_short = f"a quarter of the draws is {num_drawn}" if num_drawn < _LEAST_DRAWS else None
    options = resolve_prior_choice(run, options, inputs.val, num_drawn=num_drawn, too_short=too_short)
    run.require_device()
    return run_fit(Hmc(inputs, options))


@dataclass(frozen=True)
class Hmc(Method):
    """One request for draws from the exact posterior."""

    name: ClassVar[str] = "hmc"
    kind: ClassVar[str] = "samples"
    options: HmcOptions

    @cached_property
    def span(self) -> HeadLayout | None:
        """Return the layout within the span of the features, where the chains move; None where they move over theta."""
        return span_to_fit(self.inputs.run, self.inputs.train) if self.options.is_last_layer else None

    @property
    def algo_rev(self) -> int:
        """Return the revision of the algorithm."""
        if not self.options.is_last_layer:
            return _revisions.HMC_OF_LAYERS
        return _revisions.of_hmc(in_span=self.span is not None, num_params=self.inputs.layout.num_params)

    def estimate_memory(self) -> int | None:
        """Return the peak memory in bytes; None for the last layer, where it is only checked."""
        inputs, options, base = self.inputs, self.options, self.inputs.base
        layout, device = inputs.layout, inputs.run.device_name
        if options.is_last_layer:
            whole = inputs.train.layout if self.span else None
            structure_choice.require_sampling(
                self.span or inputs.train.layout, device, num_chains=options.chains, whole=whole
            )
            return None
        assert isinstance(layout, ModuleLayout)
        rough = registry.load_class("network_curvature", NetworkTarget.rough_structure)
        base_bytes = 8 * int(rough.num_elements(layout))
        if base is not None and base.is_gaussian:
            base_bytes = base.path.stat().st_size
        plan = NetworkDraws(layout, inputs.num_examples, inputs.num_val, base_bytes)
        return plan.require_sampling(inputs.run.device, num_chains=options.chains, num_draws=options.draws)

    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""
        return memory.draw_storage_bytes(self.inputs.layout.num_params, self.options.chains * self.options.draws)

    def fit(self, fitting: Fitting) -> FitOutput:
        """Choose the prior precision if asked, find the whitening Gaussian, and draw."""
        run, options, prior = fitting.run, self.options, fitting.prior
        if not options.is_last_layer:
            return Sampling(run, options, fitting.request, prior, whiten_network(fitting)).fit()

        def space_at(prior: Prior, before: Space | None) -> Space:
            return whiten_last_layer(fitting, options, prior=prior, span=self.span, before=before)

        search = dict[str, Any]()
        if options.prior_precision == AUTO and fitting.val is not None:
            search = (read_stored_search(fitting.request) if options.resume else None) or choose_prior(
                run, options, prior, fitting.val, space_at
            )
            prior = Prior.from_meta(search, mean=prior.mean) or prior
        space = space_at(prior, None)
        with counting_passes() as tally:
            residual = _choose_residual(run, options, space)
        passes = space.passes + tally.passes + search.get("prior_precision_search_passes", 0)
        space = replace(space, residual=residual, passes=passes)
        return Sampling(run, options, fitting.request, prior, space, search).fit()

    def summarize(self, metrics: HmcMetrics) -> list[str]:
        """Return the summary for people."""
        return format_summary(metrics)

    def describe(self, request: Request, meta: Mapping[str, Any]) -> Report:
        """Return the metrics, the summary, and the failure where --until or --max-rhat is not met."""
        return replace(super().describe(request, meta), failure=find_failure(meta["metrics"], self.options))


@dataclass(frozen=True)
class Space:
    """The space in which chains move, and how they are judged.

    Chains may move in a smaller space of P' coordinates, the span of the features, from which `complete` draws theta (P,).

    Args:
        train: training split, with the layout of theta.
        target: log posterior of the coordinates.
        center: mean (P',) of the Gaussian that whitens them.
        covariance: covariance of that Gaussian.
        identity: names the whitening. A run resumes only from a state with the same one.
        complete: draws theta given the coordinates; None where the chains move over theta itself.
        coarse, residual: gradients for the kicks, as for sample_hmc.
        dispersion: width of the starts, in standard deviations of the Gaussian.
        predictions: split name (heldout, train) to the judge of how chains agree on log probabilities of its labels.
        judged_by: split whose predictions decide whether the chains converged; None to decide by the parameters.
        val: labelled split, as the posterior sees it, to score the draws on.
        meta: further metadata of the artifact.
        passes: gradient passes over the data to find the Gaussian.
        smallest_group: fewest chains in one batch where workers share them.
    """

    train: Split
    target: Target
    center: torch.Tensor
    covariance: Covariance
    identity: str
    complete: Completion | None = None
    coarse: Callable[[torch.Tensor], torch.Tensor] | None = None
    residual: SubsetResidual | None = None
    dispersion: float = OVERDISPERSION
    predictions: Mapping[str, Judge] = field(default_factory=dict)
    judged_by: str | None = None
    val: Split | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    passes: float = 0.0
    smallest_group: int = 1

    def count_passes(self, drawn: HmcRun, *, num_warmup: int = 0) -> float | None:
        """Return the gradient passes over the data for these draws, including those to find the Gaussian; None if unknown."""
        if drawn.num_gradients is None:
            return None
        passes = float(drawn.num_gradients)
        if self.residual is not None:
            passes = self.residual.share * passes + _ENERGY_PASSES * (num_warmup + drawn.draws.shape[1])
        return drawn.draws.shape[0] * passes + self.passes


_ENERGY_PASSES = 0.5  # of a gradient: forward only
_SMALLEST_GROUP = 4  # chains per batch; on two cores a chain costs a third more in smaller batches, a tenth less in 16


def whiten_last_layer(
    fitting: Fitting, options: HmcOptions, *, prior: Prior, span: HeadLayout | None, before: Space | None = None
) -> Space:
    """Return the space whitened by the Gaussian at the exact mode of the last layer's target.

    Args:
        prior: prior of the target.
        span: layout inside the span of the features, where the chains move; None where they move over theta.
        before: space of another prior, whose mode is the start of the search for this one's.
    """
    run, train, base = fitting.run, fitting.train, fitting.base
    target = train.target(prior, run.device)
    whole = train.layout if span else None
    own = structure_choice.automatic_structure(span or train.layout, budget(run.device), device=run.device, whole=whole)
    structure = structure_choice.whitening_structure(
        span or train.layout,
        budget(run.device),
        device=run.device,
        num_examples=len(train.content.features),
        num_chains=options.chains,
        num_draws=options.warmup + options.draws,
        whole=whole,
    )
    rows = row_space(target) if span else None
    with counting_passes() as tally:
        gaussian = None if rows is not None else _find_reusable_gaussian(base, prior, structure, train)
        if gaussian is None:
            if structure != own and before is None:
                seconds = structure_choice.fit_seconds(
                    structure,
                    span or train.layout,
                    num_examples=len(train.content.features),
                    speed=estimate_speed(run.device),
                )
                run.console.info(
                    f"using the {structure} Gaussian at the mode for the chains' coordinates instead of "
                    f"fit-laplace's {own} one: computing it should take about {format_duration(seconds)}, no longer than "
                    "the draws, which should be less correlated"
                )
            start = fitting.start
            if rows is not None:
                target, start = rows.target(target), rows.reduce(start)
            start = start if before is None else before.center
            gaussian = fit_gaussian(
                target, structure=structure, center="mode", start=start, progress=run.console
            ).gaussian
    return Space(
        train,
        target,
        gaussian.mean,
        gaussian.covariance,
        identity=gaussian.covariance.structure,
        complete=None if rows is None else partial(complete_draws, rows=rows, prior=prior.to(run.device)),
        coarse=choose_gradient(options.gradients, target, gaussian.mean),
        predictions=head_judges(run, train, fitting.val),
        val=fitting.val,
        meta={**fit_on_meta(base.header if base else None), **({} if rows is None else {"row_space_rank": rows.rank})},
        passes=tally.passes,
        smallest_group=_SMALLEST_GROUP,
    )


def _choose_residual(run: Run, options: HmcOptions, space: Space) -> SubsetResidual | None:
    """Return the gradient of some examples that moves the chains; None where it needs all examples.

    The dynamics `leapfrog` are a control that knows nothing of the Gaussian.
    """
    is_default = (options.sampler, options.dynamics, options.gradients) == ("hmc", "split", "float32")
    is_exact = space.covariance.structure in registry.list_declaring("curvature", "is_exact")
    if not (is_default and is_exact and isinstance(space.target, LastLayerTarget)) or space.complete is not None:
        return None
    return choose_residual(space.target, space.center, space.covariance, run.stream("hmc/residual"))


def _find_reusable_gaussian(base: Base | None, prior: Prior, structure: str, train: Split) -> Gaussian | None:
    """Return the base's Gaussian where a fit would repeat it: same examples, prior and structure, at the mode."""
    if base is None or not base.is_gaussian or not base.prior.is_close(prior):
        return None
    meta, inputs = base.header.meta, base.header.provenance["inputs"]
    is_same = (meta.get("method"), meta.get("center"), meta.get("structure")) == ("laplace", "mode", structure)
    own = {(given["role"], given["content_digest"]) for given in inputs}
    if not is_same or not own.issuperset((one.role, one.content_digest) for one in train.sources):
        return None
    gaussian: Gaussian = open_posterior(base.path)[0]
    return gaussian


_TRIAL_ACCEPTANCE = 0.8  # target acceptance of trials: the most effective draws per second


def choose_prior(
    run: Run,
    options: HmcOptions,
    prior: Prior,
    val: Split,
    space_at: Callable[[Prior, Space | None], Space],
) -> dict[str, Any]:
    """Search for the prior precision with the lowest NLL on val, and return the metrics of the search.

    Args:
        prior: prior of the base, where the search starts.
        val: labelled split.
        space_at: returns the space of a prior, given that of a neighbouring one to start from.
    """
    features, labels = val.features(run.device), val.labels(run.device)
    limit = options.warmup + options.draws
    num_warmup, num_draws = options.trial_draws
    passes = 0.0

    def try_at(precision: float, before: PriorTrial | None) -> PriorTrial:
        nonlocal passes
        own_prior = prior.times(precision / prior.weight_precision)
        space = space_at(own_prior, None if before is None else before.found[1])
        held_out = space.train.target(own_prior, run.device).held_out(features, labels)
        losses = None
        if space.complete is None:
            gaussian = Gaussian(space.center, space.covariance, space.target.layout)
            size, generator = options.chains * num_draws, run.stream("hmc/prior")
            losses = losses_if_close(space.target, gaussian, held_out, size, generator)
        if losses is not None:
            passes += space.passes + _ENERGY_PASSES * JUDGING_DRAWS
            cost = _ENERGY_PASSES * JUDGING_DRAWS / options.chains
            return PriorTrial(precision, losses.cpu(), cost, limit, (own_prior, space, None), is_gaussian=True)
        drawn = sample_hmc(
            space.target,
            mode=space.center,
            covariance=space.covariance,
            generator=run.stream("hmc/prior"),
            num_chains=options.chains,
            num_warmup=num_warmup,
            num_draws=num_draws,
            target_accept=min(_TRIAL_ACCEPTANCE, options.target_accept),
            dispersion=1.0,
            go_on=None if before is None else before.found[2],
            dynamics=options.dynamics,
            coarse=space.coarse,
            complete=space.complete,
            progress=run.console,
        )
        losses = held_out.losses(drawn.draws.flatten(0, 1).to(run.device))
        passes += space.count_passes(drawn) or 0.0
        steps = float(drawn.n_steps.double().mean())
        return PriorTrial(
            precision, losses.cpu(), float(drawn.num_gradients or 0), limit * steps, (own_prior, space, drawn)
        )

    found = search_prior(try_at, prior.weight_precision, progress=run.console)
    return prior_metrics(found, found.best.found[0], passes=passes)


def whiten_network(fitting: Fitting) -> Space:
    """Return the space of the network's chosen parameters, whitened by the base's Gaussian or a rough one."""
    run, whole, val, target = fitting.run, fitting.train, fitting.val, fitting.target
    with counting_passes() as tally:
        center, covariance = _network_gaussian(run, target, whole, fitting.base)
    judged_by, judged = ("train", whole) if val is None else ("heldout", val)
    return Space(
        whole,
        target,
        center,
        covariance,
        identity=f"{covariance.structure} {tensor_digest({'center': center, **covariance.to_tensors()})}",
        dispersion=1.0,  # draws from the Gaussian; from twice its width the chains of a network take long to return
        predictions={judged_by: network_judge(run, target, judged)},
        judged_by=judged_by,
        val=val,
        meta={**fitting.inputs.options.layers_params, **whole.layout.to_meta()},
        passes=tally.passes,
    )


def _network_gaussian(
    run: Run, target: NetworkTarget, whole: Split, base: Base | None
) -> tuple[torch.Tensor, Covariance]:
    """Return the mean and covariance of the base's Gaussian or, without one, of a rough Gaussian at the network's weights."""
    if base is not None and base.is_gaussian:
        gaussian, _ = open_posterior(base.path)
        if gaussian.layout != whole.layout:
            raise DataError(f"{base.path} is over {gaussian.layout}, not {whole.layout}", code="wrong_layout")
        return gaussian.mean.to(run.device), gaussian.covariance.to(device=run.device)
    center = whole.start().to(run.device)
    return center, covariance_at(target, center, target.rough_structure)[0]


# Numbers in the draws that predict val: 256 MiB, and on two cores 15 s for 10,000 examples. More draws are thinned.
_MOST_PREDICTING = 2**26
Publishing = Callable[[], AbstractContextManager[None]]  # the context in which draws are published


@dataclass(frozen=True)
class Sampling:
    """One request for draws. `search` has the metrics of the search for the prior precision."""

    run: Run
    options: HmcOptions
    request: Request
    prior: Prior
    space: Space
    search: Mapping[str, Any] = field(default_factory=dict)

    def fit(self) -> FitOutput:
        """Draw, judge the draws and measure them on val."""
        run, options, space, layout = self.run, self.options, self.space, self.space.train.layout
        sample = self._sample_nuts if options.sampler == "nuts" else self._sample_hmc
        drawn, decided, publishing = sample(
            mode=space.center,
            covariance=space.covariance,
            num_chains=options.chains,
            num_warmup=options.warmup,
            num_draws=options.draws,
            target_accept=options.target_accept,
            progress=run.console,
        )
        judged = decided if space.judged_by is None else parameter_judge(run)(drawn.draws)
        known = {} if space.judged_by is None else {space.judged_by: decided}
        others = {name: judge(drawn.draws) for name, judge in space.predictions.items() if name not in known}
        metrics = hmc_metrics(
            drawn,
            judged,
            predictions=known | others,
            judged_by=space.judged_by,
            options=options,
            prior=self.prior,
        )
        metrics |= self.search
        if space.residual is not None:
            metrics["gradient_examples"] = space.residual.target.num_examples
        passes = space.count_passes(drawn, num_warmup=options.warmup)
        if passes is not None:
            metrics |= Cost.of_fit(passes, is_last_layer=space.train.is_last_layer).to_metrics()
        for text in hmc_warnings(cast(HmcMetrics, metrics)):
            run.console.warn(text)
        if space.val is not None:
            step = math.ceil(drawn.draws.numel() / _MOST_PREDICTING)
            thinned = drawn.draws[:, :: min(step, drawn.draws.shape[1])]
            posterior = Samples(thinned, layout).to(run.device)
            metrics |= measure_on_val(run, posterior, space.val, method="hmc")
        meta = {
            "method": "hmc",
            "type": "samples",
            **self.prior.to_meta(),
            **name_to_record(layout.likelihood_name),
            "param_layout": layout.to_json(),
            "whitening": space.covariance.structure,
            **space.meta,
        }
        return FitOutput({}, meta, metrics, space.train, write=partial(self._write, drawn), publishing=publishing)

    def _sample_hmc(self, **common: Any) -> tuple[HmcRun, Convergence, Publishing]:
        """Draw by our sampler. Return the draws, their convergence and a context that removes the resume state on publication."""
        run, options, request, space = self.run, self.options, self.request, self.space
        store = DrawFile(request.target, num_chains=options.chains, num_params=space.train.layout.num_params)
        # A state holds whitened coordinates. Under another whitening they would mean another theta.
        workers = self._workers()
        also: dict[str, Any] = {"whitening": space.identity} | ({} if workers is None else {"spread": "chains"})
        also |= search_identity(self.search)
        resumable = Resumable(run, request, resume=options.resume, save_every=options.save_every, also=also)
        resume = ResumableDraws(resumable, store)
        judgements: dict[int, Convergence] = {}

        def is_enough(draws: torch.Tensor) -> bool:
            judged = judgements[draws.shape[1]] = self._decide(draws)
            run.console.info(_progress_line(draws.shape[1], judged))
            return not find_unmet_conditions(options.conditions, condition_values(judged))

        try:
            with resumable.hint():
                drawn = sample_hmc(
                    space.target,
                    dynamics=options.dynamics,
                    dispersion=space.dispersion,
                    coarse=space.coarse,
                    residual=space.residual,
                    complete=space.complete,
                    generator=run.stream("hmc/chains"),
                    is_enough=is_enough if options.conditions else None,
                    max_draws=options.max_draws,
                    store=store,
                    resume=resume,
                    workers=workers,
                    **common,
                )
                judged = judgements.get(drawn.draws.shape[1]) or self._decide(drawn.draws)
        finally:
            resume.close()
        return drawn, judged, resume.publishing

    def _workers(self) -> Workers | None:
        """Return the workers that share the chains; None for a single process, or where workers share the examples."""
        others, spread, space = team(), self.options.spread, self.space
        if spread is None:
            # Each worker of a network reads all data, wherever they lie.
            can_share_chains = space.target.is_resident or not space.train.is_last_layer
            spread = "chains" if can_share_chains else "examples"
        return None if others is None or spread == "examples" else Workers(others, space.smallest_group)

    def _sample_nuts(self, **common: Any) -> tuple[HmcRun, Convergence, Publishing]:
        """Draw by Pyro's NUTS, which cannot be resumed."""
        drawn = sample_nuts(self.space.target, seed=self.run.stream("hmc/nuts").initial_seed() % 2**31, **common)
        if self.space.complete is not None:
            inside = drawn.draws.flatten(0, 1).double()
            theta, outside = self.space.complete(inside, self.run.stream("hmc/outside"))
            shape = drawn.draws.shape[:2]
            log_joint = drawn.log_joint + outside.to(drawn.log_joint.device).view(shape)
            drawn = replace(drawn, draws=theta.float().unflatten(0, shape), log_joint=log_joint)
        return drawn, self._decide(drawn.draws), nullcontext

    def _decide(self, draws: torch.Tensor) -> Convergence:
        """Return the convergence of the quantity that decides."""
        by = self.space.judged_by
        return parameter_judge(self.run)(draws) if by is None else self.space.predictions[by](draws)

    def _write(self, drawn: HmcRun, meta: dict[str, Any], provenance: dict[str, Any], may_replace: bool) -> str:
        is_nuts, train = self.options.sampler == "nuts", self.space.train
        return write_samples(
            self.request.target,
            sample_file(drawn, train, self.prior),
            outputs=train.layout.likelihood.output_names(train.content.classes),
            created_at=provenance["created_at"],
            name=self.run.checkpoint_path.stem,
            sampler_library=("pyro", version("pyro-ppl")) if is_nuts else ("bnncli", __version__),
            meta=meta,
            provenance=provenance,
            may_replace=may_replace,
        )


def hmc_metrics(
    drawn: HmcRun,
    judged: Convergence,
    *,
    predictions: Mapping[str, Convergence],
    judged_by: str | None,
    options: HmcOptions,
    prior: Prior,
) -> dict[str, Any]:
    """Return the metrics of a run.

    Args:
        judged: convergence of the parameters.
        predictions: split name (heldout, train) to the convergence of log probabilities of its labels.
        judged_by: split whose predictions decide whether the chains converged; None to decide by the parameters.
    """
    num_draws = drawn.draws.shape[1]
    decided = judged if judged_by is None else predictions[judged_by]
    is_met = bool(options.conditions) and not find_unmet_conditions(options.conditions, condition_values(decided))
    return {
        "sampler": options.sampler,
        "dynamics": options.dynamics if options.sampler == "hmc" else None,
        **({} if options.gradients == "float32" else {"gradients": options.gradients}),
        "chains": options.chains,
        "draws": num_draws,
        **prior.to_meta(),
        **parameter_metrics(judged),
        # Numbers that decided when to stop do not estimate those of a run of this length.
        "stopped_by": options.until if is_met else None,
        "until_looks": sum(goal <= num_draws for goal in draw_goals(options.draws, options.max_draws))
        if options.conditions
        else None,
        **prediction_metrics(predictions, judged_by),
        "min_bfmi": None if drawn.energy is None else lowest_bfmi(drawn.energy.cpu().numpy()),
        "acceptance_rate": float(drawn.acceptance_rate.double().mean()),
        "lowest_chain_acceptance": float(drawn.acceptance_rate.double().mean(dim=1).min()),
        "divergences": int(drawn.diverging.sum()),
        "step_size": drawn.step_size,
        "mean_steps": float(drawn.n_steps.double().mean()),
    }


def hmc_warnings(metrics: HmcMetrics) -> list[str]:
    """Return the reasons to distrust the draws."""
    found = []
    r_hat = deciding_numbers(metrics).r_hat
    if r_hat is not None and r_hat > GOOD_RHAT:
        of = " of predictions" if "judged_by" in metrics else ""
        found.append(
            f"the chains do not agree: largest R-hat{of} {r_hat:.3f} (above {GOOD_RHAT}); {_suggest_remedy(metrics)}"
        )
    if metrics["lowest_chain_acceptance"] < STUCK_ACCEPTANCE:
        lowest = metrics["lowest_chain_acceptance"]
        found.append(f"a chain is stuck: it accepts {percent(lowest)} of its moves; {_suggest_remedy(metrics)}")
    if metrics["divergences"]:
        diverged = "1 trajectory" if metrics["divergences"] == 1 else f"{metrics['divergences']} trajectories"
        found.append(f"{diverged} diverged; try a higher --target-accept")
    if metrics["min_bfmi"] is not None and metrics["min_bfmi"] < LOW_BFMI:
        found.append(
            f"energies change too slowly: lowest E-BFMI {metrics['min_bfmi']:.2f} (below {LOW_BFMI}); the tails "
            "may be missing, so use more --draws or a larger --prior-precision"
        )
    return found


def _progress_line(num_draws: int, judged: Convergence) -> str:
    if judged.ess_bulk is None or judged.ess_tail is None:
        return f"{num_draws} draws per chain: {judged.undefined}"
    r_hat = "undefined" if judged.r_hat is None else f"{judged.r_hat:.4f}"
    return f"{num_draws} draws per chain: R-hat {r_hat}, ESS {judged.ess_bulk:.0f} bulk, {judged.ess_tail:.0f} tail"


def sample_file(drawn: HmcRun, train: Split, prior: Prior) -> SampleFile:
    """Return the draws and their statistics under the names of the ArviZ schema."""
    draws = drawn.draws.cpu()
    weight, bias = train.layout.split(draws) if train.is_last_layer else (None, None)
    stats = {
        "lp": drawn.log_joint,
        "energy": drawn.energy,
        "acceptance_rate": drawn.acceptance_rate,
        "diverging": drawn.diverging,
        "step_size": torch.full_like(drawn.acceptance_rate, drawn.step_size),
        "n_steps": drawn.n_steps,
    }
    return SampleFile(
        head_weight=None if weight is None else weight.numpy(),
        head_bias=None if bias is None else bias.numpy(),
        stats={name: values.cpu().numpy() for name, values in stats.items() if values is not None},
        constants=prior.to_constants(),
        theta=None if train.is_last_layer else draws.numpy(),
    )


def format_summary(metrics: HmcMetrics) -> list[str]:
    """Return the summary for people."""
    lines = [*prior_line(metrics), format_deciding_diagnostic(metrics)]
    if metrics.get("stopped_by") is not None:
        lines.append(
            f"these numbers decided when to stop (--until {metrics['stopped_by']}, after "
            f"{count_noun(metrics['until_looks'], 'check')}), so they are optimistic: a run of fixed length tends "
            "to have a larger R-hat and fewer effective draws"
        )
    lines += format_other_diagnostics(metrics)
    if "judged_by" in metrics:
        lines.append("all chains started near the same weights, so R-hat cannot detect modes that none of them reached")
    bfmi = "" if metrics["min_bfmi"] is None else f", lowest E-BFMI {metrics['min_bfmi']:.2f}"
    gradients = f"{metrics['gradients']} gradients" if "gradients" in metrics else None
    if "gradient_examples" in metrics:
        gradients = f"gradients of {metrics['gradient_examples']:,} examples"
    coarse = "" if gradients is None else f" with {gradients} and exact energies"
    lines.append(
        f"acceptance {metrics['acceptance_rate']:.2f}{coarse}, {count_noun(metrics['divergences'], 'divergence')}, "
        f"step size {metrics['step_size']:.3f}, {metrics['mean_steps']:.1f} steps per draw{bfmi}"
    )
    lines += val_lines(metrics)
    return lines


def find_failure(metrics: HmcMetrics, options: HmcOptions) -> CheckFailed | None:
    """Return the failure where --until or --max-rhat is not met. An undefined value meets neither."""
    decided = deciding_numbers(metrics)
    values = condition_values(decided)
    missed = find_unmet_conditions(options.conditions, values)
    if missed:
        got = ", ".join(f"{condition.name} is {_format_value(values[condition.name])}" for condition in missed)
        return CheckFailed(
            f"--until {options.until}: {got} after {metrics['draws']} draws per chain",
            hint="draw again with a larger --max-draws and --force (or another --name)",
            code="until",
        )
    if options.max_rhat is None or (decided.r_hat is not None and decided.r_hat <= options.max_rhat):
        return None
    of = " of predictions" if "judged_by" in metrics else ""
    return CheckFailed(
        f"--max-rhat {options.max_rhat}: the largest R-hat{of} is {_format_value(decided.r_hat)}",
        hint=_suggest_remedy(metrics),
        code="max_rhat",
    )


def condition_values(numbers: Convergence) -> dict[str, float | None]:
    """Return the numbers that conditions of --until compare, by their names there."""
    return {"rhat": numbers.r_hat, "ess": numbers.ess_bulk, "ess-tail": numbers.ess_tail}


def _format_value(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}" if value < 10 else f"{value:.0f}"


def _suggest_remedy(metrics: HmcMetrics) -> str:
    if metrics["chains"] == 1:
        return "use more --chains"
    if metrics["lowest_chain_acceptance"] < STUCK_ACCEPTANCE:
        return "use a higher --target-accept and more --warmup"
    return "use more --warmup and --draws"
