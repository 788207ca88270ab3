"""Checkpoints of other forms: Lightning, quantised, shards, stand-ins, and architectures that they name."""

from __future__ import annotations

import io
import json
import math
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.optional_libraries import library
from problems.outputs import Told
from safetensors.torch import save_file
from torch import Tensor, nn

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.data.arrays import read_npz
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted, UsageError
from bnncli.models.build import load_network
from bnncli.models.checkpoint_files import STAND_INS, UNCHECKED, Array, NumberType, check_checksums, number
from bnncli.models.checkpoints import convert_checkpoint, find_states, load_checkpoint, load_whole
from bnncli.models.recognition import guess, possible_heads
from bnncli.models.sharded import checkpoint_sha256
from bnncli.numerics.digests import tensor_digest

pytestmark = pytest.mark.libraries


RAW = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.tensor([0.5, -0.5])}
MEAN = {name: tensor * 2 for name, tensor in RAW.items()}


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


INSIDE = {**under("model.", RAW), **under("ema_model.module.", MEAN), "ema_model.n_averaged": torch.ones(())}
SAVED: dict[str, tuple[Any, str, str]] = {
    "two keys": ({"state_dict": RAW, "state_dict_ema": MEAN, "optimizer": {"state": {0: RAW}}}, "ema", "state_dict_ema"),
    "a callback's": ({"state_dict": RAW, "callbacks": {"EMA": {"weights": MEAN}}}, "ema", "callbacks.EMA.weights"),
    "by its key": ({"net": RAW, "trainer": {"best": MEAN}}, "trainer.best", "trainer.best"),
    "a prefix": ({"state_dict": INSIDE}, "ema_model", "state_dict.ema_model"),
    "found prefix": ({"state_dict": INSIDE}, "ema", "state_dict.ema_model.module"),
    "a prefix at the top": (INSIDE, "ema_model.module", "ema_model.module"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAVED)
def test_the_state_that_is_asked_for_is_taken(tmp_path: Path, case: str) -> None:
    saved, wanted, key = SAVED[case]
    torch.save(saved, tmp_path / "a.pt")
    checkpoint = load_checkpoint(tmp_path / "a.pt", wanted=wanted)
    assert checkpoint.weights_digest == tensor_digest(MEAN)
    assert checkpoint.selected_key == key
    again = load_checkpoint(tmp_path / "a.pt", wanted=key)
    assert again.weights_digest == checkpoint.weights_digest


def test_all_states_are_listed_and_nothing_else() -> None:
    saved = {
        "epoch": 3, "state_dict": INSIDE, "swa": MEAN, "optimizer_states": [{"state": {0: RAW}}], "optim": {"a": RAW},
        "callbacks": {"best": {"a.ckpt": torch.tensor(0.5)}, "stop": {"wait": 1, "score": torch.ones(1)}},
    }  # fmt: skip
    assert [tuple(one) for one in find_states(saved)] == [
        ("state_dict", 5, False),
        ("state_dict.ema_model.module", 2, True),
        ("swa", 2, True),
    ]


def test_words_that_hold_those_of_averages_are_none() -> None:
    assert [one.is_averaged for one in find_states({"semantic_head": RAW, "schema": MEAN})] == [False, False]


def test_a_state_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    torch.save(SAVED["a callback's"][0], tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"no state 'best'; it has 'state_dict', 'callbacks\.EMA\.weights'"):
        load_checkpoint(tmp_path / "a.pt", wanted="best")
    torch.save(RAW, tmp_path / "b.pt")
    with pytest.raises(UsageError, match="no state 'ema'; it has only one, at the top level"):
        load_checkpoint(tmp_path / "b.pt", wanted="ema")


def test_an_unclear_choice_names_the_states(tmp_path: Path) -> None:
    torch.save({"student": RAW, "tutor": MEAN}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="no state dict found") as caught:
        load_checkpoint(tmp_path / "a.pt")
    assert caught.value.hint == "choose one: \0state\0 student, \0state\0 tutor"
    assert load_checkpoint(tmp_path / "a.pt", wanted="tutor").weights_digest == tensor_digest(MEAN)


@pytest.fixture
def two_states(tmp_path: Path) -> list[object]:
    """The words of extract-features on a checkpoint with raw and averaged weights."""
    torch.manual_seed(0)
    first, second = (load_network("mlp", {"inputs": "4", "hidden": "5", "classes": "3"}, None) for _ in range(2))
    torch.save({"state_dict": first.state_dict(), "ema": second.state_dict()}, tmp_path / "net.pt")
    torch.save([first, second], tmp_path / "networks")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), y=np.arange(6) % 3)
    return [
        "extract-features", tmp_path / "net.pt", "--model", "mlp", "--data", f"train=npz:{tmp_path}/d.npz", "--json",
    ]  # fmt: skip


