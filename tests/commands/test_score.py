"""score against evaluate and against itself, and its figure."""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from problems.command_line import Cli
from problems.label_sets import label_arrays
from pyarrow import parquet

from bnncli.errors import WriteError
from bnncli.evaluation.calibration_maps import MAPS
from bnncli.figures import predictions as reliability
from bnncli.figures import render
from bnncli.session.calibration import read_map

QUICK = ("--bootstrap", "0")
CLASSES = ("cat", "dog", "elk")


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(scale=2, size=(60, 3))


@pytest.fixture
def probs(logits: np.ndarray) -> np.ndarray:
    return softmax(logits)


@pytest.fixture
def labels(probs: np.ndarray) -> np.ndarray:
    return (probs.cumsum(axis=1) > np.random.default_rng(1).random((60, 1))).argmax(axis=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probs: np.ndarray, labels: np.ndarray) -> Path:
    """The current folder, with p.npz."""
    monkeypatch.chdir(tmp_path)
    np.savez("p.npz", probs=probs, label=labels)
    return tmp_path


def write_csv(path: str, columns: dict[str, Any]) -> None:
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def values_of(cli: Cli, *words: object) -> dict[str, float | None]:
    """Every score by its name and choices."""
    (row,) = json.loads(cli("score", *words, *QUICK, "--json").expect(0).stdout)["rows"]
    return {
        json.dumps([m[key] for key in ("name", "strategy", "norm", "estimator", "score", "ood") if key in m]): m[
            "value"
        ]
        for m in row["metrics"]
    }


def same(one: dict[str, float | None], other: dict[str, float | None]) -> bool:
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one]
    return all(a is b is None or (a is not None and b is not None and abs(a - b) < 1e-12) for a, b in pairs)


@pytest.mark.parametrize("option", [(), ("--bootstrap", 30, "--seed", 3), ("--score", "all", "--bootstrap", 20)])
def test_score_equals_evaluate(cli: Cli, small_run: Path, option: tuple[object, ...]) -> None:
    if not option:
        option = QUICK
    done = cli("evaluate", small_run, "--posterior", "laplace", "--split", "test", "--force", "--json", *option)
    theirs = json.loads(done.stdout)["rows"][0]
    own = Path(f"{small_run}.bnn/predictions/laplace.mc")
    (ours,) = json.loads(cli("score", own / "test.h5", "--ood", own / "far.h5", "--json", *option).stdout)["rows"]
    expected = [metric for metric in theirs["metrics"] if "reference" not in metric]
    shown = [metric for metric in expected if metric.get("score") not in ("mahalanobis", "relative_mahalanobis", "knn")]
    assert ours["metrics"] == shown
    assert ours | {"metrics": 0} == {key: theirs[key] for key in ours} | {"metrics": 0}


def test_file_kinds_give_the_same_scores(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray) -> None:
    named = {f"p_{name}": [repr(value) for value in probs[:, k].tolist()] for k, name in enumerate(CLASSES)}
    write_csv("p.csv", {**named, "label": [CLASSES[k] for k in labels]})
    Path("p.csv.gz").write_bytes(gzip.compress(Path("p.csv").read_bytes()))
    np.save("p.npy", probs)
    np.save("y.npy", labels)
    write_csv("y.csv", {"target": labels})
    parquet.write_table(pyarrow.table({"probs": probs.tolist(), "y": labels}), "lists.parquet")
    columns = {f"prob_{name}": probs[:, k] for k, name in enumerate(CLASSES)}
    parquet.write_table(pyarrow.table({**columns, "y": [CLASSES[k] for k in labels]}), "columns.parquet")
    expected = values_of(cli, "p.npz")
    lines = (["p.csv"], ["p.csv.gz"], ["p.npy", "--labels", "y.npy"], ["p.npy", "--labels", "y.csv"],
             ["p.npy", "--labels", "p.npz"], ["lists.parquet"], ["columns.parquet"],
             ["p.csv:probs=p_cat+p_dog+p_elk,label=label"], ["p.csv:probs=p_*"], ["p.npz:probs,label"])  # fmt: skip
    for words in lines:
        assert same(values_of(cli, *words), expected), words


