"""merge: the chains of runs made apart are one posterior, judged anew; what does not belong together is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arviz_stats.base import array_stats
from conftest import run_all
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.artifacts.samples import SampleFile, read_samples, write_samples
from bnncli.evaluation.verdict import bfmi

HMC = ("--chains", 4, "--warmup", 10, "--draws", 20)
TWO = ("--posterior", "one", "--posterior", "two")


@pytest.fixture(scope="module")
def draws(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the draws `one` and `two`, of four chains each, of a copy of finished_run."""
    run = tmp_path_factory.mktemp("merge") / "small"
    shutil.copytree(finished_run.with_name("small.bnn"), run.with_name("small.bnn"))
    run_all(*(("hmc", run, *HMC, "--seed", seed, "--name", name) for seed, name in ((1, "one"), (2, "two"))))
    return run.with_name("small.bnn") / "posteriors"


@pytest.fixture
def run(draws: Path, small_run: Path) -> Path:
    """A run with these draws."""
    for name in ("one.nc", "two.nc"):
        shutil.copy(draws / name, small_run.with_name("small.bnn") / "posteriors")
    return small_run


def file_of(run: Path, name: str) -> Path:
    return run.with_name("small.bnn") / "posteriors" / f"{name}.nc"


def theta_of(content: SampleFile) -> np.ndarray:
    """(C, T, P)"""
    assert content.head_weight is not None
    parts = [part for part in (content.head_weight, content.head_bias) if part is not None]
    return np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=2).astype(np.float64)


def changed(run: Path, name: str, change: Callable[[SampleFile, dict[str, Any], dict[str, Any]], Any]) -> None:
    """The draws `two` under another name, after a change of content, meta or provenance."""
    content = read_samples(file_of(run, "two"))
    assert content.header is not None
    meta, provenance = dict(content.header.meta), dict(content.header.provenance)
    change(content, meta, provenance)
    texts: dict[str, Any] = {"outputs": meta["classes"], "created_at": "", "name": "x", "sampler_library": ("x", "1")}
    write_samples(file_of(run, name), content, **texts, meta=meta, provenance=provenance, may_replace=False)


def test_the_chains_stand_one_after_the_other_and_their_sources_are_told(cli: Cli, run: Path) -> None:
    cli("merge", run, *TWO, "--json").expect(0)
    merged, *parts = (read_samples(file_of(run, name)) for name in ("merged", "one", "two"))
    for name, values in merged.draws.items():
        assert np.array_equal(values, np.concatenate([part.draws[name] for part in parts]))
    for name, values in merged.stats.items():
        assert np.array_equal(values, np.concatenate([part.stats[name] for part in parts])), name
    header = merged.header
    assert header is not None
    headers = [part.header for part in parts if part.header is not None]
    recorded = {entry["role"]: entry["content_digest"] for entry in header.inputs}
    assert [recorded[f"draws.{number}"] for number in (1, 2)] == [one.content_digest for one in headers]
    assert [one["seeds"] for one in header.meta["joined"]] == [[1], [2]]
    passes = [one.meta["metrics"]["cost"]["gradient_passes"] for one in headers]
    assert header.meta["metrics"]["cost"] == {"gradient_passes": sum(passes), "through": "head"}
    assert cli("merge", run, *TWO, "--json").json["action"] == "up_to_date"


def test_convergence_is_that_of_all_chains_together(cli: Cli, run: Path) -> None:
    metrics = cli("merge", run, *TWO, "--json").json["metrics"]
    parts = [read_samples(file_of(run, name)) for name in ("one", "two")]
    theta = np.concatenate([theta_of(part) for part in parts])
    assert theta.shape[:2] == (metrics["chains"], metrics["draws"]) == (8, 20)
    columns = [theta[:, :, place] for place in range(theta.shape[2])]
    rhat = max(float(array_stats.rhat(column, method="rank")) for column in columns)
    bulk = min(float(array_stats.ess(column, method="bulk")) for column in columns)
    tail = min(float(array_stats.ess(column, method="tail", prob=(0.05, 0.95))) for column in columns)
    found = [metrics[name] for name in ("max_rhat", "min_ess_bulk", "min_ess_tail")]
    assert found == pytest.approx([rhat, bulk, tail], rel=1e-9)
    assert metrics["min_bfmi"] == pytest.approx(min(bfmi(part.stats["energy"]).min() for part in parts))
    assert metrics["acceptance_rate"] == pytest.approx(np.mean([part.stats["acceptance_rate"] for part in parts]))
    assert metrics["heldout_max_rhat"] is not None
    alone = [read_header(file_of(run, name)).meta["metrics"] for name in ("one", "two")]
    assert metrics["max_rhat"] not in [one["max_rhat"] for one in alone]


def test_chains_of_another_mode_are_told(cli: Cli, run: Path) -> None:
    def shift(content: SampleFile, meta: Any, provenance: Any) -> None:
        assert content.head_weight is not None
        content.head_weight[:] = content.head_weight + 3.0
        provenance["seed"] = 9

    changed(run, "far", shift)
    done = cli("merge", run, "--posterior", "one", "--posterior", "far", "--max-rhat", 1.01, "--json")
    assert (done.code, done.json["error"]["code"]) == (3, "max_rhat")
    assert done.json["metrics"]["max_rhat"] > 1.05
    assert "the chains do not agree" in done.stderr


