"""Integrators turn a posterior and features into class probabilities; the files here are the choices.

Each is a frozen dataclass derived from Integrator, or from SamplingIntegrator where it draws; these two and Ready
declare every hook with its default. Its fields are its settings, options of the same names, which its file declares in
SETTINGS; settings other than the default become part of the prediction's name (`variant`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bnncli.errors import NumericError, UsageError
from bnncli.integrators._partitions import LEVEL, DrawPartition
from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.progress import SILENT, Progress
from bnncli.registry import check_name, load_class, names
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

# Logits held at once. On a CPU a chunk that stays in the cache is fastest (2 MB of float32 measured best); on a GPU a
# chunk must be large enough to fill the device.
_CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**26}
_FEWEST_EXAMPLES = 64  # one by one, texts take three times as long (a BERT of six layers, one core)


class HasLayout(Protocol):
    """A posterior over theta; capabilities come on top."""

    @property
    def layout(self) -> ClassifierLayout:
        """Return the layout of theta."""


_SHAPES = {"probs": "N C", "entropy": "N", "mutual_info": "N", "interval": "N 2", "log_concentration": "N C"}
_SHAPES["group_probs"] = "G R C"  # the only one whose rows are its second axis


@dataclass(frozen=True)
class Prediction:
    """Class probabilities of a split.

    Args:
        probs: (N, C) float32, rows sum to one, unless each class is a label by itself; with a single logit C = 2 and
            the columns are [1 - p, p].
        entropy: (N,) float32, nats, of the mean probabilities; summed over the labels in multi-label data.
        mutual_info: (N,) float32, nats: entropy of the mean minus mean entropy of the draws, at least 0; None
          where the integrator has no draws.
        interval: (N, 2) float32, the central 95 % interval of the predicted class's probability, or a narrower one with
          few draws (`interval_level`); (N, C, 2), of each label, in multi-label data; None where the integrator has no
          distribution of probabilities.
        log_concentration: (N, C) float32, logarithms of the parameters of a Dirichlet over the probabilities; (N, C,
            2),
          of each label's Beta, its absence first, in multi-label data; None where the integrator has none.
        group_probs: (G, R, C) float32, mean probabilities of each of G groups of the draws at R of the N examples; None
          where they were not asked for, or there are no draws to group.

    Raises:
        NumericError: the probabilities are not finite.
    """

    probs: Tensor
    entropy: Tensor
    mutual_info: Tensor | None = None
    interval: Tensor | None = None
    log_concentration: Tensor | None = None
    group_probs: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = {name: (getattr(self, name), shape) for name, shape in _SHAPES.items()}
        if self.interval is not None and self.interval.ndim == 3:  # of each label
            shapes |= {"interval": (self.interval, "N C 2"), "log_concentration": (self.log_concentration, "N C 2")}
        check_shapes(**{name: pair for name, pair in shapes.items() if pair[0] is not None})
        # A sum of probabilities is finite exactly when all are, and needs no (N, C) mask.
        if not torch.isfinite(self.probs.sum()):
            num_bad = int((~torch.isfinite(self.probs)).any(dim=1).sum())
            raise NumericError(
                f"class probabilities are not finite for {num_bad} of {len(self.probs)} examples",
                hint="the posterior or the features are not finite; run bnncli verify to find the file",
            )

    @classmethod
    def from_probs(cls, probs: Tensor, *, is_exclusive: bool = True) -> Prediction:
        """Return the prediction of an integrator without draws from probs (N, C)."""
        return cls(probs=probs.float(), entropy=entropy(probs, is_exclusive=is_exclusive).float())


def join(parts: Sequence[Prediction]) -> Prediction:
    """Concatenate the predictions of consecutive blocks of examples, on the CPU."""
    joined: dict[str, Tensor] = {}
    for name in _SHAPES:
        tensors = [tensor.cpu() for part in parts if (tensor := getattr(part, name)) is not None]
        if tensors:
            joined[name] = torch.cat(tensors, dim=_SHAPES[name].split().index("R") if "R" in _SHAPES[name] else 0)
    return Prediction(**joined)


class Ready(Protocol):
    """A prepared integrator, which predicts block by block."""

    groups: DrawPartition | None = None
    """Groups of the draws; their means at `group_rows` give the Monte Carlo error. None without draws."""

    @property
    def num_draws(self) -> int | None:
        """Return S; None without draws."""
        return None

    @property
    def interval_level(self) -> float | None:
        """Return the level of the intervals: 0.95, less with few draws; None with a single one."""
        return LEVEL

    def notes(self) -> dict[str, Any]:
        """Return facts beside the predictions: `warning` (a line, or None) and `pareto_k`, where they exist."""
        return {}

    def predict(
        self,
        posterior: Any,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities of features (N, D) under the posterior."""

    def probs_of_draws(self, posterior: Any, features: Tensor) -> Tensor:
        """Return class probabilities of each draw, (S, N, C) float16 on the CPU, whose mean over S is what `predict` gives.

        Raises:
            UsageError: there are no draws, or they are weighted, so that their mean is not the prediction.
        """
        raise UsageError(
            "\0keep_samples\0 needs draws with equal weights",
            hint="omit it, or use \0integrator\0 mc",
            code="unsupported_integrator",
        )


