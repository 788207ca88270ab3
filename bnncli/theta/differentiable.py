"""Calls of a torch module whose derivatives torch.func gives: forward and backward alike, and under vmap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def differentiable(embeddings: Sequence[nn.Embedding]) -> Iterator[None]:
    """Inside, attention is plain products, and these embeddings have the gradients that they have mathematically.

    Fused kernels of attention have neither forward derivatives nor a rule for vmap.

    Args:
        embeddings: `uneven_embeddings` of the module.
    """
    from torch.nn import attention

    backends = torch.backends.mha
    was_enabled = backends.get_fastpath_enabled()
    backends.set_fastpath_enabled(False)
    for one in embeddings:
        one.forward = partial(_embedded, one)  # type: ignore[method-assign]
    try:
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            yield
    finally:
        backends.set_fastpath_enabled(was_enabled)
        for one in embeddings:
            del one.forward


def is_of_transform(tensor: Tensor) -> bool:
    """Whether a tensor was made within a transform of torch.func, with whose end it ends."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def uneven_embeddings(module: nn.Module) -> list[nn.Embedding]:
    """Embeddings in a module whose backward pass leaves out a row, or weighs rows, where logits depend on all of them alike.

    The row for padding has no gradient in torch's backward pass, but in its forward mode; so that products with the
    Gauss-Newton matrix would not be symmetric, and its gradient not the log posterior's.
    """
    embedding = torch.nn.Embedding
    return [
        one
        for one in module.modules()
        if isinstance(one, embedding)
        and type(one).forward is embedding.forward
        and (one.padding_idx is not None or one.scale_grad_by_freq or one.sparse)
    ]


def _embedded(module: nn.Embedding, indices: Tensor) -> Tensor:
    """What the module makes of indices, without what it does to gradients alone."""
    return torch.nn.functional.embedding(indices, module.weight, max_norm=module.max_norm, norm_type=module.norm_type)
