"""Networks of timm, against timm's own inference on the same images."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli
from problems.image_networks import IMAGES, check_equal, images_in, logits_of_ours, settled, stored_logits
from problems.optional_libraries import library

from bnncli.errors import BnnError, DataError, MissingInput, UsageError
from bnncli.models import ModelRequest, open_model

pytestmark = pytest.mark.libraries

NAMES = ("cat", "dog", "eel")


@pytest.fixture
def timm() -> Any:
    return library("timm")


@cache
def small() -> Any:
    """A network that all fast tests share."""
    torch.manual_seed(0)
    return settled(library("timm").create_model("resnet10t", num_classes=3))


def logits_of_timm(network: Any, images: list[Image.Image]) -> torch.Tensor:
    """What timm's documentation says to do with an image."""
    from timm.data import create_transform, resolve_model_data_config

    transform = create_transform(**resolve_model_data_config(network), is_training=False)
    with torch.no_grad():
        return network(torch.stack([transform(image.convert("RGB")) for image in images]))


def save_folder(folder: Path, network: Any, **options: Any) -> Path:
    from timm.models import _hub

    _hub.save_for_hf(network, folder, **options)
    return folder


def test_extracted_features_times_head_are_timms_logits(cli: Cli, tmp_path: Path) -> None:
    images = images_in(tmp_path / "data", NAMES)
    torch.save(small().state_dict(), tmp_path / "net.pt")
    done = cli(
        "extract-features", tmp_path / "net.pt", "--model", "timm:resnet10t", "--data", f"test=images:{tmp_path}/data"
    )
    assert done.code == 0, done.stderr
    check_equal(stored_logits(tmp_path / "net.pt.bnn/features/test.h5"), logits_of_timm(small(), images))


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_folder_that_timm_wrote_brings_weights_inputs_and_names(is_safe: bool, tmp_path: Path) -> None:
    network = small()
    config = {"mean": (0.1, 0.2, 0.3), "std": (0.3, 0.2, 0.1), "input_size": (3, 64, 96), "crop_pct": 0.5}
    folder = save_folder(
        tmp_path / "f", network, model_config={"label_names": list(NAMES)}, data_config=config,
        safe_serialization=is_safe,
    )  # fmt: skip
    saved = open_model(f"timm:{folder}", ModelRequest())
    assert saved.classes == NAMES
    assert [path.name for path in saved.files] == [
        "config.json",
        "model.safetensors" if is_safe else "pytorch_model.bin",
    ]
    assert saved.transform.to_json()["config"]["mean"] == [0.1, 0.2, 0.3]
    theirs = library("timm").create_model(f"local-dir:{folder}", pretrained=True).eval()
    check_equal(logits_of_ours(f"timm:{folder}", None, IMAGES), logits_of_timm(theirs, IMAGES))
    assert np.asarray(saved.transform(IMAGES).inputs).shape == (3, 3, 64, 96)


def test_a_tag_and_an_image_size_change_what_is_done(timm: Any) -> None:
    from timm.data import create_transform, resolve_data_config

    asked = {"resnet50.a1_in1k": {}, "resnet50.tv_in1k": {}, "vit_tiny_patch16_224": {"img_size": "96"}}
    seen = []
    for name, arguments in asked.items():
        config = resolve_data_config(
            {"img_size": 96} if arguments else {}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict()
        )
        expected = torch.stack([create_transform(**config, is_training=False)(image) for image in IMAGES]).numpy()
        seen.append(np.asarray(open_model(f"timm:{name}", ModelRequest(arguments)).transform(IMAGES).inputs))
        assert np.array_equal(seen[-1], expected)
    assert not np.array_equal(seen[0], seen[1])
    assert seen[2].shape[-1] == 96


def test_outputs_of_published_weights_have_the_names_of_imagenet(timm: Any) -> None:
    from timm.data import ImageNetInfo

    saved: Any = open_model("timm:resnet50.a1_in1k", ModelRequest())
    names, info = saved.published_classes(1000), ImageNetInfo()
    assert names[0] == info.index_to_description(0) == "tench, Tinca tinca"
    assert (names[134], names[517]) == ("crane (134)", "crane (517)")
    assert len({*names}) == 1000
    assert saved.published_classes(3) is None
    assert open_model("timm:resnet50.fb_swsl_ig1b_ft_in1k", ModelRequest()).published_classes(21843) is None  # type: ignore[attr-defined]


