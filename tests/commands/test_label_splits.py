"""Splits of several labels and networks of labels."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.label_sets import NUM_LABELS, label_arrays

from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.fit_lbbnn import compute_guessing_likelihood
from bnncli.session.inputs import open_posterior

NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
def single():
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
class Rows(torch.utils.data.Dataset):
    classes = ["rain", "wind", "snow", "sun"]
    labels = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return torch.full((5,), float(i)), torch.tensor(self.labels[i])
class OneHot(Rows):
    labels = [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 1]]
class Ragged(Rows):
    labels = [[1, 1, 0, 0], [0, 1], [1, 0, 1, 1]]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network of four outputs and its code."""
    torch.manual_seed(0)
    for name, outputs in (("net", NUM_LABELS), ("one", 1)):
        shapes = {"0.weight": (6, 5), "0.bias": (6,), "2.weight": (outputs, 6), "2.bias": (outputs,)}
        torch.save({key: torch.randn(shape) for key, shape in shapes.items()}, tmp_path / f"{name}.pt")
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_split(path: Path, labels: np.ndarray) -> str:
    np.savez(path, x=np.random.default_rng(0).normal(size=(len(labels), 5)).astype(np.float32), y=labels)
    return f"npz:{path}"


SEVERAL = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]])
ONE_HOT = np.eye(4, dtype=np.int64)


@pytest.mark.parametrize("dtype", [np.int8, bool, np.float32])
def test_several_ones_a_row_are_several_labels(cli: Cli, tmp_path: Path, dtype: type) -> None:
    arrays = label_arrays()
    arrays = {name: array.astype(dtype) if name.startswith("labels") else array for name, array in arrays.items()}
    run = new_run(cli, tmp_path / "run", arrays, "--ood", "far")
    for split in ("train", "test"):
        content = read_features(tmp_path / f"run.bnn/features/{split}.h5", is_full_check=True)
        assert content.likelihood == "multilabel"
        assert content.labels is not None
        assert content.labels.dtype == np.uint8
        np.testing.assert_array_equal(content.labels, arrays[f"labels_{split}"])
        assert content.header is not None
        assert content.header.meta["class_counts"] == arrays[f"labels_{split}"].sum(axis=0).tolist()
    far = read_features(tmp_path / "run.bnn/features/far.h5")
    assert (far.labels, far.likelihood) == (None, "multilabel")
    assert read_header(tmp_path / "run.bnn/posteriors/map.safetensors").meta["likelihood"] == "multilabel"
    assert "up to date" in cli("extract-features", run, "--from-npz", f"{run}.npz", "--ood", "far").stderr


def test_a_small_split_without_several_ones_goes_with_the_others(cli: Cli, tmp_path: Path) -> None:
    arrays = label_arrays() | {"features_few": np.ones((4, 5), np.float32), "labels_few": ONE_HOT}
    new_run(cli, tmp_path / "run", arrays)
    assert read_features(tmp_path / "run.bnn/features/few.h5").likelihood == "multilabel"


def test_zeros_and_ones_that_may_be_classes_are_labels_only_where_that_is_said(cli: Cli, folder: Path) -> None:
    spec = save_split(folder / "d.npz", ONE_HOT)
    words = ("extract-features", "net.pt", "--model", "net.py:make", "--data", f"train={spec}")
    done = cli(*words, "--json")
    assert done.code == 65
    assert "(one-hot?)" in done.json["error"]["message"]
    assert (
        done.json["error"]["hint"] == "save labels.argmax(1); add --task multilabel if each column is a separate label"
    )
    assert cli(*words, "--task", "multilabel").code == 0
    assert read_features(folder / "net.pt.bnn/features/train.h5").likelihood == "multilabel"


@pytest.mark.parametrize("task", ["multiclass", "binary"])
def test_several_labels_are_refused_where_classes_were_said(cli: Cli, folder: Path, task: str) -> None:
    spec = save_split(folder / "d.npz", SEVERAL)
    words = (
        "extract-features",
        "net.pt",
        "--model",
        "net.py:make",
        "--data",
        f"train={spec}",
        "--task",
        task,
        "--json",
    )
    done = cli(*words)
    assert done.code == 65
    assert "row 0 has 2 ones" in done.json["error"]["message"]
    assert f"omit --task {task}" in done.json["error"]["hint"]


