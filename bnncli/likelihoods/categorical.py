"""Categorical labels: K logits are K classes, p_k = exp(f_k) / sum_l exp(f_l)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Categorical:
    """K >= 2 classes by as many logits; its methods are those of bnncli.likelihoods.Likelihood."""

    num_outputs: int
    name: ClassVar[str | None] = None
    is_shift_invariant: ClassVar[bool] = True
    is_exclusive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.num_outputs < 2:
            raise ValueError(f"a categorical likelihood needs at least two outputs, got {self.num_outputs}")

    @property
    def num_classes(self) -> int:
        """K."""
        return self.num_outputs

    @property
    def num_pairs(self) -> int:
        """K (K - 1) / 2, the pairs k < l."""
        return self.num_outputs * (self.num_outputs - 1) // 2

    def output_names(self, classes: list[str]) -> list[str]:
        """The classes' own."""
        return classes

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """(K, n): one where an example's label is that output."""
        zeros = torch.zeros(self.num_outputs, labels.shape[0], dtype=dtype, device=labels.device)
        return zeros.scatter_(0, labels.unsqueeze(0), 1.0)

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """log sum_k exp(f_k), (S, n)."""
        largest = logits.amax(dim=0)
        return logits.sub_(largest).exp_().sum(dim=0).log_().add_(largest)

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log sum_k exp(f_k), (S, n), and the softmax (K, S, n)."""
        largest = logits.amax(dim=0)
        probabilities = logits.sub_(largest).exp_()
        total = probabilities.sum(dim=0)
        probabilities.div_(total)
        return total.log_().add_(largest), probabilities

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """p_k (1 - p_k)."""
        return probabilities * (1 - probabilities)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """sum_n (diag(p) - p p^T)."""
        return (probabilities.sum(dim=1).diag() - probabilities @ probabilities.T).double()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """p_k p_l for each pair k < l."""
        size = self.num_outputs
        first, second = torch.triu_indices(size, size, 1, device=probabilities.device)
        return probabilities[first] * probabilities[second]

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """Columns sqrt(p_m) (e_m - p), (K, K, n)."""
        identity = torch.eye(self.num_outputs, dtype=probabilities.dtype, device=probabilities.device)
        return (identity.unsqueeze(2) - probabilities.unsqueeze(1)) * probabilities.sqrt()

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """(diag(p) - p p^T) u = p (u - p . u)."""
        mean = (probabilities * vectors).sum(dim=0)
        return vectors.sub_(mean).mul_(probabilities)

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """The logits as they are."""
        return logits

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """The logits as they are."""
        return logits

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """The softmax."""
        return torch.softmax(logits, dim=dim)

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Its logarithm."""
        return torch.log_softmax(logits, dim=dim)

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """The softmax p, and p log p."""
        log_probs = self.log_class_probabilities(logits, dim=dim)
        probs = log_probs.exp()
        return probs, log_probs.mul_(probs)

    def log_partitions(self, logits: Tensor) -> Tensor:
        """log sum_k exp(f_k)."""
        return torch.logsumexp(logits, dim=1)

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Minus the cross entropy."""
        target = labels.expand(logits.shape[0], -1)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return -losses.view(logits.shape[0], -1)

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-softplus of what speaks against the label: log sum_{k != y} exp(f_k) - f_y."""
        index = labels.view(1, 1, -1).expand(1, *logits.shape[1:])
        own = logits.gather(0, index)[0]
        others = logits.scatter(0, index, -torch.inf).logsumexp(dim=0)
        return -torch.nn.functional.softplus(others - own)

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of the label, as its logit less the normaliser, (1, S, n)."""
        label_logits = (logits * self.indicators(labels, logits.dtype).unsqueeze(1)).sum(dim=0)
        return (label_logits - self.log_normalizers_(logits)).unsqueeze(0)

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """f_k - f_y."""
        block = logits.double()
        return block - block.gather(1, labels.unsqueeze(1))

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """log sum_k exp(scale (f_k - f_y))."""
        return torch.logsumexp(scale * self.margins(logits, labels), dim=1)

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Mean and variance of the margins under the softmax."""
        margins = self.margins(logits, labels)
        probs = torch.softmax(scale * margins, dim=1)
        mean = (probs * margins).sum(dim=1)
        return mean, (probs * (margins - mean.unsqueeze(1)).square()).sum(dim=1)
