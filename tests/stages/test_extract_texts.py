"""extract-features of texts: tokenised by the model, labels matched to its classes, what was cut is said and stored."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.transforms import Halved, WordLengths
from problems.words_model import CLASSES, MeanOfWords, write_weights

from bnncli import registry
from bnncli.artifacts.features import FeatureFile, read_features
from bnncli.artifacts.files import read_header
from bnncli.commands.extract_features.splits import input_notes
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import load_split

TEXTS = ["a bb ccc", "dddd", "eeeee f", "a b c d e", "one two three four five six"] * 3
LABELS = ["short", "long", " odd"] * 5


@pytest.fixture(autouse=True)
def words_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--model words:FILE`, as a distribution would add it."""
    added, found = {"words": registry._Installed("problems.words_model", "tests")}, registry._installed
    monkeypatch.setattr(registry, "_installed", lambda family: added if family == "models" else found(family))


@pytest.fixture
def run(tmp_path: Path) -> list[object]:
    weights = write_weights(tmp_path / "weights.safetensors")
    with open(tmp_path / "train.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *zip(TEXTS, LABELS, strict=True)])
    records = [{"text": text, "label": row % 3} for row, text in enumerate(TEXTS[:3])]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = [f"--data=train=csv:{tmp_path / 'train.csv'}", f"--data=test=jsonl:{tmp_path / 'test.jsonl'}"]
    return ["extract-features", tmp_path / "reviews", f"--model=words:{weights}", *data]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_features_are_those_of_the_models_own_inference(
    cli: Cli, run: list[object], tmp_path: Path, num_workers: int
) -> None:
    done = cli(*run, "--num-workers", num_workers, "--batch-size", 4)
    assert done.code == 0, done.stderr
    assert "train: 6 of 15 texts were longer than 4 tokens and were truncated" in done.stderr
    assert "texts were" not in done.stderr.replace("train: 6 of 15 texts were", "")
    found = read_features(tmp_path / "reviews.bnn/features/train.h5")
    inputs = {name: torch.from_numpy(array) for name, array in dict(WordLengths()(TEXTS).inputs).items()}
    np.testing.assert_allclose(found.features[:], MeanOfWords().pooled(**inputs).detach(), rtol=1e-6)
    np.testing.assert_allclose(found.check_logits[:], MeanOfWords()(**inputs).detach(), atol=1e-5)
    assert found.labels is not None
    assert found.labels[:].tolist() == [0, 1, 2] * 5
    assert found.classes == list(CLASSES)
    assert (found.num_truncated, read_features(tmp_path / "reviews.bnn/features/test.h5").num_truncated) == (6, 0)


def test_the_same_data_are_up_to_date_and_other_data_are_not(cli: Cli, run: list[object], tmp_path: Path) -> None:
    assert cli(*run).code == 0
    assert "up to date" in cli(*run, "--num-workers", 1).stderr
    with open(tmp_path / "train.csv", "a") as stream:
        stream.write("one more,long\r\n")
    done = cli(*run)
    assert done.code == 0, done.stderr
    assert "train: 6 of 16 texts" in done.stderr
    assert len(read_features(tmp_path / "reviews.bnn/features/train.h5").features) == 16


def test_data_without_texts_store_no_number_of_them(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2), np.float32), y=[0, 1, 0, 1])
    assert (
        cli("extract-features", tmp_path / "flat", "--model=flatten", f"--data=train=npz:{tmp_path / 'a.npz'}").code
        == 0
    )
    assert "num_truncated" not in read_header(tmp_path / "flat.bnn/features/train.h5").meta


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
def test_real_numbers_are_taken_as_they_are_and_that_is_said(tmp_path: Path, dtype: str) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 4, 4), dtype))
    split = load_split(f"npz:{tmp_path / 'a.npz'}", preprocess=Preprocess(transform=Halved()))
    zeros = np.zeros((2, 1))
    content = FeatureFile("far", zeros, None, zeros[:, 0], [], None, None, None, is_ood=True)
    said = ["far: the inputs are floats and are used unchanged: the model's preprocessing expects images"]
    assert input_notes(split, content) == (said if dtype == "float64" else [])


def test_classes_that_the_model_does_not_have_are_refused(cli: Cli, run: list[object], tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(path.read_text().replace("short", "brief"))
    done = cli(*run)
    assert done.code == 65
    assert "split 'train' has the classes 'brief', 'long', 'odd'; the model has 'Short', 'Long', 'Odd'" in done.stderr


@pytest.mark.parametrize("kind", ["images", "npz"])
def test_images_are_no_data_for_a_model_of_texts(cli: Cli, run: list[object], tmp_path: Path, kind: str) -> None:
    from PIL import Image

    (tmp_path / "pictures").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "pictures/0.png")
    np.savez(tmp_path / "pictures.npz", x=np.zeros((2, 4, 4), np.uint8))
    place = tmp_path / ("pictures" if kind == "images" else "pictures.npz")
    done = cli(*run[:3], f"--data=test={kind}:{place}")
    assert done.code == (2 if kind == "images" else 65)
    assert "the model takes texts" in done.stderr


def test_a_network_that_reads_padding_is_warned_of(
    cli: Cli, run: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "padding" not in cli(*run, "--run-dir", tmp_path / "other.bnn").stderr
    pooled = lambda self, input_ids, attention_mask: self.embedding(input_ids)[:, -1]  # noqa: E731
    monkeypatch.setattr(MeanOfWords, "pooled", pooled)
    done = cli(*run, "--json")
    assert any("train: padding changes" in text for text in done.json["warnings"])


@pytest.mark.usefixtures("pictures_are_names")
def test_a_report_shows_the_least_certain_texts_as_texts(cli: Cli, run: list[object], tmp_path: Path) -> None:
    from problems.pages import read_page

    reviews = tmp_path / "reviews"
    for words in (run, ["fit-laplace", reviews, "--prior-precision", 1], ["predict", reviews], ["report", reviews]):
        done = cli(*words)
        assert done.code == 0, done.stderr
    section = read_page(tmp_path / "reviews.bnn" / "report.html").one("inputs")
    assert {quote.text for quote in section.all("q")} == set(TEXTS[:3])
    assert not section.all("img")
