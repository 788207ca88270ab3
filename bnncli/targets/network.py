"""The log posterior of chosen parameters of a whole network, given its inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, ClassVar, Concatenate, ParamSpec, TypeVar

from bnncli import registry
from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.module import ModuleLayout
from bnncli.parameters.prior import Prior
from bnncli.shapes import check_shapes
from bnncli.system.memory import budget
from bnncli.system.signals import raise_if_interrupted
from bnncli.targets.curvature_choice import HESSIAN, USUAL, CurvatureChoice
from bnncli.targets.target import (
    Curvature,
    check_labels,
    count_passes,
    count_products,
    label_shape,
    value_with_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor


Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner", "NetworkTarget", "HeldOutInputs")
Result = TypeVar("Result")

_MOST_BYTES = {"cpu": 2**26}  # of activations at once: more than a CPU's caches hold gains nothing
_SHARE = 4  # one part in this many of the memory that is free when a target first asks; on a CPU if that is less


def share_of(device: torch.device) -> int:
    """Return the bytes of a device available for activations."""
    share = budget(device) // _SHARE
    return max(1, min(share, _MOST_BYTES.get(device.type, share)))


def pairs_at_once(
    layout: ModuleLayout, device: torch.device, dtype: torch.dtype | None = None, *, share: int | None = None
) -> int:
    """Return the number of pairs of draw and example whose activations fit at once into `share` bytes, by default share_of it."""
    return max(1, (share or share_of(device)) // activation_bytes_of(layout, dtype))


def activation_bytes_of(layout: ModuleLayout, dtype: torch.dtype | None = None) -> int:
    """Return the bytes per pair at the peak of a backward pass, as measured in float32, the default."""
    return layout.working_bytes * (dtype or torch.float32).itemsize // 4


_GRAPHS = 2  # the backward pass is kept beside the forward pass


def second_derivatives(target: NetworkTarget, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function (M, P) -> (M, P) float64 that multiplies by the second derivatives of -log_joint at theta (P,).

    The gradient's own gradient along each vector, in blocks of examples (Pearlmutter 1994, Neural Computation 6(1)).
    """
    theta = theta.to(target.device, target.dtype)

    @with_smaller_blocks
    def multiply(target: NetworkTarget, vectors: Tensor) -> Tensor:
        vectors = vectors.to(target.device)
        total = torch.zeros(vectors.shape, dtype=torch.float64, device=target.device)
        for rows in target.row_blocks(_GRAPHS, theta.dtype):
            with torch.enable_grad():
                leaf = theta.detach().requires_grad_()
                logits = target.logits(leaf.unsqueeze(0), rows)
                value = target.likelihood.log_likelihoods(logits, target.labels[rows]).double().sum()
                (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            for vector, found in zip(vectors.to(theta.dtype), total, strict=True):
                found -= torch.autograd.grad(gradient, leaf, vector, retain_graph=True)[0].double()
        return total * target.likelihood_scale - target.prior.curvature_times(vectors.double(), target.layout)

    return count_products(partial(multiply, target))


def with_smaller_blocks(
    work: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Do work on a target, or on held-out inputs, again, with half as many examples at once, if a GPU runs out of memory; down to one example."""

    @wraps(work)
    def again(owner: Owner, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
        target = owner if isinstance(owner, NetworkTarget) else owner.target
        while True:
            try:
                return work(owner, *args, **named)
            except torch.OutOfMemoryError:
                if target.rows_at_once(1, torch.float32) == 1:
                    raise
            torch.cuda.empty_cache()  # only now are the tensors of the failed block freed
            target.halve_blocks()

    return again


_COPIES = 3  # of the numbers in a draw of logits while it is computed
_FEWEST = 64  # examples at once, below which draws are processed one after the other


@dataclass(frozen=True)
class NetworkTarget:
    """The unnormalised log posterior over theta (P,) of a network's chosen parameters.

    Args:
        inputs: (N, D), flat, or (N, ...), on the compute device, or on the CPU if too large; may be memory-mapped.
        labels: as in LastLayerTarget, on the compute device.
        layout: bound to the network.
        prior: of weights and biases.
        likelihood_scale: factor on the log likelihood; N / B for a minibatch of B.
        choice: what `curvature` computes; steps always use the Gauss-Newton matrix.
    """

    inputs: Tensor
    labels: Tensor
    layout: ModuleLayout
    prior: Prior
    likelihood_scale: float = 1.0
    choice: CurvatureChoice = USUAL
    is_concave: ClassVar[bool] = False
    is_capturable: ClassVar[bool] = False
    rough_structure: ClassVar[str] = "kron"

    def __post_init__(self) -> None:
        check_shapes(labels=(self.labels, label_shape(self.likelihood)))
        shape = tuple(self.inputs.shape)
        if shape[0] != len(self.labels) or shape[1:] not in (self.layout.input_shape, (self.layout.num_features,)):
            raise DataError(f"the inputs have shape {shape}, expected {(len(self.labels), *self.layout.input_shape)}")
        check_labels(self.labels, self.likelihood)
        object.__setattr__(self, "prior", self.prior.to(self.device))

    @property
    def num_examples(self) -> int:
        """Number of examples, N."""
        return len(self.labels)

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the labels given the logits."""
        return self.layout.likelihood

    @property
    def device(self) -> torch.device:
        """Device of the network and all products."""
        return self.labels.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products: the inputs' own, at least float32."""
        return self.inputs.dtype if self.inputs.dtype == torch.float64 else torch.float32

    @property
    def is_resident(self) -> bool:
        """False: steps of whole networks are not captured as graphs."""
        return False

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return log N(theta | m, Lambda^-1), (S,) float64, for theta (S, P)."""
        return self.prior.log_density(theta, self.layout)

    @with_smaller_blocks
    def log_joint(self, theta: Tensor) -> Tensor:
        """Return log likelihood plus log prior, (S,) float64 nats, for theta (S, P); differentiable."""
        if theta.requires_grad and torch.is_grad_enabled():
            return value_with_gradient(theta, self.log_joint_and_grad)
        theta = theta.to(self.device, self._precision(theta))
        total = torch.zeros(len(theta), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for draws, rows in self._blocks(theta):
                total[draws] += self._log_likelihood(theta[draws], rows).double()
        return total * self.likelihood_scale + self.log_prior(theta)

    @with_smaller_blocks
    def log_joint_and_grad(self, theta: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the log joint (S,) and its gradient (S, P), both float64, for theta (S, P).

        Args:
            dtype: precision of the products; float32 by default, float64 to polish a mode.
        """
        check_shapes(theta=(theta, f"S {self.layout.num_params}"))
        count_passes(len(theta))
        theta = theta.to(self.device, dtype or self.dtype)
        value = torch.zeros(len(theta), dtype=torch.float64, device=self.device)
        gradient = torch.zeros(theta.shape, dtype=torch.float64, device=self.device)
        for draws, rows in self._blocks(theta):
            some, some_gradient = self._value_and_grad(theta[draws], rows)
            value[draws] += some
            gradient[draws] += some_gradient
        log_joint = value * self.likelihood_scale + self.log_prior(theta)
        return log_joint, gradient * self.likelihood_scale + self.prior.gradient(theta.double(), self.layout)

    def logits(self, theta: Tensor, rows: slice) -> Tensor:
        """Return logits (S, n, K) of the examples in `rows` under theta (S, P), on the device; differentiable."""
        return self.layout.logits(self._inputs(rows), theta)

    def probabilities(self, theta: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows, block by block, with their probabilities (K, n) under one theta (P,)."""
        theta = theta.to(self.device, self._precision(theta)).unsqueeze(0)
        for rows in self.row_blocks(1, theta.dtype):
            with torch.no_grad():
                logits = self.logits(theta, rows).permute(2, 0, 1).contiguous()
            yield rows, self.likelihood.normalize_(logits)[1][:, 0]

    def hessian_operator(self, theta: Tensor, *, is_rough: bool = False) -> Callable[[Tensor], Tensor]:
        """Return a function (M, P) -> (M, P) float64 that multiplies by the Gauss-Newton matrix plus the prior's precisions.

        sum_n J_n^T (diag(p) - p p^T) J_n v (Schraudolph 2002, Neural Computation 14(7)); with the prior, positive
        definite everywhere. Rough products would be no faster, so they are the same.
        """
        product = self.ggn_operator(theta)
        return lambda vectors: (
            product(vectors) - self.prior.curvature_times(vectors.to(self.device).double(), self.layout)
        )

    def ggn_operator(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the same without the prior's precisions."""
        theta = theta.to(self.device, self._precision(theta))

        @with_smaller_blocks
        def multiply(self: NetworkTarget, vectors: Tensor) -> Tensor:
            vectors = vectors.to(self.device, theta.dtype)
            total = torch.zeros(vectors.shape, dtype=torch.float64, device=self.device)
            for rows in self.row_blocks(1, theta.dtype):
                total += self._ggn_product(theta, vectors, rows).double()
            return total * self.likelihood_scale

        return count_products(partial(multiply, self))

    def second_derivatives(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function (M, P) -> (M, P) float64 that multiplies by all second derivatives of -log_joint at theta (P,)."""
        return second_derivatives(self, theta)

    def with_choice(self, choice: CurvatureChoice) -> NetworkTarget:
        """Return the same target with another H."""
        return self._changed(choice=choice)

    def curvature(self, structure: str) -> Curvature:
        """Return the `network_curvature` of this name. Raises UsageError if there is none."""
        kind = registry.load_class("network_curvature", structure)
        found: Curvature = kind.of_hessian if self.choice.kind == HESSIAN else kind
        return found

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """Return inputs (B, ...) and labels (B,) of the rows in index (B,), on the device."""
        return self.inputs[index.to(self.inputs.device)].to(self.device), self.labels[index.to(self.device)]

    def minibatch(self, *examples: Tensor) -> NetworkTarget:
        """Return the target estimated from some examples, with the likelihood scaled by N / B: unbiased."""
        inputs, labels = examples
        scale = self.likelihood_scale * self.num_examples / len(labels)
        return self._changed(inputs=inputs, labels=labels, likelihood_scale=scale)

    def with_prior(self, prior: Prior) -> NetworkTarget:
        """Return the same data under another prior."""
        return self._changed(prior=prior.to(self.device))

    def held_out(self, inputs: Tensor, labels: Tensor) -> HeldOutInputs:
        """Return other inputs (M, ...) with labels (M,) or (M, C), to judge posteriors by."""
        return HeldOutInputs(self._changed(inputs=inputs, labels=labels.to(self.device), likelihood_scale=1.0))

    def rows_at_once(self, num_draws: int, dtype: torch.dtype) -> int:
        """Return the number of examples whose activations under num_draws draws fit at once."""
        return max(1, min(self.num_examples, self._pairs_at_once(dtype) // num_draws))

    def _pairs_at_once(self, dtype: torch.dtype) -> int:
        """Return the number of pairs of draw and example whose activations fit at once."""
        return pairs_at_once(self.layout, self.device, dtype, share=self._share)

    @cached_property
    def _share(self) -> int:
        """Bytes of the device for activations, determined once for everything derived from this target."""
        return share_of(self.device)

    def halve_blocks(self) -> None:
        """Process half as many pairs at once from now on."""
        most = self.num_examples * activation_bytes_of(self.layout)
        self.__dict__["_share"] = min(self._share, most) // 2

    def row_blocks(self, num_draws: int, dtype: torch.dtype) -> Iterator[slice]:
        """Yield blocks of examples of the size in rows_at_once."""
        size = self.rows_at_once(num_draws, dtype)
        for start in range(0, self.num_examples, size):
            raise_if_interrupted("the network's examples")
            yield slice(start, min(start + size, self.num_examples))

    def _changed(self, **values: object) -> NetworkTarget:
        _ = self._share
        other = copy.copy(self)  # without checking labels again, which would be a sync
        for name, value in values.items():
            object.__setattr__(other, name, value)
        return other

    def _precision(self, theta: Tensor) -> torch.dtype:
        return torch.float64 if self.inputs.dtype == torch.float64 else self.dtype

    def _inputs(self, rows: slice) -> Tensor:
        return self.inputs[rows].to(self.device, non_blocking=True)

    def _blocks(self, theta: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield draws and rows to process at once, covering all of theta (S, P) and all examples."""
        size = max(1, min(len(theta), self._pairs_at_once(theta.dtype) // min(_FEWEST, self.num_examples)))
        for start in range(0, len(theta), size):
            draws = slice(start, min(start + size, len(theta)))
            for rows in self.row_blocks(draws.stop - draws.start, theta.dtype):
                yield draws, rows

    def _log_likelihood(self, theta: Tensor, rows: slice) -> Tensor:
        """Return the log likelihood (S,) of the examples in `rows`; differentiable."""
        labels = self.labels[rows]
        return self.likelihood.log_likelihoods(self.logits(theta, rows), labels).double().sum(dim=1)

    def _value_and_grad(self, theta: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (S,) of the examples in `rows`, float64, and its gradient (S, P), by backpropagation from the logits.

        With classes first, indicators minus probabilities take a third of the time of a cross entropy's two passes.
        """
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            logits = self.logits(leaf, rows)
        outputs = logits.detach().permute(2, 0, 1).contiguous()
        indicators = self.likelihood.indicators(self.labels[rows], theta.dtype).unsqueeze(1)
        of_labels = outputs.masked_fill(indicators == 0, 0.0).sum(dim=(0, 2), dtype=torch.float64)
        normalizers, probabilities = self.likelihood.normalize_(outputs)
        slopes = (indicators - probabilities).permute(1, 2, 0).contiguous()
        (gradient,) = torch.autograd.grad(logits, leaf, slopes)
        return of_labels - normalizers.sum(dim=1, dtype=torch.float64), gradient.double()

    def _ggn_product(self, theta: Tensor, vectors: Tensor, rows: slice) -> Tensor:
        """Return sum_n J_n^T H_n J_n v over the examples in `rows`, (M, P), for vectors (M, P)."""
        inputs, layout = self._inputs(rows), self.layout

        def logits(one: Tensor) -> Tensor:
            return layout.logits(inputs, one.unsqueeze(0))[0]

        with torch.enable_grad():
            outputs, pull = torch.func.vjp(logits, theta)[:2]
            probs = self.likelihood.normalize_(outputs.detach().T.unsqueeze(1).clone())[1]
        found = []
        for vector in vectors:
            pushed = torch.func.jvp(logits, (theta,), (vector,))[1]
            weighted = self.likelihood.hessian_product_(probs, pushed.T.unsqueeze(1).clone())
            found.append(pull(weighted[:, 0].T)[0])
        return torch.stack(found)


@dataclass(frozen=True)
class HeldOutInputs:
    """Inputs with labels that the target does not include.

    Args:
        target: of these inputs; only its likelihood is used.
    """

    target: NetworkTarget
    is_linearised: ClassVar[bool] = True

    @property
    def num_examples(self) -> int:
        """Number of examples, M."""
        return self.target.num_examples

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self.target.device

    @with_smaller_blocks
    def log_probabilities(self, theta: Tensor) -> Tensor:
        """Return log p of each label under each theta (S, P), (S, M) float64, accurate for probabilities near one."""
        target = self.target
        theta = theta.to(target.device, target.dtype)
        found = torch.empty(len(theta), target.num_examples, dtype=torch.float64, device=target.device)
        with torch.no_grad():
            for draws, rows in target._blocks(theta):
                logits = target.logits(theta[draws], rows).permute(2, 0, 1).contiguous().double()
                found[draws, rows] = target.likelihood.sharp_log_likelihoods(logits, target.labels[rows])
        return found

    @with_smaller_blocks
    def losses(self, theta: Tensor) -> Tensor:
        """Return -log (M,), float64 nats, of each label's probability averaged over draws theta (S, P).

        For multi-label, the mean over labels of whether each is present.
        """
        target = self.target
        theta = theta.to(target.device, target.dtype)
        losses = torch.empty(target.num_examples, dtype=torch.float64, device=target.device)
        with torch.no_grad():
            for rows in target.row_blocks(1, theta.dtype):
                parts = [
                    target.likelihood.decision_logs(
                        target.logits(draw.unsqueeze(0), rows).permute(2, 0, 1).contiguous(), target.labels[rows]
                    )
                    for draw in theta
                ]
                logs = torch.cat(parts, dim=1).double().logsumexp(dim=1)
                losses[rows] = math.log(len(theta)) - logs.mean(dim=0)
        return losses

    @with_smaller_blocks
    def losses_of(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int, width: int) -> Tensor:
        """Return the same for draws of the logits from several posteriors, (C, M); see LinearisedHeldOut."""
        target = self.target
        size = max(1, target._share // (_COPIES * target.dtype.itemsize * num_draws * width))
        blocks = []
        with torch.no_grad():
            for start in range(0, target.num_examples, size):
                rows = slice(start, min(start + size, target.num_examples))
                parts = [
                    target.likelihood.decision_logs(logits.contiguous(), target.labels[rows])
                    for logits in drawn(target._inputs(rows).to(target.dtype))
                ]
                logs = torch.stack([part.double().logsumexp(dim=1) for part in parts])
                blocks.append(math.log(num_draws) - logs.mean(dim=1))
        return torch.cat(blocks, dim=1)
