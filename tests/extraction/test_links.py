"""Logits before a softmax or sigmoid: what went in, with all its digits and derivatives, under autograd and torch.func."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bnncli.models.head import BeforeLinks, logits_before

CONFIDENT = 50.0  # logits: a float64 of the probability is 1
ENDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "method": ("softmax", lambda logits: logits.softmax(-1)),
    "function": ("softmax", lambda logits: nn.functional.softmax(input=logits, dim=-1)),
    "module": ("softmax", nn.Softmax(-1)),
    "logarithm": ("log_softmax", lambda logits: torch.log(torch.softmax(logits, -1))),
    "sigmoid": ("sigmoid", lambda logits: torch.sigmoid(logits).unsqueeze(1).flatten(1)),
    "in place": ("sigmoid", lambda logits: logits.sigmoid_()),
}


@pytest.mark.parametrize("end", ENDS)
def test_logits_of_confident_outputs_are_those_that_went_in(end: str) -> None:
    link, apply = ENDS[end]
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    inputs = torch.tensor([[CONFIDENT], [-CONFIDENT], [0.5]], dtype=torch.float64)

    def logits(weight: Tensor, example: Tensor) -> Tensor:
        with BeforeLinks():
            output = apply((example.unsqueeze(0) @ weight.T) * 1)
        return logits_before(output, link)[0]

    of_all = torch.func.vmap(logits, in_dims=(None, 0))
    torch.testing.assert_close(of_all(weight, inputs), inputs @ weight.T, rtol=0, atol=0)
    rows = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))(weight, inputs)
    pushed = torch.func.jvp(lambda one: of_all(one, inputs), (weight,), (torch.ones_like(weight),))[1]
    torch.testing.assert_close(rows.sum(dim=(2, 3)), inputs.expand(3, 2))
    torch.testing.assert_close(pushed, inputs.expand(3, 2))


def test_probabilities_of_unseen_origin_are_undone_as_far_as_numbers_go() -> None:
    logits = torch.tensor([[0.0, -60.0, 3.0]])
    undone = logits_before(logits.softmax(-1), "softmax")
    torch.testing.assert_close(undone - undone.mean(), logits - logits.mean(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_before(torch.sigmoid(logits / 10), "sigmoid"), logits / 10)
    assert torch.isfinite(logits_before(torch.tensor([0.0, 1.0]), "sigmoid")).all()
