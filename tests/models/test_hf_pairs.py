"""Reward models as classifiers of pairs: logits beside transformers' own scores, antisymmetry, columns, chats, what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli
from problems.hf_folders import DECODERS, TEXT_MODELS, tokenizer
from problems.optional_libraries import library
from scipy import optimize

import bnncli
from bnncli.artifacts.features import FeatureFile, read_features
from bnncli.models import ModelRequest, open_model
from bnncli.session.inputs import open_posterior

torch = library("torch")
transformers = library("transformers")

pytestmark = pytest.mark.libraries

TEXTS = [
    ("the film is very good", "bad"),
    ("not fine", "a bad, awful plot and the film"),
    ("the plot and the film " * 6, "the film is good"),
    ("very very good", "and the plot and the film and the plot is a"),
    ("fine", "not a fine film"),
]
CHAT = "{% for m in messages %}{% if m.role == 'user' %}the {{ m.content }} is{% else %} very {{ m.content }}{% endif %}{% endfor %}"


def model_folder(
    folder: Path, kind: str = "Llama", *, side: str | None = "right", template: str | None = None, **config: Any
) -> Path:
    """A reward model with random weights, whose tokenizer pads on a side or not at all."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForSequenceClassification")
    settings: dict[str, Any] = {"pad_token_id": None if side is None else 0, **(TEXT_MODELS | DECODERS)[kind], **config}
    network = made(made.config_class(**{"num_labels": 1, "vocab_size": 20, **settings})).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    own = tokenizer(kind, model_max_length=12, **({} if side is None else {"padding_side": side}))
    if side is None:
        own.pad_token = None
    own.chat_template = template
    own.save_pretrained(folder)
    return folder


