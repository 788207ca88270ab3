"""Runs of several labels an example: what every command makes of them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.label_sets import NUM_LABELS, label_arrays
from problems.outputs import table_rows

import bnncli
from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.session.inputs import open_posterior
from bnncli.session.score_tables import class_table

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
        assert cli("predict", run, *words, run.with_name(name)).code == 0
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

    done = cli("evaluate", run, "--per-class", "--curves", "--bootstrap", 20, "--json")
    assert done.code == 0, done.stderr
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
    done = cli("evaluate", run, "--bootstrap", 20, "--metric", "aurc")
    assert done.code == 65
    assert "it does not support several labels per example" in done.stderr
    asserted = ("--assert", "hamming_loss<=0.5", "--assert", "class_auroc:micro>=0.5")
    assert cli("evaluate", run, "--bootstrap", 20, *asserted).code == 0


def test_the_table_of_classes_that_exclude_each_other_has_their_recall() -> None:
    metrics = [{"name": "balanced_accuracy", "value": 0.7, "per_class": [0.5, None]}, {"name": "nll", "value": 1.0}]
    names = {
        "split": "test",
        "posterior": "map",
        "variant": "plug-in",
        "samples": None,
        "classes": ["a", "b"],
        "class_counts": [2, 0],
    }
    table = class_table([{**names, "metrics": metrics}])
    assert table is not None
    assert table.columns == ["split", "posterior", "integrator", "class", "examples", "recall"]
    assert [row[3:] for row in table.rows] == [["a", "2", "0.5000"], ["b", "0", "-"]]


@pytest.mark.nightly
def test_figures_are_those_that_labels_have(cli: Cli, run: Path) -> None:
    assert cli("evaluate", run, "--bootstrap", 20, "--plot", run.with_name("figures")).code == 0
    names = {path.stem for path in run.with_name("figures").iterdir()}
    assert names == {"reliability-test", "reliability-val", "roc-test-far", "roc-val-far"}


def test_rare_labels_are_named(cli: Cli, tmp_path: Path) -> None:
    arrays = label_arrays()
    arrays["labels_test"][:, 0] = 0
    np.savez(tmp_path / "a.npz", **arrays)
    for command, *words in (("extract-features", "--from-npz", tmp_path / "a.npz"), ("predict", "--split", "test")):
        assert cli(command, tmp_path / "a", *words).code == 0
    done = cli("evaluate", tmp_path / "a", "--bootstrap", 0)
    assert "split test: no example has label 0: means over labels omit their undefined scores" in done.stderr


@pytest.mark.nightly
def test_diagnose_judges_posteriors_of_labels(cli: Cli, run: Path) -> None:
    done = cli("diagnose", run, "--json")
    assert done.code == 0, done.stderr
    assert done.json["posteriors"]["hmc"]["val_nll"]["value"] == pytest.approx(0.45, abs=0.1)
    assert done.json["posteriors"]["laplace"]["is_good"]


def test_compare_pairs_scores_of_labels(cli: Cli, run: Path) -> None:
    words = ("--bootstrap", 100, "--metric", "nll", "--metric", "class_auroc", "--metric", "hamming_loss")
    done = cli("compare", run, *words, "--json")
    assert done.code == 0, done.stderr
    assert len(done.json["rows"]) == 7


def test_files_of_labels_pass_a_full_check(cli: Cli, run: Path) -> None:
    folder = folder_of(run)
    files = [*folder.glob("features/*"), *folder.glob("predictions/*/*"), *folder.glob("posteriors/*")]
    assert cli("verify", *files).code == 0


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
def test_what_means_nothing_for_labels_is_refused_in_one_line(
    cli: Cli, run: Path, words: tuple[str, ...], message: str
) -> None:
    done = cli("predict", run, "--posterior", "laplace", *words, "--split", "test")
    assert done.code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_python_gives_the_probabilities_and_intervals_of_every_label(run: Path) -> None:
    opened = bnncli.open(run)
    found = opened.predict(opened.split("test").features, posterior="hmc")
    stored = read_predictions(folder_of(run) / "predictions/hmc.mc/test.h5")
    np.testing.assert_allclose(found.probs, stored.probs)
    assert found.interval is not None
    np.testing.assert_allclose(found.interval, stored.interval)
    assert opened.split("test").labels.shape == (120, NUM_LABELS)


def test_metrics_files_are_strict_json(made: Path) -> None:
    for path in folder_of(made).glob("metrics/*.json"):
        json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
