"""The work of predict for one posterior: opened once, made ready once for each integrator, then block by block."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnncli.integrators import Ready, join
from bnncli.integrators._groups import Groups, kept_rows
from bnncli.integrators._mean_logits import energy_and_max_logit, mean_theta
from bnncli.numerics.top_k import ranked_lengths
from bnncli.run.inputs import Split, load_split, open_posterior, posterior_prior, require_draws
from bnncli.run.predict_plan import Choice
from bnncli.run.produce import Computed
from bnncli.run.session import Run
from bnncli.storage.headers import Header
from bnncli.storage.predictions import PredictionFile, write_predictions
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.theta.prior import Prior

_OF_THETA = ("sample", "quasi_noise", "log_density")  # what integrators need that predict with draws of theta
RANKED_CONCENTRATIONS = 1 << 22  # in float64 at once


@dataclass
class TrainData:
    """The training split, for integrators that weigh draws by their target; read and moved when first asked for."""

    run: Run

    @cached_property
    def split(self) -> Split:
        """The split itself. Raises MissingInput or DataError without one that has labels."""
        return load_split(self.run, "train").check_labeled()

    @cached_property
    def _target(self) -> LastLayerTarget:
        return self.split.target(Prior(1.0), self.run.device)

    def target(self, prior: Prior) -> LastLayerTarget:
        """The log posterior under a prior."""
        return self._target.with_prior(prior)


@dataclass
class Predictor:
    """Predicts with one posterior."""

    run: Run
    path: Path
    header: Header
    train: TrainData
    _ready: dict[str, Ready] = field(default_factory=dict)

    @cached_property
    def posterior(self) -> Any:
        """The posterior, on the device."""
        return open_posterior(self.path)[0].to(self.run.device)

    @cached_property
    def mean_theta(self) -> Tensor:
        """theta (P,) at which energy and the largest logit are taken."""
        return mean_theta(self.posterior, self.run.stream("predict/mean"))

    def ready(self, choice: Choice) -> Ready:
        """The integrator, with what is the same for all features done; warns once of what it has to say."""
        if choice.name not in self._ready:
            self._require_memory(choice)
            target = None
            if choice.integrator.needs_target:
                target = self.train.target(posterior_prior(self.path, self.header))
            self._ready[choice.name] = choice.integrator.prepare(
                self.posterior,
                num_samples=choice.samples,
                generator=self.run.stream("predict/draws"),
                target=target,
                progress=self.run.console,
            )
            warn(self.run, self.path.stem, self._ready[choice.name].notes())
        return self._ready[choice.name]

    def _require_memory(self, choice: Choice) -> None:
        """Pass when the draws of theta have room. Raises DeviceError, naming how many have, otherwise."""
        is_of_theta = choice.integrator.needs in _OF_THETA
        used = None if choice.integrator.is_sampling and choice.samples is None else choice.samples or 0
        option = "--samples" if choice.integrator.is_sampling else None
        if is_of_theta or self.header.kind == "samples":
            require_draws(self.run, self.header, num_used=used, option=option)

    def predict(self, choice: Choice, split: Split, target: Path, *, keep_samples: bool) -> Computed:
        """The predictions of one split, ready to be published at `target`."""
        split.check_fits(self.posterior.layout)
        integrator, parts, kept, logit_scores = self.ready(choice), [], [], []
        groups = _groups_of(integrator)
        num_classes, start = len(split.content.classes), 0
        group_rows = None if groups is None else kept_rows(len(split.content.features), num_classes, len(groups))
        for features in split.feature_blocks(self.run.device):
            draws: dict[str, Any] = {"num_samples": choice.samples}  # of one stream: the same draws for every block
            draws["generator"] = self.run.stream("predict/draws")
            if group_rows is not None:
                draws["group_rows"] = _rows_within(group_rows, slice(start, start + len(features)))
            start += len(features)
            parts.append(integrator.predict(self.posterior, features, progress=self.run.console, **draws))
            logit_scores.append(energy_and_max_logit(features, self.mean_theta, self.posterior.layout))
            if keep_samples:
                kept.append(integrator.probs_of_draws(self.posterior, features))
        prediction = join(parts)
        energy, max_logit = (torch.cat(scores).cpu() for scores in zip(*logit_scores, strict=True))

        def optional(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.numpy()

        content = PredictionFile(
            probs=prediction.probs.numpy(),
            entropy=prediction.entropy.numpy(),
            mutual_info=optional(prediction.mutual_info),
            labels=split.content.labels,
            sample_id=split.content.sample_id,
            classes=split.content.classes,
            probs_samples=torch.cat(kept, dim=1).numpy() if kept else None,
            interval=optional(prediction.interval),
            log_concentration=optional(prediction.log_concentration),
            energy=energy.numpy(),
            max_logit=max_logit.numpy(),
            top_k=_ranked(prediction.log_concentration, choice.top_k),
            group_probs=optional(prediction.group_probs),
            group_rows=optional(group_rows),
            group_weights=None if groups is None else groups.weights.numpy(),
        )
        meta = {**self._meta(choice, split), "num_examples": len(content.probs), **integrator.notes()}
        meta["draws"] = integrator.num_draws
        meta["interval_level"] = None if content.interval is None else integrator.interval_level

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_predictions(target, content, meta=meta, provenance=provenance, may_replace=may_replace)

        return Computed(publish, facts=facts_of(meta))

    def _meta(self, choice: Choice, split: Split) -> dict[str, Any]:
        return {
            "posterior": self.path.stem,
            "integrator": choice.name,
            "variant": choice.variant,
            "settings": choice.settings,
            "samples": choice.samples,
            "top_k": choice.top_k,
            "split": split.content.name,
            "is_ood": split.content.is_ood,
            "is_labeled": split.content.labels is not None,
            "order_digest": split.content.header.meta.get("order_digest") if split.content.header else None,
        }


def _ranked(log_concentration: Tensor | None, top_k: dict[str, Any] | None) -> Any:
    """How many classes each example keeps, (N,), by blocks of rows; None where classes are not ranked."""
    if log_concentration is None or top_k is None:
        return None
    blocks = log_concentration.split(max(1, RANKED_CONCENTRATIONS // log_concentration.shape[1]))
    return torch.cat([ranked_lengths(block, **top_k) for block in blocks]).numpy()


def _groups_of(integrator: Ready) -> Groups | None:
    """The groups of an integrator's draws; None without Monte Carlo error, and for a single draw."""
    return integrator.groups if integrator.groups is not None and len(integrator.groups) > 1 else None


def _rows_within(rows: Tensor, block: slice) -> Tensor:
    """Those of the ascending rows (R,) that lie in a block, counted from its start."""
    first, last = torch.searchsorted(rows, torch.tensor([block.start, block.stop])).tolist()
    return rows[first:last] - block.start


def facts_of(meta: dict[str, Any]) -> dict[str, Any]:
    """What the result says of a prediction: number of draws and level of the intervals; null where it has none."""
    return {name: meta.get(name) for name in ("draws", "interval_level")}


def warn(run: Run, posterior: str, notes: dict[str, Any]) -> None:
    """Pass on what an integrator warned of, once a posterior."""
    text = f"{posterior}: {notes['warning']}" if notes.get("warning") else None
    if text is not None and text not in run.console.warnings:
        run.console.warn(text)
