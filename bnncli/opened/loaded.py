"""A predictor loaded once, for services."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.errors import UsageError
from bnncli.opened.predictions import ClassProbabilities, predict
from bnncli.opened.session import Session
from bnncli.run.integrator_choice import IntegratorChoice
from bnncli.run.predictor import Predictor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class LoadedPredictor:
    """A function that predicts as `OpenedRun.predict` does, without reading files: it does not see later changes of the run.

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

    def __repr__(self) -> str:
        return f"<{self.posterior} by {self.integrator}, loaded: {len(self.classes)} classes>"

    @property
    def posterior(self) -> str:
        """Its name."""
        return self._predictor.path.stem

    @property
    def integrator(self) -> str:
        """Its name, with settings that are not the default."""
        return self._choice.variant

    def __call__(self, x: Any) -> ClassProbabilities:
        """Return class probabilities of N examples.

        Args:
            x: as in `OpenedRun.predict`, or a DataLoader, whose batches may be tuples that start with the inputs.

        Raises:
            DataError: x is neither features nor inputs, or not finite.
            UsageError: a DataLoader without batches.
            Untrusted: the network is code, and `open` was not told so.
        """
        if not _is_loader(x):
            return self._of(x)
        parts = [self._of(batch) for batch in _inputs_of(x)]
        if not parts:
            raise UsageError("x: expected batches; the DataLoader yields none")
        return _joined(parts)

    def _of(self, x: Any) -> ClassProbabilities:
        with self._session.computing_as_loaded():
            return predict(self._predictor, self._choice, self._read(x), self.classes)


def _is_loader(x: object) -> bool:
    from torch.utils.data import DataLoader

    return isinstance(x, DataLoader)


def _inputs_of(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield batch[0] if isinstance(batch, tuple | list) and len(batch) and not isinstance(batch[0], str) else batch


def _joined(parts: list[ClassProbabilities]) -> ClassProbabilities:
    """The examples of all batches, one after another."""
    first = parts[0]
    found = {spec.name: getattr(first, spec.name) for spec in fields(first)}
    for name, value in found.items():
        if isinstance(value, np.ndarray):
            found[name] = np.concatenate([getattr(part, name) for part in parts])
    return ClassProbabilities(**found)
