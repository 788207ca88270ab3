"""What a posterior predicts for features, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.artifacts.headers import Header
from bnncli.errors import UsageError
from bnncli.opened.session import checked_count, checked_text
from bnncli.options.parts import settings_of
from bnncli.options.predict import PredictOptions
from bnncli.run.integrator_choice import AskedIntegrators, IntegratorChoice
from bnncli.run.predictor import Predictor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


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
    """The options of predict that the keywords of a call are, values checked.

    Raises:
        UsageError: an integrator or a setting that there is not, or a value that it does not take.
    """
    if integrator is not None:
        registry.check_name("integrators", checked_text("integrator", integrator), option="\0integrator\0")
    if samples is not None:
        samples = checked_count("samples", samples)
    known = settings_of("integrators")
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise UsageError(f"expected an integrator setting ({', '.join(known)}); got {unknown[0]!r}")
    given = {name: _value(name, value, known[name].type) for name, value in settings.items() if value is not None}
    given = {name: value for name, value in given.items() if value is not False}
    return PredictOptions(integrator=[] if integrator is None else [integrator], samples=samples, settings=given)


def _value(name: str, value: object, kind: type) -> Any:
    """A setting's value in its own type. Raises UsageError unless it is of that type."""
    if kind is bool:
        if not isinstance(value, bool):
            raise UsageError(f"\0{name}\0: expected True or False; got {value!r}"[:300])
        return value
    if kind is str:
        return checked_text(name, value)
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        expected = "a whole number" if kind is int else "a number"
        raise UsageError(f"\0{name}\0: expected {expected}; got {value!r}"[:300])
    return kind(value)


def choose(options: PredictOptions, header: Header, num_classes: int) -> IntegratorChoice:
    """The integrator that predicts with a posterior: the one named, else the posterior's default.

    Raises:
        UsageError: it does not work for this posterior, or has not a setting that was given.
    """
    choices, refusals = AskedIntegrators.of(options, [header]).choices(header, num_classes)
    if refusals:
        raise refusals[0]
    return choices[0]


def predict(
    predictor: Predictor, choice: IntegratorChoice, features: Tensor, classes: tuple[str, ...]
) -> ClassProbabilities:
    """The probabilities for features (N, D)."""
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