class Integrator(Ready, Protocol):
    """A way of turning a posterior into class probabilities; without draws it needs no preparation."""

    is_sampling: ClassVar[bool] = False
    """Whether it draws, and so takes a number of draws and a seed."""
    needs_target: ClassVar[bool] = False
    """Whether `prepare` takes the log posterior on the training split."""
    gives_dirichlet: ClassVar[bool] = False
    """Whether its predictions have a log concentration, which ranks the classes."""
    max_classes: ClassVar[float] = math.inf
    """The most mutually exclusive classes that it supports."""
    takes_labels: ClassVar[bool] = True
    """Whether it supports multi-label data."""

    @property
    def needs(self) -> str:
        """Return the capability of a posterior that it uses.

        `center` (a representative theta), `sample` or `quasi_noise` (draws of theta), `log_density` (of theta),
        `logit_marginals` (exact mean and variance of each logit), `logit_moments` (mean and covariance of the logits)
        or `logit_root` (mean and a root of the covariance).
        """

    def default_for(self, num_params: int, *, is_last_layer: bool = True) -> int | None:
        """Return the default number of draws for theta (P,) of a last layer or of a network; None without draws."""
        return None

    def prepare(
        self,
        posterior: Any,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        target: Any = None,
        progress: Progress = SILENT,
    ) -> Ready:
        """Do once what is the same for all blocks of features.

        Args:
            posterior: one with the capability it needs.
            num_samples: S; None for its default, or for all draws of a posterior with stored draws.
            generator: makes the draws.
            target: log posterior on the training split, where `needs_target`.
            progress: of slow preparations.
        """
        return self


