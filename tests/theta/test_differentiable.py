"""Derivatives of modules that torch's backward pass changes, against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bnncli.errors import DataError
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.session.network_splits import check_derivatives

TEXTS = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 4], [1, 1, 1, 2]]).double()


class Words(nn.Module):
    """The mean of embeddings, the padding's among them."""

    def __init__(self, *, is_functional: bool = False, **settings: object) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(5, 3, **settings), nn.Linear(3, 2)  # type: ignore[arg-type]
        self.is_functional = is_functional

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_functional:
            embedded = nn.functional.embedding(tokens, self.words.weight, padding_idx=0)
        else:
            embedded = self.words(tokens)
        return self.last(embedded.mean(dim=1).tanh())


def layout_of(module: nn.Module) -> ModuleLayout:
    return ModuleLayout.of(ModuleNetwork(module.eval(), takes_tokens=True), num_outputs=2, input_shape=(4,))


@pytest.mark.parametrize("settings", [{"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_embeddings_have_their_derivatives_both_ways(settings: dict[str, object]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Words(**settings)
    layout = layout_of(module)
    theta = layout.trained()
    units = torch.eye(len(theta), dtype=torch.float64)
    sides = [layout.logits(TEXTS, theta + step * units) for step in (1e-5, -1e-5)]
    expected = (sides[0] - sides[1]).permute(1, 2, 0) / 2e-5
    torch.testing.assert_close(layout.jacobian(TEXTS, theta), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(layout.push(TEXTS, theta, units).permute(1, 2, 0), expected, rtol=1e-6, atol=1e-8)
    check_derivatives(layout, TEXTS)
    assert "forward" not in vars(module.words), "the module is as it was"
    assert module.words.padding_idx == settings.get("padding_idx")


def test_derivatives_that_differ_both_ways_are_refused() -> None:
    with pytest.raises(DataError, match="forward and backward derivatives differ"):
        check_derivatives(layout_of(Words(is_functional=True)), TEXTS)


class Detached(nn.Module):
    """Features that a training left as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.last, self.unused = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x).tanh().detach())


def test_parameters_that_move_logits_without_a_derivative_are_refused_by_name() -> None:
    network = ModuleNetwork(Detached().eval())
    every, known = (
        ModuleLayout.of(network, one, num_outputs=2, input_shape=(4,))
        for one in ("features.*+last.*", "last.*+unused.*")
    )
    with pytest.raises(
        DataError,
        match=r"changing 'features.weight', 'features.bias' changes the network's logits, but their derivative is zero",
    ):
        check_derivatives(every, TEXTS)
    check_derivatives(known, TEXTS)


def test_units_that_are_off_are_not_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    nn.init.constant_(module[0].bias, -100.0)
    check_derivatives(ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=2, input_shape=(4,)), TEXTS)
