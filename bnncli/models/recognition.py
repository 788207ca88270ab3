"""Recognise the public architecture and the last linear layer of a state dict from names and shapes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isqrt
from typing import Any, NamedTuple

from bnncli.names import prefixes_of

_OTHERS = re.compile(r"embed|token|position|rel_pos|relative|norm", re.IGNORECASE)
_LAST = re.compile(
    r"(?:^|\.)(?:classifier|fc|head|heads|linear|ll|logits|output|out|score|predictions?)(?:\.|$)", re.IGNORECASE
)


class HeadTensors(NamedTuple):
    """A layer that could be the head."""

    name: str
    num_classes: int
    num_features: int


def possible_heads(shapes: Mapping[str, tuple[int, ...]]) -> list[HeadTensors]:
    """Return linear layers and 1 x 1 convolutions whose outputs no other layer takes, most likely heads first.

    Args:
        shapes: of every tensor by name, in the network's order.
    """
    layers = []
    for name, shape in shapes.items():
        is_linear = len(shape) >= 2 and set(shape[2:]) <= {1}
        if name.rpartition(".")[2] == "weight" and is_linear and not _OTHERS.search(name):
            layers.append(HeadTensors(name, shape[0], shape[1]))
    taken = {shape[1] for shape in shapes.values() if len(shape) >= 2}
    taken |= {shape[0] for name, shape in shapes.items() if name.endswith("running_mean")}
    last = layers[-1:]
    free = [one for one in layers if one.num_classes not in taken and f"{one.name[:-6]}bias" in shapes] or last
    return sorted(free, key=lambda one: (one not in last, _LAST.search(one.name.removesuffix("weight")) is None))


Shapes = Mapping[str, tuple[int, ...]]


class Guess(NamedTuple):
    """A description of a network, and the matching `--model`; None if shapes do not decide."""

    text: str
    model: str | None = None


def guess(shapes: Shapes) -> Guess | None:
    """Return the public network with tensors of these names and shapes; None if unknown.

    Args:
        shapes: of every tensor by name, with any prefix.
    """
    names = sorted(shapes)
    for prefix in prefixes_of(name for name in names if name.count(".") < _MAX_DOTS):
        for anchor, family in _FAMILIES.items():
            if prefix + anchor in shapes:
                below = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
                if (found := family(below)) is not None:
                    return found
    return _hugging_face(names)


def _counts(shapes: Shapes, pattern: str) -> tuple[int, ...]:
    """Return the number of blocks per stage; the pattern's groups are stage and block."""
    stages: dict[int, set[int]] = {}
    for name in shapes:
        if match := re.match(pattern, name):
            stages.setdefault(int(match[1]), set()).add(int(match[2]))
    return tuple(len(stages[stage]) for stage in sorted(stages))


def _make_guess(library: str, family: str, found: str | None) -> Guess:
    """Return a guess by name, or a description if there is none."""
    if found is None:
        return Guess(f"looks like a {family} from {library} with custom sizes")
    return Guess(f"{found} from {library}", f"{library}:{found}")


_RESNETS: dict[tuple[Any, ...], str] = {
    (False, (2, 2, 2, 2), (64, 64)): "resnet18",
    (False, (3, 4, 6, 3), (64, 64)): "resnet34",
    (True, (3, 4, 6, 3), (64, 64)): "resnet50",
    (True, (3, 4, 23, 3), (64, 64)): "resnet101",
    (True, (3, 8, 36, 3), (64, 64)): "resnet152",
    (True, (3, 4, 6, 3), (128, 4)): "resnext50_32x4d",
    (True, (3, 4, 23, 3), (256, 8)): "resnext101_32x8d",
    (True, (3, 4, 23, 3), (256, 4)): "resnext101_64x4d",
    (True, (3, 4, 6, 3), (128, 128)): "wide_resnet50_2",
    (True, (3, 4, 23, 3), (128, 128)): "wide_resnet101_2",
}


