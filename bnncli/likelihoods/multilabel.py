"""Several labels an example, each there or not by itself: L logits are L independent Bernoulli outputs, p_l = sigma(f_l).

Labels are zeros and ones (n, L). Nothing ties the outputs to each other: the Hessian is diagonal in them, and a posterior over
a last layer under independent priors is the product of L separate ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Multilabel:
    """L >= 2 labels by as many logits; its methods are those of bnncli.likelihoods.Likelihood, its classes are the labels."""

    num_outputs: int
    name: ClassVar[str | None] = "multilabel"
    is_shift_invariant: ClassVar[bool] = False
    is_exclusive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_outputs < 2:
            raise ValueError(f"multi-label data need at least two outputs, got {self.num_outputs}")

    @property
    def num_classes(self) -> int:
        """L."""
        return self.num_outputs

    @property
    def num_pairs(self) -> int:
        """L: each output with itself."""
        return self.num_outputs

    def output_names(self, classes: list[str]) -> list[str]:
        """The labels' own."""
        return classes

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """(L, n): the labels themselves."""
        return labels.T.to(dtype).contiguous()

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """sum_l log(1 + exp(f_l)), (S, n)."""
        return torch.nn.functional.softplus(logits).sum(dim=0)

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """sum_l log(1 + exp(f_l)), (S, n), and sigma(f), (L, S, n)."""
        return torch.nn.functional.softplus(logits).sum(dim=0), logits.sigmoid_()

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """p_l (1 - p_l)."""
        return probabilities * (1 - probabilities)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """diag(sum_n p_l (1 - p_l))."""
        return self.hessian_diagonal(probabilities).sum(dim=1).double().diag()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """p_l (1 - p_l)."""
        return self.hessian_diagonal(probabilities)

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """diag(sqrt(p_l (1 - p_l))), (L, L, n)."""
        return self.hessian_diagonal(probabilities).sqrt().T.diag_embed().permute(1, 2, 0)

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """p_l (1 - p_l) u_l."""
        return vectors.sub_(probabilities * vectors).mul_(probabilities)

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """The logits as they are: each is that of a label against its absence."""
        return logits

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """The logits as they are."""
        return logits

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """sigma(f)."""
        return torch.sigmoid(logits)

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """log sigma(f)."""
        return torch.nn.functional.logsigmoid(logits)

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """sigma(f), and p log p + (1 - p) log(1 - p) of each label: -log(1 + e^-|f|) - |f| sigma(-|f|)."""
        size = logits.abs()
        terms = size.mul(torch.sigmoid(-size)).add_(torch.nn.functional.softplus(-size)).neg_()
        return torch.sigmoid(logits), terms

    def log_partitions(self, logits: Tensor) -> Tensor:
        """sum_l log(1 + exp(f_l)), the joint energy with its sign turned: Wang et al. (2021), arXiv 2109.14162."""
        return torch.nn.functional.softplus(logits).sum(dim=1)

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """sum_l log p of label l being there or not."""
        return -torch.nn.functional.softplus(_against(logits, labels)).sum(dim=-1)

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The same: it keeps all digits as it is."""
        return self.decision_logs(logits, labels).sum(dim=0)

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of each label being there or not, (L, S, n)."""
        return -torch.nn.functional.softplus(_against(logits, labels.T.unsqueeze(1)))

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How far each label's logit lies on the wrong side of 0: f where it is not there, -f where it is."""
        return _against(logits.double(), labels)

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """The mean over the labels of log(1 + exp(scale times the margin))."""
        margins = scale * self.margins(logits, labels)
        return torch.logaddexp(margins, torch.zeros_like(margins)).mean(dim=1)

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Means over the labels of m sigma(s m) and m^2 sigma(s m) sigma(-s m), m the margins and s the scale."""
        margins = self.margins(logits, labels)
        probs = torch.sigmoid(scale * margins)
        return (margins * probs).mean(dim=1), (margins.square() * probs * torch.sigmoid(-scale * margins)).mean(dim=1)


def _against(logits: Tensor, labels: Tensor) -> Tensor:
    """What speaks against each label: -f where it is there, f where it is not."""
    return torch.where(labels != 0, -logits, logits)
