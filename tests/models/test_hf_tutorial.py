"""The tutorial of a text classifier runs as it stands, on a small network that has learned to read few words."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problems.documented import DOCS, blocks_of, run_block
from problems.hf_folders import tokenizer, transformers

pytestmark = pytest.mark.libraries

POSITIVE, NEGATIVE, OTHER = ["good", "fine"], ["bad", "awful"], ["film", "plot", "the", "a", "is", "and"]
CLASSES = ["negative", "positive"]


def review(draw: random.Random) -> tuple[str, int]:
    label = draw.randrange(2)
    kinds = [OTHER, (NEGATIVE, POSITIVE)[label], (POSITIVE, NEGATIVE)[label]]
    return " ".join(draw.choice(draw.choices(kinds, [4, 6, 1])[0]) for _ in range(8)), label


def write(path: Path, rows: list[tuple[str, int]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, CLASSES[label]) for text, label in rows)])


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A folder of `save_pretrained`, and its data."""
    loads = [sys.executable, "-c", "from transformers import BertForSequenceClassification"]
    if subprocess.run(loads, capture_output=True, timeout=120).returncode != 0:
        pytest.skip("transformers cannot load BERT in this environment, beside another library")
    draw = random.Random(0)
    torch.manual_seed(0)
    train, test = ([review(draw) for _ in range(count)] for count in (400, 2300))
    words = tokenizer("Bert")
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=2, id2label=dict(enumerate(CLASSES)),
        label2id={name: index for index, name in enumerate(CLASSES)},
    )  # fmt: skip
    network = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    given = words([text for text, _ in train], padding=True, return_tensors="pt")
    labels = torch.tensor([label for _, label in train])
    for _ in range(40):
        optimizer.zero_grad()
        network(**given, labels=labels).loss.backward()
        optimizer.step()
    network.save_pretrained(tmp_path / "reviews-model")
    words.save_pretrained(tmp_path / "reviews-model")
    write(tmp_path / "train.csv", train)
    write(tmp_path / "test.csv", test)
    write(tmp_path / "new.csv", test[:20])
    write(tmp_path / "other.csv", [(" ".join(draw.choices(OTHER, k=8)), 0) for _ in range(50)])
    return tmp_path


def test_the_tutorial_of_a_text_classifier_runs_as_it_stands(reviews: Path) -> None:
    blocks = [block for block in blocks_of(DOCS / "tutorials/text-classifier.md") if block.runs]
    assert len(blocks) == 5
    for block in blocks:
        run_block(block.text.replace("--risk 0.1", "--risk 0.2"), reviews)
    with (reviews / "decided.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    for column in ("accept", "ood"):
        assert {row[column] for row in rows} <= {"0", "1"}
    assert {row["set"] for row in rows} <= {"", "negative", "positive", "negative;positive"}
