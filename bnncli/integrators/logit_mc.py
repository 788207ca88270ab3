"""Monte Carlo prediction in logit space: K numbers per draw instead of P, from the same distribution.

Under a Gaussian over the last layer the logits of an example are exactly N(m, J Sigma J^T), so the integral of the
softmax is over K dimensions: draws are m_n + R_n z_n with R_n a root of the covariance and z_n standard normal, made of
points that all examples share and a shift of the example's own (`numerics.row_noise`). Each example's draws have their
exact distribution, and the errors of different examples are independent, so a mean over examples, such as a score, has
almost no Monte Carlo error; the draws say nothing about several examples jointly. K dimensions are few enough for
scrambled Sobol points to pay off. A draw takes K D operations an example with theta, K^2 here (K where the logits are
independent): with far more classes than features, draws of theta are cheaper.

A whole network is linearised at the mean m of theta. Its logits' covariance J Sigma J^T takes K products with J^T an
example; with more classes than draws, draws theta_s and their products J (theta_s - m), in forward mode, are cheaper,
and the logits f + J (theta_s - m) have the same distribution at each example, and across examples that of the
linearised network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bnncli.integrators import HasLayout, Prediction, Ready, SamplingIntegrator, check_features, require_support
from bnncli.integrators import _draws as _averages
from bnncli.integrators._draws import BlockDraws, LogitDraws, average
from bnncli.integrators._partitions import DrawPartition, group_ends, interval_level, scramble_ends
from bnncli.integrators.mc import check_num_samples, quasi_sample
from bnncli.lazy import torch
from bnncli.numerics.random import balance_warning, quasi_normal, row_shifts, shifted_normal, uniform_points
from bnncli.options.declaration import QMC, Draws
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.posteriors import standard_normal
from bnncli.progress import SILENT, Progress
from bnncli.structures.logits import LogitGaussian, LogitRoot
from bnncli.system.memory import require

if TYPE_CHECKING:
    from torch import Tensor


class HasLogitRoot(HasLayout, Protocol):
    """A posterior under which the logits are normal with a known mean and root of the covariance."""

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        """Return the mean (n, K) of the logits of features (n, D), and roots of their covariances."""

    @property
    def logits(self) -> LogitGaussian:
        """Return mean and roots as functions of inputs."""

    def pushes(self, num_draws: int) -> bool:
        """Return whether this many draws of the logits are cheaper from draws of theta, by `logits.push`."""


SETTINGS = {"qmc": QMC}
# Eight scrambles of 32 Sobol points. The Monte Carlo error is then, on ResNet-20 with a full covariance, below a tenth
# of the sampling error of 10,000 examples for all scores but ECE, for which it is about a third (benchmarks/draws.py).
DRAWS = Draws(256)


@dataclass(frozen=True)
class LogitMc(SamplingIntegrator):
    """Mean of the softmax over S draws of each example's logits.

    Args:
        qmc: draw the normals from scrambled Sobol points.
    """

    needs: ClassVar[str] = "logit_root"
    default_samples: ClassVar[int] = DRAWS.default
    qmc: bool = QMC.default

    def prepare(
        self,
        posterior: HasLogitRoot,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        target: Any = None,
        progress: Progress = SILENT,
    ) -> DrawnLogitMc:
        """Draw the normals, or theta, for any number of blocks of features.

        Args:
            posterior: one whose logits are normal (gaussian, point, linear-draws).
            num_samples: S; None for 256, or for all draws of a posterior that has stored ones.
            generator: makes the draws.
            target: not used.
            progress: not used.

        Raises:
            UsageError: the posterior's logits have no known distribution, or no draw was asked for.
        """
        require_support("logit-mc", posterior)
        check_num_samples(num_samples)
        stored = getattr(posterior, "num_stored", None)
        size, num_outputs = num_samples or stored or self.default_samples, posterior.layout.num_outputs
        ends = scramble_ends(size) if self.qmc else group_ends(size)
        if posterior.pushes(size):
            return self._of_theta(posterior, ends, generator)
        if self.qmc:
            sizes = [end - begin for begin, end in pairwise((0, *ends))]
            noise = torch.cat([quasi_normal(part, num_outputs, generator) for part in sizes])
            return DrawnLogitMc(noise, DrawPartition.of(ends), warning=balance_warning(size, len(ends)))
        noise = standard_normal(size, num_outputs, generator, torch.device("cpu"))
        return DrawnLogitMc(noise, DrawPartition.of(ends))

    def _of_theta(self, posterior: Any, ends: Sequence[int], generator: torch.Generator) -> DrawnLogitMc:
        """Draw theta, as many draws as the last of the groups' ends."""
        size = ends[-1]
        require(4 * size * posterior.layout.num_params, "cpu", what=f"{size} draws", hint="lower \0samples\0")
        theta = quasi_sample(posterior, size, generator) if self.qmc else posterior.sample(size, generator)
        deviations = (theta - posterior.center).float()
        warning = balance_warning(size, len(ends)) if self.qmc else None
        return DrawnLogitMc(deviations, DrawPartition.of(ends), warning, is_of_theta=True)


