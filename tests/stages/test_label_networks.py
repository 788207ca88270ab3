"""Latent binary networks of several labels an example: fitted, searched, predicted, pruned."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.label_sets import label_arrays

from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands.fit_lbbnn import guessing
from bnncli.session.inputs import open_posterior


@pytest.mark.parametrize(
    "hidden", [(), pytest.param(("--hidden", "6"), marks=pytest.mark.long)], ids=["head", "hidden"]
)
def test_a_latent_binary_network_learns_labels_and_predicts_each(
    cli: Cli, tmp_path: Path, hidden: tuple[str, ...]
) -> None:
    arrays = label_arrays(sharpness=2.0)
    run = new_run(cli, tmp_path / "run", arrays, "--ood", "far")
    done = cli("fit-lbbnn", run, *hidden, "--epochs", 40, "--learning-rate", 0.05)
    assert done.code == 0, done.stderr
    posterior, header = open_posterior(tmp_path / "run.bnn/posteriors/lbbnn.safetensors")
    assert header.meta["likelihood"] == posterior.layout.likelihood.name == "multilabel"
    metrics = header.meta["metrics"]
    assert metrics["expected_log_likelihood"]["value"] > metrics["log_likelihood_of_shares"] + 30
    assert cli("predict", run, "--posterior", "lbbnn", "--split", "test").code == 0
    content = read_predictions(tmp_path / "run.bnn/predictions/lbbnn.mc/test.h5")
    assert content.interval is not None
    assert content.interval.shape == (120, 4, 2)
    right = (np.asarray(content.probs) >= 0.5) == arrays["labels_test"]
    assert right.mean() > 0.75


def test_what_is_pruned_is_judged_by_whole_examples_and_all_decisions(cli: Cli, tmp_path: Path) -> None:
    from sklearn.metrics import accuracy_score, log_loss

    arrays = label_arrays()
    run = new_run(cli, tmp_path / "run", arrays)
    assert cli("fit-lbbnn", run, "--epochs", 10, "--learning-rate", 0.05).code == 0
    assert cli("prune", run, "--split", "test").code == 0
    path = tmp_path / "run.bnn/posteriors/lbbnn-sparse.safetensors"
    posterior, found = open_posterior(path)[0], read_header(path).meta["metrics"]["after"]
    logits = posterior.layout.logits(torch.from_numpy(arrays["features_test"]), posterior.theta.float()[None])[0]
    probs = torch.sigmoid(logits).double().numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(arrays["labels_test"], probs >= 0.5))
    assert found["nll"] == pytest.approx(log_loss(arrays["labels_test"].ravel(), probs.ravel()), rel=1e-5)
    assert cli("predict", run, "--posterior", "lbbnn", "--split", "test").code == 0
    done = cli("evaluate", run, "--posterior", "lbbnn", "--bootstrap", 0, "--curves", "--json")
    assert done.code == 0, done.stdout
    curve = done.json["rows"][0]["curves"]["density"]
    place = int(np.argmin(np.abs(np.array(curve["threshold"]) - 0.5)))
    assert curve["threshold"][place] == pytest.approx(0.5, abs=1e-3)
    assert curve["nll"][place] == pytest.approx(found["nll"], rel=1e-5)
    assert curve["accuracy"][place] == pytest.approx(found["accuracy"])


def test_the_shares_of_labels_are_those_of_independent_coins() -> None:
    labels = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.uint8)
    assert guessing(labels, 3) == pytest.approx(math.log(0.25) + 3 * math.log(0.75))
