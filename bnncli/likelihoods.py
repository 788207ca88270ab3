"""Likelihoods of labels given logits: log p(y | logits), its derivatives, and class probabilities.

One class each for exclusive classes (softmax), two classes with one logit (sigmoid), and several labels per example
(independent sigmoids).
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
    """K >= 2 classes with one logit each; see `Likelihood` for the methods."""

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
        """K (K - 1) / 2, the number of pairs k < l."""
        return self.num_outputs * (self.num_outputs - 1) // 2

    def output_names(self, classes: list[str]) -> list[str]:
        """Return the class names."""
        return classes

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return one-hot labels, (K, n)."""
        zeros = torch.zeros(self.num_outputs, labels.shape[0], dtype=dtype, device=labels.device)
        return zeros.scatter_(0, labels.unsqueeze(0), 1.0)

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """Return log sum_k exp(f_k), (S, n)."""
        largest = logits.amax(dim=0)
        return logits.sub_(largest).exp_().sum(dim=0).log_().add_(largest)

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return log sum_k exp(f_k), (S, n), and the softmax (K, S, n)."""
        largest = logits.amax(dim=0)
        probabilities = logits.sub_(largest).exp_()
        total = probabilities.sum(dim=0)
        probabilities.div_(total)
        return total.log_().add_(largest), probabilities

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """Return p_k (1 - p_k)."""
        return probabilities * (1 - probabilities)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """Return sum_n (diag(p) - p p^T)."""
        return (probabilities.sum(dim=1).diag() - probabilities @ probabilities.T).double()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """Return p_k p_l for each pair k < l."""
        size = self.num_outputs
        first, second = torch.triu_indices(size, size, 1, device=probabilities.device)
        return probabilities[first] * probabilities[second]

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """Return columns sqrt(p_m) (e_m - p), (K, K, n)."""
        identity = torch.eye(self.num_outputs, dtype=probabilities.dtype, device=probabilities.device)
        return (identity.unsqueeze(2) - probabilities.unsqueeze(1)) * probabilities.sqrt()

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """Return (diag(p) - p p^T) u = p (u - p . u)."""
        mean = (probabilities * vectors).sum(dim=0)
        return vectors.sub_(mean).mul_(probabilities)

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return the logits unchanged."""
        return logits

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return the logits unchanged."""
        return logits

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return the softmax."""
        return torch.softmax(logits, dim=dim)

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return the log softmax."""
        return torch.log_softmax(logits, dim=dim)

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """Return the softmax p, and p log p."""
        log_probs = self.log_class_probabilities(logits, dim=dim)
        probs = log_probs.exp()
        return probs, log_probs.mul_(probs)

    def log_partitions(self, logits: Tensor) -> Tensor:
        """Return log sum_k exp(f_k)."""
        return torch.logsumexp(logits, dim=1)

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return minus the cross entropy."""
        target = labels.expand(logits.shape[0], -1)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return -losses.view(logits.shape[0], -1)

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return -softplus(log sum_{k != y} exp(f_k) - f_y)."""
        index = labels.view(1, 1, -1).expand(1, *logits.shape[1:])
        own = logits.gather(0, index)[0]
        others = logits.scatter(0, index, -torch.inf).logsumexp(dim=0)
        return -torch.nn.functional.softplus(others - own)

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p of the label, its logit minus the normaliser, (1, S, n)."""
        label_logits = (logits * self.indicators(labels, logits.dtype).unsqueeze(1)).sum(dim=0)
        return (label_logits - self.log_normalizers_(logits)).unsqueeze(0)

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return f_k - f_y."""
        block = logits.double()
        return block - block.gather(1, labels.unsqueeze(1))

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """Return log sum_k exp(scale (f_k - f_y))."""
        return torch.logsumexp(scale * self.margins(logits, labels), dim=1)

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the margins under the softmax."""
        margins = self.margins(logits, labels)
        probs = torch.softmax(scale * margins, dim=1)
        mean = (probs * margins).sum(dim=1)
        return mean, (probs * (margins - mean.unsqueeze(1)).square()).sum(dim=1)


_TWO = Categorical(2)


