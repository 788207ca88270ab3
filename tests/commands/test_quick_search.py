"""Searches for a prior precision that take a part of the data or a rougher structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.arrays import make_arrays
from problems.command_line import Cli, new_run

from bnncli.artifacts.posteriors import read_posterior
from bnncli.commands.fit_laplace import last_layer as structure
from bnncli.inference import memory
from bnncli.inference import prior_search as prior_precision
from bnncli.inference import prior_search as search_rows
from bnncli.parameters.layouts import HeadLayout


def arrays() -> dict[str, np.ndarray]:
    """Features of three classes."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(3, 5))
    found = {"head_weight": (2 * weight).astype(np.float32), "head_bias": np.zeros(3, np.float32)}
    for split, count in (("train", 120), ("val", 300)):
        features = generator.normal(size=(count, 5)).astype(np.float32)
        found[f"features_{split}"] = features
        found[f"labels_{split}"] = (features @ weight.T + generator.gumbel(size=(count, 3))).argmax(axis=1)
    return found


def test_the_precision_of_a_dear_structure_is_that_of_a_quick_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    by_kron = cli("fit-laplace", run, "--structure", "kron", "--name", "kron", "--json").json["metrics"]
    by_full = cli("fit-laplace", run, "--structure", "full", "--name", "full", "--json").json["metrics"]
    assert "prior_precision_structure" not in by_full
    assert by_full["prior_precision"] != by_kron["prior_precision"]
    monkeypatch.setattr(memory, "automatic_structures", lambda layout, budget, **sizes: ["kron", "diag"])
    done = cli("fit-laplace", run, "--structure", "full", "--name", "quick", "--json")
    metrics = done.json["metrics"]
    assert (metrics["structure"], metrics["prior_precision_structure"]) == ("full", "kron")
    assert metrics["prior_precision"] == by_kron["prior_precision"]
    assert "searching for the prior precision with kron" in done.stderr
    given = cli("fit-laplace", run, "--prior-precision", by_kron["prior_precision"], "--structure", "full", "--json")
    assert metrics["log_marginal_likelihood"] == pytest.approx(
        given.json["metrics"]["log_marginal_likelihood"], abs=2e-3
    )


@pytest.mark.parametrize("center", ["mode", "checkpoint"])
def test_a_search_of_a_part_says_so_and_the_fit_is_of_all(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, center: str
) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    words = ("fit-laplace", run, "--structure", "full", "--center", center, "--json")
    whole = cli(*words, "--name", "whole").json["metrics"]
    assert "prior_precision_val_examples" not in whole
    monkeypatch.setattr(search_rows, "_MODE_WORK", {"cpu": 18 * 50})
    monkeypatch.setattr(search_rows, "_VAL_WORK", {"cpu": 18 * 128 * 100})
    monkeypatch.setattr(search_rows, "_LEAST_VAL", 10)
    done = cli(*words, "--name", "part")
    metrics = done.json["metrics"]
    assert metrics["prior_precision_val_examples"] == 100
    if center == "mode":
        assert metrics["prior_precision_train_examples"] == 50
        assert metrics["prior_precision"] != whole["prior_precision"]
        assert metrics["cost"]["gradient_passes"] % 1 != 0  # passes over a part count as that part
        assert "with 50 of 120 examples of train and 100 of 300 examples of val; the final fit uses all" in done.stderr
    else:  # one Hessian, that of all, serves the whole curve
        assert "prior_precision_train_examples" not in metrics
        assert "with 100 of 300 examples of val; the final fit uses all" in done.stderr
        assert metrics["prior_precision"] == whole["prior_precision"]
    given = cli(*words, "--prior-precision", metrics["prior_precision"], "--name", "given").json["metrics"]
    for name in ("log_marginal_likelihood", "val_nll_laplace"):
        assert metrics[name] == pytest.approx(given[name], abs=2e-3)


