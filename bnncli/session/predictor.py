"""Predict with one posterior: choose the integrator, open it once, and predict block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bnncli.artifacts.features import detector_file, read_known, write_known
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.evaluation.detectors import DEFAULT_SCORE, FEWEST_ROWS
from bnncli.integrators import (
    NO_LABELS,
    Integrator,
    Prediction,
    Ready,
    load_integrator,
    settings_of,
    supports_classes,
    variant,
)
from bnncli.integrators._moments import energy_and_max_logit, mean_theta, representative_draws
from bnncli.integrators._partitions import DrawPartition, group_mean_rows
from bnncli.lazy import torch
from bnncli.likelihoods import has_exclusive_classes, read_recorded_name
from bnncli.names import add_article
from bnncli.numerics.digests import json_sha256
from bnncli.numerics.dirichlet import ranked_lengths
from bnncli.options.predict import PredictOptions
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import Progress, Task
from bnncli.registry import has_attribute, names
from bnncli.session.inputs import (
    Split,
    block_rows,
    load_fitted,
    load_split,
    on_device,
    open_posterior,
    posterior_prior,
    require_draws,
)
from bnncli.session.out_of_fold import is_fitted_to, out_of_fold, read_fitted_splits
from bnncli.session.run import Run
from bnncli.system.memory import halving
from bnncli.system.workers import gather_at_leader, is_leader, team
from bnncli.targets.blocks import row_slices

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bnncli.evaluation.feature_scores import FittedViews
    from bnncli.session.network import RecordedNetwork
    from bnncli.session.network_splits import NetworkReader
    from bnncli.targets.target import CurvedTarget


ALL = "all"
ENSEMBLE = "ensemble"
OF_THETA = ("sample", "quasi_noise", "log_density")  # needs of integrators that use draws of theta
PLUG_IN_METHODS = ("map", "temperature", "calibration", "prune")


@dataclass(frozen=True)
class IntegratorChoice:
    """An integrator with its settings for one posterior.

    Attributes:
        samples: number of draws; None for integrators without draws, and for all draws of a posterior that consists of draws.
        top_k: rule, threshold and cap of the class ranking; None without one.
    """

    name: str
    integrator: Integrator
    samples: int | None
    top_k: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the integrator's settings by name."""
        return settings_of(self.integrator)

    @property
    def variant(self) -> str:
        """Return the integrator's name with its non-default settings."""
        return variant(self.name, self.settings)


