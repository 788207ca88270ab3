"""Two classes of a run without a network: one logit where the task is said to be binary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.artifacts.predictions import read_predictions
from bnncli.session.inputs import open_posterior


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
    assert cli("extract-features", "run", *words, "--task", "binary").code == 0
    assert cli("fit-laplace", "run", "--prior-precision", 1).code == 0
    posterior, _ = open_posterior(tmp_path / "run.bnn/posteriors/laplace.safetensors")
    assert (posterior.layout.num_outputs, posterior.layout.num_params) == (1, 4)
    assert cli("predict", "run", "--split", "train").code == 0
    assert read_predictions(tmp_path / "run.bnn/predictions/laplace.mc/train.h5").probs.shape == (30, 2)


def test_a_later_split_is_of_the_run_s_task_unless_another_is_said(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 2)
    assert (
        cli("extract-features", "run", "--model", "flatten", "--data", "train=npz:data.npz", "--task", "binary").code
        == 0
    )
    more = ("extract-features", "run", "--model", "flatten", "--data", "test=npz:data.npz")
    done = cli(*more, "--task", "multiclass")
    assert (done.code, "has two classes from one logit, but the new one has one class per example" in done.stderr) == (
        65,
        True,
    )
    assert cli(*more).code == 0


@every_source
def test_a_binary_task_refuses_labels_of_three_classes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 3)
    done = cli("extract-features", "run", *words, "--task", "binary")
    assert (done.code, "--task binary: expected labels 0 and 1; got 3 classes" in done.stderr) == (2, True)
