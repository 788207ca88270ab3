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
from bnncli.system import signals
from bnncli.system.devices import has_bfloat16_products, has_coarse_products, tf32_products
from bnncli.targets.blocks import BLOCK_ELEMENTS, FeatureBlocks, Work, slices
from bnncli.targets.target import (
    Curvature,
    check_labels,
    count_passes,
    count_products,
    label_shape,
    rough_structure,
    value_with_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor


# Rows of a matrix product beyond which speed does not increase.
_MAX_ROWS = {"cpu": 1024, "cuda": 2**14}


def block_logits(features: Tensor, theta: Tensor, layout: HeadLayout, *, multiply: Multiply | None = None) -> Tensor:
    """Return logits (K, S, n) for features (n, D) under theta (S, P), as one matrix product (by `multiply` if given)."""
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
    """Return sum_n weights[k, s, n] x_n in theta order, (S, P) float64, for weights (K, S, n) and features (n, D)."""
    num_draws = weights.shape[1]
    sums = (multiply or torch.matmul)(weights.flatten(0, 1), features)
    weight = sums.view(layout.num_outputs, num_draws, -1).transpose(0, 1).double()
    bias = weights.sum(dim=2, dtype=sums.dtype).T.double() if layout.has_bias else None
    return layout.join(weight, bias)


def label_sums(features: Tensor, labels: Tensor, layout: HeadLayout) -> Tensor:
    """Return sum_n onehot(y_n) x x_n in theta order, (P,) float64, for features (n, D) and labels (n,) or (n, C)."""
    likelihood, num_outputs = layout.likelihood, layout.num_outputs
    if features.device.type != "cpu" or not likelihood.is_shift_invariant:  # only a softmax has one output per label
        indicators = likelihood.indicators(labels, features.dtype)
        return weighted_feature_sums(indicators.unsqueeze(1), features, layout)[0]
    # Add each row to one output, instead of a product with K rows (in a fixed order, as on a CPU).
    weight = features.new_zeros(num_outputs, features.shape[1]).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=num_outputs).to(features.dtype) if layout.has_bias else None
    return layout.join(weight.unsqueeze(0), None if counts is None else counts.unsqueeze(0))[0].double()


