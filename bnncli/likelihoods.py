"""Likelihoods of labels given logits: log p(y | logits), its derivatives, and class probabilities.

One each for classes (softmax), two classes by one logit (sigmoid), and several labels per example (independent sigmoids).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bnncli.lazy import torch

if TYPE_CHECKING:
    import torch
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
