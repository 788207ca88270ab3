"""Small tensors that share memory: an optimizer's step on the whole is that on each."""

import torch

from bnncli.training.optimizers import join_memory


def test_a_step_on_the_whole_is_a_step_on_every_part() -> None:
    generator = torch.Generator().manual_seed(0)
    joined = [torch.randn(*shape, generator=generator) for shape in ((2, 3), (4,), (1, 2, 2))]
    apart = [tensor.clone() for tensor in joined]
    gradients = [torch.randn(tensor.shape, generator=generator) for tensor in joined]
    whole = join_memory(joined)
    assert all(torch.equal(one, other) for one, other in zip(joined, apart, strict=True))
    optimizers = [torch.optim.Adam(parts, lr=0.1, fused=True) for parts in ([whole], apart)]
    for factor in (1.0, -3.0):
        for one, other, gradient in zip(joined, apart, gradients, strict=True):
            assert one.grad is not None
            one.grad.copy_(factor * gradient)
            other.grad = factor * gradient
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(joined, apart, strict=True))
