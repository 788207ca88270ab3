"""A posterior of an opened run: its mean, and draws of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.numerics.random import stream
from bnncli.opened.messages import errors_in_python
from bnncli.opened.session import Session, checked_count, checked_number
from bnncli.run.integrator_choice import num_stored
from bnncli.run.predictor import Predictor

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.layouts import ClassifierLayout


class OpenedPosterior:
    """A distribution over the parameters theta (P,), loaded to the run's device.

    Attributes:
        name: its name in the run.
    """

    def __init__(self, session: Session, predictor: Predictor) -> None:
        self._session, self._predictor = session, predictor
        self.name = predictor.path.stem

    def __repr__(self) -> str:
        return f"<posterior {self.name!r}: {self.type}, {self.layout.num_params} parameters>"

    @property
    def type(self) -> str:
        """Its type: point, gaussian, flow, samples, latent-binary or sparse."""
        return str(self._predictor.posterior.type)

    @property
    def method(self) -> str:
        """The method that created it: map, laplace, refine, hmc, ..."""
        return str(self._predictor.header.meta.get("method"))

    @property
    def layout(self) -> ClassifierLayout:
        """The layout of theta: its `parts` have the name, shape and place of each weight and bias."""
        layout: ClassifierLayout = self._predictor.posterior.layout
        return layout

    @property
    def mean(self) -> Tensor:
        """The mean of theta, (P,), in the stored type (float32 or float64); of 256 draws if it has no closed form (a flow)."""
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
            num = checked_count("num", num)
            chosen = run.compute.seed if seed is None else checked_number("seed", seed, least=0)
            header = self._predictor.header
            stored = num_stored(header) if header.kind == "samples" else 0
            if 0 < stored < num:
                run.console.warn(f"asked for {num} draws, but {self.name} has only {stored}; returning all of them")
            self._predictor.require_memory(min(num, stored or num), option="num")
            draws: Tensor = self._predictor.posterior.sample(num, stream(chosen, "predict/draws"))
            return draws.clone() if 0 < stored <= num else draws  # else they are those that the posterior keeps

    def by_name(self, theta: Tensor) -> dict[str, Tensor]:
        """Split draws (..., P) into weights and biases by name, (..., *shape), as views.

        Raises:
            DataError: theta has another shape.
        """
        with errors_in_python():
            shape, num_params = tuple(getattr(theta, "shape", ())), self.layout.num_params
            if not isinstance(theta, torch.Tensor) or shape[-1:] != (num_params,):
                got = f"shape {shape}" if isinstance(theta, torch.Tensor) else type(theta).__name__
                raise DataError(f"theta: expected a tensor (..., {num_params}); got {got}", code="bad_shape")
        return {part.name: theta[..., part.place].unflatten(-1, part.shape) for part in self.layout.parts}