def test_the_chosen_state_is_run_and_recorded(cli: Cli, two_states: list[object], tmp_path: Path) -> None:
    assert cli(*two_states, "--state", "ema").json["action"] == "computed"
    header = read_header(tmp_path / "net.pt.bnn/features/train.h5")
    assert header.provenance["params"]["state"] == "ema"
    assert header.provenance["checkpoint"]["selected_key"] == "ema"
    assert header.weights_digest == tensor_digest(torch.load(tmp_path / "networks", weights_only=False)[1].state_dict())
    assert cli(*two_states, "--state", "ema").json["action"] == "up_to_date"
    assert cli(*two_states).code == 73  # the others; not the same request
    other = [str(word).replace("train=", "test=") for word in two_states]
    error = cli(*other).json["error"]
    assert (error["code"], "another --state (then ema, now None)" in error["message"]) == ("mixed_options", True)
    assert cli(*other, "--state", "ema").json["action"] == "computed"
    assert cli("fit-laplace", tmp_path / "net.pt", "--prior-precision", "1").code == 0


def test_a_checkpoint_saved_again_is_known_by_the_chosen_weights(
    cli: Cli, two_states: list[object], tmp_path: Path
) -> None:
    assert cli(*two_states, "--state", "ema").code == 0
    saved = torch.load(tmp_path / "net.pt")
    torch.save({**saved, "epoch": 4}, tmp_path / "net.pt")
    assert cli("fit-laplace", tmp_path / "net.pt", "--prior-precision", "1").code == 0
    torch.save({"state_dict": nn.Linear(1, 1).state_dict(), "ema": saved["state_dict"]}, tmp_path / "net.pt")
    error = cli("fit-laplace", tmp_path / "net.pt", "--prior-precision", "2", "--json").json["error"]
    assert error["code"] == "wrong_checkpoint"


def test_no_state_is_recorded_where_none_was_asked_for(cli: Cli, two_states: list[object], tmp_path: Path) -> None:
    assert cli(*two_states).code == 0
    header = read_header(tmp_path / "net.pt.bnn/features/train.h5")
    assert "state" not in header.provenance["params"]
    assert cli(*two_states, "--state", "none").code == 2


@pytest.mark.parametrize("words", ["--model flatten --data a=npz:a.npz", "--from-npz a.npz"])
def test_a_run_without_a_network_has_no_state(cli: Cli, tmp_path: Path, words: str) -> None:
    np.savez(tmp_path / "a.npz", features_a=np.ones((2, 2)), labels_a=np.zeros(2, np.int64))
    done = cli("extract-features", tmp_path / "x", *words.replace("a.npz", f"{tmp_path}/a.npz").split(), "--state", "a")
    assert done.code == 2
    assert "--state needs a network" in done.stderr