@dataclass(frozen=True)
class RequestedIntegrators:
    """Integrators and settings requested for every posterior.

    Attributes:
        named: integrators by name; empty for each posterior's default.
        takes_all: whether every suitable integrator was requested.
        given: settings given.
        samples: number of draws.
        top_k: rule, threshold and cap of the ranking.
        keeps_samples: whether to keep each draw's probabilities.
    """

    named: tuple[str, ...]
    takes_all: bool
    given: dict[str, Any]
    samples: int | None
    top_k: dict[str, Any] | None
    keeps_samples: bool

    @classmethod
    def of(cls, options: PredictOptions, headers: Iterable[Header]) -> RequestedIntegrators:
        """Read the options for posteriors with these headers.

        Raises:
            UsageError: no chosen integrator has a given setting or --samples, or one refuses a value.
        """
        named = tuple(dict.fromkeys(name for name in options.integrator if name != ALL))
        takes_all, top_k = ALL in options.integrator, _top_k(options)
        asked = cls(named, takes_all, dict(options.settings), options.samples, top_k, options.keep_samples)
        chosen = {name for header in headers for name in asked._names(header)}
        asked._check(chosen)
        return asked

    def choices(self, header: Header, num_classes: int) -> tuple[list[IntegratorChoice], list[UsageError]]:
        """Return the integrators for one posterior, and an error for each requested one that does not fit."""
        found, refusals = [], []
        for name in self._names(header):
            integrator = self._build(name)
            why = _why_unfit(name, integrator, header, num_classes)
            if why is None:
                top_k = self.top_k if integrator.gives_dirichlet else None
                found.append(IntegratorChoice(name, integrator, self._samples(integrator, header), top_k))
            elif name in self.named or not self.takes_all:
                refusals.append(_refusal(why, header, num_classes))
        return found, refusals

    def _names(self, header: Header) -> list[str]:
        """Return the names of the requested integrators, or the posterior's default."""
        everything = [name for name in names("integrators") if name not in self.named] if self.takes_all else []
        is_plain = self.samples is None and not self.given and not self.keeps_samples
        default = default_integrator if is_plain else sampling_integrator
        return [*self.named, *everything] or [default(header)]

    def _build(self, name: str) -> Integrator:
        own = settings_of(load_integrator(name))
        chosen = {setting: value for setting, value in self.given.items() if setting in own}
        try:
            return load_integrator(name, **chosen)
        except ValueError as error:
            raise UsageError(f"\0integrator\0 {name}: {error}") from None

    def _samples(self, integrator: Integrator, header: Header) -> int | None:
        if not integrator.is_sampling:
            return None
        if is_of_draws(header):  # at most the stored draws
            return (
                None
                if self.samples is None or self.samples >= (count_stored_draws(header) or math.inf)
                else self.samples
            )
        is_last_layer = header.meta.get("layers") is None
        by_default = integrator.default_for(_num_params(header), is_last_layer=is_last_layer)
        return self.samples or header.meta.get("default_samples") or by_default

    def _check(self, chosen: set[str]) -> None:
        """Raise UsageError for a setting that no chosen integrator has or one refuses."""
        built = {name: self._build(name) for name in sorted(chosen)}
        for setting in self.given:
            if not any(setting in settings_of(integrator) for integrator in built.values()):
                having = [name for name in names("integrators") if setting in settings_of(load_integrator(name))]
                raise UsageError(
                    f"\0{setting}\0: {_format_with_verb(built)} no such setting; these integrators have it: {', '.join(having)}",
                    hint=f"add \0integrator\0 {having[0]}",
                )
        if self.samples is not None and not any(integrator.is_sampling for integrator in built.values()):
            having = [name for name in names("integrators") if load_integrator(name).is_sampling]
            raise UsageError(
                f"\0samples\0: {_format_with_verb(built)} no draws; these integrators draw: {', '.join(having)}"
            )
        if self.top_k is not None and not any(integrator.gives_dirichlet for integrator in built.values()):
            having = [name for name in names("integrators") if load_integrator(name).gives_dirichlet]
            message = (
                f"\0top_k\0: {_format_with_verb(built)} no Dirichlet; these integrators have one: {', '.join(having)}"
            )
            raise UsageError(message, hint=f"add \0integrator\0 {having[0]}")


def default_integrator(header: Header) -> str:
    """Return a posterior's default integrator: the one that predicted val best after fitting, or its method's own."""
    preferred = header.meta.get("metrics", {}).get("recommended_integrator") if follows_val(type_of(header)) else None
    return preferred or sampling_integrator(header)


def follows_val(posterior_type: str) -> bool:
    """Return whether the default integrator follows val; not for a sampler's draws, the reference for others."""
    return posterior_type != "samples"


def sampling_integrator(header: Header) -> str:
    """Return the integrator of a posterior's method regardless of val: by draws unless it is a point."""
    return default_integrator_of(str(header.meta.get("method")), is_last_layer=header.meta.get("layers") is None)


def default_integrator_of(method: str, *, is_last_layer: bool = True) -> str:
    """Return the default integrator for a method (laplace, map, ...).

    A Gaussian over other layers uses the network linearised at its mean (Immer et al. 2021, arXiv:2008.08400): draws
    of its weights in the network itself leave the region where the Gaussian is accurate.
    """
    if method in PLUG_IN_METHODS:
        return "plug-in"
    return "logit-mc" if method == "laplace" and not is_last_layer else "mc"


def type_of(header: Header) -> str:
    """Return the posterior's type: gaussian, samples, ..."""
    return "samples" if header.kind == "samples" else str(header.meta.get("type"))


def is_of_draws(header: Header) -> bool:
    """Return whether a posterior consists of draws, or networks, that predictions use unchanged."""
    return type_of(header) in ("samples", ENSEMBLE)


