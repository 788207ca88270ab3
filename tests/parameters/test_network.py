"""Layouts of networks: which parameters, what they may be differentiated for, and the bytes of their tensors."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.errors import DataError
from bnncli.parameters.layouts import ClassifierLayout, HeadLayout, NetworkLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.parameters.tensor_bytes import peak_bytes
from bnncli.session.network_splits import check_derivatives
from bnncli.structures.full import hessian_between
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import NetworkTarget

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


WIDTH = 500


def make_layout(pattern: str) -> ModuleLayout:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3), nn.Linear(3, 3)
        )
    return ModuleLayout.of(ModuleNetwork(module.eval()), pattern, num_outputs=3, input_shape=(6,))


def make_images(pattern: str) -> ModuleLayout:
    """Of few parameters, whose examples take much."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 3),
        )  # fmt: skip
    return ModuleLayout.of(ModuleNetwork(module.eval()), pattern, num_outputs=3, input_shape=(3, 40, 40))


@pytest.mark.parametrize("pattern", ["7", "all"])
def test_second_derivatives_are_the_same_block_after_block(pattern: str) -> None:
    layout = make_images(pattern)
    inputs = torch.randn(20, layout.num_features, generator=seeded(0))
    target = NetworkTarget(inputs, torch.arange(20) % 3, layout, Prior(1.0), choice=CurvatureChoice("hessian"))
    theta, last = layout.trained(), torch.arange(layout.num_params - 5, layout.num_params)
    check_derivatives(layout, inputs[:2])
    first, second = (hessian_between(target, theta, last) for _ in range(2))
    assert torch.equal(first, second)
    expected = target.second_derivatives(theta)(torch.eye(layout.num_params, dtype=torch.float64)[last])[:, last]
    torch.testing.assert_close(first, expected - torch.eye(5), rtol=1e-4, atol=1e-4)


def test_the_weights_that_vary_are_read_alone() -> None:
    layout = make_layout("5")
    assert peak_bytes(layout.trained) < 1000


def test_the_peak_is_of_what_is_held_at_once() -> None:
    def work() -> None:
        first = torch.ones(1000)
        del first
        second = torch.ones(500)
        third = second * 2  # views and what is written in place take nothing
        third.view(2, 250).add_(second.view(2, 250))

    assert peak_bytes(work) == 4 * 1000


def test_views_of_what_was_there_take_nothing() -> None:
    there = torch.ones(1000, 10)
    assert peak_bytes(lambda: torch.ones(2, 10) @ there.T) == 4 * (2 * 10 + 2 * 1000)


def test_what_autograd_keeps_is_counted() -> None:
    module = nn.Sequential(nn.Linear(10, 100), nn.Tanh(), nn.Linear(100, 3)).eval()
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=3, input_shape=(10,))
    kept = 4 * (10 + 100 + 3)
    assert layout.forward_bytes == 4 * (10 + 100 + 100)  # the input, and both sides of tanh
    assert kept <= layout.working_bytes <= kept + 4 * (100 + 100 + 3)  # what comes back to both sides of tanh, at most


def test_what_modules_give_is_counted_at_each_call() -> None:
    shared = nn.Linear(4, 4)
    network = ModuleNetwork(nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 3)).eval())
    assert ModuleLayout.of(network, num_outputs=3, input_shape=(4,)).own_outputs == 4 + 4 + 3


@pytest.mark.parametrize(
    ("layout", "widest"),
    [
        (HeadLayout(10, 84), 10),
        (HeadLayout(1, 5), 2),  # its two classes
        (NetworkLayout((784, 400, 600, 10)), 600),
        (NetworkLayout((784, 3)), 3),  # inputs are there before
        (NetworkLayout((5, 1)), 2),
    ],
    ids=str,
)
def test_the_widest_place_is_a_layer_or_the_classes(layout: ClassifierLayout, widest: int) -> None:
    assert layout.widest == widest
