"""What fits say at their end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_all
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_decision
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.refine import format_summary
from bnncli.evaluation.decisions import OutlierRule
from bnncli.evaluation.feature_scores import FittedViews
from bnncli.parameters.layouts import HeadLayout
from bnncli.session import predictor, revisions
from bnncli.session.inputs import open_posterior
from bnncli.session.predictor import TrainData


def refined(**changes: Any) -> dict[str, Any]:
    """Metrics of a refinement that helped and is still far from the target."""
    estimate = {"value": -1.0, "standard_error": 0.1}
    return {
        "elbo_before": estimate,
        "elbo_after": estimate,
        "elbo_gain": estimate,
        "elbo_draws": 8,
        "log_weight_sd_before": 30.0,
        "log_weight_sd_after": 20.0,
        "verdict": "helped",
        "ended_early": False,
        "epochs": 20,
        "epochs_run": 20,
        "flow": "radial",
        "settings": {},
    } | changes


@pytest.mark.parametrize("verdict", ["helped", "negligible"])
@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "try --flow affine, or hmc"),
        ({"flow": "affine", "settings": {"scale": "kron"}}, "try --scale block, a longer --length, or hmc"),
        ({"flow": "affine", "settings": {"scale": "block"}}, "try more --epochs, or hmc"),
    ],
)
def test_poor_refinement_advises_a_better_flow(verdict: str, changes: dict[str, Any], advice: str) -> None:
    assert format_summary(refined(verdict=verdict, **changes))[-1].endswith(advice)


def test_a_gain_that_draws_do_not_tell_is_no_difference_to_speak_of() -> None:
    gain = {"value": 18.25, "standard_error": 7.68}
    line = format_summary(refined(verdict="undecided", elbo_gain=gain, elbo_draws=4096))[-1]
    assert line.startswith("undecided after 4096 draws: the gain is between -4.80 and +41.30 nats")
    assert line.endswith("try --flow affine, or hmc; or use more --elbo-draws")
    assert not any("no difference" in line for line in format_summary(refined(verdict="undecided")))


def test_a_refinement_that_predicts_worse_than_its_base_is_not_called_a_help() -> None:
    excess = {"base": {"value": 0.1, "is_worse": True}, "network": {"value": -0.1, "is_worse": False}}
    (line,) = [line for line in format_summary(refined(val_excess=excess)) if "closer to the target" in line]
    assert "helped" not in line
    assert "but predicts val worse than its base" in line
    assert "network" not in line
    assert "--prior-precision" not in line
    assert "not the approximation" not in line  # log importance weights of standard deviation 20: it may well be
    (close,) = [
        line for line in format_summary(refined(val_excess=excess, log_weight_sd_after=1.0)) if "closer" in line
    ]
    assert close.endswith("the model and its prior cause this, not the approximation")
    of_network = format_summary(refined(val_excess=excess, over_layers="all"))
    assert any("--prior-precision that the network was trained with" in line for line in of_network)


def write(folder: Path, num_classes: int) -> None:
    rows = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    labels = np.arange(30) % num_classes
    np.savez(folder / "data.npz", x=rows, y=labels)
    np.savez(folder / "features.npz", features_train=rows, labels_train=labels)


every_source = pytest.mark.parametrize(
    "words",
    [("--model", "flatten", "--data", "train=npz:data.npz"), ("--from-npz", "features.npz")],
    ids=lambda words: words[0],
)


@every_source
def test_a_binary_task_without_a_network_has_one_logit(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 2)
    cli("extract-features", "run", *words, "--task", "binary").expect(0)
    cli("fit-laplace", "run", "--prior-precision", 1).expect(0)
    posterior, _ = open_posterior(tmp_path / "run.bnn/posteriors/laplace.safetensors")
    assert (posterior.layout.num_outputs, posterior.layout.num_params) == (1, 4)
    cli("predict", "run", "--split", "train").expect(0)
    assert read_predictions(tmp_path / "run.bnn/predictions/laplace.mc/train.h5").probs.shape == (30, 2)


@every_source
def test_a_binary_task_refuses_labels_of_three_classes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 3)
    cli("extract-features", "run", *words, "--task", "binary").expect(
        2, "--task binary: expected labels 0 and 1; got 3 classes"
    )


HEAD = ("--head-only", "--format", "torch")


def small(cli: Cli, folder: Path, *, has_val: bool) -> Path:
    arrays = {name: one for name, one in make_arrays().items() if has_val or not name.endswith("_val")}
    run = new_run(cli, folder / "small", arrays, "--ood", "far")
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("predict", run, "--samples", 50).expect(0)
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `small` makes with val."""
    folder = tmp_path_factory.mktemp("scored")
    np.savez(folder / "small.npz", **make_arrays())  # type: ignore[arg-type]
    run = folder / "small"
    run_all(
        ("extract-features", run, "--from-npz", folder / "small.npz", "--ood", "far"),
        ("fit-laplace", run, "--prior-precision", 1),
        ("predict", run, "--samples", 50),
    )
    return folder


