"""`peft:DIR`: an adapter merged into its base gives the library's own logits, and nothing of either may be missing."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.hf_folders import BERT, TEXTS, image_folder, pictures, text_folder, tokenizer
from problems.optional_libraries import library
from safetensors.torch import load_file, save_file

from bnncli.errors import BnnError, DataError, MissingInput, UsageError
from bnncli.models import ModelRequest, open_model

pytestmark = pytest.mark.libraries

transformers, peft = library("transformers"), library("peft")
NUM_LABELS = 4


def adapter(folder: Path, network: Any, **settings: Any) -> Path:
    """An adapter with random weights for a network, saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(network, peft.LoraConfig(r=2, lora_alpha=3, **settings))
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
    return folder


def text_adapter(folder: Path) -> Path:
    """An adapter with a classifier of its own, on a base model that predicts masked words."""
    config = transformers.BertConfig(**BERT, vocab_size=20, max_position_embeddings=16)
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "base")
    made = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=NUM_LABELS)
    saved = ["pooler", "classifier"]  # the base has neither
    adapter(folder / "adapter", made, task_type="SEQ_CLS", target_modules=["query", "value"], modules_to_save=saved)
    tokenizer("Bert", model_max_length=12).save_pretrained(folder / "adapter")
    return folder


def image_adapter(folder: Path) -> Path:
    """An adapter whose changes reach into the head itself."""
    base = image_folder(folder / "base")
    made = transformers.ViTForImageClassification.from_pretrained(base)
    adapter(folder / "adapter", made, target_modules=["q_proj", "v_proj", "classifier"])
    return folder


