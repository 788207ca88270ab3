"""Texts and pictures from Python go through the preprocessing that a run's model brings."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli
from problems.hf_folders import TEXTS, image_folder, pictures, text_folder

import bnncli
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import DataError, UsageError


def test_texts_are_predicted_as_the_command_predicts_them(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = text_folder(tmp_path / "model")
    with open("train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((text, index % 3) for index, text in enumerate(TEXTS))])
    assert cli("extract-features", "reviews", "--model", "hf:model", "--data", "train=csv:train.csv").code == 0
    assert cli("fit-laplace", "reviews", "--prior-precision", "1").code == 0
    assert cli("predict", "reviews", "--split", "train", "--posterior", "laplace", "--integrator", "probit").code == 0
    stored = read_predictions(Path("reviews.bnn/predictions/laplace.probit/train.h5")).probs
    run = bnncli.open("reviews", model="hf:model")
    for given in (TEXTS, tuple(TEXTS), np.array(TEXTS)):
        found = run.predict(given, integrator="probit")
        np.testing.assert_allclose(found.probs, stored, atol=1e-6)
    assert found.classes == ("worse", "same", "better")
    with pytest.raises(DataError, match=r"^x: expected features, or texts for the network 'hf:model'; got 3 images$"):
        run.predict(pictures())
    with pytest.raises(DataError, match="expected a list of texts; got a single item"):
        run.predict(TEXTS[0])
    unnamed = bnncli.open("reviews")  # nothing of the folder is code
    np.testing.assert_array_equal(unnamed.predict(TEXTS, integrator="probit").probs, found.probs)
    with pytest.raises(UsageError, match="were made by 'hf:model'; got 'mlp'"):
        bnncli.open("reviews", model="mlp").predict(TEXTS)
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(run.predict(TEXTS, integrator="probit").probs, found.probs)
    other = bnncli.open(tmp_path / "reviews", model=f"hf:{folder}")
    np.testing.assert_array_equal(other.predict(TEXTS, integrator="probit").probs, found.probs)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"model_max_length": 12', '"model_max_length": 11'))
    with pytest.raises(DataError, match="was created from a checkpoint other than"):
        run.predict(TEXTS, integrator="probit")


def test_pictures_are_predicted_as_the_command_predicts_them(tmp_path: Path, cli: Cli) -> None:
    folder, data = image_folder(tmp_path / "model"), tmp_path / "train"
    data.mkdir()
    for index, picture in enumerate(pictures()):
        picture.save(data / f"{index}.png")
    assert cli("extract-features", folder, "--model", f"hf:{folder}", "--data", f"train=images:{data}").code == 0
    run = bnncli.open(folder, model=f"hf:{folder}")
    stored = run.split("train").features
    np.testing.assert_allclose(run.features(pictures()), stored, atol=1e-6)
    arrays = np.stack([np.asarray(picture) for picture in [pictures()[0]] * 2])
    np.testing.assert_allclose(run.features(arrays), stored[[0, 0]], atol=1e-6)
    with pytest.raises(DataError, match=r"or images for the network .*; got 2 texts$"):
        run.features(["a", "b"])