def count_stored_draws(header: Header) -> int:
    """Return the number of draws a posterior consists of; 0 if its header does not say."""
    metrics = header.meta.get("metrics", {})
    if type_of(header) == ENSEMBLE:
        return int(metrics.get("num_members", 0))
    return int(metrics.get("chains", 0) * metrics.get("draws", 0))


def _num_params(header: Header) -> int:
    """Return P of a posterior."""
    return sum(math.prod(part["shape"]) for part in header.meta.get("param_layout", []))


def _top_k(options: PredictOptions) -> dict[str, Any] | None:
    """Return the requested ranking with defaults filled in."""
    if options.top_k is None:
        return None
    given = {"rule": options.top_k, "threshold": options.top_k_threshold, "cap": options.top_k_cap}
    return {
        **(ranked_lengths.__kwdefaults__ or {}),
        **{name: value for name, value in given.items() if value is not None},
    }


def _why_unfit(name: str, integrator: Integrator, header: Header, num_classes: int) -> str | None:
    """Return why the integrator cannot predict with this posterior, or None if it can."""
    posterior_type = type_of(header)
    if not has_attribute("posteriors", posterior_type, integrator.needs):
        return f"\0integrator\0 {variant(name, settings_of(integrator))} does not work for {add_article(posterior_type)} posterior ({header.path.stem})"
    if posterior_type == "samples" and integrator.needs == "center" and header.meta.get("layers") is not None:
        why = "draws over other layers may come from several modes, and their mean is not a useful network"
        return f"\0integrator\0 {name} does not work for {header.path.stem}: {why}"
    is_exclusive = has_exclusive_classes(read_recorded_name(header.meta))
    if not supports_classes(integrator, num_classes, is_exclusive=is_exclusive):
        if not is_exclusive:
            return f"\0integrator\0 {name} {NO_LABELS}"
        return f"\0integrator\0 {name} supports at most {integrator.max_classes} classes; got {num_classes}"
    return None


def _refusal(why: str, header: Header, num_classes: int) -> UsageError:
    every = {name: load_integrator(name) for name in names("integrators")}
    fitting = [name for name, one in every.items() if _why_unfit(name, one, header, num_classes) is None]
    return UsageError(
        why,
        hint=f"integrators for {add_article(type_of(header))} posterior: {', '.join(fitting)}",
        code="unsupported_integrator",
    )


def _format_with_verb(chosen: Iterable[str]) -> str:
    """Return names with the verb: "mc has", "mc and probit have"."""
    found = list(chosen)
    return f"{' and '.join(found)} {'has' if len(found) == 1 else 'have'}"


Rows: TypeAlias = "dict[str, Tensor]"
# Size of the slices that processes share: numbers under one draw, and fewest and most examples. Products with a head are
# efficient with hundreds of examples; for a network, each draw is a pass and few examples may already be expensive.
_NUMBERS, _ROWS = 2**20, (64, 512)
_ROW_AXIS = {"group_probs": 1, "probs_samples": 1}  # 0 for the others


@dataclass(frozen=True)
class IntegratorPredictions:
    """Predictions of one posterior by one integrator for N examples, on the CPU.

    Attributes:
        prediction: probabilities and related arrays, with group means at `group_rows` if the draws have groups.
        energy: (N,) float32, -log sum exp of the mean logits. max_logit: (N,) float32, the largest of these.
        group_rows: (R,) int64, ascending; None without groups.
        probs_samples: (S, N, C) float16 for every draw, if kept.
        integrator: the prepared integrator: its number of draws, level of intervals and notes.
    """

    prediction: Prediction
    energy: Tensor
    max_logit: Tensor
    group_rows: Tensor | None
    probs_samples: Tensor | None
    integrator: Ready


