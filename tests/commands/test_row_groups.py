"""Runs and files whose rows are in groups: what is divided, resampled and said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_all
from problems.arrays import make_arrays
from problems.command_line import Cli

from bnncli.artifacts.features import read_features
from bnncli.artifacts.posteriors import read_decision, read_tensor
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.decisions import SetRule

SIZE = 8  # rows of each group


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose test, val and calib hold whole groups of rows that are all alike."""
    folder = tmp_path_factory.mktemp("groups")
    arrays: dict[str, Any] = make_arrays()
    centers, generator = arrays["head_weight"] / 2, np.random.default_rng(1)
    labels = generator.integers(3, size=150)
    rows = np.repeat(centers[labels] + generator.normal(size=(150, 5)), SIZE, axis=0)
    arrays["features_test"], arrays["labels_test"] = rows.astype(np.float32), np.repeat(labels, SIZE)
    arrays["groups_test"] = np.repeat([f"text {group}" for group in range(150)], SIZE)
    arrays = {name: array for name, array in arrays.items() if not name.endswith("_val")}
    np.savez(folder / "arrays.npz", **arrays)
    name = folder / "small"
    extract = ("extract-features", name, "--from-npz", folder / "arrays.npz", "--ood", "far")
    run_all(
        (*extract, "--hold-out", "val=test:304", "--hold-out", "calib=test:496"),
        ("fit-laplace", name, "--fit-on", "train+val", "--prior-precision", 10),
        ("predict", name, "--posterior", "laplace", "--samples", 50, "--split", "test", "--split", "calib"),
        ("predict", name, "--posterior", "map", "--split", "test", "--split", "far", "--split", "calib"),
    )
    return name


@pytest.fixture
def run(made: Path, tmp_path: Path, scores_are_rough: None) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(made.with_name("small.bnn"), tmp_path / "small.bnn")
    shutil.copy(made.with_name("arrays.npz"), tmp_path)
    return tmp_path / "small"


def test_splits_and_folds_hold_whole_groups(made: Path) -> None:
    folder = made.with_name("small.bnn")
    splits = {name: read_features(folder / "features" / f"{name}.h5") for name in ("test", "val", "calib", "train")}
    assert splits["train"].groups is None
    groups = {name: np.asarray(one.groups) for name, one in splits.items() if one.groups is not None}
    assert (
        len({*np.concatenate(list(groups.values())).tolist()})
        == 150
        == sum(len({*g.tolist()}) for g in groups.values())
    )
    assert {name: len(g) for name, g in groups.items()} == {"test": 1200 - 304 - 496, "val": 304, "calib": 496}
    folds = np.asarray(read_tensor(folder / "posteriors" / "laplace.safetensors", "folds.rows"))
    of_fold = [{*groups["val"][folds == fold].tolist()} for fold in range(5)]
    assert sum(map(len, of_fold)) == 304 // SIZE
    assert np.ptp(np.bincount(folds)) <= SIZE
    predicted = read_predictions(folder / "predictions" / "laplace.mc" / "test.h5")
    assert predicted.groups is not None
    np.testing.assert_array_equal(predicted.groups, groups["test"])


def test_extract_features_says_how_many_groups(cli: Cli, tmp_path: Path, made: Path) -> None:
    words = ("extract-features", tmp_path / "new", "--from-npz", made.with_name("arrays.npz"), "--ood", "far")
    shown = cli(*words, "--hold-out", "val=test:304").expect(0).stderr
    assert "val: 304 examples in 38 groups, 5 features" in shown
    assert (
        "train: 240 examples, 5 features" in shown
        or "examples in" not in shown.partition("train: ")[2].partition("\n")[0]
    )


def test_evaluate_and_compare_resample_groups_and_say_so(cli: Cli, run: Path) -> None:
    shown = cli("evaluate", run, "--intervals").expect(0).stdout
    assert "intervals resample whole groups: test has 50" in shown
    rows = cli("evaluate", run, "--bootstrap", 1000, "--force", "--json").expect(0).json["rows"]
    (row,) = (row for row in rows if row["posterior"] == "map" and row["split"] == "test")
    own = {metric["name"]: metric for metric in reversed(row["metrics"])}
    assert own["nll"]["interval"].items() >= {"resampled": "groups", "num_groups": 50}.items()
    assert own["auroc"]["interval"].items() >= {"resampled": "groups", "num_groups": [50, None]}.items()
    # the rows of a group are all alike, so groups are worth as much as their number of independent rows
    right = own["accuracy"]["value"]
    assert own["accuracy"]["standard_error"] == pytest.approx(np.sqrt(right * (1 - right) / 50), rel=0.1)
    assert own["ece"]["interval"]["resampled"] == "groups"
    assert own["mce"]["floor_undefined"] == "not computed for rows in groups, which are dependent"
    found = cli("compare", run, "--json").expect(0).json
    assert (found["resampled"], found["num_groups"]) == ("groups", 50)
    assert found["test"] == "paired bootstrap over groups, symmetric"
    assert "over 50 groups of 400 examples" in cli("compare", run).expect(0).stdout


def test_footer_counts_the_groups_of_the_split_not_of_outliers(cli: Cli, tmp_path: Path, made: Path) -> None:
    with np.load(made.with_name("arrays.npz")) as stored:
        arrays = dict(stored)
    arrays["groups_far"] = np.repeat([f"far {group}" for group in range(len(arrays["features_far"]))], 1)
    np.savez(tmp_path / "arrays.npz", **arrays)
    name = tmp_path / "new"
    extract = ("extract-features", name, "--from-npz", tmp_path / "arrays.npz", "--ood", "far")
    run_all(extract, ("predict", name, "--posterior", "map"))
    assert "intervals resample whole groups: test has 150\n" in cli("evaluate", name, "--intervals").expect(0).stdout
    assert "resample" not in cli("evaluate", name).expect(0).stdout


