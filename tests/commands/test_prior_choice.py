"""hmc and refine search for the prior precision of their own target on val, from the base's on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kills import kill_midway
from problems.arrays import make_arrays, make_wide_arrays
from problems.command_line import Cli, new_run

from bnncli.artifacts.files import read_header
from bnncli.artifacts.samples import read_samples
from bnncli.session.prior_choice import prior_line

HMC = ("hmc", "--chains", 8, "--warmup", 20, "--draws", 40)
REFINE = ("refine", "--epochs", 400, "--elbo-draws", 16)
SUFFIXES = {"hmc": ".nc", "refine": ".safetensors"}
pytestmark = pytest.mark.parametrize("command", [HMC, REFINE], ids=lambda words: words[0])


def make_run(cli: Cli, folder: Path, precision: float, *more: Any, arrays: dict[str, np.ndarray] | None = None) -> Path:
    run = new_run(cli, folder / "run", arrays or make_arrays())
    assert cli("fit-laplace", run, "--prior-precision", precision, *more).code == 0
    return run


def header(run: Path, name: str, command: tuple[Any, ...]) -> Any:
    return read_header(run.with_name("run.bnn") / "posteriors" / f"{name}{SUFFIXES[command[0]]}")


@pytest.mark.long
def test_a_precision_that_is_far_off_is_left_for_one_that_predicts_better(
    cli: Cli, tmp_path: Path, command: tuple[Any, ...]
) -> None:
    run = make_run(cli, tmp_path, 300)
    words = (command[0], run, *command[1:], "--json")
    found = cli(*words)
    assert found.code == 0, found.stderr
    metrics, meta = found.json["metrics"], header(run, command[0], command).meta
    assert metrics["prior_precision"] == meta["prior_precision"] < 100
    assert (metrics["prior_precision_by"], metrics["prior_precision_base"]) == ("val", 300)
    kept = cli(*words, "--prior-precision", "inherit", "--name", "kept").json["metrics"]
    assert kept["val"][command[0]]["nll"] > 1.05 * metrics["val"][command[0]]["nll"]
    nll = dict(metrics["prior_precision_curve"])
    assert nll[metrics["prior_precision"]] < nll[300]
    # Short runs tell what whole ones do.
    assert nll[300] == pytest.approx(kept["val"][command[0]]["nll"], rel=0.05)
    assert nll[metrics["prior_precision"]] == pytest.approx(metrics["val"][command[0]]["nll"], rel=0.05)
    assert prior_line(metrics)[0] in " ".join(found.stderr.split())
    again = cli(*words)
    assert again.json["action"] == "up_to_date"


@pytest.mark.long
def test_what_inherits_is_what_the_number_gives_and_the_search_changes_nothing_else(
    cli: Cli, tmp_path: Path, command: tuple[Any, ...]
) -> None:
    run = make_run(cli, tmp_path, 3)
    words = (command[0], run, *command[1:], "--json")
    found = cli(*words).json["metrics"]
    assert found["prior_precision"] == found["prior_precision_base"] == 3  # which is as good as its neighbours
    assert "no other precision predicts val significantly better" in prior_line(found)[0]
    kept = cli(*words, "--prior-precision", "inherit", "--name", "kept").json["metrics"]
    assert found["val"] == kept["val"]
    assert "prior_precision_by" not in kept
    given = cli(*words, "--prior-precision", 3, "--name", "given").json["metrics"]
    assert given["val"][command[0]]["nll"] == pytest.approx(kept["val"][command[0]]["nll"], abs=1e-3)
    if command is HMC:
        ours, theirs = (
            read_samples(run.with_name("run.bnn") / "posteriors" / f"{name}.nc").head_weight for name in ("hmc", "kept")
        )
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
def test_a_run_that_goes_on_does_not_search_again(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[Any, ...]
) -> None:
    run = make_run(cli, tmp_path, 300)
    whole = cli(command[0], run, *command[1:], "--name", "whole", "--json").json
    kill_midway(run, "cut", *command, saves=9)

    def climb(*given: object, **named: object) -> None:
        raise AssertionError("searched again")

    with monkeypatch.context() as patch:
        patch.setattr(f"bnncli.commands.{command[0]}.climb_prior", climb)
        done = cli(command[0], run, *command[1:], "--name", "cut", "--resume", "--json")
    assert "resuming" in done.stderr
    assert done.json["outputs"][0]["content_digest"] == whole["outputs"][0]["content_digest"]
    named = ("--prior-precision", repr(whole["metrics"]["prior_precision"]), "--name", "given", "--json")
    given = cli(command[0], run, *command[1:], *named).json["metrics"]
    assert given["val"] == whole["metrics"]["val"]  # the search leaves no trace in the run


def test_the_biases_follow(cli: Cli, tmp_path: Path, command: tuple[Any, ...]) -> None:
    run = make_run(cli, tmp_path, 300, "--bias-precision", 30)
    assert cli(command[0], run, *command[1:]).code == 0
    meta = header(run, command[0], command).meta
    assert meta["prior_precision"] < 100
    assert meta["bias_precision"] == pytest.approx(meta["prior_precision"] / 10)


def test_fewer_examples_than_features(cli: Cli, tmp_path: Path, command: tuple[Any, ...]) -> None:
    run = make_run(cli, tmp_path, 300, "--structure", "full", arrays=make_wide_arrays())
    done = cli(command[0], run, *command[1:], "--json")
    assert done.code == 0, done.stderr
    metrics = done.json["metrics"]
    nll = dict(metrics["prior_precision_curve"])
    assert metrics["prior_precision"] < 300
    assert nll[metrics["prior_precision"]] == pytest.approx(metrics["val"][command[0]]["nll"], rel=0.2)


@pytest.mark.parametrize(
    ("without", "more", "why"),
    [
        ("labels_val", {"hmc": (), "refine": ()}, "no labelled val split"),
        ("", {"hmc": ("--draws", 8), "refine": ("--epochs", 5)}, "too short to search"),
    ],
)
def test_where_nothing_tells_the_precision_is_the_bases(
    cli: Cli, tmp_path: Path, command: tuple[Any, ...], without: str, more: dict[str, Any], why: str
) -> None:
    arrays = {name: part for name, part in make_arrays().items() if name != without}
    run = make_run(cli, tmp_path, 300, arrays=arrays)
    done = cli(command[0], run, *command[1:], *more[command[0]], "--json")
    assert done.json["metrics"].get("prior_precision_by") is None
    assert "using the base's prior precision: " in done.stderr
    assert why in done.stderr
    assert header(run, command[0], command).meta["prior_precision"] == 300
    inherited = cli(command[0], run, *command[1:], *more[command[0]], "--prior-precision", "inherit", "--json")
    assert inherited.json["action"] == "up_to_date"  # it is the same request
