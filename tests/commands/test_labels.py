"""Runs of several labels an example: splits, networks, and what every command makes of them."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.label_sets import NUM_LABELS, label_arrays
from problems.outputs import table_rows

import bnncli
from bnncli.artifacts.features import read_features
from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.fit_lbbnn import compute_guessing_likelihood
from bnncli.session.inputs import open_posterior

STEPS: tuple[tuple[object, ...], ...] = (
    ("fit-laplace", "--prior-precision", "2"),
    ("refine", "--epochs", 1, "--length", 2, "--elbo-draws", 32),
    ("hmc", "--chains", 8, "--warmup", 30, "--draws", 60),
    ("fit-temperature",),
    ("predict",),
    ("predict", "--posterior", "laplace", "--integrator", "quadrature", "--integrator", "bridge"),
    ("evaluate", "--bootstrap", 20),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that there is for several labels."""
    from bnncli.cli.execute import run_command_line

    folder = tmp_path_factory.mktemp("labels")
    np.savez(folder / "arrays.npz", **label_arrays(head_scale=1.5))
    run = folder / "run"
    first = ("extract-features", run, "--from-npz", folder / "arrays.npz", "--ood", "far")
    for command, *words in (first, *STEPS):
        argv = [command, *words] if command == "extract-features" else [command, run, *words]
        assert run_command_line([str(word) for word in argv], io.StringIO()) == 0, argv
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.with_name("run.bnn"), tmp_path / "run.bnn")
    shutil.copy(made.with_name("arrays.npz"), tmp_path)
    return tmp_path / "run"


def folder_of(run: Path) -> Path:
    return run.with_name("run.bnn")


def test_every_posterior_and_prediction_says_what_its_outputs_are(made: Path) -> None:
    folder = folder_of(made)
    paths = [*folder.glob("posteriors/*"), *folder.glob("predictions/*/*.h5"), *folder.glob("features/*.h5")]
    assert len(paths) >= 20
    for path in paths:
        assert read_header(path).meta["likelihood"] == "multilabel", path
    for path in folder.glob("posteriors/*"):
        assert open_posterior(path)[0].layout.likelihood.name == "multilabel"


def test_predictions_are_of_each_label_with_its_interval(made: Path) -> None:
    for group in ("laplace.mc", "laplace.quadrature", "laplace.bridge", "refine.mc", "hmc.mc"):
        content = read_predictions(folder_of(made) / f"predictions/{group}/test.h5")
        assert content.probs.shape == (120, NUM_LABELS)
        assert np.abs(np.asarray(content.probs).sum(axis=1) - 1).max() > 0.5
        assert content.interval is not None
        assert content.interval.shape == (120, NUM_LABELS, 2)
        inside = (content.interval[:, :, 0] <= content.probs) & (content.probs <= content.interval[:, :, 1])
        assert inside.mean() > 0.99
        assert content.labels is not None
        assert content.labels.shape == (120, NUM_LABELS)
    exact = np.asarray(read_predictions(folder_of(made) / "predictions/laplace.quadrature/test.h5").probs)
    for group, close in (("laplace.mc", 0.03), ("laplace.bridge", 0.1), ("hmc.mc", 0.08)):
        other = np.asarray(read_predictions(folder_of(made) / f"predictions/{group}/test.h5").probs)
        assert np.abs(other - exact).max() < close


def test_hmc_draws_have_the_moments_of_each_labels_own_posterior(made: Path) -> None:
    # A label by itself has four parameters more than features: a grid is out of reach, draws of its own chains are not.
    from bnncli.inference.hmc import sample_hmc
    from bnncli.inference.laplace import fit_gaussian
    from bnncli.parameters.layouts import HeadLayout
    from bnncli.parameters.prior import Prior
    from bnncli.targets.last_layer import LastLayerTarget

    arrays, layout = label_arrays(head_scale=1.5), HeadLayout(1, 5)
    whole = open_posterior(folder_of(made) / "posteriors/hmc.nc")[0]
    places = whole.layout.places(torch.device("cpu"))
    features = torch.from_numpy(arrays["features_train"])
    for k in range(NUM_LABELS):
        labels = torch.from_numpy(arrays["labels_train"][:, k].astype(np.int64))
        target = LastLayerTarget(features, labels, layout, Prior(2.0))
        gaussian = fit_gaussian(target, start=torch.zeros(6)).gaussian
        own = sample_hmc(
            target, mode=gaussian.mean, covariance=gaussian.covariance, num_chains=16, num_warmup=30, num_draws=100,
            generator=torch.Generator().manual_seed(k),
        ).draws.flatten(0, 1).double()  # fmt: skip
        drawn = whole.draws[:, :, places[k]].flatten(0, 1).double()
        # 480 draws against 1,600, of about as many effective ones.
        error = own.std(dim=0) * (1 / 200 + 1 / 800) ** 0.5
        assert bool(((drawn.mean(dim=0) - own.mean(dim=0)).abs() < 4 * error).all())
        ratio = drawn.std(dim=0) / own.std(dim=0)
        assert bool(((ratio > 0.8) & (ratio < 1.25)).all())


