"""What the K logits of an example say of its label: log p(y | logits), its derivatives, and probabilities of the classes.

The one place where it is decided what outputs mean: a single logit is Bernoulli, the logit of label 1 against label 0; K >= 2
logits are categorical, unless a layout of theta says by name that they are otherwise: each a label of its own (multilabel).
Everything else asks a likelihood, which the layout carries.

A trailing underscore says that the logits given are overwritten. Blocks are laid out (K, S, n), outputs, draws, examples: with
the examples innermost, exponentials and sums over the few outputs run on long contiguous rows, four times the speed of a
softmax over the last axis on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.likelihoods.bernoulli import Bernoulli
from bnncli.likelihoods.categorical import Categorical
from bnncli.likelihoods.multilabel import Multilabel

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Likelihood(Protocol):
    """log p(y | f) of a label y given K logits f: a class in 0..C-1, or where classes do not exclude each other zeros and ones (C,).

    In shapes (n,) of labels is (n, C) where they are such.
    """

    @property
    def name(self) -> str | None:
        """What layouts are recorded with; None where the number of outputs says it."""

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

    @property
    def is_exclusive(self) -> bool:
        """Whether an example has exactly one class, so that their probabilities sum to one; else each has its own."""

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

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """R (K, M, n) with R R^T the Hessian of each example, M at most K."""

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian times vectors (K, S, n), which are overwritten, for probabilities (K, 1, n)."""

    # Classes. `dim` is that of the outputs, and of the classes in what is returned.

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Logits whose softmax are the class probabilities; of classes that do not exclude each other, the sigmoid of each."""

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """The same, treating the classes alike: with no offset that a choice of the first class would bring."""

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Probabilities of the classes, summing to one along dim where these exclude each other."""

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Their logarithms."""

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """The probabilities, and terms that sum to minus the entropy along dim: p log p, or that of each class and its absence."""

    def log_partitions(self, logits: Tensor) -> Tensor:
        """The logarithm of what balanced logits sum to, (n,), given logits (n, K): minus the energy."""

    # Labels.

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of labels (n,), (R, n), given logits (R, n, K); autograd passes through it quickly."""

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of labels (n,), (S, n), given logits (K, S, n), all digits kept where the probability is near one."""

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """log p of each decision that an example asks for, (J, S, n), given logits (K, S, n), which may be overwritten.

        J = 1, its class; or C, of each class whether it is there.
        """

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """How far each class's logit lies above the label's (or on the wrong side), (n, C) float64, given logits (n, K)."""

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """-log p, the mean over decisions, of labels (n,) given logits (n, K) times scale, one or (n, 1): (n,) float64, nats."""

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """First and second derivative of `losses` with respect to the scale, (n,) each."""


MULTILABEL = str(Multilabel.name)
BINARY = "binary"  # what a run without a network records of two classes that one logit tells apart
TASKS = ("multiclass", BINARY, MULTILABEL)  # what people call the kinds of labels


@cache
def likelihood_of(num_outputs: int, name: str | None = None) -> Likelihood:
    """The likelihood of so many logits; None for the name where their number says it. Raises ValueError for an unknown name."""
    if name == MULTILABEL:
        return Multilabel(num_outputs)
    if name is not None:
        raise ValueError(f"expected the likelihood {MULTILABEL!r} or none by name, got {name!r}")
    return Bernoulli() if num_outputs == 1 else Categorical(num_outputs)


def recorded_name(meta: Mapping[str, Any]) -> str | None:
    """The name of the likelihood that an artifact records; None where the number of outputs says it."""
    name = meta.get("likelihood")
    return None if name is None else str(name)


def name_to_record(name: str | None) -> dict[str, str]:
    """What an artifact records of it: nothing where the number of outputs says it."""
    return {} if name is None else {"likelihood": name}


def why_unfit(task: str, num_outputs: int) -> str | None:
    """Why so many outputs cannot be for one of TASKS; None where they can."""
    expected = {
        "multiclass": (num_outputs > 1, "at least 2 (a single output distinguishes two classes: \0task\0 binary)"),
        BINARY: (num_outputs <= 2, "1 or 2"),
        MULTILABEL: (num_outputs > 1, "one per label, at least 2"),
    }
    fits, wanted = expected[task]
    return None if fits else f"the head has {num_outputs} output{'s' * (num_outputs > 1)}, expected {wanted}"


def has_exclusive_classes(name: str | None) -> bool:
    """Whether classes exclude each other under the likelihood that is recorded with this name."""
    return name != MULTILABEL


def outputs_for(num_classes: int) -> int:
    """How many logits a network of our own has for so many classes: one for two, else one each."""
    return 1 if num_classes == 2 else num_classes