def test_one_class_an_example_is_refused_where_several_labels_were_said(cli: Cli, folder: Path) -> None:
    spec = save_split(folder / "d.npz", np.arange(4))
    words = ("extract-features", "net.pt", "--model", "net.py:make", "--data", f"train={spec}", "--task", "multilabel")
    done = cli(*words, "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "bad_labels")
    assert "zeros and ones of shape (N, L) with L at least 2; got shape (4,)" in done.json["error"]["message"]


@pytest.mark.parametrize(
    ("model", "checkpoint", "task", "message"),
    [
        ("make", "net", "binary", "--task binary: the head has 4 outputs, expected 1 or 2"),
        ("single", "one", "multiclass", "--task multiclass: the head has 1 output, expected at least 2"),
    ],
)
def test_a_head_that_cannot_be_for_the_task_is_refused(
    cli: Cli, folder: Path, model: str, checkpoint: str, task: str, message: str
) -> None:
    spec = save_split(folder / "d.npz", np.array([0, 1, 0, 1]))
    words = ("extract-features", f"{checkpoint}.pt", "--model", f"net.py:{model}", "--data", f"train={spec}")
    done = cli(*words, "--task", task)
    assert done.code == 2
    assert message in done.stderr
    assert cli(*words).code == 0


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_a_label_that_is_not_known_is_refused_by_its_place(cli: Cli, folder: Path, value: float) -> None:
    labels = SEVERAL.astype(float)
    labels[2, 3] = value
    spec = save_split(folder / "d.npz", labels)
    done = cli("extract-features", "net.pt", "--model", "net.py:make", "--data", f"train={spec}", "--json")
    assert done.code == 65
    assert f"row 2 has no value for label 3 ({value:g})" in done.json["error"]["message"]
    assert "remove the rows" in done.json["error"]["hint"]


def test_labels_that_nobody_called_a_task_are_not_refused_as_one(cli: Cli, folder: Path) -> None:
    spec = save_split(folder / "d.npz", SEVERAL)
    done = cli("extract-features", "one.pt", "--model", "net.py:single", "--data", f"train={spec}")
    assert done.code == 65
    assert "examples have several labels, but the head has 1 output, expected one per label, at least 2" in done.stderr
    assert "--task" not in done.stderr


def test_labels_of_other_rows_are_refused(cli: Cli, folder: Path) -> None:
    np.savez(folder / "d.npz", x=np.ones((4, 5), np.float32), y=SEVERAL[:3])
    done = cli("extract-features", "net.pt", "--model", "net.py:make", "--data", "train=npz:d.npz")
    assert done.code == 65
    assert "labels have shape (3, 4) for 4 rows" in done.stderr


def test_another_number_of_labels_than_outputs_is_refused(cli: Cli, folder: Path) -> None:
    spec = save_split(folder / "d.npz", SEVERAL[:, :3])
    done = cli("extract-features", "net.pt", "--model", "net.py:make", "--data", f"train={spec}")
    assert done.code == 65
    assert "each example has 3 labels, but the head has 4 outputs" in done.stderr
    arrays = label_arrays() | {"labels_test": SEVERAL[:, :3], "features_test": np.ones((4, 5), np.float32)}
    np.savez(folder / "a.npz", **arrays)
    done = cli("extract-features", "a", "--from-npz", "a.npz")
    assert done.code == 65
    assert "splits have different numbers of labels" in done.stderr


def test_labels_of_a_dataset_of_ones_own_are_vectors(cli: Cli, folder: Path) -> None:
    words = ("extract-features", "net.pt", "--model", "net.py:make", "--data")
    assert cli(*words, "train=py:net.py:Rows").code == 0
    content = read_features(folder / "net.pt.bnn/features/train.h5")
    np.testing.assert_array_equal(content.labels, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    assert content.classes == ["rain", "wind", "snow", "sun"]
    assert cli(*words, "test=py:net.py:OneHot").code == 65
    assert cli(*words, "test=py:net.py:OneHot", "--task", "multilabel").code == 0
    done = cli(*words, "val=py:net.py:Ragged")
    assert done.code == 65
    assert "row 1 has 2 labels, but row 0 has 4 labels" in done.stderr


def test_a_later_split_without_labels_is_of_the_runs_kind_and_one_of_classes_is_refused(cli: Cli, folder: Path) -> None:
    several, classes = save_split(folder / "d.npz", SEVERAL), save_split(folder / "c.npz", np.arange(4))
    words = ("extract-features", "net.pt", "--model", "net.py:make")
    assert cli(*words, "--data", f"train={several}").code == 0
    assert cli(*words, "--ood", f"far={classes}").code == 0
    assert read_features(folder / "net.pt.bnn/features/far.h5").likelihood == "multilabel"
    done = cli(*words, "--data", f"test={classes}", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "mixed_options")
    assert (
        "split 'far' of this run has several labels per example, but the new one has one class"
        in done.json["error"]["message"]
    )


def test_features_without_a_head_have_as_many_labels_as_the_matrix(cli: Cli, tmp_path: Path) -> None:
    arrays = {name: array for name, array in label_arrays().items() if not name.startswith("head")}
    new_run(cli, tmp_path / "run", arrays)
    content = read_features(tmp_path / "run.bnn/features/train.h5")
    assert content.classes == ["0", "1", "2", "3"]


def test_the_same_outputs_as_labels_are_another_network_as_trained(cli: Cli, tmp_path: Path) -> None:
    arrays = label_arrays()
    classes = {name: array.argmax(axis=1) for name, array in arrays.items() if name.startswith("labels")}
    run = new_run(cli, tmp_path / "run", arrays | classes)
    assert "likelihood" not in read_header(tmp_path / "run.bnn/posteriors/map.safetensors").meta
    np.savez(tmp_path / "other.npz", **arrays)
    assert cli("extract-features", run, "--from-npz", tmp_path / "other.npz", "--force").code == 0
    assert read_header(tmp_path / "run.bnn/posteriors/map.safetensors").meta["likelihood"] == "multilabel"


@pytest.mark.parametrize(
    "hidden", [(), pytest.param(("--hidden", "6"), marks=pytest.mark.nightly)], ids=["head", "hidden"]
)
def test_a_latent_binary_network_learns_labels_and_predicts_each(
    cli: Cli, tmp_path: Path, hidden: tuple[str, ...]
) -> None:
    arrays = label_arrays(sharpness=2.0)
    run = new_run(cli, tmp_path / "run", arrays, "--ood", "far")
    done = cli("fit-lbbnn", run, *hidden, "--epochs", 40, "--learning-rate", 0.05)
    assert done.code == 0, done.stderr
    posterior, header = open_posterior(tmp_path / "run.bnn/posteriors/lbbnn.safetensors")
    assert header.meta["likelihood"] == posterior.layout.likelihood.name == "multilabel"
    metrics = header.meta["metrics"]
    assert metrics["expected_log_likelihood"]["value"] > metrics["log_likelihood_of_shares"] + 30
    assert cli("predict", run, "--posterior", "lbbnn", "--split", "test").code == 0
    content = read_predictions(tmp_path / "run.bnn/predictions/lbbnn.mc/test.h5")
    assert content.interval is not None
    assert content.interval.shape == (120, 4, 2)
    right = (np.asarray(content.probs) >= 0.5) == arrays["labels_test"]
    assert right.mean() > 0.75


def test_what_is_pruned_is_judged_by_whole_examples_and_all_decisions(cli: Cli, tmp_path: Path) -> None:
    from sklearn.metrics import accuracy_score, log_loss

    arrays = label_arrays()
    run = new_run(cli, tmp_path / "run", arrays)
    assert cli("fit-lbbnn", run, "--epochs", 10, "--learning-rate", 0.05).code == 0
    assert cli("prune", run, "--split", "test").code == 0
    path = tmp_path / "run.bnn/posteriors/lbbnn-sparse.safetensors"
    posterior, found = open_posterior(path)[0], read_header(path).meta["metrics"]["after"]
    logits = posterior.layout.logits(torch.from_numpy(arrays["features_test"]), posterior.theta.float()[None])[0]
    probs = torch.sigmoid(logits).double().numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(arrays["labels_test"], probs >= 0.5))
    assert found["nll"] == pytest.approx(log_loss(arrays["labels_test"].ravel(), probs.ravel()), rel=1e-5)
    assert cli("predict", run, "--posterior", "lbbnn", "--split", "test").code == 0
    done = cli("evaluate", run, "--posterior", "lbbnn", "--bootstrap", 0, "--curves", "--json")
    assert done.code == 0, done.stdout
    curve = done.json["rows"][0]["curves"]["density"]
    place = int(np.argmin(np.abs(np.array(curve["threshold"]) - 0.5)))
    assert curve["threshold"][place] == pytest.approx(0.5, abs=1e-3)
    assert curve["nll"][place] == pytest.approx(found["nll"], rel=1e-5)
    assert curve["accuracy"][place] == pytest.approx(found["accuracy"])


def test_the_shares_of_labels_are_those_of_independent_coins() -> None:
    labels = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.uint8)
    assert compute_guessing_likelihood(labels, 3) == pytest.approx(math.log(0.25) + 3 * math.log(0.75))