BESIDE: dict[str, tuple[Any, str]] = {
    "a key": ({"model": RAW, "ema": MEAN}, "ema"),
    "both wrapped": ({"model": under("module.", RAW), "ema": MEAN}, "ema"),
    "an average of torch's": ({"model": RAW, "model_swa": {**under("module.", MEAN), "n_averaged": torch.ones(())}}, "model_swa"),
    "a callback's": ({"state_dict": RAW, "callbacks": {"SWA": {"average_model_state": MEAN}}}, "callbacks.SWA.average_model_state"),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_it_is_said_that_raw_weights_were_picked_where_there_are_averaged_ones(tmp_path: Path, case: str) -> None:
    saved, key = BESIDE[case]
    torch.save(saved, tmp_path / "a.pt")
    checkpoint = load_checkpoint(tmp_path / "a.pt")
    assert checkpoint.weights_digest == tensor_digest(RAW)
    assert checkpoint.notes == (f"using the raw weights, not the averaged ones (to use those: \0state\0 {key})",)
    assert load_checkpoint(tmp_path / "a.pt", wanted=key).weights_digest == tensor_digest(MEAN)
    for other in ({"else": torch.ones(1)}, RAW):  # of another network, or the same numbers
        torch.save({**saved, key.split(".")[0]: other}, tmp_path / "a.pt")
        assert load_checkpoint(tmp_path / "a.pt").notes == ()


def test_lightnings_callback_has_the_averaged_weights_in_the_place_of_the_raw(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(
        {"state_dict": MEAN, "current_model_state": RAW, "averaging_state": {"n_averaged": torch.ones(())}}, path
    )
    checkpoint = load_checkpoint(path)
    assert checkpoint.weights_digest == tensor_digest(MEAN)
    note = "using the averaged weights 'state_dict', not the raw ones in 'current_model_state'"
    assert checkpoint.notes == (note,) == tuple(cli("inspect", path, "--json").json["notes"])
    assert load_checkpoint(path, wanted="ema").selected_key == "state_dict"
    raw = load_checkpoint(path, wanted="current_model_state")
    assert (raw.weights_digest, raw.notes) == (tensor_digest(RAW), ())


OF_TORCHVISION = [
    "alexnet", "convnext_tiny", "densenet121", "densenet161", "efficientnet_b0", "efficientnet_b2", "efficientnet_v2_s",
    "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "resnet18", "resnet34", "resnet50", "resnext50_32x4d",
    "squeezenet1_0", "squeezenet1_1", "swin_t", "vgg11", "vgg16_bn", "vit_b_16", "vit_b_32", "wide_resnet50_2",
]  # fmt: skip
OF_TIMM = ["vit_tiny_patch16_224", "vit_small_patch16_384", "vit_base_patch32_384", "convnext_tiny"]
IN_WORDS = [
    "seresnet50", "convnextv2_tiny", "vit_base_patch16_clip_224", "deit_tiny_distilled_patch16_224", "efficientnet_b0",
]  # fmt: skip


def shapes_of(network: torch.nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + name: tuple(value.shape) for name, value in network.state_dict().items()}


@pytest.mark.parametrize("name", OF_TORCHVISION)
def test_a_network_of_torchvision_has_its_name(name: str) -> None:
    models = library("torchvision").models

    with torch.device("meta"):
        shapes = shapes_of(models.get_model(name, weights=None, num_classes=7), "model.backbone.")
    found = guess(shapes)
    assert found.model == f"torchvision:{name}"
    assert possible_heads(shapes)[0].num_classes == 7


@pytest.mark.parametrize("name", OF_TIMM)
def test_a_network_of_timm_has_its_name(name: str) -> None:
    timm = library("timm")

    with torch.device("meta"):
        found = guess(shapes_of(timm.create_model(name, num_classes=7)))
    assert found.model == f"timm:{name}"


@pytest.mark.parametrize("name", IN_WORDS)
def test_what_shapes_do_not_decide_is_said_in_words(name: str) -> None:
    timm = library("timm")

    with torch.device("meta"):
        found = guess(shapes_of(timm.create_model(name, num_classes=7)))
    assert found.model is None
    assert found.text.startswith("looks like")


def test_a_small_image_network_is_no_standard_one() -> None:
    models = library("torchvision").models

    network = models.resnet18(num_classes=7)
    network.conv1 = torch.nn.Conv2d(3, 64, 3)
    found = guess(shapes_of(network))
    assert (found.model, "looks like resnet18" in found.text) == (None, True)


def test_the_weights_of_a_hugging_face_classifier_ask_for_its_folder() -> None:
    names = ("bert.embeddings.word_embeddings.weight", "bert.pooler.dense.weight", "classifier.weight")
    found = guess(dict.fromkeys(names, (2, 2)))
    assert found.text == "looks like a Hugging Face bert classifier; such models come in a folder with config.json"
    assert guess({"fc.weight": (2, 2)}) is None


NETWORK = """
from torch import nn
def make(hidden: int = 8):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
"""
INPUTS, LABELS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


def fitted(folder: Path, lightning: Any, name: str, *callbacks: Any) -> tuple[Path, nn.Module]:
    """The checkpoint of a module that holds the network beside a loss with weights, and the network after training."""

    class Module(lightning.LightningModule):
        def __init__(self, hidden: int, rate: float, place: Path, layers: list[int]) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
            self.loss = nn.CrossEntropyLoss(weight=torch.ones(3))

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            value: Tensor = self.loss(self.net(batch[0]), batch[1])
            self.log("value", value)
            return value

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    module = Module(8, np.float64(0.05), folder / "data", [8, 3])
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, name, monitor="value", enable_version_counter=False)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saving, *callbacks], default_root_dir=folder,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(INPUTS, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(rows, 20))
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return folder / f"{name}.ckpt", module.net.eval()


