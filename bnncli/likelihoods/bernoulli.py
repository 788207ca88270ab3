"""Two classes by a single logit f: p(1) = sigma(f), p(0) = sigma(-f).

Where classes are asked for they are those of two categorical logits with the same difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.likelihoods.categorical import Categorical

if TYPE_CHECKING:
    from torch import Tensor

_TWO = Categorical(2)


@dataclass(frozen=True)
class Bernoulli:
    """The logit of label 1 against label 0; its methods are those of bnncli.likelihoods.Likelihood."""

    name: ClassVar[str | None] = None
    num_outputs: ClassVar[int] = 1
    num_classes: ClassVar[int] = 2
    num_pairs: ClassVar[int] = 1
    is_shift_invariant: ClassVar[bool] = False
    is_exclusive: ClassVar[bool] = True

    def output_names(self, classes: list[str]) -> list[str]:
        """The one output is no class."""
        return ["logit"]

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """(1, n): the labels themselves."""
        return labels.to(dtype).unsqueeze(0)

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """log(1 + exp(f)), (S, n)."""
        return torch.nn.functional.softplus(logits[0])

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 + exp(f)), (S, n), and sigma(f), (1, S, n)."""
        return torch.nn.functional.softplus(logits[0]), torch.sigmoid(logits)

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """p (1 - p)."""
        return probabilities * (1 - probabilities)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """sum_n p (1 - p)."""
        return self.hessian_diagonal(probabilities).sum(dim=1, keepdim=True).double()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """p (1 - p)."""
        return self.hessian_diagonal(probabilities)

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """sqrt(p (1 - p)), (1, 1, n)."""
        return self.hessian_diagonal(probabilities).sqrt().unsqueeze(0)

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """p (u - p u)."""
        return vectors.sub_(probabilities * vectors).mul_(probabilities)

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """[0, f]: the first class is the reference."""
        return torch.cat([torch.zeros_like(logits), logits], dim=dim)

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """[-f/2, f/2]: of all pairs with that difference the one without a common offset."""
        return torch.cat([-logits / 2, logits / 2], dim=dim)

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """[1 - p, p]."""
        return _TWO.class_probabilities(self.class_logits(logits, dim=dim), dim=dim)

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """[log(1 - p), log p]."""
        return _TWO.log_class_probabilities(self.class_logits(logits, dim=dim), dim=dim)

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """Those of [0, f]."""
        return _TWO.entropy_terms(self.class_logits(logits, dim=dim), dim=dim)

    def log_partitions(self, logits: Tensor) -> Tensor:
        """log(exp(-f/2) + exp(f/2))."""
        return torch.logsumexp(self.balanced_class_logits(logits, dim=1), dim=1)

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log sigma(f) of label 1, log sigma(-f) of label 0."""
        return _log_sigmoid(logits[..., 0], labels)

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The same: it keeps all digits as it is."""
        return _log_sigmoid(logits[0], labels)

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of the label, as its logit less the normaliser, (1, S, n)."""
        label_logits = (logits * self.indicators(labels, logits.dtype).unsqueeze(1)).sum(dim=0)
        return (label_logits - self.log_normalizers_(logits)).unsqueeze(0)

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Those of [0, f]."""
        return _TWO.margins(self.class_logits(logits, dim=1), labels)

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """Those of [0, f]."""
        return _TWO.losses(self.class_logits(logits, dim=1), labels, scale)

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Those of [0, f]."""
        return _TWO.loss_derivatives(self.class_logits(logits, dim=1), labels, scale)


def _log_sigmoid(logit: Tensor, labels: Tensor) -> Tensor:
    """-softplus of what speaks against the label: -f for label 1, f for label 0."""
    signs = (2 * labels - 1).to(logit.dtype)
    return -torch.nn.functional.softplus(-logit * signs)
