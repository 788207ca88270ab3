"""Networks of public libraries are told by their names and shapes; a name only where it is the library's own network."""

from __future__ import annotations

import pytest
import torch
from problems.optional_libraries import library

from bnncli.models.recognition import guess, possible_heads

OF_TORCHVISION = [
    "alexnet", "convnext_tiny", "densenet121", "densenet161", "efficientnet_b0", "efficientnet_b2", "efficientnet_v2_s",
    "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "resnet18", "resnet34", "resnet50", "resnext50_32x4d",
    "squeezenet1_0", "squeezenet1_1", "swin_t", "vgg11", "vgg16_bn", "vit_b_16", "vit_b_32", "wide_resnet50_2",
]  # fmt: skip
OF_TIMM = ["vit_tiny_patch16_224", "vit_small_patch16_384", "vit_base_patch32_384", "convnext_tiny"]
IN_WORDS = [
    "seresnet50",
    "convnextv2_tiny",
    "vit_base_patch16_clip_224",
    "deit_tiny_distilled_patch16_224",
    "efficientnet_b0",
]


def shapes_of(network: torch.nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + name: tuple(value.shape) for name, value in network.state_dict().items()}


@pytest.mark.parametrize("name", OF_TORCHVISION)
def test_a_network_of_torchvision_has_its_name(name: str) -> None:
    models = library("torchvision").models

    with torch.device("meta"):
        shapes = shapes_of(models.get_model(name, weights=None, num_classes=7), "model.backbone.")
    found = guess(shapes)
    assert found is not None
    assert found.model == f"torchvision:{name}"
    assert possible_heads(shapes)[0].num_classes == 7


@pytest.mark.parametrize("name", OF_TIMM)
def test_a_network_of_timm_has_its_name(name: str) -> None:
    timm = library("timm")

    with torch.device("meta"):
        found = guess(shapes_of(timm.create_model(name, num_classes=7)))
    assert found is not None
    assert found.model == f"timm:{name}"


@pytest.mark.parametrize("name", IN_WORDS)
def test_what_shapes_do_not_decide_is_said_in_words(name: str) -> None:
    timm = library("timm")

    with torch.device("meta"):
        found = guess(shapes_of(timm.create_model(name, num_classes=7)))
    assert found is not None
    assert found.model is None
    assert found.text.startswith("looks like")


def test_a_small_image_network_is_no_standard_one() -> None:
    models = library("torchvision").models

    network = models.resnet18(num_classes=7)
    network.conv1 = torch.nn.Conv2d(3, 64, 3)
    found = guess(shapes_of(network))
    assert found is not None
    assert (found.model, "looks like resnet18" in found.text) == (None, True)


def test_the_weights_of_a_hugging_face_classifier_ask_for_its_folder() -> None:
    names = ("bert.embeddings.word_embeddings.weight", "bert.pooler.dense.weight", "classifier.weight")
    found = guess(dict.fromkeys(names, (2, 2)))
    assert found is not None
    assert found.text == "looks like a Hugging Face bert classifier; such models come in a folder with config.json"
    assert guess({"fc.weight": (2, 2)}) is None