@pytest.mark.nightly
def test_what_lightnings_trainer_saves_gives_the_logits_of_its_module(cli: Cli, tmp_path: Path) -> None:
    lightning = library("lightning")
    (tmp_path / "net.py").write_text(NETWORK)
    np.savez(tmp_path / "x.npz", x=INPUTS.numpy(), y=LABELS.numpy())
    words = ("--model", f"{tmp_path}/net.py:make", "--data", f"train=npz:{tmp_path}/x.npz")
    averaging = lightning.pytorch.callbacks
    cases = {
        "plain": ((), "using the checkpoint's tensors under 'net.' for the network"),
        "ema": ((averaging.EMAWeightAveraging(decay=0.9),), "using the averaged weights 'state_dict'"),
        "swa": (
            (averaging.StochasticWeightAveraging(0.01, swa_epoch_start=1),),
            "begin with 'net.'",
        ),  # exchanged at the end
    }
    for name, (callbacks, said) in cases.items():
        path, network = fitted(tmp_path, lightning, name, *callbacks)
        with torch.no_grad():
            expected = network(INPUTS).numpy()
        done = cli("extract-features", path, *words)
        assert done.code == 0, done.stderr
        assert said in done.stderr
        stored = read_features(tmp_path / f"{name}.ckpt.bnn/features/train.h5")
        logits = stored.features @ stored.head_weight.T + stored.head_bias
        assert "raw weights" not in done.stderr
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        shown = cli("inspect", path, "--json").json
        assert shown["made_by"].startswith("Lightning")
        assert shown["hyper_parameters"] == {
            "hyper_parameters.hidden": 8, "hyper_parameters.rate": 0.05,
            "hyper_parameters.place": str(tmp_path / "data"), "hyper_parameters.layers": "8, 3",
        }  # fmt: skip
        averaged = [one["key"] for one in shown["states"] if one["is_averaged"]]
        assert len(averaged) == (name != "plain")
        if averaged:
            assert cli("extract-features", path, *words, "--state", "ema", "--force").code == 0


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def quantised(network: Any, layers: set[str]) -> Any:
    """Dynamically quantised by torch; skipped where that has no int8 kernels."""
    supported = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    if not supported:
        pytest.skip("torch has no quantised kernels here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its new home
        torch.backends.quantized.engine = supported[-1]
        return torch.ao.quantization.quantize_dynamic(network, layers, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")
def test_the_head_of_torchs_int8_layers_is_dequantised(cli: Cli, network: Any, tmp_path: Path) -> None:
    small = quantised(network, {"2"})
    torch.save(small.state_dict(), tmp_path / "net.pt")
    checkpoint = load_checkpoint(tmp_path / "net.pt")
    assert list(checkpoint.state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(checkpoint.state["2.weight"], small[2].weight().dequantize())
    assert torch.equal(checkpoint.state["2.bias"], network[2].bias)
    assert "dequantised 1 int8 layers" in checkpoint.notes[0]
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))\n"
    )
    x = torch.rand(7, 4)
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=np.arange(7) % 3)
    data = f"test=npz:{tmp_path}/d.npz"
    done = cli("extract-features", tmp_path / "net.pt", "--model", f"{tmp_path}/net.py:make", "--data", data)
    assert (done.code, "dequantised" in done.stderr) == (0, True)
    content = read_features(tmp_path / "net.pt.bnn/features/test.h5")
    head = small[2].weight().dequantize()
    expected = network[:2](x) @ head.T + network[2].bias
    found = torch.from_numpy(content.features) @ torch.from_numpy(content.head_weight).T + network[2].bias
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_rows_of_bitsandbytes_are_scaled_by_their_largest(network: Any, tmp_path: Path) -> None:
    weight = network[2].weight.detach()
    largest = weight.abs().amax(dim=1)
    whole = torch.round(weight / largest[:, None] * 127).to(torch.int8)
    state = {
        **network.state_dict(),
        "2.weight": whole,
        "2.SCB": largest,
        "2.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    torch.save(state, tmp_path / "net.pt")
    found = load_checkpoint(tmp_path / "net.pt").state
    assert found.keys() == network.state_dict().keys()
    torch.testing.assert_close(found["2.weight"], weight, atol=float(largest.max()) / 253, rtol=0)
    assert torch.equal(found["2.weight"].abs().amax(dim=1), largest)
    torch.save({**state, "2.weight_format": torch.tensor(1, dtype=torch.uint8)}, tmp_path / "net.pt")
    with pytest.raises(DataError, match=r"'2.SCB' has no matching int8 weight;"):
        load_checkpoint(tmp_path / "net.pt")


@pytest.mark.parametrize(
    ("name", "library"), [("l.qweight", "GPTQ or AWQ"), ("l.weight.absmax", "4-bit"), ("l.weight_scale_inv", "float8")]
)
def test_other_quantisations_are_refused_with_their_name(tmp_path: Path, name: str, library: str) -> None:
    torch.save({"state_dict": {"l.weight": torch.ones(2, 2), name: torch.ones(2)}}, tmp_path / "net.pt")
    with pytest.raises(DataError, match=rf"quantised \(.*{library}.*, which is not supported") as caught:
        load_checkpoint(tmp_path / "net.pt")
    assert caught.value.code == "quantised"


@pytest.mark.filterwarnings("ignore")
def test_statically_quantised_weights_name_the_program_that_runs_them(tmp_path: Path) -> None:
    torch.save({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="expected a dense one") as caught:
        load_checkpoint(tmp_path / "a.pt")
    assert "torch.jit.trace and run it unchanged: \0model\0 jit:FILE" in str(caught.value.hint)


STATE = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones(2)}


def save_shards(
    folder: Path, state: dict[str, Tensor], suffix: str = "safetensors", *, is_indexed: bool = True
) -> Path:
    """A shard for each tensor; the index, where one is written."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for place, (name, tensor) in enumerate(state.items(), start=1):
        weight_map[name] = f"model-{place:05}-of-{len(state):05}.{suffix}"
        if suffix == "safetensors":
            save_file({name: tensor.contiguous()}, folder / weight_map[name])
        else:
            torch.save({name: tensor}, folder / weight_map[name])
    index = folder / f"model.{suffix}.index.json"
    if is_indexed:
        index.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read_as_one_checkpoint(tmp_path: Path, suffix: str, is_indexed: bool) -> None:
    index = save_shards(tmp_path / "net", STATE, suffix, is_indexed=is_indexed)
    for place in (tmp_path / "net", index) if is_indexed else (tmp_path / "net",):
        checkpoint = load_checkpoint(place)
        assert checkpoint.weights_digest == tensor_digest(STATE)
        assert checkpoint.format == ("safetensors-shards" if suffix == "safetensors" else "torch-zip-shards")
        assert checkpoint.file_sha256 == checkpoint_sha256(place)


def test_one_shard_alone_is_told_of_the_folder(tmp_path: Path) -> None:
    save_shards(tmp_path, STATE)
    with pytest.raises(DataError, match="one of 2 shards of a checkpoint") as caught:
        load_checkpoint(tmp_path / "model-00001-of-00002.safetensors")
    assert caught.value.hint == f"give the folder: {tmp_path}"


def test_shards_that_are_missing_are_named(tmp_path: Path) -> None:
    index = save_shards(tmp_path, STATE)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(MissingInput, match=r"is missing 1 of its 2 shards: 'model-00002-of-00002.safetensors'"):
            load_checkpoint(tmp_path)
        index.unlink(missing_ok=True)


BAD_INDEXES = {
    "lists no shards": '{"weight_map": {}}',
    "expected a weight_map": '["model-00001-of-00002.safetensors"]',
    "outside its folder": '{"weight_map": {"0.bias": "../model.safetensors"}}',
    r"'0.weight' is in 'model-00001-of-00002.safetensors', but the index says 'no file'": (
        '{"weight_map": {"0.bias": "model-00002-of-00002.safetensors", "x": "model-00001-of-00002.safetensors"}}'
    ),
}


@pytest.mark.parametrize("message", BAD_INDEXES)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, message: str) -> None:
    save_shards(tmp_path, STATE).write_text(BAD_INDEXES[message])
    with pytest.raises(DataError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert caught.value.code == "bad_index"


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, STATE, is_indexed=False)
    save_file(STATE, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(DataError, match=r"'0.weight' is in both 'model-00001-of-00002.safetensors' and"):
        load_checkpoint(tmp_path)


def test_two_checkpoints_in_one_folder_have_to_be_chosen_from(tmp_path: Path) -> None:
    index = save_shards(tmp_path, STATE)
    index.with_name("other.safetensors.index.json").write_text(index.read_text())
    with pytest.raises(DataError, match="holds 2 sharded checkpoints") as caught:
        load_checkpoint(tmp_path)
    assert caught.value.hint == f"give one index: {index}"
    assert load_checkpoint(index).weights_digest == tensor_digest(STATE)


def test_a_shard_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, STATE, "bin", is_indexed=False)
    torch.save(torch.nn.Linear(1, 1), tmp_path / "model-00002-of-00002.bin")
    with pytest.raises(Untrusted, match=r"model-00002-of-00002.bin': loading this file would run code"):
        load_checkpoint(tmp_path)


def test_a_run_of_shards_is_extracted_fitted_and_known_again(cli: Cli, tmp_path: Path) -> None:
    network = load_network("mlp", {"inputs": "4", "hidden": "5", "classes": "3"}, None)
    save_shards(tmp_path / "net", network.state_dict())
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(6) % 3)
    words = ["extract-features", tmp_path / "net", "--model", "mlp", "--data", f"train=npz:{tmp_path}/d.npz", "--json"]
    assert cli(*words).json["action"] == "computed"
    assert cli(*words).json["action"] == "up_to_date"
    header = read_header(tmp_path / "net.bnn/features/train.h5")
    assert header.weights_digest == tensor_digest(network.state_dict())
    assert cli("fit-laplace", tmp_path / "net", "--prior-precision", "1").code == 0
    save_shards(tmp_path / "net", {name: tensor + 1 for name, tensor in network.state_dict().items()})
    error = cli("fit-laplace", tmp_path / "net", "--prior-precision", "2", "--json").json["error"]
    assert error["code"] == "wrong_checkpoint"


def test_a_run_opened_in_python_sees_that_a_shard_changed(tmp_path: Path) -> None:
    from bnncli.api.session import _state_of

    save_shards(tmp_path / "net", STATE)
    before = _state_of(tmp_path / "net")
    with open(tmp_path / "net/model-00002-of-00002.safetensors", "ab") as stream:
        stream.write(b" ")
    assert before is not None
    assert _state_of(tmp_path / "net") != before


STAND_IN_STATE = {"fc.weight": torch.ones(2, 3)}
NUMBERS = (
    np.float64(0.9), np.float32(3), np.float16(2), np.int64(-7), np.uint8(200), np.bool_(True), np.array([1.5], ">f4")[0]
)  # fmt: skip


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "legacy"])
def test_numbers_paths_and_arrays_stand_beside_the_weights(tmp_path: Path, is_new: bool) -> None:
    saved = {
        "state_dict": STAND_IN_STATE, "numbers": NUMBERS, "places": [Path("/a/b.c"), PurePosixPath("d/e")],
        "arrays": [np.arange(3.0), np.random.default_rng(0).bit_generator.state["state"], np.array([None])],
    }  # fmt: skip
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new)
    checkpoint, found = load_whole(tmp_path / "a.pt")
    assert torch.equal(checkpoint.state["fc.weight"], STAND_IN_STATE["fc.weight"])
    assert found["numbers"] == tuple(one.item() for one in NUMBERS)
    assert [type(one) for one in found["numbers"]] == [type(one.item()) for one in NUMBERS]
    assert found["places"] == ["/a/b.c", "d/e"]
    assert isinstance(found["arrays"][0], Array)


def test_an_array_of_numpy_is_no_weight(tmp_path: Path) -> None:
    torch.save({**STAND_IN_STATE, "bias": np.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(DataError, match="'bias' is Array, expected a tensor"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["O", "V8", "U3", "M8[s]", "f8,f8", "|O", "f3", "../f8", ""])
def test_a_forged_number_is_no_number_and_makes_nothing(name: str) -> None:
    kind = NumberType(name)
    kind.__setstate__((3, "<", None))
    assert math.isnan(number(kind, bytes(8)))
    assert math.isnan(number(NumberType("f8"), "text"))  # type: ignore[arg-type]


def test_the_names_are_those_that_pickles_have() -> None:
    class Named(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert f"{module}.{name}" in STAND_INS
            return STAND_INS[f"{module}.{name}"]

    saved = pickle.dumps((np.float64(0.5), Path("a/b"), np.arange(2)))
    half, place, _ = Named(io.BytesIO(saved)).load()
    assert (half, place) == (0.5, "a/b")


TWO_TENSORS = {"fc.weight": torch.linspace(-1, 1, 600).reshape(20, 30), "fc.bias": torch.arange(20.0)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(TWO_TENSORS, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def content_positions(path: Path) -> list[int]:
    """Where the bytes of all members lie in a zip file whose members are stored."""
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = [(raw.index(archive.read(one)), one.file_size) for one in archive.infolist() if one.file_size > 4]
    return [start + place for start, size in members for place in range(size)]


def flipped(path: Path, position: int, bit: int) -> Path:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    target = path.with_name(f"flipped{path.suffix}")
    target.write_bytes(content)
    return target


@pytest.mark.parametrize("trust", [False, True])
def test_every_flipped_bit_of_the_content_is_told(saved: Path, trust: bool) -> None:
    generator = np.random.default_rng(0)
    for position in generator.choice(content_positions(saved), size=100, replace=False):
        path = flipped(saved, int(position), int(generator.integers(8)))
        with pytest.raises(DataError, match="is damaged: checksum mismatch") as caught:
            convert_checkpoint(path, trust_pickle=trust)
        assert (caught.value.code, caught.value.hint) == ("damaged", "copy or download it again")


def outcomes(path: Path, read: Callable[[Path], str], stride: int) -> set[str]:
    """What reading gives for a file with one byte flipped, at every so many places: a digest, or "refused"."""
    found = set()
    for position in range(0, path.stat().st_size, stride):
        try:
            found.add(read(flipped(path, position, position % 8)))
        except (DataError, Untrusted):
            found.add("refused")
    return found


def test_a_file_with_a_flipped_byte_anywhere_is_refused_or_means_the_same(saved: Path) -> None:
    whole = load_checkpoint(saved).weights_digest
    assert outcomes(saved, lambda path: load_checkpoint(path).weights_digest, 19) == {"refused", whole}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_with_a_flipped_byte_anywhere_is_refused_or_means_the_same(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    save(tmp_path / "a.npz", x=np.linspace(0, 1, 300).reshape(30, 10), y=np.arange(30))
    digest = tensor_digest(read_npz(tmp_path / "a.npz", ("x", "y")))
    read = outcomes(tmp_path / "a.npz", lambda path: tensor_digest(read_npz(path, ("x", "y"))), 17)
    assert read == {"refused", digest}


def test_a_checkpoint_saved_without_checksums_is_read_and_said_to_have_none(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(TWO_TENSORS, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    checkpoint = load_checkpoint(tmp_path / "a.pt")
    assert checkpoint.notes == (UNCHECKED,)
    assert checkpoint.weights_digest == tensor_digest(TWO_TENSORS)


def test_one_member_without_a_checksum_among_others_that_have_one_is_damage(saved: Path) -> None:
    content = saved.read_bytes()
    checksum = zlib.crc32(TWO_TENSORS["fc.weight"].numpy().tobytes()).to_bytes(4, "little")
    assert content.count(checksum) == 2  # behind the member, and in the directory
    saved.write_bytes(content.replace(checksum, bytes(4)))
    with pytest.raises(DataError, match="checksum mismatch"):
        load_checkpoint(saved)


def test_every_byte_is_looked_at_in_blocks_that_a_signal_can_end(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "a.pt")
    told = Told()
    with open(tmp_path / "a.pt", "rb") as stream:
        assert check_checksums(stream, told)
    assert sum(told.steps) == sum(total for _, total in told.tasks)
    assert max(told.steps) <= 1 << 20


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_damaged_checkpoint_is_one_line_and_65(cli: Cli, saved: Path, command: str) -> None:
    path = flipped(saved, content_positions(saved)[-100], 3)
    done = cli(command, path, *([saved.with_name("out.safetensors")] if command == "convert" else []))
    assert (done.code, done.stdout) == (65, "")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
    assert not saved.with_name("out.safetensors").exists()


def test_a_failure_of_the_disk_is_not_called_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(zipfile.ZipExtFile, "read", fail)
    with pytest.raises(BnnError, match="Input/output error") as caught:
        load_checkpoint(saved)
    assert (caught.value.exit, caught.value.code) == (74, "read_failed")
