"""A posterior of an opened run: its mean, draws of its weights, and predictions for features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli import registry
from bnncli.api.session import Session, check_count, check_number, check_text, check_typed, convert_errors_to_python
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.numerics.random import stream
from bnncli.options.declaration import settings_of
from bnncli.options.predict import PredictOptions
from bnncli.posteriors import draw
from bnncli.session.predictor import IntegratorChoice, Predictor, RequestedIntegrators, count_stored_draws

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bnncli.parameters.layouts import ClassifierLayout


@dataclass(frozen=True, eq=False)
class ClassProbabilities:
    """Class probabilities of N examples as NumPy arrays, as `bnncli predict` stores them.

    Attributes:
        probs: (N, C) float32, rows sum to one unless an example has several labels; columns are `classes`.
        entropy: (N,) float32, nats, of probs.
        mutual_info: (N,) float32, nats: disagreement between draws; None without draws.
        interval: (N, 2) float32, central interval of the most probable class's probability, or (N, C, 2) with several
            labels; None if the integrator has none.
        interval_level: the level of the intervals: 0.95, less with few draws; None without intervals.
        classes: names of the C classes.
        draws: number of draws; None without draws.
        posterior: name of the posterior.
        integrator: name of the integrator, with settings that are not the default.
    """

    probs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    mutual_info: NDArray[np.float32] | None
    interval: NDArray[np.float32] | None
    interval_level: float | None
    classes: tuple[str, ...]
    draws: int | None
    posterior: str
    integrator: str

    def __repr__(self) -> str:
        return f"<{self.posterior} by {self.integrator}: {len(self.probs)} examples, {len(self.classes)} classes>"


def check_request(integrator: str | None, samples: int | None, settings: Mapping[str, Any]) -> PredictOptions:
    """Return the options of predict for a call's keywords, with checked values.

    Raises:
        UsageError: an integrator or setting does not exist, or a value is not allowed.
    """
    if integrator is not None:
        registry.check_name("integrators", check_text("integrator", integrator), option="\0integrator\0")
    if samples is not None:
        samples = check_count("samples", samples)
    known = settings_of("integrators")
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise UsageError(f"expected an integrator setting ({', '.join(known)}); got {unknown[0]!r}")
    given = {name: check_typed(name, value, known[name].type) for name, value in settings.items() if value is not None}
    given = {name: value for name, value in given.items() if value is not False}
    return PredictOptions(integrator=[] if integrator is None else [integrator], samples=samples, settings=given)


def choose_predictor(options: PredictOptions, header: Header, num_classes: int) -> IntegratorChoice:
    """Return the named integrator, or the posterior's default.

    Raises:
        UsageError: it does not fit this posterior, or lacks a given setting.
    """
    choices, refusals = RequestedIntegrators.of(options, [header]).choices(header, num_classes)
    if refusals:
        raise refusals[0]
    return choices[0]


def predict(
    predictor: Predictor, choice: IntegratorChoice, features: Tensor, classes: tuple[str, ...]
) -> ClassProbabilities:
    """Return the probabilities for features (N, D)."""
    predicted = predictor.predict(choice, features)
    found, ready = predicted.prediction, predicted.integrator
    return ClassProbabilities(
        probs=found.probs.numpy(),
        entropy=found.entropy.numpy(),
        mutual_info=None if found.mutual_info is None else found.mutual_info.numpy(),
        interval=None if found.interval is None else found.interval.numpy(),
        interval_level=None if found.interval is None else ready.interval_level,
        classes=classes,
        draws=ready.num_draws,
        posterior=predictor.path.stem,
        integrator=choice.variant,
    )


class OpenedPosterior:
    """A distribution over the parameters theta (P,), loaded to the run's device.

    Attributes:
        name: its name in the run.
    """

    def __init__(self, session: Session, predictor: Predictor, again: Callable[[], OpenedPosterior]) -> None:
        self._session, self._predictor, self._again = session, predictor, again
        self.name = predictor.path.stem

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to load the posterior again, to pickle it for worker processes; its files stay where they are."""
        return _load_again, (self._again, self._predictor.header.content_digest)

    def __repr__(self) -> str:
        return f"<posterior {self.name!r}: {self.type}, {self.layout.num_params} parameters>"

    @property
    def type(self) -> str:
        """Type of the posterior: point, gaussian, flow, samples, latent-binary or sparse."""
        return str(self._predictor.posterior.type)

    @property
    def method(self) -> str:
        """Method that created the posterior: map, laplace, refine, hmc, ..."""
        return str(self._predictor.header.meta.get("method"))

    @property
    def layout(self) -> ClassifierLayout:
        """Layout of theta: its `parts` have the name, shape and position of each weight and bias."""
        layout: ClassifierLayout = self._predictor.posterior.layout
        return layout

    @property
    def mean(self) -> Tensor:
        """Mean of theta, (P,), in the stored type (float32 or float64); from 256 draws if it has no closed form (a flow)."""
        with self._session.computing():
            return self._predictor.mean_theta.clone()

    def sample(self, num: int, *, seed: int | None = None) -> Tensor:
        """Return draws of theta, (S, P) float32.

        With the run's seed, the default, they are the draws that `predict` uses with as many samples (mc, without qmc). A
        posterior that consists of draws returns its first `num`, or all with a warning if it has fewer.

        Raises:
            UsageError: num or seed is not a whole number, or too small.
            DeviceError: they do not fit into memory.
        """
        with self._session.computing() as run:
            num = check_count("num", num)
            chosen = run.compute.seed if seed is None else check_number("seed", seed, least=0)
            header = self._predictor.header
            stored = count_stored_draws(header) if header.kind == "samples" else 0
            if 0 < stored < num:
                run.console.warn(f"asked for {num} draws, but {self.name} has only {stored}; returning all of them")
            self._predictor.require_memory(min(num, stored or num), option="num")
            draws = draw(self._predictor.posterior, num, stream(chosen, "predict/draws"))
            return draws.clone() if 0 < stored <= num else draws  # never the posterior's own tensor

    def by_name(self, theta: Tensor) -> dict[str, Tensor]:
        """Split draws (..., P) into weights and biases by name, (..., *shape), as views.

        Raises:
            DataError: theta has another shape.
        """
        with convert_errors_to_python():
            shape, num_params = tuple(getattr(theta, "shape", ())), self.layout.num_params
            if not isinstance(theta, torch.Tensor) or shape[-1:] != (num_params,):
                got = f"shape {shape}" if isinstance(theta, torch.Tensor) else type(theta).__name__
                raise DataError(f"theta: expected a tensor (..., {num_params}); got {got}", code="bad_shape")
        return {part.name: theta[..., part.place].unflatten(-1, part.shape) for part in self.layout.parts}