def test_columns_that_are_numbered_stand_in_the_order_of_their_numbers(cli: Cli, folder: Path) -> None:
    probs = softmax(np.random.default_rng(2).normal(size=(40, 12)))
    labels = np.random.default_rng(3).integers(12, size=40)
    np.savez("many.npz", probs=probs, y=labels)
    order = sorted(range(12), key=str)  # p_0, p_1, p_10, p_11, p_2
    write_csv("many.csv", {**{f"p_{k}": [repr(v) for v in probs[:, k].tolist()] for k in order}, "y": labels})
    assert same(values_of(cli, "many.csv"), values_of(cli, "many.npz"))
    found = values_of(cli, "many.csv", "--reference", "many.npz")
    assert found['["total_variation"]'] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("words", [(), ("--logits",)])
def test_logits_are_found_or_said(
    cli: Cli, folder: Path, logits: np.ndarray, labels: np.ndarray, words: tuple[str]
) -> None:
    np.savez("l.npz", **{"a" if words else "logits": logits}, y=labels)
    assert same(values_of(cli, "l.npz", *words), values_of(cli, "p.npz"))


def test_logits_bring_energies(cli: Cli, folder: Path, logits: np.ndarray, labels: np.ndarray) -> None:
    far = logits[:30] / 3
    np.savez("l.npz", logits=logits, y=labels)
    np.savez("far.npz", logits=far)
    found = values_of(cli, "l.npz", "--ood", "far.npz", "--score", "energy", "--score", "max_logit")
    for name, ours, theirs in (
        ("energy", np.log(np.exp(logits).sum(1)), np.log(np.exp(far).sum(1))),
        ("max_logit", logits.max(1), far.max(1)),
    ):
        pairs = (ours[:, None] > theirs).mean() + (ours[:, None] == theirs).mean() / 2
        assert found[json.dumps(["auroc", name, "far"])] == pytest.approx(pairs)


def test_one_column_is_class_1_of_two(cli: Cli, folder: Path) -> None:
    scores = np.random.default_rng(4).normal(size=50)
    labels = (scores + np.random.default_rng(5).normal(size=50) > 0).astype(int)
    one = 1 / (1 + np.exp(-scores))
    np.savez("two.npz", probs=np.stack([1 - one, one], axis=1), y=labels)
    np.savez("one.npz", probs=one, y=labels)
    np.savez("logit.npz", logit=scores[:, None], y_true=labels)
    write_csv("one.csv", {"prob": [repr(value) for value in one.tolist()], "y": labels})
    expected = values_of(cli, "two.npz")
    assert expected['["miscalibration"]'] is not None
    for file in ("one.npz", "logit.npz", "one.csv"):
        assert same(values_of(cli, file), expected), file


def test_several_labels_an_example(cli: Cli, folder: Path) -> None:
    generator = np.random.default_rng(6)
    logits = generator.normal(size=(50, 3))
    probs = 1 / (1 + np.exp(-logits))
    labels = (generator.random((50, 3)) < probs).astype(int)
    np.savez("several.npz", probs=probs, label=labels)
    np.savez("logits.npz", logits=logits, label=labels)
    columns = {f"p_{name}": [repr(v) for v in probs[:, k].tolist()] for k, name in enumerate(CLASSES)}
    write_csv("several.csv", {**columns, **{f"label_{name}": labels[:, k] for k, name in enumerate(CLASSES)}})
    found = values_of(cli, "several.npz")
    losses = -np.log(np.where(labels == 1, probs, 1 - probs))
    assert found['["nll"]'] == pytest.approx(losses.mean())
    assert found['["hamming_loss"]'] == pytest.approx(((probs >= 0.5) != labels).mean())
    assert same(values_of(cli, "logits.npz"), found)
    assert same(values_of(cli, "several.csv"), found)


