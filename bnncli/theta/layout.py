"""What every layout of theta says: how many numbers there are, where those of each part lie, and which are biases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from bnncli.likelihoods import Likelihood

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.theta.head import HeadLayout
    from bnncli.theta.module_network import ModuleNetwork


class ParamPart(NamedTuple):
    """A weight or a bias in theta.

    Args:
        name: as posterior files have it.
        shape: of the tensor, which lies row-major.
        offset: its first place in theta.
        is_bias: whether its prior is that of the biases.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    is_bias: bool

    @property
    def place(self) -> slice:
        """Where it lies in theta."""
        return slice(self.offset, self.offset + math.prod(self.shape))


class ParamLayout(Protocol):
    """How parameters lie in theta (P,), whatever they are parameters of."""

    @property
    def num_params(self) -> int:
        """P."""

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """All of theta, in order."""

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it: name, shape and offset of each part."""

    def to_meta(self) -> dict[str, Any]:
        """Its sizes as JSON, from which a posterior that is read makes it again."""


class MatrixLayout(ParamLayout, Protocol):
    """How parameters lie that are one matrix (K, F): a row an output, a column a feature, the bias last where there is one."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def num_features(self) -> int:
        """D: F, less the bias."""

    @property
    def has_bias(self) -> bool:
        """Whether there is a column for the bias: F = D + 1."""

    def augment(self, theta: Tensor) -> Tensor:
        """The matrix (..., K, F) of theta (..., P)."""

    def flatten(self, augmented: Tensor) -> Tensor:
        """theta (..., P) of the matrix: the inverse of augment."""


# Given features (n, D): logits (K, n) near the middle of the draws, and a function that gives those of a slice of them, (s, K, n).
LogitMaker: TypeAlias = "Callable[[Tensor], tuple[Tensor, Callable[[slice], Tensor]]]"


class ClassifierLayout(ParamLayout, Protocol):
    """How parameters lie that turn features into logits: of a head, or of a network."""

    @property
    def num_features(self) -> int:
        """D."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def takes_any_length(self) -> bool:
        """Whether an input may have more or fewer numbers than D."""

    @property
    def likelihood_name(self) -> str | None:
        """The name of their likelihood, None where their number says it."""

    @property
    def likelihood(self) -> Likelihood:
        """What the K logits say of a label."""

    @property
    def num_classes(self) -> int:
        """Classes that the likelihood tells apart."""

    @property
    def widest(self) -> int:
        """The most numbers that an example has at once on its way to class probabilities."""

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of features (N, D) under theta (S, P)."""

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """The logits under each of theta (S, P), block by block; weights (S,) of the draws, None for equal ones."""

    def can_replace(self, head: HeadLayout) -> bool:
        """Whether a theta of this layout can stand where a network has such a head."""


class LogitLayout(ParamLayout, Protocol):
    """How parameters lie that turn inputs into logits, which are linear in them or can be linearised."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def head(self) -> HeadLayout | None:
        """The same as a last layer, where it is one: its logits' Gaussian has short ways."""

    @property
    def network(self) -> ModuleNetwork | None:
        """The module that makes the logits, whose layers can be looked at one by one; None where none does."""

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of inputs (N, ...) under theta (S, P)."""

    def jacobian(self, features: Tensor, theta: Tensor) -> Tensor:
        """The logits' derivatives by theta, (N, K, P), at inputs (N, ...) and one theta (P,)."""


def consecutive(parts: Sequence[tuple[str, tuple[int, ...], bool]]) -> tuple[ParamPart, ...]:
    """Parts that lie one behind the other, of their names, shapes, and whether they are biases."""
    offsets = [0]
    for _, shape, _ in parts:
        offsets.append(offsets[-1] + math.prod(shape))
    return tuple(
        ParamPart(name, shape, offset, is_bias) for (name, shape, is_bias), offset in zip(parts, offsets, strict=False)
    )


def parts_to_json(parts: Sequence[ParamPart]) -> list[dict[str, object]]:
    """Parts as posterior files state them: name, shape and offset of each."""
    return [{"name": part.name, "shape": list(part.shape), "offset": part.offset} for part in parts]