def write(path: Path, pairs: Sequence[Any], **others: Sequence[Any]) -> str:
    """The specification of a table of pairs with further columns."""
    rows = [
        {"chosen": pair[0], "rejected": pair[1], **{name: values[row] for name, values in others.items()}}
        for row, pair in enumerate(pairs)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def own_scores(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """The library's scores of each text alone."""
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    own = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return np.array([float(network(**own(text, truncation=True, return_tensors="pt")).logits) for text in texts])


def extracted(cli: Cli, run: Path, folder: Path, spec: str, *words: str) -> FeatureFile:
    done = cli(
        "extract-features",
        run,
        "--model",
        f"hf:{folder}",
        "--model-arg",
        "pairs=yes",
        *words,
        "--data",
        f"train={spec}",
    )
    assert done.code == 0, done.stderr
    return read_features(Path(f"{run}.bnn") / "features/train.h5")


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        *((kind, "right") for kind in TEXT_MODELS),
        ("Bert", "left"),
        *(("GPT2", side) for side in ("right", "left", None)),
        *(("Llama", side) for side in ("right", "left", None)),
        ("Mistral", "left"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_logits_are_differences_of_the_librarys_scores_of_each_text_alone(
    kind: str, side: str | None, batch_size: int, tmp_path: Path, cli: Cli
) -> None:
    folder = model_folder(tmp_path / "model", kind, side=side)
    spec = write(tmp_path / "pairs.jsonl", TEXTS) + ":text=chosen+rejected,label="
    found = extracted(cli, tmp_path / "run", folder, spec, "--batch-size", str(batch_size))
    first, second = (own_scores(folder, [pair[place] for pair in TEXTS]) for place in range(2))
    weight = np.asarray(found.head_weight)
    assert found.head_bias is None
    np.testing.assert_allclose((found.features @ weight.T)[:, 0], second - first, atol=1e-4)
    assert found.classes == ["first", "second"]
    assert found.num_truncated == 2


def many(count: int) -> list[tuple[str, str]]:
    rng = np.random.default_rng(0)
    words = ["good", "bad", "film", "plot", "the", "a", "is", "and", "not", "very"]
    return [
        (" ".join(rng.choice(words, rng.integers(1, 9))), " ".join(rng.choice(words, rng.integers(1, 9))))
        for _ in range(count)
    ]


@pytest.mark.long
def test_the_pipeline_is_antisymmetric_and_its_mode_is_that_of_a_logistic_regression(tmp_path: Path, cli: Cli) -> None:
    folder, run = model_folder(tmp_path / "model", "Bert"), tmp_path / "run"
    specs = {name: write(tmp_path / f"{name}.jsonl", many(60)) for name in ("train", "val", "test")}
    words = ("--model", f"hf:{folder}", "--model-arg", "pairs=yes")
    splits = [w for name, spec in specs.items() for w in ("--data", f"{name}={spec}")]
    said = cli("extract-features", run, *words, *splits).expect(0).stderr
    assert "train: 'chosen' is preferred in every row, so half of the pairs are swapped to balance the labels" in said
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli(
        "fit-laplace", run, "--layers", "*query*", "--structure", "kron", "--prior-precision", 1, "--name", "all"
    ).expect(0)
    cli("predict", run, "--split", "test").expect(0)
    cli("evaluate", run, "--split", "test").expect(0)
    cli("export", run, "--posterior", "laplace", "--integrator", "probit", "--format", "pt2").expect(0)

    def probability_of_second(name: str, text: str) -> np.ndarray:
        table = tmp_path / f"{name}.npz"
        spec = f"new={specs['test']}:text={text},label="
        cli("predict", run, "--posterior", "laplace", "--data", spec, "--table", table, "--probabilities").expect(0)
        return np.asarray(np.load(table)["probabilities"][:, 1])

    forward, backward = probability_of_second("ab", "chosen+rejected"), probability_of_second("ba", "rejected+chosen")
    assert forward.std() > 1e-3
    np.testing.assert_allclose(forward, 1 - backward, atol=1e-6)
    in_python = bnncli.open(run).predict(many(60), posterior="laplace").probs[:, 1]
    np.testing.assert_allclose(np.asarray(in_python), forward, atol=1e-6)
    train = read_features(tmp_path / "run.bnn/features/train.h5")
    sign = np.where(np.asarray(train.labels) == 1, 1, -1)

    def loss(weight: np.ndarray) -> float:
        return float(np.logaddexp(0, -sign * (train.features @ weight)).sum() + 0.5 * weight @ weight)

    mode = optimize.minimize(loss, np.zeros(16), tol=1e-10).x
    posterior: Any = open_posterior(tmp_path / "run.bnn/posteriors/laplace.safetensors")[0]
    np.testing.assert_allclose(posterior.center.numpy(), mode, atol=1e-3)
    probs = 1 / (1 + np.exp(-train.features @ mode))
    hessian = (train.features * (probs * (1 - probs))[:, None]).T @ train.features + np.eye(16)
    np.testing.assert_allclose(
        posterior.covariance.marginal_variances().numpy(), np.diag(np.linalg.inv(hessian)), atol=1e-3
    )


def test_pairs_that_prefer_one_column_are_swapped_by_row(tmp_path: Path, cli: Cli) -> None:
    folder, pairs = model_folder(tmp_path / "model"), many(41)
    spec = write(tmp_path / "pairs.jsonl", pairs)
    swapped = extracted(cli, tmp_path / "a", folder, spec)
    labels = np.asarray(swapped.labels)
    for count in range(2, 42, 2):
        assert labels[:count].sum() == count // 2
    assert 0 < (labels[::2] == 1).sum() < 20
    as_they_are = extracted(cli, tmp_path / "b", folder, f"{spec}:text=chosen+rejected,label=", "--batch-size", "7")
    assert as_they_are.labels is None
    sign = np.where(labels == 1, -1, 1)[:, None]
    np.testing.assert_allclose(swapped.features, sign * as_they_are.features, atol=1e-5)
    other = extracted(cli, tmp_path / "c", folder, f"{spec}:text=chosen+rejected,label=rejected")
    assert np.array_equal(1 - labels, other.labels)
    np.testing.assert_array_equal(other.features, swapped.features)


@pytest.mark.parametrize(
    ("values", "argument"), [([0, 1, 1], "yes"), (["first", "second", "second"], "yes"), (["B", "A", "A"], "B,A")]
)
def test_labels_say_which_text_is_better(values: list[Any], argument: str, tmp_path: Path, cli: Cli) -> None:
    folder = model_folder(tmp_path / "model")
    spec = write(tmp_path / "pairs.jsonl", TEXTS[:3], label=values)
    words = ("--model", f"hf:{folder}", "--model-arg", f"pairs={argument}", "--data", f"train={spec}")
    cli("extract-features", tmp_path / "run", *words).expect(0)
    found = read_features(tmp_path / "run.bnn/features/train.h5")
    assert np.asarray(found.labels).tolist() == [0, 1, 1]
    assert found.classes == (["first", "second"] if argument == "yes" else ["B", "A"])


def rows_of(folder: Path, items: list[Any], **arguments: str) -> list[list[int]]:
    """The tokens of each text of each pair."""
    opened = open_model(f"hf:{folder}", ModelRequest({"pairs": "yes", **arguments}))
    assert opened.transform is not None
    found = opened.transform(items).inputs
    assert isinstance(found, dict)
    ids, masks = (found[name].reshape(2 * len(items), -1) for name in ("input_ids", "attention_mask"))
    return [row[mask == 1].tolist() for row, mask in zip(ids, masks, strict=True)]


def test_a_prompt_and_an_answer_become_one_text_or_a_chat(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", template=CHAT)
    own = transformers.AutoTokenizer.from_pretrained(folder)

    def tokens(*texts: str, special: bool = True) -> list[list[int]]:
        return [list(own(text, add_special_tokens=special)["input_ids"]) for text in texts]

    item = ("film ", "good", "not {prompt}")
    assert rows_of(folder, [item]) == tokens("film good", "film not {prompt}")
    assert rows_of(folder, [item], template="the {prompt}[SEP]\\n{answer}") == tokens(
        "the film [SEP] good", "the film [SEP] not {prompt}"
    )
    chats = tokens("the film is very good", "the film is very bad", special=False)
    assert rows_of(folder, [("film", "good", "bad")], chat="yes") == chats
    said = [
        [{"role": "user", "content": "film"}, {"role": "assistant", "content": answer}] for answer in ("good", "bad")
    ]
    assert rows_of(folder, [tuple(said)], chat="yes") == chats
    assert rows_of(folder, [(said[0][:1], said[0][1:], said[1][1:])], chat="yes") == chats


def test_columns_of_usual_data_sets_are_found(tmp_path: Path, cli: Cli) -> None:
    folder = model_folder(tmp_path / "model", template=CHAT)
    plain = write(tmp_path / "plain.jsonl", [("good", "bad")] * 2, prompt=["film "] * 2)
    named = extracted(cli, tmp_path / "a", folder, f"{plain}:text=prompt+chosen+rejected")
    np.testing.assert_array_equal(extracted(cli, tmp_path / "b", folder, plain).features, named.features)
    messages = [
        [{"role": "user", "content": "film"}, {"role": "assistant", "content": answer}] for answer in ("good", "bad")
    ]
    chats = write(tmp_path / "chats.jsonl", [messages] * 2, prompt=["film"] * 2)  # as UltraFeedback has it
    of_chats = extracted(cli, tmp_path / "c", folder, chats, "--model-arg", "chat=yes")
    assert np.abs(of_chats.features).max() > 0
    assert sorted(np.asarray(of_chats.labels).tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "columns", "code", "said"),
    [
        (("pairs=perhaps",), "", 2, "pairs: expected yes, or the labels"),
        (("chat=yes",), "", 2, "pairs: expected yes, or the labels"),
        (("pairs=yes", "shots=3"), "", 2, "expected pairs, chat, template"),
        (("pairs=yes", "chat=perhaps"), "", 2, "expected yes or no"),
        (("pairs=yes", "template={prompt}"), "", 2, "expected a text with one {answer}"),
        (("pairs=yes", "chat=yes", "template={answer}"), "", 2, "either chat or template"),
        (("pairs=yes", "chat=yes"), "", 65, "its tokenizer has no chat template"),
        (("pairs=yes", "template={answer}"), ":text=prompt+chosen+rejected", 65, "the template has no {prompt}"),
        (("pairs=yes",), ":text=chosen", 2, "takes two columns for this model"),
        (("pairs=yes",), ":x=chosen", 2, "the model compares two texts"),
        (("pairs=yes",), ":text=chosen+rejected,label=prompt", 65, "the model has 'first', 'second'"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: tuple[str, ...], columns: str, code: int, said: str, tmp_path: Path, cli: Cli
) -> None:
    folder = model_folder(tmp_path / "model")
    spec = write(tmp_path / "pairs.jsonl", TEXTS, prompt=["film"] * len(TEXTS))
    given = [w for one in arguments for w in ("--model-arg", one)]
    done = cli(
        "extract-features", tmp_path / "run", "--model", f"hf:{folder}", *given, "--data", f"train={spec}{columns}"
    )
    assert (done.code, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_with_several_outputs_and_a_chat_without_a_prompt_are_refused(tmp_path: Path) -> None:
    several = model_folder(tmp_path / "several", num_labels=3)
    with pytest.raises(Exception, match="one output, its score; it has 3"):
        open_model(f"hf:{several}", ModelRequest({"pairs": "yes"})).build(None)
    folder = model_folder(tmp_path / "model", template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Exception, match="the data have only answers"):
        rows_of(folder, [("good", "bad")], chat="yes")
    with pytest.raises(Exception, match=r"chat template does not take these messages: .*roles must alternate"):
        rows_of(folder, [("film", "good", "bad")], chat="yes")
    messages = [{"role": "user", "content": "film"}]
    with pytest.raises(Exception, match="these are chat messages, not texts"):
        rows_of(folder, [(messages, messages)])
    with pytest.raises(Exception, match="already begin with a prompt"):
        rows_of(folder, [("film", messages, messages)], chat="yes")


def test_a_single_text_with_one_output_is_read_as_before_and_a_reward_model_hinted_at(tmp_path: Path, cli: Cli) -> None:
    folder = model_folder(tmp_path / "model", "Bert")
    spec = write(tmp_path / "texts.jsonl", TEXTS) + ":text=chosen,label="
    done = cli("extract-features", tmp_path / "run", "--model", f"hf:{folder}", "--data", f"train={spec}").expect(0)
    assert "if it is a reward model, compare pairs of texts: --model-arg pairs=yes" in done.stderr
    assert "--model-arg pairs=yes" in cli("inspect", folder).expect(0).stdout


@pytest.mark.long
def test_an_adapter_of_a_reward_model_is_merged_or_apart(tmp_path: Path, cli: Cli) -> None:
    peft = library("peft")
    base = model_folder(tmp_path / "base", "Llama", side=None)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(network, settings).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    own = transformers.AutoTokenizer.from_pretrained(base)
    pairs = [*TEXTS[:2], TEXTS[4]]
    with torch.no_grad():
        first, second = (
            torch.cat([model(**own(pair[place], return_tensors="pt")).logits for pair in pairs]) for place in range(2)
        )
    opened: Any = open_model(f"peft:{tmp_path / 'adapter'}", ModelRequest({"pairs": "yes"}, base_model=str(base)))
    inputs = {name: torch.from_numpy(value) for name, value in opened.transform(pairs).inputs.items()}
    for made in (opened.build(None), opened.build_apart()):
        with torch.no_grad():
            torch.testing.assert_close(made(**inputs), second - first, atol=1e-4, rtol=0)
    spec = write(tmp_path / "pairs.jsonl", many(20))
    words = ("--model", f"peft:{tmp_path / 'adapter'}", "--base-model", base, "--model-arg", "pairs=yes")
    run, splits = tmp_path / "run", [w for s in ("train", "val", "test") for w in ("--data", f"{s}={spec}")]
    cli("extract-features", run, *words, *splits).expect(0)
    cli(
        "fit-laplace", run, "--layers", "*lora_*", "--structure", "kron", "--prior-precision", 1, "--name", "lora"
    ).expect(0)
    cli("predict", run, "--posterior", "lora", "--split", "test").expect(0)
