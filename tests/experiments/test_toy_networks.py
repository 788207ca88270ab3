"""Small tanh networks: the gradient by hand is that of autograd."""

from __future__ import annotations

import pytest
import torch

from bnncli.experiments._toy_networks import TanhLayout, ToyTarget
from bnncli.parameters.prior import Prior


@pytest.mark.parametrize("widths", [(2, 3), (1, 8, 1), (2, 5, 4, 3)])
@pytest.mark.parametrize("prior", [Prior(1.5), Prior(1.5, 0.25)])
def test_the_gradient_of_the_log_joint_is_that_of_autograd(widths: tuple[int, ...], prior: Prior) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = TanhLayout(widths)
    inputs = torch.randn(7, widths[0], generator=generator, dtype=torch.float64)
    target = ToyTarget(inputs, layout, prior, lambda outputs: -outputs.logsumexp(dim=2).square().sum(dim=1))
    theta = torch.randn(4, layout.num_params, generator=generator, dtype=torch.float64, requires_grad=True)
    value = target.log_joint(theta)
    (expected,) = torch.autograd.grad(value.sum(), theta)
    found = target.log_joint_and_grad(theta)
    torch.testing.assert_close(found[0], value.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1], expected, rtol=1e-11, atol=1e-12)