def test_the_temperature_is_where_the_nll_of_all_decisions_is_lowest(made: Path) -> None:
    from scipy.optimize import minimize_scalar
    from sklearn.metrics import log_loss

    arrays = label_arrays(head_scale=1.5)
    logits = arrays["features_val"] @ arrays["head_weight"].T + arrays["head_bias"]
    labels = arrays["labels_val"].ravel()
    best = minimize_scalar(
        lambda t: log_loss(labels, 1 / (1 + np.exp(-logits.ravel() / t))), bounds=(0.1, 10), method="bounded"
    )
    metrics = read_header(folder_of(made) / "posteriors/temperature.safetensors").meta["metrics"]
    assert metrics["temperature"] == pytest.approx(best.x, rel=1e-4)
    assert metrics["val_nll_after"]["value"] == pytest.approx(best.fun, rel=1e-6)


def metrics_of(row: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one for one in row["metrics"] if one.get("average") != "micro" or one["name"] == "ece"}


def test_a_table_has_columns_for_every_label(cli: Cli, run: Path) -> None:
    words = ("--posterior", "map", "--posterior", "hmc", "--split", "test", "--split", "far", "--table")
    for name in ("t.csv", "t.npz", "t.csv"):  # the last over the first: it is known as a table
        cli("predict", run, *words, run.with_name(name)).expect(0)
    rows = table_rows(run.with_name("t.csv"))
    content = read_predictions(folder_of(run) / "predictions/hmc.mc/test.h5")
    own = [row for row in rows if (row["split"], row["posterior"]) == ("test", "hmc")]
    assert content.interval is not None
    assert content.labels is not None
    both = {
        "p": content.probs,
        "low": content.interval[:, :, 0],
        "high": content.interval[:, :, 1],
        "label": content.labels,
    }
    for name, values in both.items():
        found = [[row[f"{name}_{one}"] for one in content.classes] for row in own]
        np.testing.assert_array_equal(np.array(found, np.float32), values)
    said = [";".join(np.array(content.classes)[row >= 0.5]) for row in np.asarray(content.probs)]
    assert [row["predicted"] for row in own] == said
    other = next(row for row in rows if (row["split"], row["posterior"]) == ("far", "map"))
    assert {other[f"{name}_0"] for name in ("low", "high", "label")} == {other["level"]} == {""}
    with np.load(run.with_name("t.npz"), allow_pickle=False) as table:
        is_own = (table["split"] == "test") & (table["posterior"] == "hmc")
        np.testing.assert_array_equal(table["probabilities"][is_own], content.probs)
        np.testing.assert_array_equal(table["predicted"][is_own], np.asarray(content.probs) >= 0.5)
        assert (table["label"][table["split"] == "far"] == -1).all()


