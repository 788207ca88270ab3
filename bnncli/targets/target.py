"""The interface of log posteriors over theta, for samplers, flows, the ELBO and importance weights."""

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
    """Return the shape of the labels of N examples for check_shapes: (N,), or (N, C) for multi-label."""
    return "N" if likelihood.is_exclusive else f"N {likelihood.num_classes}"


def check_labels(labels: Tensor, likelihood: Likelihood) -> None:
    """Check that there are labels, and each is a class, or 0 or 1 for multi-label.

    Raises:
        DataError: there are none, or one is invalid.
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


PRODUCT_PASSES = 2.0  # per product with the Hessian: forward and back


@dataclass
class PassCount:
    """A count of passes.

    Args:
        passes: gradients of the log likelihood of all examples at one theta.
    """

    passes: float = 0.0


_ASKING: ContextVar[PassCount | None] = ContextVar("gradient passes", default=None)


@contextmanager
def counting_passes(share: float = 1.0) -> Iterator[PassCount]:
    """Count passes within this context; nested counts also add to the outer one.

    Args:
        share: of the examples that are read within; scales what the outer count gets.
    """
    outer, own = _ASKING.get(), PassCount()
    token = _ASKING.set(own)
    try:
        yield own
    finally:
        _ASKING.reset(token)
        if outer is not None:
            outer.passes += share * own.passes


def count_passes(passes: float) -> None:
    """Add passes to the current count."""
    tally = _ASKING.get()
    if tally is not None:
        tally.passes += passes


def count_products(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the product of a Hessian with vectors (M, P), with counting."""

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
    """A differentiable log density over theta: a target, or its estimate from a minibatch."""

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log joint (S,), nats, and its gradient (S, P), for theta (S, P)."""


class WholeTarget(LogJoint, Protocol):
    """An unnormalised log posterior over theta (P,): log likelihood of all N examples plus log prior.

    Values and gradients are float64.
    """

    @property
    def layout(self) -> ParamLayout:
        """Layout of theta."""

    @property
    def device(self) -> torch.device:
        """Device of the computation and its results."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products."""

    @property
    def num_examples(self) -> int:
        """Number of examples, N."""

    @property
    def is_resident(self) -> bool:
        """Return whether all data of a gradient is on the device, so that a step can be captured as a graph."""

    @property
    def is_capturable(self) -> bool:
        """Return whether a step on data on the device can be captured at all; False if it runs user code."""

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return log likelihood plus log prior, (S,), nats, for theta (S, P); differentiable."""


class Target(WholeTarget, Protocol):
    """A target from whose examples minibatches can be taken."""

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """Return what a minibatch needs of the examples in index (B,): tensors (B, ...) on the device."""

    def minibatch(self, *examples: Tensor) -> LogJoint:
        """Return an unbiased estimate of the target from some examples: `examples`' tensors, or rows of them."""


class Curvature(Protocol):
    """A structure of a target's H, the Hessian of its summed negative log likelihood, without the prior."""

    is_exact: bool
    """Whether it is the whole Hessian, rather than a part or an approximation."""
    fixed: tuple[str, ...]
    """Names of the parts that do not depend on theta; with any, `hessian` takes `before`, parts for the same examples.
    """

    def hessian(self, target: Any, theta: Tensor) -> dict[str, Tensor]:
        """Return H at theta (P,), float64, in parts `hessian.<structure>` or `hessian.<structure>.<part>`, as in posterior files."""


class CurvedTarget(Target, Protocol):
    """A target with second derivatives and a prior, for modes and Gaussians.

    "Hessian" may mean a generalised Gauss-Newton matrix: steps need it positive definite.
    """

    @property
    def prior(self) -> Prior:
        """The part of the log joint that Gaussians add to H, and whose precision a search varies."""

    @property
    def is_concave(self) -> bool:
        """Return whether the log joint is concave under every prior, so that all starts lead to one mode."""

    @property
    def rough_structure(self) -> str:
        """A structure of H computed in one pass with little memory, for targets whose full H is large."""

    def with_prior(self, prior: Prior) -> Self:
        """Return the same data under another prior."""

    def log_joint_and_grad(self, theta: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the log joint (S,), nats, and its gradient (S, P), for theta (S, P), by products in dtype (by default the target's)."""

    def hessian_operator(self, theta: Tensor, *, is_rough: bool = False) -> Callable[[Tensor], Tensor]:
        """Return a function (M, P) -> (M, P) float64 that multiplies by the Hessian of -log_joint at theta (P,), including the prior.

        Rough products, used if faster, have an error of about a percent.
        """

    def curvature(self, structure: str) -> Curvature:
        """Return how H is computed in a structure; full is always supported. Raises UsageError for an unsupported structure."""


class UnevenTarget(CurvedTarget, Protocol):
    """A nonconcave target, whose exact Hessian may have directions of convex log joint."""

    def second_derivatives(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function (M, P) -> (M, P) float64 that multiplies by all second derivatives of -log_joint at theta (P,)."""


class HeldOut(Protocol):
    """Examples outside the target, by which posteriors over its theta are judged."""

    is_linearised: ClassVar[bool]
    """Whether a Gaussian predicts with the model linearised at its mean, by drawing logits; see LinearisedHeldOut."""

    def losses(self, theta: Tensor) -> Tensor:
        """Return -log (M,), float64 nats, of each example's probability averaged over draws theta (S, P)."""


class HeldOutByLogits(HeldOut, Protocol):
    """Examples of a model whose logits are normal under a Gaussian over theta."""

    def losses_by(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int) -> Tensor:
        """Return `losses` (M,) for draws of the logits: for inputs (n, ...), blocks (K, s, n) of S draws, which may be overwritten."""


class LinearisedHeldOut(HeldOut, Protocol):
    """Examples of a model that is not linear in theta."""

    def losses_of(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int, width: int) -> Tensor:
        """Return the same for draws of the logits from several posteriors, (C, M).

        Args:
            drawn: for inputs (n, ...), draws (K, S, n) from each posterior.
            num_draws: S.
            width: numbers held per draw of one example's logits while it is computed.
        """


_MOST_DECOMPOSED = 4096  # outputs; one core takes half a minute for the eigenvectors of their Kronecker factor


def rough_structure(num_outputs: int) -> str:
    """Return the structure of the Hessian that whitens the mode search of a last layer with num_outputs outputs."""
    return "kron" if num_outputs <= _MOST_DECOMPOSED else "diag"
