"""The training of fit-lbbnn, and before it the search for a slab: all networks as one batch, or of workers in groups that are apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.latent.fit import (
    CANDIDATES,
    History,
    Plan,
    fit_apart,
    fit_latent,
    fit_tensors,
    groups_of,
    joined,
    joined_history,
    nll_of_repeats,
    search_epochs,
)
from bnncli.latent.model import LatentModel
from bnncli.lazy import torch
from bnncli.options.fit_lbbnn import FitLbbnnOptions
from bnncli.parameters.layouts import NetworkLayout
from bnncli.session.inputs import Split
from bnncli.session.produce import Resumable, begun_before, say_who_works, stored_in
from bnncli.session.run import Run
from bnncli.stages.fit_lbbnn.plan import start_of
from bnncli.stages.fit_lbbnn.report import TrainingData
from bnncli.system.workers import Team, team
from bnncli.training.loop import State
from bnncli.training.shared_out import Seat

if TYPE_CHECKING:
    from torch import Tensor


class TrainedRepeats(NamedTuple):
    """What became of the networks; seconds: of an epoch of all."""

    model: LatentModel
    history: History
    seconds: float


@dataclass(frozen=True)
class LatentTraining:
    """Networks that are to be fitted, and what they learn from."""

    run: Run
    options: FitLbbnnOptions
    layout: NetworkLayout
    data: TrainingData
    plan: Plan

    def search(self, val: Split) -> list[dict[str, float]]:
        """The NLL on val of each candidate for the slab's standard deviation, after a short fit."""
        plan = replace(self.plan, epochs=search_epochs(self.plan.epochs), schedule="cosine")
        start, others = self._start(CANDIDATES, num_repeats=len(CANDIDATES)), team()

        def nll(model: LatentModel, apart: str, **report: Any) -> Tensor:
            model, _ = self._fit(model, plan, f"fit-lbbnn/search{apart}", what="slab search", **report)
            features, labels = val.resident(self.run.device), val.labels(self.run.device)
            generator = self.run.stream(f"fit-lbbnn/val{apart}")
            return nll_of_repeats(model, features, labels, generator, scaling=self.data.scaling)

        def nll_apart(model: LatentModel, first: int, seat: Seat) -> Mapping[str, Tensor]:
            return {"nll": nll(model, f"/{first}", progress=seat)}

        if others is None:
            found = nll(start, "", progress=self.run.console)
        else:
            parts = fit_apart(others, start, nll_apart, what="slab search", **self._steps(plan))
            found = torch.cat([part["nll"] for part in parts])
        return [{"slab_sd": sd, "val_nll": value} for sd, value in zip(CANDIDATES, found.tolist(), strict=True)]

    def fit(self, slab_sd: float, state: dict[str, Tensor] | None, resumable: Resumable) -> TrainedRepeats:
        """The networks, from their start or the state of an earlier run, which is used up where workers share it."""
        start, others, begin = self._start([slab_sd], num_repeats=self.options.repeats), team(), time.monotonic()
        if others is not None:
            return self._fit_apart(others, start, state, resumable)
        model, history = self._fit(
            start, self.plan, "fit-lbbnn/train", state=state, save=resumable.save, progress=self.run.console
        )
        done = 0 if state is None else _num_epochs(state)
        return TrainedRepeats(model, history, (time.monotonic() - begin) / max(1, self.plan.epochs - done))

    def _fit_apart(
        self, others: Team, start: LatentModel, state: dict[str, Tensor] | None, resumable: Resumable
    ) -> TrainedRepeats:
        begin, groups = time.monotonic(), groups_of(self.layout, start.num_repeats, start.device)
        say_who_works(self.run, others, len(groups))
        begun = begun_before(state)
        left = len(groups) * self.plan.epochs - sum(map(_num_epochs, begun.values()))
        stored = stored_in(resumable, begun, others, len(groups))

        def fit(model: LatentModel, first: int, seat: Seat) -> Mapping[str, Tensor]:
            stream = f"fit-lbbnn/train/{first}"
            return fit_tensors(*self._fit(model, self.plan, stream, state=seat.state, save=seat.save, progress=seat))

        parts = fit_apart(others, start, fit, what="fit", stored=stored, **self._steps(self.plan))
        model = joined(start, parts, has_learnt_prior=self.plan.hyper_prior and self.plan.early_epochs > 0)
        return TrainedRepeats(model, joined_history(parts), (time.monotonic() - begin) / max(1.0, left / len(groups)))

    def _start(self, slab_sds: Sequence[float], *, num_repeats: int) -> LatentModel:
        """What the fit, or the search before it, starts from: both from the same stream."""
        generator = self.run.stream("fit-lbbnn/start")
        return start_of(
            self.options, self.layout, slab_sds, num_repeats=num_repeats, generator=generator, device=self.run.device
        )

    def _fit(self, model: LatentModel, plan: Plan, stream: str, **report: Any) -> tuple[LatentModel, History]:
        data, generator = self.data, self.run.stream(stream)
        return fit_latent(
            model, data.features, data.labels, plan, generator=generator, scaling=data.scaling, **report
        )  # fmt: skip

    def _steps(self, plan: Plan) -> dict[str, Any]:
        num_batches = -(-len(self.data.labels) // plan.batch_size)
        return {"num_steps": plan.epochs * num_batches, "progress": self.run.console}


def _num_epochs(state: State) -> int:
    """Done, in a state of fit_latent."""
    return len(state.get("history.density", ()))
