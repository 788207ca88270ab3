"""MAP training of networks: against a plain loop of torch's, resumed, several seeds as one, with averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bnncli.data.pixels import Augmentation
from bnncli.errors import NumericError
from bnncli.inference.map_training import Examples, MapLearner, MapSettings, StackedNetworks, Streams, evaluate
from bnncli.likelihoods import likelihood_of
from bnncli.training.loop import LearningRateSchedule, num_batches, train

PLAIN = MapSettings("sgd", 0.1, 0.9, 1e-2, batch_size=8)
EPOCHS = 3


def examples(num_examples: int = 21, num_outputs: int = 3) -> Examples:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_examples, 2, 6, 6, generator=generator)
    labels = torch.randint(max(2, num_outputs), (num_examples,), generator=generator)
    return Examples(inputs, labels)


def network(seed: int = 0, num_outputs: int = 3) -> nn.Module:
    """A convolution, batch norm and a linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, num_outputs))


def streams(seed: int) -> Streams:
    return Streams(torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 100))


def learner(modules: Sequence[nn.Module], seeds: Sequence[int], settings: MapSettings, **more: Any) -> MapLearner:
    return MapLearner(
        StackedNetworks(modules, lambda output: output),
        more.pop("data", examples()),
        likelihood=likelihood_of(more.pop("num_outputs", 3)),
        settings=settings,
        streams=[streams(seed) for seed in seeds],
        generator=torch.Generator().manual_seed(5),
        **more,
    )


def trained(one: MapLearner, **more: Any) -> MapLearner:
    train(one, LearningRateSchedule(EPOCHS, num_batches(one), "cosine"), what="train", **more)
    return one


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.state_dict())


def plain_loop(
    module: nn.Module, settings: MapSettings, loss: Callable[[Tensor, Tensor], Tensor]
) -> list[dict[str, Tensor]]:
    """The same by torch's own optimizer and schedule; the state after each step."""
    inputs, labels = examples()
    optimizer = torch.optim.SGD(
        module.parameters(), settings.learning_rate, settings.momentum, weight_decay=settings.weight_decay
    )
    num_steps = EPOCHS * 3
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    generator, states = streams(0).order, []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), generator=generator).split(settings.batch_size):
            optimizer.zero_grad()
            loss(module.train()(inputs[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
            states.append({name: value.clone() for name, value in module.state_dict().items()})
    return states


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_training_is_that_of_a_plain_loop(smoothing: float) -> None:
    settings = replace(PLAIN, label_smoothing=smoothing, average=0.7)
    module, other = network(), network()
    average = {name: value.clone() for name, value in other.state_dict().items() if value.is_floating_point()}
    states = plain_loop(other, settings, nn.CrossEntropyLoss(label_smoothing=smoothing))
    for state in states:
        average = {name: 0.7 * value + 0.3 * state[name] for name, value in average.items()}
    one = trained(learner([module], [0], settings))
    torch.testing.assert_close(tensors(module), states[-1], rtol=1e-4, atol=1e-5)
    averaged = {name: value for name, value in tensors(one.averaged()[0]).items() if value.is_floating_point()}
    torch.testing.assert_close(averaged, average, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "nesterov"])
def test_seeds_that_learn_as_one_batch_are_those_that_learn_alone(optimizer: str) -> None:
    augmentation = Augmentation(1, True, torch.zeros(2))
    settings = replace(PLAIN, optimizer=optimizer, learning_rate=0.01, augmentation=augmentation, average=0.9)
    together = [network(seed) for seed in (3, 4)]
    both = trained(learner(together, [3, 4], settings, val=examples(9)))
    states = [tensors(module) for module in both.networks.separate()]
    for place, seed in enumerate((3, 4)):
        module = network(seed)
        alone = trained(learner([module], [seed], settings, val=examples(9)))
        torch.testing.assert_close(states[place], tensors(module), rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(tensors(both.averaged()[place]), tensors(alone.averaged()[0]), rtol=2e-3, atol=2e-4)
        assert both.history.last(place) == pytest.approx(alone.history.last(0), rel=2e-3)
    assert not torch.allclose(states[0]["4.weight"], states[1]["4.weight"], atol=1e-3)


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(seeds: list[int]) -> None:
    augmentation = Augmentation(1, True, torch.zeros(2))
    settings = replace(PLAIN, optimizer="adam", learning_rate=0.01, augmentation=augmentation, average=0.9)

    def modules() -> list[nn.Module]:
        made = (
            [nn.Sequential(*network(seed), nn.Dropout(0.5)) for seed in seeds]
            if len(seeds) == 1
            else [*map(network, seeds)]
        )
        return [module.to(memory_format=torch.channels_last) for module in made]  # type: ignore[call-overload]

    saved: list[dict[str, Tensor]] = []
    whole = trained(learner(modules(), seeds, settings), save=lambda state, is_last: saved.append(dict(state)))
    torch.manual_seed(77)
    contiguous = {name: value.contiguous().clone() for name, value in saved[0].items()}  # as a file has it
    again = trained(learner(modules(), seeds, settings), state=contiguous)
    for one, other in zip(whole.networks.separate(), again.networks.separate(), strict=True):
        assert all(torch.equal(value, tensors(other)[name]) for name, value in tensors(one).items())
    assert all(torch.equal(value, again.averages[name]) for name, value in whole.averages.items())
    assert again.history == whole.history


def test_a_loss_that_is_not_finite_names_the_learning_rate() -> None:
    one = learner([network()], [0], replace(PLAIN, learning_rate=1e30))
    with pytest.raises(NumericError, match="the loss is not finite in epoch") as caught:
        trained(one)
    assert "learning_rate" in str(caught.value.hint)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_scores_are_those_of_the_likelihood(num_outputs: int) -> None:
    data, module = examples(num_outputs=num_outputs), network(0, num_outputs).eval()
    with torch.no_grad():
        logits = module(data.inputs).double()
    if num_outputs == 1:
        expected = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], data.labels.double())
        is_right = (logits[:, 0] > 0) == data.labels.bool()
    else:
        expected = nn.functional.cross_entropy(logits, data.labels)
        is_right = logits.argmax(1) == data.labels
    found = evaluate(module, data, likelihood_of(num_outputs), lambda output: output)
    assert found == pytest.approx((float(expected), float(is_right.double().mean())), rel=1e-6)
    one = trained(learner([module], [0], replace(PLAIN, learning_rate=0.05), data=data, num_outputs=num_outputs))
    assert one.history.loss[-1][0] < one.history.loss[0][0]