@dataclass(frozen=True)
class Bernoulli:
    """Two classes with one logit, that of label 1 against label 0; see `Likelihood` for the methods."""

    name: ClassVar[str | None] = None
    num_outputs: ClassVar[int] = 1
    num_classes: ClassVar[int] = 2
    num_pairs: ClassVar[int] = 1
    is_shift_invariant: ClassVar[bool] = False
    is_exclusive: ClassVar[bool] = True

    def output_names(self, classes: list[str]) -> list[str]:
        """Return a generic name, since the output is not a class."""
        return ["logit"]

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the labels, (1, n)."""
        return labels.to(dtype).unsqueeze(0)

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """Return log(1 + exp(f)), (S, n)."""
        return torch.nn.functional.softplus(logits[0])

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(1 + exp(f)), (S, n), and sigma(f), (1, S, n)."""
        return torch.nn.functional.softplus(logits[0]), torch.sigmoid(logits)

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """Return p (1 - p)."""
        return probabilities * (1 - probabilities)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """Return sum_n p (1 - p)."""
        return self.hessian_diagonal(probabilities).sum(dim=1, keepdim=True).double()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """Return p (1 - p)."""
        return self.hessian_diagonal(probabilities)

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """Return sqrt(p (1 - p)), (1, 1, n)."""
        return self.hessian_diagonal(probabilities).sqrt().unsqueeze(0)

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """Return p (u - p u)."""
        return vectors.sub_(probabilities * vectors).mul_(probabilities)

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return [0, f]; the first class is the reference."""
        return torch.cat([torch.zeros_like(logits), logits], dim=dim)

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return [-f/2, f/2], the pair with that difference and no common offset."""
        return torch.cat([-logits / 2, logits / 2], dim=dim)

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return [1 - p, p]."""
        return _TWO.class_probabilities(self.class_logits(logits, dim=dim), dim=dim)

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return [log(1 - p), log p]."""
        return _TWO.log_class_probabilities(self.class_logits(logits, dim=dim), dim=dim)

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """Return the terms of [0, f]."""
        return _TWO.entropy_terms(self.class_logits(logits, dim=dim), dim=dim)

    def log_partitions(self, logits: Tensor) -> Tensor:
        """Return log(exp(-f/2) + exp(f/2))."""
        return torch.logsumexp(self.balanced_class_logits(logits, dim=1), dim=1)

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log sigma(f) for label 1 and log sigma(-f) for label 0."""
        return _log_sigmoid(logits[..., 0], labels)

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log sigma(f) or log sigma(-f), which keeps all digits."""
        return _log_sigmoid(logits[0], labels)

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p of the label, its logit minus the normaliser, (1, S, n)."""
        label_logits = (logits * self.indicators(labels, logits.dtype).unsqueeze(1)).sum(dim=0)
        return (label_logits - self.log_normalizers_(logits)).unsqueeze(0)

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the margins of [0, f]."""
        return _TWO.margins(self.class_logits(logits, dim=1), labels)

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """Return the losses of [0, f]."""
        return _TWO.losses(self.class_logits(logits, dim=1), labels, scale)

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the derivatives for [0, f]."""
        return _TWO.loss_derivatives(self.class_logits(logits, dim=1), labels, scale)


def _log_sigmoid(logit: Tensor, labels: Tensor) -> Tensor:
    """Return -softplus(-f) for label 1 and -softplus(f) for label 0."""
    signs = (2 * labels - 1).to(logit.dtype)
    return -torch.nn.functional.softplus(-logit * signs)


@dataclass(frozen=True)
class Multilabel:
    """L >= 2 labels with one logit each; the classes are the labels. See `Likelihood` for the methods."""

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
        """Return the label names."""
        return classes

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the labels, (L, n)."""
        return labels.T.to(dtype).contiguous()

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """Return sum_l log(1 + exp(f_l)), (S, n)."""
        return torch.nn.functional.softplus(logits).sum(dim=0)

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return sum_l log(1 + exp(f_l)), (S, n), and sigma(f), (L, S, n)."""
        return torch.nn.functional.softplus(logits).sum(dim=0), logits.sigmoid_()

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """Return p_l (1 - p_l)."""
        return probabilities * (1 - probabilities)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """Return diag(sum_n p_l (1 - p_l))."""
        return self.hessian_diagonal(probabilities).sum(dim=1).double().diag()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """Return p_l (1 - p_l)."""
        return self.hessian_diagonal(probabilities)

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """Return diag(sqrt(p_l (1 - p_l))), (L, L, n)."""
        return self.hessian_diagonal(probabilities).sqrt().T.diag_embed().permute(1, 2, 0)

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """Return p_l (1 - p_l) u_l."""
        return vectors.sub_(probabilities * vectors).mul_(probabilities)

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return the logits unchanged; each is that of a label against its absence."""
        return logits

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return the logits unchanged."""
        return logits

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return sigma(f)."""
        return torch.sigmoid(logits)

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return log sigma(f)."""
        return torch.nn.functional.logsigmoid(logits)

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """Return sigma(f), and p log p + (1 - p) log(1 - p) of each label: -log(1 + e^-|f|) - |f| sigma(-|f|)."""
        size = logits.abs()
        terms = size.mul(torch.sigmoid(-size)).add_(torch.nn.functional.softplus(-size)).neg_()
        return torch.sigmoid(logits), terms

    def log_partitions(self, logits: Tensor) -> Tensor:
        """Return sum_l log(1 + exp(f_l)), the negative joint energy of Wang et al. (2021), arXiv:2109.14162."""
        return torch.nn.functional.softplus(logits).sum(dim=1)

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return sum_l log p of the presence or absence of label l."""
        return -torch.nn.functional.softplus(_sign_by_label(logits, labels)).sum(dim=-1)

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return sum_l log p of the presence or absence of label l, with all digits."""
        return self.decision_logs(logits, labels).sum(dim=0)

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p of the presence or absence of each label, (L, S, n)."""
        return -torch.nn.functional.softplus(_sign_by_label(logits, labels.T.unsqueeze(1)))

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return how far each logit lies on the wrong side of 0: f if the label is absent, -f if it is present."""
        return _sign_by_label(logits.double(), labels)

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """Return the mean over labels of log(1 + exp(scale * margin))."""
        margins = scale * self.margins(logits, labels)
        return torch.logaddexp(margins, torch.zeros_like(margins)).mean(dim=1)

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return means over labels of m sigma(s m) and m^2 sigma(s m) sigma(-s m), with margins m and scale s."""
        margins = self.margins(logits, labels)
        probs = torch.sigmoid(scale * margins)
        return (margins * probs).mean(dim=1), (margins.square() * probs * torch.sigmoid(-scale * margins)).mean(dim=1)


