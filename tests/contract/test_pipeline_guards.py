"""What a run refuses or warns of because the numbers would be wrong without it."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.artifacts.predictions import read_predictions
from bnncli.session import inputs

pytestmark = pytest.mark.core

Arrays = dict[str, np.ndarray]


def test_predictions_of_two_posteriors_under_one_name_are_not_scored(cli: Cli, small_run: Path) -> None:
    for posterior, split in (("laplace", "test"), ("map", "far")):
        words = ("--posterior", posterior, "--name", "mixed", "--split", split)
        cli("predict", small_run, *words).expect(0)
    done = cli("evaluate", small_run, "--posterior", "mixed", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "mixed_predictions")


def test_labels_of_an_out_of_distribution_split_do_not_count(cli: Cli, arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    np.savez(path, **arrays, labels_far=np.arange(60))
    cli("extract-features", tmp_path / "run", "--from-npz", path).expect(65)
    cli("extract-features", tmp_path / "run", "--from-npz", path, "--ood", "far").expect(0)
    with h5py.File(tmp_path / "run.bnn/features/far.h5") as file:
        assert "labels" not in file
        assert len(file["classes"]) == 3


def test_splits_of_other_classes_are_not_mixed(cli: Cli, arrays: Arrays, tmp_path: Path) -> None:
    arrays = {name: part for name, part in arrays.items() if not name.startswith("head")}
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez(tmp_path / "b.npz", features_test=arrays["features_test"], labels_test=np.arange(120) % 5)
    run = tmp_path / "run"
    cli("extract-features", run, "--from-npz", tmp_path / "a.npz").expect(0)
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    done = cli("extract-features", run, "--from-npz", tmp_path / "b.npz", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "class_mismatch")
    assert "labels up to 4, but split 'train' of this run has 3 classes" in done.json["error"]["message"]


def test_a_data_set_without_a_network_has_as_many_classes_as_its_labels(cli: Cli, tmp_path: Path) -> None:
    code = "class Rows:\n    def __len__(self):\n        return 12\n    def __getitem__(self, i):\n"
    (tmp_path / "four_classes.py").write_text(
        code + "        import torch\n        return torch.full((2,), i / 4), i % 4\n"
    )
    spec = f"train=py:{tmp_path}/four_classes.py:Rows"
    cli("extract-features", tmp_path / "run", "--model", "flatten", "--data", spec).expect(0)
    with h5py.File(tmp_path / "run.bnn/features/train.h5") as file:
        assert len(file["classes"]) == 4


@pytest.mark.parametrize("words", [("fit-vi", "--prior-precision", "inf"), ("refine", "--learning-rate", "inf")])
def test_numbers_must_be_finite(cli: Cli, small_run: Path, words: tuple[str, ...]) -> None:
    done = cli(words[0], small_run, *words[1:], "--name", "x", "--json").expect(2)
    assert "finite" in done.json["error"]["message"]


def test_a_seed_that_changes_nothing_is_the_same_request(cli: Cli, small_run: Path) -> None:
    assert cli("predict", small_run, "--posterior", "map", "--seed", 7, "--json").json["action"] == "up_to_date"
    cli("predict", small_run, "--posterior", "laplace", "--seed", 7).expect(73)


def test_draws_and_another_posterior_do_not_share_a_name(cli: Cli, small_run: Path) -> None:
    done = cli("refine", small_run, "--name", "hmc", "--json")
    assert (done.code, done.json["error"]["code"]) == (73, "exists")


@pytest.mark.parametrize("words", [("--dynamics", "leapfrog"), ("--gradients", "tf32")])
def test_nuts_has_no_dynamics_and_gradients_to_choose(cli: Cli, small_run: Path, words: tuple[str, str]) -> None:
    cli("hmc", small_run, "--sampler", "nuts", *words, "--name", "n").expect(2, words[0])


def test_a_variable_that_means_nothing_is_warned_of(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNNCLI_REFINE_EPOCS", "5")
    assert "did you mean BNNCLI_REFINE_EPOCHS?" in cli("status", small_run).stderr


def test_recorded_command_has_environment_options(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNNCLI_FIT_LAPLACE_PRIOR_PRECISION", "3")
    cli("fit-laplace", small_run, "--name", "three").expect(0)
    done = cli("inspect", small_run.with_name("small.bnn") / "posteriors/three.safetensors", "--json")
    command = done.json["provenance"]["command"]
    assert command[command.index("--prior-precision") + 1] == "3"


def test_a_reference_that_has_not_converged_is_named_under_the_table(cli: Cli, small_run: Path) -> None:
    words = ("--chains", 4, "--warmup", 1, "--draws", 4, "--target-accept", 0.3, "--name", "poor", "--json")
    done = cli("hmc", small_run, *words)
    assert done.json["metrics"]["max_rhat"] > 1.05
    assert any("R-hat" in warning for warning in done.json["warnings"])
    again = ("--reference", "poor", "--force")
    assert "poor has not converged" in cli("evaluate", small_run, *again, "--bootstrap", 0).stdout
    assert json.dumps(done.json)


def test_a_refined_file_tells_the_prior_of_its_target_from_that_of_its_base(cli: Cli, small_run: Path) -> None:
    from safetensors.numpy import load_file

    cli("refine", small_run, "--prior-precision", 40, "--epochs", 1, "--name", "other").expect(0)
    tensors = load_file(small_run.with_name("small.bnn") / "posteriors/other.safetensors")
    assert (tensors["prior.precision"][0], tensors["base.prior.precision"][0]) == (40.0, 10.0)


def test_a_stale_input_is_used_only_when_asked_for_and_with_a_recorded_warning(cli: Cli, small_run: Path) -> None:
    cli("fit-laplace", small_run, "--prior-precision", 9, "--force").expect(0)
    cli("predict", small_run, "--posterior", "refine", "--json").expect(65)
    done = cli("predict", small_run, "--posterior", "refine", "--allow-stale", "--force", "--json").expect(0)
    assert "--allow-stale" in done.json["warnings"][0]
    path = small_run.with_name("small.bnn") / "predictions/refine.mc/test.h5"
    assert "--allow-stale" in cli("inspect", path, "--json").json["provenance"]["warnings"][0]


def test_the_host_is_recorded_only_when_asked_for(cli: Cli, small_run: Path) -> None:
    import socket

    folder = small_run.with_name("small.bnn") / "posteriors"
    for words, expected in (((), None), (("--record-host",), socket.gethostname())):
        cli("fit-laplace", small_run, "--prior-precision", 10, "--force", *words).expect(0)
        provenance = cli("inspect", folder / "laplace.safetensors", "--json").json["provenance"]
        assert provenance.get("host") == expected


def test_kept_samples_are_the_draws_behind_the_prediction(cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "hmc", "--split", "test", "--name", "kept", "--keep-samples", "--samples", 30)
    cli("predict", small_run, *words).expect(0)
    path = small_run.with_name("small.bnn") / "predictions/kept/test.h5"
    with h5py.File(path) as file:
        samples, probs = file["probs_samples"][()], file["probs"][()]
    assert samples.shape == (30, 120, 3)
    np.testing.assert_allclose(samples.astype(np.float64).mean(axis=0), probs, atol=5e-4)
    assert samples.std(axis=0).max() > 0.01
    cli("verify", path).expect(0)


@pytest.mark.parametrize(("prior_precision", "is_warned"), [("1e-30", True), ("1e-2", False)])
def test_large_jitter_is_warned_of(cli: Cli, small_run: Path, prior_precision: str, is_warned: bool) -> None:
    done = cli(
        "fit-laplace", small_run, "--prior-precision", prior_precision, "--structure", "full", "--name", "weak"
    ).expect(0)
    assert ("was added to its diagonal" in done.stderr) == is_warned


def test_splits_of_one_run_share_their_preprocessing(cli: Cli, tmp_path: Path) -> None:
    import torch

    torch.save({"0.weight": torch.ones(2, 3), "0.bias": torch.zeros(2)}, tmp_path / "net.pt")
    np.savez(tmp_path / "data.npz", x=np.ones((9, 3), np.float32), y=np.zeros(9, np.int64))
    (tmp_path / "net.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Linear(3, 2))\n"
    )
    words = ("extract-features", tmp_path / "net.pt", "--model", f"{tmp_path}/net.py:make")
    cli(*words, "--data", f"train=npz:{tmp_path}/data.npz").expect(0)
    done = cli(*words, "--data", f"test=npz:{tmp_path}/data.npz@5", "--mean", "0.5", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "mixed_options")
    assert "--mean" in done.json["error"]["message"]


@pytest.mark.parametrize("words", [("--samples", "8", "--keep-samples"), ("--integrator", "probit")], ids=" ".join)
def test_predictions_in_blocks_are_those_of_the_whole_split(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    whole, blocks = (small_run.with_name(name) for name in ("whole.h5", "blocks.h5"))
    common = ("predict", small_run, "--posterior", "laplace", "--split", "test", *words)
    cli(*common, "--out", whole).expect(0)
    monkeypatch.setattr(inputs, "PREDICTION_BYTES", 7 * 5 * 4)
    cli(*common, "--out", blocks).expect(0)
    ours, theirs = read_predictions(blocks), read_predictions(whole)
    for name in ("probs", "entropy", "mutual_info", "probs_samples"):
        parts = getattr(ours, name), getattr(theirs, name)
        assert parts[0] is parts[1] is None or np.allclose(*parts, rtol=0, atol=1e-6)