_OF_RESNETS = re.compile(r"(?:conv1|bn1|fc|layer\d\.\d+\.(?:conv\d|bn\d|downsample\.\d))\.\w+")


def _resnet(shapes: Shapes) -> Guess | None:
    if "fc.weight" not in shapes or "conv1.weight" not in shapes:
        return None
    if not all(map(_OF_RESNETS.fullmatch, shapes)):
        return Guess("looks like a ResNet with parts that torchvision's ResNets do not have (timm has many variants)")
    counts = _counts(shapes, r"layer(\d+)\.(\d+)\.")
    width = shapes.get("layer1.0.conv2.weight", ())[:2]
    found = _RESNETS.get(("layer1.0.conv3.weight" in shapes, counts, width))
    if found is not None and shapes["conv1.weight"] != (64, 3, 7, 7):
        return Guess(f"looks like {found} with a different first convolution {shapes['conv1.weight']}")
    return _make_guess("torchvision", "ResNet", found)


def _vgg(shapes: Shapes) -> Guess | None:
    first = shapes["features.0.weight"]
    if first == (64, 3, 11, 11) and "classifier.6.weight" in shapes:
        return _make_guess("torchvision", "AlexNet", "alexnet")
    if "classifier.6.weight" not in shapes or first != (64, 3, 3, 3):
        return None
    count = sum(len(shape) == 4 for name, shape in shapes.items() if name.startswith("features."))
    size: str | None = {8: "11", 10: "13", 13: "16", 16: "19"}.get(count)
    is_standard = size is not None and shapes["classifier.0.weight"] == (4096, 25088)
    normalised = "_bn" if "features.1.running_mean" in shapes else ""
    return _make_guess("torchvision", "VGG", f"vgg{size}{normalised}" if is_standard else None)


def _squeezenet(shapes: Shapes) -> Guess | None:
    names: dict[tuple[int, ...], str] = {(96, 3, 7, 7): "squeezenet1_0", (64, 3, 3, 3): "squeezenet1_1"}
    return _make_guess("torchvision", "SqueezeNet", names.get(shapes.get("features.0.weight", ())))


def _densenet(shapes: Shapes) -> Guess | None:
    counts = _counts(shapes, r"features\.denseblock(\d+)\.denselayer(\d+)\.")
    names: dict[tuple[Any, ...], str] = {
        ((6, 12, 24, 16), 64): "densenet121", ((6, 12, 36, 24), 96): "densenet161", ((6, 12, 32, 32), 64): "densenet169",
        ((6, 12, 48, 32), 64): "densenet201",
    }  # fmt: skip
    return _make_guess("torchvision", "DenseNet", names.get((counts, shapes.get("features.conv0.weight", (0,))[0])))


def _mobilenet_v2(shapes: Shapes) -> Guess | None:
    is_standard = shapes["features.18.0.weight"] == (1280, 320, 1, 1) and "classifier.1.weight" in shapes
    return _make_guess("torchvision", "MobileNetV2", "mobilenet_v2" if is_standard else None)


def _mobilenet_v3(shapes: Shapes) -> Guess | None:
    names: dict[tuple[int, ...], str] = {(1024, 576): "mobilenet_v3_small", (1280, 960): "mobilenet_v3_large"}
    return None if "classifier.3.weight" not in shapes else _make_guess(
        "torchvision", "MobileNetV3", names.get(shapes.get("classifier.0.weight", ()))
    )  # fmt: skip