def _sign_by_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -f where the label is present and f where it is absent."""
    return torch.where(labels != 0, -logits, logits)


class Likelihood(Protocol):
    """log p(y | f) of labels y given K logits f.

    A label is a class in 0..C-1, or zeros and ones (C,) if classes are not exclusive; then shape (n,) of labels stands
    for (n, C).
    """

    @property
    def name(self) -> str | None:
        """Name recorded in layouts; None if the number of outputs determines the likelihood."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def num_classes(self) -> int:
        """C."""

    @property
    def num_pairs(self) -> int:
        """M, the number of pairs of outputs in `hessian_pairs`."""

    @property
    def is_shift_invariant(self) -> bool:
        """Return whether adding a constant to all logits changes nothing, so that only differences matter."""

    @property
    def is_exclusive(self) -> bool:
        """Return whether each example has exactly one class, so that the probabilities sum to one."""

    def output_names(self, classes: list[str]) -> list[str]:
        """Return a name for each output, given the class names."""

    # Blocks of draws and examples. The log likelihood is the label's logit, sum_k indicator_k f_k, minus the
    # normaliser; its gradient in the logits is indicators minus probabilities.

    def indicators(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (K, n): the probabilities of the outputs if they were certain of the labels (n,)."""

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        """Return the log normaliser of each example, (S, n), from logits (K, S, n)."""

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return log normalisers (S, n) and output probabilities (K, S, n) from logits (K, S, n)."""

    # The Hessian of -log p in the logits, from output probabilities p (K, n). It does not depend on the labels.

    def hessian_diagonal(self, probabilities: Tensor) -> Tensor:
        """Return the diagonal of the Hessian, (K, n)."""

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        """Return the Hessian summed over examples, (K, K) float64."""

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        """Return the numbers that determine the Hessian, (M, n).

        If shift-invariant, minus its entries k < l (rows sum to zero); else its diagonal (all other entries are zero).
        """

    def hessian_root(self, probabilities: Tensor) -> Tensor:
        """Return R (K, M, n) with R R^T the Hessian of each example, M <= K."""

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        """Return the Hessian times vectors (K, S, n), which are overwritten, for probabilities (K, 1, n)."""

    # Classes. `dim` is the dimension of the outputs, and of the classes in the result.

    def class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return logits whose softmax gives the class probabilities; the sigmoid of each if classes are not exclusive."""

    def balanced_class_logits(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return class logits that treat the classes alike, without the offset of a reference class."""

    def class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return class probabilities, which sum to one along dim if the classes are exclusive."""

    def log_class_probabilities(self, logits: Tensor, *, dim: int) -> Tensor:
        """Return log class probabilities."""

    def entropy_terms(self, logits: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """Return p, and terms that sum to minus the entropy along dim: p log p, or p log p + (1 - p) log(1 - p)."""

    def log_partitions(self, logits: Tensor) -> Tensor:
        """Return the log partition function of the balanced logits, (n,), given logits (n, K): minus the energy."""

    # Labels.

    def log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p of labels (n,), (R, n), given logits (R, n, K); fast to differentiate."""

    def sharp_log_likelihoods(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p of labels (n,), (S, n), given logits (K, S, n), accurate where the probability is near one."""

    def decision_logs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p of each decision per example, (J, S, n), given logits (K, S, n), which may be overwritten.

        J = 1 for exclusive classes; else J = C, the presence of each class.
        """

    def margins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return each logit minus the label's (or the distance to the wrong side), (n, C) float64, given logits (n, K)."""

    def losses(self, logits: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
        """Return -log p per decision, (n,) float64, nats, given logits (n, K), labels (n,) and a scale, (n, 1) or scalar."""

    def loss_derivatives(self, logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the first and second derivative of `losses` in the scale, (n,) each."""


MULTILABEL = str(Multilabel.name)
BINARY = "binary"  # recorded by a run without a network, for two classes with one logit
TASKS = ("multiclass", BINARY, MULTILABEL)  # user-facing names of the kinds of labels


@cache
def likelihood_of(num_outputs: int, name: str | None = None) -> Likelihood:
    """Return the likelihood by number of logits, or by name if given. Raises ValueError for an unknown name."""
    if name == MULTILABEL:
        return Multilabel(num_outputs)
    if name is not None:
        raise ValueError(f"expected the likelihood {MULTILABEL!r} or none by name, got {name!r}")
    return Bernoulli() if num_outputs == 1 else Categorical(num_outputs)


def read_recorded_name(meta: Mapping[str, Any]) -> str | None:
    """Return the name of the likelihood recorded in an artifact; None if the number of outputs determines it."""
    name = meta.get("likelihood")
    return None if name is None else str(name)


def name_to_record(name: str | None) -> dict[str, str]:
    """Return the artifact's entry for the likelihood; empty if the number of outputs determines it."""
    return {} if name is None else {"likelihood": name}


def explain_unfit_outputs(task: str, num_outputs: int) -> str | None:
    """Return why so many outputs do not fit one of TASKS; None if they do."""
    expected = {
        "multiclass": (num_outputs > 1, "at least 2 (a single output distinguishes two classes: \0task\0 binary)"),
        BINARY: (num_outputs <= 2, "1 or 2"),
        MULTILABEL: (num_outputs > 1, "one per label, at least 2"),
    }
    fits, wanted = expected[task]
    return None if fits else f"the head has {num_outputs} output{'s' * (num_outputs > 1)}, expected {wanted}"


def has_exclusive_classes(name: str | None) -> bool:
    """Return whether classes are exclusive under the likelihood recorded with this name."""
    return name != MULTILABEL


def outputs_for(num_classes: int) -> int:
    """Return the number of logits of bnncli's own networks: one for two classes, else one per class."""
    return 1 if num_classes == 2 else num_classes
