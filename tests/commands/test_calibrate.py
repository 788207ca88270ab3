"""calibrate: rules with guarantees from predictions of a split that chose nothing; who uses them, and what is refused."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import run_all
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run
from problems.label_sets import label_arrays

from bnncli.artifacts.files import read_header, read_metrics, write_metrics
from bnncli.artifacts.posteriors import read_decision
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.decisions import SetRule, ShiftRule

ALL = ("--sets", "lac", "--coverage", 0.8, "--risk", 0.2, "--false-alarm", 0.1, "--shift-level", 0.05)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a split `calib` of 200 rows that nothing has used, and predictions of laplace."""
    folder = tmp_path_factory.mktemp("calibrate")
    arrays = make_arrays()
    centers, generator = arrays["head_weight"] / 2, np.random.default_rng(1)
    labels = generator.integers(3, size=400)
    arrays["features_test"] = (centers[labels] + generator.normal(size=(400, 5))).astype(np.float32)
    arrays["labels_test"] = labels
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]
    name = folder / "small"
    extract = ("extract-features", name, "--from-npz", folder / "arrays.npz", "--ood", "far")
    run_all(
        (*extract, "--hold-out", "calib=test:200"),
        ("fit-laplace", name, "--prior-precision", 10),
        ("predict", name, "--posterior", "laplace", "--samples", 50),
    )
    return name


@pytest.fixture
def run(made: Path, tmp_path: Path, scores_are_rough: None) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(made.with_name("small.bnn"), tmp_path / "small.bnn")
    shutil.copy(made.with_name("arrays.npz"), tmp_path)
    return tmp_path / "small"


def file_of(run: Path, rule: str, maker: str = "laplace.mc") -> Path:
    return run.with_name(f"{run.name}.bnn") / "decisions" / maker / f"{rule}.safetensors"


def test_the_threshold_is_that_of_the_predictions_by_hand(cli: Cli, run: Path) -> None:
    cli("calibrate", run, *ALL).expect(0)
    content = read_predictions(run.with_name("small.bnn") / "predictions" / "laplace.mc" / "calib.h5")
    assert content.labels is not None
    scores = np.sort(1 - content.probs[np.arange(200), content.labels].astype(np.float64))
    rule = read_decision(file_of(run, "sets")).rule
    assert isinstance(rule, SetRule)
    assert rule.thresholds.tolist() == [scores[161 - 1]]  # ceil(201 * 0.8)
    shift = read_decision(file_of(run, "shift")).rule
    assert isinstance(shift, ShiftRule)
    assert content.combined is not None
    assert shift.scores.tolist() == np.sort(content.combined.astype(np.float64)).tolist()


def test_a_split_that_was_used_is_refused_with_the_reason(cli: Cli, run: Path) -> None:
    refused = cli("calibrate", run, "--split", "val", "--sets", "lac", "--json").expect(65)
    assert refused.json["error"]["code"] == "split_was_used"
    assert "the posterior 'laplace' was fitted or chosen with this split" in refused.json["error"]["message"]
    cli("predict", run, "--posterior", "laplace", "--samples", 50, "--split", "train").expect(0)
    assert "the network was trained on it" in cli("calibrate", run, "--split", "train", "--sets", "lac").stderr
    assert "--split calib" in refused.stderr


