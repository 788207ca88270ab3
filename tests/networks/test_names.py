"""Checkpoints whose names have another prefix than the network's, as Lightning and wrappers of all kinds leave them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bnncli.errors import DataError
from bnncli.models.build import fill_network, fitted, load_network, notes_on_names

WEIGHTS = {"0.weight": torch.rand(5, 4), "0.bias": torch.rand(5), "2.weight": torch.rand(3, 5), "2.bias": torch.rand(3)}


def under(prefix: str, state: dict[str, Tensor] = WEIGHTS) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def filled(state: dict[str, Tensor], network: nn.Module | None = None) -> tuple[dict[str, Tensor], list[str]]:
    network = network or nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    fill_network(network, state, "net")
    return network.state_dict(), notes_on_names(state, network)


def is_ours(found: dict[str, Tensor], prefix: str = "") -> bool:
    return all(torch.equal(found[prefix + name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize("prefix", ["backbone.", "net.model.", "a.b.c."])
def test_any_prefix_goes_and_is_said(prefix: str) -> None:
    found, said = filled(under(prefix))
    assert is_ours(found)
    assert said == [f"using the checkpoint's tensors under '{prefix}' for the network"]


def test_names_that_fit_are_taken_without_a_word() -> None:
    assert filled(dict(WEIGHTS))[1] == []


def test_what_is_not_of_the_network_is_left_out_and_named() -> None:
    state = {"criterion.weight": torch.ones(3), **under("model."), "shift": torch.zeros(()), "acc.total": torch.ones(1)}
    found, said = filled(state)
    assert is_ours(found)
    names = "'criterion.weight', 'shift', 'acc.total'"
    assert said[1] == f"ignoring 3 tensors of the checkpoint that are not part of the network: {names}"


def test_an_averaged_copy_is_told_and_the_raw_weights_are_taken() -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    found, said = filled(
        {**under("ema_model.module.", zeros), **under("model."), "ema_model.n_averaged": torch.ones(())}
    )
    assert is_ours(found)
    assert "the checkpoint has the same names under 'ema_model.module' (choose with --state)" in said[1].replace(
        "\0state\0", "--state"
    )
    assert said[2].endswith("not part of the network: 'ema_model.n_averaged'")


def test_two_copies_of_which_none_is_an_average_have_to_be_chosen_from() -> None:
    with pytest.raises(DataError, match="names 2 times, under 'student', 'tutor'") as caught:
        filled({**under("student."), **under("tutor.")})
    assert caught.value.hint == "choose one: \0state\0 student"


def test_strangers_within_the_network_are_refused() -> None:
    with pytest.raises(DataError, match=r"not in the network \(1\): 'extra.weight'"):
        filled({**under("model."), "model.extra.weight": torch.ones(1), "loss.weight": torch.ones(1)})
    with pytest.raises(DataError, match=r"not in the network \(1\): 'loss.weight'"):
        filled({**WEIGHTS, "loss.weight": torch.ones(1)})


def test_what_is_missing_behind_a_prefix_is_named_as_the_network_has_it() -> None:
    state = under("model.")
    del state["model.2.bias"]
    with pytest.raises(DataError, match=r"missing from the checkpoint \(1\): '2.bias'$"):
        filled(state)


class Holder(nn.Module):
    """A network that has a prefix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("prefix", ["", "backbone.", "net.backbone.", "net."])
def test_the_networks_own_names_decide(prefix: str) -> None:
    found, _ = filled(under(prefix), Holder())
    assert is_ours(found, "backbone.")


def test_counters_of_batch_norm_may_be_missing_behind_a_prefix() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = {f"m.{name}": tensor + 1 for name, tensor in network.state_dict().items() if "num_batches" not in name}
    found, _ = filled(state, network)
    assert torch.equal(found["1.running_mean"], torch.ones(3))


@pytest.mark.parametrize("prefix", ["", "module.classifier."])
def test_a_built_in_network_finds_its_sizes_behind_a_prefix(prefix: str) -> None:
    state = load_network("mlp", {"inputs": "6", "hidden": "5", "classes": "4"}, None).state_dict()
    network = load_network("mlp", {}, {"loss.weight": torch.ones(4), **under(prefix, state)} if prefix else state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


def test_another_network_is_told_by_its_own_names() -> None:
    assert fitted(under("model."), ["conv.weight", "fc.weight"]).place == ("", "")


class Module(nn.Module):
    """Attributes as a Lightning module has them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.encoder, self.criterion = network, nn.CrossEntropyLoss(weight=torch.ones(3))
        self.register_buffer("shift", torch.zeros(()))


def test_the_network_of_a_module_with_buffers_and_a_loss_gives_the_same_logits() -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    copy = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    fill_network(copy, Module(network).state_dict(), "net")
    inputs = torch.rand(7, 4)
    assert torch.equal(copy(inputs), network(inputs))
