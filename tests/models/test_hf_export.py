"""Exported classifiers of the library transformers: several inputs by name, for batches and texts of any length."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.hf_folders import TEXTS, audio_folder, decoder_folder, image_folder, pictures, text_folder
from problems.optional_libraries import library
from problems.sounds import write_clips

from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions

pytestmark = pytest.mark.libraries

transformers = library("transformers")

EXPORT = ("export", "run", "--posterior", "laplace", "--integrator", "probit")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(cli: Cli, data: str) -> np.ndarray:
    """Probabilities that predict gives for the training data."""
    for line in (
        ("extract-features", "run", "--model", f"hf:{Path('model').absolute()}", "--data", f"train={data}"),
        ("fit-laplace", "run", "--prior-precision", 1),
        ("predict", "run", "--posterior", "laplace", "--integrator", "probit", "--split", "train"),
    ):
        done = cli(*line)
        assert done.code == 0, done.stderr
    return np.asarray(read_predictions(Path("run.bnn/predictions/laplace.probit/train.h5")).probs)


def write_texts() -> str:
    with open("train.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *((text, row % 3) for row, text in enumerate(TEXTS))])
    return "csv:train.csv"


def run_onnx(inputs: dict[str, np.ndarray]) -> np.ndarray:
    session = library("onnxruntime").InferenceSession("run.bnn/exports/laplace.probit.onnx")
    probs: np.ndarray = session.run(["probs"], inputs)[0]
    return probs


def run_program(inputs: dict[str, np.ndarray]) -> np.ndarray:
    program = torch.export.load("run.bnn/exports/laplace.probit.pt2").module()
    return program(**{name: torch.from_numpy(array) for name, array in inputs.items()})["probs"].numpy()


RUNS = {"onnx": run_onnx, "pt2": run_program}
TEXT_FOLDERS: dict[str, Any] = {
    "encoder": lambda: text_folder(Path("model")),
    "decoder": lambda: decoder_folder(Path("model"), has_padding=True),
}


@pytest.mark.long
@pytest.mark.parametrize("form", RUNS)
@pytest.mark.parametrize("kind", TEXT_FOLDERS)
def test_a_text_classifier_takes_what_its_tokenizer_gives(cli: Cli, kind: str, form: str) -> None:
    if form == "onnx":
        library("onnxscript")
    TEXT_FOLDERS[kind]()
    expected = fit(cli, write_texts())
    done = cli(*EXPORT, "--format", form)
    assert done.code == 0, done.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    for rows in (slice(0, 4), slice(0, 1), slice(1, 3)):  # of other numbers and lengths than any before
        given = tokenizer(TEXTS[rows], padding=True, truncation=True, max_length=12, return_tensors="np")
        found = RUNS[form]({name: np.asarray(array, np.int64) for name, array in given.items()})
        np.testing.assert_allclose(found, expected[rows], atol=1e-5)
    inputs = read_header(Path(f"run.bnn/exports/laplace.probit.{form}")).meta["inputs"]
    assert {one["name"] for one in inputs} == {*given}
    assert all(one["shape"] == ["batch", "sequence"] and one["type"] == "int64" for one in inputs)
    assert "input_ids (batch, sequence) int64" in done.stderr


@pytest.mark.long
def test_an_image_classifier_takes_pixel_values(cli: Cli) -> None:
    image_folder(Path("model"))
    for name, picture in zip(("better", "same", "worse"), pictures(), strict=True):
        (Path("train") / name).mkdir(parents=True)
        picture.save(f"train/{name}/0.png")
    expected = fit(cli, "images:train")
    done = cli(*EXPORT, "--format", "pt2")
    assert done.code == 0, done.stderr
    pixels = transformers.AutoImageProcessor.from_pretrained("model")(images=pictures(), return_tensors="np")
    np.testing.assert_allclose(run_program({"pixel_values": pixels["pixel_values"]}), expected, atol=1e-5)
    assert "pixel_values (batch, 3, 8, 8) float32" in done.stderr


def write_sounds() -> str:
    audio_folder(Path("model"))
    return f"audio:{write_clips(Path('train'))}"


def write_decoder() -> str:
    decoder_folder(Path("model"), has_padding=False)
    return write_texts()


@pytest.mark.parametrize("write", [write_sounds, write_decoder])
def test_what_sees_no_padding_is_refused_before_the_work(
    cli: Cli, write: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(cli, write())
    monkeypatch.setattr("bnncli.session.predictor.Predictor.ready", lambda *words: pytest.fail("work was begun"))
    done = cli(*EXPORT, "--format", "pt2")
    assert done.code == 65, done.stderr
    assert "the network processes each example without its padding, which an exported file cannot" in done.stderr
    assert "--head-only" in done.stderr
