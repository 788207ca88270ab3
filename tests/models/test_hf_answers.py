"""Language models as classifiers of closed questions: logits beside transformers' own, prompts, padding, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli
from problems.hf_folders import tokenizer
from problems.optional_libraries import library

from bnncli.artifacts.features import read_features
from bnncli.models import ModelRequest, open_model
from bnncli.models.answers import Question, find_answer_tokens
from bnncli.session.network_splits import share_weights

torch = library("torch")
transformers = library("transformers")

pytestmark = pytest.mark.libraries

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
LLAMA = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "LlamaForCausalLM": LLAMA,
    "StableLmForCausalLM": {**LLAMA, "tie_word_embeddings": True},
    "MistralForCausalLM": LLAMA,
    "GemmaForCausalLM": LLAMA,
    "GraniteForCausalLM": {**LLAMA, "logits_scaling": 4.0},
    "GPTNeoXForCausalLM": {**SIZES, "max_position_embeddings": 32},
}
TEXTS = ["the film is very", "a bad, awful plot and the film is", "not", "and the plot and the film and the plot is a"]
ANSWERS = "good,bad,fine"


def model_folder(folder: Path, name: str, *, template: str | None = None, **settings: Any) -> Path:
    """A language model with random weights and a tokenizer without padding token, saved."""
    torch.manual_seed(0)
    made = getattr(transformers, name)
    sizes = {**MODELS.get(name, LLAMA), **settings}
    network = made(made.config_class(vocab_size=20, bos_token_id=2, eos_token_id=3, pad_token_id=None, **sizes)).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    own = tokenizer("Bert", model_max_length=16)
    own.pad_token = None
    own.chat_template = template
    own.save_pretrained(folder)
    return folder


def questions(path: Path) -> Path:
    rows = [{"prompt": text, "answer": ANSWERS.split(",")[k % 3]} for k, text in enumerate(TEXTS * 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own_logits(folder: Path, rows: list[list[int]], ids: list[int]) -> torch.Tensor:
    """The library's logits of the answers after each row of tokens, one at a time."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.stack([network(torch.tensor([row])).logits[0, -1, ids] for row in rows])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_logits_are_those_of_the_library_for_each_prompt_alone(
    name: str, batch_size: int, tmp_path: Path, cli: Cli
) -> None:
    folder, data = model_folder(tmp_path / "model", name), questions(tmp_path / "questions.jsonl")
    words = ("--model", f"hf:{folder}", "--model-arg", f"answers={ANSWERS}", "--batch-size", batch_size)
    done = cli("extract-features", tmp_path / "run", *words, "--data", f"train=jsonl:{data}:text=prompt,label=answer")
    assert done.code == 0, done.stderr
    assert "padding" not in done.stderr
    own = transformers.AutoTokenizer.from_pretrained(folder)
    ids = own.convert_tokens_to_ids(ANSWERS.split(","))
    rows = [[2, *own(text, add_special_tokens=False)["input_ids"]] for text in TEXTS]  # it begins with [CLS]
    expected = own_logits(folder, rows, ids)
    found = read_features(tmp_path / "run.bnn" / "features/train.h5")
    assert found.head_weight is not None
    assert found.classes == ANSWERS.split(",")
    bias = 0 if found.head_bias is None else np.asarray(found.head_bias)
    np.testing.assert_allclose(found.features[:4] @ np.asarray(found.head_weight).T + bias, expected, atol=1e-4)
    assert np.asarray(found.labels)[:4].tolist() == [0, 1, 2, 0]


