"""Predicting with one posterior: opened once, made ready once for each integrator, then block by block.

The command predict stores what comes of it, and whoever asks from Python gets it; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.features import detector_file, read_known, write_known
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.evaluation.detectors import DEFAULT_SCORE, FEWEST_ROWS
from bnncli.integrators import Ready
from bnncli.integrators._moments import drawn_theta, energy_and_max_logit, mean_theta
from bnncli.integrators._partitions import DrawPartition, kept_rows
from bnncli.lazy import torch
from bnncli.numerics.digests import json_sha256
from bnncli.parameters.prior import Prior
from bnncli.run.inputs import Split, block_rows, load_split, on_device, open_posterior, posterior_prior, require_draws
from bnncli.run.integrator_choice import OF_THETA, IntegratorChoice, is_of_draws, num_stored
from bnncli.run.out_of_fold import fit_on, knows, load_fitted, out_of_fold
from bnncli.run.predicted_rows import PartProgress, Predicted, Rows, joined, own_rows, rows_of, scattered
from bnncli.run.session import Run
from bnncli.system.workers import brought_to_leader, is_leader, team

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bnncli.evaluation.combined_score import Combined
    from bnncli.run.network_splits import NetworkReader
    from bnncli.run.recorded_network import RecordedNetwork
    from bnncli.targets.target import CurvedTarget


KEPT_FROM = 2e9  # multiplications of a fit of the combined score, which take half a second on one core

LINEARISED = ("gaussian", "linear-draws")  # posteriors that predict with the network linearised at their mean


@dataclass
class TrainData:
    """The training split, for integrators that weigh draws by their target; read and moved when first asked for.

    Attributes:
        trusts_code: whether code that the run's features were made by may run again, for posteriors over other layers.
        opener: gives the network that they were made by, where somebody else opens it.
    """

    run: Run
    trusts_code: bool = False
    opener: Callable[[], RecordedNetwork] | None = None
    _splits: dict[str, Split] = field(default_factory=dict)
    _targets: dict[str, CurvedTarget] = field(default_factory=dict)
    _combined: dict[str, NDArray] = field(default_factory=dict)

    def fitted(self, header: Header) -> Split:
        """The rows that a posterior was fitted to. Raises MissingInput or DataError without such that have labels."""
        wanted = fit_on(header)
        if wanted not in self._splits:
            self._splits[wanted] = load_fitted(self.run, wanted)
        return self._splits[wanted]

    @cached_property
    def reader(self) -> NetworkReader:
        """The network and the inputs, for posteriors over other layers than the last."""
        from bnncli.run.network_splits import NetworkReader

        return NetworkReader(self.run, self.trusts_code, self.opener)

    def seen_by(self, header: Header, split: Split) -> Split:
        """A split as the posterior with this header sees it: its features, or the network's inputs."""
        layers = header.meta.get("layers")
        return split if layers is None else self.reader.split(split, str(layers))

    def judged_on(self, header: Header, posterior: Any, split: Split) -> Any | None:
        """What stands for a posterior where a split judges it: itself, its folds, or nothing where it has fitted the split without any."""
        if not knows(header, split):
            return posterior
        return out_of_fold(header, posterior, split, self.target) if "num_folds" in header.meta else None

    @cached_property
    def detector_splits(self) -> list[Split]:
        """The splits that the combined score is fitted to, train and val; none where one of them cannot be used, or val is too small."""
        try:
            train, val = (load_split(self.run, name) for name in ("train", "val"))
        except MissingInput:
            return []
        except DataError as error:
            self.run.console.warn(f"no {DEFAULT_SCORE} score: {error.message}{error.advice}")
            return []
        return [train, val] if len(train.content.features) and len(val.content.features) >= FEWEST_ROWS else []

    @cached_property
    def detector(self) -> Combined | None:
        """The combined out-of-distribution score, fitted; None without its splits.

        What takes long to fit is kept beside the features, for later commands on the same features, seed and device. Processes
        that work in step fit it together.
        """
        from bnncli.evaluation.combined_score import REVISION, Combined, fit_cost

        if not self.detector_splits:
            return None
        run, (train, val) = self.run, self.detector_splits
        own: dict[str, Any] = {"layout": train.layout, "theta": train.head(), "device": run.device}
        digests = [split.source.content_digest for split in (train, val)]
        key = json_sha256([REVISION, *digests, run.compute.seed, run.device.type, torch.get_num_threads()])
        place = detector_file(run.folder.features("train"))
        known = read_known(place) if team() is None else {}
        if str(known.pop("key", "")) == key:
            return Combined.from_tensors({name: torch.from_numpy(part) for name, part in known.items()}, **own)
        labels = train.content.labels
        found = Combined.fit(
            train.stored,
            None if labels is None else torch.from_numpy(labels),
            val.stored,
            generator=run.stream("predict/neighbors"),
            **own,
        )
        is_writer = team() is None and is_leader() and not run.write.dry_run
        if is_writer and fit_cost(*train.content.features.shape) >= KEPT_FROM:
            arrays = {name: tensor.numpy() for name, tensor in found.to_tensors().items()}
            write_known(place, {"key": np.array(key), **arrays}, is_compressed=False)
        return found

    def combined_scores(self, split: Split) -> NDArray | None:
        """The combined score (N,) float32 of a split's features, the same for all posteriors; None without one."""
        digest = split.source.content_digest
        if self.detector is not None and digest not in self._combined:
            self._combined[digest] = self.detector.scores(split.stored).float().numpy()
        return self._combined.get(digest)

    def target(self, header: Header, prior: Prior) -> CurvedTarget:
        """The log posterior, under a prior, of the parameters that the posterior with this header is over."""
        key = f"{header.meta.get('layers')} of {fit_on(header)}"
        if key not in self._targets:
            self._targets[key] = self.seen_by(header, self.fitted(header)).target(Prior(1.0), self.run.device)
        return self._targets[key].with_prior(prior)


