"""evaluate: rows, intervals and fidelity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli, new_run

from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation import statistics
from bnncli.session.score_tables import score_table


def by_form(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics of a row by name and choices."""
    keys = ("name", "ood", "of", "strategy", "norm", "estimator", "score", "positive")
    return {":".join(str(metric[key]) for key in keys if key in metric): metric for metric in row["metrics"]}


def columns(stdout: str) -> list[str]:
    return [word.strip() for word in stdout.splitlines()[0].split("|")]


def test_rows_say_how_they_were_predicted(cli: Cli, small_run: Path) -> None:
    assert cli("predict", small_run, "--posterior", "laplace", "--integrator", "mc", "--qmc", "--samples", 16).code == 0
    rows = cli("evaluate", small_run, "--split", "test", "--json").json["rows"]
    told = {(row["posterior"], row["integrator"], row["variant"], row["samples"]) for row in rows}
    assert told >= {("map", "plug-in", "plug-in", None), ("laplace", "mc", "mc", 1000), ("laplace", "mc", "mc-qmc", 16)}
    assert ("hmc", "mc", "mc", 8 * 16) in told
    assert {row["variant"]: row["settings"].get("qmc") for row in rows} == {
        "plug-in": None,
        "mc": False,
        "mc-qmc": True,
    }


