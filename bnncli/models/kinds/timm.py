"""`timm:NAME`, a timm classifier filled with the checkpoint; `timm:DIR`, a folder written by timm, with its own weights.

The preprocessing is timm's for evaluation, `create_transform(**resolve_data_config(...), is_training=False)`, with the
pretrained_cfg of NAME (for resnet50.a1_in1k, of its tag) or of the folder's config.json. The number of classes is the
checkpoint's.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.models import ModelRequest
from bnncli.models.libraries import convert_build_errors, disambiguate_names, require, require_torchvision, stack_images
from bnncli.names import format_names, quote_name
from bnncli.options.declaration import Form
from bnncli.system.input_files import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from bnncli.data.transform import TransformedInputs

FORM = Form("timm:NAME-or-DIR", 30, "A timm model filled with CKPT, or a folder with its own weights.")
EXTRA: str | None = "timm"
TAKES: tuple[str, ...] = ("model_arg",)

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in timm's own order of preference
_NOT_ARGUMENTS = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "features_only",
)
_OF_INPUTS = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class EvaluationTransform:
    """timm's preprocessing for evaluation.

    Attributes:
        name: network whose pretrained_cfg it uses; empty if `config` is complete.
        config: a folder's input configuration, in JSON.
        size: height and width that replace the configured ones.
    """

    name: str
    config: str = "{}"
    size: tuple[int, int] | None = None
    mode: str = "RGB"
    takes: str = "images"

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return inputs (n, C, H, W) float32 for PIL images."""
        return stack_images(_create_transform(self), items)

    def to_json(self) -> dict[str, Any]:
        """Return the library, and the network or configuration that defines the transform."""
        what = {"network": self.name} if self.name else {"config": json.loads(self.config)}
        return {"library": "timm", **what, **({"size": list(self.size)} if self.size else {})}


@dataclass(frozen=True)
class TimmModel:
    """A timm network.

    Attributes:
        place: as typed by the user.
        network: its name in timm.
        config: pretrained_cfg of a folder; None for timm's own.
        saved: arguments of timm.create_model from the folder.
        arguments: from the user, as typed.
        files: config.json and the weights of a folder.
    """

    place: str
    network: str
    arguments: Mapping[str, str]
    transform: EvaluationTransform | None
    config: Mapping[str, Any] | None = field(default=None, repr=False)
    saved: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    classes: tuple[str, ...] | None = None
    task: None = None

    def build(self, state: Mapping[str, Tensor] | None) -> nn.Module:
        """Build the network with the weights of `state` or of its folder.

        Raises:
            UsageError: timm is missing or has no such network, or an argument is wrong.
            DataError: names or shapes of the weights do not fit the network.
        """
        from bnncli.models.build import fill_network  # imports torch
        from bnncli.models.checkpoints import load_checkpoint
        from bnncli.system.user_code import convert_arguments

        if state is None:
            state = load_checkpoint(self.files[-1]).state
        config = self.config if self.config is not None else _config_of(self.network)
        given = convert_arguments(_timm().create_model, self.arguments, option="\0model_arg\0")
        arguments = {**self.saved, **_num_classes(config.get("classifier"), state), **given}
        with convert_build_errors(f"timm:{self.place}"):
            network: nn.Module = _timm().create_model(
                self.network, pretrained_cfg=self.config and dict(self.config), **arguments
            )
        fill_network(network, state, f"timm:{self.place}")
        return network.float().eval()

    def published_classes(self, num_classes: int) -> tuple[str, ...] | None:
        """Return the classes of the ImageNet subset in the pretrained_cfg, chosen by their number, as timm does."""
        config = self.config if self.config is not None else _config_of(self.network)
        if config.get("num_classes") != num_classes:
            return None
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subset = infer_imagenet_subset({"num_classes": num_classes})
        info = None if subset is None else ImageNetInfo(subset)
        return (
            None
            if info is None
            else disambiguate_names([info.index_to_description(index) for index in range(num_classes)])
        )


def open_model(place: str, asked: ModelRequest) -> TimmModel:
    """Open the network of a name or folder.

    Raises:
        UsageError: the network has no such argument, or the name refers to the Hub.
        MissingInput: the folder, its config.json or its weights are missing.
        DataError: config.json is not timm's.
    """
    for argument in asked.arguments:
        if argument in _NOT_ARGUMENTS:
            raise UsageError(
                f"\0model_arg\0 {argument} is not supported: the weights come from the checkpoint, and bnncli "
                "uses the full network"
            )
    folder = Path(place).expanduser()
    if folder.is_dir():
        return _open_folder(place, folder, asked.arguments)
    if ":" in place or place.endswith(("/", ".json", ".safetensors", ".bin", ".pth")):
        raise UsageError(f"\0model\0: expected timm:NAME, or timm:DIR with an existing folder; got {'timm:' + place!r}")
    if "/" in place:
        raise MissingInput(f"no folder {quote_name(place, limit=300)}", path=folder)
    channels = asked.arguments.get("in_chans", "3")
    transform = EvaluationTransform(place, size=_size(asked.arguments.get("img_size"))) if channels == "3" else None
    return TimmModel(place, place, asked.arguments, transform)


