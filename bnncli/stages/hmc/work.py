"""The work of hmc: chains from the mode, how they agree, and the file of their draws."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from bnncli import __version__
from bnncli.evaluation.convergence import Convergence, convergence
from bnncli.evaluation.predictive_convergence import MAX_ROWS, held_out_convergence
from bnncli.inference import memory
from bnncli.inference.hmc import Completion, HmcRun, sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.row_space_draws import complete
from bnncli.likelihoods import name_to_record
from bnncli.machine.memory import budget
from bnncli.options import HmcOptions
from bnncli.options.until import unmet
from bnncli.run.inputs import Split
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted
from bnncli.run.resumable import Resumable, ResumableDraws
from bnncli.run.row_space import row_space
from bnncli.run.session import Run
from bnncli.stages.hmc.report import hmc_metrics, hmc_warnings
from bnncli.storage.draw_file import DrawFile
from bnncli.storage.samples import SampleFile, write_samples
from bnncli.targets.coarse_gradient import choose_gradient
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.theta.layout import MatrixLayout
from bnncli.theta.prior import Prior

Publishing = Callable[[], AbstractContextManager[None]]  # around the publication of draws


@dataclass(frozen=True)
class Sampling:
    """One request for draws, and what it needs.

    Args:
        held_out: the val split, whose predictions are judged too; None without one.
        span: the layout inside the span of the features, where the chains move; None where they move over all of theta.
    """

    run: Run
    options: HmcOptions
    request: Request
    train: Split
    held_out: Split | None
    prior: Prior
    span: MatrixLayout | None

    def fit(self) -> Fitted:
        """Draw, judge, and say how to publish."""
        run, options, train = self.run, self.options, self.train
        target = train.target(self.prior, run.device)
        whole = train.layout if self.span else None
        structure = memory.automatic_structure(self.span or train.layout, budget(run.device), whole=whole)
        start = train.start().to(run.device)
        rows = row_space(target) if self.span else None
        if rows is not None:
            target, start = rows.target(target), rows.reduce(start)
        fit = fit_gaussian(target, structure=structure, center="mode", start=start, progress=run.console)
        sample = self._sample_nuts if options.sampler == "nuts" else self._sample_hmc
        drawn, judged, publishing = sample(
            target,
            mode=fit.gaussian.mean,
            covariance=fit.gaussian.covariance,
            num_chains=options.chains,
            num_warmup=options.warmup,
            num_draws=options.draws,
            target_accept=options.target_accept,
            complete=None if rows is None else partial(complete, rows=rows, precision=self.prior.weight_precision),
            progress=run.console,
        )
        predictions = self._judge_held_out(drawn)
        metrics = hmc_metrics(drawn, judged, held_out=predictions, options=options, prior=self.prior)
        for text in hmc_warnings(metrics):
            run.console.warn(text)
        meta = {
            "method": "hmc",
            "type": "samples",
            **self.prior.to_meta(),
            **name_to_record(train.layout.likelihood_name),
            "param_layout": train.layout.to_json(),
            "whitening": structure,
            **({} if rows is None else {"row_space_rank": rows.rank}),
        }
        return Fitted({}, meta, metrics, train, write=partial(self._write, drawn), publishing=publishing)

    def _sample_hmc(self, target: LastLayerTarget, **common: Any) -> tuple[HmcRun, Convergence, Publishing]:
        """Draws by our sampler, how they converged, and what removes the resume state once they are published."""
        run, options, request = self.run, self.options, self.request
        store = DrawFile(request.target, num_chains=options.chains, num_params=self.train.layout.num_params)
        # A state holds whitened coordinates: under another whitening they would be other theta.
        also = {"whitening": common["covariance"].structure}
        resumable = Resumable(run, request, resume=options.resume, save_every=options.save_every, also=also)
        resume = ResumableDraws(resumable, store)
        judgements: dict[int, Convergence] = {}

        def is_enough(draws: torch.Tensor) -> bool:
            judged = judgements[draws.shape[1]] = self._judge(draws)
            run.console.info(_round_line(draws.shape[1], judged))
            values = {"rhat": judged.r_hat, "ess": judged.ess_bulk, "ess-tail": judged.ess_tail}
            return not unmet(options.conditions, values)

        try:
            with resumable.hint():
                drawn = sample_hmc(
                    target,
                    dynamics=options.dynamics,
                    coarse=choose_gradient(options.gradients, target, common["mode"]),
                    generator=run.stream("hmc/chains"),
                    is_enough=is_enough if options.conditions else None,
                    max_draws=options.max_draws,
                    store=store,
                    resume=resume,
                    **common,
                )
        finally:
            resume.close()
        judged = judgements.get(drawn.draws.shape[1])
        return drawn, judged or self._judge(drawn.draws), resume.publishing

    def _sample_nuts(
        self, target: LastLayerTarget, complete: Completion | None, **common: Any
    ) -> tuple[HmcRun, Convergence, Publishing]:
        """The same by Pyro's NUTS, which cannot be continued."""
        from bnncli.inference.nuts import sample_nuts

        drawn = sample_nuts(target, seed=self.run.stream("hmc/nuts").initial_seed() % 2**31, **common)
        if complete is not None:
            inside = drawn.draws.flatten(0, 1).double()
            theta, outside = complete(inside, self.run.stream("hmc/outside"))
            shape = drawn.draws.shape[:2]
            log_joint = drawn.log_joint + outside.to(drawn.log_joint.device).view(shape)
            drawn = replace(drawn, draws=theta.float().unflatten(0, shape), log_joint=log_joint)
        return drawn, self._judge(drawn.draws.cpu()), nullcontext

    def _judge(self, draws: torch.Tensor) -> Convergence:
        """How the chains agree on every parameter, for draws (C, T, P) on the CPU; judged on the device."""
        return convergence(draws.numpy(), device=self.run.device, progress=self.run.console)

    def _judge_held_out(self, drawn: HmcRun) -> Convergence | None:
        """How the chains agree on a few hundred seeded examples of the val split; None without labels there."""
        if self.held_out is None or self.held_out.content.labels is None:
            return None
        labels = self.held_out.labels(torch.device("cpu"))
        order = torch.randperm(len(labels), generator=self.run.stream("hmc/held-out"))
        rows = order[:MAX_ROWS].sort().values
        features = torch.from_numpy(self.held_out.content.features)[rows]
        return held_out_convergence(
            drawn.draws,
            features,
            labels[rows],
            layout=self.train.layout,
            device=self.run.device,
            progress=self.run.console,
        )

    def _write(self, drawn: HmcRun, meta: dict[str, Any], provenance: dict[str, Any], may_replace: bool) -> str:
        is_nuts = self.options.sampler == "nuts"
        return write_samples(
            self.request.target,
            _content(drawn, self.train, self.prior),
            outputs=self.train.layout.likelihood.output_names(self.train.content.classes),
            created_at=provenance["created_at"],
            name=self.run.checkpoint_path.stem,
            sampler_library=("pyro", version("pyro-ppl")) if is_nuts else ("bnncli", __version__),
            meta=meta,
            provenance=provenance,
            may_replace=may_replace,
        )