def test_commands_take_merged_draws_as_any_other(cli: Cli, run: Path) -> None:
    cli("merge", run, *TWO).expect(0)
    cli("predict", run, "--posterior", "merged", "--split", "test").expect(0)
    cli("evaluate", run, "--posterior", "merged", "--bootstrap", 0).expect(0)
    cli("compare", run, "--posterior", "merged", "--posterior", "map", "--bootstrap", 100).expect(0)
    judged = cli("diagnose", run, "--posterior", "merged", "--json").json
    assert list(judged["posteriors"]) == ["merged"]
    assert "--force" not in judged["verdict"]["run"]  # which would replace what hmc has not made
    assert cli("status", run, "--json").json["artifacts"][-1]["state"] == "fresh"
    cli("sbc", run, "--posterior", "laplace", "--truth", "merged", "--simulations", 20, "--draws", 9).expect(0)
    assert "it merges several hmc fits" in cli("sbc", run, "--posterior", "merged", "--simulations", 20).stderr


def test_longer_chains_are_cut_to_the_shortest(cli: Cli, run: Path) -> None:
    cli("hmc", run, *HMC[:-1], 30, "--seed", 3, "--name", "long").expect(0)
    done = cli("merge", run, "--posterior", "long", "--posterior", "two")
    assert "cut to the shortest run, 20 draws per chain: long" in done.stderr
    merged, long = (read_samples(file_of(run, name)).head_weight for name in ("merged", "long"))
    assert merged is not None
    assert long is not None
    assert np.array_equal(merged[:4], long[:, :20])


def test_merged_draws_can_be_joined_with_more(cli: Cli, run: Path) -> None:
    cli("merge", run, *TWO).expect(0)
    cli("hmc", run, *HMC, "--seed", 3, "--name", "three").expect(0)
    done = cli("merge", run, "--posterior", "merged", "--posterior", "three", "--name", "all", "--json")
    assert done.json["metrics"]["chains"] == 12
    cli("merge", run, "--posterior", "merged", "--posterior", "one", "--name", "no").expect(65, "have the same seed 1")


def test_draws_of_a_copy_are_joined_and_may_go_afterwards(cli: Cli, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "two.nc"
    copy.parent.mkdir()
    shutil.move(file_of(run, "two"), copy)
    cli("merge", run, "--posterior", "one", "--posterior", copy).expect(0)
    copy.unlink()
    cli("predict", run, "--posterior", "merged", "--split", "test").expect(0)


def seeded(seed: int) -> Callable[..., None]:
    def change(content: Any, meta: Any, provenance: dict[str, Any]) -> None:
        provenance["seed"] = seed

    return change


def of_sampler(content: Any, meta: dict[str, Any], provenance: dict[str, Any]) -> None:
    meta["metrics"] = {**meta["metrics"], "sampler": "nuts"}


def of_classes(content: Any, meta: dict[str, Any], provenance: dict[str, Any]) -> None:
    meta["classes"] = ["a", "b", "c"]


def of_bias(content: Any, meta: dict[str, Any], provenance: dict[str, Any]) -> None:
    meta["bias_precision"] = 3.0


def of_features(content: Any, meta: Any, provenance: dict[str, Any]) -> None:
    """As those of a copy with other examples."""
    entries = [dict(entry) for entry in provenance["inputs"]]
    entries[0]["content_digest"] = "sha256:" + 64 * "0"
    provenance["inputs"] = entries


def of_checkpoint(content: Any, meta: Any, provenance: dict[str, Any]) -> None:
    digest = "sha256:" + 64 * "1"
    provenance["checkpoint"] = {"file_sha256": digest, "weights_digest": digest, "path": "x"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (seeded(1), "and .*one.nc have the same seed 1: these are the same chains"),
        (of_sampler, "has sampler nuts, but it is hmc in .*one.nc"),
        (of_classes, "has classes sha256:\\w+, but it is sha256:\\w+ in"),
        (of_bias, "has prior prior_precision 10.0 bias_precision 3.0, but it is prior_precision 10.0 in"),
        (of_features, "has features.train sha256:0{20}, but it is bnn-sha256/1:\\w+ of the run"),
        (of_checkpoint, "has checkpoint sha256:1{20}, but it is none of the run"),
    ],
)
def test_other_chains_are_refused_with_both_values(cli: Cli, run: Path, tmp_path: Path, change: Any, why: str) -> None:
    changed(run, "other", change)
    elsewhere = tmp_path / "other.nc"  # where none of its inputs lie
    shutil.move(file_of(run, "other"), elsewhere)
    done = cli("merge", run, "--posterior", "one", "--posterior", elsewhere).expect(65)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(why, lines[0]), lines[0]
    assert not file_of(run, "merged").exists()


def test_what_is_no_draws_of_hmc_is_refused(cli: Cli, run: Path) -> None:
    cli("merge", run, "--posterior", "one").expect(2)
    cli("merge", run, "--posterior", "one", "--posterior", file_of(run, "one")).expect(2, "one.nc is given twice")
    cli("merge", run, "--posterior", "one", "--posterior", "laplace").expect(65, "expected draws of hmc; got laplace")
    cli("merge", run, "--posterior", "one", "--posterior", "on").expect(66)
    cli("merge", run, *TWO, "--name", "one").expect(2, "is also an input")