def own_network(folder: Path, auto: str, **settings: Any) -> Any:
    """The library's own network, the adapter beside its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = getattr(transformers, auto).from_pretrained(folder / "base", **settings)
        return peft.PeftModel.from_pretrained(base, folder / "adapter").eval()


def test_logits_of_texts_are_those_of_the_library(tmp_path: Path) -> None:
    folder = text_adapter(tmp_path)
    saved = open_model(f"peft:{folder / 'adapter'}", ModelRequest(base_model=str(folder / "base")))
    network = saved.build(None)
    assert not [name for name, _ in network.named_modules() if "lora" in name]
    assert (saved.classes, network.classifier.out_features) == (None, NUM_LABELS)
    inputs = {name: torch.from_numpy(array) for name, array in saved.transform(TEXTS).inputs.items()}
    own = transformers.AutoTokenizer.from_pretrained(folder / "adapter")
    raw = own(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        expected = own_network(folder, "AutoModelForSequenceClassification", num_labels=NUM_LABELS)(**raw).logits
        base = transformers.BertForMaskedLM.from_pretrained(folder / "base").bert.eval()(**raw).last_hidden_state
        found = network(**inputs)
    torch.testing.assert_close(found.logits, expected, atol=1e-5, rtol=0)
    weights = folder / "base/model.safetensors"
    torch.save(load_file(weights), folder / "base/pytorch_model.bin")
    weights.unlink()
    with torch.inference_mode():
        again = open_model(f"peft:{folder / 'adapter'}", ModelRequest(base_model=str(folder / "base"))).build(None)(
            **inputs
        )
    torch.testing.assert_close(again.logits, found.logits, atol=0, rtol=0)
    assert (base - network.bert(**inputs).last_hidden_state).abs().max() > 1e-2


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_were_trained_beside_the_adapter_are_the_networks(bias: str, tmp_path: Path) -> None:
    base = text_folder(tmp_path / "base")
    made = transformers.BertForSequenceClassification.from_pretrained(base)
    adapter(tmp_path / "adapter", made, task_type="SEQ_CLS", target_modules=["query", "value"], bias=bias)
    spec = f"peft:{tmp_path / 'adapter'}"
    saved = open_model(spec, ModelRequest(base_model=str(base)))
    inputs = {name: torch.from_numpy(array) for name, array in saved.transform(TEXTS).inputs.items()}
    with torch.inference_mode():
        expected = own_network(tmp_path, "AutoModelForSequenceClassification")(**inputs).logits
        plain = transformers.BertForSequenceClassification.from_pretrained(base).eval()(**inputs).logits
        found = saved.build(None)(**inputs).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (plain - expected).abs().max() > 1e-2
    if bias == "all":
        weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
        copy = "base_model.model.classifier.modules_to_save.bias"
        save_file(weights | {copy: weights[copy] + 1}, tmp_path / "adapter/adapter_model.safetensors")
        with pytest.raises(DataError, match=rf"not in the network \(1\): '{copy}'"):
            open_model(spec, ModelRequest(base_model=str(base))).build(None)


def test_a_head_inside_the_adapter_is_merged(tmp_path: Path, cli: Cli) -> None:
    folder = image_adapter(tmp_path)
    saved = open_model(f"peft:{folder / 'adapter'}", ModelRequest(base_model=str(folder / "base")))
    assert saved.classes == ("worse", "same", "better")
    processor = transformers.AutoImageProcessor.from_pretrained(folder / "base")
    pixels = processor(images=pictures(), return_tensors="pt")["pixel_values"]
    np.testing.assert_array_equal(saved.transform(pictures()).inputs["pixel_values"], pixels.numpy())
    with torch.inference_mode():
        expected = own_network(folder, "AutoModelForImageClassification")(pixels).logits
        plain = transformers.ViTForImageClassification.from_pretrained(folder / "base")(pixels).logits
        found = saved.build(None)(pixels).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (plain - expected).abs().max() > 1e-2
    (tmp_path / "train").mkdir()
    for index, picture in enumerate(pictures()):
        picture.save(tmp_path / f"train/{index}.png")
    words = ("--model", f"peft:{folder / 'adapter'}", "--base-model", folder / "base")
    data = ("--data", f"train=images:{tmp_path / 'train'}")
    done = cli("extract-features", tmp_path / "moods", *words, *data)
    assert done.code == 0, done.stderr
    assert "up to date" in cli("extract-features", tmp_path / "moods", *words, *data).stderr
    shutil.copytree(folder / "base", folder / "other")
    said = cli("extract-features", tmp_path / "moods", *words[:3], folder / "other", *data)
    assert (said.code, "base_model: " in said.stderr) == (73, True)


def test_a_weight_that_is_in_neither_folder_is_named(tmp_path: Path) -> None:
    folder = text_adapter(tmp_path)
    saved = open_model(f"peft:{folder / 'adapter'}", ModelRequest(base_model=str(folder / "base")))
    path = folder / "adapter/adapter_model.safetensors"
    state = load_file(path)
    query = "base_model.model.bert.encoder.layer.0.attention.self.query"
    cases = {
        r"missing from the weights \(1\): 'bert.pooler.dense.bias'": {k: v for k, v in state.items() if "pooler.dense.bias" not in k},
        r"missing from the adapter \(1\): .*query.lora_A": {k: v for k, v in state.items() if k != f"{query}.lora_A.weight"},
        r"not in the network \(1\): .*other.lora_A": {**state, "base_model.model.other.lora_A.weight": torch.zeros(2, 16)},
        r"cannot load the model: RuntimeError": {**state, f"{query}.lora_A.weight": torch.zeros(2, 5)},
    }  # fmt: skip
    for message, other in cases.items():
        save_file(other, path, metadata={"format": "pt"})
        with pytest.raises(DataError, match=message):
            saved.build(None)
    with pytest.raises(UsageError, match="has its own weights"):
        saved.build({})


@pytest.mark.parametrize(
    ("changes", "base", "error", "message"),
    [
        ({}, "nowhere", MissingInput, "\0base_model\0: no folder .*nowhere'"),
        ({}, None, UsageError, "is an adapter for 'some/base', which is not a local folder"),
        ({"base_model_name_or_path": None}, None, UsageError, "does not name its base model; give it with \0base_model\0 DIR"),
        ({"peft_type": "PROMPT_TUNING"}, "base", DataError, "of kind PROMPT_TUNING adds inputs, so it cannot be merged"),
        ({"peft_type": "XLORA"}, "base", DataError, "of kind XLORA selects adapters from other folders .* cannot be merged"),
        ({"task_type": "CAUSAL_LM"}, "base", DataError, "expected an adapter of a sequence.* for CAUSAL_LM"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_in_a_line(
    tmp_path: Path, changes: dict[str, Any], base: str | None, error: type[BnnError], message: str
) -> None:
    folder = text_folder(tmp_path / "base")
    own = tmp_path / "adapter"
    own.mkdir()
    (own / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": "some/base", **changes}
    (own / "adapter_config.json").write_text(json.dumps(config))
    asked = ModelRequest(base_model=None if base is None else str(tmp_path / base))
    with pytest.raises(error, match=message) as told:
        open_model(f"peft:{own}", asked)
    assert "\n" not in told.value.message


def test_a_folder_that_is_no_adapter_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"no adapter_config.json in") as told:
        open_model(f"peft:{text_folder(tmp_path / 'base')}", ModelRequest())
    assert told.value.hint == f"this is a full model: use \0model\0 hf:{tmp_path / 'base'}"
