"""The interface of log posteriors over theta: what samplers, flows, the ELBO and importance weights need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.likelihoods import Likelihood


def label_shape(likelihood: Likelihood) -> str:
    """Of the labels of N examples, as check_shapes takes it: (N,), or (N, C) where there are several an example."""
    return "N" if likelihood.is_exclusive else f"N {likelihood.num_classes}"


def check_labels(labels: Tensor, likelihood: Likelihood) -> None:
    """Pass when there are labels, of this shape, and each is a class, or 0 or 1 where there are several an example.

    Raises:
        DataError: there are none, or one is something else.
    """
    if len(labels) == 0:
        raise DataError("the training split has no examples")
    lowest, highest = int(labels.min()), int(labels.max())
    most = likelihood.num_classes - 1 if likelihood.is_exclusive else 1
    if lowest < 0 or highest > most:
        raise DataError(
            f"expected labels from 0 to {most}, got {lowest} to {highest}",
            hint="are these labels from another data set?",
        )


PRODUCT_PASSES = 2.0  # of a product with the Hessian: there and back


@dataclass
class Tally:
    """What was counted.

    Args:
        passes: gradients of the log likelihood of all examples at one theta.
    """

    passes: float = 0.0


_ASKING: ContextVar[Tally | None] = ContextVar("gradient passes", default=None)


@contextmanager
def counted_passes(share: float = 1.0) -> Iterator[Tally]:
    """Within, passes are counted; a count within a count has what is within it alone, and both have that.

    Args:
        share: of the examples that are read within: so much of each pass the outer count has.
    """
    outer, own = _ASKING.get(), Tally()
    token = _ASKING.set(own)
    try:
        yield own
    finally:
        _ASKING.reset(token)
        if outer is not None:
            outer.passes += share * own.passes


def count_passes(passes: float) -> None:
    """So many more."""
    tally = _ASKING.get()
    if tally is not None:
        tally.passes += passes


def counting_products(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same product of a Hessian with vectors (M, P), counted."""

    def counted(vectors: Tensor) -> Tensor:
        count_passes(PRODUCT_PASSES * len(vectors))
        return product(vectors)

    return counted


