"""evaluate: rows, intervals, fidelity, scores of features and distances."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli, new_run
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation import statistics
from bnncli.evaluation.detectors import feature_detectors
from bnncli.session.inputs import open_posterior


def by_form(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics of a row by name and choices."""
    keys = ("name", "ood", "of", "strategy", "norm", "estimator", "score", "positive")
    return {":".join(str(metric[key]) for key in keys if key in metric): metric for metric in row["metrics"]}


def test_an_integrator_is_chosen_by_its_name_or_with_its_settings(cli: Cli, small_run: Path) -> None:
    words = ("--integrator", "mc", "--qmc", "--samples", 16, "--split", "test")
    cli("predict", small_run, "--posterior", "laplace", *words).expect(0)

    def variants(name: str) -> set[str]:
        rows = cli("evaluate", small_run, "--posterior", "laplace", "--integrator", name, "--json").json["rows"]
        return {row["variant"] for row in rows}

    assert variants("mc-qmc") == {"mc-qmc"}
    assert variants("mc") == {"mc", "mc-qmc"}
    absent = cli("evaluate", small_run, "--integrator", "probit-sum-zero").expect(
        66, "no predictions by integrator 'probit-sum-zero'"
    )
    assert absent.stderr.rstrip().endswith("--integrator probit")
    cli("evaluate", small_run, "--integrator", "exact").expect(2, "or one with its settings")


def test_without_replicates_there_is_no_interval_to_show(cli: Cli, small_run: Path) -> None:
    rows = cli("evaluate", small_run, "--posterior", "laplace", "--bootstrap", 0, "--force", "--json").json["rows"]
    metrics = [metric for row in rows for metric in row["metrics"]]
    assert metrics
    assert not any("interval" in metric for metric in metrics)
    # The discrepancy's standard error is a jackknife's.
    assert {metric["name"] for metric in metrics if "standard_error" in metric} <= {"mmd2"}
    cli("evaluate", small_run, "--bootstrap", 0, "--intervals").expect(2, "--bootstrap 0")
    cli("evaluate", small_run, "--level", 1).expect(2)