@pytest.fixture
def with_val(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "small"


def test_predictions_have_the_combined_score_of_features(cli: Cli, with_val: Path, tmp_path: Path) -> None:
    arrays = {name: torch.from_numpy(one) for name, one in make_arrays().items()}
    layout = HeadLayout(3, 5)
    expected = FittedViews.fit(
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
    rows = cli("evaluate", with_val, "--split", "test", "--bootstrap", 0, "--json").json["rows"]
    areas = {m["value"] for row in rows for m in row["metrics"] if m["name"] == "auroc" and m["score"] == "combined"}
    assert (len(rows), len(areas)) == (2, 1)
    cli("evaluate", with_val, "--bootstrap", 0, "--assert", f"map.auroc:far>={min(areas) - 1e-6}").expect(0)


def test_fitted_score_is_cached(cli: Cli, with_val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, words = tmp_path / "small.bnn", ("predict", with_val, "--posterior", "map", "--force")
    kept, stored = folder / "features/.combined.npz", folder / "predictions/map.plug-in/far.h5"

    def digest(*also: object) -> str:
        cli(*words, *also).expect(0)
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
        cli,
        with_val,
        make_arrays() | {"features_train": make_arrays()["features_train"] + 1},
        "--ood",
        "far",
        "--force",
    )
    assert digest() != expected


def test_risk_coverage_stays_with_the_largest_probability(cli: Cli, with_val: Path, tmp_path: Path) -> None:
    done = cli(
        "evaluate", with_val, "--split", "test", "--bootstrap", 0, "--metric", "aurc", "--metric", "auroc", "--json"
    )
    scores = {(m["name"], m["score"]) for row in done.json["rows"] for m in row["metrics"]}
    assert scores == {("aurc", "max_prob"), ("auroc", "combined")}
    shown = cli(
        "evaluate", with_val, "--split", "test", "--bootstrap", 0, "--metric", "aurc", "--metric", "auroc"
    ).stdout
    assert [title.strip() for title in shown.splitlines()[0].split("|")[4:]] == ["AURC", "AUROC far"]


def test_outliers_of_a_table_are_those_of_the_stored_score(cli: Cli, with_val: Path, tmp_path: Path) -> None:
    cli("calibrate", with_val, "--posterior", "laplace", "--split", "test", "--false-alarm", 0.1).expect(0)
    decision = read_decision(tmp_path / "small.bnn/decisions/laplace.mc/ood.safetensors")
    assert decision.header.meta["settings"]["score"] == "combined"
    assert isinstance(decision.rule, OutlierRule)
    words = ("--posterior", "laplace", "--samples", 50, "--split", "far", "--table", tmp_path / "far.npz")
    cli("predict", with_val, *words).expect(0)
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
        cli("export", run, "--posterior", posterior, *HEAD).expect(0)
        assert read_header(folder / "exports" / f"{maker}.safetensors").meta["score"] == score
    cli("export", run, "--posterior", "laplace", *HEAD, "--score", "combined", "--force").expect(
        2, "needs the features of splits train and val"
    )


def test_a_damaged_split_of_the_score_is_told(cli: Cli, with_val: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.bnn/features/train.h5"
    path.write_bytes(path.read_bytes()[:1000])
    cli("predict", with_val, "--posterior", "map", "--split", "test", "--force").expect(0, "no combined score: ")


def test_older_predictions_without_combined_scores(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    cli("evaluate", run).expect(0)
    new_run(cli, run, make_arrays(), "--ood", "far", "--force")  # now with val
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("predict", run, "--samples", 50).expect(0)
    cli("evaluate", run).expect(0, "detection now uses combined by default")
    cli("evaluate", run, "--score", "all", "--force").expect(0)
    cli("evaluate", run).expect(73, "with other options (score")
