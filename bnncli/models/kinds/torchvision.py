"""`torchvision:NAME[:WEIGHTS]`: a classifier of torchvision.models, filled with the checkpoint.

WEIGHTS is a member of the builder's weights enum, such as IMAGENET1K_V1. Its transforms are the preprocessing, and
arguments that a state dict does not determine (the image size of a transformer) follow it. Nothing is downloaded.
Without WEIGHTS, inputs are arrays. The number of classes is the checkpoint's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import UsageError
from bnncli.models import ModelRequest
from bnncli.models.libraries import convert_build_errors, disambiguate_names, require_torchvision, stack_images
from bnncli.names import format_names
from bnncli.options.declaration import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from bnncli.data.transform import TransformedInputs

FORM = Form("torchvision:NAME[:WEIGHTS]", 40, "A torchvision model filled with CKPT.")
EXTRA: str | None = "torchvision"
TAKES: tuple[str, ...] = ("model_arg",)

_WITH_AUXILIARY_HEADS = ("inception_v3", "googlenet")
_NOT_ARGUMENTS = ("weights", "progress", "pretrained")
# Published DenseNets have names that modules can no longer have; torchvision renames them in the same way.
_OLD_DENSE_NAME = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\.(?:weight|bias|running_mean|running_var))")


@dataclass(frozen=True)
class WeightsTransform:
    """The preprocessing of published weights."""

    name: str
    weights: str
    takes: str = "images"
    mode: str = "RGB"

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return inputs (n, 3, H, W) float32 for PIL images."""
        return stack_images(_weights(self.name, self.weights).transforms(), items)

    def to_json(self) -> dict[str, Any]:
        """Return library, network and member of its weights enum, which define the transform."""
        return {"library": "torchvision", "network": self.name, "weights": self.weights}


@dataclass(frozen=True)
class Builder:
    """A torchvision network with the checkpoint's weights."""

    name: str
    arguments: Mapping[str, str]
    transform: WeightsTransform | None
    classes: None = None
    files: tuple[Path, ...] = ()
    task: None = None

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network with the weights of `state`.

        Raises:
            UsageError: torchvision is missing or has no such network or weights, or an argument is wrong.
            DataError: names or shapes of the weights do not fit the network.
        """
        from bnncli.models.build import fill_network  # imports torch
        from bnncli.system.user_code import convert_arguments

        assert state is not None, "it has no files, so that the checkpoint is always read"
        make = _builder(self.name)
        state = {_current_name(name): tensor for name, tensor in state.items()} if "densenet" in self.name else state
        arguments = convert_arguments(make, self.arguments, option="\0model_arg\0")
        if self.transform is not None:
            arguments = {**_infer_from_weights(self.name, _weights(self.name, self.transform.weights)), **arguments}
        if self.name in _WITH_AUXILIARY_HEADS:
            arguments = {**_infer_auxiliary_heads(self.name, arguments, state), **arguments}
        with convert_build_errors(f"torchvision:{self.name}"):
            if "num_classes" not in arguments and (count := _num_classes(make, arguments, state)) is not None:
                arguments["num_classes"] = count
            network: nn.Module = make(**arguments)
        fill_network(network, state, f"torchvision:{self.name}")
        return network.float().eval()

    def published_classes(self, num_classes: int) -> tuple[str, ...] | None:
        """Return the classes of WEIGHTS."""
        names = () if self.transform is None else _weights(self.name, self.transform.weights).meta["categories"]
        return disambiguate_names(names) if len(names) == num_classes else None


def open_model(place: str, asked: ModelRequest) -> Builder:
    """Open the network of a name. Raises UsageError for arguments that the network lacks."""
    name, colon, weights = place.partition(":")
    if not name or (colon and not weights):
        raise UsageError(f"\0model\0: expected {FORM.text}; got {'torchvision:' + place!r}")
    for argument in asked.arguments:
        if argument in _NOT_ARGUMENTS:
            raise UsageError(
                f"\0model_arg\0 {argument} is not supported: the weights come from the checkpoint",
                hint=f"to set a transform, use \0model\0 {FORM.text}",
            )
    return Builder(name, asked.arguments, WeightsTransform(name, weights) if weights else None)


def _current_name(name: str) -> str:
    match = _OLD_DENSE_NAME.fullmatch(name)
    return match[1] + match[2] if match else name


@cache
def _builder(name: str) -> Any:
    """Return the builder of a network. Raises UsageError if torchvision has no such classifier."""
    models = require_torchvision("torchvision").models
    names = models.list_models(module=models)
    if name not in names:
        near = difflib.get_close_matches(name, names) or names[:5]
        raise UsageError(
            f"\0model\0 torchvision: no classifier {name!r} in torchvision.models; similar names: {format_names(near)}"
        )
    return models.get_model_builder(name)


@cache
def _weights(name: str, weights: str) -> Any:
    """Return the member of the builder's weights enum. Raises UsageError if there is none."""
    _builder(name)
    enum = require_torchvision("torchvision").models.get_model_weights(name)
    if weights not in enum.__members__:
        raise UsageError(
            f"\0model\0 torchvision:{name}: expected weights {', '.join(enum.__members__)}; got {weights!r}"
        )
    return enum[weights]


def _infer_from_weights(name: str, weights: Any) -> dict[str, Any]:
    """Return arguments other than the number of classes that these weights imply."""
    if name.startswith("vit_"):
        return {"image_size": weights.meta["min_size"][0]}
    return {"input_size": weights.meta["min_size"]} if name.startswith("maxvit") else {}


def _infer_auxiliary_heads(name: str, given: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Infer arguments of Inception and GoogLeNet from the checkpoint. Raises UsageError for the one that it cannot."""
    if "transform_input" not in given:
        raise UsageError(
            f"\0model\0 torchvision:{name} normalises its input again if it was trained from published weights, "
            "and the checkpoint does not record this",
            hint="set \0model_arg\0 transform_input=true if training started from published weights, else "
            "transform_input=false",
        )
    return {"aux_logits": any(key.startswith(("AuxLogits.", "aux1.")) for key in state), "init_weights": False}


def _num_classes(make: Any, arguments: dict[str, Any], state: Mapping[str, Tensor]) -> int | None:
    """Infer the number of classes from the checkpoint's shapes; None if no tensor's shape depends on it."""
    import torch

    def shapes(count: int) -> dict[str, torch.Size]:
        try:
            with torch.device("meta"):
                network = make(**arguments, num_classes=count)
        except NotImplementedError:  # its builder reads values of tensors
            network = make(**arguments, num_classes=count)
        return {name: tensor.shape for name, tensor in network.state_dict().items()}

    two, three = shapes(2), shapes(3)
    changed = (name for name in two if two[name] != three[name] and name in state and state[name].ndim)
    return next((int(state[name].shape[0]) for name in changed), None)