@dataclass
class Predictor:
    """Predicts with one posterior.

    Attributes:
        given: a posterior on the device in the place of the file's.
    """

    run: Run
    path: Path
    header: Header
    train: TrainData
    given: Any = None
    _ready: tuple[tuple[str, int | None], Ready] | None = None

    @cached_property
    def posterior(self) -> Any:
        """The posterior, on the device. Raises DataError where the file has been replaced since its header was read."""
        if self.given is not None:
            return self.given
        posterior, header = open_posterior(self.path)
        if header.content_digest != self.header.content_digest:
            message = f"{self.path} was replaced while bnncli read it"
            raise DataError(message, code="stale_input", hint="try again", path=self.path)
        if header.meta.get("layers") is not None:
            posterior = posterior.bound_to(self.train.reader.network_of(str(header.meta["layers"])))
        return posterior.to(self.run.device)

    @cached_property
    def mean_theta(self) -> Tensor:
        """theta (P,) that stands for the posterior."""
        return mean_theta(self.posterior, self.run.stream("predict/mean"))

    @cached_property
    def scored_theta(self) -> Tensor:
        """theta (P,) at which energy and the largest logit are taken, or draws (S, P) that average the logits."""
        if self.header.meta.get("layers") is None or self.posterior.type in LINEARISED:
            return self.mean_theta
        return drawn_theta(self.posterior, self.run.stream("predict/mean"))

    def ready(self, choice: IntegratorChoice) -> Ready:
        """The integrator, with what is the same for all features done; warns once of what it has to say.

        The last one is kept: draws may be large, and whoever changes the integrator is done with the one before.
        """
        key = choice.variant, choice.samples
        if self._ready is None or self._ready[0] != key:
            self._ready = None
            self._ready = key, self._prepare(choice)
        return self._ready[1]

    def _prepare(self, choice: IntegratorChoice) -> Ready:
        if choice.integrator.needs in OF_THETA or self.header.kind == "samples":
            used = None if choice.integrator.is_sampling and choice.samples is None else choice.samples or 0
            self.require_memory(used, option="\0samples\0" if choice.integrator.is_sampling else None)
        target = None
        if choice.integrator.needs_target:
            target = self.train.target(self.header, posterior_prior(self.path, self.header))
        ready = choice.integrator.prepare(
            self.posterior,
            num_samples=choice.samples,
            generator=self.run.stream("predict/draws"),
            target=target,
            progress=self.run.console,
        )
        warn(self.run, self.path.stem, ready.notes())
        return ready

    def require_memory(self, num_used: int | None, *, option: str | None) -> None:
        """Pass when so many draws of theta have room, all that are stored for None.

        Args:
            option: that says how many.

        Raises:
            DeviceError: they have none; names how many have.
        """
        require_draws(self.run, self.header, num_used=num_used, option=option)

    def predict_split(self, choice: IntegratorChoice, split: Split, *, keep_samples: bool = False) -> Predicted | None:
        """The predictions for a split, which `predict` stores: out of fold for rows that the posterior was fitted to.

        By all processes that share the command, as predict_together.

        Raises:
            DataError: the posterior was fitted to the split and has no folds.
            UsageError: it has, and the integrator weighs draws by all rows.
        """
        seen = self.train.seen_by(self.header, split)
        seen.check_fits(self.posterior.layout)
        if not knows(self.header, split):
            return self.predict_together(choice, seen.stored, keep_samples=keep_samples)
        folds = out_of_fold(self.header, self.posterior, split, self.train.target)
        if choice.integrator.needs_target:
            raise UsageError(
                f"{choice.name} weights its draws using all rows that {self.path.stem} was fitted to, and these "
                f"include {split.content.name}",
                code="unsupported_integrator",
                hint="use another integrator, or predict another split",
            )
        self.run.console.info(f"{self.path.stem}: predicting {split.content.name} out of fold, with {len(folds)} folds")
        found, order = [], []
        for posterior, rows in folds.parts():
            part = replace(self, given=posterior, _ready=None)
            found.append(part.predict_together(choice, seen.stored[rows], keep_samples=keep_samples))
            order.append(rows)
        parts = [part for part in found if part is not None]
        return scattered(parts, order) if parts else None

    def predict(self, choice: IntegratorChoice, features: Tensor, *, keep_samples: bool = False) -> Predicted:
        """The predictions for features (N, D), wherever they lie, of the posterior's own D, by a process that works alone."""
        found = self.predict_together(choice, features, keep_samples=keep_samples)
        assert found is not None
        return found

    def predict_together(
        self, choice: IntegratorChoice, features: Tensor, *, keep_samples: bool = False
    ) -> Predicted | None:
        """The same, by all processes that share the command, each for rows of its own; None on all but the first of them.

        Raises:
            NumericError: rows of any of them have no probabilities.
        """
        integrator, layout = self.ready(choice), self.posterior.layout
        groups = _groups_of(integrator)
        group_rows = None if groups is None else kept_rows(len(features), layout.num_classes, len(groups))
        blocks = [block for rows in own_rows(len(features), layout) for block in block_rows(features, rows)]
        task = self.run.console.task("predict", sum(rows.stop - rows.start for rows in blocks))

        def predicted(rows: slice) -> Rows:
            block = on_device(features[rows], self.run.device)
            draws: dict[str, Any] = {"num_samples": choice.samples}  # of one stream: the same draws for every block
            draws["generator"] = self.run.stream("predict/draws")
            if group_rows is not None:
                draws["group_rows"] = _rows_within(group_rows, rows)
            progress = PartProgress(self.run.console, task, len(block))
            prediction = integrator.predict(self.posterior, block, progress=progress, **draws)
            energy, max_logit = energy_and_max_logit(block, self.scored_theta, layout)
            kept = {"probs_samples": integrator.probs_of_draws(self.posterior, block)} if keep_samples else {}
            return rows_of(prediction, energy=energy, max_logit=max_logit, **kept)

        parts = brought_to_leader([predicted(rows) for rows in blocks])
        return None if parts is None else joined(parts, group_rows, integrator)