@dataclass(frozen=True, eq=False, repr=False)
class LoadedPredictor:
    """A function that predicts as `OpenedRun.predict` does, without reading files: it does not see later changes of the run.

    It can be pickled for worker processes, which read the files once more.

    Attributes:
        posterior: name of the posterior.
        integrator: name of the integrator, with settings that are not the default.
        classes: names of the C classes.
    """

    classes: tuple[str, ...]
    _session: Session
    _predictor: Predictor
    _choice: IntegratorChoice
    _read: Callable[[Any], Tensor]
    _again: Callable[[], LoadedPredictor]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to load the predictor again."""
        return _load_again, (self._again, self._predictor.header.content_digest)

    def __repr__(self) -> str:
        return f"<{self.posterior} by {self.integrator}, loaded: {len(self.classes)} classes>"

    @property
    def posterior(self) -> str:
        """Name of the posterior."""
        return self._predictor.path.stem

    @property
    def integrator(self) -> str:
        """Name of the integrator, with settings that are not the default."""
        return self._choice.variant

    def __call__(self, x: Any) -> ClassProbabilities:
        """Return class probabilities of N examples.

        Args:
            x: as in `OpenedRun.predict`, or a DataLoader, whose batches may be tuples that start with the inputs.

        Raises:
            DataError: x is neither features nor inputs, or not finite.
            UsageError: the DataLoader has no batches.
            Untrusted: the network is your own code, and `open` was called without `model`.
        """
        if not _is_loader(x):
            return self._of(x)
        parts = [self._of(batch) for batch in _inputs_of(x)]
        if not parts:
            raise UsageError("x: expected batches; the DataLoader yields none")
        return _concatenate_batches(parts)

    def _of(self, x: Any) -> ClassProbabilities:
        with self._session.computing_as_loaded():
            return predict(self._predictor, self._choice, self._read(x), self.classes)


def _load_again(
    again: Callable[[], OpenedPosterior | LoadedPredictor], digest: str
) -> OpenedPosterior | LoadedPredictor:
    """Load what was pickled. Raises DataError if the posterior's file has changed since."""
    found = again()
    if found._predictor.header.content_digest != digest:
        path = found._predictor.path
        raise DataError(f"{path} has changed since it was pickled", code="stale_input", path=path)
    return found


def _is_loader(x: object) -> bool:
    from torch.utils.data import DataLoader

    return isinstance(x, DataLoader)


def _inputs_of(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield batch[0] if isinstance(batch, tuple | list) and len(batch) and not isinstance(batch[0], str) else batch


def _concatenate_batches(parts: list[ClassProbabilities]) -> ClassProbabilities:
    """Concatenate the examples of all batches."""
    first = parts[0]
    found = {spec.name: getattr(first, spec.name) for spec in fields(first)}
    for name, value in found.items():
        if isinstance(value, np.ndarray):
            found[name] = np.concatenate([getattr(part, name) for part in parts])
    return ClassProbabilities(**found)