def test_the_pipeline_runs_on_a_language_model_and_on_new_questions(tmp_path: Path, cli: Cli) -> None:
    folder, data = model_folder(tmp_path / "model", "LlamaForCausalLM"), questions(tmp_path / "questions.jsonl")
    spec = f"jsonl:{data}:text=prompt,label=answer"
    run = tmp_path / "run"
    words = ("--model", f"hf:{folder}", "--model-arg", f"answers={ANSWERS}")
    cli(
        "extract-features", run, *words, *(w for s in ("train", "val", "test") for w in ("--data", f"{s}={spec}"))
    ).expect(0)
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("fit-temperature", run).expect(0)
    cli("predict", run, "--split", "test").expect(0)
    cli(
        "predict",
        run,
        "--posterior",
        "laplace",
        "--data",
        f"new={spec}",
        "--table",
        tmp_path / "t.npz",
        "--probabilities",
    ).expect(0)
    table = np.load(tmp_path / "t.npz")
    assert table["probabilities"].shape == (20, 3)
    assert table["classes"].tolist() == ANSWERS.split(",")
    exported = ("--posterior", "laplace", "--integrator", "probit", "--format", "pt2")
    assert "input_ids" in cli("export", run, *exported).expect(0).stderr
    cli(
        "fit-laplace", run, "--layers", "*norm*", "--prior-precision", 1, "--structure", "diag", "--name", "norms"
    ).expect(0)


def test_prompts_have_a_template_or_the_models_chat_template(tmp_path: Path) -> None:
    chat = "{% for m in messages %}the {{ m.content }} is{% endfor %}{% if add_generation_prompt %} a{% endif %}"
    folder = model_folder(tmp_path / "model", "LlamaForCausalLM", template=chat)
    own = transformers.AutoTokenizer.from_pretrained(folder)

    def rows_of(**arguments: str) -> list[list[int]]:
        opened = open_model(f"hf:{folder}", ModelRequest({"answers": ANSWERS, **arguments}))
        assert opened.transform is not None
        found = opened.transform(["film", "very bad film"]).inputs
        assert isinstance(found, dict)
        assert found["attention_mask"].tolist()[0][-2:] == [0, 0]
        return [row[mask == 1].tolist() for row, mask in zip(found["input_ids"], found["attention_mask"], strict=True)]

    def tokens(text: str) -> list[int]:
        return list(own(text, add_special_tokens=False)["input_ids"])

    assert rows_of() == [[2, *tokens("film")], [2, *tokens("very bad film")]]
    assert rows_of(template="the {text} is\\n") == [[2, *tokens("the film is")], [2, *tokens("the very bad film is")]]
    assert rows_of(chat="yes") == [tokens("the film is a"), tokens("the very bad film is a")]


def test_a_long_prompt_loses_its_beginning(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "LlamaForCausalLM")
    opened = open_model(f"hf:{folder}", ModelRequest({"answers": ANSWERS}))
    assert opened.transform is not None
    found = opened.transform(["the film " * 10 + "is very", "bad"])
    assert isinstance(found.inputs, dict)
    assert (found.num_truncated, found.inputs["input_ids"].shape) == (1, (2, 16))
    own = transformers.AutoTokenizer.from_pretrained(folder)
    assert found.inputs["input_ids"][0].tolist()[:1] == [2]
    assert found.inputs["input_ids"][0].tolist()[-2:] == own.convert_tokens_to_ids(["is", "very"])