def row_blocks(num_rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Return slices of examples such that a block of rows times `columns` fits into cache."""
    return slices(0, num_rows, max(1, BLOCK_ELEMENTS.get(device.type, 2**19) // columns))


def draw_blocks(theta: Tensor, layout: HeadLayout) -> tuple[Tensor, ...]:
    """Split theta (S, P) into blocks of draws whose logits are a matrix product of efficient height."""
    rows = _MAX_ROWS.get(theta.device.type, 1024)
    return theta.split(max(1, rows // layout.num_outputs))


Multiply: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


_SCALED = 14  # power of two below which a split operand lies; float16 ends at 2^16


_HALF_STEP = 2.0**11  # the remainder beyond float16's mantissa is smaller by this factor


_DROPPED = 13  # of float32's 23 mantissa bits, for TF32


def multiply_in(precision: str) -> Multiply:
    """Return a function that multiplies float32 matrices (n, m) and (m, p) in tf32 or bfloat16, with float32 result (n, p)."""
    return {"tf32": _multiply_tf32, "bfloat16": _multiply_bfloat16}[precision]


def multiply_halves(left: Tensor, right: Tensor) -> Tensor:
    """Multiply left (n, m) float32 by right (m, p) float16, with float32 result (n, p), on a GPU.

    Left is split into two float16 numbers, which keep 22 of its 24 bits (except for values 2^29 times smaller than its
    largest). On an H200 the error is 1.1e-6 against float32's 3.7e-7 (logits with standard deviation 0.45, D = 2,048),
    in a sixth of the time.
    """
    exponent = torch.frexp(left.abs().amax()).exponent.clamp_min(-100)
    scale = torch.ldexp(torch.ones((), device=left.device), _SCALED - exponent)
    scaled = left * scale
    high = scaled.half()
    low = scaled.sub_(high).mul_(_HALF_STEP).half()
    product = torch.mm(high, right, out_dtype=torch.float32)
    return product.add_(torch.mm(low, right, out_dtype=torch.float32), alpha=1 / _HALF_STEP).div_(scale)


def rough_multiply(device: torch.device) -> Multiply | None:
    """Return multiply_in's bfloat16 function if it is faster than float32 on the device (rounded on a CPU); else None."""
    if not has_bfloat16_products(device):
        return None
    return _multiply_and_round if device.type == "cpu" else _multiply_bfloat16


def round_to_tf32(tensor: Tensor) -> Tensor:
    """Round a float32 tensor to 10 mantissa bits, ties to even, as float32; infinities and NaN stay."""
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
        return torch.mm(left, right, out_dtype=torch.float32)  # rounded logits would lose two more digits
    return left.float() @ right.float()


# Limit for cached logits or probabilities (K, N); larger ones are recomputed. Not relative to free memory, so that
# results do not depend on it.
_KEPT_BYTES = 2**29


_KEPT_SHARE = 8  # one part in this many of a GPU's total memory, since its own work needs the rest


_EARLY_SHARE = 32  # the same, if cached besides computed factors


def fits_cache(num_bytes: int, device: torch.device, *, share: int = _KEPT_SHARE) -> bool:
    """Return whether data that could be recomputed is small enough to cache on the device (on a GPU, 1 / `share` of its memory)."""
    return num_bytes <= (_KEPT_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[1] // share)


class ProbabilityCache:
    """Cache of the probabilities (K, N) at the last evaluated theta (P,), while requested; in a team, of this worker's rows."""

    def __init__(self) -> None:
        self._is_asked = False
        self._theta: Tensor | None = None
        self._values: Tensor | None = None

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Fill the cache in evaluations within this context; drop it afterwards."""
        before, self._is_asked = self._is_asked, True
        try:
            yield
        finally:
            self._is_asked = before
            self._theta = self._values = None

    def room(self, theta: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Return the buffer that an evaluation at theta (1, P) should fill; None if not requested or too large."""
        self._theta = self._values = None
        size, device = shape[0] * shape[1] * dtype.itemsize, theta.device
        if not self._is_asked or len(theta) != 1 or not fits_cache(size, device, share=_EARLY_SHARE):
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            self._values = torch.empty(shape, dtype=dtype, device=device)
            self._theta = theta[0].clone()
        return self._values

    def find(self, theta: Tensor) -> Tensor | None:
        """Return the cached probabilities at theta (P,), in the precision of their evaluation; None if there are none."""
        if self._theta is None or self._values is None or not torch.equal(theta.to(self._theta), self._theta):
            return None
        return self._values


_MOST_COLUMNS = 2**11  # logits per example computed at once, if it has fewer: blocks of few rows are slow


@dataclass(frozen=True)
class HeldOutFeatures:
    """Features with labels.

    Args:
        features: (M, D), on the device and in the precision of the logits.
        labels: (M,), on the device; (M, C) for multi-label.
        layout: layout of weight and bias in theta.
    """

    features: Tensor
    labels: Tensor
    layout: HeadLayout
    is_linearised: ClassVar[bool] = False

    def losses(self, theta: Tensor) -> Tensor:
        """Return -log (M,), float64 nats, of each label's probability averaged over draws theta (S, P).

        For multi-label, the mean over labels of whether each is present.
        """
        theta, layout = theta.to(self.features), self.layout
        blocks = draw_blocks(theta, layout)
        return self.losses_by(
            lambda features: (block_logits(features, block, layout) for block in blocks), num_draws=len(theta)
        )

    def losses_by(self, drawn: Callable[[Tensor], Iterable[Tensor]], *, num_draws: int) -> Tensor:
        """Return the same for draws of the logits.

        Args:
            drawn: returns, for features (n, D), the draws in blocks (K, s, n), which may be overwritten.
            num_draws: S, over all blocks.
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


_SPLIT_PARAMS = 2**17  # from here on, products rather than launches dominate on a GPU


RowProbabilities: TypeAlias = "Callable[[slice, Tensor], Tensor]"


@dataclass(frozen=True)
class LastLayerTarget:
    """The unnormalised log posterior over theta (P,).

    Args:
        features: (N, D), float32 or float16 (float64 for tests), on the compute device, or on the CPU if too large; may
            be memory-mapped.
        labels: (N,) int64 on the compute device, in 0..C-1, with C the number of classes of the layout's likelihood;
            (N, C) uint8, zeros and ones, for multi-label.
        layout: layout of weight and bias in theta.
        prior: of weights and biases, its mean on the compute device.
        likelihood_scale: factor on the log likelihood; N / B for a minibatch of B.
    """

    features: Tensor
    labels: Tensor
    layout: HeadLayout
    prior: Prior
    likelihood_scale: float = 1.0
    _kept: ProbabilityCache = field(default_factory=ProbabilityCache, init=False, repr=False, compare=False)
    is_concave: ClassVar[bool] = True
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        sizes = check_shapes(features=(self.features, "N D"), labels=(self.labels, label_shape(self.likelihood)))
        if sizes["D"] != self.layout.num_features:
            raise DataError(f"the features have {sizes['D']} columns, but the head expects {self.layout.num_features}")
        check_labels(self.labels, self.likelihood)
        object.__setattr__(self, "prior", self.prior.to(self.device))
        if not bool(torch.isfinite(self.label_statistic).all()):  # one pass for both; counts only if it fails
            num_bad = self._sum(lambda rows, block: ((~torch.isfinite(block)).sum(),), columns=self.layout.num_features)
            raise DataError(f"the features contain {int(num_bad[0])} values that are not finite")

    @property
    def rough_structure(self) -> str:
        """Structure of the Hessian that whitens the mode search."""
        return rough_structure(self.layout.num_outputs)

    @property
    def num_examples(self) -> int:
        """Number of examples, N."""
        return self.features.shape[0]

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the labels given the logits."""
        return self.layout.likelihood

    @property
    def device(self) -> torch.device:
        """Device of all products and the labels."""
        return self.labels.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products: the features' own, at least float32."""
        return torch.promote_types(self.features.dtype, torch.float32)

    @property
    def is_resident(self) -> bool:
        """Return whether the features are on the compute device rather than copied in blocks."""
        return self.features.device == self.device

    @cached_property
    def blocks(self) -> FeatureBlocks:
        """The features in blocks of rows on the compute device."""
        return FeatureBlocks(self.features, self.device)

    def rows(self, index: Tensor) -> Tensor:
        """Return the features (B, D) of the rows in index (B,), on the compute device in the products' precision."""
        return self.blocks.gather(index, self.dtype)

    @cached_property
    def label_statistic(self) -> Tensor:
        """t = sum_n onehot(y_n) x x_n in theta order, (P,) float64; the label term is theta . t."""

        def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
            return (label_sums(block, self.labels[rows], self.layout),)

        return self._sum(work, columns=self.layout.num_outputs, dtype=torch.float64)[0]

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return log N(theta | m, Lambda^-1), (S,) float64, for theta (S, P)."""
        return self.prior.log_density(theta, self.layout)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """Return the sum over examples of log p(y | x, theta) times likelihood_scale, (S,) float64, for theta (S, P)."""
        self._check(theta)
        theta = theta.to(self.device, self.dtype)
        return torch.cat([self._block_log_likelihood(block) for block in draw_blocks(theta, self.layout)])

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return log likelihood plus log prior, (S,) float64 nats, for theta (S, P); differentiable."""
        if theta.requires_grad and torch.is_grad_enabled():
            return value_with_gradient(theta, self.log_joint_and_grad)
        theta = theta.to(self.device)
        return self.log_likelihood(theta) + self.log_prior(theta.to(self.dtype))

    def log_joint_and_grad(self, theta: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the log joint (S,) and its gradient (S, P), both float64, for theta (S, P).

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
        """Return probabilities of the outputs under one theta (P,); for a single output, of label 1.

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
        """Return a function from a slice of rows and their features (n, D) to their probabilities (K, n) under theta (P,).

        Args:
            all_at_once: they are needed more than once, so compute them now if small enough to cache.
        """
        kept = self._kept.find(theta)
        if kept is None and all_at_once:
            kept = self._kept_probabilities(theta)
        return lambda rows, block: self.probabilities(theta, block) if kept is None else kept[:, rows]

    def keeping(self) -> AbstractContextManager[None]:
        """Within this context, evaluations at one theta cache their probabilities for the Hessian."""
        return self._kept.asked()

    def hessian_operator(self, theta: Tensor, *, is_rough: bool = False) -> Callable[[Tensor], Tensor]:
        """Return a function (M, P) -> (M, P) float64 that multiplies by the Hessian of -log_joint at theta (P,).

        The likelihood's Hessian x x x^T summed over examples, plus the prior's precisions; exact for a linear layer.
        Probabilities (K, N) are cached if small enough, so that each product reads the features once. Rough products
        use bfloat16 if the device is faster at it; their error is about half a percent.
        """
        probabilities = self.row_probabilities(theta, all_at_once=True)
        product = rough_multiply(self.device) if is_rough and self.dtype == torch.float32 else None

        def multiply(vectors: Tensor) -> Tensor:
            return self._multiply_hessian(probabilities, vectors.to(self.device, self.dtype), product)

        return count_products(multiply)

    def curvature(self, structure: str) -> Curvature:
        """Return the `curvature` of this name. Raises UsageError if there is none."""
        kind: Curvature = registry.load_class("curvature", structure)
        return kind

    def hessian_vector_product(self, theta: Tensor, vectors: Tensor) -> Tensor:
        """Return the Hessian of -log_joint at theta (P,) times vectors (M, P), (M, P) float64."""
        return self.hessian_operator(theta)(vectors)

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """Return features (B, D) and label indicators (B, K) of the rows in index (B,), in the products' precision."""
        return self.rows(index), self.likelihood.indicators(self.labels[index], self.dtype).T

    def minibatch(self, *examples: Tensor) -> MinibatchTarget:
        """Return the target estimated from some examples, with the likelihood scaled by N / B: unbiased."""
        features, indicators = examples
        return MinibatchTarget(self, features, indicators.T.unsqueeze(1))

    def with_prior(self, prior: Prior) -> LastLayerTarget:
        """Return the same data under another prior."""
        other = copy.copy(self)  # keep what is known of the data: checking again would take a pass
        object.__setattr__(other, "prior", prior.to(self.device))
        return other

    def some(self, index: Tensor) -> LastLayerTarget:
        """Return the target of only the rows in index (n,), on the compute device, under the same prior."""
        labels = self.labels[index.to(self.device)]
        return LastLayerTarget(self.rows(index), labels, self.layout, self.prior, self.likelihood_scale)

    def held_out(self, features: Tensor, labels: Tensor) -> HeldOutFeatures:
        """Return other features (M, D) with labels (M,) or (M, C), to judge posteriors by."""
        return HeldOutFeatures(features.to(self.device, self.dtype), labels.to(self.device), self.layout)

    def _kept_probabilities(self, theta: Tensor) -> Tensor | None:
        """Return the probabilities (K, N) under theta (P,); None if too large to cache, or out of memory."""
        size = self.layout.num_outputs * self.num_examples * self.dtype.itemsize
        if not fits_cache(size, self.device):
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            return self.probabilities(theta)
        return None

    def _check(self, theta: Tensor) -> None:
        check_shapes(theta=(theta, f"S {self.layout.num_params}"))

    def _sum(self, work: Work, *, columns: int, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return self.blocks.sum(work, columns=columns, dtype=dtype or self.dtype)

    def _products(self, dtype: torch.dtype) -> tuple[torch.dtype, Multiply | None]:
        """Return the type in which to read features for a precision, and the product function; None for plain products."""
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
            # Residuals rather than probabilities: smaller float32 sums have smaller rounding errors.
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
    """A target estimated from some examples, in few operations and without checks, for many steps.

    Args:
        target: of all examples.
        features: (B, D), in theta's precision.
        indicators: (K, 1, B), the likelihood's for their labels, or (K, S, B) if each of S thetas has its own labels.
    """

    target: LastLayerTarget
    features: Tensor
    indicators: Tensor

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log joint (S,), float64, and its gradient (S, P), in theta's precision, for theta (S, P)."""
        target = self.target
        scale = target.likelihood_scale * target.num_examples / self.features.shape[0]
        value, gradient = self.log_likelihood_and_grad(theta)
        log_joint = torch.add(target.log_prior(theta), value, alpha=scale)
        return log_joint, torch.add(target.prior.gradient(theta, target.layout), gradient, alpha=scale)

    def log_likelihood_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log likelihood (S,) of only these examples and its gradient (S, P), in theta's precision, for theta (S, P)."""
        layout, indicators = self.target.layout, self.indicators
        logits = block_logits(self.features, theta, layout)
        label_term = (logits * indicators).sum(dim=(0, 2))
        normalizers, probabilities = layout.likelihood.normalize_(logits)
        residuals = torch.sub(indicators, probabilities, out=probabilities)  # in the layout that the product needs
        weight = (residuals.flatten(0, 1) @ self.features).view(layout.num_outputs, theta.shape[0], -1).transpose(0, 1)
        bias = residuals.sum(dim=2).T if layout.has_bias else None
        return label_term - normalizers.sum(dim=1), layout.join(weight, bias)


_BLOCK_EXAMPLES = {"cpu": 2**13, "cuda": 2**16}


def sum_over_examples(
    target: LastLayerTarget, theta: Tensor, sums: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Sum `sums` over blocks of examples.

    `sums` takes features (n, F), with a final column of ones if there is a bias, and probabilities (K, n) at theta
    (P,).
    """
    layout, probabilities = target.layout, target.row_probabilities(theta)

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        signals.raise_if_interrupted("the Hessian")
        return sums(layout.augment_features(block), probabilities(rows, block))

    size = _BLOCK_EXAMPLES.get(target.device.type, 2**13)
    columns = max(layout.num_outputs, BLOCK_ELEMENTS.get(target.device.type, 2**19) // size)
    return target.blocks.sum(work, columns=columns, dtype=target.dtype)


def scale_by_likelihood(part: Tensor, target: LastLayerTarget) -> Tensor:
    """Multiply the part by the scale of the target's likelihood."""
    return part if target.likelihood_scale == 1.0 else torch.mul(part, target.likelihood_scale)
