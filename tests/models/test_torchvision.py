"""Networks of torchvision, against its own inference on the same images."""

from __future__ import annotations

import re
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

from bnncli.artifacts.features import read_features
from bnncli.errors import BnnError, DataError, UsageError
from bnncli.models import ModelRequest, open_model

pytestmark = pytest.mark.libraries

SMALL = "shufflenet_v2_x0_5"


@pytest.fixture
def models() -> Any:
    return library("torchvision").models


@cache
def small() -> Any:
    torch.manual_seed(0)
    return settled(library("torchvision").models.get_model(SMALL, num_classes=3))


def logits_of_torchvision(network: Any, weights: Any, images: list[Image.Image]) -> torch.Tensor:
    """What torchvision's documentation says to do with an image."""
    preprocess = weights.transforms()
    with torch.no_grad():
        return network(torch.stack([preprocess(image) for image in images]))


def test_extracted_features_times_head_are_torchvisions_logits(cli: Cli, tmp_path: Path, models: Any) -> None:
    images = images_in(tmp_path / "data", ("a", "b", "c"))
    torch.save(small().state_dict(), tmp_path / "net.pt")
    model = f"torchvision:{SMALL}:IMAGENET1K_V1"
    done = cli("extract-features", tmp_path / "net.pt", "--model", model, "--data", f"test=images:{tmp_path}/data")
    assert done.code == 0, done.stderr
    expected = logits_of_torchvision(small(), models.get_model_weights(SMALL)["IMAGENET1K_V1"], images)
    check_equal(stored_logits(tmp_path / "net.pt.bnn/features/test.h5"), expected)


def test_weights_name_a_transform_and_without_them_inputs_are_arrays() -> None:
    bare = open_model(f"torchvision:{SMALL}", ModelRequest())
    assert (bare.transform, bare.classes, bare.files) == (None, None, ())
    inputs = torch.rand(2, 3, 64, 64)
    assert bare.build(small().state_dict())(inputs).equal(small()(inputs))
    transform = open_model(f"torchvision:{SMALL}:IMAGENET1K_V1", ModelRequest()).transform
    assert transform.to_json() == {"library": "torchvision", "network": SMALL, "weights": "IMAGENET1K_V1"}
    assert np.asarray(transform(IMAGES).inputs).dtype == np.float32


def test_outputs_of_published_weights_have_their_names_where_the_data_have_none(
    cli: Cli, tmp_path: Path, models: Any
) -> None:
    torch.save(models.get_model(SMALL).state_dict(), tmp_path / "net.pt")
    images_in(tmp_path / "data", ("a", "b"))
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 40, 40, 3), np.uint8), y=[0, 134, 999])
    words = ("extract-features", tmp_path / "net.pt", "--model", f"torchvision:{SMALL}:IMAGENET1K_V1", "--data")
    done = cli(*words, f"test=npz:{tmp_path}/x.npz")
    assert "using the class names of the published weights: 'tench', 'goldfish'" in done.stderr
    classes = read_features(tmp_path / "net.pt.bnn/features/test.h5").classes
    names = models.get_model_weights(SMALL)["IMAGENET1K_V1"].meta["categories"]
    assert [classes[0], classes[999]] == [names[0], names[999]] == ["tench", "toilet tissue"]
    assert len({*classes}) == 1000
    done = cli(*words, f"other=images:{tmp_path}/data", "--json")
    assert "--classes FILE" in done.json["error"]["hint"]
    assert open_model(f"torchvision:{SMALL}:IMAGENET1K_V1", ModelRequest()).published_classes(3) is None  # type: ignore[attr-defined]
    assert open_model(f"torchvision:{SMALL}", ModelRequest()).published_classes(1000) is None  # type: ignore[attr-defined]


def test_classes_are_counted_where_a_builder_looks_at_its_tensors(models: Any) -> None:
    state = models.get_model("regnet_y_400mf", num_classes=5).state_dict()
    assert open_model("torchvision:regnet_y_400mf", ModelRequest()).build(state).fc.bias.equal(state["fc.bias"])


