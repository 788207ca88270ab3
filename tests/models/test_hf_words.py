"""Token classifiers: logits of words beside transformers' own, sub-words, padding, windows, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli
from problems.hf_folders import TAGS, TOKEN_MODELS, token_folder, tokenizer
from problems.optional_libraries import library

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.data.transform import Word
from bnncli.errors import BnnError
from bnncli.models import ModelRequest, open_model

torch = library("torch")
transformers = library("transformers")

pytestmark = pytest.mark.libraries

TEXTS = [
    ["the", "film", "is", "very", "good"],
    ["a", "badly", "awful", "plot"],  # sub-words: bad, ##ly
    ["finely"],
    ["not", "goodly", "and", "badly", "unheard", "film"],
]


def words_of(texts: list[list[str]]) -> list[Word]:
    return [Word(tuple(text), place) for text in texts for place in range(len(text))]


def library_logits(folder: Path, texts: list[list[str]], **settings: Any) -> np.ndarray:
    """The library's own logits at the first token of each word, one text at a time."""
    own = transformers.AutoTokenizer.from_pretrained(folder, **settings)
    network = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        encoding = own(text, is_split_into_words=True, return_tensors="pt")
        if not encoding.get("token_type_ids", torch.ones(1)).any():  # transformers 4 gives them for every network
            del encoding["token_type_ids"]
        with torch.no_grad():
            logits = network(**encoding).logits[0]
        places = encoding.word_ids(0)
        rows += [logits[places.index(word)].numpy() for word in range(len(text))]
    return np.array(rows)


def our_logits(folder: Path, texts: list[list[str]], *, is_inference: bool) -> np.ndarray:
    saved: Any = open_model(f"hf:{folder}", ModelRequest())
    inputs = {name: torch.from_numpy(array) for name, array in saved.transform(words_of(texts)).inputs.items()}
    with torch.inference_mode() if is_inference else torch.no_grad():
        found: np.ndarray = saved.build(None)(**inputs).numpy()
    return found


@pytest.mark.parametrize("kind", TOKEN_MODELS)
def test_logits_are_those_of_the_library_at_the_first_token_of_each_word(kind: str, tmp_path: Path) -> None:
    folder = token_folder(tmp_path / "model", kind)
    expected = library_logits(folder, TEXTS)
    assert expected.std(axis=0).min() > 1e-3
    np.testing.assert_allclose(our_logits(folder, TEXTS, is_inference=True), expected, atol=1e-5)
    np.testing.assert_allclose(our_logits(folder, TEXTS, is_inference=False), expected, atol=1e-5)


def test_a_text_is_computed_once_although_it_has_several_words(tmp_path: Path) -> None:
    saved: Any = open_model(f"hf:{token_folder(tmp_path / 'model')}", ModelRequest())
    inputs = {name: torch.from_numpy(array) for name, array in saved.transform(words_of(TEXTS)).inputs.items()}
    network, sizes = saved.build(None), []
    network.bert.register_forward_hook(lambda module, args, output: sizes.append(len(output[0])))
    with torch.inference_mode():
        network(**inputs)
    assert sizes == [len(TEXTS)]