def test_grey_images_are_taken_where_the_folder_has_one_mean(tmp_path: Path, timm: Any) -> None:
    config = {"mean": (0.5,), "std": (0.25,), "input_size": (1, 32, 32)}
    network = timm.create_model("resnet10t", num_classes=3, in_chans=1).eval()
    folder = save_folder(tmp_path / "f", network, data_config=config, safe_serialization=True)
    saved = open_model(f"timm:{folder}", ModelRequest())
    inputs = np.asarray(saved.transform([image.convert("L") for image in IMAGES]).inputs)
    assert (saved.transform.mode, inputs.shape) == ("L", (3, 1, 32, 32))
    assert saved.build(None)(torch.from_numpy(inputs)).shape == (3, 3)
    assert open_model("timm:resnet10t", ModelRequest({"in_chans": "1"})).transform is None


@pytest.mark.parametrize(
    ("spec", "arguments", "kind", "told"),
    [
        ("timm:resnet10", {}, UsageError, "no network 'resnet10'; similar names: 'resnet10t'"),
        ("timm:resnet50.none", {}, UsageError, "resnet50 has the tags '.*got 'none'"),
        ("timm:convnext_tiny_in22ft1k", {}, UsageError, "is a deprecated name"),
        ("timm:resnet10t", {"no_such": "1"}, UsageError, ": TypeError:.*no_such"),
        ("timm:resnet10t", {"num_classes": "4"}, DataError, r"'fc.weight' has shape \(3, 512\) in the checkpoint"),
        ("timm:resnet18", {}, DataError, "the checkpoint does not match the network 'timm:resnet18'"),
    ],
)
def test_what_cannot_be_built_is_told(spec: str, arguments: dict[str, str], kind: type[BnnError], told: str) -> None:
    with pytest.raises(kind, match=told) as error:
        open_model(spec, ModelRequest(arguments)).build(small().state_dict())
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("spec", "arguments", "kind", "told"),
    [
        ("timm:hf-hub:timm/resnet10t", {}, UsageError, "expected timm:NAME, or timm:DIR"),
        ("timm:FOLDER/none", {}, MissingInput, "no folder '.*none'"),
        ("timm:FOLDER", {}, MissingInput, "no file '.*config.json'"),
        ("timm:FOLDER/hf", {}, DataError, "names no timm architecture"),
        ("timm:FOLDER/bad", {}, DataError, "is not a complete JSON file"),
        ("timm:FOLDER/bare", {}, MissingInput, "no model.safetensors or pytorch_model.bin in"),
        ("timm:resnet10t", {"pretrained": "true"}, UsageError, "the weights come from the checkpoint"),
        ("timm:resnet10t", {"img_size": "big"}, UsageError, "img_size: expected a number of pixels, got 'big'"),
    ],
)
def test_what_cannot_be_opened_is_told(
    spec: str, arguments: dict[str, str], kind: type[BnnError], told: str, tmp_path: Path
) -> None:
    for name, text in (("hf", '{"architectures": ["ViT"]}'), ("bad", "{"), ("bare", '{"architecture": "resnet10t"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    with pytest.raises(kind, match=told):
        open_model(spec.replace("FOLDER", str(tmp_path)), ModelRequest(arguments))


def test_a_model_is_opened_without_torch_and_the_libraries(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "resnet10t", "pretrained_cfg": {"mean": [0, 0, 0]}}')
    (tmp_path / "model.safetensors").touch()
    code = (
        "import sys\nfrom bnncli.models import ModelRequest, open_model\n"
        f"for spec in ('timm:resnet10t', 'timm:{tmp_path}', 'torchvision:resnet18:DEFAULT'):\n"
        "    open_model(spec, ModelRequest({'num_classes': '3'})).transform.to_json()\n"
        "print({'torch', 'torchvision', 'timm'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_names_of_labels_are_taken_by_their_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    for names, expected in (
        ({"1": "b", "0": "a"}, ("a", "b")),
        ({"0": "a", "5": "b"}, None),
        (["x"], ("x",)),
        ({}, None),
    ):
        config = {"architecture": "resnet10t", "label_names": names, "pretrained_cfg": {}}
        (folder / "config.json").write_text(json.dumps(config))
        assert open_model(f"timm:{folder}", ModelRequest()).classes == expected


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["mobilenetv3_small_050", "tf_efficientnet_lite0", "convnext_atto", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224",
     "regnetx_002", "mixer_s32_224", "resnetv2_50x1_bit", "tinynet_e", "edgenext_xx_small", "mobilevit_xxs", "densenet121"],
)  # fmt: skip
def test_logits_are_timms(name: str, timm: Any) -> None:
    torch.manual_seed(1)
    network = timm.create_model(name, num_classes=7)
    if not any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules()):
        torch.nn.init.normal_(network.get_classifier().weight if name[:4] != "deit" else network.head.weight)
    network = settled(network)
    check_equal(logits_of_ours(f"timm:{name}", network.state_dict(), IMAGES), logits_of_timm(network, IMAGES))
