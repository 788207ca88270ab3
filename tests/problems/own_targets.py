"""Targets that are none of ours, with layouts, likelihoods and curvature of their own: a banana, and a network of two layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bnncli.errors import UsageError
from bnncli.likelihoods import Likelihood, likelihood_of
from bnncli.parameters.layouts import ParamPart, consecutive_parts, parts_to_json
from bnncli.parameters.prior import Prior
from bnncli.targets.target import LogJoint

NOISE_SD = 1.5
STANDARD = Prior(1.0)


class Pair:
    """theta = (a, b)."""

    num_params = 2
    parts: tuple[ParamPart, ...] = consecutive_parts([("a", (), False), ("b", (), False)])

    def to_json(self) -> list[dict[str, object]]:
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, object]:
        return {}


@dataclass(frozen=True)
class Banana:
    """Examples y_n ~ N(a + b^2, 1.5^2), under a, b ~ N(0, 1) if nothing else is said: a ridge along a parabola."""

    values: Tensor
    scale: float = 1.0
    prior: Prior = STANDARD
    layout = Pair()
    device = torch.device("cpu")
    dtype = torch.float64
    is_resident = True
    is_capturable = True
    is_concave = False
    is_linearised = False
    rough_structure = "diag"

    @property
    def num_examples(self) -> int:
        return len(self.values)

    def log_likelihoods(self, theta: Tensor) -> Tensor:
        """Of each example, (S, N)."""
        misfit = (self.values - (theta[:, :1] + theta[:, 1:] ** 2).double()) / NOISE_SD
        return -0.5 * misfit.square() - math.log(NOISE_SD * math.tau**0.5)

    def log_joint(self, theta: Tensor) -> Tensor:
        return self.scale * self.log_likelihoods(theta).sum(dim=1) + self.prior.log_density(theta, self.layout)

    def log_joint_and_grad(self, theta: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        a, b = theta.double().unbind(dim=1)
        pull = self.scale * (self.values - (a + b**2).unsqueeze(1)).sum(dim=1) / NOISE_SD**2
        gradient = torch.stack([pull, 2 * b * pull], dim=1)
        return self.log_joint(theta), gradient + self.prior.gradient(theta.double(), self.layout)

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        return (self.values[index],)

    def minibatch(self, *examples: Tensor) -> LogJoint:
        return replace(self, values=examples[0], scale=self.num_examples / len(examples[0]))

    def with_prior(self, prior: Prior) -> Banana:
        return replace(self, prior=prior)

    def hessian_operator(self, theta: Tensor, *, is_rough: bool = False) -> Callable[[Tensor], Tensor]:
        """By the Gauss-Newton matrix, which is positive definite everywhere."""
        jacobian = torch.tensor([1.0, 2 * float(theta[1])], dtype=torch.float64)
        matrix = self.num_examples / NOISE_SD**2 * torch.outer(jacobian, jacobian)
        return lambda vectors: vectors @ matrix - self.prior.gradient(vectors.double(), self.layout)

    def second_derivatives(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        matrix = self.hessian(theta)
        return lambda vectors: vectors @ matrix - self.prior.gradient(vectors.double(), self.layout)

    def curvature(self, structure: str) -> OwnCurvature:
        return OwnCurvature(structure, Banana.hessian, is_exact=True)

    def hessian(self, theta: Tensor) -> Tensor:
        """The exact Hessian of the negative log likelihood, (2, 2)."""
        a, b = theta.double()
        residual = (self.values - a - b**2).sum()
        rows = [[self.num_examples, 2 * b * self.num_examples], [2 * b * self.num_examples, 0]]
        rows[1][1] = 4 * b**2 * self.num_examples - 2 * residual
        return torch.tensor(rows, dtype=torch.float64) / NOISE_SD**2

    def losses(self, theta: Tensor) -> Tensor:
        """Of each value as a held-out one."""
        return math.log(len(theta)) - self.log_likelihoods(theta).logsumexp(dim=0)


@dataclass(frozen=True)
class OwnCurvature:
    """The full structure, or the diagonal, of a matrix (P, P) that a function of target and theta gives."""

    structure: str
    matrix: Callable[..., Tensor]
    is_exact: bool
    fixed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.structure not in ("full", "diag"):
            raise UsageError(f"structure: expected full or diag, got {self.structure}")

    def hessian(self, target: object, theta: Tensor) -> dict[str, Tensor]:
        found = self.matrix(target, theta)
        return {f"hessian.{self.structure}": found.diagonal().clone() if self.structure == "diag" else found}


PARTS = consecutive_parts([("V", (2, 2), False), ("c", (2,), True), ("W", (3, 2), False), ("b", (3,), True)])


class TanhLayout:
    """tanh(x V^T + c) W^T + b of two inputs, two hidden units and three outputs."""

    num_features, num_outputs, num_classes, widest = 2, 3, 3, 3
    head: None = None
    network: None = None
    takes_any_length = False
    likelihood: Likelihood = likelihood_of(3)

    parts = PARTS

    @property
    def num_params(self) -> int:
        return self.parts[-1].place.stop

    def to_json(self) -> list[dict[str, object]]:
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, object]:
        return {"sizes": [2, 2, 3]}

    def split(self, theta: Tensor) -> list[Tensor]:
        """V, c, W and b, (..., *shape), of theta (..., P)."""
        shapes = [part.shape for part in PARTS]
        flat = theta.split([math.prod(shape) for shape in shapes], dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(flat, shapes, strict=True)]

    def logits_of(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """(N, K) under one theta (P,)."""
        return self.logits(inputs, theta.unsqueeze(0))[0]

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        first, shift, last, bias = self.split(theta)
        hidden = (features @ first.mT + shift.unsqueeze(1)).tanh()
        return hidden @ last.mT + bias.unsqueeze(1)

    def jacobian(self, features: Tensor, theta: Tensor) -> Tensor:
        """Of W's rows and b the output's own alone, of V and c through W."""
        first, shift, last, _ = self.split(theta)
        hidden = (features @ first.T + shift).tanh()
        outputs = torch.eye(self.num_outputs, dtype=theta.dtype).expand(len(features), -1, -1)
        through = last * (1 - hidden.square()).unsqueeze(1)
        blocks = (
            torch.einsum("nkh,nd->nkhd", through, features).flatten(2),
            through,
            torch.einsum("nkl,nh->nklh", outputs, hidden).flatten(2),
            outputs,
        )
        return torch.cat(blocks, dim=2)


@dataclass(frozen=True)
class TanhTarget:
    """The log posterior of such a network, inputs (N, D), labels (N,)."""

    inputs: Tensor
    labels: Tensor
    prior: Prior = STANDARD
    scale: float = 1.0
    layout = TanhLayout()
    device = torch.device("cpu")
    dtype = torch.float64
    is_resident = True
    is_capturable = True
    is_concave = False
    is_linearised = False
    rough_structure = "diag"

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    def log_joint(self, theta: Tensor) -> Tensor:
        return self.scale * self.log_likelihoods(theta).sum(dim=1) + self.prior.log_density(theta, self.layout)

    def log_likelihoods(self, theta: Tensor) -> Tensor:
        """Of each example, (S, N)."""
        log_probs = self.layout.logits(self.inputs, theta.double()).log_softmax(dim=2)
        return log_probs[:, torch.arange(len(self.labels)), self.labels]

    def log_joint_and_grad(self, theta: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        labels = one_hot(self.labels, self.layout.num_outputs)
        residuals = labels - self.layout.logits(self.inputs, theta.double()).softmax(dim=2)
        rows = torch.stack([self.layout.jacobian(self.inputs, one.double()) for one in theta])
        gradient = self.scale * torch.einsum("snk,snkp->sp", residuals, rows)
        return self.log_joint(theta), gradient + self.prior.gradient(theta.double(), self.layout)

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        return self.inputs[index], self.labels[index]

    def minibatch(self, *examples: Tensor) -> LogJoint:
        inputs, labels = examples
        return replace(self, inputs=inputs, labels=labels, scale=self.num_examples / len(labels))

    def with_prior(self, prior: Prior) -> TanhTarget:
        return replace(self, prior=prior)

    def hessian_operator(self, theta: Tensor, *, is_rough: bool = False) -> Callable[[Tensor], Tensor]:
        matrix = self.ggn(theta)
        return lambda vectors: vectors.double() @ matrix - self.prior.gradient(vectors.double(), self.layout)

    def second_derivatives(self, theta: Tensor) -> Callable[[Tensor], Tensor]:
        matrix = torch.autograd.functional.hessian(lambda one: -self.log_joint(one.unsqueeze(0)).sum(), theta.double())
        return lambda vectors: vectors.double() @ matrix

    def curvature(self, structure: str) -> OwnCurvature:
        return OwnCurvature(structure, TanhTarget.ggn, is_exact=False)

    def ggn(self, theta: Tensor) -> Tensor:
        """sum_n J_n^T (diag(p_n) - p_n p_n^T) J_n, (P, P), of all examples."""
        rows = self.layout.jacobian(self.inputs, theta.double())
        probs = self.layout.logits_of(theta.double(), self.inputs).softmax(dim=1)
        weighted = probs.unsqueeze(2) * (rows - torch.einsum("nk,nkp->np", probs, rows).unsqueeze(1))
        return torch.einsum("nkp,nkq->pq", rows, weighted)

    def losses(self, theta: Tensor) -> Tensor:
        """Of each example as a held-out one."""
        return math.log(len(theta)) - self.log_likelihoods(theta).logsumexp(dim=0)