def test_the_seed_moves_intervals_and_not_scores(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--metric", "nll", "--bootstrap", 50, "--force", "--json")
    first, again, other = (
        cli("evaluate", small_run, *words, "--seed", seed).json["rows"][0]["metrics"][0] for seed in (0, 0, 1)
    )
    assert first == again
    assert first["value"] == other["value"]
    assert first["interval"] != other["interval"]


def test_scores_do_not_depend_on_block_size(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("evaluate", small_run, "--posterior", "laplace", "--force", "--json", "--bootstrap", 20)
    whole = cli(*words).json["rows"]
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 3 * 11)
    for row, other in zip(whole, cli(*words).json["rows"], strict=True):
        theirs = by_form(other)
        for name, metric in by_form(row).items():
            if metric["value"] is not None:
                assert metric["value"] == pytest.approx(theirs[name]["value"], rel=1e-12)


def test_one_logit_gets_every_two_class_score(cli: Cli, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        arrays[f"labels_{name}"] = np.minimum(arrays[f"labels_{name}"], 1)
    arrays["head_weight"], arrays["head_bias"] = arrays["head_weight"][1:2], arrays["head_bias"][1:2]
    run = new_run(cli, tmp_path / "run", arrays, "--ood", "far")
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("predict", run, "--posterior", "laplace", "--split", "test", "--samples", 100).expect(0)
    (row,) = cli("evaluate", run, "--split", "test", "--bootstrap", 0, "--json").json["rows"]
    found = {name: metric["value"] for name, metric in by_form(row).items()}
    parts = [found[f"{name}:nll"] for name in ("miscalibration", "discrimination", "uncertainty")]
    assert found["nll"] == pytest.approx(parts[0] - parts[1] + parts[2], rel=1e-6)
    assert found["top_k"] is None


def test_a_ranking_is_scored_by_what_it_keeps(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--integrator", "bridge", "--split", "test", "--top-k", "best")
    cli("predict", small_run, *words).expect(0)
    (row,) = cli("evaluate", small_run, "--integrator", "bridge", "--json").json["rows"]
    found = by_form(row)
    file = read_predictions(small_run.with_name("small.bnn") / "predictions/laplace.bridge/test.h5")
    assert found["ranked_length"]["value"] == pytest.approx(np.mean(file.top_k), rel=1e-12)
    assert 1 < found["ranked_length"]["value"] < 3
    assert (found["ranked_accuracy"]["rule"], found["ranked_accuracy"]["cap"]) == ("best", 10)
    gain = found["ranked_accuracy"]["value"] - found["cumulative_accuracy"]["value"]
    assert found["ranked_gain"]["value"] == pytest.approx(gain, abs=1e-12)
    assert found["accuracy"]["value"] <= found["ranked_accuracy"]["value"] <= 1


def test_a_damaged_file_of_another_posterior_is_no_hindrance(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "predictions" / "hmc.mc" / "test.h5"
    path.write_bytes(path.read_bytes()[:1000])
    done = cli("evaluate", small_run, "--posterior", "laplace")
    assert (done.code, "skipping hmc.mc: " in done.stderr, "| laplace " in done.stdout) == (0, True, True)
    for words in ((), ("--posterior", "hmc")):
        cli("evaluate", small_run, *words).expect(65)


def test_predictions_with_a_name_of_their_own_have_it_in_the_table_and_in_assertions(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "laplace", "--name", "more", "--samples", 30, "--split", "test")
    done = cli("evaluate", small_run, "--split", "test", "--posterior", "laplace")
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:4]] == ["laplace", "laplace (more)"]
    one = cli("evaluate", small_run, "--assert", "more.nll<0", "--json").json["checks"]
    assert [(check["name"], check["left"] > 0) for check in one] == [("more", True)]
    cli("evaluate", small_run, "--assert", "map.nll<laplace.nll").expect(
        2, "is ambiguous; name one of laplace.mc.nll, more.nll"
    )
    words = [word for name in ("laplace.mc", "more") for word in ("--assert", f"map.nll<{name}.nll")]
    first, second = (check["right"] for check in cli("evaluate", small_run, *words, "--json").json["checks"])
    assert first != second


def test_the_table_shows_the_floor_beside_calibration_errors_and_says_what_it_is(cli: Cli, small_run: Path) -> None:
    done = cli("evaluate", small_run, "--split", "test", "--posterior", "map")
    (row,) = cli("evaluate", small_run, "--split", "test", "--posterior", "map", "--json").json["rows"]
    found = by_form(row)["ece:equal-width:l1"]
    assert found["excess"] == pytest.approx(found["value"] - found["floor"])
    assert 0 < found["p_calibrated"] <= 1
    assert f"{found['value']:.4f} (floor {found['floor']:.4f})" in done.stdout
    assert "floor: the value expected by chance for a calibrated model" in done.stdout
    assert "floor:" not in cli("evaluate", small_run, "--metric", "nll").stdout
    shown = cli("evaluate", small_run, "--split", "test", "--posterior", "map", "--intervals").stdout
    ends = found["interval"]
    assert f"(floor {found['floor']:.4f}) [{ends['low']:.4f}, {ends['high']:.4f}]" in shown
    assert "may be below the value" in shown


QUICK = ("--bootstrap", "0", "--force")
LAPLACE = ("--posterior", "laplace")
NAMES = ("agreement", "total_variation", "jensen_shannon", "mutual_info_correlation")


def predictions(run: Path, name: str, split: str = "test"):  # type: ignore[no-untyped-def]
    return read_predictions(Path(f"{run}.bnn/predictions/{name}/{split}.h5"))


def rows_of(cli: Cli, run: Path, *words: object) -> dict[tuple[str, str], dict[str, dict]]:
    """The rows of fidelity by posterior and split."""
    rows = json.loads(cli("evaluate", run, *QUICK, "--json", *words).expect(0).stdout)["rows"]
    return {
        (row["posterior"], row["split"]): {m["name"]: m for m in row["metrics"] if m["name"] in NAMES} for row in rows
    }


def test_a_posterior_of_the_run_is_a_reference_whose_halves_are_the_floor(cli: Cli, small_run: Path) -> None:
    rows = rows_of(cli, small_run, "--reference", "hmc", *LAPLACE, "--posterior", "map", "--posterior", "hmc")
    ours, theirs = predictions(small_run, "laplace.mc"), predictions(small_run, "hmc.mc")
    found = rows["laplace", "test"]
    assert found["agreement"]["value"] == (ours.probs.argmax(1) == theirs.probs.argmax(1)).mean()
    assert found["total_variation"]["value"] == pytest.approx(
        np.abs(ours.probs - theirs.probs).sum(1).mean() / 2, rel=1e-5
    )
    assert found["mutual_info_correlation"]["value"] > 0.5
    weights = theirs.group_weights
    first, second = (np.tensordot(weights[s::2] / weights[s::2].sum(), theirs.group_probs[s::2], 1) for s in (0, 1))
    assert found["total_variation"]["floor"] == pytest.approx(np.abs(first - second).sum(1).mean() / 2, rel=1e-5)
    assert found["mutual_info_correlation"]["floor"] is None
    assert {m["undefined"] for m in rows["hmc", "test"].values()} == {"this is the reference itself"}
    words = ("evaluate", small_run, *QUICK, *LAPLACE, "--posterior", "hmc", "--reference", "hmc", "--assert")
    words = (*words, "agreement-excess>=-0.5", "--assert")  # of the reference itself nothing is asked
    done = cli(*words, "laplace.agreement:hmc.mc>1")
    assert (done.code, "agreement-excess" in done.stderr) == (3, False)
    assert rows["map", "test"]["mutual_info_correlation"]["undefined"] == "the predictions have no mutual information"


def test_every_draw_that_is_kept_tells_the_floor_of_mutual_information(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "hmc", "--split", "test", "--keep-samples", "--force")
    cli("predict", small_run, *words).expect(0)
    found = rows_of(cli, small_run, "--reference", "hmc", *LAPLACE)["laplace", "test"]
    samples = predictions(small_run, "hmc.mc").probs_samples.astype(float)
    halves = [samples[start::2].mean(0) for start in (0, 1)]
    assert found["total_variation"]["floor"] == pytest.approx(np.abs(halves[0] - halves[1]).sum(1).mean() / 2)
    assert 0.5 < found["mutual_info_correlation"]["floor"] <= 1


def test_the_reference_is_recorded_and_its_change_makes_the_scores_stale(cli: Cli, small_run: Path) -> None:
    words = ("evaluate", small_run, "--posterior", "laplace", "--bootstrap", 0, "--reference", "hmc")
    cli(*words, "--force").expect(0)
    assert "up to date" in cli(*words).stderr
    cli("predict", small_run, "--posterior", "hmc", "--samples", 3, "--seed", 5, "--force").expect(0)
    done = cli("status", small_run, "--json")
    states = {one["path"]: one["state"] for one in json.loads(done.stdout)["artifacts"] if "metrics" in one["path"]}
    assert [state for path, state in states.items() if path.endswith("laplace.mc.json")] == ["stale"]


def test_without_predictions_the_rows_name_the_command_that_makes_them(cli: Cli, small_run: Path) -> None:
    for path in Path(f"{small_run}.bnn/predictions/hmc.mc").iterdir():
        path.unlink()
    done = cli("evaluate", small_run, *QUICK, *LAPLACE, "--reference", "hmc", "--json")
    (reason, *others) = {
        m["undefined"] for row in json.loads(done.stdout)["rows"] for m in row["metrics"] if m["name"] == "agreement"
    }
    assert others == []
    assert f"bnncli predict {small_run} --posterior hmc" in reason
    assert "hmc has no predictions" in done.stderr
    cli("evaluate", small_run, *QUICK, *LAPLACE, "--reference", "hmc", "--metric", "agreement").expect(65)


def test_a_file_is_a_reference_and_assertions_hold_against_it(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    theirs = predictions(small_run, "hmc.mc")
    np.savez(tmp_path / "ref.npz", hmc=theirs.probs, other=theirs.probs[::-1])
    expected = rows_of(cli, small_run, *LAPLACE, "--reference", "hmc")["laplace", "test"]
    rows = rows_of(cli, small_run, *LAPLACE, "--reference", f"{tmp_path}/ref.npz:hmc")
    found = rows["laplace", "test"]
    assert [found[name]["value"] for name in NAMES[:3]] == [expected[name]["value"] for name in NAMES[:3]]
    assert found["agreement"]["reference"] == "ref.npz.hmc"
    assert "draws to halve" in found["agreement"]["floor_undefined"]
    assert "for split test" in rows["laplace", "val"]["agreement"]["undefined"]
    words = (
        "evaluate",
        small_run,
        "--posterior",
        "laplace",
        *QUICK,
        "--reference",
        f"{tmp_path}/ref.npz:hmc",
        "--assert",
    )
    cli(*words, "agreement>=0.5").expect(0)
    cli(*words, "total_variation<=1e-9").expect(3)
    cli("evaluate", small_run, *QUICK, *LAPLACE, "--reference", tmp_path / "ref.npz").expect(
        65, "several arrays could be the predictions"
    )


def test_rows_that_were_held_out_are_found_by_their_row_in_the_data(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    own = predictions(small_run, "laplace.mc")
    whole = np.full((len(own.probs) + 30, 3), 1 / 3, dtype=np.float32)
    whole[own.sample_id] = own.probs
    np.save(tmp_path / "whole.npy", whole)
    own_file = f"{small_run}.bnn/predictions/laplace.mc/test.h5"
    done = cli("score", own_file, "--bootstrap", 0, "--reference", tmp_path / "whole.npy", "--json")
    (row,) = json.loads(done.stdout)["rows"]
    assert [m["value"] for m in row["metrics"] if m["name"] == "total_variation"] == [0]
    assert "120 of its 150 rows" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda probs, labels: {"probs": probs[:-1]}, "has 119 rows, but split 'test' has 120"),
        (lambda probs, labels: {"probs": probs, "label": labels[::-1]}, "and split 'test' have different labels in"),
        (lambda probs, labels: {"probs": probs[:, :2] / probs[:, :2].sum(1, keepdims=True)}, "has 3 classes, "),
        (lambda probs, labels: {"probs": probs * 2}, "expected values in"),
    ],
)
def test_wrong_references_are_refused(cli: Cli, small_run: Path, tmp_path: Path, change: object, said: str) -> None:
    own = predictions(small_run, "laplace.mc")
    np.savez(tmp_path / "ref.npz", **change(np.asarray(own.probs), own.labels))  # type: ignore[operator]
    own_file = f"{small_run}.bnn/predictions/laplace.mc/test.h5"
    cli("score", own_file, "--bootstrap", 0, "--reference", tmp_path / "ref.npz").expect(65, said)


def test_score_has_the_same_numbers(cli: Cli, small_run: Path) -> None:
    folder = Path(f"{small_run}.bnn/predictions")
    words = ("--bootstrap", 25, "--json", "--reference")
    done = cli("evaluate", small_run, "--posterior", "laplace", "--force", *words, "hmc")
    theirs = json.loads(done.stdout)["rows"][0]["metrics"]
    done = cli("score", folder / "laplace.mc" / "test.h5", *words, folder / "hmc.mc" / "test.h5")
    ours = json.loads(done.stdout)["rows"][0]["metrics"]
    named = [{m["name"]: {**m, "reference": ""} for m in rows if m["name"] in NAMES} for rows in (ours, theirs)]
    assert named[0] == named[1]
    assert named[0]["agreement"]["interval"]["replicates"] == 25


def test_neither_a_posterior_nor_a_file(cli: Cli, small_run: Path) -> None:
    cli("evaluate", small_run, "--reference", "nobody").expect(66, "'nobody' is neither a posterior of the run (have: ")


def test_what_differs_in_the_reference_alone_is_made_anew_without_force(cli: Cli, small_run: Path) -> None:
    words = ("evaluate", small_run, *LAPLACE, "--split", "test", "--bootstrap", 0)
    with_map, with_hmc = (*words, "--reference", "map"), (*words, "--reference", "hmc")
    cli(*words, "--force").expect(0)
    cli(*with_map).expect(0, "replacing it (created without --reference, now with --reference map.plug-in)")
    assert "created with --reference map.plug-in, now with --reference hmc.mc)" in cli(*with_hmc).stderr
    assert "created with --reference hmc.mc, now without --reference" in cli(*words, "--dry-run").stdout
    assert "replacing it" in cli(*words).stderr
    assert "up to date" in cli(*words).stderr
    done = cli(*words[:-1], 7, "--reference", "hmc")
    assert (done.code, "bootstrap: existing=0, requested=7" in done.stderr, "{" in done.stderr) == (73, True, False)


def test_a_bad_reference_is_told_before_scores_that_are_there(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    words = ("evaluate", small_run, *LAPLACE, "--bootstrap", 0)
    cli(*words, "--force").expect(0)
    np.savez(tmp_path / "short.npz", probs=predictions(small_run, "hmc.mc").probs[:-1])
    for one in (words, (*words, "--seed", 9)):
        cli(*one, "--reference", tmp_path / "short.npz").expect(65, "short.npz' has")


Metrics = list[dict[str, Any]]


def rows_of_scores(document: dict[str, Any], posterior: str, split: str = "test") -> Metrics:
    return next(row["metrics"] for row in document["rows"] if (row["posterior"], row["split"]) == (posterior, split))


def find(metrics: Metrics, name: str, **choices: str) -> dict[str, Any]:
    found = [m for m in metrics if m["name"] == name and all(m.get(key) == value for key, value in choices.items())]
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def scored(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run whose predictions have every score, made once, and the document that told them."""
    from bnncli.cli.execute import run_command_line

    folder, stdout = tmp_path_factory.mktemp("scored"), io.StringIO()
    shutil.copytree(finished_run.with_name("small.bnn"), folder / "small.bnn")
    words = ("evaluate", folder / "small", "--score", "all", "--bootstrap", 50, "--force", "--json")
    assert run_command_line([str(word) for word in words], stdout) == 0
    return folder / "small", json.loads(stdout.getvalue())


@pytest.fixture
def everything(scored: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return scored[1]


def test_every_score_detects_the_other_split(everything: dict[str, Any], finished_run: Path) -> None:
    folder = finished_run.with_name("small.bnn") / "predictions" / "laplace.mc"
    inside, outside = (read_predictions(folder / f"{name}.h5") for name in ("test", "far"))
    is_in = np.repeat([1, 0], [len(inside.probs), len(outside.probs)])
    expected = {
        "max_prob": [part.probs.max(axis=1) for part in (inside, outside)],
        "entropy": [-part.entropy for part in (inside, outside)],
        "mutual_info": [-part.mutual_info for part in (inside, outside)],
        "energy": [-part.energy for part in (inside, outside)],
        "max_logit": [part.max_logit for part in (inside, outside)],
    }
    metrics = rows_of_scores(everything, "laplace")
    for score, values in expected.items():
        row = find(metrics, "auroc", score=score)
        assert row["value"] == pytest.approx(roc_auc_score(is_in, np.concatenate(values)), rel=1e-4)
        assert row["ood"] == "far"
        assert row["interval"]["replicates"] == 50
    assert find(metrics, "auroc", score="dirichlet_variance")["undefined"].startswith(
        "this integrator provides no Dirichlet"
    )
    assert find(metrics, "mmc", ood="far")["value"] == pytest.approx(outside.probs.max(axis=1).mean(), rel=1e-6)


def test_scores_of_features_have_one_row_for_all_posteriors(everything: dict[str, Any], arrays: Any) -> None:
    metrics = rows_of_scores(everything, "features")
    assert {row["name"] for row in metrics} == {"auroc", "aupr", "fpr95"}
    assert {row["score"] for row in metrics} == set(feature_detectors())
    unit = {name: arrays[f"features_{name}"].astype(float) for name in ("train", "test", "far")}
    unit = {name: rows / np.linalg.norm(rows, axis=1, keepdims=True) for name, rows in unit.items()}
    known = NearestNeighbors(n_neighbors=50).fit(unit["train"])
    scores = [-known.kneighbors(unit[name])[0][:, -1] for name in ("test", "far")]
    row = find(metrics, "auroc", score="knn")
    assert row["value"] == pytest.approx(roc_auc_score([1] * 120 + [0] * 60, np.concatenate(scores)), rel=1e-4)
    assert (row["neighbors"], row["n"]) == (50, [120, 60])
    described = next(row for row in everything["rows"] if row["posterior"] == "features")
    assert (described["integrator"], described["variant"], described["samples"]) == ("none", "none", None)


def test_scores_of_features_have_a_file(scored: tuple[Path, dict[str, Any]], everything: dict[str, Any]) -> None:
    path = scored[0].with_name("small.bnn") / "metrics" / "features.none.json"
    document = json.loads(path.read_text())
    roles = {entry["role"] for entry in document["provenance"]["inputs"]}
    assert roles == {f"features.{name}" for name in ("train", "val", "test", "far")}
    assert document["rows"] == [row for row in everything["rows"] if row["posterior"] == "features"]


def test_scores_of_features_leave_the_rows_of_posteriors_as_they_were(cli: Cli, small_run: Path) -> None:
    plain = cli("evaluate", small_run, "--json")
    assert plain.json["action"] == "up_to_date"
    more = cli("evaluate", small_run, "--score", "knn", "--json").json
    assert [row for row in more["rows"] if row["posterior"] != "features"] == plain.json["rows"]
    assert [row for row in more["rows"] if row["posterior"] == "features"]


def test_assertions_reach_scores_of_features_and_others_pass_them_by(cli: Cli, small_run: Path) -> None:
    words = ("evaluate", small_run, "--score", "knn", "--json")
    done = cli(
        *words, "--assert", "auroc>=0", "--assert", "auroc:knn>=0", "--assert", "features.fpr95:knn:out<=1"
    ).expect(0)
    by = {check["expr"]: set() for check in done.json["checks"]}
    for check in done.json["checks"]:
        by[check["expr"]].add(check["posterior"])
    assert by["auroc:knn>=0"] == by["features.fpr95:knn:out<=1"] == {"features"}
    assert by["auroc>=0"] == {"map", "laplace", "refine", "hmc"}
    cli(*words, "--assert", "features.auroc:knn>=1").expect(3)
    cli("evaluate", small_run, "--assert", "auroc:knn>=0").expect(66, "add --score")


def test_distances_are_those_of_the_stored_posteriors(everything: dict[str, Any], finished_run: Path) -> None:
    folder = finished_run.with_name("small.bnn") / "posteriors"
    (laplace, _), (hmc, _) = (open_posterior(folder / name) for name in ("laplace.safetensors", "hmc.nc"))
    draws = hmc.draws.double().flatten(0, 1)
    gap = (laplace.mean - draws.mean(dim=0)) / draws.std(dim=0)
    row = find(rows_of_scores(everything, "laplace"), "mean_error")
    assert (row["mean"], row["value"]) == ("exact", pytest.approx(float(gap.square().mean().sqrt()), rel=1e-6))
    point = rows_of_scores(everything, "map")
    assert find(point, "wasserstein", over="largest")["value"] >= find(point, "wasserstein", over="mean")["value"] > 0
    assert {find(point, "mmd2", estimator=name)["n"][1] for name in ("biased", "published")} == {128}
    unbiased = find(point, "mmd2", estimator="unbiased")
    assert unbiased["n"] == unbiased["p_value_draws"] == [600, 128]
    assert unbiased["blocks"] == 8  # the chains
    own = [
        m
        for m in rows_of_scores(everything, "hmc")
        if m["name"] in ("mmd2", "wasserstein", "mean_error", "covariance_error")
    ]
    assert len(own) == 7
    assert all("identical to the reference hmc" in m["undefined"] for m in own)


def test_without_another_split_features_have_nothing_to_detect(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    for path in folder.glob("predictions/*/far.h5"):
        path.unlink()
    cli("evaluate", small_run, "--score", "knn", "--force", "--bootstrap", 0, "--posterior", "map").expect(
        0, "no out-of-distribution split to detect with features"
    )


def test_a_training_split_without_labels_still_has_neighbours(cli: Cli, tmp_path: Path, arrays: Any) -> None:
    run = tmp_path / "bare"
    del arrays["labels_train"]
    new_run(cli, run, arrays, "--ood", "far")
    cli("predict", run).expect(0)
    metrics = rows_of_scores(cli("evaluate", run, "--score", "knn", "--bootstrap", 0, "--json").json, "features")
    assert find(metrics, "auroc", score="mahalanobis")["undefined"] == "the training split has no labels"
    assert 0 < find(metrics, "auroc", score="knn")["value"] < 1


def test_no_more_neighbours_are_told_than_there_are(cli: Cli, small_run: Path) -> None:
    done = cli("evaluate", small_run, "--score", "knn", "--neighbors", 10**6, "--json", "--split", "test")
    (row,) = [row for row in done.json["rows"] if row["posterior"] == "features"]
    num_train = len(np.load(small_run.with_name("features.npz"))["labels_train"])
    assert {metric["neighbors"] for metric in row["metrics"] if metric["score"] == "knn"} == {num_train}
    assert f"there are only {num_train} training examples" in done.stderr