def divide_rows(num_rows: int, layout: ClassifierLayout) -> list[slice]:
    """Return the slices of a split's rows to predict separately with this layout, whichever process does it."""
    return row_slices(num_rows, most=min(max(_NUMBERS // layout.widest, _ROWS[0]), _ROWS[1]), team=team())


def select_own_rows(num_rows: int, layout: ClassifierLayout) -> list[slice]:
    """Return the consecutive slices this process predicts; may be empty."""
    found, others = divide_rows(num_rows, layout), team()
    return found if others is None else [found[place] for place in others.share(len(found))]


def rows_of(prediction: Prediction, **beside: Tensor) -> Rows:
    """Return a prediction of some rows and related arrays as tensors by name, on the CPU."""
    found = {spec.name: getattr(prediction, spec.name) for spec in fields(prediction)}
    return {name: tensor.cpu() for name, tensor in (found | beside).items() if tensor is not None}


def concatenate_predictions(
    parts: Sequence[Rows], group_rows: Tensor | None, integrator: Ready
) -> IntegratorPredictions:
    """Concatenate predictions of consecutive rows.

    Args:
        parts: from `rows_of`, at least one.
        group_rows: (R,) of all rows.
    """
    found = {name: torch.cat([part[name] for part in parts], dim=_ROW_AXIS.get(name, 0)) for name in parts[0]}
    energy, max_logit, probs_samples = found.pop("energy"), found.pop("max_logit"), found.pop("probs_samples", None)
    return IntegratorPredictions(Prediction(**found), energy, max_logit, group_rows, probs_samples, integrator)


def merge_disjoint_rows(parts: Sequence[IntegratorPredictions], rows: Sequence[Tensor]) -> IntegratorPredictions:
    """Merge predictions of disjoint rows into one, in row order.

    Args:
        rows: (n,) ascending, for each part.
    """
    last, order = parts[-1], torch.cat(list(rows)).argsort()
    groups = [own[part.group_rows] for part, own in zip(parts, rows, strict=True) if part.group_rows is not None]
    group_rows, group_order = torch.cat(groups).sort() if groups else (None, order)
    found: Rows = {}
    for spec in fields(Prediction):
        values = [getattr(part.prediction, spec.name) for part in parts]
        if values[0] is not None:
            axis = _ROW_AXIS.get(spec.name, 0)
            found[spec.name] = torch.cat(values, axis).index_select(
                axis, group_order if spec.name == "group_probs" else order
            )
    samples = [part.probs_samples for part in parts if part.probs_samples is not None]
    return IntegratorPredictions(
        Prediction(**found),
        torch.cat([part.energy for part in parts])[order],
        torch.cat([part.max_logit for part in parts])[order],
        group_rows,
        torch.cat(samples, dim=1)[:, order] if samples else None,
        last.integrator,
    )


@dataclass(frozen=True)
class PartProgress:
    """Progress of a part, shown as progress of the whole.

    Args:
        outer: progress display.
        whole: the task of all parts.
        size: of this part, in units of the whole.
    """

    outer: Progress
    whole: Task
    size: int

    def task(self, name: str, total: int) -> Task:
        """Return the task of this part, scaling `total` steps to its size."""
        return _Part(self.whole, self.size, total)

    def warn(self, text: str) -> None:
        """Forward a warning."""
        self.outer.warn(text)


@dataclass
class _Part:
    whole: Task
    size: int
    total: int
    done: int = 0

    def advance(self, amount: int = 1, note: str = "") -> None:
        before = self._shown
        self.done += amount
        self.whole.advance(self._shown - before, note)

    @property
    def _shown(self) -> int:
        return self.size * self.done // max(1, self.total)


KEPT_FROM = 2e9  # multiplications to fit the combined score, about half a second on one core

LINEARISED = ("gaussian", "linear-draws")  # posteriors that predict with the network linearised at their mean


@dataclass
class TrainData:
    """The training split, for integrators that need the target; loaded and moved on first use.

    Attributes:
        trusts_code: whether recorded code may run again, for posteriors over other layers.
        opener: returns the network if it is open elsewhere.
    """

    run: Run
    trusts_code: bool = False
    opener: Callable[[], RecordedNetwork] | None = None
    _splits: dict[str, Split] = field(default_factory=dict)
    _targets: dict[str, CurvedTarget] = field(default_factory=dict)
    _combined: dict[str, NDArray] = field(default_factory=dict)

    def fitted(self, header: Header) -> Split:
        """Return the rows a posterior was fitted to.

        Raises:
            MissingInput, DataError: there are none, or they have no labels.
        """
        wanted = read_fitted_splits(header)
        if wanted not in self._splits:
            self._splits[wanted] = load_fitted(self.run, wanted)
        return self._splits[wanted]

    @cached_property
    def reader(self) -> NetworkReader:
        """Return the network and inputs, for posteriors over other layers."""
        from bnncli.session.network_splits import NetworkReader

        return NetworkReader(self.run, self.trusts_code, self.opener)

    def seen_by(self, header: Header, split: Split) -> Split:
        """Return a split as a posterior takes it: its features, or the network's inputs."""
        layers = header.meta.get("layers")
        return split if layers is None else self.reader.split(split, str(layers))

    def judged_on(self, header: Header, posterior: Any, split: Split) -> Any | None:
        """Return the posterior, or its folds if it was fitted to the split; None if it has no folds."""
        if not is_fitted_to(header, split):
            return posterior
        return out_of_fold(header, posterior, split, self.target) if "num_folds" in header.meta else None

    @cached_property
    def detector_splits(self) -> list[Split]:
        """Return the splits for the combined score, train and val; empty if one is unusable or val is too small."""
        try:
            train, val = (load_split(self.run, name) for name in ("train", "val"))
        except MissingInput:
            return []
        except DataError as error:
            self.run.console.warn(f"no {DEFAULT_SCORE} score: {error.message}{error.advice}")
            return []
        return [train, val] if len(train.content.features) and len(val.content.features) >= FEWEST_ROWS else []

    @cached_property
    def detector(self) -> FittedViews | None:
        """Return the fitted combined out-of-distribution score; None without its splits.

        Slow fits are cached beside the features, for later commands with the same features, seed and device. Parallel
        workers fit it together.
        """
        from bnncli.evaluation.feature_scores import REVISION, FittedViews, fit_cost

        if not self.detector_splits:
            return None
        run, (train, val) = self.run, self.detector_splits
        own: dict[str, Any] = {"layout": train.layout, "theta": train.head(), "device": run.device}
        digests = [split.source.content_digest for split in (train, val)]
        key = json_sha256([REVISION, *digests, run.compute.seed, run.device.type, torch.get_num_threads()])
        place = detector_file(run.folder.features("train"))
        known = read_known(place) if team() is None else {}
        if str(known.pop("key", "")) == key:
            return FittedViews.from_tensors({name: torch.from_numpy(part) for name, part in known.items()}, **own)
        labels = train.content.labels
        found = FittedViews.fit(
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
        """Return the combined score (N,) float32 of a split's features, the same for all posteriors; None without one."""
        digest = split.source.content_digest
        if self.detector is not None and digest not in self._combined:
            self._combined[digest] = self.detector.scores(split.stored).float().numpy()
        return self._combined.get(digest)

    def target(self, header: Header, prior: Prior) -> CurvedTarget:
        """Return the log posterior of the parameters of a posterior, under a prior."""
        key = f"{header.meta.get('layers')} of {read_fitted_splits(header)}"
        if key not in self._targets:
            self._targets[key] = self.seen_by(header, self.fitted(header)).target(Prior(1.0), self.run.device)
        return self._targets[key].with_prior(prior)


@dataclass
class Predictor:
    """Predict with one posterior.

    Attributes:
        given: a posterior on the device to use instead of the file's.
    """

    run: Run
    path: Path
    header: Header
    train: TrainData
    given: Any = None
    _ready: tuple[tuple[str, int | None], Ready] | None = None

    @cached_property
    def posterior(self) -> Any:
        """Return the posterior on the device.

        Raises:
            DataError: the file was replaced after its header was read.
        """
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
        """Return theta (P,) at the posterior's centre."""
        return mean_theta(self.posterior, self.run.stream("predict/mean"))

    @cached_property
    def scored_theta(self) -> Tensor:
        """Return theta (P,) for energy and largest logit, or draws (S, P) to average the logits over."""
        if self.header.meta.get("layers") is None or self.posterior.type in LINEARISED:
            return self.mean_theta
        return representative_draws(self.posterior, self.run.stream("predict/mean"))

    def ready(self, choice: IntegratorChoice) -> Ready:
        """Return the integrator with its per-posterior work done; warn once of its notes.

        Only the last one is kept: draws may be large.
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
        """Check that this many draws of theta fit in memory; None for all stored ones.

        Args:
            option: that sets the number.

        Raises:
            DeviceError: they do not fit; says how many do.
        """
        require_draws(self.run, self.header, num_used=num_used, option=option)

    def predict_split(
        self, choice: IntegratorChoice, split: Split, *, keep_samples: bool = False
    ) -> IntegratorPredictions | None:
        """Return the predictions of a split that `predict` stores, out of fold for rows the posterior was fitted to.

        Shared by all workers of the command, see predict_together.

        Raises:
            DataError: the posterior was fitted to the split and has no folds.
            UsageError: it was, and the integrator weights draws by all rows.
        """
        seen = self.train.seen_by(self.header, split)
        seen.check_fits(self.posterior.layout)
        if not is_fitted_to(self.header, split):
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
        return merge_disjoint_rows(parts, order) if parts else None

    def predict(
        self, choice: IntegratorChoice, features: Tensor, *, keep_samples: bool = False
    ) -> IntegratorPredictions:
        """Return the predictions for features (N, D), on any device, computed by this process only."""
        found = self.predict_together(choice, features, keep_samples=keep_samples)
        assert found is not None
        return found

    def predict_together(
        self, choice: IntegratorChoice, features: Tensor, *, keep_samples: bool = False
    ) -> IntegratorPredictions | None:
        """Return the predictions for features (N, D), computed by all workers; None except on the first worker.

        Raises:
            NumericError: rows of a worker have no probabilities.
        """
        integrator, layout = self.ready(choice), self.posterior.layout
        groups = _groups_of(integrator)
        group_rows = None if groups is None else group_mean_rows(len(features), layout.num_classes, len(groups))
        blocks = [block for rows in select_own_rows(len(features), layout) for block in block_rows(features, rows)]
        task = self.run.console.task("predict", sum(rows.stop - rows.start for rows in blocks))

        def predicted(rows: slice) -> Rows:
            block = on_device(features[rows], self.run.device)
            draws: dict[str, Any] = {"num_samples": choice.samples}  # same draws for every block
            draws["generator"] = self.run.stream("predict/draws")
            if group_rows is not None:
                draws["group_rows"] = _rows_within(group_rows, rows)
            progress = PartProgress(self.run.console, task, len(block))
            prediction = integrator.predict(self.posterior, block, progress=progress, **draws)
            energy, max_logit = energy_and_max_logit(block, self.scored_theta, layout)
            kept = {"probs_samples": integrator.probs_of_draws(self.posterior, block)} if keep_samples else {}
            return rows_of(prediction, energy=energy, max_logit=max_logit, **kept)

        parts = gather_at_leader([part for rows in blocks for part in halving(predicted, rows)])
        return None if parts is None else concatenate_predictions(parts, group_rows, integrator)


def _groups_of(integrator: Ready) -> DrawPartition | None:
    """Return the groups of an integrator's draws; None for a single draw and without Monte Carlo error."""
    return integrator.groups if integrator.groups is not None and len(integrator.groups) > 1 else None


def _rows_within(rows: Tensor, block: slice) -> Tensor:
    """Return the ascending rows (R,) within a block, relative to its start."""
    first, last = torch.searchsorted(rows, torch.tensor([block.start, block.stop])).tolist()
    return rows[first:last] - block.start


def warn(run: Run, posterior: str, notes: dict[str, Any]) -> None:
    """Report an integrator's warnings, once per posterior."""
    text = f"{posterior}: {notes['warning']}" if notes.get("warning") else None
    if text is not None and text not in run.console.warnings:
        run.console.warn(text)


def warn_of_draws(run: Run, path: Path, header: Header, integrator: str) -> None:
    """Warn if draws are taken from a Gaussian whose prior precision only suits its mode."""
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
    """Warn if more draws are requested than the posterior consists of."""
    there = count_stored_draws(header) if is_of_draws(header) else 0
    if samples is not None and 0 < there < samples:
        what = "draws" if header.kind == "samples" else "members"
        run.console.warn(f"{path.stem} has only {there} {what}, fewer than \0samples\0 {samples}; using all of them")