def test_evaluate_scores_what_is_stored_as_scikit_learn_does(cli: Cli, run: Path) -> None:
    from sklearn import metrics

    done = cli("evaluate", run, "--per-class", "--curves", "--bootstrap", 20, "--json").expect(0)
    (row,) = [one for one in done.json["rows"] if (one["name"], one["split"]) == ("hmc.mc", "test")]
    content = read_predictions(folder_of(run) / "predictions/hmc.mc/test.h5")
    probs, labels, found = np.asarray(content.probs), content.labels, metrics_of(row)
    assert found["accuracy"]["value"] == pytest.approx(metrics.accuracy_score(labels, probs >= 0.5))
    assert found["nll"]["value"] == pytest.approx(
        metrics.log_loss(labels.ravel(), probs.ravel().astype(float)), rel=1e-5
    )
    assert found["class_auroc"]["value"] == pytest.approx(metrics.roc_auc_score(labels, probs))
    assert found["class_auroc"]["per_class"] == pytest.approx(metrics.roc_auc_score(labels, probs, average=None))
    assert (row["classes"], row["class_counts"]) == (content.classes, labels.sum(axis=0).tolist())
    table = cli("evaluate", run, "--bootstrap", 20, "--per-class", "--posterior", "hmc", "--split", "test").stdout
    titles, *lines = [line.split("|") for line in table.splitlines() if line.count("|") > 8][2:]
    cells = [dict(zip(map(str.strip, titles), map(str.strip, line), strict=True)) for line in lines]
    assert [one["label"] for one in cells] == content.classes
    assert [one["AUROC"] for one in cells] == [f"{value:.4f}" for value in found["class_auroc"]["per_class"]]
    assert [one["examples"] for one in cells] == [str(count) for count in labels.sum(axis=0)]
    assert found["auroc"]["ood"] == "far"
    far = read_predictions(folder_of(run) / "predictions/hmc.mc/far.h5").combined
    assert content.combined is not None
    assert far is not None
    expected = metrics.roc_auc_score(np.repeat([1, 0], [120, 40]), np.concatenate([content.combined, far]))
    assert found["auroc"]["value"] == pytest.approx(expected)
    assert row["likelihood"] == "multilabel"
    assert row["curves"]["risk_coverage"] is None
    assert sum(row["curves"]["reliability"]["count"]) == labels.size


def test_the_table_shows_what_matters_of_labels_and_says_what_it_is(cli: Cli, run: Path) -> None:
    done = cli("evaluate", run, "--bootstrap", 20)
    assert "Hamming loss" in done.stdout
    assert "class AUROC" in done.stdout
    assert "multilabel: accuracy needs every label right" in done.stdout
    cli("evaluate", run, "--bootstrap", 20, "--metric", "aurc").expect(
        65, "it does not support several labels per example"
    )
    asserted = ("--assert", "hamming_loss<=0.5", "--assert", "class_auroc:micro>=0.5")
    cli("evaluate", run, "--bootstrap", 20, *asserted).expect(0)


@pytest.mark.nightly
def test_figures_are_those_that_labels_have(cli: Cli, run: Path) -> None:
    cli("evaluate", run, "--bootstrap", 20, "--plot", run.with_name("figures")).expect(0)
    names = {path.stem for path in run.with_name("figures").iterdir()}
    assert names == {"reliability-test", "reliability-val", "roc-test-far", "roc-val-far"}


def test_rare_labels_are_named(cli: Cli, tmp_path: Path) -> None:
    arrays = label_arrays()
    arrays["labels_test"][:, 0] = 0
    np.savez(tmp_path / "a.npz", **arrays)
    for command, *words in (("extract-features", "--from-npz", tmp_path / "a.npz"), ("predict", "--split", "test")):
        cli(command, tmp_path / "a", *words).expect(0)
    done = cli("evaluate", tmp_path / "a", "--bootstrap", 0)
    assert "split test: no example has label 0: means over labels omit their undefined scores" in done.stderr


@pytest.mark.nightly
def test_diagnose_judges_posteriors_of_labels(cli: Cli, run: Path) -> None:
    done = cli("diagnose", run, "--json").expect(0)
    assert done.json["posteriors"]["hmc"]["val_nll"]["value"] == pytest.approx(0.45, abs=0.1)
    assert done.json["posteriors"]["laplace"]["is_good"]


def test_compare_pairs_scores_of_labels(cli: Cli, run: Path) -> None:
    words = ("--bootstrap", 100, "--metric", "nll", "--metric", "class_auroc", "--metric", "hamming_loss")
    assert len(cli("compare", run, *words, "--json").expect(0).json["rows"]) == 7


def test_files_of_labels_pass_a_full_check(cli: Cli, run: Path) -> None:
    folder = folder_of(run)
    files = [*folder.glob("features/*"), *folder.glob("predictions/*/*"), *folder.glob("posteriors/*")]
    cli("verify", *files).expect(0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--integrator", "bridge", "--top-k", "best"), "--top-k: the run is multilabel, so its classes are not"),
        (
            ("--table", "t.csv", "--merge", "a=0,1"),
            "--merge: the run is multilabel, so its classes are not mutually exclusive",
        ),
        (
            ("--integrator", "probit", "--projection", "difference"),
            "expected two classes, but the data are multi-label",
        ),
    ],
)
def test_options_for_classes_are_refused_for_labels(cli: Cli, run: Path, words: tuple[str, ...], message: str) -> None:
    cli("predict", run, "--posterior", "laplace", *words, "--split", "test").expect(2, message)


