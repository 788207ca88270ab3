"""The scripts in benchmarks/, each in its quickest form on a tiny case, as a user runs them."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.long  # in `.ci/run`

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Report = Callable[..., dict[str, Any]]


def words_of(script: str, folder: Path, words: Sequence[object]) -> list[str]:
    common = ("--quick", "--device", "cpu", "--out", folder / "report.json")
    return [str(word) for word in (BENCHMARKS / script, *words, *common)]


def report_of(script: str, folder: Path, *words: object) -> dict[str, Any]:
    """What the script writes with --out."""
    command = [sys.executable, *words_of(script, folder, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    return json.loads((folder / "report.json").read_text())


@pytest.fixture
def report_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The same without the process that report_of starts and its imports."""

    def run(script: str, *words: object) -> dict[str, Any]:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", words_of(script, tmp_path, words))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return json.loads((tmp_path / "report.json").read_text())

    return run


@pytest.fixture
def tiny_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A train split of 400 synthetic examples."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from synthetic import write_split

    from bnncli.parameters.layouts import HeadLayout

    write_split(tmp_path / "train.h5", 400, HeadLayout(3, 6), seed=0)
    return tmp_path / "train.h5"


def test_engine_compares_every_job_and_says_how_far_the_floor_is(tiny_features: Path, report_here: Report) -> None:
    words = (tiny_features, "--prior-precision", 1, "--seconds-nuts", 0.2)
    report = report_here("engine.py", *words)
    assert report["problem"] == {"N": 400, "D": 6, "K": 3, "P": 21, "prior_precision": 1.0}
    jobs = {row["job"]: row for row in report["rows"]}
    assert {"fit-laplace", "refine, equal steps", "hmc", "hmc, same target"} <= set(jobs)
    for row in report["rows"]:
        assert 0 < row["floor_seconds"] < math.inf
        assert 0 < row["times_floor"] < math.inf
        compared = row["ratio"] is not None
        assert compared or (row["job"] == "fit-laplace" and report["laplace_torch"] != "used")
        assert not compared or row["ratio"] == pytest.approx(row["their_seconds"] / row["ours_seconds"])
        assert not compared or 0 < row["ratio"] < math.inf
    assert all(
        row["ratio_if_all_draws_counted"] > 0 and row["ratio_without_their_warmup"] > 0 for row in report["rows"][-2:]
    )
    # Equal plans on both sides: their flow, measured as ours, ends where ours does.
    equal = jobs["refine, equal steps"]
    assert equal["elbo"] == pytest.approx(equal["their_elbo"], abs=5)
    assert equal["elbo"] <= equal["elbo_at_mode"] + 1


@pytest.mark.nightly
def test_decisions_keep_their_word_until_the_data_shift(report_here: Report) -> None:
    fixtures = BENCHMARKS.parent / "fixtures"
    files = (
        "--train",
        fixtures / "train.npz",
        "--test",
        fixtures / "test.npz",
        "--ood",
        f"mnist={fixtures / 'mnist.npz'}",
    )
    report = report_here("decisions.py", fixtures / "lenet5-fmnist.pt", *files, "--held-out", 250, "--rotate", 45)
    for posterior in report["posteriors"]:
        divided = {row["rule"]: row for row in posterior["divisions"]}
        for name in ("lac", "aps", "raps"):
            assert abs(divided[name]["mean"] - divided[name]["expected"]) < 4 * divided[name]["standard_error"]
        assert divided["risk"]["exceeded"] <= 0.2  # of 20 divisions
        shifted = {row["split"]: row for row in posterior["shifts"]}
        assert shifted["rotated-45"]["lac"] < 0.5 < shifted["test"]["lac"]
        assert shifted["rotated-45"]["alarms"] == shifted["mnist"]["alarms"] == 1


def test_scaling_grows_each_axis_and_expects_what_the_work_says(tmp_path: Path, report_here: Report) -> None:
    words = ("--base", "300,8,4", "--doublings", 1, "--from", "disk", "--dir", tmp_path)
    report = report_here("scaling.py", *words)
    rows = report["rows"]
    assert {(row["axis"], row["job"]) for row in rows} == {
        (axis, job) for axis in "NDK" for job in ("gradient", "kron", "full", "mode", "hmc", "refine")
    }
    assert all(0 < row["seconds"] < math.inf and 0 < row["times_floor"] < math.inf for row in rows)
    grown = {(row["axis"], row["job"]): row["expected_growth"] for row in rows if row["growth"] is not None}
    assert len(grown) == len(report["summary"]) == 18
    assert all(row["expected_growth"] == grown[row["axis"], row["job"]] for row in report["summary"])
    assert grown["N", "full"] == pytest.approx(1)
    assert grown["N", "gradient"] == pytest.approx(1)
    assert grown["K", "gradient"] == pytest.approx(1)
    assert 1 < grown["D", "full"] < 2  # F = D + 1 is no exact double
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


