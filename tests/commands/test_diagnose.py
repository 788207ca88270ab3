"""diagnose, as people and scripts see it: numbers with reasons, exit codes, and nothing written."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from forged import forge
from problems.command_line import Cli

pytestmark = pytest.mark.gpu

NUMBERS = {
    "elbo", "log_weight_sd", "pareto_k", "log_evidence", "r_hat", "ess_bulk", "ess_tail", "bfmi", "divergences",
    "lowest_chain_acceptance", "val_nll",
}  # fmt: skip


def folder_of(run: Path) -> Path:
    return run.with_name("small.bnn")


def keep_only(run: Path, *names: str) -> None:
    for path in (folder_of(run) / "posteriors").iterdir():
        if path.stem not in names:
            path.unlink()


@pytest.fixture(scope="module")
def diagnosed(finished_run: Path) -> dict[str, Any]:
    """What diagnose says of the finished run, as JSON; asked once."""
    from bnncli.cli.execute import run_command_line

    stdout = io.StringIO()
    assert run_command_line(["diagnose", str(finished_run), "--json"], stdout) == 0
    document: dict[str, Any] = json.loads(stdout.getvalue())
    return document


def test_every_number_has_a_value_or_a_reason(diagnosed: dict[str, Any]) -> None:
    assert (diagnosed["ok"], list(diagnosed["posteriors"])) == (True, ["map", "laplace", "refine", "hmc"])
    for name, entry in diagnosed["posteriors"].items():
        assert set(entry) >= NUMBERS
        for key in NUMBERS:
            assert entry[key]["value"] is not None or len(entry[key]["reason"]) > 5, (name, key)
        is_density = name in ("laplace", "refine")
        assert (entry["elbo"]["value"] is not None) == (entry["log_weight_sd"]["value"] is not None) == is_density
        assert (entry["r_hat"]["value"] is not None) == (name == "hmc")
        assert entry["val_nll"]["standard_error"] > 0
    assert diagnosed["posteriors"]["laplace"]["prior_precision"] == 10.0
    assert {"sentence", "use", "is_good", "run"} <= set(diagnosed["verdict"])


def test_numbers_are_those_of_the_artifacts(cli: Cli, diagnosed: dict[str, Any], finished_run: Path) -> None:
    posteriors = diagnosed["posteriors"]
    stored = cli("inspect", folder_of(finished_run) / "posteriors/refine.safetensors", "--json").json["meta"]["metrics"]
    for name, key in (("laplace", "elbo_before"), ("refine", "elbo_after")):
        error = np.hypot(stored[key]["standard_error"], posteriors[name]["elbo"]["standard_error"])
        assert abs(posteriors[name]["elbo"]["value"] - stored[key]["value"]) < 4 * error
    chains = cli("inspect", folder_of(finished_run) / "posteriors/hmc.nc", "--json").json["meta"]["metrics"]
    assert posteriors["hmc"]["r_hat"]["value"] == chains["max_rhat"]
    assert posteriors["hmc"]["lowest_chain_acceptance"]["value"] == pytest.approx(chains["lowest_chain_acceptance"])
    fit = cli("inspect", folder_of(finished_run) / "posteriors/laplace.safetensors", "--json").json["meta"]["metrics"]
    assert posteriors["laplace"]["log_evidence"]["laplace"] == fit["log_marginal_likelihood"]
    assert posteriors["laplace"]["log_evidence"]["value"] >= posteriors["laplace"]["elbo"]["value"]
    assert posteriors["laplace"]["val_nll"]["value"] == pytest.approx(fit["val_nll_laplace"], abs=0.01)
    assert posteriors["map"]["val_nll"]["value"] == pytest.approx(fit["val_nll_network"], abs=1e-6)


def test_the_error_of_an_excess_on_val_is_paired(cli: Cli, small_run: Path) -> None:
    entries = cli("diagnose", small_run, "--posterior", "map", "--posterior", "laplace", "--json").json["posteriors"]
    worse = max(("map", "laplace"), key=lambda name: entries[name]["val_nll"]["value"])
    better = "laplace" if worse == "map" else "map"
    cli("predict", small_run, "--posterior", "map", "--posterior", "laplace", "--split", "val", "--samples", "200")
    losses = {}
    for name, integrator in (("map", "plug-in"), ("laplace", "mc")):
        with h5py.File(folder_of(small_run) / f"predictions/{name}.{integrator}/val.h5") as file:
            labels = file["labels"][:]
            losses[name] = -np.log(file["probs"][:][np.arange(len(labels)), labels])
    gap = losses[worse] - losses[better]
    paired = gap.std(ddof=1) / len(gap) ** 0.5
    unpaired = np.hypot(*(losses[name].std(ddof=1) for name in losses)) / len(gap) ** 0.5
    found = entries[worse]["val_nll"]
    assert entries[better]["val_nll"]["excess"] == 0
    assert found["excess_standard_error"] == pytest.approx(float(paired), rel=0.1)  # laplace with other draws
    assert abs(unpaired / paired - 1) > 0.3
    assert found["excess"] == pytest.approx(float(gap.mean()), abs=0.2 * float(paired))


def test_what_was_tuned_on_val_is_said_to_be(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", "val", "--name", "tuned")
    cli("fit-temperature", small_run)
    words = [w for name in ("laplace", "temperature", "tuned", "map") for w in ("--posterior", name)]
    done = cli("diagnose", small_run, *words, "--json")
    seen = {name: entry["val_nll"]["tuned_on_val"] for name, entry in done.json["posteriors"].items()}
    assert {name for name in seen if seen[name]} == {"tuned", "temperature"}
    text = cli("diagnose", small_run, *words).stdout
    assert "; * tuned on val" in text
    starred = {line.split("|")[0].strip() for line in text.splitlines() if re.search(r" \+- [0-9.]+\* +\|", line)}
    assert starred == {"tuned", "temperature"}
    assert "tuned on" not in cli("diagnose", small_run, "--posterior", "laplace").stdout


def test_pairs_have_distances_with_p_values(diagnosed: dict[str, Any]) -> None:
    pairs = {tuple(pair["posteriors"]): pair for pair in diagnosed["pairs"]}
    assert len(pairs) == 6
    assert all(pair["bandwidth_of"] == "hmc" for pair in pairs.values())
    far, near = pairs["map", "laplace"], pairs["laplace", "refine"]
    assert (far["p_value"], far["is_same_target"]) == (0.001, False)
    assert (near["p_value"] > 0.001, near["is_same_target"]) == (True, True)
    assert near["unbiased"] < 0.01 < far["unbiased"]
    assert near["n"] == [600, 600]


def test_chains_are_compared_as_blocks(cli: Cli, diagnosed: dict[str, Any], finished_run: Path) -> None:
    pair = next(pair for pair in diagnosed["pairs"] if pair["posteriors"] == ["laplace", "hmc"])
    assert (pair["n"], pair["blocks"]) == ([600, 128], 8)
    assert pair["p_value"] >= 0.001
    assert pair["standard_error"] > 0
    point = next(pair for pair in diagnosed["pairs"] if set(pair["posteriors"]) == {"map", "hmc"})
    assert point["p_value"] == pytest.approx(2**-7, abs=0.01)  # all draws of hmc on one side, or all exchanged
    words = ("--posterior", "laplace", "--posterior", "hmc")
    assert "+- standard error" in cli("diagnose", finished_run, *words).stdout


def test_only_good_draws_are_a_reference(cli: Cli, diagnosed: dict[str, Any], small_run: Path) -> None:
    assert diagnosed["posteriors"]["hmc"]["doubts"] != []
    assert diagnosed["verdict"]["use"] == "laplace"
    assert "MMD^2" not in diagnosed["verdict"]["sentence"]
    words = ("hmc", small_run, "--chains", 16, "--warmup", 30, "--draws", 150, "--name", "long")
    cli(*words).expect(0)
    sentence = cli("diagnose", small_run, "--json").json["verdict"]["sentence"]
    assert "MMD^2 to long" in sentence


def test_posteriors_do_not_share_their_draws(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", 10, "--name", "twin").expect(0)
    keep_only(small_run, "laplace", "twin")
    pair = cli("diagnose", small_run, "--json").json["pairs"][0]
    assert pair["biased"] == pytest.approx(2 / 600 * (1 - np.exp(-1)), rel=0.3)  # its floor; 0 for the same draws
    assert pair["p_value"] > 0.001


@pytest.mark.sure_scores
def test_diagnose_writes_nothing(cli: Cli, diagnosed: dict[str, Any], finished_run: Path, small_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder_of(small_run).rglob("*")}
    again = cli("diagnose", small_run, "--json").json
    other = cli("diagnose", small_run, "--posterior", "laplace", "--json", "--seed", 7).json
    assert {path: path.stat().st_mtime_ns for path in folder_of(small_run).rglob("*")} == before
    assert all(diagnosed[key] == again[key] for key in ("posteriors", "pairs"))
    assert diagnosed["verdict"] == json.loads(json.dumps(again["verdict"]).replace(str(small_run), str(finished_run)))
    assert diagnosed["posteriors"]["laplace"]["elbo"] != other["posteriors"]["laplace"]["elbo"]


@pytest.mark.long
def test_the_recommendation_of_auto_is_quoted(cli: Cli, small_run: Path) -> None:
    sentence = cli("auto", small_run, "--json").json["metrics"]["sentence"]
    verdict = cli("diagnose", small_run, "--json").json["verdict"]
    assert verdict["predict"]["by"] == "auto"
    assert verdict["sentence"].endswith(f"; {sentence}")
    noted = (
        " ".join(cli("compare", small_run, "--split", "test").stdout.split())
        if cli("predict", small_run).code == 0
        else ""
    )
    assert f"auto: {' '.join(sentence.split())}" in noted


def test_strict_is_3_when_nothing_is_good_and_prints_all_the_same(cli: Cli, small_run: Path) -> None:
    cli("diagnose", small_run, "--posterior", "laplace", "--strict").expect(0)
    done = cli("diagnose", small_run, "--posterior", "hmc", "--strict", "--json")  # 16 draws a chain are too few
    assert (done.code, done.json["exit"], done.json["error"]["code"]) == (3, 3, "no_good_posterior")
    assert done.json["posteriors"]["hmc"]["doubts"]
    assert "--draws 32" in done.json["verdict"]["run"]
    cli("diagnose", small_run, "--posterior", "hmc").expect(0)
    cli("diagnose", small_run, "--posterior", "map", "--strict").expect(3, "hint: bnncli fit-laplace")


def test_what_to_run_when_nothing_is_good_depends_on_what_is_there(cli: Cli, small_run: Path) -> None:
    for precision, name in ((10, "far"), (3, "other")):
        words = ("--center", "checkpoint", "--prior-precision", precision, "--name", name)
        cli("fit-laplace", small_run, *words).expect(0)

    def suggested(*names: str) -> str:
        words = [word for name in names for word in ("--posterior", name)]
        verdict = cli("diagnose", small_run, *words, "--json").json["verdict"]
        assert not verdict["is_good"]
        return str(verdict["run"])

    run = shlex.quote(str(small_run))
    assert suggested("far") == f"bnncli diagnose {run} --posterior far --posterior hmc"
    assert suggested("other") == f"bnncli hmc {run} --base other --prior-precision inherit --name hmc-other"
    assert (
        suggested("far", "hmc")
        == f"bnncli hmc {run} --base far --prior-precision inherit --warmup 16 --draws 32 --force"
    )
    (folder_of(small_run) / "posteriors/hmc.nc").unlink()
    assert suggested("far") == f"bnncli hmc {run} --base far --prior-precision inherit"


def test_hmc_is_run_beside_draws_of_stochastic_gradients_not_in_their_place(cli: Cli, small_run: Path) -> None:
    keep_only(small_run, "map", "laplace")
    chains = ("--prior-precision", 3, "--chains", 2, "--epochs", 40)
    cli("fit-sghmc", small_run, *chains, "--seed", 1).expect(0)

    def suggested() -> str:
        return str(cli("diagnose", small_run, "--posterior", "sghmc", "--json").json["verdict"]["run"])

    kept = (folder_of(small_run) / "posteriors/sghmc.nc").read_bytes()
    run = shlex.quote(str(small_run))
    assert suggested() == f"bnncli hmc {run} --prior-precision 3.0"
    cli(*shlex.split(suggested())[1:], "--chains", 4, "--warmup", 20, "--draws", 20).expect(0)
    assert suggested() == f"bnncli diagnose {run} --posterior sghmc --posterior hmc"
    assert (folder_of(small_run) / "posteriors/sghmc.nc").read_bytes() == kept
    words = ("--prior-precision", 5, "--chains", 4, "--warmup", 20, "--draws", 20, "--force")
    cli("hmc", small_run, *words).expect(0)
    assert suggested() == f"bnncli hmc {run} --prior-precision 3.0 --name hmc-sghmc"


def test_draws_are_as_many_as_asked_for(cli: Cli, small_run: Path) -> None:
    entry = cli("diagnose", small_run, "--posterior", "laplace", "--draws", 20, "--json").json["posteriors"]["laplace"]
    assert (entry["draws"], entry["elbo"]["value"] is not None) == (20, True)
    assert (entry["pareto_k"]["value"], entry["pareto_k"]["reason"]) == (None, "needs at least 25 draws, got 20")
    cli("diagnose", small_run, "--draws", 1).expect(2)


def test_each_posterior_is_measured_on_its_own_target(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", 40, "--name", "other").expect(0)
    words = ("--posterior", "laplace", "--posterior", "other")
    document = cli("diagnose", small_run, *words, "--json").json
    other = document["posteriors"]["other"]
    assert other["prior_precision"] == 40
    assert other["log_evidence"]["value"] == pytest.approx(other["log_evidence"]["laplace"], abs=0.5)
    assert abs(other["elbo"]["value"] - document["posteriors"]["laplace"]["elbo"]["value"]) > 5
    assert "at prior precision 10," in document["verdict"]["sentence"]


def test_diagnostics_that_are_not_stored_are_computed(cli: Cli, diagnosed: dict[str, Any], small_run: Path) -> None:
    path = folder_of(small_run) / "posteriors/hmc.nc"
    forge(path, lambda document: document["meta"].update(metrics={}))
    found = cli("diagnose", small_run, "--posterior", "hmc", "--allow-stale", "--json").json["posteriors"]["hmc"]
    for name in ("r_hat", "ess_bulk", "ess_tail", "bfmi", "divergences"):
        assert found[name]["value"] == pytest.approx(diagnosed["posteriors"]["hmc"][name]["value"]), name


def test_no_posteriors_or_no_training_features_is_66_with_the_command(cli: Cli, small_run: Path) -> None:
    keep_only(small_run)
    cli("diagnose", small_run).expect(66, f"hint: bnncli fit-laplace {small_run}")
    (folder_of(small_run) / "features/train.h5").unlink()
    cli("diagnose", small_run).expect(66, "hint: bnncli extract-features")
    cli("diagnose", small_run, "--posterior", "none").expect(66)


def test_stale_posteriors_are_skipped_unless_named(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", 9, "--force").expect(0)
    done = cli("diagnose", small_run, "--json")
    assert (done.code, list(done.json["posteriors"])) == (0, ["map", "laplace"])
    assert any("skipping refine" in warning for warning in done.json["warnings"])
    cli("diagnose", small_run, "--posterior", "refine").expect(65)
    done = cli("diagnose", small_run, "--posterior", "refine", "--allow-stale", "--json")
    assert (done.code, "--allow-stale" in done.json["warnings"][0]) == (0, True)
    keep_only(small_run, "refine")
    cli("diagnose", small_run).expect(65)
