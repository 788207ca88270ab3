"""The whole pipeline on a third of the embedded case, as the demo runs it: the numbers a user came for."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.pages import check_is_self_contained, read_page

from bnncli.artifacts.files import read_header
from bnncli.cli.execute import run_command_line
from bnncli.commands import demo as demo_stage
from bnncli.commands.demo import fixture_path

pytestmark = pytest.mark.long  # in `.ci/run`

NUM_TRAIN = 3000


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The demo's folder and its JSON result, on few of its training examples."""
    folder = tmp_path_factory.mktemp("demo")
    with np.load(fixture_path("train.npz")) as file:
        np.savez(folder / "train.npz", **{name: part[:NUM_TRAIN] for name, part in file.items()})
    places = {"train.npz": folder / "train.npz"}
    results = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_stage, "fixture_path", lambda name: places.get(name) or fixture_path(name))
        assert run_command_line(["demo", "--dir", str(folder / "bnncli-demo"), "--json", "-q"], results) == 0
        yield folder / "bnncli-demo", json.loads(results.getvalue())


def value(result: dict[str, Any], posterior: str, name: str, **choices: str) -> float:
    """One score on the test split."""
    (row,) = [row for row in result["rows"] if row["posterior"] == posterior and row["split"] == "test"]
    wanted = {"name": name, **choices}
    (metric,) = [metric for metric in row["metrics"] if wanted.items() <= metric.items()]
    return metric["value"]


@pytest.mark.parametrize("posterior", ["laplace", "refine", "hmc"])
def test_posteriors_are_better_calibrated_than_the_network(demo: tuple[Path, dict[str, Any]], posterior: str) -> None:
    result = demo[1]
    width = {"strategy": "equal-width"}
    for name, choices, least_gain in (("nll", {}, 0.2), ("ece", width, 0.04), ("brier", {}, 0.01)):
        assert value(result, posterior, name, **choices) < value(result, "map", name, **choices) - least_gain
    assert (
        value(result, posterior, "auroc", ood="mnist") == value(result, "map", "auroc", ood="mnist") > 0.98
    )  # of the features


@pytest.mark.parametrize("posterior", ["laplace", "refine"])
def test_posteriors_are_as_close_to_hmc_as_hmc_is_to_itself(demo: tuple[Path, dict[str, Any]], posterior: str) -> None:
    # 600 draws a side: the biased estimate of equal distributions is 2/600 (1 - mean kernel), about 0.0021
    assert value(demo[1], posterior, "mmd2", estimator="biased") < 0.004
    assert abs(value(demo[1], posterior, "mmd2", estimator="unbiased")) < 0.002
    assert value(demo[1], "map", "mmd2", estimator="biased") > 1.0


def test_the_default_chains_converge(demo: tuple[Path, dict[str, Any]]) -> None:
    import h5py

    with h5py.File(demo[0] / "lenet5-fmnist.pt.bnn/posteriors/hmc.nc") as file:
        metrics = json.loads(file["meta"][()])["metrics"]
    assert metrics["max_rhat"] <= 1.05
    assert metrics["divergences"] == 0
    assert min(metrics["min_ess_bulk"], metrics["min_ess_tail"]) > 400


def test_every_step_is_recorded_with_the_options_that_it_ran_with(demo: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = demo[0] / "lenet5-fmnist.pt"
    folder = checkpoint.with_name(f"{checkpoint.name}.bnn")
    provenance = read_header(folder / "posteriors/refine.safetensors").provenance
    assert provenance["command"] == ["bnncli", "refine", str(checkpoint)]
    assert (provenance["params"]["flow"], provenance["params"]["epochs"]) == ("affine", 600)
    words = read_header(folder / "features/test.h5").provenance["command"]
    assert words[3:7] == ["--model", "lenet5", "--data", f"train=npz:{demo[0]}/train.npz"]


def test_the_demo_again_has_nothing_to_do(demo: tuple[Path, dict[str, Any]]) -> None:
    results = io.StringIO()
    assert run_command_line(["demo", "--dir", str(demo[0]), "--json", "-q"], results) == 0
    again = json.loads(results.getvalue())
    assert again["action"] == "up_to_date"
    assert again["rows"] == demo[1]["rows"]


def test_it_ends_by_writing_a_report_and_says_where(demo: tuple[Path, dict[str, Any]]) -> None:
    report = demo[0] / "lenet5-fmnist.pt.bnn" / "report.html"
    assert {"role": "report", "path": str(report)}.items() <= demo[1]["outputs"][-1].items()
    page = read_page(report)
    check_is_self_contained(page, report.read_text())
    assert len(page.one("inputs").all("img")) == 24