def test_several_labels_as_evaluate_has_them(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", **label_arrays())
    name = tmp_path / "several"
    cli("extract-features", name, "--from-npz", tmp_path / "f.npz").expect(0)
    cli("predict", name, "--posterior", "map", "--split", "test").expect(0)
    (theirs,) = json.loads(cli("evaluate", name, *QUICK, "--json").stdout)["rows"]
    (ours,) = json.loads(cli("score", f"{name}.bnn/predictions/map.plug-in/test.h5", *QUICK, "--json").stdout)["rows"]
    assert ours["likelihood"] == theirs["likelihood"]
    assert ours["metrics"] == [metric for metric in theirs["metrics"] if "reference" not in metric]


def test_groups_have_the_scores_of_their_rows(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray) -> None:
    sites = np.where(np.arange(60) % 3 == 0, "north", "south")
    np.savez("g.npz", probs=probs, label=labels, site=sites)
    np.savez("north.npz", probs=probs[::3], label=labels[::3])
    done = cli("score", "g.npz", "--groups", "site", *QUICK, "--json")
    groups = {row["group"]: row for row in json.loads(done.stdout)["groups"]}
    (alone,) = json.loads(cli("score", "north.npz", *QUICK, "--json").stdout)["rows"]
    assert [row["num_examples"] for row in groups.values()] == [20, 40]
    ours, theirs = (
        {m["name"]: m["value"] for m in row["metrics"] if m["name"] != "ece"} for row in (groups["north"], alone)
    )
    assert ours == theirs
    write_csv("sites.csv", {"site": sites})
    text = cli("score", "g.npz", "--groups", "sites.csv:site", *QUICK).stdout
    assert [line.split("|")[1].strip() for line in text.splitlines() if "|" in line][3:] == ["north", "south"]


def test_assertions_of_all_rows_or_a_group(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray) -> None:
    np.savez("g.npz", probs=probs, label=labels, site=np.where(probs.argmax(1) == labels, "right", "wrong"))
    words = ("score", "g.npz", "--groups", "site", *QUICK, "--assert")
    cli(*words, "accuracy@right==1").expect(0)
    cli(*words, "accuracy<1").expect(0)
    cli(*words, "accuracy@wrong>=0.5").expect(3, "accuracy of g (none, wrong) is 0, expected accuracy@wrong>=0.5")
    cli(*words, "accuracy@middle>0").expect(66)


def test_scores_of_classes_and_chosen_metrics(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray) -> None:
    (row,) = json.loads(cli("score", "p.npz", *QUICK, "--per-class", "--json").stdout)["rows"]
    assert row["class_counts"] == np.bincount(labels).tolist()
    recall = next(metric["per_class"] for metric in row["metrics"] if metric["name"] == "balanced_accuracy")
    assert recall == pytest.approx([float((probs.argmax(1) == k)[labels == k].mean()) for k in range(3)])
    (row,) = json.loads(cli("score", "p.npz", "--metric", "nll", *QUICK, "--json").stdout)["rows"]
    assert [metric["name"] for metric in row["metrics"]] == ["nll"]
    assert "per_class" not in row["metrics"][0]


def test_a_part_of_many_rows_is_resampled_and_the_table_says_so(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.evaluation.bootstrap.MOST_RESAMPLED", 50)
    monkeypatch.setattr("bnncli.evaluation.bootstrap._FEWEST_RESAMPLED", 1)
    found = json.loads(cli("score", "p.npz", "--json").stdout)["rows"][0]["metrics"][0]["interval"]
    assert (found["resampled"], found["num_resampled"]) == ("part", 50)
    shown = " ".join(cli("score", "p.npz", "--intervals").stdout.split())
    assert "intervals resample a random part: test has 50 examples" in shown
    assert "random part" not in cli("score", "p.npz").stdout


def test_a_table_of_predict_is_scored_as_its_predictions_are(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    words = ("predict", small_run, "--posterior", "laplace", "--split", "test", "--probabilities", "--table")
    h5 = Path(f"{small_run}.bnn/predictions/laplace.mc/test.h5")
    expected = values_of(cli, h5, "--metric", "nll", "--metric", "mean_mutual_info")
    for name in ("t.csv", "t.npz"):
        cli(*words, tmp_path / name).expect(0)
        found = values_of(cli, tmp_path / name, "--metric", "nll", "--metric", "mean_mutual_info")
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-7)
    cli(*words[:4], "--probabilities", "--table", tmp_path / "all.csv").expect(0)
    cli("score", tmp_path / "all.csv").expect(65, "mixes predictions of 3 splits, posteriors or integrators")


def test_predictions_without_labels_are_told_once_where_scores_need_them(cli: Cli, folder: Path) -> None:
    np.save("alone.npy", np.load("p.npz")["probs"])
    done = cli("score", "alone.npy", *QUICK)
    assert (done.code, done.stderr.count("no labels found; add --labels FILE[:COLUMN]")) == (0, 1)
    assert "no labels" not in cli("score", "alone.npy", *QUICK, "--metric", "mean_entropy").stderr
    assert "no labels" not in cli("score", "p.npz", *QUICK).stderr
    cli("score", "alone.npy", *QUICK, "--metric", "nll").expect(65)


UNDEFINED = {
    "no reference": (("--metric", "agreement"), "(--reference)"),
    "no draws": (("--metric", "mmd2"), "it compares draws of weights"),
    "no split outside": (("--metric", "auroc"), "there is no out-of-distribution split"),
    "no logits": (("--ood", "far=far.npy", "--score", "energy", "--metric", "auroc"), "undefined on split 'test': "),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_a_score_that_was_asked_for_and_is_undefined_is_told_with_its_reason(cli: Cli, folder: Path, case: str) -> None:
    words, said = UNDEFINED[case]
    np.save("far.npy", np.load("p.npz")["probs"][::-1])
    cli("score", "p.npz", *QUICK, *words).expect(65, said)


def test_a_score_of_examples_beside_one_that_is_undefined_is_shown(cli: Cli, folder: Path) -> None:
    np.save("far.npy", np.load("p.npz")["probs"][::-1])
    both = ("--score", "energy", "--score", "max_prob")
    cli("score", "p.npz", *QUICK, "--ood", "far=far.npy", *both, "--metric", "auroc").expect(0)


def test_probabilities_that_are_taken_for_logits_are_warned_of(cli: Cli, folder: Path, logits: np.ndarray) -> None:
    np.savez("l.npz", logits=logits)
    said = "is read as logits, but its rows sum to 1"
    done = cli("score", "p.npz", "--logits", *QUICK)
    assert (done.code, done.stderr.count(f"'probs' {said}")) == (0, 1), done.stderr
    assert said in cli("score", "l.npz", "--ood", "far=p.npz", "--logits", *QUICK).stderr
    assert said not in cli("score", "l.npz", "--logits", *QUICK).stderr
    np.savez("called.npz", logits=np.load("p.npz")["probs"])
    assert said not in cli("score", "called.npz", "--logits", *QUICK).stderr


@pytest.mark.nightly
def test_probabilities_are_scored_without_torch(folder: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "bnncli", "score", "p.npz", *QUICK]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert not loaded & {"torch", "pyro", "sklearn", "pandas", "matplotlib"}


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_predicted_probability_is_not_that_of_class_1(cli: Cli, small_run: Path, tmp_path: Path, suffix: str) -> None:
    table = tmp_path / f"t.{suffix}"
    words = ("predict", small_run, "--posterior", "laplace", "--split", "test", "--table", table)
    cli(*words).expect(0)
    cli("score", table).expect(65, "predict --probabilities")


def test_a_column_of_ones_own_beside_predicted_classes_is_refused(cli: Cli, folder: Path) -> None:
    write_csv("own.csv", {"predicted": [0, 1, 1], "probability": [0.9, 0.8, 0.7], "label": [0, 1, 0]})
    cli("score", "own.csv").expect(65, "p_NAME")


def test_logits_that_contradict_probabilities_beside_them_are_refused(
    cli: Cli, folder: Path, logits: np.ndarray, probs: np.ndarray, labels: np.ndarray
) -> None:
    expected = values_of(cli, "p.npz")
    np.savez("both.npz", probs=probs, logits=logits.astype(np.float16), label=labels)
    assert same(values_of(cli, "both.npz"), expected)
    np.savez("both.npz", probs=probs, logits=-logits, label=labels)
    named = {f"{kind}_{k}": array[:, k] for kind, array in (("p", probs), ("logit", -logits)) for k in range(3)}
    write_csv("both.csv", {**named, "label": labels})
    apart = np.abs(softmax(-logits) - probs).max()
    for file, column in (("both.npz", "probs"), ("both.csv", "p_*")):
        cli("score", file).expect(65, f"differ by up to {apart:.3g}")
        assert same(values_of(cli, f"{file}:probs={column}"), expected)


def test_number_labels_need_ordered_columns(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray) -> None:
    two = probs[:, :2] / probs[:, :2].sum(axis=1, keepdims=True)
    numbers = np.minimum(labels, 1)
    np.savez("two.npz", probs=two, label=numbers)
    np.save("y.npy", numbers)
    expected = values_of(cli, "two.npz")
    write_csv("sorted.csv", {"p_neg": two[:, 0], "p_pos": two[:, 1], "label": numbers})
    write_csv("turned.csv", {"p_pos": two[:, 1], "p_neg": two[:, 0], "label": numbers})
    write_csv("alone.csv", {"p_pos": two[:, 1], "p_neg": two[:, 0]})
    write_csv("names.csv", {"p_pos": two[:, 1], "p_neg": two[:, 0], "label": np.array(["neg", "pos"])[numbers]})
    assert same(values_of(cli, "sorted.csv"), expected)
    assert same(values_of(cli, "names.csv", "--metric", "nll"), {'["nll"]': expected['["nll"]']})
    for words in (("turned.csv",), ("turned.csv:probs=p_*",), ("alone.csv", "--labels", "y.npy"), ("alone.csv", "--labels", "sorted.csv")):  # fmt: skip
        cli("score", *words).expect(65, "FILE:probs=p_pos+p_neg")
    assert same(values_of(cli, "turned.csv:probs=p_neg+p_pos"), expected)
    assert same(values_of(cli, "alone.csv:probs=p_neg+p_pos", "--labels", "y.npy"), expected)


def test_numbers_with_class_names_are_classes(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray) -> None:
    features = {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    said = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    columns = {f"p_{CLASSES[k]}": probs[:, k] for k in (2, 0, 1)}
    table = pyarrow.table({**columns, "label": labels}).replace_schema_metadata(said)
    parquet.write_table(table, "named.parquet")
    found, expected = (values_of(cli, file, "--metric", "nll") for file in ("named.parquet", "p.npz"))
    assert same(found, expected)


ROUNDED = {
    "float16": lambda probs: probs.astype(np.float16),
    "float16 of a table": lambda probs: probs.astype(np.float16).astype(np.float64),
    "bfloat16": lambda probs: (probs.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32),
    "2 decimals": lambda probs: probs.round(2),
    "3 decimals": lambda probs: probs.round(3).astype(np.float32),
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_rows_are_normalised(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray, kind: str) -> None:
    rounded = ROUNDED[kind](probs)
    np.savez("rounded.npz", probs=rounded, label=labels)
    np.savez("exact.npz", probs=rounded / rounded.sum(axis=1, keepdims=True, dtype=np.float64), label=labels)
    assert np.abs(rounded.sum(axis=1, dtype=np.float64) - 1).max() > 1e-4
    done = cli("score", "rounded.npz", *QUICK, "--json")
    assert "each row was divided by its sum" in done.json["warnings"][0], done.stderr
    found, expected = (
        values_of(cli, name, "--metric", "brier", "--metric", "nll") for name in ("rounded.npz", "exact.npz")
    )
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)


@pytest.mark.parametrize("kind", ROUNDED)
def test_missing_class_is_no_rounding(cli: Cli, folder: Path, probs: np.ndarray, labels: np.ndarray, kind: str) -> None:
    np.savez("cut.npz", probs=ROUNDED[kind](probs)[:, :2], label=np.minimum(labels, 1))
    assert "expected rows that sum to 1" in cli("score", "cut.npz", *QUICK).stderr


def test_decimal_commas_and_labels_that_are_all_minus_one_are_told(cli: Cli, folder: Path, probs: np.ndarray) -> None:
    lines = [";".join(f"{value:.6f}".replace(".", ",") for value in row) + ";0" for row in probs]
    Path("commas.csv").write_text("\n".join(["a;b;c;label", *lines]))
    done = cli("score", "commas.csv", *QUICK, "--json")
    assert (done.code, done.json["error"]["hint"]) == (65, f"use a decimal point: {probs[0, 0]:.6f}")
    Path("wide.csv").write_text("p_a,p_b,label\n0.5,0.5,0\n", encoding="utf-16")
    done = cli("score", "wide.csv", *QUICK, "--json")
    assert (done.code, "UTF-16" in done.json["error"]["message"]) == (65, True)
    np.savez("unknown.npz", probs=probs, label=np.full(len(probs), -1))
    assert "'label' has no label in any row" in cli("score", "unknown.npz", *QUICK, "--json").json["warnings"][0]


@pytest.fixture
def plot_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with predictions p.npz of three classes, of groups of 40, 30, ... 2 examples."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    probs = generator.dirichlet(np.ones(3), size=200)
    groups = np.repeat([f"g{k:02}" for k in range(14)], [40, 30, 30, 20, *[8] * 10])
    np.savez("p.npz", probs=probs, label=generator.integers(3, size=200), site=groups)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What is given to the figure."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    draw = reliability.draw_reliability

    def kept(panels: Any, **named: Any) -> Any:
        found.append((dict(panels), named))
        return draw(panels, **named) if len(found[0][0]) == 1 else Figure()

    monkeypatch.setattr("bnncli.commands.score.draw_reliability", kept)
    return found


def test_the_diagram_is_that_of_the_scores(cli: Cli, plot_folder: Path, drawn: Any) -> None:
    done = cli("score", "p.npz", "--plot", "r.png", "--bins", 10, *QUICK, "--json")
    (output,) = done.json["outputs"]
    assert (done.code, done.json["action"], output["role"], output["path"]) == (0, "computed", "score.plot", "r.png")
    ((panels, named),) = drawn
    ece = next(m for m in done.json["rows"][0]["metrics"] if (m["name"], m.get("strategy")) == ("ece", "equal-width"))
    assert named == {"split": "test", "errors": {"p": ece["value"]}}
    arrays = np.load("p.npz")
    confidence, is_right = arrays["probs"].max(axis=1), arrays["probs"].argmax(axis=1) == arrays["label"]
    place = np.clip(np.ceil(confidence * 10).astype(int) - 1, 0, 9)
    assert panels["p"]["count"] == [int((place == k).sum()) for k in range(10)]
    for k in np.unique(place):
        assert panels["p"]["accuracy"][k] == pytest.approx(is_right[place == k].mean())
        assert panels["p"]["confidence"][k] == pytest.approx(confidence[place == k].mean())
    with Image.open("r.png") as image:
        pixels = np.asarray(image.convert("L"))
    assert 0.005 < (pixels < 128).mean() < 0.5


def test_largest_groups_have_panels(cli: Cli, plot_folder: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.commands.score.render", lambda figure, form: b"")
    done = cli("score", "p.npz", "--groups", "site", "--metric", "nll", "--plot", "r.svg", *QUICK)
    ((panels, named),) = drawn
    assert list(panels) == list(named["errors"]) == ["test", *(f"g{k:02}" for k in range(11))]
    assert [sum(curve["count"]) for curve in panels.values()] == [200, 40, 30, 30, 20, *[8] * 7]
    assert "figure: r.svg (the 11 largest of 14 groups)" in done.stdout
    values = cli("score", "p.npz", "--groups", "site", *QUICK, "--json").json["groups"]
    own = {row["group"]: next(m["value"] for m in row["metrics"] if m["name"] == "ece") for row in values}
    assert {name: named["errors"][name] for name in own if name in panels} == {
        name: own[name] for name in list(own)[:11]
    }


def test_several_labels_an_example_have_the_diagram_of_all_decisions(cli: Cli, plot_folder: Path, drawn: Any) -> None:
    generator = np.random.default_rng(1)
    probs = generator.random((50, 3))
    np.savez("m.npz", probs=probs, label=(generator.random((50, 3)) < probs).astype(int))
    cli("score", "m.npz", "--task", "multilabel", "--plot", "r.png", *QUICK).expect(0)
    ((panels, _),) = drawn
    assert sum(panels["m"]["count"]) == 150


def test_group_named_as_the_file(cli: Cli, plot_folder: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.commands.score.render", lambda figure, form: b"")
    np.savez("p.npz", **{**np.load("p.npz"), "site": np.resize(["p", "q"], 200)})
    cli("score", "p.npz", "--groups", "site", "--plot", "r.svg", *QUICK).expect(0)
    assert [*drawn[0][0]] == ["test", "p", "q"]


@pytest.mark.long
def test_names_in_titles_may_be_anything(recwarn: pytest.WarningsRecorder) -> None:
    curve = {"edges": [0, 0.5, 1], "count": [0, 4], "confidence": [None, 0.75], "accuracy": [None, 0.5]}
    names = ["北京", "$\\frac{x$", "x" * 60, "a\tb"]
    figure = reliability.draw_reliability(dict.fromkeys(names, curve), split="test", errors=dict.fromkeys(names, 0.25))
    texts = set(re.findall("<!-- (.*?) -->", render(figure, "svg").decode(), re.DOTALL))
    assert {"$\\frac{x$", f"{'x' * 31}…", "a\\tb", "ECE 0.2500"} <= {
        line for text in texts for line in text.split("\n")
    }
    assert not [str(one.message) for one in recwarn if "Glyph" in str(one.message)]


REFUSED = {
    "an own file": (("--plot", "p.svg", "--force"), 2, "--plot p.svg is also an input (FILE p.svg)"),
    "a foreign file": (("--plot", "notes.png"), 73, "notes.png exists and is not a figure created by bnncli"),
    "another kind": (("--plot", "r.gif"), 2, "--plot: expected a file ending in .png, .svg, .pdf; got 'r.gif'"),
    "a folder": (("--plot", "d.png", "--force"), 73, "d.png is a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unwritable_plot_reads_nothing(cli: Cli, plot_folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, code, message = REFUSED[case]
    Path("p.npz").rename("p.svg")
    Path("notes.png").write_text("mine")
    Path("d.png").mkdir()
    monkeypatch.setattr("bnncli.commands.score.open_given", None)
    cli("score", "p.svg", *words, *QUICK).expect(code, message)
    assert Path("notes.png").read_text() == "mine"


def test_without_labels_there_is_nothing_to_draw(cli: Cli, plot_folder: Path) -> None:
    np.save("alone.npy", np.load("p.npz")["probs"])
    cli("score", "alone.npy", "--plot", "r.png", *QUICK).expect(
        65, "--plot: 'alone.npy' has no labels", "--labels FILE[:COLUMN]"
    )
    assert not Path("r.png").exists()


def test_a_figure_that_cannot_be_written_is_told(cli: Cli, plot_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> str:
        raise WriteError("no space left", hint="free some")

    monkeypatch.setattr("bnncli.commands.score.write_figure", full)
    cli("score", "p.npz", "--plot", "r.png", *QUICK).expect(int(WriteError.exit), "--plot: cannot write r.png")


def save_overconfident(path: Path, seed: int, *, size: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Write probabilities of logits that are too large, and labels; return both."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=3, size=(size, 3))
    chances = softmax(logits / 2 + np.array([-1, 0, 1])).cumsum(axis=1)
    labels = (generator.random((size, 1)) > chances).sum(axis=1).clip(max=2)
    np.savez(path, probs=softmax(logits), label=labels)
    return softmax(logits), labels


def test_a_map_is_fitted_to_predictions_scored_out_of_fold_and_applied_to_others(cli: Cli, tmp_path: Path) -> None:
    given = save_overconfident(tmp_path / "val.npz", 0)
    new = save_overconfident(tmp_path / "new.npz", 1)
    out = tmp_path / "map.safetensors"
    fitted = cli("score", tmp_path / "val.npz", "--fit-calibration", "isotonic", "--out", out, *QUICK, "--json").json
    assert fitted["outputs"][0]["path"] == str(out)
    nll = {m["name"]: m["value"] for m in fitted["rows"][0]["metrics"] if m["name"] == "nll"}["nll"]
    entry = next(one for one in fitted["calibration"]["maps"] if one["map"] == "isotonic")
    assert nll == pytest.approx(entry["nll"], rel=1e-6)
    assert (
        nll
        < fitted["calibration"]["before"]["nll"]
        == pytest.approx(-np.log(given[0][np.arange(300), given[1]]).mean(), rel=1e-4)
    )
    table = tmp_path / "calibrated.npz"
    done = cli("score", tmp_path / "new.npz", "--calibration", out, "--out", table, *QUICK, "--json").json
    with np.load(table) as arrays:
        probs = arrays["probabilities"]
    mapped = read_map(out)[0].probs(torch.from_numpy(np.log(new[0]))).numpy()
    np.testing.assert_allclose(probs, mapped, atol=1e-6)
    value = next(m["value"] for m in done["rows"][0]["metrics"] if m["name"] == "nll")
    assert value == pytest.approx(-np.log(mapped[np.arange(300), new[1]]).mean(), rel=1e-5)
    again = cli("score", table, *QUICK, "--json").json
    assert next(m["value"] for m in again["rows"][0]["metrics"] if m["name"] == "nll") == pytest.approx(value, rel=1e-5)
    cli("verify", out).expect(0)
    assert cli("inspect", out, "--json").code == 0


def test_the_best_map_of_predictions_is_chosen_and_the_same_content_has_the_same_digest(
    cli: Cli, tmp_path: Path
) -> None:
    save_overconfident(tmp_path / "val.npz", 0)
    words = ("score", tmp_path / "val.npz", "--fit-calibration", "auto", *QUICK, "--json", "--out")
    first, second = (cli(*words, tmp_path / f"{name}.safetensors").json for name in ("a", "b"))
    assert first["outputs"][0]["content_digest"] == second["outputs"][0]["content_digest"]
    tried = first["calibration"]["maps"]
    assert len(tried) == 8
    assert first["calibration"]["map"] == min(tried, key=lambda one: one["nll"])["map"] != "temperature"


def test_what_cannot_be_calibrated_is_refused(cli: Cli, tmp_path: Path) -> None:
    probs, labels = save_overconfident(tmp_path / "val.npz", 0)
    np.savez(tmp_path / "bare.npz", probs=probs)
    np.savez(tmp_path / "two.npz", probs=probs[:, :2] / probs[:, :2].sum(axis=1, keepdims=True), label=labels % 2)
    out = tmp_path / "map.safetensors"
    cli("score", tmp_path / "val.npz", "--fit-calibration", "platt", "--out", out, *QUICK).expect(0)

    def refused(*words: object) -> str:
        done = cli("score", *words, *QUICK, "--json")
        assert done.code in (2, 65, 73), done.stderr
        return str(done.json["error"]["message"])

    assert "no labels" in refused(tmp_path / "bare.npz", "--fit-calibration", "platt", "--out", out)
    assert "needs --out" in refused(tmp_path / "val.npz", "--fit-calibration", "platt")
    assert "needs --fit-calibration or --calibration" in refused(tmp_path / "val.npz", "--out", out)
    assert "ending in .csv, .npz" in refused(tmp_path / "val.npz", "--calibration", out, "--out", tmp_path / "a.txt")
    assert "was fitted to the classes 0, 1, 2" in refused(tmp_path / "two.npz", "--calibration", out)
    assert "is also an input" in refused(tmp_path / "val.npz", "--calibration", out, "--out", tmp_path / "val.npz")
    (tmp_path / "notes.safetensors").write_bytes(b"mine")
    told = refused(tmp_path / "val.npz", "--fit-calibration", "platt", "--out", tmp_path / "notes.safetensors")
    assert "is not a calibration map created by bnncli" in told
    content = bytearray(out.read_bytes())
    content[-3] ^= 1
    out.write_bytes(bytes(content))
    assert "does not match its digest" in refused(tmp_path / "val.npz", "--calibration", out)
    cli("score", tmp_path / "bare.npz", "--calibration", tmp_path / "gone.safetensors", *QUICK).expect(66)


def test_zeros_and_ones_are_calibrated(cli: Cli, tmp_path: Path) -> None:
    """As of a small forest."""
    generator = np.random.default_rng(0)
    probs = generator.integers(0, 5, size=200) / 4
    labels = (generator.random(200) < 0.1 + 0.8 * probs).astype(int)
    np.savez(tmp_path / "forest.npz", probs=np.stack([1 - probs, probs], axis=1), label=labels)
    for name in MAPS:
        out = tmp_path / f"{name}.safetensors"
        done = cli("score", tmp_path / "forest.npz", "--fit-calibration", name, "--out", out, *QUICK, "--json").json
        nll = next(m["value"] for m in done["rows"][0]["metrics"] if m["name"] == "nll")
        assert nll < min(0.69, done["calibration"]["before"]["nll"])