def test_what_weights_change_of_the_network_is_built(models: Any) -> None:
    """Their builders set it, and no state dict tells: only the shape of a transformer's images could be seen."""
    from bnncli.models.kinds.torchvision import _infer_from_weights

    assert _infer_from_weights("vit_b_16", models.get_model_weights("vit_b_16")["IMAGENET1K_SWAG_E2E_V1"]) == {
        "image_size": 384
    }
    assert _infer_from_weights("maxvit_t", models.get_model_weights("maxvit_t")["IMAGENET1K_V1"]) == {
        "input_size": (224, 224)
    }
    assert _infer_from_weights("resnet18", models.get_model_weights("resnet18")["IMAGENET1K_V1"]) == {}


@pytest.mark.parametrize(
    ("spec", "arguments", "kind", "told"),
    [
        ("torchvision:resnet19", {}, UsageError, "no classifier 'resnet19' in torchvision.models; similar names: 'resnet"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, UsageError, "no classifier 'fasterrcnn_resnet50_fpn'"),
        (f"torchvision:{SMALL}:V9", {}, UsageError, "expected weights IMAGENET1K_V1.*; got 'V9'"),
        (f"torchvision:{SMALL}:", {}, UsageError, r"expected torchvision:NAME\[:WEIGHTS\]"),
        (f"torchvision:{SMALL}", {"weights": "DEFAULT"}, UsageError, "the weights come from the checkpoint"),
        (f"torchvision:{SMALL}", {"no_such": "1"}, UsageError, ": TypeError:.*no_such"),
        (f"torchvision:{SMALL}", {"num_classes": "4"}, DataError, r"'fc.weight' has shape \(3, 1024\) in the checkpoint"),
        ("torchvision:googlenet", {}, UsageError, "normalises its input again if it was trained from published weights"),
        ("torchvision:shufflenet_v2_x1_0", {}, DataError, "has shape"),
        ("torchvision:squeezenet1_1", {}, DataError, "the checkpoint does not match the network 'torchvision:squeezenet1_1'"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_told(spec: str, arguments: dict[str, str], kind: type[BnnError], told: str) -> None:
    with pytest.raises(kind, match=told) as error:
        open_model(spec, ModelRequest(arguments)).build(small().state_dict())
    assert "\n" not in error.value.message


def test_a_torchvision_for_another_torch_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.models import libraries

    def broken(name: str, **told: Any) -> Any:
        raise UsageError("cannot import it", code="missing_library") from RuntimeError("operator")

    monkeypatch.setattr(libraries, "require", broken)
    with pytest.raises(UsageError, match="cannot import it") as error:
        libraries.require_torchvision("timm")
    assert f"matches torch {torch.__version__}" in str(error.value.hint)


@pytest.mark.nightly
@pytest.mark.parametrize("has_auxiliary", [True, False])
@pytest.mark.parametrize(("name", "is_normalised"), [("googlenet", False), ("googlenet", True), ("inception_v3", True)])
def test_auxiliary_heads_are_as_the_checkpoint_has_them(
    name: str, is_normalised: bool, has_auxiliary: bool, models: Any
) -> None:
    torch.manual_seed(2)
    network = models.get_model(
        name, num_classes=4, aux_logits=has_auxiliary, transform_input=is_normalised, init_weights=False
    )
    network = settled(network, size=299)
    expected = logits_of_torchvision(network, models.get_model_weights(name)["IMAGENET1K_V1"], IMAGES)
    spec = f"torchvision:{name}:IMAGENET1K_V1"
    check_equal(logits_of_ours(spec, network.state_dict(), IMAGES, transform_input=str(is_normalised)), expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["resnet18", "squeezenet1_1", "mobilenet_v3_small", "efficientnet_b0", "densenet121", "vit_b_32", "mnasnet0_5"],
)
def test_logits_are_torchvisions(name: str, models: Any) -> None:
    torch.manual_seed(3)
    network = settled(models.get_model(name, num_classes=6), size=224)
    if name.startswith("vit"):
        torch.nn.init.normal_(network.heads.head.weight)  # zero when it is made
    state = network.state_dict()
    if name == "densenet121":  # as it was published
        state = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
        state = {
            re.sub(r"(denselayer\d+\.(?:norm|conv))([12]\.)", r"\1.\2", key): value for key, value in state.items()
        }
        assert "features.denseblock1.denselayer1.norm.1.weight" in state
    expected = logits_of_torchvision(network, models.get_model_weights(name)["IMAGENET1K_V1"], IMAGES)
    check_equal(logits_of_ours(f"torchvision:{name}:IMAGENET1K_V1", state, IMAGES), expected)