def _groups_of(integrator: Ready) -> DrawPartition | None:
    """The groups of an integrator's draws; None without Monte Carlo error, and for a single draw."""
    return integrator.groups if integrator.groups is not None and len(integrator.groups) > 1 else None


def _rows_within(rows: Tensor, block: slice) -> Tensor:
    """Those of the ascending rows (R,) that lie in a block, counted from its start."""
    first, last = torch.searchsorted(rows, torch.tensor([block.start, block.stop])).tolist()
    return rows[first:last] - block.start


def warn(run: Run, posterior: str, notes: dict[str, Any]) -> None:
    """Pass on what an integrator warned of, once a posterior."""
    text = f"{posterior}: {notes['warning']}" if notes.get("warning") else None
    if text is not None and text not in run.console.warnings:
        run.console.warn(text)


def warn_of_draws(run: Run, path: Path, header: Header, integrator: str) -> None:
    """Say so where draws predict with a Gaussian whose prior precision suits its mode alone."""
    metrics = header.meta.get("metrics", {})
    suits, entries = metrics.get("prior_precision_for"), metrics.get("val") or {}
    if suits != "plug-in" or integrator == suits:
        return
    nll = {
        name: f"{entries[key]['nll']:.4f}"
        for name, key in ((integrator, integrator), (suits, "laplace"))
        if key in entries
    }
    scores = f" (NLL {nll[integrator]}, {suits} {nll[suits]})" if len(nll) > 1 else ""
    run.console.warn(
        f"{path.stem}: {integrator} predicts val worse than {suits}{scores}, because the prior precision was "
        "chosen for the mode only. refine and hmc search for one that suits draws"
    )


def warn_of_few_draws(run: Run, path: Path, header: Header, samples: int | None) -> None:
    """Say so when more draws are asked for than a posterior that is draws has."""
    there = num_stored(header) if is_of_draws(header) else 0
    if samples is not None and 0 < there < samples:
        what = "draws" if header.kind == "samples" else "members"
        run.console.warn(f"{path.stem} has only {there} {what}, fewer than \0samples\0 {samples}; using all of them")
