"""A likelihood that is none of ours, one class against the rest by independent outputs, in a target and the fits on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from bnncli import registry
from bnncli.inference.laplace import fit_gaussian
from bnncli.likelihoods import Categorical
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget


class OneAgainstTheRest(Categorical):
    """Each of K outputs is the logit of its class against all others: log p = sum_k (indicator_k f_k - softplus(f_k))."""

    is_shift_invariant: ClassVar[bool] = False

    @property
    def num_pairs(self) -> int:
        return self.num_outputs

    def log_normalizers_(self, logits: Tensor) -> Tensor:
        return softplus(logits).sum(dim=0)

    def normalize_(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_normalizers_(logits), torch.sigmoid(logits)

    def hessian_sum(self, probabilities: Tensor) -> Tensor:
        return self.hessian_diagonal(probabilities).sum(dim=1).double().diag()

    def hessian_pairs(self, probabilities: Tensor) -> Tensor:
        return self.hessian_diagonal(probabilities)

    def hessian_product_(self, probabilities: Tensor, vectors: Tensor) -> Tensor:
        return vectors.mul_(self.hessian_diagonal(probabilities))


@dataclass(frozen=True)
class Layout(HeadLayout):
    """A head whose outputs are judged that way."""

    @property
    def likelihood(self) -> OneAgainstTheRest:
        return OneAgainstTheRest(self.num_outputs)


LAYOUT = Layout(3, 4)


def make_target() -> LastLayerTarget:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    return LastLayerTarget(features, torch.randint(3, (60,), generator=generator), LAYOUT, Prior(2.0))


def naive_log_joint(target: LastLayerTarget, theta: Tensor) -> Tensor:
    weight, bias = LAYOUT.split(theta)
    assert bias is not None
    distribution = torch.distributions.Bernoulli(logits=target.features @ weight.T + bias)
    value = distribution.log_prob(one_hot(target.labels, 3).double()).sum()
    return value + torch.distributions.Normal(torch.zeros_like(theta), 2.0**-0.5).log_prob(theta).sum()


def test_value_and_gradient_are_those_of_the_likelihood_that_the_layout_carries() -> None:
    target, theta = make_target(), torch.randn(5, 15, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaf = theta.clone().requires_grad_()
    values = torch.stack([naive_log_joint(target, one) for one in leaf])
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    torch.testing.assert_close(target.log_joint_and_grad(theta), (values.detach(), gradient))
    torch.testing.assert_close(target.log_joint(theta), values.detach())
    every = torch.arange(60)
    torch.testing.assert_close(target.minibatch(*target.examples(every)).log_joint_and_grad(theta)[0], values.detach())


def test_the_gaussian_at_the_mode_has_the_curvature_of_independent_outputs() -> None:
    target = make_target()
    fit = fit_gaussian(target, start=torch.zeros(15, dtype=torch.float64))
    mode = fit.gaussian.mean
    hessian = torch.autograd.functional.hessian(lambda theta: -naive_log_joint(target, theta), mode)
    assert target.log_joint_and_grad(mode[None])[1].abs().max() < 1e-3
    covariance = fit.gaussian.covariance.unwhiten(torch.eye(15, dtype=torch.float64))
    torch.testing.assert_close(covariance.T @ covariance, torch.linalg.inv(hessian), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        target.hessian_vector_product(mode, torch.eye(15)), hessian, rtol=1e-6, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("structure", ["block", "diag"])
def test_what_independent_outputs_have_no_part_in_is_not_missed(structure: str) -> None:
    target, theta = make_target(), torch.randn(15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = registry.load_class("curvature", "full").hessian(target, theta)["hessian.full"]
    (part,) = registry.load_class("curvature", structure).hessian(target, theta).values()
    places = LAYOUT.places(whole.device)
    blocks = torch.stack([whole[place][:, place] for place in places])
    expected = blocks if structure == "block" else LAYOUT.flatten(blocks.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(part, expected)
    assert whole[places[0]][:, places[1]].abs().max() == 0