def _open_folder(place: str, folder: Path, arguments: Mapping[str, str]) -> TimmModel:
    """Return the model in a folder written by timm's save_for_hf or push_to_hf_hub."""
    found = read_object(folder / _CONFIG)
    config = found.get("pretrained_cfg", found)  # older files have everything at the top level
    network = found.get("architecture")
    saved = found.get("model_args") or {}
    if not isinstance(network, str) or not isinstance(config, dict) or not isinstance(saved, dict):
        hint = f"\0model\0 hf:{place}" if "architectures" in found or "model_type" in found else None
        raise DataError(
            f"{quote_name(folder / _CONFIG, limit=300)} names no timm architecture", path=folder / _CONFIG, hint=hint
        )
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise MissingInput(f"no {' or '.join(_WEIGHTS)} in {quote_name(folder, limit=300)}", path=folder / _WEIGHTS[0])
    config = {name: value for name, value in config.items() if name not in ("architecture", "num_features", "labels")}
    names = next(
        (one for one in (found.get("label_names"), config.get("label_names"), found.get("labels")) if one), None
    )
    return TimmModel(
        place, network, arguments, _folder_transform(config, {**saved, **arguments}), config, saved,
        (folder / _CONFIG, weights), _classes(names),
    )  # fmt: skip


def _folder_transform(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> EvaluationTransform | None:
    """Return the folder's transform; None if its means do not match the channels, or the channels are not an image's."""
    told = {name: config[name] for name in _OF_INPUTS if config.get(name) is not None}
    channels = int(arguments.get("in_chans") or (told.get("input_size") or [3])[0])
    if len(told.get("mean", (0, 0, 0))) != channels or channels not in _MODES:
        return None
    size = _size(arguments.get("img_size")) if config.get("fixed_input_size") or "img_size" in arguments else None
    return EvaluationTransform("", json.dumps(told, sort_keys=True), size, _MODES[channels])


def _size(value: Any) -> tuple[int, int] | None:
    """Return height and width from img_size, one number or two. Raises UsageError."""
    if value is None:
        return None
    try:
        numbers = json.loads(value.strip().replace("(", "[").replace(")", "]")) if isinstance(value, str) else value
        height, width = (numbers, numbers) if isinstance(numbers, int) else numbers
        return int(height), int(width)
    except (ValueError, TypeError):
        raise UsageError(f"\0model_arg\0 img_size: expected a number of pixels, got {value!r}") from None


def _classes(names: Any) -> tuple[str, ...] | None:
    """Return label names from a list or a numbered mapping without gaps; None for none."""
    if isinstance(names, dict):
        names = [names.get(str(number)) for number in range(len(names))]
    is_list = isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list else None


def _timm() -> Any:
    """Import timm. Raises UsageError if it, or the torchvision that it needs, is missing."""
    require_torchvision("timm")
    return require("timm", extra="timm")


@cache
def _config_of(name: str) -> Mapping[str, Any]:
    """Return the pretrained_cfg of a network. Raises UsageError if timm has no such network or tag."""
    timm = _timm()
    network, _, tag = name.partition(".")
    if not timm.is_model(network):
        near = difflib.get_close_matches(network, timm.list_models()) or ["resnet50"]
        raise UsageError(f"\0model\0 timm: no network {network!r}; similar names: {format_names(near)}")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{network}.*")]
        raise UsageError(
            f"\0model\0 timm: {network} has the tags {format_names(tags, limit=20)}; got {tag!r}"
        ) from None
    if config is None:
        raise UsageError(f"\0model\0 timm: {name!r} is a deprecated name; use timm's current name for it")
    found: dict[str, Any] = config.to_dict()
    return found


@cache
def _create_transform(transform: EvaluationTransform) -> Callable[[Any], Tensor]:
    """Return the transform of single images, created once per process."""
    _timm()
    from timm.data import create_transform, resolve_data_config

    config = _config_of(transform.name) if transform.name else json.loads(transform.config)
    asked = {}
    if transform.size is not None:
        asked["input_size"] = (len(transform.mode), *transform.size)
    made: Callable[[Any], Tensor] = create_transform(
        **resolve_data_config(asked, pretrained_cfg=config), is_training=False
    )
    return made


def _num_classes(classifier: Any, state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of classes from the shape of the checkpoint's head; nothing if it has no such head."""
    names = classifier if isinstance(classifier, (list, tuple)) else [classifier]
    found = (state.get(f"{name}.{part}") for name in names for part in ("weight", "bias"))
    return next(({"num_classes": int(tensor.shape[0])} for tensor in found if tensor is not None and tensor.ndim), {})
