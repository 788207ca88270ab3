"""The real LeNet-5 on all of Fashion-MNIST against numbers measured elsewhere, in `.ci/run`; skipped where the data are absent."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bnncli.cli.execute import run_command_line

SHARED = Path(__file__).parents[2] / "shared"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.long,
    pytest.mark.skipif(not (SHARED / "data/fmnist-train.npz").is_file(), reason="the full-size data are not here"),
]


def run(*words: object) -> dict[str, Any]:
    results = io.StringIO()
    assert run_command_line([str(word) for word in (*words, "--json", "-q")], results) == 0
    return json.loads(results.getvalue())


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Test scores of map, the Gaussian at the mode, and the one at the checkpoint, prior precision 510."""
    checkpoint = tmp_path_factory.mktemp("lenet") / "lenet.pt"
    shutil.copy(SHARED / "checkpoints/lenet-fmnist-1.pt", checkpoint)
    data = [word for name in ("train", "test") for word in ("--data", f"{name}=npz:{SHARED}/data/fmnist-{name}.npz")]
    run("extract-features", checkpoint, "--model", "lenet5", *data, "--hold-out", "val=test:2000")
    run("fit-laplace", checkpoint, "--prior-precision", "510")
    run("fit-laplace", checkpoint, "--prior-precision", "510", "--center", "checkpoint", "--name", "at-checkpoint")
    run("predict", checkpoint, "--split", "test", "--samples", "50", "--posterior", "laplace")
    run("predict", checkpoint, "--split", "test", "--samples", "50", "--posterior", "at-checkpoint")
    run("predict", checkpoint, "--split", "test", "--posterior", "map")
    rows = run("evaluate", checkpoint, "--split", "test", "--bootstrap", "20")["rows"]
    # The usual form of a score comes first.
    return {row["posterior"]: {m["name"]: m["value"] for m in reversed(row["metrics"])} for row in rows}


def test_scores_agree_with_the_reference(scores: dict[str, dict[str, float]]) -> None:
    # Another random 8,000 of the 10,000 test images: the NLL of such a subset has a standard error of about 0.0035
    # (0.8 nats an image, finite population), accuracy 0.0015.
    reference = json.loads((SHARED / "reference.json").read_text())["results"]
    for posterior, name in (("map", "MAP"), ("laplace", "LAmode2000_510"), ("at-checkpoint", "LAnn2000_510")):
        assert scores[posterior]["nll"] == pytest.approx(reference[name]["nll"], abs=0.009)
        assert scores[posterior]["accuracy"] == pytest.approx(reference[name]["acc"] / 100, abs=0.005)
        assert scores[posterior]["ece"] == pytest.approx(reference[name]["ece15"] / 100, abs=0.006)


def test_the_mode_repairs_what_the_checkpoint_gets_wrong(scores: dict[str, dict[str, float]]) -> None:
    assert scores["laplace"]["nll"] < scores["at-checkpoint"]["nll"] - 0.03