@dataclass(frozen=True)
class DrawnLogitMc(Ready):
    """Draws, ready to predict any features.

    Args:
        noise: standard normals (S, K), float64; or deviations of theta from its mean, (S, P) float32.
        groups: of the draws.
        warning: for the user, about the draws.
        is_of_theta: whether `noise` holds deviations of theta.
        is_shared: whether all examples have the same normals, as in an exported file, which cannot hash its inputs.
    """

    noise: Tensor
    groups: DrawPartition = field()  # has no default, although the protocol has
    warning: str | None = None
    is_of_theta: bool = False
    is_shared: bool = False

    @property
    def num_draws(self) -> int:
        """Return S."""
        return self.noise.shape[0]

    @property
    def interval_level(self) -> float | None:
        """Return the level of the interval; None with a single draw."""
        return interval_level(self.num_draws)

    def notes(self) -> dict[str, Any]:
        """Return the warning."""
        return {"warning": self.warning}

    def predict(
        self,
        posterior: HasLogitRoot,
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
        draws = self._draws(posterior, features)
        return average(draws, features, groups=self.groups, group_rows=group_rows, progress=progress)

    def probs_of_draws(self, posterior: HasLogitRoot, features: Tensor) -> Tensor:
        """Return class probabilities of each draw, (S, N, C) float16 on the CPU; their mean over S is what `predict` gives."""
        return _averages.probs_of_draws(self._draws(posterior, features), features)

    def _draws(self, posterior: HasLogitRoot, features: Tensor) -> LogitDraws:
        check_features(posterior.layout, features)
        if self.is_of_theta:
            return _PushedLogits(posterior, self.noise.to(features))
        if self.is_shared:
            return _NormalLogits(posterior, self.noise.to(features))
        return _ShiftedLogits(posterior, uniform_points(self.noise).to(features.device))


@dataclass(frozen=True)
class _NormalLogits:
    """Draws of the logits from normals (S, K) that all examples share."""

    posterior: HasLogitRoot
    noise: Tensor

    @property
    def layout(self) -> ClassifierLayout:
        """Return the layout of theta."""
        return self.posterior.layout

    @property
    def num_draws(self) -> int:
        """Return S."""
        return self.noise.shape[0]

    @property
    def width(self) -> int:
        """Return the number of classes: no draw is a pass of a network."""
        return self.layout.num_classes

    def at(self, features: Tensor) -> BlockDraws:
        """Return the draws at features (n, D)."""
        mean, root = self.posterior.logit_root(features)
        center = mean.T.contiguous()
        return BlockDraws(center, lambda some: root.apply(self.noise[some]).add_(center))


class _ShiftedLogits(_NormalLogits):
    """Draws of the logits from uniform points (S, K) that each example shifts."""

    def at(self, features: Tensor) -> BlockDraws:
        """Return the draws at features (n, D)."""
        mean, root = self.posterior.logit_root(features)
        center, shifts = mean.T.contiguous(), row_shifts(features, mean.shape[1])
        return BlockDraws(
            center, lambda some: root.apply(shifted_normal(self.noise[some], shifts, center)).add_(center)
        )


class _PushedLogits(_NormalLogits):
    """Draws of a linearised network's logits from deviations of theta (S, P)."""

    @property
    def width(self) -> int:
        """Return the numbers of a forward pass."""
        return self.layout.widest

    def at(self, features: Tensor) -> BlockDraws:
        """Return the draws at features (n, D)."""
        gaussian = self.posterior.logits
        center = gaussian.mean(features).T.contiguous()

        def logits(some: slice) -> Tensor:
            assert gaussian.push is not None
            return gaussian.push(features, self.noise[some]).transpose(1, 2) + center

        return BlockDraws(center, logits)
