"""The share that the number of draws has in a comparison: other draws of the same posterior are no difference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from problems.command_line import Cli, new_run

from bnncli.evaluation.bootstrap import Bootstrap, DrawGroups, integration_errors
from bnncli.evaluation.comparison import Sample, confidence_set, integration

TWO = ("--split", "test", "--split", "far")  # what is compared; val is not


def scores_of(document: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    (row,) = [row for row in document["rows"] if row["name"] == name]
    return {score["form"]: score for score in row["scores"]}


def draw_predictions(generator: np.random.Generator, logits: NDArray, num_draws: int) -> DrawGroups:
    """Predictions of fresh draws that all examples (N, 2) share: a shift of their logits, and a scale of them."""
    shift, scale = generator.normal(size=(2, num_draws, 1))
    moved = logits[:, 0] * np.exp(0.5 * scale) + 1.2 * shift
    right = 1 / (1 + np.exp(-moved))  # (S, N)
    groups = right.reshape(10, num_draws // 10, -1).mean(axis=1)
    return DrawGroups(np.stack([groups, 1 - groups], axis=2), np.full(10, 0.1))


def samples_of(generator: np.random.Generator, seeds: int, num_draws: int, weights: NDArray, trial: int) -> list[Any]:
    """NLL and accuracy of one posterior predicted with several seeds, with and without their integration errors."""
    logits = 1.5 * generator.normal(size=(weights.shape[1], 1)) + 1
    labels = generator.random(len(logits)) > 1 / (1 + np.exp(-logits[:, 0]))

    def losses(probs: NDArray) -> NDArray:
        own = np.where(labels, probs[:, 1], probs[:, 0])
        return np.stack([-np.log(own), own > 0.5], axis=1)

    found: list[list[Sample]] = [[], []]
    for place in range(seeds):
        groups = draw_predictions(generator, logits, num_draws)
        errors = integration_errors(lambda probs: losses(probs).mean(axis=0).tolist(), groups)
        columns = losses(groups.mean())
        drawn = weights @ columns / len(columns)
        for score, error in enumerate(errors):
            seed = 1000 * trial + 10 * place + score
            noise = integration(error.standard_error, error.degrees_of_freedom, size=len(drawn), seed=seed)
            found[score].append(Sample(columns.mean(axis=0)[[score]], drawn[:, score], noise))
    return found


def is_any_unmarked(samples: list[Sample], *, higher: bool) -> bool:
    return any(
        p is not None and p <= 0.05 for p in confidence_set(samples, higher_is_better=higher, alpha=0.05).p_values
    )


@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_same_posterior_with_other_draws_differs_in_alpha_of_the_comparisons(seeds: int) -> None:
    generator, trials = np.random.default_rng(0), 120
    weights = np.concatenate([b[0] for b in Bootstrap(199).weights(("test", 400))]).astype(np.float64)
    falsely, without = np.zeros(2), 0
    for trial in range(trials):
        nll, accuracy = samples_of(generator, seeds, 20, weights, trial)
        falsely += [is_any_unmarked(nll, higher=False), is_any_unmarked(accuracy, higher=True)]
        without += is_any_unmarked([replace(sample, integration=None) for sample in nll], higher=False)
    assert (falsely / trials <= 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / trials)).all()
    assert without > trials / 4  # what examples alone would tell


def test_other_seeds_of_one_posterior_are_all_marked_and_the_warning_says_what_to_run(
    cli: Cli, small_run: Path
) -> None:
    for seed in (1, 2, 3):
        cli(
            "predict",
            small_run,
            "--posterior",
            "laplace",
            "--seed",
            seed,
            "--samples",
            20,
            "--name",
            f"seed-{seed}",
            *TWO,
        )
    done = cli("compare", small_run, "--posterior", "laplace", "--metric", "nll", "--metric", "auroc", "--json")
    for row in done.json["rows"]:
        assert row["draws"] == (1000 if row["name"] == "laplace.mc" else 20)
        assert all(score["is_close"] and score["integration_error"] > 0 for score in row["scores"])
    assert "exceeds the sampling error of its difference in " in done.stderr
    assert f"bnncli predict {small_run} --posterior laplace --integrator mc --samples " in done.stderr
    wrong = cli("compare", small_run, "--baseline", "nothing")
    assert f"bnncli predict {small_run} --posterior nothing" in wrong.stderr


def test_a_prediction_without_draws_has_no_integration_error_and_one_draw_an_unknown_one(
    cli: Cli, small_run: Path
) -> None:
    cli("predict", small_run, "--posterior", "laplace", "--integrator", "probit", *TWO)
    cli("predict", small_run, "--posterior", "laplace", "--samples", 1, "--name", "one", *TWO)
    done = cli(
        "compare", small_run, "--posterior", "laplace", "--metric", "nll", "--metric", "auroc:mutual_info", "--json"
    )
    nll = {row["name"]: (row["draws"], scores_of(done.json, row["name"])["nll"]) for row in done.json["rows"]}
    assert (nll["laplace.probit"][0], nll["laplace.probit"][1]["integration_error"]) == (None, 0.0)
    assert "integration_unknown" not in nll["laplace.probit"][1]
    assert (nll["one"][0], nll["one"][1]["integration_error"]) == (1, None)
    assert "they have one draw" in nll["one"][1]["integration_unknown"]
    by_draws = scores_of(done.json, "laplace.mc")["auroc:mutual_info:far"]
    assert (by_draws["integration_error"], "class probabilities" in by_draws["integration_unknown"]) == (None, True)
    text = cli("compare", small_run, "--posterior", "laplace", "--metric", "nll").stderr
    assert "integration error unknown and ignored: nll of one (" in text


def test_one_network_is_not_told_to_be_drawn_more_often(cli: Cli, small_run: Path) -> None:
    cli("predict", small_run, "--posterior", "map", "--integrator", "mc", *TWO)
    done = cli(
        "compare", small_run, "--posterior", "map", "--metric", "accuracy", "--metric", "nll", "--metric", "auroc"
    )
    assert (done.code, done.stderr) == (0, "")


def test_over_checkpoints_the_spread_contains_the_integration_error(cli: Cli, small_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    new_run(cli, other, make_other(), "--ood", "far")
    cli("fit-laplace", other, "--prior-precision", "3")
    cli("predict", other, *TWO)
    document = cli(
        "compare", small_run, other, "--posterior", "laplace", "--posterior", "map", "--metric", "nll", "--json"
    ).json
    score = scores_of(document, "laplace.mc")["nll"]
    assert (score["integration_error"], "spread over checkpoints" in score["integration_unknown"]) == (None, True)


def make_other() -> dict[str, np.ndarray]:
    from problems.arrays import make_arrays

    return make_arrays()


def test_two_splits_of_other_draws_have_no_integration_error_of_a_detection(cli: Cli, small_run: Path) -> None:
    for split, seed in (("test", 0), ("far", 5)):
        cli("predict", small_run, "--posterior", "laplace", "--seed", seed, "--split", split, "--name", "mixed")
    document = cli("compare", small_run, "--posterior", "mixed", "--metric", "auroc", "--metric", "nll", "--json").json
    found = scores_of(document, "mixed")
    assert found["nll"]["integration_error"] > 0
    assert found["auroc:far"]["integration_error"] is None
    assert "different seeds or numbers of draws" in found["auroc:far"]["integration_unknown"]
