"""Built-in networks, networks in code, and names of weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bnncli import registry
from bnncli.commands.demo import fixture_path
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.models.architectures.wide_resnet import build as build_wide_resnet
from bnncli.models.build import describe_name_mapping, fill_network, fit_names, load_network
from bnncli.models.checkpoints import load_checkpoint

pytestmark = pytest.mark.libraries


SHARED = Path(__file__).resolve().parents[3] / "shared"
INPUT_SHAPES = {
    "lenet5": (1, 28, 28), "mlp": (1, 28, 28), "resnet20": (3, 32, 32), "wide-resnet": (3, 32, 32),
    "flatten": (3, 4, 5),
}  # fmt: skip


@pytest.fixture
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def random_state(network: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Random weights and positive running variances, so that nothing is zero or one by default."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(value.shape, generator=generator) * 0.2 + 0.05 if value.is_floating_point() else value
        for name, value in network.state_dict().items()
    }


@pytest.mark.parametrize("name", registry.names("networks"))
def test_every_network_takes_its_inputs_and_gives_one_row_each(name: str) -> None:
    inputs = torch.rand(2, *INPUT_SHAPES[name])
    outputs = load_network(name, {}, None)(inputs)
    assert outputs.shape == ((2, 60) if name == "flatten" else (2, 10))


@pytest.mark.parametrize("name", [name for name in registry.names("networks") if name != "flatten"])
def test_sizes_are_inferred_from_the_checkpoint(name: str) -> None:
    arguments = {"classes": "7", **({"hidden": "9,8,5", "inputs": "12"} if name == "mlp" else {"channels": "2"})}
    if name == "wide-resnet":
        arguments |= {"depth": "10", "width": "1"}
    state = random_state(load_network(name, arguments, None))
    network = load_network(name, {}, state)
    assert all(torch.equal(network.state_dict()[key], value) for key, value in state.items())
    assert not network.training


def test_lenet_is_the_functional_network() -> None:
    state = load_checkpoint(fixture_path("lenet5-fmnist.pt")).state
    with np.load(fixture_path("test.npz")) as arrays:
        images = torch.from_numpy(arrays["x"][:5]).unsqueeze(1).float() / 255
    hidden = images
    for name in ("features.0", "features.3"):
        hidden = functional.conv2d(hidden, state[f"{name}.weight"], state[f"{name}.bias"])
        hidden = functional.max_pool2d(hidden.clamp(min=0), 2)
    hidden = hidden.reshape(5, 256)
    for name in ("features.7", "features.9"):
        hidden = (hidden @ state[f"{name}.weight"].T + state[f"{name}.bias"]).clamp(min=0)
    expected = hidden @ state["ll.weight"].T + state["ll.bias"]
    torch.testing.assert_close(load_network("lenet5", {}, state)(images), expected)


def test_the_fixture_network_is_right_on_data_it_was_not_trained_on() -> None:
    network = load_network("lenet5", {}, load_checkpoint(fixture_path("lenet5-fmnist.pt")).state)
    with np.load(fixture_path("test.npz")) as arrays:
        logits = network(torch.from_numpy(arrays["x"]).unsqueeze(1).float() / 255)
        accuracy = (logits.argmax(1) == torch.from_numpy(arrays["y"])).double().mean()
    assert 0.85 < accuracy < 0.90


def test_mlp_is_its_matrix_products() -> None:
    network = load_network("mlp", {"inputs": "6", "hidden": "5,4", "classes": "3", "activation": "tanh"}, None)
    state, inputs = network.state_dict(), torch.rand(7, 2, 3)
    hidden = inputs.reshape(7, 6)
    for name in ("features.0", "features.2"):
        hidden = torch.tanh(hidden @ state[f"{name}.weight"].T + state[f"{name}.bias"])
    torch.testing.assert_close(network(inputs), hidden @ state["ll.weight"].T + state["ll.bias"])


def normalise(hidden: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    """Batch normalisation in evaluation mode, written out."""
    mean, variance, weight, bias = (
        state[f"{name}.{part}"].reshape(1, -1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (hidden - mean) / (variance + 1e-5).sqrt() * weight + bias


def test_wide_resnet_is_the_functional_network() -> None:
    state = random_state(build_wide_resnet(depth=10, width=2, classes=4))
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    hidden = functional.conv2d(images, state["conv1.weight"], padding=1)
    for stage in (1, 2, 3):
        block, stride = f"block{stage}.layer.0", 1 if stage == 1 else 2
        active = normalise(hidden, state, f"{block}.bn1").relu()
        inner = functional.conv2d(active, state[f"{block}.conv1.weight"], stride=stride, padding=1)
        inner = normalise(inner, state, f"{block}.bn2").relu()
        shortcut = functional.conv2d(active, state[f"{block}.convShortcut.weight"], stride=stride)
        hidden = shortcut + functional.conv2d(inner, state[f"{block}.conv2.weight"], padding=1)
    pooled = normalise(hidden, state, "bn1").relu().flatten(2).sum(2) / 16
    expected = pooled @ state["fc.weight"].T + state["fc.bias"]
    torch.testing.assert_close(load_network("wide-resnet", {}, state)(images), expected)


def test_wide_resnet_16_4_has_the_published_number_of_weights() -> None:
    # Zagoruyko, Komodakis 2016, tables 4 and 5: WRN-40-4 has 8.9 million, WRN-28-10 has 36.5, WRN-16-8 has 11.0.
    for depth, width, millions in [(40, 4, 8.9), (28, 10, 36.5), (16, 8, 11.0)]:
        with torch.device("meta"):
            network = build_wide_resnet(depth=depth, width=width)
        assert sum(value.numel() for value in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_resnet20_has_the_published_number_of_weights() -> None:
    # He et al. 2016, table 6: 0.27 million. 19 convolutions and one linear layer.
    network = load_network("resnet20", {}, None)
    assert sum(value.numel() for value in network.parameters()) / 1e6 == pytest.approx(0.27, abs=0.005)
    assert sum(isinstance(module, nn.Conv2d) for module in network.modules()) == 19


def test_the_widening_shortcut_subsamples_and_pads_channels_evenly() -> None:
    block = load_network("resnet20", {}, None).get_submodule("layer2.0")
    inputs = torch.rand(1, 16, 4, 4)
    shortcut = block.shortcut(inputs)  # type: ignore[operator]
    assert torch.equal(shortcut[:, 8:24], inputs[:, :, ::2, ::2])
    assert shortcut[:, :8].abs().sum() == shortcut[:, 24:].abs().sum() == 0


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="needs the full-size data and checkpoints")
def test_the_public_resnet20_reaches_its_published_accuracy() -> None:
    network = load_network("resnet20", {}, load_checkpoint(SHARED / "checkpoints/resnet20-12fca82f.th").state)
    rows = np.sort(np.random.default_rng(0).permutation(10_000)[:500])
    with np.load(SHARED / "data/cifar10-test.npz") as arrays:
        images, labels = torch.from_numpy(arrays["x"][rows]), torch.from_numpy(arrays["y"][rows])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.inference_mode():
        logits = network(((images / 255 - mean) / std).movedim(3, 1))
    # Published: 91.7 %; four standard errors of 500 rows are 4.9 %.
    assert (logits.argmax(1) == labels).double().mean().item() == pytest.approx(0.917, abs=0.049)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="needs the full-size data and checkpoints")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_shared_lenet_checkpoints_fit(number: int) -> None:
    state = load_checkpoint(SHARED / f"checkpoints/lenet-fmnist-{number}.pt").state
    network = load_network("lenet5", {}, state)
    assert list(network.state_dict()) == list(state)


def test_an_unknown_network_lists_the_choices() -> None:
    with pytest.raises(UsageError, match="expected one of flatten, lenet5, mlp, resnet20, wide-resnet"):
        load_network("lenet", {}, None)


BAD_ARGUMENTS = {
    ("lenet5", "colour", "3"): "expected one of channels, flattened, classes; got 'colour'",
    ("lenet5", "classes", "ten"): "classes: expected int, got 'ten'",
    ("mlp", "hidden", "50,x"): "integers such as 50,50, got '50,x'",
    ("mlp", "activation", "swish"): "one of relu, tanh, sigmoid",
    ("wide-resnet", "depth", "17"): r"10, 16, 22, 28, ... \(6 n \+ 4\); got 17",
    ("wide-resnet", "width", "0"): "at least 1",
    ("flatten", "classes", "3"): "expected nothing",
}


@pytest.mark.parametrize(("case", "message"), BAD_ARGUMENTS.items())
def test_bad_arguments_say_what_is_accepted(case: tuple[str, str, str], message: str) -> None:
    name, argument, value = case
    with pytest.raises(UsageError, match=message):
        load_network(name, {argument: value}, None)


def test_a_mismatch_lists_names_and_the_likely_rename() -> None:
    state = random_state(load_network("lenet5", {}, None))
    state["fc.weight"] = state.pop("ll.weight")
    with pytest.raises(
        DataError, match=r"missing.*\(1\): 'll.weight'.*not in the network.*\(1\): 'fc.weight'"
    ) as caught:
        load_network("lenet5", {}, state)
    assert caught.value.hint == "'fc.weight' in the checkpoint may be 'll.weight' in the network"


def test_the_likely_rename_has_the_same_shape() -> None:
    state = random_state(load_network("lenet5", {}, None))
    state["features.zero.weight"] = state.pop("features.0.weight")
    state["features.00.weight"] = torch.ones(3)
    with pytest.raises(DataError, match="does not match") as caught:
        load_network("lenet5", {}, state)
    expected = "'features.zero.weight' in the checkpoint may be 'features.0.weight' in the network"
    assert caught.value.hint == expected


def test_only_the_first_five_names_of_a_mismatch_are_listed() -> None:
    with pytest.raises(DataError, match=r"'features.7.weight' and 5 more"):
        load_network("lenet5", {}, {"x": torch.ones(1)})


def test_a_shape_that_does_not_fit_is_named() -> None:
    state = random_state(load_network("lenet5", {}, None))
    with pytest.raises(DataError, match=r"'ll.weight' has shape \(10, 84\) in the checkpoint, \(3, 84\)"):
        load_network("lenet5", {"classes": "3"}, state)


def test_half_precision_weights_become_float32() -> None:
    state = {name: value.half() for name, value in random_state(load_network("lenet5", {}, None)).items()}
    network = load_network("lenet5", {}, state)
    assert {value.dtype for value in network.parameters()} == {torch.float32}
    assert torch.equal(network.get_parameter("ll.weight"), state["ll.weight"].float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_weights_that_are_no_real_numbers_are_refused(dtype: torch.dtype) -> None:
    state = random_state(load_network("lenet5", {}, None))
    state["ll.weight"] = state["ll.weight"].to(dtype)
    with pytest.raises(DataError, match=r"'ll.weight' is \w+ in the checkpoint, but floating-point in the network"):
        load_network("lenet5", {}, state)


def test_modules_that_ask_for_their_version_are_filled() -> None:
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(
            self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
        ) -> None:
            if local_metadata.get("version") != 2:
                raise ValueError("another version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    network, saved = Versioned(3, 2), Versioned(3, 2).state_dict()
    fill_network(network, dict(saved), "versioned")
    assert network.weight.equal(saved["weight"])


FACTORY = """
from torch import nn