def test_python_gives_the_probabilities_and_intervals_of_every_label(run: Path) -> None:
    opened = bnncli.open(run)
    found = opened.predict(opened.split("test").features, posterior="hmc")
    stored = read_predictions(folder_of(run) / "predictions/hmc.mc/test.h5")
    np.testing.assert_allclose(found.probs, stored.probs)
    assert found.interval is not None
    np.testing.assert_allclose(found.interval, stored.interval)
    assert opened.split("test").labels.shape == (120, NUM_LABELS)


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
    done = cli(*words, "--json").expect(65)
    assert "(one-hot?)" in done.json["error"]["message"]
    assert (
        done.json["error"]["hint"] == "save labels.argmax(1); add --task multilabel if each column is a separate label"
    )
    cli(*words, "--task", "multilabel").expect(0)
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
    done = cli(*words).expect(65)
    assert "row 0 has 2 ones" in done.json["error"]["message"]
    assert f"omit --task {task}" in done.json["error"]["hint"]


@pytest.mark.parametrize(
    ("model", "checkpoint", "task", "message"),
    [
        ("make", "net", "binary", "--task binary: the head has 4 outputs, expected 1 or 2"),
        ("single", "one", "multiclass", "--task multiclass: the head has 1 output, expected at least 2"),
    ],
)
def test_head_of_wrong_size(cli: Cli, folder: Path, model: str, checkpoint: str, task: str, message: str) -> None:
    spec = save_split(folder / "d.npz", np.array([0, 1, 0, 1]))
    words = ("extract-features", f"{checkpoint}.pt", "--model", f"net.py:{model}", "--data", f"train={spec}")
    cli(*words, "--task", task).expect(2, message)
    cli(*words).expect(0)


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_a_label_that_is_not_known_is_refused_by_its_place(cli: Cli, folder: Path, value: float) -> None:
    labels = SEVERAL.astype(float)
    labels[2, 3] = value
    spec = save_split(folder / "d.npz", labels)
    done = cli("extract-features", "net.pt", "--model", "net.py:make", "--data", f"train={spec}", "--json").expect(65)
    assert f"row 2 has no value for label 3 ({value:g})" in done.json["error"]["message"]
    assert "remove the rows" in done.json["error"]["hint"]


def test_another_number_of_labels_than_outputs_is_refused(cli: Cli, folder: Path) -> None:
    spec = save_split(folder / "d.npz", SEVERAL[:, :3])
    cli("extract-features", "net.pt", "--model", "net.py:make", "--data", f"train={spec}").expect(
        65, "each example has 3 labels, but the head has 4 outputs"
    )
    arrays = label_arrays() | {"labels_test": SEVERAL[:, :3], "features_test": np.ones((4, 5), np.float32)}
    np.savez(folder / "a.npz", **arrays)
    cli("extract-features", "a", "--from-npz", "a.npz").expect(65, "splits have different numbers of labels")


