"""Heads of networks: where the last layer is found, in networks of ours and of libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from problems.optional_libraries import library
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from bnncli.data.splits import InputSplit, load_split
from bnncli.errors import DataError, UsageError
from bnncli.models.features import ExtractedFeatures, _reader, collect, extract
from bnncli.models.head import Head, check_link, prove_head
from bnncli.models.head_search import find_head

pytestmark = pytest.mark.libraries


IMAGES = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """Images (n, 3, 4, 4) to maps (n, 6, 4, 4), and what `after` makes of them with the layers of `parts`."""

    def __init__(self, after: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        for name, part in parts.items():
            setattr(self, name, part)
        self._after = after

    def forward(self, images: Tensor) -> Any:
        return self._after(self, self.body(images))

    def vectors(self, images: Tensor) -> Tensor:
        return self.body(images).mean((2, 3))


def made(after: Callable[[Any, Tensor], Any], **parts: Any) -> Network:
    """A network whose weights, and running averages, are random."""
    network = Network(after, **parts).eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.7)
            if name.endswith(("running_var", "scale")):
                tensor.abs_().add_(0.1)
    return network


@pytest.fixture
def split(tmp_path: Path) -> InputSplit:
    np.savez(tmp_path / "a.npz", x=IMAGES.numpy(), y=np.arange(10) % 2)
    return load_split(f"npz:{tmp_path / 'a.npz'}")


def found(network: nn.Module, inputs: Tensor = IMAGES, **asked: Any) -> Head:
    return find_head(network, lambda count: inputs[:count], **asked)


def read(network: nn.Module, split: InputSplit, head: Head) -> ExtractedFeatures:
    return collect(extract(network, head, split, batch_size=4), len(split))


def pooled(maps: Tensor) -> Tensor:
    return maps.mean((2, 3))


class Scaled(nn.Conv2d):
    """A convolution with standardised weights."""

    def forward(self, maps: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
        return functional.conv2d(maps, weight, self.bias)


class LowRank(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.dropout = nn.Linear(6, 3), nn.Dropout(0.1)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 0.5 * self.up(self.down(self.dropout(x)) + 0.3)
        return y


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


NETWORKS: dict[str, Callable[[], Network]] = {
    "pool, convolution, flatten": lambda: made(
        lambda self, maps: self.head(maps.mean((2, 3), keepdim=True)).flatten(1), head=nn.Conv2d(6, 3, 1)
    ),
    "convolution, pool": lambda: made(
        lambda self, maps: self.head(maps).flatten(1),
        head=nn.Sequential(nn.Dropout(), nn.Conv2d(6, 3, 1), nn.AdaptiveAvgPool2d(1)),
    ),
    "convolution over a 1x1 map": lambda: made(
        lambda self, maps: self.head(maps[:, :, :1, :1])[:, :, 0, 0], head=nn.Conv2d(6, 3, 1)
    ),
    "convolution over the whole map": lambda: made(
        lambda self, maps: self.head(maps).squeeze(3).squeeze(2), head=nn.Conv2d(6, 3, 4)
    ),
    "standardised convolution": lambda: made(
        lambda self, maps: self.head(maps.mean((2, 3), keepdim=True)).flatten(1), head=Scaled(6, 3, 1)
    ),
    "functional linear": lambda: made(
        lambda self, maps: functional.linear(pooled(maps), self.weight, self.bias), weight=weights(3, 6), bias=weights(3)
    ),
    "matrix product": lambda: made(lambda self, maps: pooled(maps) @ self.weight + self.bias, weight=weights(6, 3), bias=weights(3)),
    "addmm": lambda: made(lambda self, maps: torch.addmm(self.bias, pooled(maps), self.weight), weight=weights(6, 3), bias=weights(3)),
    "tied weights": lambda: made(lambda self, maps: pooled(maps) @ self.words.weight.T, words=nn.Embedding(3, 6)),
    "dictionary": lambda: made(lambda self, maps: {"out": self.head(pooled(maps))}, head=nn.Linear(6, 3)),
    "dictionary of any name": lambda: made(
        lambda self, maps: {"maps": maps, "scores": self.head(pooled(maps))}, head=nn.Linear(6, 3)
    ),
    "features and logits": lambda: made(
        lambda self, maps: ((x := self.first(pooled(maps))), self.head(x)), first=nn.Linear(6, 5), head=nn.Linear(5, 3)
    ),
    "two tokens": lambda: made(
        lambda self, maps: (self.head(maps[:, :, 0, 0]) + self.head_dist(maps[:, :, 1, 0])) / 2,
        head=nn.Linear(6, 3), head_dist=nn.Linear(6, 3),
    ),
    "averaged heads": lambda: made(
        lambda self, maps: (lambda x: torch.stack([head(x) for head in self.heads]).mean(0))(pooled(maps)),
        heads=nn.ModuleList(nn.Linear(6, 3) for _ in range(3)),
    ),
    "low rank": lambda: made(lambda self, maps: self.head(pooled(maps)), head=LowRank()),
    "low rank, every position": lambda: made(
        lambda self, maps: self.head(maps.flatten(2).mT)[:, -1], head=LowRank()
    ),
    "an average and its parts": lambda: made(
        lambda self, maps: {"a": (a := self.first(pooled(maps))), "b": (b := self.second(pooled(maps))), "out": (a + b) / 2},
        first=nn.Linear(6, 3), second=nn.Linear(6, 3),
    ),
    "batch norm after": lambda: made(
        lambda self, maps: self.norm(self.head(pooled(maps))), head=nn.Linear(6, 3), norm=nn.BatchNorm1d(3)
    ),
    "scale after": lambda: made(lambda self, maps: self.head(pooled(maps)) / 4, head=nn.Linear(6, 3)),
    "weight norm": lambda: made(
        lambda self, maps: self.head(pooled(maps)), head=parametrizations.weight_norm(nn.Linear(6, 3))
    ),
    "spectral norm": lambda: made(
        lambda self, maps: self.head(pooled(maps)), head=parametrizations.spectral_norm(nn.Linear(6, 3))
    ),
    "dropout before, in a Sequential": lambda: made(
        lambda self, maps: self.head(pooled(maps)), head=nn.Sequential(nn.Dropout(), nn.Linear(6, 3))
    ),
    "every position, the last taken": lambda: made(
        lambda self, maps: self.score(maps.flatten(2).mT)[:, -1], score=nn.Linear(6, 3, bias=False)
    ),
    "every position, one of data taken": lambda: made(
        lambda self, maps: self.score(maps.flatten(2).mT)[torch.arange(len(maps)), maps[:, 0].flatten(1).argmax(1)],
        score=nn.Linear(6, 3),
    ),
    "every position, averaged": lambda: made(
        lambda self, maps: self.score(maps.flatten(2).mT).mean(1), score=nn.Linear(6, 3)
    ),
}  # fmt: skip


def logits_of(returned: Any) -> Tensor:
    if isinstance(returned, dict):
        returned = returned["out"] if "out" in returned else returned["scores"]
    return returned[-1] if isinstance(returned, tuple) else returned


@pytest.mark.parametrize("name", NETWORKS)
def test_features_times_head_are_the_networks_outputs(split: InputSplit, name: str) -> None:
    network = NETWORKS[name]()
    head = found(network)
    whole = read(network, split, head)
    with torch.no_grad():
        expected = logits_of(network(IMAGES))
    logits = whole.features @ head.weight.T + (0 if head.bias is None else head.bias)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_name_of_a_head_finds_it_again(name: str) -> None:
    network = NETWORKS[name]()
    head = found(network)
    again = found(network, IMAGES[3:], layer=head.name)
    assert torch.equal(again.weight, head.weight)
    assert again.bias is head.bias or torch.equal(again.bias, head.bias)  # type: ignore[arg-type]
    assert again.form == head.form


RETURNED = {
    "log_softmax": lambda logits: logits.log_softmax(1),
    "log of softmax": lambda logits: logits.softmax(1).log(),
    "softmax": lambda logits: functional.softmax(logits, dim=1),
    "sigmoid": lambda logits: logits.sigmoid().squeeze(1),
}


@pytest.mark.parametrize("name", RETURNED)
def test_probabilities_are_undone_and_that_is_said(split: InputSplit, name: str) -> None:
    layer = nn.Linear(6, 1 if name == "sigmoid" else 3)
    network = made(lambda self, maps: RETURNED[name](self.head(pooled(maps))), head=layer)
    head = found(network)
    whole = read(network, split, head)
    with torch.no_grad():
        torch.testing.assert_close(whole.logits, layer(network.vectors(IMAGES)), atol=1e-5, rtol=1e-5)
    assert head.notes[0].startswith("the network returns log-prob" if "log" in name else "the network returns prob")
    check_link(head)


def test_a_sigmoid_of_each_of_several_classes_is_refused() -> None:
    network = made(lambda self, maps: self.head(pooled(maps)).sigmoid(), head=nn.Linear(6, 3))
    head = found(network)
    check_link(head, "multilabel")
    with pytest.raises(DataError, match=r"returns a sigmoid of its 3 outputs, which does not match 3 classes"):
        check_link(head)


def test_an_8_bit_head_is_dequantised_and_proven_with_its_own_rounding(split: InputSplit) -> None:
    network = made(lambda self, maps: self.head(pooled(maps)), head=nn.Linear(6, 3))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = network(IMAGES)
        network.head = torch.ao.nn.quantized.dynamic.Linear.from_float(quantizable(network.head))
    head = found(network)
    whole = read(network, split, head)
    assert head.notes == (
        "the last layer is quantised to 8 bits: the head is dequantised, the rest of the network runs as saved",
    )
    assert 0 < (whole.logits - exact).abs().max() < 0.05
    assert torch.equal(head.weight, network.head.weight().dequantize())
    wrong = Head(head.name, head.weight * 1.01, head.bias, head.form)
    with pytest.raises(DataError, match="differ from the network's output"):
        read(network, split, wrong)


def quantizable(layer: nn.Module) -> nn.Module:
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig  # type: ignore[assignment]
    return layer


def two_heads(returned: Callable[[Tensor, Tensor], Any]) -> Network:
    return made(
        lambda self, maps: returned(self.first(pooled(maps)), self.second(pooled(maps))),
        first=nn.Linear(6, 3),
        second=nn.Linear(6, 2),
    )


def test_several_heads_are_listed_and_one_is_chosen(split: InputSplit) -> None:
    network = two_heads(lambda first, second: {"a": first, "b": second})
    listed = r"several heads: 'first' \(3 outputs of 6 features; output 'a'\), 'second' \(2 outputs"
    with pytest.raises(DataError, match=listed):
        found(network)
    for asked in ({"layer": "second"}, {"output": "b"}):
        head = found(network, **asked)
        assert (head.name, head.weight.shape) == ("second", (2, 6))
        assert torch.equal(read(network, split, head).logits, network(IMAGES)["b"])


def test_outputs_that_are_called_logits_are_taken_for_them() -> None:
    network = two_heads(lambda first, second: {"logits": first, "auxiliary": second})
    assert found(network).name == "first"


def test_an_output_or_layer_that_is_not_there_is_refused() -> None:
    network = two_heads(lambda first, second: {"a": first, "b": second})
    with pytest.raises(UsageError, match=r"output.*expected one of 'a', 'b'; got 'c'"):
        found(network, output="c")
    alone = two_heads(lambda first, second: first)
    with pytest.raises(UsageError, match=r"outputs have no names; omit .*; got 'a'"):
        found(alone, output="a")
    with pytest.raises(UsageError, match=r"last_layer.*expected one of 'first', 'second'; got 'third'"):
        found(network, layer="third")
    with pytest.raises(UsageError, match=r"'body.0' does not produce an output of the network; these do: 'first' \(3"):
        found(network, layer="body.0")


def test_of_many_layers_the_last_are_named_among_which_heads_are() -> None:
    network = nn.Sequential(*(nn.Linear(6, 6) for _ in range(30)))
    with pytest.raises(UsageError, match=r"expected one of '22', .*'29' and 22 earlier ones; got 'head'"):
        found(network, layer="head")


def test_the_name_of_several_layers_is_not_that_of_one_of_them() -> None:
    network = two_heads(lambda first, second: {"a": first, "mean": first[:, :2] + second, "b": second}).eval()
    network.first = nn.Linear(6, 2)
    assert found(network, layer="first+second").weight.shape == (2, 12)
    assert found(network, layer="second").form.output == "b"  # type: ignore[union-attr]


def test_logits_are_taken_before_probabilities_of_the_same_head() -> None:
    network = made(
        lambda self, maps: {"probabilities": (x := self.head(pooled(maps))).softmax(1), "scores": x},
        head=nn.Linear(6, 3),
    )
    form = found(network).form
    assert (form.output, form.link, form.notes) == ("scores", "none", ())


NOT_LINEAR = {
    "relu, mean": lambda self, maps: self.head(maps).relu().mean((2, 3)),
    "amax": lambda self, maps: self.head(maps).amax((2, 3)),
    "tanh, mean": lambda self, maps: self.head(maps).tanh().mean((2, 3)),
}


@pytest.mark.parametrize("after", NOT_LINEAR)
def test_what_no_head_can_give_is_refused_with_what_stands_between(after: str) -> None:
    network = made(NOT_LINEAR[after], head=nn.Conv2d(6, 3, 1))
    with pytest.raises(DataError, match=f"not linear in any features: it is computed from 'head' by {after}"):
        found(network)


RETURNED_LOGITS = {
    "logits": (3, lambda logits: logits),
    "maps of one position": (3, lambda logits: logits[:, :, None, None]),
    "one logit without its axis": (1, lambda logits: logits.squeeze(1)),
    "log-softmax": (3, lambda logits: {"out": logits.log_softmax(1), "features": logits[:, :2]}),
    "softmax": (3, lambda logits: logits.softmax(1)),
    "sigmoid without its axis": (1, lambda logits: logits.squeeze(1).sigmoid()),
}


@pytest.mark.parametrize("name", RETURNED_LOGITS)
def test_an_identity_layer_is_put_on_the_logits_where_it_is_asked_for(split: InputSplit, name: str) -> None:
    num_outputs, after = RETURNED_LOGITS[name]
    network = made(lambda self, maps: after(self.head(maps).amax((2, 3))), head=nn.Conv2d(6, num_outputs, 1))
    with pytest.raises(DataError, match="not linear in any features") as caught:
        found(network)
    assert str(caught.value.hint).endswith("; \0last_layer\0 identity puts an identity layer on top of the logits")
    head = found(network, layer="identity")
    with torch.no_grad():
        expected = network.head(network.body(IMAGES)).amax((2, 3))
    whole = read(network, split, head)
    torch.testing.assert_close(whole.features, expected)
    torch.testing.assert_close(whole.logits, expected)
    assert torch.equal(head.weight, torch.eye(num_outputs))
    assert head.logits(torch.zeros(1, num_outputs)).tolist() == [[0.0] * num_outputs]
    assert head.notes[-1].startswith("the head is an identity layer on the network's logits")
    check_link(head)


def test_weights_that_are_called_identity_are_meant_by_it() -> None:
    network = made(lambda self, maps: self.identity(pooled(maps)), identity=nn.Linear(6, 3))
    assert found(network, layer="identity").weight.shape == (3, 6)


NO_LOGITS = {
    r"needs one output with one vector per example; 2 examples gave '' \(2, 3, 4, 4\)": lambda self, maps: self.head(maps),
    r"2 examples gave 'a' \(2, 3\), 'b' \(2, 3\)": lambda self, maps: {"a": (x := self.head(pooled(maps)[:, :, None, None]).amax((2, 3))), "b": -x},
    "outputs look like probabilities": lambda self, maps: self.head(maps).softmax(1).mean((2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("message", NO_LOGITS)
def test_outputs_that_are_no_logits_get_no_identity_layer(message: str) -> None:
    network = made(NO_LOGITS[message], head=nn.Conv2d(6, 3, 1))
    with pytest.raises(DataError, match=message):
        found(network, layer="identity")


def test_a_layer_that_fails_its_proof_names_the_identity_layer(split: InputSplit) -> None:
    network = made(lambda self, maps: self.head(pooled(maps)).relu(), head=nn.Linear(6, 3))
    with pytest.raises(DataError, match="the output is the ReLU of the logits") as caught:
        read(network, split, found(network))
    assert "identity puts an identity layer" in str(caught.value.hint)


def test_a_relu_that_the_first_rows_do_not_show_is_refused() -> None:
    for sign in (-1, 1):
        network = made(
            lambda self, maps, sign=sign: (sign * self.head(maps).mean((2, 3))).relu() * sign, head=nn.Conv2d(6, 1, 1)
        )
        network.head.bias.data.fill_(100 * sign)
        with pytest.raises(DataError, match="not linear in any features"):
            found(network)


CONVOLUTIONS = {
    "small kernel": nn.Conv2d(6, 3, 3), "padding": nn.Conv2d(6, 3, 1, padding=1),
    "padded whole": nn.Conv2d(6, 3, 4, padding=1), "stride": nn.Conv2d(6, 3, 1, stride=2),
    "groups": nn.Conv2d(6, 3, 1, groups=3), "transposed": nn.ConvTranspose2d(6, 6, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_that_is_no_product_of_averages_is_no_head(name: str) -> None:
    network = made(lambda self, maps: self.head(maps).mean((2, 3)), head=CONVOLUTIONS[name])
    with pytest.raises(DataError, match=r"not linear in any features|calls no linear layer"):
        found(network)


def test_heads_side_by_side_are_called_as_the_module_that_has_them_alone() -> None:
    names = [found(NETWORKS[name]()).name for name in ("averaged heads", "low rank", "two tokens")]
    assert names == ["heads", "head", "head+head_dist"]


def test_a_maximum_over_positions_of_one_output_is_no_position_that_is_taken() -> None:
    network = made(lambda self, maps: self.head(maps).amax((2, 3)), head=nn.Conv2d(6, 1, 1))
    with pytest.raises(DataError, match="it is computed from 'head' by amax"):
        found(network)


def test_a_head_is_proven_on_the_rows_of_a_second_batch(split: InputSplit) -> None:
    network = made(lambda self, maps: self.head(pooled(maps)).log_softmax(1), head=nn.Linear(6, 3))
    head = found(network)
    scales = iter([1.0, 1.0, 1.0, 1.1])  # the first batch goes through, and some of its rows twice
    network._after = lambda self, maps: (self.head(pooled(maps)) * next(scales)).log_softmax(1)
    with pytest.raises(DataError, match="differ from the network's output"):
        read(network, split, head)


def test_one_output_takes_two_labels(split: InputSplit) -> None:
    network = made(lambda self, maps: self.head(pooled(maps)), head=nn.Linear(6, 1))
    split.dataset.labels[5] = 7  # type: ignore[index]
    with pytest.raises(DataError, match="row 5 has label 7, but a head with one output expects labels 0 and 1"):
        read(network, split, found(network))


def waits(network: Network, head: Head, split: InputSplit, batch_size: int) -> int:
    """How often the host waits for the device."""
    with pretend_cuda.pretend() as gpu:
        collect(extract(network, head, split, batch_size=batch_size, device="cuda:0"), len(split))
    assert not gpu.problems()
    return gpu.num_syncs


@pytest.mark.parametrize("name", ["low rank", "functional linear", "every position, the last taken", "two tokens"])
def test_a_head_of_any_kind_costs_a_gpu_no_more_waits_a_batch(split: InputSplit, name: str) -> None:
    plain, network = NETWORKS["weight norm"](), NETWORKS[name]()
    expected, own = (
        waits(one, found(one), split, 1) - waits(one, found(one.cpu()), split, 2) for one in (plain, network)
    )
    assert own == expected


def test_a_head_is_the_same_on_a_gpu() -> None:
    network = NETWORKS["low rank"]()
    expected = found(network)
    with pretend_cuda.pretend() as gpu:
        head = found(network.to("cuda:0"), IMAGES.to("cuda:0"))
    assert torch.equal(head.weight, expected.weight)
    assert not gpu.problems()


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "num_labels": 3}
WORDS = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0], [4, 0, 0, 0], [2, 3, 4, 0]])
TEXTS = {"input_ids": WORDS, "attention_mask": (WORDS > 0).long()}


def drawn(network: nn.Module) -> nn.Module:
    """The network with weights that are not near zero."""
    torch.manual_seed(0)
    for parameter in network.parameters():
        parameter.data.normal_(0, 0.3)
    return network.eval()


def images(size: int) -> Tensor:
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1))


def gpt2() -> tuple[nn.Module, Any]:
    transformers = library("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=12, num_labels=3, pad_token_id=0)
    return drawn(transformers.GPT2ForSequenceClassification(config)), TEXTS


def deit() -> tuple[nn.Module, Any]:
    transformers = library("transformers")
    config = transformers.DeiTConfig(image_size=8, patch_size=4, **SMALL)
    return drawn(transformers.DeiTForImageClassificationWithTeacher(config)), images(8)


def adapted(**options: bool) -> tuple[nn.Module, Any]:
    transformers, peft = library("transformers"), library("peft")
    network = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SMALL))
    config = peft.LoraConfig(r=2, target_modules=["classifier"], lora_dropout=0.1, **options)
    return drawn(peft.get_peft_model(network, config)), images(8)


def bit() -> tuple[nn.Module, Any]:
    network = library("timm").models.ResNetV2(layers=(1,) * 4, channels=(128,) * 4, stem_chs=32, num_classes=3)
    return drawn(network), images(64)


def of_timm(name: str, size: int, **options: Any) -> tuple[nn.Module, Any]:
    return drawn(library("timm").create_model(name, num_classes=3, **options)), images(size)


LIBRARY_NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "every token, the last taken: GPT-2": gpt2,
    "two tokens: DeiT": deit,
    "low rank: LoRA": adapted,
    "low rank, scaled: DoRA": lambda: adapted(use_dora=True),
    "convolution: BiT": bit,
    "two heads, batch norm before: LeViT": lambda: of_timm(
        "levit_128s", 224, embed_dim=(16, 16, 16), num_heads=(1, 1, 1), depth=(1, 1, 1)
    ),
}


@pytest.mark.parametrize("name", LIBRARY_NETWORKS)
def test_features_times_head_are_the_outputs_of_libraries_networks(name: str) -> None:
    network, inputs = LIBRARY_NETWORKS[name]()

    def first(count: int) -> Any:
        return {key: rows[:count] for key, rows in inputs.items()} if isinstance(inputs, dict) else inputs[:count]

    head = find_head(network, first)
    features, output = _reader(network, head)(inputs)
    prove_head(head, features, output)
    with torch.no_grad():
        returned = network(**inputs) if isinstance(inputs, dict) else network(inputs)
    expected = getattr(returned, "logits", returned).double()
    torch.testing.assert_close(head.logits(features), expected, atol=1e-5, rtol=1e-5)
    again = find_head(network, first, layer=head.name)
    assert (again.form, again.weight.tolist()) == (head.form, head.weight.tolist())


def test_squeezenet_has_a_relu_after_its_weights_and_takes_an_identity_layer() -> None:
    network = library("torchvision").models.squeezenet1_1(num_classes=3).eval()
    with pytest.raises(DataError, match=r"computed from 'classifier.1' by relu_, adaptive_avg_pool2d"):
        find_head(network, lambda count: images(32)[:count])
    head = find_head(network, lambda count: images(32)[:count], layer="identity")
    features, output = _reader(network, head)(images(32))
    with torch.no_grad():
        assert torch.equal(features, network(images(32)))
    prove_head(head, features, output)
