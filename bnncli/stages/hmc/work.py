"""The work of hmc: where chains move, how they agree, and the file of their draws; whole.py has that of other layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from bnncli import __version__
from bnncli.artifacts.resume import DrawFile
from bnncli.artifacts.samples import SampleFile, write_samples
from bnncli.covariances import Covariance
from bnncli.evaluation.convergence import Convergence
from bnncli.inference import memory
from bnncli.inference.hmc import OVERDISPERSION, Completion, HmcRun, Workers, sample_hmc
from bnncli.inference.laplace import complete, fit_gaussian
from bnncli.lazy import torch
from bnncli.likelihoods import name_to_record
from bnncli.options.hmc import HmcOptions
from bnncli.options.shared import unmet
from bnncli.parameters.layouts import MatrixLayout, ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.samples import Samples
from bnncli.session.chains import Judge, head_judges, parameter_judge
from bnncli.session.inputs import Split, open_posterior
from bnncli.session.out_of_fold import fit_on_meta
from bnncli.session.posteriors import Base, Cost, Fitted, row_space, search_identity
from bnncli.session.produce import Request, Resumable, ResumableDraws
from bnncli.session.run import Run
from bnncli.session.val_report import measure_on_val
from bnncli.stages.hmc.report import condition_values, hmc_metrics, hmc_warnings
from bnncli.system.memory import budget
from bnncli.system.workers import team
from bnncli.targets.target import Target, counted_passes
from bnncli.targets.variants import choose_gradient

_SMALLEST_GROUP = 4  # chains a product; on two cores each of fewer costs a third more, of 16 a tenth less
_MOST_PREDICTING = 2**26  # numbers of the draws that predict val: 256 MiB, and on two cores 15 s for 10,000 examples
Publishing = Callable[[], AbstractContextManager[None]]  # around the publication of draws


@dataclass(frozen=True)
class Space:
    """Where chains move, and by what they are judged.

    Args:
        train: the training split, whose layout is of all of theta.
        target: over what moves.
        center: (P',), of the Gaussian that whitens.
        covariance: its.
        complete: makes all of theta of what moves; None where the chains move over all of it.
        coarse: the gradient that kicks, as for sample_hmc.
        dispersion: of the starts.
        predictions: how chains agree on log probabilities of labels, by whose they are: heldout, train.
        judged_by: whose numbers decide about the chains; None for the parameters'.
        val: labelled, as the posterior sees it, where there is one: what the draws are worth is measured there.
        identity: of the whitening: what a state to resume from must have been made with.
        meta: what the artifact records besides.
        passes: gradient passes over the data that the whitening took.
        smallest_group: chains that one product is of at least, where workers share them out.
    """

    train: Split
    target: Target
    center: torch.Tensor
    covariance: Covariance
    identity: str
    complete: Completion | None = None
    coarse: Callable[[torch.Tensor], torch.Tensor] | None = None
    dispersion: float = OVERDISPERSION
    predictions: Mapping[str, Judge] = field(default_factory=dict)
    judged_by: str | None = None
    val: Split | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    passes: float = 0.0
    smallest_group: int = 1


def last_layer(
    run: Run,
    options: HmcOptions,
    train: Split,
    held_out: Split | None,
    *,
    prior: Prior,
    base: Base | None,
    span: MatrixLayout | None,
    before: Space | None = None,
) -> Space:
    """About the exact mode of the last layer's target.

    Args:
        held_out: the val split, whose predictions are judged too; None without one.
        prior: of the target.
        base: whose Gaussian whitens, where it is that of the same target.
        span: the layout inside the span of the features, where the chains move; None where they move over all of theta.
        before: of another prior, from whose mode this one's is looked for.
    """
    target = train.target(prior, run.device)
    whole = train.layout if span else None
    own = memory.automatic_structure(span or train.layout, budget(run.device), device=run.device, whole=whole)
    structure = memory.whitening_structure(
        span or train.layout,
        budget(run.device),
        device=run.device,
        num_examples=len(train.content.features),
        num_chains=options.chains,
        num_draws=options.warmup + options.draws,
        whole=whole,
    )
    rows = row_space(target) if span else None
    with counted_passes() as tally:
        gaussian = None if rows is not None else _gaussian_of(base, prior, structure, train)
        if gaussian is None:
            if structure != own and before is None:
                run.console.info(
                    f"using the {structure} Gaussian at the mode for the chains' coordinates instead of "
                    f"fit-laplace's {own} one: computing it should take no longer than the draws, and the draws "
                    "should be less correlated"
                )
            start = train.start().to(run.device)
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
        complete=None if rows is None else partial(complete, rows=rows, prior=prior.to(run.device)),
        coarse=choose_gradient(options.gradients, target, gaussian.mean),
        predictions=head_judges(run, train, held_out),
        val=held_out if held_out is not None and held_out.content.labels is not None else None,
        meta={**fit_on_meta(base.header if base else None), **({} if rows is None else {"row_space_rank": rows.rank})},
        passes=tally.passes,
        smallest_group=_SMALLEST_GROUP,
    )


def _gaussian_of(base: Base | None, prior: Prior, structure: str, train: Split) -> Gaussian | None:
    """The base's, where it is the one that would be made: of these examples and this prior, at their mode, in this structure."""
    if base is None or not base.is_gaussian or not base.prior.is_close(prior):
        return None
    meta, inputs = base.header.meta, base.header.provenance["inputs"]
    is_it = (meta.get("method"), meta.get("center"), meta.get("structure")) == ("laplace", "mode", structure)
    own = {(given["role"], given["content_digest"]) for given in inputs}
    if not is_it or not own.issuperset((one.role, one.content_digest) for one in train.sources):
        return None
    gaussian: Gaussian = open_posterior(base.path)[0]
    return gaussian


@dataclass(frozen=True)
class Sampling:
    """One request for draws, and what it needs; told: metrics of what was chosen for it."""

    run: Run
    options: HmcOptions
    request: Request
    prior: Prior
    space: Space
    told: Mapping[str, Any] = field(default_factory=dict)

    def fit(self) -> Fitted:
        """Draw, judge, and say how to publish."""
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
        metrics |= self.told
        if drawn.num_gradients is not None:
            passes = options.chains * drawn.num_gradients + space.passes
            metrics |= Cost.of_fit(passes, is_last_layer=space.train.is_last_layer).to_metrics()
        for text in hmc_warnings(metrics):
            run.console.warn(text)
        if space.val is not None:
            posterior = _some(drawn.draws, layout).to(run.device)
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
        return Fitted({}, meta, metrics, space.train, write=partial(self._write, drawn), publishing=publishing)

    def _sample_hmc(self, **common: Any) -> tuple[HmcRun, Convergence, Publishing]:
        """Draws by our sampler, how they converged, and what removes the resume state once they are published."""
        run, options, request, space = self.run, self.options, self.request, self.space
        store = DrawFile(request.target, num_chains=options.chains, num_params=space.train.layout.num_params)
        # A state holds whitened coordinates: under another whitening they would be other theta.
        workers = self._workers()
        also: dict[str, Any] = {"whitening": space.identity} | ({} if workers is None else {"spread": "chains"})
        also |= search_identity(self.told)
        resumable = Resumable(run, request, resume=options.resume, save_every=options.save_every, also=also)
        resume = ResumableDraws(resumable, store)
        judgements: dict[int, Convergence] = {}

        def is_enough(draws: torch.Tensor) -> bool:
            judged = judgements[draws.shape[1]] = self._decide(draws)
            run.console.info(_round_line(draws.shape[1], judged))
            return not unmet(options.conditions, condition_values(judged))

        try:
            with resumable.hint():
                drawn = sample_hmc(
                    space.target,
                    dynamics=options.dynamics,
                    dispersion=space.dispersion,
                    coarse=space.coarse,
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
        """Those that share out the chains; None where there are none, or they share out the examples."""
        others, spread, space = team(), self.options.spread, self.space
        if spread is None:
            is_near = (
                space.target.is_resident or not space.train.is_last_layer
            )  # networks read all data, wherever it lies
            spread = "chains" if is_near else "examples"
        return None if others is None or spread == "examples" else Workers(others, self.space.smallest_group)

    def _sample_nuts(self, **common: Any) -> tuple[HmcRun, Convergence, Publishing]:
        """The same by Pyro's NUTS, which cannot be continued."""
        from bnncli.inference.nuts import sample_nuts

        drawn = sample_nuts(self.space.target, seed=self.run.stream("hmc/nuts").initial_seed() % 2**31, **common)
        if self.space.complete is not None:
            inside = drawn.draws.flatten(0, 1).double()
            theta, outside = self.space.complete(inside, self.run.stream("hmc/outside"))
            shape = drawn.draws.shape[:2]
            log_joint = drawn.log_joint + outside.to(drawn.log_joint.device).view(shape)
            drawn = replace(drawn, draws=theta.float().unflatten(0, shape), log_joint=log_joint)
        return drawn, self._decide(drawn.draws), nullcontext

    def _decide(self, draws: torch.Tensor) -> Convergence:
        """How the chains agree on what decides."""
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


def _some(draws: torch.Tensor, layout: ParamLayout) -> Samples:
    """All draws (C, T, P); every n-th of each chain where all would take much memory."""
    step = math.ceil(draws.numel() / _MOST_PREDICTING)
    return Samples(draws[:, :: min(step, draws.shape[1])], layout)


def _round_line(num_draws: int, judged: Convergence) -> str:
    """How far --until is."""
    if judged.ess_bulk is None or judged.ess_tail is None:
        return f"{num_draws} draws per chain: {judged.undefined}"
    r_hat = "undefined" if judged.r_hat is None else f"{judged.r_hat:.4f}"
    return f"{num_draws} draws per chain: R-hat {r_hat}, ESS {judged.ess_bulk:.0f} bulk, {judged.ess_tail:.0f} tail"


def sample_file(drawn: HmcRun, train: Split, prior: Prior) -> SampleFile:
    """Draws and statistics under the names of the ArviZ schema."""
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