def test_val_cannot_calibrate_a_score_that_its_ranks_make(cli: Cli, run: Path) -> None:
    words = ("calibrate", run, "--posterior", "map", "--split", "val")
    cli("predict", run, "--posterior", "map").expect(0)
    for rule in (("--false-alarm", 0.2), ("--shift-level", 0.1)):
        refused = cli(*words, *rule, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (65, "split_was_used")
        cli(*words, *rule, "--score", "max_prob").expect(0)
    cli(*words, "--sets", "lac").expect(0)


@pytest.mark.parametrize("posterior", ["refine", "hmc", "temperature"])
def test_what_goes_back_to_a_split_at_any_remove_is_refused(cli: Cli, small_run: Path, posterior: str) -> None:
    cli("fit-temperature", small_run).expect(0)
    cli("predict", small_run, "--posterior", posterior, "--split", "val", "--split", "test").expect(0)
    cli("calibrate", small_run, "--posterior", posterior, "--split", "val", "--false-alarm", 0.1).expect(
        65, "was fitted or chosen with this split"
    )
    cli("calibrate", small_run, "--posterior", posterior, "--split", "test", "--false-alarm", 0.1).expect(0)


def test_a_dry_run_writes_nothing_and_a_file_may_be_named(cli: Cli, run: Path) -> None:
    done = cli("calibrate", run, "--sets", "lac", "--dry-run")
    assert (done.code, "compute" in done.stdout) == (0, True)
    assert not file_of(run, "sets").exists()
    out = run.with_name("own.safetensors")
    cli("calibrate", run, "--sets", "lac", "--out", out).expect(0)
    cli("verify", out).expect(0)


def test_nonempty_sets_have_a_class_each(cli: Cli, run: Path) -> None:
    for name, words in {"plain": (), "filled": ("--nonempty",)}.items():
        cli("calibrate", run, "--sets", "lac", "--coverage", 0.6, "--name", name, *words).expect(0)
    done = cli("evaluate", run, "--posterior", "laplace", "--bootstrap", 0, "--json")
    (row,) = [row for row in done.json["rows"] if row["split"] == "test"]
    empty = {m["rule"]: m["value"] for m in row["metrics"] if m["name"] == "empty_sets"}
    covered = {m["rule"]: m["value"] for m in row["metrics"] if m["name"] == "set_coverage"}
    assert empty["plain"] > 0 == empty["filled"]
    assert covered["filled"] >= covered["plain"]


@pytest.mark.parametrize("place", range(0, 1400, 350))
def test_a_damaged_rule_is_told_and_never_a_bug(cli: Cli, run: Path, place: int) -> None:
    cli("calibrate", run, "--shift-level", 0.1).expect(0)
    path = file_of(run, "shift")
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 4
    path.write_bytes(content)
    cli("verify", path).expect(65)
    predict = (
        "predict",
        run,
        "--posterior",
        "laplace",
        "--samples",
        50,
        "--split",
        "test",
        "--table",
        run.with_name("t.csv"),
    )
    done = cli(*predict)
    assert done.code == 65 or (done.code == 0 and "skipping rule shift" in done.stderr)
    assert cli("evaluate", run, "--posterior", "laplace", "--bootstrap", 0).code in (0, 65)


def test_of_several_labels_an_example_there_are_outliers_and_shift(cli: Cli, tmp_path: Path) -> None:
    run = new_run(
        cli, tmp_path / "labels", label_arrays(), "--ood", "far", "--hold-out", "calib=test:60", "--task", "multilabel"
    )
    cli("fit-laplace", run, "--prior-precision", 2).expect(0)
    cli("predict", run, "--samples", 20, "--posterior", "laplace").expect(0)
    for words in (("--sets", "lac"), ("--risk", 0.3)):
        assert "this run is multilabel" in cli("calibrate", run, *words).stderr
    cli("calibrate", run, "--false-alarm", 0.1, "--shift-level", 0.1, "--score", "entropy").expect(0)
    table = ("--table", run.with_name("t.csv"))
    done = cli("predict", run, "--samples", 20, "--posterior", "laplace", *table, "--json")
    assert {row["kind"] for row in done.json["decisions"]} == {"ood", "shift"}
    cli("evaluate", run, "--bootstrap", 0, "--posterior", "laplace", "--metric", "false_alarm_rate").expect(0)


def test_a_split_by_which_auto_chose_is_refused_for_what_it_chose(cli: Cli, run: Path) -> None:
    """The network itself goes back to no val split; once auto has recommended it by that, it does."""
    cli("predict", run, "--posterior", "map").expect(0)
    asked = ("calibrate", run, "--posterior", "map", "--split", "val", "--sets", "lac")
    cli(*asked).expect(0)
    cli("auto", run).expect(0)
    path = run.with_name("small.bnn") / "recommended.json"
    header = read_metrics(path)
    rows = [{**row, "is_recommended": row.get("posterior") == "map"} for row in header.meta["rows"]]
    write_metrics(path, rows=rows, predictions=[], provenance=header.provenance, may_replace=True)
    cli(*asked).expect(65, "auto used it to recommend map.plug-in")
    done = cli("calibrate", run, "--sets", "lac", "--json")
    assert [Path(one["path"]) for one in done.json["outputs"]] == [file_of(run, "sets", "map.plug-in")]


def test_rows_that_are_shared_with_training_are_refused(cli: Cli, run: Path, tmp_path: Path) -> None:
    """A split of another name, with rows of the validation split."""
    with np.load(tmp_path / "arrays.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "train.npz", x=arrays["features_train"], y=arrays["labels_train"])
    data = [f"--data={name}=npz:{tmp_path / 'train.npz'}" for name in ("train", "calib")]
    other = run.with_name("flat")
    cli("extract-features", other, "--model", "flatten", *data).expect(0)
    cli("fit-laplace", other, "--prior-precision", 10).expect(0)
    cli("predict", other).expect(0)
    cli("calibrate", other, "--sets", "lac").expect(65, "splits 'train' and 'calib' share 240 rows", "--hold-out")


def test_a_split_that_is_not_there_is_told_how_to_make(cli: Cli, run: Path) -> None:
    cli("extract-features", run, "--from-npz", run.with_name("arrays.npz"), "--ood", "far", "--force").expect(0)
    run.with_name("small.bnn").joinpath("features", "calib.h5").unlink()
    cli("calibrate", run, "--sets", "lac").expect(66, "--hold-out calib=test:200 --force, and predict again")
    assert cli("calibrate", run, "--split", "far", "--sets", "lac", "--allow-stale").code in (65, 66)


def test_too_few_examples_are_told_with_the_least_number(cli: Cli, run: Path) -> None:
    cli("calibrate", run, "--sets", "lac", "--coverage", 0.996).expect(
        65, "has 200 examples to calibrate on; a coverage of 0.996 needs at least 249"
    )
    refused = cli("calibrate", run, "--sets", "lac", "--coverage", 0.99, "--class-conditional")
    assert "coverage 0.99 for each class needs at least 99 examples of at least two classes" in refused.stderr
    assert "a false-alarm rate of 0.001 needs at least 999" in cli("calibrate", run, "--false-alarm", 0.001).stderr
    assert "a risk of 0.01 needs at least 554" in cli("calibrate", run, "--risk", 0.01).stderr


def test_a_risk_that_cannot_be_shown_accepts_nothing_and_exits_3(cli: Cli, run: Path) -> None:
    for _ in range(2):  # fitted, and up to date
        done = cli("calibrate", run, "--risk", 0.03, "--confidence", 0.9, "--json")
        assert (done.code, done.json["error"]["code"]) == (3, "no_threshold")
    cli("evaluate", run, "--posterior", "laplace", "--bootstrap", 0).expect(0)
    table = run.with_name("t.npz")
    cli("predict", run, "--posterior", "laplace", "--samples", 50, "--split", "test", "--table", table).expect(0)
    with np.load(table) as columns:
        assert not columns["accept"].any()


def unlike_train(
    cli: Cli, made: Path, folder: Path, labels: np.ndarray, scale: float = 1, **others: np.ndarray
) -> Path:
    """A run with other labels in the split that is divided, its predictions, and other splits; `scale` multiplies its logits."""
    with np.load(made.with_name("arrays.npz")) as file:
        arrays = dict(file)
    generator, centers = np.random.default_rng(3), arrays["head_weight"] / 2
    arrays["features_test"] = (centers[labels] + generator.normal(size=(len(labels), 5))).astype(np.float32)
    arrays |= {
        "labels_test": labels,
        "head_weight": scale * arrays["head_weight"],
        "head_bias": scale * arrays["head_bias"],
    }
    arrays |= {f"features_{name}": features for name, features in others.items()}
    words = [word for name in ("far", *others) for word in ("--ood", name)]
    run = new_run(cli, folder / "unlike", arrays, *words, "--hold-out", "calib=test:200")
    cli("predict", run).expect(0)
    return run


def test_rare_classes_share_a_threshold_and_are_named(cli: Cli, made: Path, tmp_path: Path) -> None:
    labels = np.random.default_rng(2).choice(3, size=400, p=[0.9, 0.06, 0.04])
    run = unlike_train(cli, made, tmp_path, labels)
    for _ in range(2):  # fitted, and up to date
        done = cli("calibrate", run, "--sets", "lac", "--class-conditional", "--coverage", 0.94, "--json").expect(0)
        assert any("1, 2 share one threshold" in text for text in done.json["warnings"]), done.json["warnings"]
    first, second, third = done.json["rules"][0]["thresholds"]
    assert second == third != first
    cli("calibrate", run, "--sets", "lac", "--class-conditional", "--coverage", 0.995, "--name", "fine").expect(
        65, "at least 199 examples of at least two"
    )


def test_a_class_that_the_split_lacks_is_named(cli: Cli, made: Path, tmp_path: Path) -> None:
    run = unlike_train(cli, made, tmp_path, np.arange(400) % 2)
    assert "has no examples of 2, which train has" in cli("calibrate", run, "--sets", "aps").expect(0).stderr


def test_sets_that_saturated_probabilities_fill_are_told(cli: Cli, made: Path, tmp_path: Path) -> None:
    run = unlike_train(cli, made, tmp_path, np.random.default_rng(4).integers(3, size=400), scale=1000)
    done = cli("calibrate", run, "--sets", "lac", "--coverage", 0.98).expect(0)
    assert "every set contains every class" in done.stderr
    assert "have exactly the threshold's score, which saturated probabilities cause" in done.stderr
    assert "every set" not in cli("calibrate", run, "--sets", "lac", "--coverage", 0.5, "--force").expect(0).stderr


@pytest.mark.long
def test_sets_for_a_split_to_which_the_inputs_have_shifted(cli: Cli, made: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    labels, shares = generator.integers(3, size=400), np.array([0.7, 0.2, 0.1])
    with np.load(made.with_name("arrays.npz")) as file:
        centers = file["head_weight"] / 2
    near = centers[generator.choice(3, size=300, p=shares)] + generator.normal(size=(300, 5))
    run = unlike_train(cli, made, tmp_path, labels, near=near.astype(np.float32), few=near[:9].astype(np.float32))
    asked = ("calibrate", run, "--sets", "lac", "--coverage", 0.8)
    cli(*asked, "--name", "plain").expect(0)
    done = cli(*asked, "--shifted-to", "near", "--json").expect(0)
    (rule,) = done.json["rules"]
    assert 50 < rule["effective_size"] < 200
    assert rule["thresholds"] != read_decision(file_of(run, "plain", "map.plug-in")).rule.thresholds.tolist()  # type: ignore[union-attr]
    assert "if the density ratio of the features is right: effective sample size" in done.stderr
    assert cli(*asked, "--shifted-to", "near", "--json").json["action"] == "up_to_date"
    found = read_header(file_of(run, "sets", "map.plug-in"))
    assert [one["role"] for one in found.inputs] == ["predictions.calib", "features.calib", "features.near"]
    table = ("--table", run.with_name("t.npz"))
    cli("predict", run, "--split", "near", *table).expect(0)  # one threshold, so the table needs no features
    cli(*asked, "--shifted-to", "far", "--name", "far").expect(65, "is worth", "effective sample size")
    cli(*asked, "--shifted-to", "few", "--name", "few").expect(65, "split 'few' has 9 examples; --shifted-to needs")
    cli(*asked, "--shifted-to", "none", "--name", "none").expect(66, "has no features of split 'none'")


def test_precision_and_recall_of_a_class_are_in_the_table_and_the_scores(cli: Cli, run: Path) -> None:
    asked = ("calibrate", run, "--class", "2")
    cli(*asked, "--precision", 0.7, "--recall", 0.8, "--confidence", 0.9).expect(0, "flag examples with a probability")
    cli(*asked, "--recall", 0.9, "--name", "wide").expect(0)
    table = run.with_name("t.npz")
    predict = ("predict", run, "--posterior", "laplace", "--samples", 50, "--split", "test", "--table", table)
    done = cli(*predict, "--json").expect(0)
    scored = cli("evaluate", run, "--posterior", "laplace", "--bootstrap", 0, "--json").json["rows"]
    (row,) = [one for one in scored if one["split"] == "test"]
    content = read_predictions(run.with_name("small.bnn") / "predictions" / "laplace.mc" / "test.h5")
    assert content.labels is not None
    is_positive = content.labels == 2
    with np.load(table) as columns:
        flags = {name: columns[f"{name}_flag"] == 1 for name in ("precision", "recall", "wide_recall")}
    for (name, flagged), result in zip(flags.items(), done.json["decisions"], strict=True):
        rule = name.removesuffix("_recall")
        values = {m["name"]: m["value"] for m in row["metrics"] if m.get("rule") == rule and m["class"] == "2"}
        assert result["flagged"] == values["flagged"] == pytest.approx(flagged.mean())
        assert values["flag_precision"] == pytest.approx(is_positive[flagged].mean())
        assert values["flag_recall"] == pytest.approx(flagged[is_positive].mean())
    assert flags["recall"].sum() < flags["wide_recall"].sum()


def test_decisions_of_least_cost_are_in_the_table_and_judged(cli: Cli, run: Path) -> None:
    matrix = {"2": (4, 4, 0, 0.5), "0": (0, 1, 1, 0.5), "1": (1, 0, 1, 0.5)}
    file, names = run.with_name("costs.csv"), ("0", "1", "2", "=later")
    lines = [("true", *names), *((name, *costs) for name, costs in matrix.items())]
    file.write_text("\n".join(",".join(map(str, line)) for line in lines))
    cli("calibrate", run, "--sets", "lac", "--coverage", 0.8).expect(0)
    for action in ("computed", "up_to_date"):
        done = cli("calibrate", run, "--costs", file, "--json").expect(0)
        assert done.json["action"] == action
    (told,) = done.json["rules"]
    table = run.with_name("t.csv")
    predict = ("predict", run, "--posterior", "laplace", "--samples", 50, "--split", "test")
    (shares,) = [
        one["decided"] for one in cli(*predict, "--table", table, "--json").json["decisions"] if one["kind"] == "costs"
    ]
    scored = cli("evaluate", run, "--posterior", "laplace", "--bootstrap", 0, "--json").json["rows"]
    folder = run.with_name("small.bnn") / "predictions" / "laplace.mc"
    costs = np.array([matrix[name] for name in ("0", "1", "2")])
    for split in ("calib", "test"):
        content = read_predictions(folder / f"{split}.h5")
        probs, labels = np.asarray(content.probs, dtype=np.float64), content.labels
        assert labels is not None
        decided = (probs[:, :, None] * costs).sum(axis=1).argmin(axis=1)
        mean, plain = costs[labels, decided].mean(), costs[labels, probs.argmax(axis=1)].mean()
        if split == "calib":
            best = costs[labels].mean(axis=0)
            assert (told["cost"], told["argmax"]["cost"]) == (pytest.approx(mean), pytest.approx(plain))
            assert told["constant"]["decision"] == names[best.argmin()]
            assert told["constant"]["saving"] == pytest.approx(best.min() - mean)
            assert told["cost_interval"][0] < mean < told["cost_interval"][1]
            continue
        (row,) = [one for one in scored if one["split"] == "test"]
        values = {m["name"]: m["value"] for m in row["metrics"] if m.get("rule") == "costs"}
        assert (values["decision_cost"], values["argmax_cost"]) == (pytest.approx(mean), pytest.approx(plain))
        with open(table, newline="") as stream:
            found = [one["decision"] for one in csv.DictReader(stream)]
        assert found == [f"'{names[k]}" if k == 3 else names[k] for k in decided]
        assert shares == {name: pytest.approx((decided == k).mean()) for k, name in enumerate(names)}
    cli(*predict, "--table", table.with_suffix(".npz")).expect(0)
    with np.load(table.with_suffix(".npz")) as columns:
        assert columns["decision"].tolist() == [names[k] for k in decided]
    cli(*predict, "--split", "calib", "--table", table).expect(0)  # to which the rule does not apply
    with open(table, newline="") as stream:
        assert {one["decision"] for one in csv.DictReader(stream) if one["split"] == "calib"} == {""}
    file.write_text(file.read_text().replace("0.5", "0.4"))
    cli("calibrate", run, "--costs", file).expect(73, "already exists with other options")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a first line with different names"),
        ("true,a,a\n0,1,2", "expected a first line with different names"),
        ("true,a,b\n0,1,2\n1,1,2", "has no line for 2"),
        ("true,a,b\n0,1,2\n7,1,2", "line 3 is for '7', which is no class of the run (classes: 0, 1, 2)"),
        ("true,a,b\n0,1,2\n0,1,2", "line 3 is for '0', twice"),
        ("true,a,b\n0,1", "line 2: expected 2 costs of at most 1e+100; got 1"),
        ("true,a,b\n0,1,nan", "line 2: expected 2 costs of at most 1e+100; got 1, nan"),
        ("true,a,b\n0,-1e308,1e308", "line 2: expected 2 costs of at most 1e+100; got -1e308, 1e308"),
        ("true,a,b\n0,1,x", "line 2: could not convert string to float: 'x'"),
    ],
)
def test_costs_that_are_no_matrix_for_the_classes_are_refused(cli: Cli, run: Path, text: str, message: str) -> None:
    file = run.with_name("costs.csv")
    file.write_text(text)
    cli("calibrate", run, "--costs", file).expect(65, message)
    file.unlink()
    cli("calibrate", run, "--costs", file).expect(66, "no such file")


def test_the_class_of_two_is_the_second_and_a_precision_that_cannot_be_shown_exits_3(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    cli("calibrate", run, "--recall", 0.8).expect(2, "--class: expected one of the 3 classes")
    cli("calibrate", run, "--recall", 0.8, "--class", "four").expect(2, "--class four: no class 'four'")
    cli("calibrate", run, "--recall", 0.98, "--class", "1").expect(65, "a recall of 0.98 needs at least 149")
    for _ in range(2):  # fitted, and up to date
        done = cli("calibrate", run, "--class", "0", "--precision", 0.97, "--json")
        assert (done.code, done.json["error"]["code"]) == (3, "no_threshold")
    with np.load(run.with_name("arrays.npz")) as file:
        arrays = {name: values for name, values in file.items() if not name.endswith("far")}
    for name in ("train", "val", "test"):
        kept = arrays[f"labels_{name}"] < 2
        arrays |= {f"{part}_{name}": arrays[f"{part}_{name}"][kept] for part in ("features", "labels")}
    arrays |= {f"head_{part}": arrays[f"head_{part}"][:2] for part in ("weight", "bias")}
    two = new_run(cli, tmp_path / "two", arrays, "--hold-out", "calib=test:100")
    cli("predict", two).expect(0)
    cli("calibrate", two, "--recall", 0.8).expect(0, "a probability of 1")


def test_the_table_has_the_decisions(cli: Cli, run: Path) -> None:
    cli("calibrate", run, *ALL).expect(0)
    cli("calibrate", run, "--sets", "aps", "--name", "fine").expect(0)
    predict = ("predict", run, "--posterior", "laplace", "--samples", 50)
    for name in ("t.npz", "t.csv"):
        done = cli(*predict, "--table", run.with_name(name)).expect(0)
    assert "shift p" in done.stderr
    content = read_predictions(run.with_name("small.bnn") / "predictions" / "laplace.mc" / "test.h5")
    rule = read_decision(file_of(run, "sets")).rule
    assert isinstance(rule, SetRule)
    sets = rule.sets(np.asarray(content.probs))
    with np.load(run.with_name("t.npz")) as columns:
        is_test = columns["split"] == "test"
        assert np.array_equal(columns["set"][is_test], sets)
        assert np.array_equal(columns["set_size"][is_test], sets.sum(axis=1))
        assert set(columns["accept"][is_test]) == set(columns["ood"][is_test]) == {0, 1}
        assert (columns["fine_set_size"][columns["split"] == "calib"] == -1).all()
    with open(run.with_name("t.csv"), newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["split"] == "test"]
    assert [row["set"] for row in rows] == [";".join(map(str, np.flatnonzero(one))) for one in sets]


def test_rules_can_be_chosen_or_left_out(cli: Cli, run: Path) -> None:
    cli("calibrate", run, *ALL).expect(0)
    predict = ("predict", run, "--posterior", "laplace", "--samples", 50, "--split", "test", "--json")
    (row,) = cli(*predict, "--decide", "shift").json["decisions"]
    assert (row["rule"], row["is_alarm"]) == ("shift", False)
    assert cli(*predict, "--table", run.with_name("t.npz"), "--decide", "none").json["decisions"] == []
    assert "have: ood, risk, sets, shift" in cli(*predict, "--decide", "other").expect(66).json["error"]["message"]


def test_predictions_of_another_kind_are_not_decided_on(cli: Cli, run: Path) -> None:
    cli("calibrate", run, "--sets", "lac").expect(0)
    again = (
        "predict",
        run,
        "--posterior",
        "laplace",
        "--samples",
        60,
        "--split",
        "test",
        "--force",
        "--decide",
        "sets",
    )
    done = cli(*again, "--json")
    assert done.json["decisions"] == []
    assert "the rule was calibrated on split calib, which was predicted with other settings" in done.stderr


def test_scores_of_decisions_have_intervals_and_say_why_they_are_not_there(cli: Cli, run: Path) -> None:
    cli("calibrate", run, *ALL).expect(0)
    done = cli("evaluate", run, "--posterior", "laplace", "--json")
    rows = {row["split"]: {(m["name"], m.get("ood")): m for m in row["metrics"]} for row in done.json["rows"]}
    assert {"low", "high"} <= set(rows["test"]["set_coverage", None]["interval"])
    content = read_predictions(run.with_name("small.bnn") / "predictions" / "laplace.mc" / "test.h5")
    rule = read_decision(file_of(run, "sets")).rule
    assert isinstance(rule, SetRule)
    assert content.labels is not None
    covered = rule.sets(np.asarray(content.probs))[np.arange(200), content.labels]
    assert rows["test"]["set_coverage", None]["value"] == pytest.approx(covered.mean())
    worst = min(covered[content.labels == k].mean() for k in range(3))
    assert rows["test"]["worst_class_coverage", None]["value"] == pytest.approx(worst)
    shift = rows["test"]["shift_p", "far"]
    assert shift["is_alarm"] == (shift["value"] <= 0.05)
    assert 0 <= rows["test"]["detection_rate", "far"]["value"] <= 1
    assert "was calibrated on" in rows["calib"]["selective_risk", None]["undefined"]
    cli("evaluate", run, "--posterior", "laplace", "--assert", "set_coverage>=0.7").expect(0)
    cli("evaluate", run, "--posterior", "laplace", "--metric", "set_coverage").expect(0)
    cli("evaluate", run, "--posterior", "map").expect(66)


def test_a_rule_is_stale_with_its_predictions(cli: Cli, run: Path) -> None:
    cli("calibrate", run, "--sets", "lac").expect(0)
    cli("predict", run, "--posterior", "laplace", "--samples", 60, "--force").expect(0)
    assert "predictions.calib (calib.h5) has changed" in cli("status", run).stdout
    skipped = cli("predict", run, "--posterior", "laplace", "--samples", 60, "--table", run.with_name("t.csv"))
    assert "skipping rule sets of laplace.mc" in skipped.stderr
    assert cli("calibrate", run, "--sets", "lac", "--json").json["action"] == "replaced"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to calibrate"),
        (("--class", "1", "--risk", "0.1"), "--class applies to one class: add --precision or --recall"),
        (("--class-conditional", "--risk", "0.1"), "--class-conditional applies to prediction sets: add --sets"),
        (("--sets", "lac", "--nonrandomized"), "lac is not randomised"),
        (("--risk", "0.1", "--shifted-to", "far"), "--shifted-to applies to prediction sets"),
        (("--sets", "lac", "--shifted-to", "far", "--confidence", "0.9"), "--shifted-to and --confidence exclude"),
        (("--sets", "lac", "--shifted-to", "test"), "--shifted-to test: expected another split"),
        (("--sets", "aps", "--raps-rank", "2"), "--raps-rank applies to raps"),
        (("--sets", "raps", "--raps-rank", "2"), "--raps-penalty and --raps-rank go together"),
        (("--sets", "lac", "--coverage", "1"), "--coverage: expected a number between 0 and 1; got 1"),
        (("--sets", "lac", "--integrator", "exact"), "--integrator: expected one of bridge, "),
        (("--sets", "lac", "--risk", "0.1", "--name", "x"), "--name names one rule"),
        (("--sets", "lac", "--risk", "0.1", "--out", "x.safetensors"), "--out FILE holds one rule"),
    ],
)
def test_what_does_not_go_together_is_refused(cli: Cli, small_run: Path, words: tuple[str, ...], message: str) -> None:
    cli("calibrate", small_run, "--split", "test", *words).expect(2, message)


