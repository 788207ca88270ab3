"""Small language models: their posteriors beside one temperature, MC dropout and ensembles.

Closed questions of a known Bayes rate. The prompts are random sequences of words; the answer, one of four letters, is
drawn from a softmax of the words' hidden scores, so the best possible NLL is known. Three models (2 layers of Llama's architecture, random
start) are trained on the same few prompts by Adam until they have memorised them. Half of the words of the unusual prompts never occur in
training. Then three LoRA adapters are trained on these prompts; their frozen base learned from many prompts of other questions.

    python benchmarks/language_models.py --out questions.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from adapters import Adapters, compare_adapters, print_scores, run
from numpy.typing import NDArray
from scipy import optimize
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from bnncli.artifacts.files import read_metrics
from bnncli.artifacts.predictions import read_predictions

LETTERS = ("A", "B", "C", "D")
WORDS = tuple(f"w{k}" for k in range(50))
NUM_USUAL = 40  # the others are in unusual prompts only
LENGTH = 8
SPECIAL = ("<unk>", "<s>", "</s>")


def make_questions(count: int, scores: NDArray, generator: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    """Return words (N, LENGTH), answers (N,) and the probabilities (N, 4) that they are drawn from."""
    words = generator.integers(NUM_USUAL, size=(count, LENGTH))
    logits = scores[words].sum(axis=1)
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    answers = (generator.random((count, 1)) > probs.cumsum(axis=1)).sum(axis=1).clip(max=3)
    return words, answers, probs


def write_questions(path: Path, words: NDArray, answers: NDArray) -> None:
    """Write the questions as JSON lines."""
    rows = (
        {"prompt": " ".join(WORDS[k] for k in row), "answer": LETTERS[answer]}
        for row, answer in zip(words, answers, strict=True)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_model(folder: Path, words: NDArray, answers: NDArray, *, epochs: int, seed: int) -> None:
    """Train a model on the answers after the prompts, and save it with its tokenizer."""
    vocabulary = {name: index for index, name in enumerate((*SPECIAL, *LETTERS, *WORDS))}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="</s>")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config).train()
    inputs = torch.from_numpy(words + len(SPECIAL) + len(LETTERS))
    targets = torch.from_numpy(answers + len(SPECIAL))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(64):
            logits = network(input_ids=inputs[rows]).logits[:, -1]
            loss = torch.nn.functional.cross_entropy(logits, targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(folder: Path, num_train: int, epochs: int) -> dict[str, Any]:
    """Train, fit, predict and return the scores on test by posterior."""
    generator = np.random.default_rng(0)
    scores = 0.7 * generator.normal(size=(len(WORDS), len(LETTERS)))
    made = {
        name: make_questions(size, scores, generator)
        for name, size in (("train", num_train), ("val", 500), ("test", 4000))
    }
    for name, (words, answers, _) in made.items():
        write_questions(folder / f"{name}.jsonl", words, answers)
    words, answers, probs = made["test"]
    others = generator.integers(NUM_USUAL, len(WORDS), size=words.shape)
    bayes = float(-np.log(probs[np.arange(len(answers)), answers]).mean())
    data = " ".join(f"--data {name}=jsonl:{folder / name}.jsonl:text=prompt,label=answer" for name in made)
    ood = f"--ood unusual=jsonl:{folder / 'unusual'}.jsonl:text=prompt,label="
    shifted = np.where(generator.random(words.shape) < 0.5, others, words)
    write_questions(folder / "unusual.jsonl", shifted, answers)
    made["unusual"] = shifted, answers, probs
    task = adapt_to_questions(folder, made, f"{data} {ood}", generator)
    adapters = compare_adapters(folder, task, epochs=2 * epochs)
    runs = [folder / f"quiz-{seed}" for seed in range(3)]
    for seed, one in enumerate(runs):
        train_model(folder / f"model-{seed}", *made["train"][:2], epochs=epochs, seed=seed)
        run(
            f"extract-features {one} --model hf:{folder / f'model-{seed}'} --model-arg answers={','.join(LETTERS)} {data} {ood}"
        )
    first = runs[0]
    for line in ("fit-temperature", "fit-calibration", "fit-laplace", "refine", "hmc", "stack"):
        run(f"{line} {first}")
    run(f"predict {first}")
    run(f"evaluate {first} --split test --bootstrap 0")
    found: dict[str, Any] = {"bayes_nll": bayes, "posteriors": {}, "adapters": adapters}
    for path in sorted((folder / "quiz-0.bnn" / "metrics").glob("*.json")):
        for row in read_metrics(path).meta["rows"]:
            if row["split"] == "test":
                own: dict[str, float] = {}
                for metric in row["metrics"]:  # the first form of each is the usual one
                    own.setdefault(metric["name"], metric["value"])
                found["posteriors"][row["name"]] = own
    for one in runs[1:]:
        run(f"predict {one} --posterior map")
    found["posteriors"] |= average_networks(runs)
    return found


def average_networks(runs: list[Path]) -> dict[str, dict[str, float]]:
    """Return the scores on test of the networks' mean probabilities, and of these at the best temperature on val."""

    def mean_of(split: str) -> tuple[NDArray, NDArray]:
        files = [read_predictions(Path(f"{one}.bnn") / "predictions" / "map.plug-in" / f"{split}.h5") for one in runs]
        return np.mean([np.asarray(file.probs, np.float64) for file in files], axis=0), np.asarray(files[0].labels)

    (val, val_labels), (test, labels) = mean_of("val"), mean_of("test")

    def scale(probs: NDArray, log_temperature: float) -> NDArray:
        found = probs ** np.exp(-log_temperature)
        return np.asarray(found / found.sum(axis=1, keepdims=True))

    def loss(log_temperature: float) -> float:
        return float(-np.log(scale(val, log_temperature)[np.arange(len(val)), val_labels]).mean())

    scaled, rows = (
        scale(test, optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded").x),
        np.arange(len(labels)),
    )
    return {
        name: {
            "nll": float(-np.log(probs[rows, labels]).mean()),
            "accuracy": float((probs.argmax(axis=1) == labels).mean()),
        }
        for name, probs in (("mean of three networks", test), ("the same at one temperature", scaled))
    }


def adapt_to_questions(
    folder: Path, made: dict[str, tuple[NDArray, ...]], words: str, generator: np.random.Generator
) -> Adapters:
    """Return the closed questions as a task for adapters; the base learned from 20,000 prompts of other questions."""
    scores = 0.7 * generator.normal(size=(len(WORDS), len(LETTERS)))
    base = folder / "base"
    train_model(base, *make_questions(20_000, scores, generator)[:2], epochs=5, seed=0)
    answers = list(range(len(SPECIAL), len(SPECIAL) + len(LETTERS)))

    def tokens(rows: NDArray) -> dict[str, Tensor]:
        ids = torch.from_numpy(rows + len(SPECIAL) + len(LETTERS))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return Adapters(
        base, "CAUSAL_LM", ["q_proj", "v_proj", "up_proj", "down_proj"],
        load=lambda: transformers.LlamaForCausalLM.from_pretrained(base),
        logits=lambda network, inputs: network(**inputs).logits[:, -1, answers],
        inputs={name: tokens(rows) for name, (rows, *_) in made.items()},
        targets={name: torch.from_numpy(one[1]) for name, one in made.items()},
        words=f"--model-arg answers={','.join(LETTERS)} {words}", outliers="unusual",
    )  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=1000, help="prompts of questions to train on")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.train, arguments.epochs)
    print(f"best possible NLL {found['bayes_nll']:.4f}")
    shown = ("nll", "ece", "accuracy", "auroc")
    print_scores({name: {key: own.get(key) for key in shown} for name, own in found["posteriors"].items()})
    print_scores(found["adapters"])
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
