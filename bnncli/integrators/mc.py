"""Monte Carlo prediction: the mean of the softmax over draws of theta, converging to the exact integral.

Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, eq. (1). Quasi-random draws: see numerics/random.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.errors import UsageError
from bnncli.integrators import HasLayout, Prediction, Ready, SamplingIntegrator, check_features, require_support
from bnncli.integrators import _draws as _averages
from bnncli.integrators._draws import ThetaDraws, average
from bnncli.integrators._partitions import DrawPartition, group_ends, interval_level, scramble_ends
from bnncli.lazy import torch
from bnncli.numerics.random import balance_warning
from bnncli.options.declaration import QMC, Draws
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

FEWEST_DRAWS = 32  # by default, however large the head
_NETWORK_DRAWS, _NETWORK_QUASI = 200, 128  # defaults where theta covers more layers than the last
_KEPT_NUMBERS = 2**24  # of draws whose copy as a matrix is kept between predictions
_MOST_ELEMENTS = 2**26  # of all default draws: 256 MiB, and 15 seconds for 10,000 examples on two cores


def affordable_draws(wanted: int, num_params: int) -> int:
    """Return a default number of draws of theta (P,): `wanted`, halved until they fit, but at least FEWEST_DRAWS."""
    while wanted > FEWEST_DRAWS and wanted * num_params > _MOST_ELEMENTS:
        wanted //= 2
    return max(wanted, FEWEST_DRAWS)


class CanSample(HasLayout, Protocol):
    """A posterior that draws theta."""

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return draws of theta (S, P)."""


SETTINGS = {"qmc": QMC}
DRAWS = Draws(1000, quasi=256)


@dataclass(frozen=True)
class Mc(SamplingIntegrator):
    """Mean of the softmax over S draws of theta, made once and shared by all examples.

    Args:
        qmc: draw theta from scrambled Sobol points; for a posterior made from standard normals (gaussian, flow).
    """

    qmc: bool = QMC.default

    @property
    def needs(self) -> str:
        """Return the capability of the posterior that it uses."""
        return "quasi_noise" if self.qmc else "sample"

    @property
    def default_samples(self) -> int:
        """Return 1,000; for Sobol points 256, eight scrambles of a power of two.

        With these the Monte Carlo error of NLL, Brier score, accuracy and AUROC (largest probability) is below a tenth
        of the sampling error of 10,000 examples: at most 0.09, the accuracy of ResNet-20 with a diagonal
        (benchmarks/draws.py:
        LeNet-5 on Fashion-MNIST, prior precision 510, full, kron, diag and a radial flow; ResNet-20 on CIFAR-10, 30,
        full and diag). The paper's 20 draws leave up to 0.48. ECE falls far more slowly, as examples change bins: 0.11
        to 0.30 of its sampling error with 1,000 draws, 0.10 with 256 Sobol points of the full ResNet-20. Weak priors on
        wide heads and few examples would need 20,000 draws: with 1,000, accuracy is at 0.25 to 0.29 and NLL at 0.11 to
        0.19 (1,280 features, 1,200 examples).
        """
        return (DRAWS.quasi if self.qmc else DRAWS.default) or DRAWS.default

    def default_for(self, num_params: int, *, is_last_layer: bool = True) -> int:
        """Return the default for theta of P numbers: fewer where all draws would take much memory and time.

        Each draw of a network is a pass of all its layers over all examples. 200 of them leave sqrt(5) times the error
        of 1,000.
        """
        of_network = _NETWORK_QUASI if self.qmc else _NETWORK_DRAWS
        return affordable_draws(self.default_samples if is_last_layer else of_network, num_params)

    def prepare(
        self,
        posterior: CanSample,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        target: Any = None,
        progress: Progress = SILENT,
    ) -> DrawnMc:
        """Draw theta, for any number of blocks of features.

        Args:
            posterior: one that can sample.
            num_samples: S; None takes every stored draw, where the posterior has stored draws.
            generator: makes the draws.
            target: not used.
            progress: not used.

        Raises:
            UsageError: the posterior cannot sample, or not with qmc, or no draw was asked for.
        """
        require_support("mc", posterior)
        check_num_samples(num_samples)
        if self.qmc:
            size = num_samples or self.default_samples
            theta, ends = quasi_sample(posterior, size, generator), scramble_ends(size)
            return DrawnMc(posterior.layout, theta, DrawPartition.of(ends), warning=balance_warning(size, len(ends)))
        stack: Any = posterior if hasattr(posterior, "weights") else None
        if stack is not None and (num_samples is None or num_samples >= stack.num_stored):
            whole = DrawPartition.of([stack.num_stored])  # all members are used: there is no Monte Carlo error
            return DrawnMc(stack.layout, stack.members.float(), whole, stack.weights)
        theta, starts = sample_in_runs(posterior, num_samples, generator)
        if hasattr(posterior, "sample_whole") and posterior.sample_whole(num_samples):
            # all draws are used: there is no Monte Carlo error
            return DrawnMc(posterior.layout, theta, DrawPartition.of([len(theta)]))
        return DrawnMc(posterior.layout, theta, DrawPartition.of(group_ends(len(theta), starts=starts)))