def test_each_input_of_the_inputs_is_read_once_until_something_is_written(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bnncli.artifacts import files, freshness
    from bnncli.commands import evaluate

    read, known, produce = [], [], evaluate.produce
    monkeypatch.setattr(freshness, "read_header", lambda path: read.append(path.resolve()) or files.read_header(path))

    def spied(run: Any, request: Any, *others: Any, **named: Any) -> Any:
        before, result = len(run.followed), produce(run, request, *others, **named)
        known.append((before > 0, len(run.followed) > 0))
        return result

    monkeypatch.setattr(evaluate, "produce", spied)
    assert cli("evaluate", small_run).code == 0
    followed = [path for path in read if path.parent.name in ("features", "posteriors")]
    assert len(followed) == len(set(followed)) == 4 + 4
    assert known == [(True, True)] * 4
    cli("evaluate", small_run, "--posterior", "laplace", "--force", "--bootstrap", 0)
    assert known[4:] == [(True, False)]


def test_more_draws_than_a_posterior_has_are_not_told(cli: Cli, small_run: Path) -> None:
    assert cli("predict", small_run, "--posterior", "hmc", "--samples", 1000, "--split", "test", "--force").code == 0
    (row,) = cli("evaluate", small_run, "--posterior", "hmc", "--split", "test", "--json").json["rows"]
    assert row["samples"] == 8 * 16


def test_an_integrator_is_chosen_by_its_name_or_with_its_settings(cli: Cli, small_run: Path) -> None:
    words = ("--integrator", "mc", "--qmc", "--samples", 16, "--split", "test")
    assert cli("predict", small_run, "--posterior", "laplace", *words).code == 0

    def variants(name: str) -> set[str]:
        rows = cli("evaluate", small_run, "--posterior", "laplace", "--integrator", name, "--json").json["rows"]
        return {row["variant"] for row in rows}

    assert variants("mc-qmc") == {"mc-qmc"}
    assert variants("mc") == {"mc", "mc-qmc"}
    absent = cli("evaluate", small_run, "--integrator", "probit-sum-zero")
    assert (absent.code, "no predictions by integrator 'probit-sum-zero'" in absent.stderr) == (66, True)
    assert absent.stderr.rstrip().endswith("--integrator probit")
    unknown = cli("evaluate", small_run, "--integrator", "exact")
    assert (unknown.code, "or one with its settings" in unknown.stderr) == (2, True)


def test_the_table_shows_the_usual_scores_and_the_draws(cli: Cli, small_run: Path) -> None:
    lines = cli("evaluate", small_run, "--split", "test").stdout.splitlines()
    usual = ["accuracy", "NLL", "Brier", "ECE", "AUROC far", "FPR95 far", "MMD^2"]
    assert columns(lines[0]) == ["split", "posterior", "integrator", "draws", *usual]
    hmc = next(line for line in lines if "| hmc " in line)
    assert columns(hmc)[3] == "128"


def test_every_form_of_a_score_is_shown_when_it_is_asked_for(cli: Cli, small_run: Path) -> None:
    shown = columns(cli("evaluate", small_run, "--metric", "ece").stdout)[4:]
    assert shown == [
        "ECE equal-width l1",
        "ECE equal-mass l1",
        "ECE equal-mass l2 debiased",
        "ECE published l1",
        "ECE class-wise l1",
    ]


def test_intervals_stand_beside_their_scores(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--metric", "accuracy", "--level", 0.8, "--bootstrap", 200)
    (row,) = cli("evaluate", small_run, *words, "--force", "--json").json["rows"]
    (metric,) = row["metrics"]
    interval = metric["interval"]
    assert (interval["level"], interval["replicates"]) == (0.8, 200)
    expected = f"{metric['value']:.4f} [{interval['low']:.4f}, {interval['high']:.4f}]"
    assert expected in cli("evaluate", small_run, *words, "--intervals").stdout


def test_without_replicates_there_is_no_interval_to_show(cli: Cli, small_run: Path) -> None:
    rows = cli("evaluate", small_run, "--posterior", "laplace", "--bootstrap", 0, "--force", "--json").json["rows"]
    metrics = [metric for row in rows for metric in row["metrics"]]
    assert metrics
    assert not any("interval" in metric for metric in metrics)
    # The discrepancy's standard error is a jackknife's.
    assert {metric["name"] for metric in metrics if "standard_error" in metric} <= {"mmd2"}
    done = cli("evaluate", small_run, "--bootstrap", 0, "--intervals")
    assert (done.code, "--bootstrap 0" in done.stderr) == (2, True)
    assert cli("evaluate", small_run, "--level", 1).code == 2


def test_the_seed_moves_intervals_and_not_scores(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--metric", "nll", "--bootstrap", 50, "--force", "--json")
    first, again, other = (
        cli("evaluate", small_run, *words, "--seed", seed).json["rows"][0]["metrics"][0] for seed in (0, 0, 1)
    )
    assert first == again
    assert first["value"] == other["value"]
    assert first["interval"] != other["interval"]


def test_the_same_predictions_under_two_names_are_resampled_alike(cli: Cli, small_run: Path) -> None:
    assert cli("predict", small_run, "--posterior", "laplace", "--name", "again", "--split", "test").code == 0
    rows = cli("evaluate", small_run, "--posterior", "laplace", "--split", "test", "--json").json["rows"]
    ours, theirs = (by_form(row) for row in rows)
    for name, metric in ours.items():
        assert metric.get("interval") == theirs[name].get("interval")
    assert ours["nll"]["interval"] is not None


def test_scores_do_not_depend_on_how_many_rows_are_read_at_once(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("evaluate", small_run, "--posterior", "laplace", "--force", "--json", "--bootstrap", 20)
    whole = cli(*words).json["rows"]
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 3 * 11)
    for row, other in zip(whole, cli(*words).json["rows"], strict=True):
        theirs = by_form(other)
        for name, metric in by_form(row).items():
            if metric["value"] is not None:
                assert metric["value"] == pytest.approx(theirs[name]["value"], rel=1e-12)


def test_a_head_with_one_logit_gets_every_two_class_score(
    cli: Cli, arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    for name in ("train", "val", "test"):
        arrays[f"labels_{name}"] = np.minimum(arrays[f"labels_{name}"], 1)
    arrays["head_weight"], arrays["head_bias"] = arrays["head_weight"][1:2], arrays["head_bias"][1:2]
    run = new_run(cli, tmp_path / "run", arrays, "--ood", "far")
    assert cli("fit-laplace", run, "--prior-precision", 1).code == 0
    assert cli("predict", run, "--posterior", "laplace", "--split", "test", "--samples", 100).code == 0
    (row,) = cli("evaluate", run, "--split", "test", "--bootstrap", 0, "--json").json["rows"]
    found = {name: metric["value"] for name, metric in by_form(row).items()}
    parts = [found[f"{name}:nll"] for name in ("miscalibration", "discrimination", "uncertainty")]
    assert found["nll"] == pytest.approx(parts[0] - parts[1] + parts[2], rel=1e-6)
    assert found["top_k"] is None


def test_a_ranking_is_scored_by_what_it_keeps(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--integrator", "bridge", "--split", "test", "--top-k", "best")
    assert cli("predict", small_run, *words).code == 0
    (row,) = cli("evaluate", small_run, "--integrator", "bridge", "--json").json["rows"]
    found = by_form(row)
    file = read_predictions(small_run.with_name("small.bnn") / "predictions/laplace.bridge/test.h5")
    assert found["ranked_length"]["value"] == pytest.approx(np.mean(file.top_k), rel=1e-12)
    assert 1 < found["ranked_length"]["value"] < 3
    assert (found["ranked_accuracy"]["rule"], found["ranked_accuracy"]["cap"]) == ("best", 10)
    gain = found["ranked_accuracy"]["value"] - found["cumulative_accuracy"]["value"]
    assert found["ranked_gain"]["value"] == pytest.approx(gain, abs=1e-12)
    assert found["accuracy"]["value"] <= found["ranked_accuracy"]["value"] <= 1


def test_columns_stand_in_order_with_what_is_measured_against_one_split_together() -> None:
    def metric(name: str, value: float | None = 0.5, **choices: Any) -> dict[str, Any]:
        return {"name": name, "value": value, **choices}

    detection = [
        metric(name, ood=ood, score=score, positive="in")
        for ood in ("b", "a")
        for score in ("max_prob", "entropy")
        for name in ("auroc", "fpr95")
    ]
    rows = [
        {"split": "val", "posterior": "p", "variant": "mc", "samples": 3, "metrics": [metric("nll", 1.0)]},
        {
            "split": "test",
            "posterior": "p",
            "variant": "mc",
            "samples": None,
            "metrics": [metric("mmd2", None, estimator="unbiased"), *detection, metric("accuracy")],
        },
    ]
    usual = score_table(rows, [], scores=("max_prob",))
    assert usual.columns[4:] == ["accuracy", "NLL", "AUROC b", "FPR95 b", "AUROC a", "FPR95 a", "MMD^2"]
    assert usual.rows[0] == ["test", "p", "mc", "-", "0.5000", "-", "0.500", "0.500", "0.500", "0.500", "-"]
    assert usual.rows[1][:6] == ["val", "p", "mc", "3", "-", "1.0000"]
    chosen = score_table(rows, [], chosen=["auroc"], scores=("max_prob", "entropy"))
    assert chosen.columns[4:] == [f"AUROC {ood} {score}" for ood in "ba" for score in ("max_prob", "entropy")]


def test_a_damaged_file_of_another_posterior_is_no_hindrance(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "predictions" / "hmc.mc" / "test.h5"
    path.write_bytes(path.read_bytes()[:1000])
    done = cli("evaluate", small_run, "--posterior", "laplace")
    assert (done.code, "skipping hmc.mc: " in done.stderr, "| laplace " in done.stdout) == (0, True, True)
    for words in ((), ("--posterior", "hmc")):
        assert cli("evaluate", small_run, *words).code == 65


def test_a_name_that_nothing_has_is_told_with_the_name_that_was_meant(cli: Cli, small_run: Path) -> None:
    done = cli("evaluate", small_run, "--posterior", "laplce")
    assert (done.code, done.stderr.splitlines()[1]) == (66, "hint: did you mean 'laplace' or 'laplace.mc'?")
    done = cli("evaluate", small_run.with_name("other"))
    assert (done.code, f"no checkpoint {small_run.with_name('other')}" in done.stderr) == (66, True)


def test_other_options_of_the_same_scores_are_refused_with_what_helps(cli: Cli, small_run: Path) -> None:
    done = cli("evaluate", small_run, "--bins", 7)
    assert (done.code, done.stderr.splitlines()[1]) == (73, "hint: add --force to replace it")


def test_predictions_with_a_name_of_their_own_have_it_in_the_table_and_in_assertions(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "laplace", "--name", "more", "--samples", 30, "--split", "test")
    done = cli("evaluate", small_run, "--split", "test", "--posterior", "laplace")
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:4]] == ["laplace", "laplace (more)"]
    one = cli("evaluate", small_run, "--assert", "more.nll<0", "--json").json["checks"]
    assert [(check["name"], check["left"] > 0) for check in one] == [("more", True)]
    two = cli("evaluate", small_run, "--assert", "map.nll<laplace.nll")
    assert (two.code, "is ambiguous; name one of laplace.mc.nll, more.nll" in two.stderr) == (2, True)
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


def test_the_table_shows_the_standard_error_and_p_value_of_a_distance(cli: Cli, small_run: Path) -> None:
    metric = {"name": "mmd2", "estimator": "unbiased", "value": 0.00312, "standard_error": 0.0021, "p_value": 0.00798}
    row = {"split": "test", "posterior": "laplace", "variant": "mc", "samples": 20, "metrics": [metric]}
    assert score_table([row], []).rows[0][-1] == "0.0031 +- 0.0021 (p 0.008)"
    unknown = {**row, "metrics": [{**metric, "standard_error": None, "p_value": None}]}
    assert score_table([unknown], []).rows[0][-1] == "0.0031"
    found = by_form(cli("evaluate", small_run, "--posterior", "laplace", "--split", "test", "--json").json["rows"][0])
    told = found["mmd2:unbiased"]
    if told["p_value"] is not None:
        assert f"(p {told['p_value']:.2g})" in cli("evaluate", small_run, "--split", "test").stdout


QUICK = ("--bootstrap", "0", "--force")
LAPLACE = ("--posterior", "laplace")
NAMES = ("agreement", "total_variation", "jensen_shannon", "mutual_info_correlation")


def predictions(run: Path, name: str, split: str = "test"):  # type: ignore[no-untyped-def]
    return read_predictions(Path(f"{run}.bnn/predictions/{name}/{split}.h5"))


def rows_of(cli: Cli, run: Path, *words: object) -> dict[tuple[str, str], dict[str, dict]]:
    """The rows of fidelity by posterior and split."""
    done = cli("evaluate", run, *QUICK, "--json", *words)
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
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
    assert cli("predict", small_run, *words).code == 0
    found = rows_of(cli, small_run, "--reference", "hmc", *LAPLACE)["laplace", "test"]
    samples = predictions(small_run, "hmc.mc").probs_samples.astype(float)
    halves = [samples[start::2].mean(0) for start in (0, 1)]
    assert found["total_variation"]["floor"] == pytest.approx(np.abs(halves[0] - halves[1]).sum(1).mean() / 2)
    assert 0.5 < found["mutual_info_correlation"]["floor"] <= 1


def test_the_reference_is_recorded_and_its_change_makes_the_scores_stale(cli: Cli, small_run: Path) -> None:
    words = ("evaluate", small_run, "--posterior", "laplace", "--bootstrap", 0, "--reference", "hmc")
    assert cli(*words, "--force").code == 0
    assert "up to date" in cli(*words).stderr
    assert cli("predict", small_run, "--posterior", "hmc", "--samples", 3, "--seed", 5, "--force").code == 0
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
    assert cli("evaluate", small_run, *QUICK, *LAPLACE, "--reference", "hmc", "--metric", "agreement").code == 65


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
    assert cli(*words, "agreement>=0.5").code == 0
    assert cli(*words, "total_variation<=1e-9").code == 3
    done = cli("evaluate", small_run, *QUICK, *LAPLACE, "--reference", tmp_path / "ref.npz")
    assert (done.code, "several arrays could be the predictions" in done.stderr) == (65, True)


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
def test_a_reference_of_other_rows_labels_or_classes_is_refused(
    cli: Cli, small_run: Path, tmp_path: Path, change: object, said: str
) -> None:
    own = predictions(small_run, "laplace.mc")
    np.savez(tmp_path / "ref.npz", **change(np.asarray(own.probs), own.labels))  # type: ignore[operator]
    own_file = f"{small_run}.bnn/predictions/laplace.mc/test.h5"
    done = cli("score", own_file, "--bootstrap", 0, "--reference", tmp_path / "ref.npz")
    assert (done.code, said in done.stderr) == (65, True), done.stderr


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
    done = cli("evaluate", small_run, "--reference", "nobody")
    assert done.code == 66
    assert "'nobody' is neither a posterior of the run (have: " in done.stderr


def test_what_differs_in_the_reference_alone_is_made_anew_without_force(cli: Cli, small_run: Path) -> None:
    words = ("evaluate", small_run, *LAPLACE, "--split", "test", "--bootstrap", 0)
    with_map, with_hmc = (*words, "--reference", "map"), (*words, "--reference", "hmc")
    assert cli(*words, "--force").code == 0
    done = cli(*with_map)
    assert done.code == 0
    assert "replacing it (created without --reference, now with --reference map.plug-in)" in done.stderr
    assert "created with --reference map.plug-in, now with --reference hmc.mc)" in cli(*with_hmc).stderr
    done = cli(*words, "--dry-run")
    assert "created with --reference hmc.mc, now without --reference" in done.stdout
    assert "replacing it" in cli(*words).stderr
    assert "up to date" in cli(*words).stderr
    done = cli(*words[:-1], 7, "--reference", "hmc")
    assert (done.code, "bootstrap: existing=0, requested=7" in done.stderr, "{" in done.stderr) == (73, True, False)


def test_a_bad_reference_is_told_before_scores_that_are_there(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    words = ("evaluate", small_run, *LAPLACE, "--bootstrap", 0)
    assert cli(*words, "--force").code == 0
    np.savez(tmp_path / "short.npz", probs=predictions(small_run, "hmc.mc").probs[:-1])
    for one in (words, (*words, "--seed", 9)):
        done = cli(*one, "--reference", tmp_path / "short.npz")
        assert (done.code, "short.npz' has" in done.stderr) == (65, True), done.stderr
