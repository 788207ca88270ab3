"""Heads of other libraries' networks that are no plain linear layer at the end, against these networks' own outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems.optional_libraries import library
from torch import Tensor, nn

from bnncli.errors import DataError
from bnncli.models.features import _reader
from bnncli.models.head import prove_head
from bnncli.models.head_search import find_head

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


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "every token, the last taken: GPT-2": gpt2,
    "two tokens: DeiT": deit,
    "low rank: LoRA": adapted,
    "low rank, scaled: DoRA": lambda: adapted(use_dora=True),
    "convolution: BiT": bit,
    "two heads, batch norm before: LeViT": lambda: of_timm(
        "levit_128s", 224, embed_dim=(16, 16, 16), num_heads=(1, 1, 1), depth=(1, 1, 1)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_features_times_head_are_the_networks_outputs(name: str) -> None:
    network, inputs = NETWORKS[name]()

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