class SamplingIntegrator(Integrator, Protocol):
    """An integrator that draws: `prepare` makes the draws, and what it returns predicts."""

    is_sampling: ClassVar[bool] = True

    @property
    def default_samples(self) -> int:
        """Return the default number of draws."""

    def default_for(self, num_params: int, *, is_last_layer: bool = True) -> int:
        """Return the default number of draws, reduced where theta is large or each draw is a pass of a network."""
        return self.default_samples

    def predict(
        self,
        posterior: Any,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities of features (N, D): those of `prepare`, for a single block."""
        ready = self.prepare(posterior, num_samples=num_samples, generator=generator)
        return ready.predict(posterior, features, num_samples=num_samples, generator=generator, progress=progress)


def load_integrator(name: str, **settings: Any) -> Integrator:
    """Return the integrator called `name` with these settings. Raises UsageError with the choices when there is none."""
    check_name("integrators", name, option="\0integrator\0")
    integrator: Integrator = load_class("integrators", name)(**settings)
    return integrator


def settings_of(integrator: Integrator) -> dict[str, Any]:
    """Return the settings of an integrator by name, for JSON."""
    return {spec.name: getattr(integrator, spec.name) for spec in fields(integrator) if spec.init}  # type: ignore[arg-type]


def variant(name: str, settings: dict[str, Any]) -> str:
    """Return the name of predictions with these settings: the integrator's name, then each setting that is not the default."""
    parts = [name]
    for setting, default in settings_of(load_integrator(name)).items():
        value = settings.get(setting, default)
        if value != default:
            parts.append(
                setting.replace("_", "-") if value is True else f"no-{setting}" if value is False else str(value)
            )
    return "-".join(parts)


def supports(name: str, posterior: HasLayout) -> bool:
    """Return whether the posterior has what the integrator called `name` needs, and not too many classes for it."""
    integrator = load_integrator(name)
    likelihood = posterior.layout.likelihood
    has_capability = getattr(posterior, integrator.needs, None) is not None
    return has_capability and supports_classes(integrator, likelihood.num_classes, is_exclusive=likelihood.is_exclusive)


def supports_classes(integrator: Integrator, num_classes: int, *, is_exclusive: bool) -> bool:
    """Return whether the integrator supports this many classes, exclusive or not."""
    return num_classes <= integrator.max_classes if is_exclusive else integrator.takes_labels


NO_LABELS = "needs mutually exclusive classes, but the data are multi-label"


def require_support(name: str, posterior: HasLayout) -> None:
    """Check that the integrator called `name` works for this posterior.

    Raises:
        UsageError: naming what the posterior lacks, or has too many of, and the integrators that do work for it.
    """
    if supports(name, posterior):
        return
    integrator, num_classes = load_integrator(name), posterior.layout.num_classes
    kind = getattr(posterior, "type", type(posterior).__name__.lower())
    whose = f"a {kind} posterior"
    if getattr(posterior, integrator.needs, None) is None:
        problem = f"needs a posterior with {integrator.needs}; {whose} has none"
    elif not posterior.layout.likelihood.is_exclusive:
        problem = NO_LABELS
        whose += " with several labels"
    else:
        problem = f"supports at most {integrator.max_classes} classes, but the posterior has {num_classes}"
        whose += f" with {num_classes} classes"
    choices = [choice for choice in names("integrators") if supports(choice, posterior)]
    raise UsageError(
        f"\0integrator\0 {name} {problem}",
        hint=f"integrators for {whose}: {', '.join(choices) or 'none'}",
        code="unsupported_integrator",
    )


def entropy(probs: Tensor, *, is_exclusive: bool = True) -> Tensor:
    """Return the entropy (N,) float64 in nats of probs (N, C); 0 log 0 counts as 0.

    Args:
        is_exclusive: whether the classes exclude each other; else each is a binary variable, and their entropies are
            added.
    """
    result = probs.new_empty(probs.shape[0], dtype=torch.float64)
    for rows in slices(probs.shape[0], max(1, chunk_budget(probs) // probs.shape[1])):
        wide = probs[rows].double()
        result[rows] = torch.special.entr(wide).sum(dim=1)
        if not is_exclusive:
            result[rows] += torch.special.entr(1 - wide).sum(dim=1)
    return result


def chunk_budget(tensor: Tensor) -> int:
    """Return how many logits to hold at once on the tensor's device."""
    return _CHUNK_LOGITS.get(tensor.device.type, _CHUNK_LOGITS["cuda"])


def examples_at_once(tensor: Tensor, width: int) -> int:
    """Return how many examples of `width` numbers go through at once: enough for fast products, however large the network is."""
    return max(_FEWEST_EXAMPLES, chunk_budget(tensor) // width)


def slices(total: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size`, covering range(total)."""
    return (slice(begin, min(begin + size, total)) for begin in range(0, total, size))


def check_features(layout: ClassifierLayout, features: Tensor) -> None:
    """Check that features are (N, D) with the layout's D, or any D for texts. Raises ValueError otherwise."""
    check_shapes(features=(features, "N D" if layout.takes_any_length else f"N {layout.num_features}"))
