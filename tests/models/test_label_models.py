"""Models of several labels an example: what the library itself says of each label is what the run predicts."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.hf_folders import TEXTS, text_folder
from problems.optional_libraries import library

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions

transformers = library("transformers")

SEVERAL = [[1, 1, 0], [0, 0, 0], [0, 1, 1], [1, 1, 1]]
ONE_OR_NONE = [[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
COLUMNS = ["better", "worse", "same"]  # in another order than the model's


def write_table(path: Path, rows: list[list[int]], columns: list[str] = COLUMNS) -> str:
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", *columns])
        writer.writerows([text, *row] for text, row in zip(TEXTS, rows, strict=True))
    return f"csv:{path}:text=text,label={'+'.join(columns)}"


def test_a_folder_of_several_labels_is_predicted_as_the_library_does(cli: Cli, tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "model", problem_type="multi_label_classification")
    test, run = write_table(tmp_path / "test.csv", ONE_OR_NONE), tmp_path / "run"
    done = cli("extract-features", run, "--model", f"hf:{folder}", "--data", f"test={test}")
    assert done.code == 0, done.stderr  # the model says that they are labels: no row has several
    (stored,) = tmp_path.glob("*.bnn")
    content = read_features(stored / "features/test.h5")
    assert (content.likelihood, content.classes) == ("multilabel", ["worse", "same", "better"])
    assert content.labels is not None
    assert cli("predict", run).code == 0
    probs = read_predictions(stored / "predictions/map.plug-in/test.h5").probs
    made = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(
        TEXTS, truncation=True, padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        expected = torch.sigmoid(made(**inputs).logits)
    np.testing.assert_allclose(probs, expected, atol=1e-5)


def test_columns_of_labels_are_matched_to_the_models_by_name_or_refused(cli: Cli, tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "model")
    run, words = tmp_path / "run", ("--model", f"hf:{folder}", "--data")
    done = cli("extract-features", run, *words, f"train={write_table(tmp_path / 'a.csv', SEVERAL)}")
    assert done.code == 0, done.stderr
    content = read_features(next(tmp_path.glob("*.bnn/features/train.h5")))
    assert content.likelihood == "multilabel"
    order = [COLUMNS.index(name) for name in content.classes]
    np.testing.assert_array_equal(content.labels, np.array(SEVERAL)[:, order])


def test_what_a_model_says_that_it_was_made_for_holds_until_a_task_is_said(cli: Cli, tmp_path: Path) -> None:
    several = text_folder(tmp_path / "several", problem_type="multi_label_classification")
    one = text_folder(tmp_path / "one", problem_type="single_label_classification")
    table = write_table(tmp_path / "a.csv", SEVERAL)
    column = f"csv:{tmp_path / 'a.csv'}:label=worse"
    done = cli("extract-features", tmp_path / "run", "--model", f"hf:{several}", "--data", f"train={column}", "--json")
    assert done.code == 65
    assert "one class, but the model was trained for several labels" in done.json["error"]["message"]
    assert "--task multiclass" in done.json["error"]["hint"]
    words = ("extract-features", tmp_path / "run", "--model", f"hf:{one}", "--data", f"train={table}")
    done = cli(*words, "--json")
    assert done.code == 65
    assert "several labels, but the model was trained for one class" in done.json["error"]["message"]
    assert cli(*words, "--task", "multilabel").code == 0
    done = cli(
        "extract-features", tmp_path / "bare", "--model", f"hf:{several}", "--data", f"test=csv:{tmp_path / 'a.csv'}"
    )
    assert done.code == 0
    assert (
        "test: no label columns were named, but some columns have the model's class names; to use them as labels, add label="
        in done.stderr
    )
    assert "worse+same+better" in done.stderr
    bare = f"test=csv:{tmp_path / 'a.csv'}:label="
    done = cli("extract-features", tmp_path / "bare", "--model", f"hf:{several}", "--data", bare, "--force")
    assert "no label columns were named" not in done.stderr


NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Sigmoid())
"""


def test_a_sigmoid_at_the_end_is_undone_where_its_outputs_are_labels(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    Path("net.py").write_text(NETWORK)
    weight, bias = torch.randn(4, 5), torch.randn(4)
    torch.save({"0.weight": weight, "0.bias": bias}, "net.pt")
    inputs = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    np.savez("d.npz", x=inputs, y=np.arange(24).reshape(6, 4) % 3 == 0)
    words = ("extract-features", "net.pt", "--model", "net.py:make")
    done = cli(*words, "--data", "test=npz:d.npz")
    assert done.code == 0, done.stderr
    assert cli("predict", "net.pt").code == 0
    stored = read_predictions(Path("net.pt.bnn/predictions/map.plug-in/test.h5"))
    expected = torch.sigmoid(torch.from_numpy(inputs) @ weight.T + bias)
    np.testing.assert_allclose(stored.probs, expected, atol=1e-5)
    assert read_header(Path("net.pt.bnn/posteriors/map.safetensors")).meta["likelihood"] == "multilabel"


def test_a_sigmoid_of_each_of_several_classes_is_refused_with_the_way_out(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    torch.save({"0.weight": torch.randn(4, 5), "0.bias": torch.randn(4)}, "net.pt")
    np.savez("d.npz", x=np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32), y=np.arange(6) % 4)
    done = cli("extract-features", "net.pt", "--model", "net.py:make", "--data", "test=npz:d.npz", "--json")
    assert done.code == 65
    assert "add --task multilabel if each output is a separate label" in done.json["error"]["hint"]