def _round_line(num_draws: int, judged: Convergence) -> str:
    """How far --until is."""
    if judged.ess_bulk is None or judged.ess_tail is None:
        return f"{num_draws} draws a chain: {judged.undefined}"
    r_hat = "undefined" if judged.r_hat is None else f"{judged.r_hat:.4f}"
    return f"{num_draws} draws a chain: R-hat {r_hat}, ESS {judged.ess_bulk:.0f} bulk, {judged.ess_tail:.0f} tail"


def _content(drawn: HmcRun, train: Split, prior: Prior) -> SampleFile:
    """Draws and statistics under the names of the ArviZ schema."""
    weight, bias = train.layout.split(drawn.draws.cpu())
    stats = {
        "lp": drawn.log_joint,
        "energy": drawn.energy,
        "acceptance_rate": drawn.acceptance_rate,
        "diverging": drawn.diverging,
        "step_size": torch.full_like(drawn.acceptance_rate, drawn.step_size),
        "n_steps": drawn.n_steps,
    }
    return SampleFile(
        head_weight=weight.numpy(),
        head_bias=None if bias is None else bias.numpy(),
        stats={name: values.cpu().numpy() for name, values in stats.items() if values is not None},
        constants={name: np.array([value]) for name, value in prior.to_meta().items()},
    )
