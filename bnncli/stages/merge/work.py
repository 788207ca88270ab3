"""The work of merge: the chains one after the other, and how they agree, computed anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from bnncli import __version__
from bnncli.artifacts.samples import SampleFile, write_samples
from bnncli.inference.hmc import HmcRun
from bnncli.lazy import torch
from bnncli.options.hmc import HmcOptions
from bnncli.options.merge import MergeOptions
from bnncli.parameters.module import LAST
from bnncli.parameters.prior import Prior
from bnncli.session.chains import Judge, head_judges, network_judge, parameter_judge
from bnncli.session.inputs import Split, open_samples, posterior_prior
from bnncli.session.network_splits import NetworkReader
from bnncli.session.posteriors import Cost, Fitted
from bnncli.session.produce import Request
from bnncli.session.run import Run
from bnncli.stages.hmc.report import hmc_metrics, hmc_warnings
from bnncli.stages.hmc.work import sample_file
from bnncli.stages.merge.together import MergedRun

_OF_ONE_RUN = ("metrics", "method", "whitening", "joined")


def fit(
    run: Run, options: MergeOptions, request: Request, parts: list[MergedRun], *, train: Split, held_out: Split | None
) -> Fitted:
    """The joined draws with what is told of them."""
    layers, prior = parts[0].layers, posterior_prior(parts[0].path, parts[0].header)
    if layers == LAST:
        joining = Joining(run, request, parts, train, prior, head_judges(run, train, held_out))
        return joining.fit()
    reader = NetworkReader(run, options.trust_code)
    with reader.recorded.visible():
        whole = reader.split(train, layers)
        judged_by, judged = "train", whole
        if held_out is not None and held_out.content.labels is not None:
            judged_by, judged = "heldout", reader.split(held_out, layers)
        judges = {judged_by: network_judge(run, whole.target(prior, run.device), judged)}
        return Joining(run, request, parts, whole, prior, judges, judged_by).fit()


@dataclass(frozen=True)
class Joining:
    """One request for joined chains, and what it needs.

    Args:
        train: the training split, whose layout is theta's.
        judges: how chains agree on log probabilities of labels, by whose they are: heldout, train.
        judged_by: whose numbers decide about the chains; None for the parameters'.
    """

    run: Run
    request: Request
    parts: list[MergedRun]
    train: Split
    prior: Prior
    judges: Mapping[str, Judge]
    judged_by: str | None = None

    def fit(self) -> Fitted:
        """The draws, judged as hmc judges its own."""
        drawn, step_sizes = _joined(self.parts)
        metrics = hmc_metrics(
            drawn,
            parameter_judge(self.run)(drawn.draws),
            predictions={name: judge(drawn.draws) for name, judge in self.judges.items()},
            judged_by=self.judged_by,
            options=HmcOptions(sampler=self.parts[0].metrics["sampler"], chains=drawn.draws.shape[0]),
            prior=self.prior,
        )
        metrics["dynamics"] = self._common("dynamics")
        if (gradients := self._common("gradients")) is not None:
            metrics["gradients"] = gradients
        costs = [Cost.recorded(part.metrics) for part in self.parts]
        known = [cost.passes for cost in costs if cost is not None]
        if len(known) == len(costs):
            metrics |= Cost.of_fit(sum(known), is_last_layer=self.train.is_last_layer).to_metrics()
        for text in hmc_warnings(metrics):
            self.run.console.warn(f"{text} (in hmc, for each run)")
        first = self.parts[0].header.meta
        meta = {name: value for name, value in first.items() if name not in _OF_ONE_RUN}
        meta |= {"method": "merge", "joined": [part.to_json() for part in self.parts]}
        content = sample_file(drawn, self.train, self.prior)
        content = replace(content, stats=content.stats | {"step_size": step_sizes})
        return Fitted({}, meta, metrics, self.train, write=partial(self._write, content))

    def _common(self, name: str) -> Any:
        """What all runs have had; None where they differ, or had none."""
        values = [part.metrics.get(name) for part in self.parts]
        return values[0] if all(value == values[0] for value in values) else None

    def _write(self, content: SampleFile, meta: dict[str, Any], provenance: dict[str, Any], may_replace: bool) -> str:
        is_nuts, train = self.parts[0].metrics["sampler"] == "nuts", self.train
        return write_samples(
            self.request.target,
            content,
            outputs=train.layout.likelihood.output_names(train.content.classes),
            created_at=provenance["created_at"],
            name=self.run.checkpoint_path.stem,
            sampler_library=("pyro", version("pyro-ppl")) if is_nuts else ("bnncli", __version__),
            meta=meta,
            provenance=provenance,
            may_replace=may_replace,
        )


def _joined(parts: list[MergedRun]) -> tuple[HmcRun, np.ndarray]:
    """The chains one after the other, each cut to the shortest, and the step sizes (C, T) that they had."""
    found = [open_samples(part.path) for part in parts]
    num_draws = min(posterior.draws.shape[1] for posterior, _ in found)
    draws = torch.cat([posterior.draws[:, :num_draws] for posterior, _ in found])
    names = set.intersection(*(set(content.stats) for _, content in found))
    stats = {name: np.concatenate([content.stats[name][:, :num_draws] for _, content in found]) for name in names}
    drawn = HmcRun(
        draws,
        torch.from_numpy(stats["lp"]),
        torch.from_numpy(stats["energy"]) if "energy" in stats else None,
        torch.from_numpy(stats["acceptance_rate"]),
        torch.from_numpy(stats["diverging"].astype(bool)),
        float(stats["step_size"].astype(np.float64).mean()),
        torch.from_numpy(stats["n_steps"]),
    )
    return drawn, stats["step_size"]