def test_answers_of_several_tokens_are_told_apart_by_the_first_that_differs(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "LlamaForCausalLM")
    own = transformers.AutoTokenizer.from_pretrained(folder)
    found = find_answer_tokens(own, Question(("very good film", "very bad", "very fine plot")), "model")
    assert found.prefix == tuple(own.convert_tokens_to_ids(["very"]))
    assert found.ids == tuple(own.convert_tokens_to_ids(["good", "bad", "fine"]))
    opened = open_model(f"hf:{folder}", ModelRequest({"answers": "very good,very bad"}))
    assert opened.transform is not None
    inputs = opened.transform(["the film is"]).inputs
    assert isinstance(inputs, dict)
    rows = [[2, *own.convert_tokens_to_ids(["the", "film", "is", "very"])]]
    assert inputs["input_ids"].tolist() == rows
    with torch.no_grad():
        logits = opened.build(None)(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    expected = own_logits(folder, rows, own.convert_tokens_to_ids(["good", "bad"]))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 65, "a language model is a classifier only of given answers"),
        (("answers=good",), 2, "expected at least two different answers"),
        (("answers=good,good",), 2, "expected at least two different answers"),
        (("answers=good,bad", "shots=3"), 2, "expected answers, chat, template"),
        (("answers=good,bad", "chat=perhaps"), 2, "expected yes or no"),
        (("answers=good,bad", "template=the film"), 2, "expected a text with one {text}"),
        (("answers=good,unheard"), 65, "does not know the answer 'unheard'"),
        (("answers=good film,good plot,bad",), 65, "the answers 'good film' and 'good plot' begin with the same token"),
        (("answers=good,bad", "chat=yes"), 65, "its tokenizer has no chat template"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: Any, code: int, said: str, tmp_path: Path, cli: Cli) -> None:
    folder, data = model_folder(tmp_path / "model", "LlamaForCausalLM"), questions(tmp_path / "questions.jsonl")
    given = [w for one in ([arguments] if isinstance(arguments, str) else arguments) for w in ("--model-arg", one)]
    done = cli(
        "extract-features",
        tmp_path / "run",
        "--model",
        f"hf:{folder}",
        *given,
        "--data",
        f"train=jsonl:{data}:text=prompt,label=",
    )
    assert (done.code, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_answers_in_another_order_are_refused(tmp_path: Path, cli: Cli) -> None:
    folder, data = model_folder(tmp_path / "model", "LlamaForCausalLM"), questions(tmp_path / "questions.jsonl")
    words = ("--model", f"hf:{folder}", "--model-arg", f"answers={ANSWERS}", "--classes", "bad,good,fine")
    done = cli("extract-features", tmp_path / "run", *words, "--data", f"train=jsonl:{data}:text=prompt,label=answer")
    assert (done.code, "the model's own classes in another order" in done.stderr) == (2, True), done.stderr


def test_logits_that_are_not_linear_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "Gemma2ForCausalLM", final_logit_softcapping=0.5)
    opened = open_model(f"hf:{folder}", ModelRequest({"answers": ANSWERS}))
    with pytest.raises(Exception, match="the logits are not linear in the last hidden state"):
        opened.build(None)


def test_a_language_model_is_identified(tmp_path: Path, cli: Cli) -> None:
    folder = model_folder(tmp_path / "model", "LlamaForCausalLM")
    said = cli("inspect", folder).expect(0).stdout
    assert "--model-arg answers=A,B,C,D" in said


def adapter_folder(folder: Path, base: Path) -> Path:
    """A LoRA adapter with random weights for a language model, saved."""
    peft = library("peft")
    network = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(network, settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def test_an_adapter_of_a_language_model_is_merged_or_apart(tmp_path: Path, cli: Cli) -> None:
    peft = library("peft")
    base = model_folder(tmp_path / "base", "LlamaForCausalLM")
    folder, data = adapter_folder(tmp_path / "adapter", base), questions(tmp_path / "questions.jsonl")
    own = transformers.AutoTokenizer.from_pretrained(base)
    ids = own.convert_tokens_to_ids(ANSWERS.split(","))
    network = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder).eval()
    rows = [[2, *own(text, add_special_tokens=False)["input_ids"]] for text in TEXTS]
    with torch.no_grad():
        expected = torch.stack([network(input_ids=torch.tensor([row])).logits[0, -1, ids] for row in rows])
    opened: Any = open_model(f"peft:{folder}", ModelRequest({"answers": ANSWERS}, base_model=str(base)))
    inputs = {name: torch.from_numpy(value) for name, value in opened.transform(TEXTS).inputs.items()}
    merged, apart = opened.build(None), opened.build_apart()
    share_weights(apart, merged)
    shared = {one.data_ptr() for one in merged.parameters()}
    own = [name for name, one in apart.named_parameters() if one.data_ptr() not in shared]
    assert own
    assert all(".base_layer." in name or ".lora_" in name for name in own)
    for made in (merged, apart):
        with torch.no_grad():
            torch.testing.assert_close(made(**inputs), expected, atol=1e-4, rtol=0)
    run, words = (
        tmp_path / "run",
        ("--model", f"peft:{folder}", "--base-model", base, "--model-arg", f"answers={ANSWERS}"),
    )
    splits = [w for s in ("train", "val", "test") for w in ("--data", f"{s}=jsonl:{data}:text=prompt,label=answer")]
    cli("extract-features", run, *words, *splits).expect(0)
    cli(
        "fit-laplace", run, "--layers", "*lora_*", "--structure", "kron", "--prior-precision", 1, "--name", "lora"
    ).expect(0)
    cli("predict", run, "--posterior", "lora", "--split", "test").expect(0)