@pytest.mark.parametrize(
    ("num_outputs", "num_features", "num_examples", "num_draws", "structure"),
    [
        (20, 384, 10_000, 320, "full"),
        (20, 384, 10_000, 5, "block"),
        (10, 84, 60_000, 5, "full"),
        (100, 500, 50_000, 320, "kron"),
    ],
)
def test_chains_are_whitened_by_all_of_the_covariance_where_draws_cost_more(
    monkeypatch: pytest.MonkeyPatch,
    num_outputs: int,
    num_features: int,
    num_examples: int,
    num_draws: int,
    structure: str,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layout = HeadLayout(num_outputs, num_features)
    there = 200 << 30
    found = memory.whitening_structure(
        layout, there, device="cpu", num_examples=num_examples, num_chains=16, num_draws=num_draws
    )
    assert found == structure
    own = memory.automatic_structure(layout, 2 << 30, device="cpu")
    assert (
        memory.whitening_structure(layout, 2 << 30, device="cpu", num_examples=9, num_chains=16, num_draws=320) == own
    )


def test_a_search_by_all_examples_leaves_out_what_is_far_from_the_checkpoints_own(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    words = ("fit-laplace", run, "--structure", "kron", "--json")
    whole = cli(*words, "--name", "whole").json["metrics"]
    monkeypatch.setattr(search_rows, "_BRIEF_SHARE", 1e-9)
    done = cli(*words, "--name", "brief")
    assert "searching for the prior precision around the checkpoint's own" in done.stderr
    brief = done.json["metrics"]
    assert len(brief["prior_precision_curve"]) < len(whole["prior_precision_curve"])
    assert brief["val_nll_laplace"] == pytest.approx(whole["val_nll_laplace"], abs=2e-3)
    assert brief["cost"]["gradient_passes"] < whole["cost"]["gradient_passes"]
    assert "prior_precision_train_examples" not in brief


def test_folds_of_a_part_are_searched_and_their_modes_are_of_all(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", arrays())
    monkeypatch.setattr(search_rows, "_MODE_WORK", {"cpu": 18 * 150})
    monkeypatch.setattr(search_rows, "_VAL_WORK", {"cpu": 18 * 128 * 100})
    monkeypatch.setattr(search_rows, "_LEAST_VAL", 10)
    words = ("fit-laplace", run, "--structure", "full", "--fit-on", "train+val", "--prior-mean", "checkpoint")
    done = cli(*words, "--name", "part", "--json")
    metrics = done.json["metrics"]
    assert (metrics["prior_precision_train_examples"], metrics["prior_precision_val_examples"]) == (150, 100)
    assert "searching for the prior precision with 150 of 420 examples" in done.stderr
    assert cli(*words, "--name", "given", "--prior-precision", metrics["prior_precision"]).code == 0
    folder = run.with_name("run.bnn") / "posteriors"
    part, given = (read_posterior(folder / f"{name}.safetensors")[0] for name in ("part", "given"))
    assert torch.equal(part["folds.rows"], given["folds.rows"])
    for name in ("mean", "folds.theta"):
        torch.testing.assert_close(part[name], given[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "problem", [make_arrays(), make_arrays(seed=3, num_classes=5, num_features=20)], ids=["3", "5"]
)
def test_the_choice_is_that_of_a_search_by_the_closest_structure(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: dict[str, Any]
) -> None:
    run = new_run(cli, tmp_path / "run", problem)
    plain = cli("fit-laplace", run, "--json").json["metrics"]
    searched: list[tuple[str, int]] = []
    search = prior_precision.search

    def counted(*given: Any, **named: Any) -> Any:
        found = search(*given, **named)
        searched.append((named["structure"], len(found.curve)))
        return found

    monkeypatch.setattr(structure, "QUICK_SECONDS", 0.0)  # as if all searches were long
    monkeypatch.setattr(structure, "_DEARER", 0.0)
    monkeypatch.setattr("bnncli.commands.fit_laplace.last_layer.search", counted)
    found = cli("fit-laplace", run, "--name", "rough", "--json").json["metrics"]
    assert searched[0][0] != "full"
    assert found["structure"] == plain["structure"]
    assert found["prior_precision"] == pytest.approx(plain["prior_precision"], rel=0.1)
    assert found["val"]["laplace"]["nll"] == pytest.approx(plain["val"]["laplace"]["nll"], rel=1e-3)
    if found["structure"] == searched[0][0] or found["prior_precision_for"] == "plug-in":  # of which it says all
        assert len(searched) == 1
    else:  # around the rough one's, and not all over again
        assert [name for name, _ in searched[1:]] == [found["structure"]]
        assert searched[1][1] < len(plain["prior_precision_curve"])