def test_labels_of_a_dataset_of_ones_own_are_vectors(cli: Cli, folder: Path) -> None:
    words = ("extract-features", "net.pt", "--model", "net.py:make", "--data")
    cli(*words, "train=py:net.py:Rows").expect(0)
    content = read_features(folder / "net.pt.bnn/features/train.h5")
    np.testing.assert_array_equal(content.labels, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    assert content.classes == ["rain", "wind", "snow", "sun"]
    cli(*words, "test=py:net.py:OneHot").expect(65)
    cli(*words, "test=py:net.py:OneHot", "--task", "multilabel").expect(0)
    cli(*words, "val=py:net.py:Ragged").expect(65, "row 1 has 2 labels, but row 0 has 4 labels")


def test_a_later_split_without_labels_is_of_the_runs_kind_and_one_of_classes_is_refused(cli: Cli, folder: Path) -> None:
    several, classes = save_split(folder / "d.npz", SEVERAL), save_split(folder / "c.npz", np.arange(4))
    words = ("extract-features", "net.pt", "--model", "net.py:make")
    cli(*words, "--data", f"train={several}").expect(0)
    cli(*words, "--ood", f"far={classes}").expect(0)
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
    cli("extract-features", run, "--from-npz", tmp_path / "other.npz", "--force").expect(0)
    assert read_header(tmp_path / "run.bnn/posteriors/map.safetensors").meta["likelihood"] == "multilabel"


@pytest.mark.parametrize(
    "hidden", [(), pytest.param(("--hidden", "6"), marks=pytest.mark.nightly)], ids=["head", "hidden"]
)
def test_latent_binary_network_learns_several_labels(cli: Cli, tmp_path: Path, hidden: tuple[str, ...]) -> None:
    arrays = label_arrays(sharpness=2.0)
    run = new_run(cli, tmp_path / "run", arrays, "--ood", "far")
    cli("fit-lbbnn", run, *hidden, "--epochs", 40, "--learning-rate", 0.05).expect(0)
    posterior, header = open_posterior(tmp_path / "run.bnn/posteriors/lbbnn.safetensors")
    assert header.meta["likelihood"] == posterior.layout.likelihood.name == "multilabel"
    metrics = header.meta["metrics"]
    assert metrics["expected_log_likelihood"]["value"] > metrics["log_likelihood_of_shares"] + 30
    cli("predict", run, "--posterior", "lbbnn", "--split", "test").expect(0)
    content = read_predictions(tmp_path / "run.bnn/predictions/lbbnn.mc/test.h5")
    assert content.interval is not None
    assert content.interval.shape == (120, 4, 2)
    right = (np.asarray(content.probs) >= 0.5) == arrays["labels_test"]
    assert right.mean() > 0.75


def test_what_is_pruned_is_judged_by_whole_examples_and_all_decisions(cli: Cli, tmp_path: Path) -> None:
    from sklearn.metrics import accuracy_score, log_loss

    arrays = label_arrays()
    run = new_run(cli, tmp_path / "run", arrays)
    cli("fit-lbbnn", run, "--epochs", 10, "--learning-rate", 0.05).expect(0)
    cli("prune", run, "--split", "test").expect(0)
    path = tmp_path / "run.bnn/posteriors/lbbnn-sparse.safetensors"
    posterior, found = open_posterior(path)[0], read_header(path).meta["metrics"]["after"]
    logits = posterior.layout.logits(torch.from_numpy(arrays["features_test"]), posterior.theta.float()[None])[0]
    probs = torch.sigmoid(logits).double().numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(arrays["labels_test"], probs >= 0.5))
    assert found["nll"] == pytest.approx(log_loss(arrays["labels_test"].ravel(), probs.ravel()), rel=1e-5)
    cli("predict", run, "--posterior", "lbbnn", "--split", "test").expect(0)
    done = cli("evaluate", run, "--posterior", "lbbnn", "--bootstrap", 0, "--curves", "--json").expect(0)
    curve = done.json["rows"][0]["curves"]["density"]
    place = int(np.argmin(np.abs(np.array(curve["threshold"]) - 0.5)))
    assert curve["threshold"][place] == pytest.approx(0.5, abs=1e-3)
    assert curve["nll"][place] == pytest.approx(found["nll"], rel=1e-5)
    assert curve["accuracy"][place] == pytest.approx(found["accuracy"])


def test_the_shares_of_labels_are_those_of_independent_coins() -> None:
    labels = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.uint8)
    assert compute_guessing_likelihood(labels, 3) == pytest.approx(math.log(0.25) + 3 * math.log(0.75))


def test_labels_of_other_rows_are_refused(cli: Cli, folder: Path) -> None:
    np.savez(folder / "d.npz", x=np.ones((4, 5), np.float32), y=SEVERAL[:3])
    cli("extract-features", "net.pt", "--model", "net.py:make", "--data", "train=npz:d.npz").expect(
        65, "labels have shape (3, 4) for 4 rows"
    )


def test_labels_that_nobody_called_a_task_are_not_refused_as_one(cli: Cli, folder: Path) -> None:
    spec = save_split(folder / "d.npz", SEVERAL)
    done = cli("extract-features", "one.pt", "--model", "net.py:single", "--data", f"train={spec}").expect(
        65, "examples have several labels, but the head has 1 output, expected one per label, at least 2"
    )
    assert "--task" not in done.stderr