_EFFICIENT_NETS: dict[tuple[Any, ...], str] = {
    ((1, 2, 2, 3, 3, 4, 1), 1280): "b0",
    ((2, 3, 3, 4, 4, 5, 2), 1280): "b1",
    ((2, 3, 3, 4, 4, 5, 2), 1408): "b2",
    ((2, 3, 3, 5, 5, 6, 2), 1536): "b3",
    ((2, 4, 4, 6, 6, 8, 2), 1792): "b4",
    ((3, 5, 5, 7, 7, 9, 3), 2048): "b5",
    ((3, 6, 6, 8, 8, 11, 3), 2304): "b6",
    ((4, 7, 7, 10, 10, 13, 4), 2560): "b7",
    ((2, 4, 4, 6, 9, 15), 1280): "v2_s",
    ((3, 5, 5, 7, 14, 18, 5), 1280): "v2_m",
    ((4, 7, 7, 10, 19, 25, 7), 1280): "v2_l",
}


def _efficientnet(shapes: Shapes) -> Guess | None:
    if "classifier.1.weight" not in shapes:
        return None
    found = _EFFICIENT_NETS.get((_counts(shapes, r"features\.(\d+)\.(\d+)\.block\."), shapes["classifier.1.weight"][1]))
    return _make_guess("torchvision", "EfficientNet", f"efficientnet_{found}" if found else None)


_CONVNEXTS: dict[tuple[Any, ...], str] = {
    ((3, 3, 9, 3), 768): "convnext_tiny", ((3, 3, 27, 3), 768): "convnext_small", ((3, 3, 27, 3), 1024): "convnext_base",
    ((3, 3, 27, 3), 1536): "convnext_large",
}  # fmt: skip


def _convnext(shapes: Shapes) -> Guess | None:
    width = shapes.get("classifier.2.weight", (0, 0))[1]
    counts = _counts(shapes, r"features\.(\d+)\.(\d+)\.layer_scale")
    return _make_guess("torchvision", "ConvNeXt", _CONVNEXTS.get((counts, width)))


def _convnext_of_timm(shapes: Shapes) -> Guess | None:
    width = shapes.get("head.fc.weight", (0, 0))[1]
    is_first = "stages.0.blocks.0.gamma" in shapes and len(shapes.get("stages.0.blocks.0.mlp.fc1.weight", ())) == 2
    found = _CONVNEXTS.get((_counts(shapes, r"stages\.(\d+)\.blocks\.(\d+)\."), width)) if is_first else None
    return _make_guess("timm", "ConvNeXt", found)


def _vision_transformer(shapes: Shapes) -> Guess | None:
    size = shapes.get("conv_proj.weight", (0, 0, 0, 0))
    depth = len({name.split(".")[2] for name in shapes if name.startswith("encoder.layers.encoder_layer_")})
    names: dict[tuple[Any, ...], str] = {
        (768, 16, 12): "vit_b_16", (768, 32, 12): "vit_b_32", (1024, 16, 24): "vit_l_16", (1024, 32, 24): "vit_l_32",
    }  # fmt: skip
    is_of_224 = shapes.get("encoder.pos_embedding", (0, 0))[1] == (224 // (size[3] or 1)) ** 2 + 1
    is_standard = is_of_224 and "heads.head.weight" in shapes
    return _make_guess(
        "torchvision", "vision transformer", names.get((size[0], size[3], depth)) if is_standard else None
    )


_TRANSFORMERS_OF_TIMM = {
    "vit_tiny_patch16_224", "vit_tiny_patch16_384", "vit_small_patch16_224", "vit_small_patch16_384", "vit_small_patch32_224",
    "vit_small_patch32_384", "vit_base_patch8_224", "vit_base_patch16_224", "vit_base_patch16_384", "vit_base_patch32_224",
    "vit_base_patch32_384", "vit_large_patch16_224", "vit_large_patch16_384", "vit_large_patch32_224", "vit_large_patch32_384",
}  # fmt: skip


def _transformer_of_timm(shapes: Shapes) -> Guess | None:
    if "patch_embed.proj.weight" not in shapes or "pos_embed" not in shapes:
        return None
    width, _, patch, _ = shapes["patch_embed.proj.weight"]
    side = isqrt(max(shapes["pos_embed"][1] - 1, 0))
    size = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"}.get(
        (width, len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}))
    )
    name = f"vit_{size}_patch{patch}_{side * patch}"
    odd = {
        "dist_token",
        "norm_pre.weight",
        "fc_norm.weight",
        "blocks.0.ls1.gamma",
        "reg_token",
        "blocks.0.attn.q_norm.weight",
    }
    is_standard = not odd & shapes.keys() and {"cls_token", "head.weight", "blocks.0.attn.qkv.bias"} <= shapes.keys()
    is_whole = side * side + 1 == shapes["pos_embed"][1]
    found = name if is_standard and is_whole and name in _TRANSFORMERS_OF_TIMM else None
    return _make_guess("timm", "vision transformer", found)


