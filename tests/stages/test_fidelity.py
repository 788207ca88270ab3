"""evaluate and score with --reference: a posterior of the run, a file, rows that are held out, and what does not go together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.artifacts.predictions import read_predictions

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