class Wrapped(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model = nn.Linear(3, width)

def make(width=2, scale: float = 1.0, is_deep: bool = False):
    assert isinstance(width, int) and isinstance(scale, float) and isinstance(is_deep, bool)
    return Wrapped(width)

def wrong():
    return "a string"

def needs(width):
    return Wrapped(width)
"""


@pytest.fixture
def factory_file(tmp_path: Path, clean_imports: None) -> Path:
    path = tmp_path / "my net.py"
    path.write_text(FACTORY)
    return path


def test_a_factory_in_a_file_gets_converted_arguments_and_its_own_prefix_back(factory_file: Path) -> None:
    state = {"weight": torch.rand(4, 3), "bias": torch.rand(4)}
    arguments = {"width": "4", "scale": "0.5", "is_deep": "true"}
    network = load_network(f"{factory_file}:make", arguments, state)
    assert torch.equal(network.state_dict()["model.weight"], state["weight"])


def test_an_importable_factory_is_found_from_the_current_folder(
    factory_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory_file.rename(factory_file.with_name("importable_net.py"))
    monkeypatch.chdir(factory_file.parent)
    network = load_network("importable_net:make", {"width": "5"}, None)
    assert network.get_parameter("model.weight").shape == (5, 3)


BAD_FACTORIES = {
    "make:": "expected package.module:factory",
    "none": "has no callable named 'none'",
    "wrong": "returned str, expected a torch.nn.Module",
    "needs": "missing a required argument: 'width'",
}


@pytest.mark.parametrize(("name", "message"), BAD_FACTORIES.items())
def test_a_factory_that_cannot_serve_is_a_usage_error(factory_file: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_network(f"{factory_file}:{name}", {}, None)


def test_a_factory_that_is_not_there_is_reported(tmp_path: Path, clean_imports: None) -> None:
    with pytest.raises(MissingInput, match="no file"):
        load_network(f"{tmp_path}/none.py:make", {}, None)
    with pytest.raises(UsageError, match="importing 'no_such_package' failed"):
        load_network("no_such_package:make", {}, None)


def test_a_factory_that_raises_is_the_users_error_and_says_what(tmp_path: Path) -> None:
    (tmp_path / "net_raises.py").write_text("def make():\n    return {}['width']\n")
    with pytest.raises(DataError, match=r"net_raises.py:make' raised KeyError: 'width'") as caught:
        load_network(f"{tmp_path}/net_raises.py:make", {}, {})
    assert isinstance(caught.value.__cause__, KeyError)


WEIGHTS = {"0.weight": torch.rand(5, 4), "0.bias": torch.rand(5), "2.weight": torch.rand(3, 5), "2.bias": torch.rand(3)}


def under(prefix: str, state: dict[str, Tensor] = WEIGHTS) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def filled(state: dict[str, Tensor], network: nn.Module | None = None) -> tuple[dict[str, Tensor], list[str]]:
    network = network or nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    fill_network(network, state, "net")
    return network.state_dict(), describe_name_mapping(state, network)


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
    assert fit_names(under("model."), ["conv.weight", "fc.weight"]).place == ("", "")


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