@dataclass(frozen=True)
class DrawnMc(Ready):
    """Draws of theta, ready to predict any features.

    Args:
        layout: of theta.
        theta: (S, P).
        groups: of the draws.
        weights: (S,) float64, summing to one; None for equal ones.
        warning: for the user, about the draws.
    """

    layout: ClassifierLayout
    theta: Tensor
    groups: DrawPartition = field()  # has no default, although the protocol has
    weights: Tensor | None = None
    warning: str | None = None

    @property
    def num_draws(self) -> int:
        """Return S."""
        return self.theta.shape[0]

    @property
    def interval_level(self) -> float | None:
        """Return the level of the interval; None with a single draw."""
        return interval_level(self.num_draws, self.weights)

    def notes(self) -> dict[str, Any]:
        """Return the warning."""
        return {"warning": self.warning}

    def predict(
        self,
        posterior: CanSample,
        features: Tensor,
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        group_rows: Tensor | None = None,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities of features (N, D), and group means at the requested rows (R,).

        num_samples and generator are not used.
        """
        weights = None if self.weights is None else self.weights.to(features.device)
        rows = {"groups": self.groups, "group_rows": group_rows}
        return average(self._draws(features), features, weights=weights, progress=progress, **rows)  # type: ignore[arg-type]

    def probs_of_draws(self, posterior: CanSample, features: Tensor) -> Tensor:
        """Return class probabilities of each draw, (S, N, C) float16 on the CPU; their mean over S is what `predict` gives."""
        return _averages.probs_of_draws(self._draws(features), features)

    @cached_property
    def _stacked(self) -> ThetaDraws:
        return ThetaDraws.of(self.layout, self.theta, self.weights)

    def _draws(self, features: Tensor) -> ThetaDraws:
        check_features(self.layout, features)
        is_alike = (features.dtype, features.device) == (self.theta.dtype, self.theta.device)
        if is_alike and self.theta.numel() <= _KEPT_NUMBERS:
            return self._stacked
        return ThetaDraws.of(self.layout, self.theta.to(features), self.weights)


def check_num_samples(num_samples: int | None) -> None:
    """Check that a number of draws is at least one. Raises UsageError otherwise."""
    if num_samples is not None and num_samples < 1:
        raise UsageError(f"Monte Carlo prediction needs at least one draw, got {num_samples}")


def sample_in_runs(posterior: Any, num_samples: int | None, generator: torch.Generator) -> tuple[Tensor, Sequence[int]]:
    """Return draws of theta (S, P), and the starts of independent runs (chains) among them; no starts where all are independent."""
    if hasattr(posterior, "sample_in_runs"):
        found: tuple[Tensor, Sequence[int]] = posterior.sample_in_runs(num_samples, generator)
        return found
    return posterior.sample(num_samples, generator), ()


def quasi_sample(posterior: Any, num_samples: int, generator: torch.Generator) -> Tensor:
    """Return draws of theta (S, P) float32 from Sobol points, scrambled anew in each group of `scramble_ends`.

    Raises:
        UsageError: the posterior is not made from standard normals.
    """
    if not hasattr(posterior, "quasi_noise"):
        kind = getattr(posterior, "type", type(posterior).__name__.lower())
        raise UsageError(
            f"\0qmc\0 needs a posterior built from standard normals (gaussian, flow), got {kind}",
            hint="omit \0qmc\0",
            code="unsupported_integrator",
        )
    sizes = [end - begin for begin, end in pairwise((0, *scramble_ends(num_samples)))]
    noise = torch.cat([posterior.quasi_noise(size, generator) for size in sizes])
    theta: Tensor = posterior.from_noise(noise)[0].float()
    return theta
