"""How the head's weight and bias lie in theta, written once.

theta is the weight (K, D) row-major, then the bias (K,), the order of torch.nn.utils.parameters_to_vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood, likelihood_of, name_to_record, recorded_name
from bnncli.theta.layout import LogitMaker, ParamPart, consecutive, parts_to_json

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeadLayout:
    """Sizes of the last linear layer: K outputs, D features, with or without a bias; and what the outputs mean.

    Args:
        likelihood_name: of the outputs' likelihood, None where their number says it.
    """

    num_outputs: int
    num_features: int
    has_bias: bool = True
    likelihood_name: str | None = None

    def __post_init__(self) -> None:
        if self.num_outputs < 1 or self.num_features < 1:
            raise ValueError(f"a head needs at least one output and one feature, got {self!r}")
        _ = self.likelihood  # an unknown name is told here

    def __str__(self) -> str:
        outputs = f"{self.num_outputs} output{'s' * (self.num_outputs > 1)}"
        meant = "" if self.likelihood_name is None else f" ({self.likelihood_name})"
        return f"{outputs} of {self.num_features} features{'' if self.has_bias else ', without bias'}{meant}"

    @property
    def num_params(self) -> int:
        """P: K * D, plus K with a bias."""
        return self.num_outputs * (self.num_features + self.has_bias)

    @property
    def likelihood(self) -> Likelihood:
        """What the K logits say of a label."""
        return likelihood_of(self.num_outputs, self.likelihood_name)

    @property
    def num_classes(self) -> int:
        """Classes that the likelihood tells apart."""
        return self.likelihood.num_classes

    @property
    def widest(self) -> int:
        """Its classes."""
        return self.num_classes

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight (..., K, D) and bias (..., K), or None, as views of theta (..., P)."""
        size = self.num_outputs * self.num_features
        weight = theta[..., :size].unflatten(-1, (self.num_outputs, self.num_features))
        return weight, theta[..., size:] if self.has_bias else None

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """theta (..., P) from weight (..., K, D) and bias (..., K); the inverse of split."""
        flat = weight.flatten(-2)
        return flat if bias is None else torch.cat([flat, bias], dim=-1)

    def augment(self, theta: Tensor) -> Tensor:
        """theta (..., P) as one matrix (..., K, D + 1) whose last column is the bias; (..., K, D) without a bias."""
        weight, bias = self.split(theta)
        return weight if bias is None else torch.cat([weight, bias.unsqueeze(-1)], dim=-1)

    def flatten(self, augmented: Tensor) -> Tensor:
        """theta (..., P) from the matrix that augment made."""
        if not self.has_bias:
            return augmented.flatten(-2)
        return self.join(augmented[..., :-1], augmented[..., -1])

    def augment_features(self, features: Tensor) -> Tensor:
        """Features (N, D) with a column of ones for the bias, (N, D + 1); unchanged without a bias."""
        if not self.has_bias:
            return features
        return torch.cat([features, features.new_ones(features.shape[0], 1)], dim=1)

    def places(self, device: torch.device) -> Tensor:
        """Where each output's parameters (the bias last) lie in theta, (K, D + 1); (K, D) without a bias."""
        return self.augment(torch.arange(self.num_params, device=device))

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of features (N, D) under theta (S, P), as one matrix product."""
        weight, bias = self.split(theta)
        stacked = weight.reshape(-1, self.num_features)
        flat = features @ stacked.T
        out = flat.unflatten(1, (theta.shape[0], self.num_outputs)).transpose(0, 1)
        return out if bias is None else out + bias.unsqueeze(1)

    @property
    def network(self) -> None:
        """None: features times weights."""
        return None

    @property
    def head(self) -> HeadLayout:
        """Itself."""
        return self

    def jacobian(self, features: Tensor, theta: Tensor | None = None) -> Tensor:
        """The logits' derivatives by theta, (N, K, P), at features (N, D) and any theta.

        An output's parameters move that output alone.
        """
        outputs = torch.eye(self.num_outputs, dtype=features.dtype, device=features.device)
        rows = outputs.unsqueeze(2) * self.augment_features(features)[:, None, None]
        return self.flatten(rows)

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """The logits under each of theta (S, P), one product for all; the center is at their mean, weighted by weights (S,)."""
        augmented = self.augment(theta)
        if weights is None:
            center = augmented.mean(dim=0)
        else:
            center = torch.tensordot(weights.to(theta), augmented, dims=1)

        def at(features: Tensor) -> tuple[Tensor, Callable[[slice], Tensor]]:
            columns = self.augment_features(features).T

            def logits(some: slice) -> Tensor:
                chunk = augmented[some]
                return (chunk.flatten(0, 1) @ columns).unflatten(0, chunk.shape[:2])

            return center @ columns, logits

        return at

    @property
    def takes_any_length(self) -> bool:
        """False."""
        return False

    def can_replace(self, head: HeadLayout) -> bool:
        """Whether a theta of this layout can stand where a network has such a head: one of the same, or with a bias beside."""
        return self == head or (self.has_bias and replace(self, has_bias=False) == head)

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """The weight, and the bias where there is one."""
        weight = ("head.weight", (self.num_outputs, self.num_features), False)
        return consecutive([weight, ("head.bias", (self.num_outputs,), True)] if self.has_bias else [weight])

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it: name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """The sizes as JSON."""
        sizes = {"num_outputs": self.num_outputs, "num_features": self.num_features, "has_bias": self.has_bias}
        return {**sizes, **name_to_record(self.likelihood_name)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> HeadLayout:
        """The inverse of to_meta."""
        sizes = int(meta["num_outputs"]), int(meta["num_features"])
        return cls(*sizes, bool(meta["has_bias"]), recorded_name(meta))


def reduced_layout(layout: HeadLayout, rank: int) -> HeadLayout:
    """The layout of theta inside a span of so many dimensions of the features."""
    return replace(layout, num_features=rank)