def value_with_gradient(theta: Tensor, value_and_grad: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Return the values (S,) at theta (S, P) of a function that computes its own gradient, differentiable by autograd."""
    values: Tensor = _own_gradient().apply(theta, value_and_grad)
    return values


@cache
def _own_gradient() -> Any:
    """Return the autograd function; it cannot be defined before torch is imported."""

    class OwnGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, theta: Tensor, value_and_grad: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
            value, gradient = value_and_grad(theta.detach())
            ctx.save_for_backward(gradient.to(theta.dtype))
            return value

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
            (gradient,) = ctx.saved_tensors
            return upstream.to(gradient.dtype).unsqueeze(-1) * gradient, None

    return OwnGradient


class LogJoint(Protocol):
    """Something whose log density over theta has a gradient: a target, or what a minibatch tells of it."""

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint (S,), nats, and its gradient (S, P), for theta (S, P)."""


class WholeTarget(LogJoint, Protocol):
    """An unnormalised log posterior over theta (P,) as samplers see it, all data at once: the log likelihood of N examples plus the log prior.

    Values and gradients are float64.
    """

    @property
    def layout(self) -> ParamLayout:
        """How theta lies."""

    @property
    def device(self) -> torch.device:
        """Where the work is done, and its results are."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products."""

    @property
    def num_examples(self) -> int:
        """N."""

    @property
    def is_resident(self) -> bool:
        """Whether all that a gradient reads is on the device, where a step can be captured as a graph."""

    @property
    def is_capturable(self) -> bool:
        """Whether a step on what is on the device may be captured as a graph at all: not where code of others runs in it."""

    def log_joint(self, theta: Tensor) -> Tensor:
        """Log likelihood plus log prior, (S,), nats, for theta (S, P); autograd may pass through it."""


class Target(WholeTarget, Protocol):
    """The same with its examples, of which a minibatch can be taken."""

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """What a minibatch reads of the examples in index (B,): tensors (B, ...) on the device."""

    def minibatch(self, *examples: Tensor) -> LogJoint:
        """The target as some of its examples tell it, without bias: one of `examples`' tensors, or rows of them."""


class Curvature(Protocol):
    """One structure of a target's H, the Hessian of its summed negative log likelihood, without the prior."""

    is_exact: bool
    """Whether this is all of the Hessian, not a part of it or an approximation."""
    fixed: tuple[str, ...]
    """Names of the parts that are the same at every theta; with any, `hessian` takes `before`, parts of the same examples."""

    def hessian(self, target: Any, theta: Tensor) -> dict[str, Tensor]:
        """H at theta (P,), float64, in parts `hessian.<structure>` or `hessian.<structure>.<part>`, as in posterior files."""


class CurvedTarget(Target, Protocol):
    """A target of which a mode and Gaussians can be found: what it knows of its second derivatives, and its prior.

    A generalised Gauss-Newton matrix may stand wherever the Hessian is spoken of: steps need it positive definite.
    """

    @property
    def prior(self) -> Prior:
        """The part of the log joint that Gaussians add to H, and a search for its precision replaces."""

    @property
    def is_concave(self) -> bool:
        """Whether the log joint is concave under every prior: all starts lead to one mode, those of other priors too."""

    @property
    def rough_structure(self) -> str:
        """The structure of H that is made in one pass over the data and in little memory, where the full one is large."""

    def with_prior(self, prior: Prior) -> Self:
        """The same data under another prior."""

    def log_joint_and_grad(self, theta: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Log joint (S,), nats, and its gradient (S, P), for theta (S, P), by products in dtype; the target's by default."""

    def hessian_operator(self, theta: Tensor, *, is_rough: bool = False) -> Callable[[Tensor], Tensor]:
        """A function (M, P) -> (M, P) float64 that multiplies by the Hessian of -log_joint at theta (P,), the prior's with it.

        Rough products are right to a percent, where that is faster.
        """

    def curvature(self, structure: str) -> Curvature:
        """How H is made in a structure: in the full one always. Raises UsageError where the target has no such structure."""


class UnevenTarget(CurvedTarget, Protocol):
    """A target that is not concave: its exact Hessian may have directions along which the log joint is convex."""

    def second_derivatives(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        """A function (M, P) -> (M, P) float64 that multiplies by all second derivatives of -log_joint at theta (P,)."""


class HeldOut(Protocol):
    """Examples that a target does not know, which posteriors over its theta are judged by."""

    is_linearised: ClassVar[bool]
    """Whether a Gaussian predicts with the model linearised at its mean: its logits are drawn, see LinearisedHeldOut."""

    def losses(self, theta: Tensor) -> Tensor:
        """Negative log (M,), float64 nats, of the average over draws theta (S, P) of each example's probability."""


class HeldOutByLogits(HeldOut, Protocol):
    """Examples of a model whose logits are normal under a Gaussian over theta."""

    def losses_by(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int) -> Tensor:
        """`losses` (M,) of draws of the logits: for inputs (n, ...), blocks (K, s, n) of S draws, which may be overwritten."""


class LinearisedHeldOut(HeldOut, Protocol):
    """Examples of a model that is not linear in theta."""

    def losses_of(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int, width: int) -> Tensor:
        """The same of draws of the logits by each of several posteriors, (C, M).

        Args:
            drawn: for inputs (n, ...), draws (K, S, n) by each posterior.
            num_draws: S.
            width: numbers that a draw of one example's logits holds while it is made.
        """


_MOST_DECOMPOSED = 4096  # outputs, whose Kronecker factor has eigenvectors in half a minute on one core


def rough_structure(num_outputs: int) -> str:
    """Return the structure of the Hessian that whitens the search for the mode of a last layer with so many outputs."""
    return "kron" if num_outputs <= _MOST_DECOMPOSED else "diag"
