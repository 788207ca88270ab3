"""Saved models: how they are opened, and those of several labels."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.hf_folders import TEXTS, text_folder
from problems.optional_libraries import library

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import find_invalid_field
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import UsageError
from bnncli.models import is_kind
from bnncli.models.libraries import library_attribute, require
from bnncli.session.run import ModelFiles, own_files

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("spec", ["mlp", "net.py:make", "package.module:make", "hf", "no-such-kind:x", ""])
def test_what_is_no_kind_of_model_stays_what_it_is(spec: str) -> None:
    assert not is_kind(spec)


def test_a_missing_library_is_one_line_with_what_installs_it() -> None:
    with pytest.raises(UsageError, match=r"^\0model\0 hf needs no_such_library, which is not installed$") as told:
        require("no_such_library.part", extra="hf")
    assert told.value.hint == "pip install 'bnncli[hf]'"
    with pytest.raises(UsageError, match=r"^\0model\0 sklearn needs no_such_library"):
        require("no_such_library", extra="sklearn-skops", kind="sklearn")


def test_a_library_that_fails_to_import_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halved_library.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"halved_library, which cannot be imported: RuntimeError: two lines$"):
        require("halved_library", extra="hf")


def test_the_digest_of_files_is_of_their_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    places = [tmp_path / "b.json", tmp_path / "sub/a.bin"]
    for place in places:
        place.write_text(place.name)
    files = ModelFiles.of(places)
    assert (files.folder, files.names) == (tmp_path, ("b.json", "sub/a.bin"))
    digests = {files.sha256(), files.sha256()}
    assert len(digests) == 1
    places[0].write_text("other.")  # of the same size
    digests.add(files.sha256())
    places[0].write_text("b.json")
    assert files.sha256() in digests
    places[0].rename(tmp_path / "c.json")
    digests.add(ModelFiles.of([tmp_path / "c.json", places[1]]).sha256())
    assert len(digests) == 3


def test_files_are_recorded_relative_to_the_run_folders_parent(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    files = ModelFiles.of([tmp_path / "model/config.json"])
    record = files.to_json(tmp_path / "reviews.bnn")
    assert record == {"path": "model", "files": ["config.json"]}
    assert ModelFiles.recorded(record, tmp_path / "reviews.bnn") == files
    assert ModelFiles.recorded({"path": "net.pt"}, tmp_path / "net.pt.bnn") is None
    forged = {**record, "file_sha256": "0", "weights_digest": "0", "files": "config.json"}
    provenance = {"params_hash": "", "params": {}, "algo_rev": 1, "command": [], "inputs": [], "checkpoint": forged}
    assert find_invalid_field("features", provenance, {}) == "checkpoint"
    provenance["checkpoint"] = {**forged, "files": ["config.json"]}
    assert find_invalid_field("features", provenance, {}) is None


@pytest.mark.parametrize("name", ["model.safetensors", "step/__0_0.distcp", "model-00001-of-00002.bin"])
def test_a_folder_of_other_weights_is_no_name_of_a_run(tmp_path: Path, name: str) -> None:
    own, other = tmp_path / "model/model.safetensors", tmp_path / "other" / name
    for place in (own, other):
        place.parent.mkdir(parents=True)
        place.touch()
    (tmp_path / "linked").symlink_to(own.parent)
    (tmp_path / "reviews").mkdir()
    saved: Any = SimpleNamespace(files=(own,))
    assert own_files(saved, other.parent) is None
    assert [own_files(saved, tmp_path / name) for name in ("model", "linked", "reviews", "absent")] == [
        ModelFiles.of([own])
    ] * 4


def test_a_library_whose_own_libraries_are_broken_is_one_line() -> None:
    """As transformers beside a torchvision for another torch: what it is asked for is imported late, and fails there."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            if name == "Absent":
                raise AttributeError(name)
            try:
                raise RuntimeError("operator torchvision::nms does not exist")
            except RuntimeError as error:
                raise ModuleNotFoundError(f"Could not import module {name!r}") from error

    assert library_attribute(Lazy("transformers"), "Absent", extra="hf") is None
    with pytest.raises(
        UsageError, match=r"^transformers cannot import Bert: RuntimeError: operator torchvision::nms"
    ) as found:
        library_attribute(Lazy("transformers"), "Bert", extra="hf")
    assert found.value.hint is not None
    assert "bnncli[hf]" in found.value.hint


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