def test_raps_is_tuned_on_rows_that_it_does_not_calibrate_on(cli: Cli, run: Path) -> None:
    cli("calibrate", run, "--sets", "raps").expect(0)
    metrics = read_header(file_of(run, "sets")).meta["metrics"]
    assert metrics["num_examples"] == 160
    given = ("--raps-penalty", 0.2, "--raps-rank", 2, "--name", "given", "--nonrandomized")
    cli("calibrate", run, "--sets", "raps", *given).expect(0)
    found = read_header(file_of(run, "given")).meta
    assert (found["metrics"]["num_examples"], found["fitted"]["penalty"], found["fitted"]["seed"]) == (200, 0.2, None)


@pytest.mark.nightly
def test_the_report_has_what_the_rules_guarantee_and_what_came_of_it(cli: Cli, run: Path) -> None:
    cli("evaluate", run, "--posterior", "laplace", "--bootstrap", 50).expect(0)
    page = run.with_name("small.bnn") / "report.html"
    cli("report", run).expect(0)
    assert "No rule of calibrate was scored on test" in page.read_text()
    cli("calibrate", run, *ALL).expect(0)
    cli("evaluate", run, "--posterior", "laplace", "--bootstrap", 50).expect(0)
    cli("report", run, "--force").expect(0)
    text = page.read_text()
    for said in (
        "lac: 80% covered",
        "at most 20% wrong (95% sure)",
        "at most 10% false alarms",
        "at most 5% false alarms for batches",
    ):
        assert said in text
