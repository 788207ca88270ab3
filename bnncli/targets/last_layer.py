"""The log posterior of a network's last linear layer, given its fixed features."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from bnncli import registry
from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.shapes import check_shapes
from bnncli.system.devices import has_bfloat16_products, has_coarse_products, tf32_products
from bnncli.targets.blocks import BLOCK_ELEMENTS, FeatureBlocks, Work, slices
from bnncli.targets.target import (
    Curvature,
    check_labels,
    count_passes,
    counting_products,
    label_shape,
    rough_structure,
    value_with_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor


# Rows of a matrix product; more gain nothing.
_MAX_ROWS = {"cpu": 1024, "cuda": 2**14}


def block_logits(features: Tensor, theta: Tensor, layout: HeadLayout, *, multiply: Multiply | None = None) -> Tensor:
    """Logits (K, S, n) of features (n, D) under theta (S, P), as one matrix product; `multiply` makes it another way."""
    weight, bias = layout.split(theta)
    rows = weight.transpose(0, 1).reshape(-1, layout.num_features)
    if multiply is not None:
        flat = multiply(rows, features.T)
        flat = flat if bias is None else flat.add_(bias.T.reshape(-1, 1))
    elif bias is None:
        flat = rows @ features.T
    else:
        flat = torch.addmm(bias.T.reshape(-1, 1), rows, features.T)
    return flat.view(layout.num_outputs, theta.shape[0], features.shape[0])


def weighted_feature_sums(
    weights: Tensor, features: Tensor, layout: HeadLayout, *, multiply: Multiply | None = None
) -> Tensor:
    """sum_n weights[k, s, n] x_n in theta order, (S, P) float64, for weights (K, S, n) and features (n, D)."""
    num_draws = weights.shape[1]
    sums = (multiply or torch.matmul)(weights.flatten(0, 1), features)
    weight = sums.view(layout.num_outputs, num_draws, -1).transpose(0, 1).double()
    bias = weights.sum(dim=2, dtype=sums.dtype).T.double() if layout.has_bias else None
    return layout.join(weight, bias)


def label_sums(features: Tensor, labels: Tensor, layout: HeadLayout) -> Tensor:
    """sum_n onehot(y_n) x x_n in theta order, (P,) float64, for features (n, D) and labels (n,), or (n, C)."""
    likelihood, num_outputs = layout.likelihood, layout.num_outputs
    if (
        features.device.type != "cpu" or not likelihood.is_shift_invariant
    ):  # only a softmax has one output for each label
        indicators = likelihood.indicators(labels, features.dtype)
        return weighted_feature_sums(indicators.unsqueeze(1), features, layout)[0]
    # Each row goes to one output: no product of K rows for each (in one order, as it is on a CPU).
    weight = features.new_zeros(num_outputs, features.shape[1]).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=num_outputs).to(features.dtype) if layout.has_bias else None
    return layout.join(weight.unsqueeze(0), None if counts is None else counts.unsqueeze(0))[0].double()


def row_blocks(num_rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices over `num_rows` examples, sized so that a block of rows times `columns` fits the cache."""
    return slices(0, num_rows, max(1, BLOCK_ELEMENTS.get(device.type, 2**19) // columns))


def draw_blocks(theta: Tensor, layout: HeadLayout) -> tuple[Tensor, ...]:
    """theta (S, P) in blocks of draws whose logits make a matrix product of efficient height."""
    rows = _MAX_ROWS.get(theta.device.type, 1024)
    return theta.split(max(1, rows // layout.num_outputs))


Multiply: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"

_SCALED = 14  # the power of two below which a split operand lies: float16 ends at 2^16
_HALF_STEP = 2.0**11  # what float16's mantissa leaves over is smaller by this
_DROPPED = 13  # of float32's 23 bits of mantissa, for TF32


def multiply_in(precision: str) -> Multiply:
    """A function of two float32 matrices (n, m) and (m, p) that gives their product (n, p), float32, in tf32 or bfloat16."""
    return {"tf32": _multiply_tf32, "bfloat16": _multiply_bfloat16}[precision]


def multiply_halves(left: Tensor, right: Tensor) -> Tensor:
    """The product (n, p), float32, of left (n, m) float32 and right (m, p) float16, on a GPU.

    Left is split into two float16 numbers, which keep 22 of its 24 bits (of what is not 2^29 times smaller than its largest). On an
    H200 an error of 1.1e-6 for float32's 3.7e-7 (logits with a standard deviation of 0.45, D = 2,048), in a sixth of the time.
    """
    exponent = torch.frexp(left.abs().amax()).exponent.clamp_min(-100)
    scale = torch.ldexp(torch.ones((), device=left.device), _SCALED - exponent)
    scaled = left * scale
    high = scaled.half()
    low = scaled.sub_(high).mul_(_HALF_STEP).half()
    product = torch.mm(high, right, out_dtype=torch.float32)
    return product.add_(torch.mm(low, right, out_dtype=torch.float32), alpha=1 / _HALF_STEP).div_(scale)


def rough_multiply(device: torch.device) -> Multiply | None:
    """As multiply_in for bfloat16 where the device is faster at that than at float32, on a CPU with rounded products; else None."""
    if not has_bfloat16_products(device):
        return None
    return _multiply_and_round if device.type == "cpu" else _multiply_bfloat16


def round_to_tf32(tensor: Tensor) -> Tensor:
    """A float32 tensor's nearest numbers of 10 bits of mantissa, ties to even, as float32; infinities and NaN stay."""
    bits = tensor.contiguous().view(torch.int32)
    half = (1 << (_DROPPED - 1)) - 1
    rounded = (bits + half + ((bits >> _DROPPED) & 1)) & -(1 << _DROPPED)
    return torch.where(tensor.isfinite(), rounded.view(torch.float32), tensor)


def _multiply_tf32(left: Tensor, right: Tensor) -> Tensor:
    if has_coarse_products(left.device):
        with tf32_products():
            return left @ right
    return round_to_tf32(left) @ round_to_tf32(right)


def _multiply_and_round(left: Tensor, right: Tensor) -> Tensor:
    return (left.bfloat16() @ right.bfloat16()).float()


def _multiply_bfloat16(left: Tensor, right: Tensor) -> Tensor:
    left, right = left.bfloat16(), right.bfloat16()
    if has_coarse_products(left.device):
        return torch.mm(left, right, out_dtype=torch.float32)  # rounded logits would lose two digits more
    return left.float() @ right.float()


# Of logits or probabilities (K, N) that are kept; larger ones are made again. Not a share of what is free, on which bits would depend.
_KEPT_BYTES = 2**29
_KEPT_SHARE = 8  # on a GPU, whose own work needs the rest: one part in so many of all its memory, free or not
_EARLY_SHARE = 32  # the same, where they lie beside factors that are made


def is_kept(num_bytes: int, device: torch.device, *, share: int = _KEPT_SHARE) -> bool:
    """Whether what a pass over the data could make again is small enough to stay on the device, of a GPU one part in `share` of its memory."""
    return num_bytes <= (_KEPT_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[1] // share)


class KeptProbabilities:
    """Those (K, N) of the last theta (P,) that was evaluated while they are asked for; of a team's worker, of its own rows alone."""

    def __init__(self) -> None:
        self._is_asked = False
        self._theta: Tensor | None = None
        self._values: Tensor | None = None

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Within, evaluations fill them; after it they are gone."""
        before, self._is_asked = self._is_asked, True
        try:
            yield
        finally:
            self._is_asked = before
            self._theta = self._values = None

    def room(self, theta: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Where an evaluation at theta (1, P) shall write them; None where nobody asks, or there is no room."""
        self._theta = self._values = None
        size, device = shape[0] * shape[1] * dtype.itemsize, theta.device
        if not self._is_asked or len(theta) != 1 or not is_kept(size, device, share=_EARLY_SHARE):
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            self._values = torch.empty(shape, dtype=dtype, device=device)
            self._theta = theta[0].clone()
        return self._values

    def find(self, theta: Tensor) -> Tensor | None:
        """Those under theta (P,), as they were evaluated in their precision; None where others are kept, or none."""
        if self._theta is None or self._values is None or not torch.equal(theta.to(self._theta), self._theta):
            return None
        return self._values


_MOST_COLUMNS = 2**11  # logits of an example made at a time, if it has fewer: blocks of a few rows are slow


@dataclass(frozen=True)
class HeldOutFeatures:
    """Features with labels.

    Args:
        features: (M, D), on the device and in the precision that logits are made in.
        labels: (M,), there too; (M, C) where classes do not exclude each other.
        layout: how weight and bias lie in theta.
    """

    features: Tensor
    labels: Tensor
    layout: HeadLayout
    is_linearised: ClassVar[bool] = False

    def losses(self, theta: Tensor) -> Tensor:
        """Negative log (M,), float64 nats, of the average over draws theta (S, P) of each label's probability.

        Of several labels an example the mean over them: of each being there or not.
        """
        theta, layout = theta.to(self.features), self.layout
        blocks = draw_blocks(theta, layout)
        return self.losses_by(
            lambda features: (block_logits(features, block, layout) for block in blocks), num_draws=len(theta)
        )

    def losses_by(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int) -> Tensor:
        """The same of draws of the logits.

        Args:
            drawn: for features (n, D), the draws in blocks (K, s, n), which may be overwritten.
            num_draws: S, of all blocks.
        """
        features, layout = self.features, self.layout
        losses = torch.empty(features.shape[0], dtype=torch.float64, device=features.device)
        columns = min(layout.num_outputs * num_draws, max(layout.num_outputs, _MOST_COLUMNS))
        for rows in row_blocks(features.shape[0], columns, features.device):
            labels = self.labels[rows]
            parts = [layout.likelihood.decision_logs(logits, labels) for logits in drawn(features[rows])]
            logs = torch.cat(parts, dim=1).double().logsumexp(dim=1)
            losses[rows] = math.log(num_draws) - logs.mean(dim=0)
        return losses


_SPLIT_PARAMS = 2**17  # from which products, not launches, take the time on a GPU

RowProbabilities: TypeAlias = "Callable[[slice, Tensor], Tensor]"


@dataclass(frozen=True)
class LastLayerTarget:
    """The unnormalised log posterior over theta (P,).

    Args:
        features: (N, D), float32 or float16 (float64 for tests), on the compute device, or on the CPU where they do not
            fit it: a mapped file will do.
        labels: (N,) int64 on the compute device, in 0..C-1, C the classes that the layout's likelihood tells apart; (N, C)
            uint8, zeros and ones, where these do not exclude each other.
        layout: how weight and bias lie in theta.
        prior: of weights and biases, its mean on the compute device.
        likelihood_scale: factor on the log likelihood; N / B for a minibatch of B.
    """

    features: Tensor
    labels: Tensor
    layout: HeadLayout
    prior: Prior
    likelihood_scale: float = 1.0
    _kept: KeptProbabilities = field(default_factory=KeptProbabilities, init=False, repr=False, compare=False)
    is_concave: ClassVar[bool] = True
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sizes = check_shapes(features=(self.features, "N D"), labels=(self.labels, label_shape(self.likelihood)))
        if sizes["D"] != self.layout.num_features:
            raise DataError(f"the features have {sizes['D']} columns, but the head expects {self.layout.num_features}")
        check_labels(self.labels, self.likelihood)
        object.__setattr__(self, "prior", self.prior.to(self.device))
        if not bool(torch.isfinite(self.label_statistic).all()):  # one pass for both; count only when it fails
            num_bad = self._sum(lambda rows, block: ((~torch.isfinite(block)).sum(),), columns=self.layout.num_features)
            raise DataError(f"the features contain {int(num_bad[0])} values that are not finite")

    @property
    def rough_structure(self) -> str:
        """Of the Hessian that whitens the search for the mode."""
        return rough_structure(self.layout.num_outputs)

    @property
    def num_examples(self) -> int:
        """N: rows of the features."""
        return self.features.shape[0]

    @property
    def likelihood(self) -> Likelihood:
        """What the logits say of a label."""
        return self.layout.likelihood

    @property
    def device(self) -> torch.device:
        """Where every product is computed, and the labels are."""
        return self.labels.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products: the features' own, float32 at least."""
        return torch.promote_types(self.features.dtype, torch.float32)

    @property
    def is_resident(self) -> bool:
        """Whether the features lie on the compute device: they do not travel to it block by block."""
        return self.features.device == self.device

    @cached_property
    def blocks(self) -> FeatureBlocks:
        """The features in blocks of rows on the compute device."""
        return FeatureBlocks(self.features, self.device)

    def rows(self, index: Tensor) -> Tensor:
        """The features (B, D) of the rows in index (B,), on the compute device and in the products' precision."""
        return self.blocks.gather(index, self.dtype)

    @cached_property
    def label_statistic(self) -> Tensor:
        """t = sum_n onehot(y_n) x x_n in theta order, (P,) float64: the label term is theta . t."""

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            return (label_sums(block, self.labels[rows], self.layout),)

        return self._sum(work, columns=self.layout.num_outputs, dtype=torch.float64)[0]

    def log_prior(self, theta: Tensor) -> Tensor:
        """log N(theta | m, Lambda^-1), (S,) float64, for theta (S, P)."""
        return self.prior.log_density(theta, self.layout)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """Sum over the examples of log p(y | x, theta) times likelihood_scale, (S,) float64, for theta (S, P)."""
        self._check(theta)
        theta = theta.to(self.device, self.dtype)
        return torch.cat([self._block_log_likelihood(block) for block in draw_blocks(theta, self.layout)])

    def log_joint(self, theta: Tensor) -> Tensor:
        """Log likelihood plus log prior, (S,) float64 nats, for theta (S, P); autograd may pass through it."""
        if theta.requires_grad and torch.is_grad_enabled():
            return value_with_gradient(theta, self.log_joint_and_grad)
        theta = theta.to(self.device)
        return self.log_likelihood(theta) + self.log_prior(theta.to(self.dtype))

    def log_joint_and_grad(self, theta: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Log joint (S,) and its gradient (S, P), both float64, for theta (S, P).

        Args:
            theta: (S, P).
            dtype: precision of the products; the features' own by default, float64 to polish a mode.
        """
        self._check(theta)
        count_passes(len(theta))
        theta = theta.to(self.device, dtype or self.dtype)
        parts = [self._block_log_likelihood_and_grad(block) for block in draw_blocks(theta, self.layout)]
        log_likelihood = torch.cat([value for value, _ in parts])
        gradient = torch.cat([gradient for _, gradient in parts])
        return log_likelihood + self.log_prior(theta), gradient + self.prior.gradient(theta.double(), self.layout)

    def probabilities(self, theta: Tensor, features: Tensor | None = None) -> Tensor:
        """Probabilities of the outputs under one theta (P,); for a single output, of label 1.

        (K, N) for all examples, or (K, n) for the features (n, D) of a block.
        """
        theta = theta.to(self.device, self.dtype).unsqueeze(0)

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            return (self.likelihood.normalize_(block_logits(block, theta, self.layout))[1][:, 0],)

        if features is not None:
            return work(slice(None), features)[0]
        found = torch.empty(self.layout.num_outputs, self.num_examples, dtype=self.dtype, device=self.device)
        start = 0
        for (part,) in self.blocks.map(work, columns=self.layout.num_outputs, dtype=self.dtype):
            found[:, start : (start := start + part.shape[1])] = part
        return found

    def row_probabilities(self, theta: Tensor, *, all_at_once: bool = False) -> RowProbabilities:
        """A function that gives the probabilities (K, n) under theta (P,) of a slice of rows, whose features (n, D) it is given.

        Args:
            all_at_once: they are needed more than once: made now, where they are not too large to be kept.
        """
        kept = self._kept.find(theta)
        if kept is None and all_at_once:
            kept = self._kept_probabilities(theta)
        return lambda rows, block: self.probabilities(theta, block) if kept is None else kept[:, rows]

    def keeping(self) -> AbstractContextManager[None]:
        """Within, each evaluation at one theta keeps the probabilities there for the Hessian's sake."""
        return self._kept.asked()

    def hessian_operator(self, theta: Tensor, *, is_rough: bool = False) -> Callable[[Tensor], Tensor]:
        """A function (M, P) -> (M, P) float64 that multiplies by the Hessian of -log_joint at theta (P,).

        The likelihood's Hessian x x x^T summed over the examples, plus the prior's precisions; exact for a linear layer. The
        probabilities (K, N) are kept where they are not too large, so that each product streams over the features once. Rough
        products are of bfloat16 numbers where the device is faster at them: right to half a percent or so.
        """
        probabilities = self.row_probabilities(theta, all_at_once=True)
        product = rough_multiply(self.device) if is_rough and self.dtype == torch.float32 else None

        def multiply(vectors: Tensor) -> Tensor:
            return self._multiply_hessian(probabilities, vectors.to(self.device, self.dtype), product)

        return counting_products(multiply)

    def curvature(self, structure: str) -> Curvature:
        """The file of `curvature` that has this name. Raises UsageError when there is none."""
        kind: Curvature = registry.load_class("curvature", structure)
        return kind

    def hessian_vector_product(self, theta: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian of -log_joint at theta (P,) times each of vectors (M, P), (M, P) float64."""
        return self.hessian_operator(theta)(vectors)

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """Of the rows in index (B,): features (B, D) and label indicators (B, K), in the products' precision."""
        return self.rows(index), self.likelihood.indicators(self.labels[index], self.dtype).T

    def minibatch(self, *examples: Tensor) -> MinibatchTarget:
        """The target as some examples tell it, the likelihood scaled by N / B: unbiased for the whole."""
        features, indicators = examples
        return MinibatchTarget(self, features, indicators.T.unsqueeze(1))

    def with_prior(self, prior: Prior) -> LastLayerTarget:
        """The same data under another prior."""
        other = copy.copy(self)  # what is known of the data is kept: checking them again would be a pass over a file
        object.__setattr__(other, "prior", prior.to(self.device))
        return other

    def some(self, index: Tensor) -> LastLayerTarget:
        """The target of the rows in index (n,) alone, on the compute device, under the same prior."""
        labels = self.labels[index.to(self.device)]
        return LastLayerTarget(self.rows(index), labels, self.layout, self.prior, self.likelihood_scale)

    def held_out(self, features: Tensor, labels: Tensor) -> HeldOutFeatures:
        """Other features (M, D) with labels (M,), or (M, C), to judge posteriors by."""
        return HeldOutFeatures(features.to(self.device, self.dtype), labels.to(self.device), self.layout)

    def _kept_probabilities(self, theta: Tensor) -> Tensor | None:
        """Probabilities (K, N) under theta (P,); None where they are large, or the device has no memory for them."""
        size = self.layout.num_outputs * self.num_examples * self.dtype.itemsize
        if not is_kept(size, self.device):
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            return self.probabilities(theta)
        return None

    def _check(self, theta: Tensor) -> None:
        check_shapes(theta=(theta, f"S {self.layout.num_params}"))

    def _sum(self, work: Work, *, columns: int, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return self.blocks.sum(work, columns=columns, dtype=dtype or self.dtype)

    def _products(self, dtype: torch.dtype) -> tuple[torch.dtype, Multiply | None]:
        """What blocks of features are read in for products in a precision, and how these are made; None for plain products."""
        is_large = self.layout.num_params >= _SPLIT_PARAMS
        if (
            is_large
            and (dtype, self.features.dtype) == (torch.float32, torch.float16)
            and has_coarse_products(self.device)
        ):
            return torch.float16, multiply_halves
        return dtype, None

    def _block_log_likelihood(self, theta: Tensor) -> Tensor:
        dtype, multiply = self._products(theta.dtype)

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            normalizers = self.likelihood.log_normalizers_(block_logits(block, theta, self.layout, multiply=multiply))
            return (normalizers.sum(dim=1, dtype=torch.float64),)

        (normalizers,) = self._sum(work, columns=self.layout.num_outputs * theta.shape[0], dtype=dtype)
        return (theta.double() @ self.label_statistic - normalizers) * self.likelihood_scale

    def _block_log_likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.layout.num_outputs, self.num_examples
        kept = self._kept.room(theta, shape, self.dtype)
        dtype, multiply = self._products(theta.dtype)

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            logits = block_logits(block, theta, self.layout, multiply=multiply)
            normalizers, probabilities = self.likelihood.normalize_(logits)
            if kept is not None:
                kept[:, rows] = probabilities[:, 0]
            # Residuals, not probabilities: their float32 sums are smaller, and so are the rounding errors.
            indicators = self.likelihood.indicators(self.labels[rows], theta.dtype)
            residuals = probabilities.sub_(indicators.unsqueeze(1))
            sums = weighted_feature_sums(residuals, block, self.layout, multiply=multiply or torch.matmul)
            return normalizers.sum(dim=1, dtype=torch.float64), sums

        columns = self.layout.num_outputs * theta.shape[0]
        normalizers, gradient = self._sum(work, columns=columns, dtype=dtype)
        value = theta.double() @ self.label_statistic - normalizers
        return value * self.likelihood_scale, gradient * -self.likelihood_scale

    def _multiply_hessian(self, probabilities: RowProbabilities, vectors: Tensor, product: Multiply | None) -> Tensor:
        inner = vectors if product is None else vectors.bfloat16()  # once, not in each block

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            p = probabilities(rows, block).unsqueeze(1)
            block = block if product is None else block.bfloat16()
            u = block_logits(block, inner, self.layout, multiply=product)
            weights = self.likelihood.hessian_product_(p, u)
            return (weighted_feature_sums(weights, block, self.layout, multiply=product or torch.matmul),)

        (total,) = self._sum(work, columns=self.layout.num_outputs * vectors.shape[0])
        return total * self.likelihood_scale - self.prior.curvature_times(vectors.double(), self.layout)


@dataclass(frozen=True)
class MinibatchTarget:
    """What some examples tell of a target, in few operations and without checks, for steps of many.

    Args:
        target: of all examples.
        features: (B, D), in theta's precision.
        indicators: (K, 1, B), the likelihood's of their labels, or (K, S, B) where each of S theta has labels of its own.
    """

    target: LastLayerTarget
    features: Tensor
    indicators: Tensor

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint (S,), float64, and its gradient (S, P), in theta's precision, for theta (S, P)."""
        target = self.target
        scale = target.likelihood_scale * target.num_examples / self.features.shape[0]
        value, gradient = self.log_likelihood_and_grad(theta)
        log_joint = torch.add(target.log_prior(theta), value, alpha=scale)
        return log_joint, torch.add(target.prior.gradient(theta, target.layout), gradient, alpha=scale)

    def log_likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log likelihood (S,) of these examples alone and its gradient (S, P), in theta's precision, for theta (S, P)."""
        layout, indicators = self.target.layout, self.indicators
        logits = block_logits(self.features, theta, layout)
        label_term = (logits * indicators).sum(dim=(0, 2))
        normalizers, probabilities = layout.likelihood.normalize_(logits)
        residuals = torch.sub(indicators, probabilities, out=probabilities)  # which lie as a product wants them
        weight = (residuals.flatten(0, 1) @ self.features).view(layout.num_outputs, theta.shape[0], -1).transpose(0, 1)
        bias = residuals.sum(dim=2).T if layout.has_bias else None
        return label_term - normalizers.sum(dim=1), layout.join(weight, bias)