def test_a_long_text_is_seen_in_windows_each_word_with_the_most_tokens_around_it(tmp_path: Path) -> None:
    folder = token_folder(tmp_path / "model")
    rng = np.random.default_rng(0)
    texts = [[str(word) for word in rng.choice(["film", "goodly", "bad", "plotlyly"], size)] for size in (40, 7, 23)]
    own = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for text in texts:
        whole = own(text, is_split_into_words=True, truncation=False).word_ids(0)[1:-1]
        cut = {"truncation": True, "max_length": 12, "stride": 5, "return_overflowing_tokens": True}
        windows = own(text, is_split_into_words=True, return_tensors="pt", padding=True, **cut)
        del windows["overflow_to_sample_mapping"]
        with torch.no_grad():
            logits = network(**windows).logits
        for word in range(len(text)):
            place = whole.index(word)
            starts = [5 * window for window in range(len(logits)) if 0 <= place - 5 * window < 10]
            around = [
                min(place - start if start else 99, start + 9 - place if start + 10 < len(whole) else 99)
                for start in starts
            ]
            start = starts[int(np.argmax(around))]
            expected.append(logits[start // 5, place - start + 1].numpy())
    assert len(expected) == 70
    np.testing.assert_allclose(our_logits(folder, texts, is_inference=True), expected, atol=1e-5)


def byte_level_tokenizer(folder: Path, **settings: Any) -> None:
    """Save a tokenizer like that of RoBERTa and GPT-2, to which a space before a word is part of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    own.train_from_iterator(
        [" ".join(text) for text in TEXTS * 9],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    own.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    made = transformers.RobertaTokenizerFast(
        tokenizer_object=own, cls_token="<s>", sep_token="</s>", **names, **settings
    )
    made.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["Roberta", "GPT2"])
def test_byte_level_tokenizers_get_a_space_before_each_word(kind: str, tmp_path: Path) -> None:
    folder = token_folder(tmp_path / "model", kind, vocab_size=300)
    byte_level_tokenizer(folder, model_max_length=16)
    expected = library_logits(folder, TEXTS, add_prefix_space=True)
    np.testing.assert_allclose(our_logits(folder, TEXTS, is_inference=True), expected, atol=1e-5)


def test_a_word_without_tokens_is_the_unknown_word(tmp_path: Path) -> None:
    folder = token_folder(tmp_path / "model")
    found = our_logits(folder, [["film", " ", "good"]], is_inference=True)
    np.testing.assert_allclose(found, library_logits(folder, [["film", "[UNK]", "good"]]), atol=1e-5)
    transform: Any = open_model(f"hf:{folder}", ModelRequest()).transform
    transform.load().unk_token = None
    with pytest.raises(BnnError, match="the tokenizer has no tokens for the words"):
        transform(words_of([["film", " ", "good"]]))


def test_what_is_no_token_classifier_of_texts_is_refused(tmp_path: Path) -> None:
    folder = token_folder(tmp_path / "model")
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    with pytest.raises(BnnError, match="has no tokenizer, which a token classifier needs"):
        open_model(f"hf:{folder}", ModelRequest())
    transformers.ByT5Tokenizer().save_pretrained(folder)
    with pytest.raises(BnnError, match=r"its tokenizer \(ByT5Tokenizer\) does not tell which tokens belong to a word"):
        open_model(f"hf:{folder}", ModelRequest()).build(None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_2d_position_embeddings": 1024}))
    with pytest.raises(BnnError, match="the places of words on a page"):
        open_model(f"hf:{folder}", ModelRequest())


def texts_file(path: Path, *, is_labeled: bool = True) -> Path:
    tags = ["O", "B-PER", "I-PER"]
    rows: list[dict[str, Any]] = [{"tokens": text} for text in TEXTS * 4]
    for row in rows if is_labeled else ():
        row["ner_tags"] = [tags[len(word) % 3] if word != "a" else None for word in row["tokens"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("batch_size", [3, 64])
def test_extracted_features_are_those_of_each_labelled_word(batch_size: int, tmp_path: Path, cli: Cli) -> None:
    folder, data = token_folder(tmp_path / "model"), texts_file(tmp_path / "ner.jsonl")
    done = cli(
        "extract-features", tmp_path / "run", "--model", f"hf:{folder}", "--batch-size", batch_size,
        "--data", f"train=jsonl:{data}",
    ).expect(0)  # fmt: skip
    assert "padding" not in done.stderr
    found = read_features(tmp_path / "run.bnn" / "features/train.h5")
    keep = [row for row, word in enumerate(words_of(TEXTS)) if word.words[word.place] != "a"]
    expected = library_logits(folder, TEXTS)[keep]
    assert found.head_weight is not None
    assert found.head_bias is not None
    assert found.classes == list(TAGS.values())
    logits = np.asarray(found.features)[: len(keep)] @ np.asarray(found.head_weight).T + np.asarray(found.head_bias)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    tags = [len(word.words[word.place]) % 3 for word in words_of(TEXTS)]
    assert np.asarray(found.labels)[: len(keep)].tolist() == [tags[row] for row in keep]


@pytest.mark.long
def test_the_pipeline_runs_on_words(tmp_path: Path, cli: Cli) -> None:
    folder, data = token_folder(tmp_path / "model"), texts_file(tmp_path / "ner.jsonl")
    run, new = tmp_path / "run", texts_file(tmp_path / "new.jsonl", is_labeled=False)
    splits = [word for name in ("train", "val", "test") for word in ("--data", f"{name}=jsonl:{data}:words=tokens")]
    cli("extract-features", run, "--model", f"hf:{folder}", *splits).expect(0)
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    table = tmp_path / "t.npz"
    words = ("--posterior", "laplace", "--table", table, "--probabilities")
    cli("predict", run, *words, "--data", f"new=jsonl:{new}").expect(0)
    found = np.load(table)
    assert found["probabilities"].shape == (4 * 16, 3)
    assert found["name"].astype(str).tolist()[:6] == ["0:0", "0:1", "0:2", "0:3", "0:4", "1:0"]
    with bnncli.open(run) as opened:
        ours = opened.predict(TEXTS, posterior="laplace").probabilities
    np.testing.assert_allclose(ours, found["probabilities"][:16], atol=1e-5)
    exported = cli("export", run, "--posterior", "laplace", "--integrator", "probit", "--format", "pt2").expect(0)
    assert "word_mask (batch, sequence)" in exported.stderr
    layers = ("--layers", "bert.encoder.layer.0.output*", "--structure", "kron", "--prior-precision", 1)
    cli("fit-laplace", run, *layers, "--name", "layer").expect(0)
    cli("predict", run, "--posterior", "layer", "--split", "test").expect(0)


@pytest.mark.long
def test_an_adapter_of_a_token_classifier_is_merged_or_apart(tmp_path: Path, cli: Cli) -> None:
    peft = library("peft")
    base, data = token_folder(tmp_path / "base"), texts_file(tmp_path / "ner.jsonl")
    plain = transformers.AutoModelForTokenClassification.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(task_type="TOKEN_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    adapted = peft.get_peft_model(plain, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.eval()
    opened: Any = open_model(f"peft:{tmp_path / 'adapter'}", ModelRequest(base_model=str(base)))
    inputs = {name: torch.from_numpy(value) for name, value in opened.transform(words_of(TEXTS)).inputs.items()}
    with torch.no_grad():
        whole = adapted(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        expected = whole[inputs["word_mask"].bool()]
        for made in (opened.build(None), opened.build_apart()):
            torch.testing.assert_close(made(**inputs), expected, atol=1e-4, rtol=0)
    run, model = tmp_path / "run", ("--model", f"peft:{tmp_path / 'adapter'}", "--base-model", base)
    splits = [word for name in ("train", "val") for word in ("--data", f"{name}=jsonl:{data}")]
    cli("extract-features", run, *model, *splits).expect(0)
    lora = ("--layers", "*lora_*", "--structure", "kron", "--prior-precision", 1, "--name", "lora")
    cli("fit-laplace", run, *lora).expect(0)


def test_a_token_classifier_is_identified(tmp_path: Path, cli: Cli) -> None:
    said = cli("inspect", token_folder(tmp_path / "model")).expect(0).stdout
    assert "jsonl:TRAIN.jsonl:words=tokens,label=tags" in said
    data = texts_file(tmp_path / "ner.jsonl")
    assert f"jsonl:{data}:words=tokens,label=ner_tags" in cli("inspect", data).expect(0).stdout
    data.with_suffix(".conllu").write_text("")
    assert "train=conll:" in cli("inspect", data.with_suffix(".conllu")).expect(0).stdout


def test_a_tokenizer_may_give_token_types(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = token_folder(tmp_path / "model", "Bert")
    names = ["input_ids", "token_type_ids", "attention_mask"]
    own = tokenizer("Bert", model_max_length=12, model_input_names=names)
    special = [("[CLS]", own.cls_token_id), ("[SEP]", own.sep_token_id)]
    own.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS]:1 $A [SEP]", special_tokens=special)
    own.save_pretrained(folder)
    plain = library_logits(token_folder(tmp_path / "plain"), TEXTS)
    expected = library_logits(folder, TEXTS)
    assert np.abs(plain - expected).max() > 1e-3
    for is_inference in (False, True):
        np.testing.assert_allclose(our_logits(folder, TEXTS, is_inference=is_inference), expected, atol=1e-5)