def test_score_takes_the_groups_of_a_column(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    labels = np.repeat(generator.integers(2, size=40), SIZE)
    lines = [f"text{row // SIZE},0.4,0.6,{label}" for row, label in enumerate(labels)]
    Path("p.csv").write_text("\n".join(["who,p_0,p_1,label", *lines]))
    plain, grouped = (
        cli("score", place, "--json").expect(0).json["rows"][0]["metrics"][0] for place in ("p.csv", "p.csv:group=who")
    )
    assert plain["value"] == grouped["value"]
    assert "resampled" not in plain["interval"]
    assert grouped["interval"]["num_groups"] == 40
    assert grouped["standard_error"] == pytest.approx(plain["standard_error"] * np.sqrt(SIZE), rel=0.15)
    Path("one.csv").write_text("\n".join(["who,p_0,p_1,label", *(f"text,{line.partition(',')[2]}" for line in lines)]))
    shown = cli("score", "one.csv:group=who", "--intervals").expect(0).stdout
    assert "no intervals for test: its rows are a single group or example" in shown
    refused = cli("score", "p.csv:group=whom").expect(65, "has no column 'whom'")
    assert json.dumps(refused.stderr).count("Traceback") == 0


def test_a_table_of_predictions_has_their_groups(cli: Cli, run: Path) -> None:
    table = run.with_name("table.csv")
    words = ("predict", run, "--posterior", "laplace", "--split", "test", "--samples", 50)
    cli(*words, "--table", table, "--probabilities").expect(0)
    own = Path(f"{run}.bnn/predictions/laplace.mc/test.h5")
    rows = [
        json.loads(cli("score", place, "--json").expect(0).stdout)["rows"][0]["metrics"]
        for place in (own, f"{table}:group=group")
    ]
    own, other = ([one["interval"]["num_groups"] for one in some if one["name"] == "accuracy"] for some in rows)
    assert own == other
    assert own[0] > 1


def test_names_of_groups_are_compared_between_splits_of_other_files(cli: Cli, tmp_path: Path, made: Path) -> None:
    with np.load(made.with_name("arrays.npz")) as stored:
        arrays = dict(stored)
    arrays["features_val"], arrays["labels_val"] = arrays["features_test"][:80] + 1, arrays["labels_test"][:80]
    words = ("extract-features", tmp_path / "new", "--from-npz", tmp_path / "new.npz", "--ood", "far", "--force")
    arrays["groups_val"] = np.repeat([f"text {group}" for group in range(145, 155)], SIZE)
    np.savez(tmp_path / "new.npz", **arrays)
    assert "splits 'test' and 'val' share 5 groups" in cli(*words).expect(0).stderr
    arrays["groups_val"], arrays["groups_test"] = (
        np.arange(len(arrays[f"groups_{s}"])) // SIZE for s in ("val", "test")
    )
    np.savez(tmp_path / "new.npz", **arrays)
    assert "groups: scores" not in cli(*words).expect(0).stderr  # numbers are those of one source only


RULES = ("--sets", "lac", "--coverage", 0.8, "--false-alarm", 0.1, "--recall", 0.7, "--class", 1, "--risk", 0.4)


def test_rules_are_calibrated_by_group(cli: Cli, run: Path) -> None:
    done = cli("calibrate", run, "--posterior", "laplace", *RULES).expect(0)
    assert "of at least 80% of examples, for a random example of a new group, on average" in done.stderr
    assert "496 examples in 62 groups" in done.stderr
    folder = run.with_name("small.bnn")
    content = read_predictions(folder / "predictions" / "laplace.mc" / "calib.h5")
    assert content.labels is not None
    scores = 1 - content.probs[np.arange(496), content.labels].astype(np.float64)
    rule = read_decision(folder / "decisions" / "laplace.mc" / "sets.safetensors").rule
    assert isinstance(rule, SetRule)
    # all rows of a group are alike: ceil(63 * 0.8) of 62 groups
    assert rule.thresholds.tolist() == [np.sort(scores)[SIZE * 51 - 1]]
    rows = cli("evaluate", run, "--posterior", "laplace", "--json").expect(0).json["rows"]
    (row,) = (row for row in rows if row["split"] == "test")
    own = {metric["name"]: metric for metric in row["metrics"]}
    assert own["set_coverage"]["interval"]["num_groups"] == 50
    cli("calibrate", run, "--posterior", "laplace", "--risk", 0.15, "--force").expect(3, "or calibrate on more groups")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calibrate", "--shift-level", 0.05), "has rows in groups, but --shift-level needs independent rows"),
        (("calibrate", "--sets", "lac", "--shifted-to", "test"), "but --shifted-to needs independent rows"),
        (
            ("calibrate", "--sets", "lac", "--coverage", 0.99),
            "has 62 groups to calibrate on; a coverage of 0.99, by group",
        ),
        (
            ("calibrate", "--sets", "raps", "--class-conditional", "--coverage", 0.98),
            "at least 49 groups of at least two",
        ),
        (("monitor",), "has rows in groups, but the bets need independent rows"),
    ],
)
def test_what_needs_independent_rows_or_more_groups_is_refused(
    cli: Cli, run: Path, words: tuple[Any, ...], message: str
) -> None:
    command, *more = words
    cli(command, run, "--posterior", "laplace", *more).expect(65, message)


def test_maps_and_stacks_are_judged_on_whole_groups(cli: Cli, run: Path) -> None:
    cli("fit-calibration", run, "--map", "vector").expect(0)
    cli("fit-laplace", run, "--name", "plain", "--prior-precision", 10).expect(0)
    cli("stack", run).expect(0)
