"""The default out-of-distribution score: the same in every command, from the run's features; and what stands in where it lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_decision
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.decisions import OutlierRule
from bnncli.evaluation.feature_scores import Combined
from bnncli.parameters.layouts import HeadLayout
from bnncli.session import predictor, revisions
from bnncli.session.predictor import TrainData

HEAD = ("--head-only", "--format", "torch")


def small(cli: Cli, folder: Path, *, has_val: bool) -> Path:
    arrays = {name: one for name, one in make_arrays().items() if has_val or not name.endswith("_val")}
    run = new_run(cli, folder / "small", arrays, "--ood", "far")
    assert cli("fit-laplace", run, "--prior-precision", 1).code == 0
    assert cli("predict", run, "--samples", 50).code == 0
    return run


def test_predictions_have_the_score_of_the_features_whatever_the_posterior(cli: Cli, tmp_path: Path) -> None:
    run = small(cli, tmp_path, has_val=True)
    arrays = {name: torch.from_numpy(one) for name, one in make_arrays().items()}
    layout = HeadLayout(3, 5)
    expected = Combined.fit(
        arrays["features_train"],
        arrays["labels_train"],
        arrays["features_val"],
        layout=layout,
        theta=layout.join(arrays["head_weight"], arrays["head_bias"]),
        device=torch.device("cpu"),
        generator=torch.Generator().manual_seed(0),  # all training examples are neighbours
    )
    for split in ("test", "far"):
        for maker in ("laplace.mc", "map.plug-in"):
            content = read_predictions(tmp_path / f"small.bnn/predictions/{maker}/{split}.h5")
            assert content.combined is not None
            scores = expected.scores(arrays[f"features_{split}"])
            np.testing.assert_allclose(np.asarray(content.combined), scores.numpy(), rtol=1e-4, atol=1e-4)
    rows = cli("evaluate", run, "--split", "test", "--bootstrap", 0, "--json").json["rows"]
    areas = {m["value"] for row in rows for m in row["metrics"] if m["name"] == "auroc" and m["score"] == "combined"}
    assert (len(rows), len(areas)) == (2, 1)
    assert cli("evaluate", run, "--bootstrap", 0, "--assert", f"map.auroc:far>={min(areas) - 1e-6}").code == 0


def test_what_was_fitted_is_kept_for_the_same_features_and_never_missed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small(cli, tmp_path, has_val=True)
    folder, words = tmp_path / "small.bnn", ("predict", run, "--posterior", "map", "--force")
    kept, stored = folder / "features/.combined.npz", folder / "predictions/map.plug-in/far.h5"

    def digest(*also: object) -> str:
        assert cli(*words, *also).code == 0
        return read_header(stored).content_digest

    expected = digest()
    assert not kept.exists()  # so few features take no time
    monkeypatch.setattr(predictor, "KEPT_FROM", 1)
    assert digest() == expected
    with np.load(kept) as archive:
        arrays = dict(archive)
    assert digest() == expected
    np.savez(kept, **arrays | {"knots.knn": arrays["knots.knn"] - 1})
    assert digest() != expected  # it is what is used
    digest("--seed", 1)
    assert digest() == expected  # that of another seed is not
    for damaged in (b"", kept.read_bytes()[:-40]):
        kept.write_bytes(damaged)
        assert digest() == expected
    new_run(
        cli, run, make_arrays() | {"features_train": make_arrays()["features_train"] + 1}, "--ood", "far", "--force"
    )
    assert digest() != expected


def test_risk_coverage_stays_with_the_largest_probability(cli: Cli, tmp_path: Path) -> None:
    run = small(cli, tmp_path, has_val=True)
    done = cli("evaluate", run, "--split", "test", "--bootstrap", 0, "--metric", "aurc", "--metric", "auroc", "--json")
    scores = {(m["name"], m["score"]) for row in done.json["rows"] for m in row["metrics"]}
    assert scores == {("aurc", "max_prob"), ("auroc", "combined")}
    shown = cli("evaluate", run, "--split", "test", "--bootstrap", 0, "--metric", "aurc", "--metric", "auroc").stdout
    assert [title.strip() for title in shown.splitlines()[0].split("|")[4:]] == ["AURC", "AUROC far"]


def test_outliers_of_a_table_are_those_of_the_stored_score(cli: Cli, tmp_path: Path) -> None:
    run = small(cli, tmp_path, has_val=True)
    assert cli("calibrate", run, "--posterior", "laplace", "--split", "test", "--false-alarm", 0.1).code == 0
    decision = read_decision(tmp_path / "small.bnn/decisions/laplace.mc/ood.safetensors")
    assert decision.header.meta["settings"]["score"] == "combined"
    assert isinstance(decision.rule, OutlierRule)
    words = ("--posterior", "laplace", "--samples", 50, "--split", "far", "--table", tmp_path / "far.npz")
    assert cli("predict", run, *words).code == 0
    combined = read_predictions(tmp_path / "small.bnn/predictions/laplace.mc/far.h5").combined
    assert combined is not None
    with np.load(tmp_path / "far.npz") as table:
        assert table["ood"].astype(bool).tolist() == (np.asarray(combined) < decision.rule.threshold).tolist()


def test_without_val_what_stands_in_is_said_by_every_command(cli: Cli, tmp_path: Path) -> None:
    run = small(cli, tmp_path, has_val=False)
    folder = tmp_path / "small.bnn"
    assert read_predictions(folder / "predictions/laplace.mc/far.h5").combined is None
    done = cli("evaluate", run, "--split", "test")
    assert (
        "detection by max_prob: some predictions lack the combined score; it needs the splits train and val"
        in done.stderr
    )
    done = cli("evaluate", run, "--split", "test", "--posterior", "laplace")
    assert (done.code, "detection by mutual_info" in done.stdout) == (0, True)
    for posterior, maker, score in (("laplace", "laplace.mc", "mutual_info"), ("map", "map.plug-in", "max_prob")):
        done = cli("calibrate", run, "--posterior", posterior, "--split", "test", "--false-alarm", 0.1)
        assert f"using the {score} score, because its predictions lack the combined score" in done.stderr
        rule = read_decision(folder / "decisions" / maker / "ood.safetensors")
        assert rule.header.meta["settings"]["score"] == score
        inside, outside = (folder / "predictions" / maker / f"{split}.h5" for split in ("test", "far"))
        assert f"detection by {score}" in cli("score", inside, "--ood", outside).stdout
        assert cli("export", run, "--posterior", posterior, *HEAD).code == 0
        assert read_header(folder / "exports" / f"{maker}.safetensors").meta["score"] == score
    refused = cli("export", run, "--posterior", "laplace", *HEAD, "--score", "combined", "--force")
    assert (refused.code, "needs the features of splits train and val" in refused.stderr) == (2, True)


def test_a_damaged_split_of_the_score_is_told(cli: Cli, tmp_path: Path) -> None:
    run = small(cli, tmp_path, has_val=True)
    path = tmp_path / "small.bnn/features/train.h5"
    path.write_bytes(path.read_bytes()[:1000])
    done = cli("predict", run, "--posterior", "map", "--split", "test", "--force")
    assert (done.code, "no combined score: " in done.stderr) == (0, True), done.stderr


def test_older_predictions_are_scored_as_they_are_until_predict_makes_them_anew(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(revisions, "of_predict", lambda *_: 2)
        older.setattr(TrainData, "detector_splits", [])
        run = small(cli, tmp_path, has_val=True)
    path = tmp_path / "small.bnn/predictions/laplace.mc/test.h5"
    assert (read_header(path).provenance["algo_rev"], read_predictions(path).combined) == (2, None)
    done = cli("evaluate", run, "--split", "test")
    assert (done.code, "detection by max_prob" in done.stdout) == (0, True)
    assert cli("predict", run, "--samples", 50, "--json").json["action"] == "replaced"
    assert read_predictions(path).combined is not None
    assert "detection by combined" in cli("evaluate", run, "--split", "test").stdout


def test_what_was_scored_by_another_default_is_scored_anew_and_what_was_named_is_kept(cli: Cli, tmp_path: Path) -> None:
    run = small(cli, tmp_path, has_val=False)
    assert cli("evaluate", run).code == 0
    new_run(cli, run, make_arrays(), "--ood", "far", "--force")  # now with val
    assert cli("fit-laplace", run, "--prior-precision", 1).code == 0
    assert cli("predict", run, "--samples", 50).code == 0
    done = cli("evaluate", run)
    assert (done.code, "detection now uses combined by default" in done.stderr) == (0, True)
    assert cli("evaluate", run, "--score", "all", "--force").code == 0
    refused = cli("evaluate", run)
    assert (refused.code, "with other options (score" in refused.stderr) == (73, True)
