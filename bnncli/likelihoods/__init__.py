"""What the K logits of an example say of its label: log p(y | logits), its derivatives, and probabilities of the classes.

The one place where it is decided what a number of outputs means: a single logit is Bernoulli, the logit of label 1 against
label 0; K >= 2 logits are categorical. Everything else asks a likelihood, which a layout of theta carries.

A trailing underscore says that the logits given are overwritten. Blocks are laid out (K, S, n), outputs, draws, examples: with
the examples innermost, exponentials and sums over the few outputs run on long contiguous rows, four times the speed of a
softmax over the last axis on a CPU.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

from bnncli.likelihoods.bernoulli import Bernoulli
from bnncli.likelihoods.categorical import Categorical

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Likelihood(Protocol):
    """log p(y | f) of a label y in 0..C-1 given K logits f."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def num_classes(self) -> int:
        """C."""

    @property
    def num_pairs(self) -> int:
        """M: pairs of outputs in whose terms the Hessian is told, see hessian_pairs."""

    @property
    def is_shift_invariant(self) -> bool:
        """Whether a constant added to all logits changes nothing: only their differences matter, and a projection keeps those."""

    def output_names(self, classes: list[str]) -> list[str]:
        """A name for each output, of those of the classes."""

    # Blocks of draws and examples: the value is the label's logit, sum_k indicator_k f_k, less the normaliser; its gradient
    # with respect to the logits is indicators less probabilities.

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """(K, n): what each output would be if it were sure of the labels (n,)."""

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """The logarithm of each example's normaliser, (S, n), from logits (K, S, n)."""

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log normalisers (S, n) and probabilities of the outputs (K, S, n) from logits (K, S, n)."""

    # The Hessian of -log p with respect to the logits, from the outputs' probabilities p (K, n). It does not depend on labels.

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """The Hessian's diagonal, (K, n)."""

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """The Hessian summed over the examples, (K, K) float64."""

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """All that the Hessian is made of, (M, n): where shift-invariant, minus its entries k < l (its rows sum to zero); else its
        diagonal (it has no other entries)."""

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian times vectors (K, S, n), which are overwritten, for probabilities (K, 1, n)."""

    # Classes. `dim` is that of the outputs, and of the classes in what is returned.

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Logits whose softmax are the class probabilities."""

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """The same, treating the classes alike: with no offset that a choice of the first class would bring."""

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Probabilities of the classes, summing to one along dim."""

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Their logarithms."""

    # Labels.

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of labels (n,), (R, n), given logits (R, n, K); autograd passes through it quickly."""

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of labels (n,), (S, n), given logits (K, S, n), all digits kept where the probability is near one."""

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How far each class's logit lies above the label's, (n, C) float64, given logits (n, K)."""

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """-log p of labels (n,) given logits (n, K) times scale, one or (n, 1): (n,) float64, nats."""

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """First and second derivative of `losses` with respect to the scale, (n,) each."""


@cache
def likelihood_of(num_outputs: int) -> Likelihood:
    """The likelihood of so many logits."""
    return Bernoulli() if num_outputs == 1 else Categorical(num_outputs)


def outputs_for(num_classes: int) -> int:
    """How many logits a network of our own has for so many classes: one for two, else one each."""
    return 1 if num_classes == 2 else num_classes