def _swin(shapes: Shapes) -> Guess | None:
    if "features.1.0.attn.logit_scale" in shapes or "head.weight" not in shapes:
        return _make_guess("torchvision", "Swin transformer", None)
    counts = _counts(shapes, r"features\.(\d+)\.(\d+)\.attn\.")
    names: dict[tuple[Any, ...], str] = {
        ((2, 2, 6, 2), 96): "swin_t",
        ((2, 2, 18, 2), 96): "swin_s",
        ((2, 2, 18, 2), 128): "swin_b",
    }
    return _make_guess("torchvision", "Swin transformer", names.get((counts, shapes["features.0.0.weight"][0])))


def _describe_as(text: str) -> Callable[[Shapes], Guess]:
    return lambda shapes: Guess(f"looks like {text}")


# A tensor name specific to a family, and the function that determines its size; the first match wins.
_FAMILIES: dict[str, Callable[[Shapes], Guess | None]] = {
    "layer1.0.conv1.weight": _resnet,
    "features.denseblock1.denselayer1.norm1.weight": _densenet,
    "features.18.0.weight": _mobilenet_v2,
    "features.1.0.layer_scale": _convnext,
    "features.1.0.attn.relative_position_bias_table": _swin,
    "features.1.0.block.0.0.weight": _efficientnet,
    "features.1.block.0.0.weight": _mobilenet_v3,
    "features.3.squeeze.weight": _squeezenet,
    "features.0.weight": _vgg,
    "encoder.layers.encoder_layer_0.ln_1.weight": _vision_transformer,
    "blocks.0.attn.qkv.weight": _transformer_of_timm,
    "stages.0.blocks.0.conv_dw.weight": _convnext_of_timm,
    "layers.0.blocks.0.attn.relative_position_bias_table": _describe_as("a Swin transformer from timm"),
    "conv_stem.weight": _describe_as("an EfficientNet or MobileNet from timm"),
    "inception3a.branch1.conv.weight": _describe_as("GoogLeNet from torchvision"),
    "Mixed_5b.branch1x1.conv.weight": _describe_as("Inception v3 from torchvision"),
    "trunk_output.block1.block1-0.f.a.0.weight": _describe_as("a RegNet from torchvision"),
    "stage2.0.branch1.0.weight": _describe_as("a ShuffleNet v2 from torchvision"),
}
_MAX_DOTS = 12
_OF_HUGGING_FACE = (
    "albert", "bert", "beit", "convnext", "convnextv2", "deberta", "deit", "distilbert", "dinov2", "electra", "hubert",
    "mobilevit", "mpnet", "resnet", "roberta", "segformer", "swin", "vit", "wav2vec2", "whisper", "wavlm", "xlm-roberta",
)  # fmt: skip


def _hugging_face(names: list[str]) -> Guess | None:
    first = {name.split(".")[0] for name in names} & {*_OF_HUGGING_FACE}
    has_head = any(name.split(".")[0] in ("classifier", "score", "pre_classifier", "projector") for name in names)
    if len(first) == 1 and has_head:
        return Guess(
            f"looks like a Hugging Face {first.pop()} classifier; such models come in a folder with config.json"
        )
    return None