def test_imagenet_goes_step_by_step_and_counts_what_each_reads(tmp_path: Path, report_here: Report) -> None:
    steps = ("extract-features", "fit-laplace kron", "fit-laplace diag")
    left = "fit-temperature,refine affine,hmc,predict closed forms,predict mc,evaluate"
    words = ("--imagenet", "0.0005,0.001", "--features", 32, "--held-out", 60, "--skip", left, "--dir", tmp_path)
    rows = report_here("scaling.py", *words)["rows"]
    assert [(row["fraction"], row["step"]) for row in rows] == [(f, step) for f in (0.0005, 0.001) for step in steps]
    assert rows[0]["sizes"] == [640, 60, 32, 2]
    for row in rows:
        assert 0 < row["floor"] < row["seconds"] < math.inf
        assert row["peak_bytes"] is None or 2**24 < row["peak_bytes"] < 2**33
    copied, kron, _ = rows[:3]
    assert copied["features_read"] == 2 * 32 * (640 + 120)
    assert kron["features_read"] >= 2 * 32 * 640 * kron["passes"] > 0
    assert all((row["growth"] is None) == (row["fraction"] == 0.0005) for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


def test_predict_times_every_integrator_and_says_how_far_it_is_off(report_here: Report) -> None:
    rows = report_here("predict.py")["rows"]
    for row in rows:
        assert 0 < row["seconds"] < math.inf
        assert 0 < row["mean_off"] <= row["largest_off"] < 1
    for what, reference in (("integrals", "logit-mc, 1000 draws"), ("end to end", "mc, 1000 draws")):
        for size in (3, 12):
            found = {row["integrator"]: row for row in rows if row["what"] == what and row["K"] == size}
            assert {"bridge", "probit", "mean-field", "mean-field-2", "logit-mc-qmc, 128 draws", reference} <= set(
                found
            )
            assert found[reference]["ratio"] == 1
            slow = found[reference]["seconds"]
            assert all(row["ratio"] == pytest.approx(slow / row["seconds"]) for row in found.values())
            # 4.5 standard deviations at most of a mean of 1,000 probabilities, each half at most.
            assert found[reference]["largest_off"] < 4.5 * 0.5 / math.sqrt(1000)
            assert row_of_loop(found)["largest_off"] < 4.5 * 0.5 / math.sqrt(1000)


@pytest.mark.parametrize("is_given", [False, True])
def test_lbbnn_times_every_estimator_beside_a_dense_network(
    tmp_path: Path, is_given: bool, report_here: Report
) -> None:
    words: tuple[object, ...] = ("--sizes", "6,5,3", "--batch-size", 4, "--examples", 42)
    if is_given:
        rng = np.random.default_rng(0)
        np.savez(tmp_path / "d.npz", features_train=rng.normal(size=(9, 6)), labels_train=rng.integers(0, 3, 9))
        report = report_here("lbbnn.py", *words, "--data", tmp_path / "d.npz")
    else:
        report = report_here("lbbnn.py", *words)
    assert report["data"] == ("given" if is_given else "synthetic")
    rows = {row["network"]: row for row in report["rows"]}
    assert list(rows) == ["dense", "lrt", "mnf", "concrete"]
    for row in rows.values():
        assert row["steps_timed"] == report["steps"] == 15
        assert 0 < row["quartiles"][0] <= row["seconds_per_step"] <= row["quartiles"][1]
        assert row["steps_per_epoch"] == 11
        assert row["seconds_per_epoch"] == pytest.approx(11 * row["seconds_per_step"])
        assert row["ratio_to_dense"] == pytest.approx(row["seconds_per_step"] / rows["dense"]["seconds_per_step"])
        assert row["published_seconds_per_epoch"] is None  # another case than the published one


def row_of_loop(found: dict[str, Any]) -> dict[str, Any]:
    """The published loop where it was run, else the draws that it is compared with."""
    return found.get("loop of the thesis, 1000 draws") or found.get("logit-mc, 1000 draws") or {}


def test_given_moments_are_those_of_the_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import torch
    from given_moments import GivenMoments

    from bnncli.parameters.layouts import HeadLayout
    from bnncli.parameters.prior import Prior
    from bnncli.posteriors.gaussian import Gaussian
    from bnncli.structures.kron import Kron

    layout, generator = HeadLayout(3, 4), torch.Generator().manual_seed(0)
    features = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    factors = {"hessian.kron.A": features.T @ features, "hessian.kron.B": features[:3] @ features[:3].T}
    factors["hessian.kron.A"] = torch.block_diag(factors["hessian.kron.A"], torch.ones(1, 1, dtype=torch.float64))
    posterior = Gaussian(
        torch.randn(layout.num_params, generator=generator, dtype=torch.float64),
        Kron.from_hessian(factors, Prior(0.5), layout), layout, Prior(0.5),
    )  # fmt: skip
    given = GivenMoments.of(posterior, features)
    for mine, theirs in zip(
        given.logit_moments(given.examples[2:5]), posterior.logit_moments(features[2:5]), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    for is_projected in (False, True):
        mine = given.logit_marginals(given.examples[2:5], is_projected=is_projected)
        torch.testing.assert_close(mine, posterior.logit_marginals(features[2:5], is_projected=is_projected))


def test_features_times_head_are_what_networks_return(report_here: Report) -> None:
    rows = report_here("heads.py")["rows"]
    assert len(rows) == 4
    assert all(row["difference"] <= row["tolerance"] < 1e-3 for row in rows)


def test_the_coverage_of_calibration_errors_is_reported_for_every_form(report_here: Report) -> None:
    rows = report_here("calibration.py")["rows"]
    assert len(rows) == 7
    for row in rows:
        assert row["trials"] == 20
        assert row["coverage"] + row["above"] + row["below"] == pytest.approx(1)
        assert row["coverage"] >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 20)


def test_calibration_maps_are_scored_beside_those_of_other_libraries(report_here: Report) -> None:
    rows = {row["name"].partition(",")[0]: row for row in report_here("calibration_maps.py")["forest"]}
    assert {"as trained", "isotonic", "scikit-learn isotonic", "scikit-learn sigmoid"} <= set(rows)
    assert rows["isotonic"]["nll"] < rows["as trained"]["nll"]
