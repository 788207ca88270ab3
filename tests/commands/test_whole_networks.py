"""Posteriors over whole networks, from any inputs: kinds of curvature, ranks, memory, searches."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.own_networks import TANH, extract_own
from safetensors.torch import load_file
from torch import Tensor

from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions
from bnncli.parameters.module import ModuleNetwork
from bnncli.structures.network_logits import CovariancePath

FIT = ("fit-laplace", "ckpt.pt", "--prior-precision", "3")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose features are there, of a network by the user's own code; the test works beside it."""
    monkeypatch.chdir(tmp_path)
    inputs = np.random.default_rng(0).normal(size=(60, 1, 2, 2)).astype(np.float32)
    labels = (inputs[:, 0, 0, 0] > 0).astype(np.int64)
    extract_own(TANH, {"train": (inputs[:40], labels[:40]), "test": (inputs[40:], labels[40:])})
    return tmp_path / "ckpt.pt"


def test_the_last_layer_by_its_name_is_the_last_layer(cli: Cli, checkpoint: Path) -> None:
    cli(*FIT).expect(0)
    cli(*FIT, "--layers", "3", "--center", "mode", "--trust-code", "--name", "named").expect(0)
    folder = Path("ckpt.pt.bnn/posteriors")
    one, other = (read_header(folder / f"{name}.safetensors").meta for name in ("laplace", "named"))
    assert (one.get("layers"), other["layers"]) == (None, "3")
    evidence = [meta["metrics"]["log_marginal_likelihood"] for meta in (one, other)]
    assert evidence[0] == pytest.approx(evidence[1], abs=1e-4)
    asked = ("predict", "ckpt.pt", "--split", "test", "--integrator", "probit", "--trust-code")
    cli(*asked, "--posterior", "laplace", "--posterior", "named").expect(0)
    probs = [
        read_predictions(Path(f"ckpt.pt.bnn/predictions/{name}.probit/test.h5")).probs for name in ("laplace", "named")
    ]
    np.testing.assert_allclose(probs[0], probs[1], atol=1e-5)


def test_all_layers_are_fitted_predicted_with_and_up_to_date(cli: Cli, checkpoint: Path) -> None:
    cli(*FIT, "--layers", "all", "--trust-code").expect(0)
    meta = read_header(Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors")).meta
    assert [part["name"] for part in meta["param_layout"]] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert (meta["center"], meta["structure"]) == ("checkpoint", "full")
    assert "up to date" in cli(*FIT, "--layers", "all").stderr  # which runs no code
    cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test").expect(77, "add --trust-code")
    cli("predict", "ckpt.pt", "--split", "test").expect(0, "skipping laplace-all with logit-mc")
    cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code").expect(0)
    assert Path("ckpt.pt.bnn/predictions/laplace-all.logit-mc/test.h5").is_file()  # of the linearised network


def test_a_fit_whose_jacobians_take_minutes_uses_some_of_val(
    cli: Cli, checkpoint_curvatures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("fit-laplace", "ckpt.pt", "--layers", "all", "--structure", "kron", "--trust-code", "--json")
    assert "val_drawn_from" not in cli(*words).json["metrics"]
    monkeypatch.setattr("bnncli.inference.memory._MOST_JACOBIANS", {"cpu": 1})
    monkeypatch.setattr("bnncli.inference.memory.LEAST_VAL", 12)
    done = cli(*words, "--force")
    metrics = done.json["metrics"]
    assert "using 12 of the 30 val examples, drawn at random" in done.stderr
    error = metrics["val"]["laplace"]["standard_error"]
    assert f"on 12 random examples of 30 (standard error of the NLL {error:.4f})" in done.stderr
    names = ("prior_precision_val_examples", "val_num_examples", "val_drawn_from")
    assert tuple(metrics[name] for name in names) == (12, 12, 30)


def test_a_search_without_room_for_jacobians_agrees_with_one_that_keeps_them(
    cli: Cli, checkpoint_curvatures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("fit-laplace", "ckpt.pt", "--layers", "all", "--structure", "kron", "--trust-code", "--json")
    kept = cli(*words).json["metrics"]
    calls: list[int] = []
    make = CovariancePath.at
    monkeypatch.setattr("bnncli.inference.memory.logit_cache_bytes", lambda layout, structure: 1 << 60)
    monkeypatch.setattr("bnncli.inference.memory.LEAST_VAL", 30)
    monkeypatch.setattr(
        CovariancePath, "at", lambda self, inputs, keys: (calls.append(len(keys)), make(self, inputs, keys))[1]
    )
    found = cli(*words, "--force").json["metrics"]
    assert calls[-1] == 1  # of the scores, which take no pass of their own
    assert found["prior_precision"] == pytest.approx(kept["prior_precision"], rel=0.02)
    assert found["val_nll_laplace"] == pytest.approx(kept["val_nll_laplace"], abs=2e-5)


def test_a_network_too_large_to_copy_is_checked_in_float32(
    cli: Cli, checkpoint_curvatures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("fit-laplace", "ckpt.pt", "--layers", "all", "--structure", "kron", "--trust-code", "--json")
    whole = cli(*words).json["metrics"]
    monkeypatch.setattr("bnncli.parameters.module.MOST_EXACT", 0)
    seen = set()
    frozen = ModuleNetwork._frozen

    def note(network: ModuleNetwork, dtype: torch.dtype, varying: Collection[str]) -> dict[str, Tensor]:
        seen.add(dtype)
        return frozen(network, dtype, varying)

    monkeypatch.setattr(ModuleNetwork, "_frozen", note)
    metrics = cli(*words, "--force").json["metrics"]
    assert seen == {torch.float32}
    assert metrics["prior_precision"] == pytest.approx(whole["prior_precision"], rel=1e-4)


@pytest.mark.parametrize("most_full", [pytest.param(2048, marks=pytest.mark.long), 0])
def test_mode_of_all_layers(cli: Cli, checkpoint: Path, most_full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mode", "prior_search"):
        monkeypatch.setattr(f"bnncli.inference.{module}.MAX_FULL_PRECONDITIONER", most_full)
    words = ("--layers", "all", "--center", "mode", "--prior-precision", "marglik", "--trust-code")
    done = cli("fit-laplace", "ckpt.pt", *words, "--json").expect(0)
    metrics = done.json["metrics"]
    assert metrics["prior_precision_compared_at"] == ("mode" if most_full else "checkpoint")
    assert ("was chosen around the checkpoint's weights" in done.stderr) == (most_full == 0)
    assert metrics["newton_decrement"] < 0.1
    assert metrics["mode_shortfall"] is None
    assert f"from the mode, after {metrics['mode_passes']:,} passes over the data" in done.stderr
    assert metrics["mode_distance_in_sd"] > 0.1


def test_a_centre_beside_the_mode_is_told(cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*FIT, "--layers", "all", "--center", "mode", "--trust-code")
    monkeypatch.setattr("bnncli.inference.mode.MOST_PASSES", 8)
    monkeypatch.setattr("bnncli.inference.mode.NEAR", 100)
    done = cli(*words).expect(0)
    assert "posterior standard deviations from the mode (all 23 parameters together; a draw is about 5 away): the limit of 8 passes was reached" in (
        done.stderr.replace("\n", " ")
    )  # fmt: skip
    monkeypatch.setattr("bnncli.inference.mode.NEAR", 0)
    monkeypatch.setattr("bnncli.inference.mode.MOST_PASSES", 6)
    cli(*words, "--name", "other", "--seed", "3").expect(70, "error: found no mode after")


def test_code_runs_only_where_it_is_trusted_and_the_same(cli: Cli, checkpoint: Path) -> None:
    cli(*FIT, "--layers", "all").expect(77, "add --trust-code")
    Path("net.py").write_text(TANH + "\n")
    cli(*FIT, "--layers", "all", "--trust-code").expect(65, "net.py has changed")


def test_data_that_changed_are_told(cli: Cli, checkpoint: Path) -> None:
    np.savez("train.npz", x=np.zeros((40, 1, 2, 2), np.float32), y=np.arange(40) % 2)
    cli(*FIT, "--layers", "all", "--trust-code").expect(65, "train.npz has changed")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--layers", "head"), 64, "'head' matches none of '1.weight', '1.bias', '3.weight', '3.bias'"),
        (("--layers", "all+"), 64, "expected last, all or patterns"),
    ],
)
def test_wrong_layers_are_told(cli: Cli, checkpoint: Path, words: tuple[str, ...], code: int, message: str) -> None:
    refused = cli(*FIT, *words, "--trust-code")
    assert refused.code in (2, code)
    assert message in refused.stderr


@pytest.mark.long
def test_diagnose_judges_other_layers_beside_the_last(cli: Cli, checkpoint: Path) -> None:
    words = ("--model", "net.py:make", "--data", "val=npz:test.npz")
    cli("extract-features", "ckpt.pt", *words).expect(0)
    named = ("--layers", "3", "--trust-code", "--name", "named", "--center", "mode")
    for more in ((), ("--layers", "all", "--trust-code"), named):
        cli(*FIT, *more).expect(0)
    skipped = cli("diagnose", "ckpt.pt", "--draws", 64, "--json")
    assert (skipped.code, list(skipped.json["posteriors"])) == (0, ["map", "laplace"])
    assert skipped.stderr.count("skipping laplace-all") == 1
    cli("diagnose", "ckpt.pt", "--posterior", "laplace-all").expect(77)
    found = cli("diagnose", "ckpt.pt", "--draws", 64, "--trust-code", "--json").expect(0)
    assert [pair["posteriors"] for pair in found.json["pairs"]] == [["map", "laplace"]]  # never of other parameters
    gains = {one["posterior"]: one for one in found.json["layers"]}
    assert set(gains) == {"laplace-all", "named"}
    entries = found.json["posteriors"]
    difference = entries["laplace-all"]["val_nll"]["value"] - entries["laplace"]["val_nll"]["value"]
    assert gains["laplace-all"]["value"] == pytest.approx(difference, abs=1e-9)
    elbos = [entries[name]["elbo"] for name in ("laplace", "named")]  # of one target, by draws of their own
    assert elbos[0]["value"] == pytest.approx(
        elbos[1]["value"], abs=4 * sum(one["standard_error"] for one in elbos) + 1
    )
    said = cli("diagnose", "ckpt.pt", "--draws", 64, "--trust-code").stdout
    assert all(one["sentence"] in said.replace("\n", " ") for one in gains.values()), said
    alone = cli("diagnose", "ckpt.pt", "--posterior", "named", "--trust-code", "--json").json["verdict"]
    assert (alone["use"], alone["predict"]["posterior"]) == ("named", "map")  # close to its target, and no gain on val
    assert alone["run"] == "bnncli predict ckpt.pt --posterior map --integrator plug-in"


@pytest.mark.parametrize("structure", ["block", "ekfac", "kron"])
def test_structures_of_layers_are_fitted_and_predicted_with(cli: Cli, checkpoint: Path, structure: str) -> None:
    done = cli(*FIT, "--layers", "all", "--structure", structure, "--trust-code", "--json").expect(0)
    metrics = done.json["metrics"]
    assert metrics["structure"] == structure
    assert f"{'an' if structure == 'ekfac' else 'a'} {structure} Hessian is not exact" in done.stderr
    assert metrics.get("columns_drawn") == (None if structure == "block" else 0)  # two outputs: all columns
    assert metrics.get("num_diagonal_params") == (None if structure == "block" else 0)
    asked = ("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code")
    cli(*asked, "--integrator", "probit", "--integrator", "mc").expect(0)
    found = [
        read_predictions(Path(f"ckpt.pt.bnn/predictions/laplace-all.{name}/test.h5")).probs for name in ("probit", "mc")
    ]
    assert 0 < float(np.abs(found[0] - found[1]).max()) < 0.2


def test_a_network_that_was_edited_makes_its_posteriors_stale(cli: Cli, checkpoint: Path) -> None:
    fit = (*FIT, "--layers", "all", "--trust-code")
    cli(*fit).expect(0)
    header = read_header(Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors"))
    roles = {entry["role"]: entry.get("is_artifact", True) for entry in header.inputs}
    assert roles == {"features.train": True, "data.train": False, "model": False}
    cli("status", "ckpt.pt", "--check").expect(0)
    Path("net.py").write_text(TANH + "\n")
    cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--trust-code").expect(
        65, "laplace-all.safetensors is stale: model (net.py) has changed"
    )
    assert "model (net.py) has changed" in cli("status", "ckpt.pt").stdout.replace("\n", " ")
    cli(*fit).expect(65, "net.py has changed")
    cli("predict", "ckpt.pt", "--posterior", "map", "--split", "test").expect(0)


def test_layers_select_posteriors_wherever_they_are_read(cli: Cli, checkpoint: Path) -> None:
    words = ("--model", "net.py:make", "--data", "val=npz:test.npz")
    cli("extract-features", "ckpt.pt", *words).expect(0)
    cli(*FIT).expect(0)
    cli(*FIT, "--layers", "3+1", "--trust-code").expect(0)
    asked = ("--layers", "3+1")
    untrusted = [cli(name, "ckpt.pt", *asked) for name in ("predict", "diagnose")]
    assert [(one.code, "add --trust-code" in one.stderr) for one in untrusted] == [(77, True)] * 2
    cli("predict", "ckpt.pt", *asked, "--trust-code", "--split", "test").expect(0)
    assert [path.name for path in Path("ckpt.pt.bnn/predictions").iterdir()] == ["laplace-3-1.logit-mc"]
    cli("compare", "ckpt.pt", "--layers", "last").expect(
        66,
        "no predictions of a posterior over --layers last (have: over 3+1: laplace-3-1)",
        "bnncli predict ckpt.pt --layers last",
    )
    cli("predict", "ckpt.pt", "--layers", "last", "--split", "test").expect(0)
    found = cli("diagnose", "ckpt.pt", *asked, "--draws", 64, "--trust-code", "--json")
    assert (found.code, list(found.json["posteriors"])) == (0, ["laplace-3-1"])
    for words in (("evaluate", "--bootstrap", "0"), ("compare", "--metric", "nll", "--bootstrap", "100")):
        rows = cli(words[0], "ckpt.pt", *words[1:], "--layers", "last", "--json").json["rows"]
        assert [row["posterior"] for row in rows] == ["map", "laplace"]
    words = ("--metric", "nll", "--bootstrap", "100", "--baseline", "map", "--json")
    beside = cli("compare", "ckpt.pt", *asked, *words).json["rows"]  # which is over the last layer
    assert [row["posterior"] for row in beside] == ["map", "laplace-3-1"]
    cli("evaluate", "ckpt.pt", *asked, "--bootstrap", "0", "--assert", "nll<=9").expect(0)


@pytest.mark.parametrize("name", ["predict", "diagnose"])
def test_layers_without_a_posterior_are_told(cli: Cli, checkpoint: Path, name: str) -> None:
    cli(*FIT).expect(0)
    none = cli(name, "ckpt.pt", "--layers", "all")
    assert none.stderr.splitlines() == [
        "error: ckpt.pt has no posterior over --layers all (have: over last: map, laplace)",
        "hint: bnncli fit-laplace ckpt.pt --layers all",
    ]
    trusting = cli(name, "ckpt.pt", "--layers", "all", "--trust-code")
    assert trusting.stderr.splitlines()[1] == "hint: bnncli fit-laplace ckpt.pt --layers all --trust-code"
    other = cli(name, "ckpt.pt", "--layers", "all", "--posterior", "laplace")
    assert (other.code, len(other.stderr.splitlines())) == (2, 1)
    assert "--posterior laplace is over --layers last, but got --layers all" in other.stderr
    cli(name, "ckpt.pt", "--layers", "all+").expect(2, "expected last, all or patterns")


FIT_ON_INPUTS = ("--layers", "all", "--trust-code", "--structure", "diag", "--prior-precision", "3")
NETWORKS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.other = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 2)
    def forward(self, x):
        return self.end(self.body(x))
    def end(self, hidden):
        return self.head(hidden.tanh())

class Several(Plain):
    def end(self, hidden):
        return {"other": self.other(hidden), "main": self.head(hidden.tanh())}

class Probabilities(Plain):
    def end(self, hidden):
        return self.head(hidden.tanh()).softmax(-1)

class ConfidentProbabilities(Plain):
    def end(self, hidden):
        return nn.functional.softmax(40 * self.head(hidden.tanh()), -1)

class Confident(Plain):
    def end(self, hidden):
        return 40 * self.head(hidden.tanh())

class ConfidentLabels(Plain):
    def end(self, hidden):
        return torch.sigmoid(40 * self.head(hidden.tanh()))

class Attention(Plain):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(5, 1, 4, batch_first=True), 1, enable_nested_tensor=False)
    def end(self, hidden):
        return self.head(self.encoder(hidden.unsqueeze(1))[:, 0])

class Branching(Plain):
    def end(self, hidden):
        return self.head(hidden if hidden.abs().max().item() > 1 else hidden.tanh())

class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(5, 5)]
    def end(self, hidden):
        return self.head(torch.from_numpy(hidden.detach().numpy()))
"""


@pytest.fixture
def made(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks and data in the folder that the test works in."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETWORKS)
    inputs = np.random.default_rng(0).normal(size=(30, 6)).astype(np.float32)
    np.savez("data.npz", x=inputs, y=np.arange(30) % 3)


def extract(cli: Cli, name: str, *words: str) -> None:
    space: dict[str, object] = {}
    exec(NETWORKS, space)
    torch.manual_seed(0)
    torch.save(space[name]().state_dict(), "ckpt.pt")  # type: ignore[operator]
    data = ("--data", "train=npz:data.npz", "--hold-out", "test=train:10")
    cli("extract-features", "ckpt.pt", "--model", f"nets.py:{name}", *data, *words).expect(0)


def probabilities(cli: Cli, run: str, posterior: str) -> np.ndarray:
    words = ("--posterior", posterior, "--integrator", "plug-in", "--split", "test", "--trust-code")
    cli("predict", run, *words).expect(0)
    return read_predictions(Path(f"{run}.bnn/predictions/{posterior}.plug-in/test.h5")).probs


@pytest.mark.parametrize("name", ["Several", "Probabilities", "Attention"])
@pytest.mark.long
def test_the_centre_predicts_as_the_network_does(cli: Cli, made: None, name: str) -> None:
    extract(cli, name, *(["--output", "main"] if name == "Several" else []))
    cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS).expect(0)
    np.testing.assert_allclose(
        probabilities(cli, "ckpt.pt", "laplace-all"), probabilities(cli, "ckpt.pt", "map"), atol=2e-6
    )


def test_confident_probabilities_are_as_good_as_logits(cli: Cli, made: None) -> None:
    found = []
    for name in ("ConfidentProbabilities", "Confident"):
        extract(cli, name, "--force")
        cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS, "--force").expect(0)
        assert probabilities(cli, "ckpt.pt", "map").max() > 1 - 1e-7
        words = ("--posterior", "laplace-all", "--integrator", "probit", "--split", "test", "--trust-code", "--force")
        cli("predict", "ckpt.pt", *words).expect(0)
        found.append(read_predictions(Path("ckpt.pt.bnn/predictions/laplace-all.probit/test.h5")).probs)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_confident_labels_of_a_sigmoid_keep_their_logits(cli: Cli, made: None) -> None:
    with np.load("data.npz") as file:
        np.savez("data.npz", x=file["x"], y=np.eye(3, dtype=np.uint8)[file["y"]])
    extract(cli, "ConfidentLabels", "--task", "multilabel")
    cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS).expect(0)
    ours, theirs = (probabilities(cli, "ckpt.pt", name) for name in ("laplace-all", "map"))
    assert theirs.max() > 1 - 1e-7
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_features_of_lower_precision_are_of_the_same_network(cli: Cli, made: None) -> None:
    extract(cli, "Plain", "--autocast", "bf16")
    cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS).expect(0)


@pytest.mark.parametrize(("name", "why"), [("Branching", "differentiated"), ("Frozen", "differentiated")])
def test_networks_without_derivatives_are_refused_in_a_line(cli: Cli, made: None, name: str, why: str) -> None:
    extract(cli, name)
    refused = cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS)
    assert (refused.code, why in refused.stderr, len(refused.stderr.splitlines())) == (65, True, 1), refused.stderr


@pytest.mark.parametrize(
    ("layers", "structure", "num_train"),
    [("body.bias+head.bias", "kron", 20), ("body.bias+head", "ekfac", 20), ("all", "block", 4)],
)
@pytest.mark.long
def test_new_fits_are_not_stale(cli: Cli, made: None, layers: str, structure: str, num_train: int) -> None:
    with np.load("data.npz") as file:
        np.savez("data.npz", x=file["x"][: num_train + 10], y=file["y"][: num_train + 10])
    extract(cli, "Plain")
    words = ("--layers", layers, "--trust-code", "--prior-precision", "3")
    cli("fit-laplace", "ckpt.pt", *words, "--structure", structure, "--name", "q").expect(0)
    for later in (("predict", "--posterior", "q"), ("refine", *words[:3], "--base", "q", "--epochs", "1")):
        cli(later[0], "ckpt.pt", *later[1:], "--trust-code").expect(0)
    assert "stale" not in cli("status", "ckpt.pt").stdout


def test_parameters_that_the_logits_do_not_see_are_refused(cli: Cli, made: None) -> None:
    extract(cli, "Plain")
    cli("fit-laplace", "ckpt.pt", "--layers", "other", *FIT_ON_INPUTS[2:]).expect(
        65, "its logits do not depend on these parameters"
    )


def test_data_that_are_gone_are_told_with_the_command_that_names_them_again(cli: Cli, made: None) -> None:
    extract(cli, "Plain")
    Path("data.npz").rename("moved.npz")
    cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS).expect(
        66,
        "no file 'data.npz'; the features of split 'train' were extracted from it",
        "bnncli extract-features ckpt.pt --model nets.py:Plain --data train=npz:data.npz",
    )


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_texts_of_any_length_are_read(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pytest.importorskip("transformers")
    text_folder = importlib.import_module("problems.hf_folders").text_folder
    monkeypatch.chdir(tmp_path)
    text_folder(Path(kind), kind)
    rng = np.random.default_rng(0)
    for split, most in (("train", 4), ("test", 9)):  # the longest of test are longer than those of train
        rows = [(" ".join(rng.choice(["good", "bad", "film"], size=1 + row % most)), "worse") for row in range(18)]
        with open(f"{split}.csv", "w", newline="") as stream:
            csv.writer(stream).writerows([("text", "label"), *rows])
    data = [word for split in ("train", "test") for word in ("--data", f"{split}=csv:{split}.csv")]
    cli("extract-features", kind, "--model", f"hf:{kind}", *data, "--batch-size", "5").expect(0)
    cli("fit-laplace", kind, *FIT_ON_INPUTS).expect(0)
    np.testing.assert_allclose(probabilities(cli, kind, "laplace-all"), probabilities(cli, kind, "map"), atol=2e-6)


def test_a_posterior_over_a_lora_adapter_alone(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    folders = importlib.import_module("problems.hf_folders")
    monkeypatch.chdir(tmp_path)
    base = folders.text_folder(Path("base"))
    config = peft.LoraConfig(r=2, lora_alpha=3, task_type="SEQ_CLS", target_modules=["query", "value"])
    auto = importlib.import_module("transformers").AutoModelForSequenceClassification
    model = peft.get_peft_model(auto.from_pretrained(base), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained("adapter")
    folders.tokenizer("Bert", model_max_length=12).save_pretrained("adapter")
    with open("train.csv", "w", newline="") as stream:
        rows = [(text, ["worse", "same", "better"][row % 3]) for row, text in enumerate(folders.TEXTS * 4)]
        csv.writer(stream).writerows([("text", "label"), *rows])
    data = ("--data", "train=csv:train.csv", "--data", "test=csv:train.csv@8")
    cli("extract-features", "run", "--model", "peft:adapter", "--base-model", "base", *data).expect(0)
    fit = ("--layers", "*lora_*", *FIT_ON_INPUTS[2:], "--name", "laplace-all")
    cli("fit-laplace", "run", *fit).expect(0)
    parts = read_header(Path("run.bnn/posteriors/laplace-all.safetensors")).meta["param_layout"]
    assert [part["name"].split(".")[-4:-1] for part in parts] == [
        [layer, ab, "default"] for layer in ("query", "value") for ab in ("lora_A", "lora_B")
    ]
    np.testing.assert_allclose(probabilities(cli, "run", "laplace-all"), probabilities(cli, "run", "map"), atol=2e-6)
    cli("predict", "run", "--posterior", "laplace-all", "--split", "test", "--trust-code").expect(0)


FIT_CURVATURES = ("fit-laplace", "ckpt.pt", "--layers", "all")
GIVEN = ("--prior-precision", "3")
SUBNETWORK = ("--structure", "subnetwork", "--size", 5)


@pytest.fixture
def checkpoint_curvatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose features are there, with a val split; the test works beside it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(80, 1, 2, 2)).astype(np.float32)
    labels = (inputs[:, 0, 0, 0] + 0.5 * rng.normal(size=80) > 0).astype(np.int64)
    extract_own(TANH, {"train": (inputs[:50], labels[:50]), "val": (inputs[50:], labels[50:])})
    return tmp_path / "ckpt.pt"


def meta_of(name: str) -> dict[str, Any]:
    return dict(read_header(Path(f"ckpt.pt.bnn/posteriors/{name}.safetensors")).meta)


def test_kinds_and_ranks_are_fitted_and_recorded(cli: Cli, checkpoint_curvatures: Path) -> None:
    for name, words in (
        ("ggn", ()),
        ("diag-fisher", ("--curvature", "fisher", "--structure", "diag")),
        ("low-rank", ("--structure", "low-rank", "--rank", "4")),
        ("thin-kron", ("--structure", "kron", "--rank", "1")),
    ):
        done = cli(*FIT_CURVATURES, *GIVEN, *words, "--trust-code", "--name", name).expect(0)
        assert ("4 largest eigenvalues" in done.stderr) == (name == "low-rank")
        assert "(the effective number)" in done.stderr
    metas = {name: meta_of(name) for name in ("ggn", "diag-fisher", "low-rank", "thin-kron")}
    assert [meta["curvature"] for meta in metas.values()] == ["ggn", "fisher", "ggn", "ggn"]
    assert [meta["structure"] for meta in metas.values()] == ["full", "diag", "low-rank", "kron"]
    stored = load_file("ckpt.pt.bnn/posteriors/thin-kron.safetensors")
    assert {tuple(one.shape)[1] for name, one in stored.items() if name.endswith(".features")} == {1}
    cli("predict", "ckpt.pt", "--posterior", "thin-kron", "--split", "val", "--trust-code").expect(0)
    assert metas["low-rank"]["metrics"]["rank"] == 4
    assert 0 < metas["low-rank"]["metrics"]["captured_trace"] <= 1
    assert all(0 < meta["metrics"]["effective_params"] < 23 for meta in metas.values())
    alone = cli("fit-laplace", "ckpt.pt", "--layers", "1.bias+3", *GIVEN, "--structure", "kron", "--trust-code")
    assert "3 of 11 parameters have no Kronecker factors and use only their diagonal" in alone.stderr
    nll = {name: meta["metrics"]["val_nll_laplace"] for name, meta in metas.items()}
    assert len(set(nll.values())) == 4


def test_a_subnetwork_is_fitted_and_predicts_and_its_parameters_are_told(cli: Cli, checkpoint_curvatures: Path) -> None:
    done = cli(*FIT_CURVATURES, *GIVEN, *SUBNETWORK, "--trust-code", "--json").expect(0, "5 of 23 parameters vary")
    metrics = done.json["metrics"]
    assert (metrics["subnetwork_size"], sum(metrics["subnetwork_params"].values())) == (5, 5)
    tensors = load_file("ckpt.pt.bnn/posteriors/laplace-all.safetensors")
    assert (tensors["cov.varying"].shape, tensors["cov.scale_tril"].shape) == ((5,), (5, 5))
    cli(
        "predict",
        "ckpt.pt",
        "--integrator",
        "mc",
        "--integrator",
        "logit-mc",
        "--integrator",
        "probit",
        "--split",
        "val",
        "--trust-code",
    ).expect(0)


def test_what_fixes_parameters_is_no_base_and_has_no_density(cli: Cli, checkpoint_curvatures: Path) -> None:
    cli(*FIT_CURVATURES, *GIVEN, *SUBNETWORK, "--trust-code").expect(0)
    for command in ("refine", "hmc"):
        cli(command, "ckpt.pt", "--layers", "all", "--base", "laplace-all", "--trust-code").expect(
            2, "fixes all but 5 parameters"
        )
    judged = cli("diagnose", "ckpt.pt", "--trust-code", "--json").json
    entry = judged["posteriors"]["laplace-all"]
    assert entry["doubts"] == ["it fixes all but 5 parameters"]
    assert (entry["elbo"]["value"], entry["val_nll"]["value"] > 0) == (None, True)
    assert "--prior-precision 3" in judged["verdict"]["run"]


@pytest.mark.long
def test_posterior_far_from_network(cli: Cli, checkpoint_curvatures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnncli.evaluation.distances._MOST_VALUES", 23 * 70)
    monkeypatch.setattr("bnncli.inference.elbo._FAR_NATS", 13.0)
    for name, precision in (("near", 10), ("far", 0.1)):
        words = ("--structure", "diag", "--prior-precision", precision, "--name", name)
        cli(*FIT_CURVATURES, *words, "--trust-code").expect(0)
    judged = cli("diagnose", "ckpt.pt", "--trust-code", "--json").json
    told = {name: judged["posteriors"][name] for name in ("near", "far")}
    assert (told["near"]["draws"] >= 512, told["far"]["draws"]) == (True, 32)
    assert told["far"]["log_weight_sd"]["value"] > 13
    assert judged["pairs"][0]["n"] == [70, 70]
    cli(*FIT_CURVATURES, "--structure", "full", *GIVEN, "--trust-code", "--name", "a-full").expect(0)
    cli(*FIT_CURVATURES, "--structure", "diag", *GIVEN, "--trust-code", "--name", "z-diag").expect(0)
    monkeypatch.setattr("bnncli.evaluation.verdict.CLOSE_LOG_WEIGHT_SD", 0.01)
    asked = ("diagnose", "ckpt.pt", "--posterior", "a-full", "--posterior", "z-diag", "--trust-code", "--json")
    said = cli(*asked).json
    spreads = {name: said["posteriors"][name]["log_weight_sd"]["value"] for name in ("a-full", "z-diag")}
    assert spreads["z-diag"] < spreads["a-full"]
    assert "--base z-diag" in said["verdict"]["run"]


def test_too_large_subnetwork_refused(cli: Cli, checkpoint_curvatures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli(*FIT_CURVATURES, *GIVEN, "--structure", "subnetwork", "--size", 24, "--trust-code").expect(
        2, "--size: expected 1 to 23"
    )
    planned = cli(*FIT_CURVATURES, *GIVEN, *SUBNETWORK, "--trust-code", "--dry-run", "--json")
    assert planned.json["outputs"][0]["estimated_bytes"] == 8 * 5**2 + 16 * 23
    for module in ("bnncli.inference.memory", "bnncli.system.memory"):
        monkeypatch.setattr(f"{module}.budget", lambda device: 60_000)
    monkeypatch.setattr("bnncli.inference.memory._COPIES", 20)  # of so small a matrix the rest is as large
    cli(*FIT_CURVATURES, *GIVEN, *SUBNETWORK[:-1], 23, "--trust-code", "--dry-run").expect(69)
    cli(*FIT_CURVATURES, *GIVEN, *SUBNETWORK, "--trust-code", "--dry-run").expect(0)


@pytest.mark.long
def test_draws_stand_in_the_place_of_the_gaussian_that_whitens_them(cli: Cli, checkpoint_curvatures: Path) -> None:
    done = cli(*FIT_CURVATURES, "--structure", "diag", "--draws", 6, "--trust-code", "--json").expect(0)
    metrics, meta = done.json["metrics"], meta_of("laplace-all")
    assert (meta["type"], meta["metrics"]["structure"], meta["criterion"]) == ("linear-draws", "diag", "val")
    assert 0 < metrics["solver_residual"] <= 0.02
    assert metrics["solver_passes"] == metrics["solver_steps"] + 2
    assert "6 draws from the full Gauss-Newton Gaussian" in done.stderr
    assert metrics["val"]["laplace"]["samples"] == 6
    predict = ("predict", "ckpt.pt", "--split", "val", "--trust-code")
    cli(*predict, "--integrator", "logit-mc", "--integrator", "mc", "--integrator", "probit").expect(0)
    for words, message in (
        (("--samples", 7), "expected at most 6"),
        (("--integrator", "importance"), "does not work for a linear-draws posterior"),
    ):
        cli(*predict, "--posterior", "laplace-all", *words, "--force").expect(2, message)
    assert "expected a gaussian posterior" in cli("refine", "ckpt.pt", "--layers", "all", "--trust-code").stderr
    entry = cli("diagnose", "ckpt.pt", "--trust-code", "--json").json["posteriors"]["laplace-all"]
    assert (entry["elbo"]["reason"], entry["val_nll"]["value"] > 0) == ("draws have no density", True)
    cli(*FIT_CURVATURES, "--structure", "diag", *GIVEN, "--draws", 1, "--trust-code", "--name", "single").expect(0)
    single = cli("diagnose", "ckpt.pt", "--layers", "all", "--trust-code")
    assert (single.code, "at least two draws from each posterior; single has one" in single.stdout) == (0, True), single
    planned = cli(*FIT_CURVATURES, "--draws", 9, "--trust-code", "--dry-run", "--json", "--name", "more")
    assert planned.json["outputs"][0]["estimated_bytes"] == 4 * 9 * 23 + 16 * 23


def test_searches_by_val_and_by_the_marginal_likelihood_choose_a_prior(cli: Cli, checkpoint_curvatures: Path) -> None:
    chosen = {}
    for criterion in ("val", "marglik"):
        cli(*FIT_CURVATURES, "--prior-precision", criterion, "--trust-code", "--name", criterion).expect(0)
        meta = meta_of(criterion)
        values = dict(meta["curve"])
        assert min(values, key=lambda key: values[key]) == meta["prior_precision"]
        chosen[criterion] = meta["prior_precision"]
    assert len(set(chosen.values())) == 2


def test_layers_have_precisions_of_their_own(cli: Cli, checkpoint_curvatures: Path) -> None:
    cli(*FIT_CURVATURES, "--precision-per", "layer", "--trust-code").expect(0, "prior precision per layer: 1 ")
    meta = meta_of("laplace-all")
    own = meta["metrics"]["layer_precisions"]
    assert meta["part_precisions"] == pytest.approx([own["1"], own["1"], own["3"], own["3"]])
    assert meta["metrics"]["layer_precisions_gain"] > 0
    assert "up to date" in cli(*FIT_CURVATURES, "--precision-per", "layer").stderr
    cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "val", "--trust-code").expect(0)


def test_an_indefinite_hessian_names_the_ggn(cli: Cli, checkpoint_curvatures: Path) -> None:
    cli(*FIT_CURVATURES, "--curvature", "hessian", "--prior-precision", "1e-6", "--trust-code").expect(
        70, "use --curvature ggn"
    )
    done = cli(*FIT_CURVATURES, "--curvature", "hessian", "--prior-precision", "30", "--trust-code")
    assert (done.code, meta_of("laplace-all")["curvature"]) == (0, "hessian")


def test_a_dry_run_plans_without_reading_all_data(cli: Cli, checkpoint_curvatures: Path) -> None:
    planned = cli(*FIT_CURVATURES, *GIVEN, "--trust-code", "--dry-run", "--json").expect(0)
    assert planned.json["outputs"][0]["estimated_bytes"] == 8 * 23**2 + 16 * 23
    assert "--trust-code" in cli(*FIT_CURVATURES, *GIVEN, "--dry-run").stderr
    cli(*FIT_CURVATURES, *GIVEN, "--trust-code").expect(0)
    again = cli(*FIT_CURVATURES, *GIVEN, "--dry-run", "--json")  # up to date: no code runs
    assert (
        again.json["outputs"][0]["estimated_bytes"]
        == Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors").stat().st_size
    )


def test_too_large_fits_are_refused(cli: Cli, checkpoint_curvatures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bnncli.inference.memory", "bnncli.system.memory"):
        monkeypatch.setattr(f"{module}.budget", lambda device: 28_000)
    cli(*FIT_CURVATURES, *GIVEN, "--structure", "full", "--trust-code").expect(69, "which fits")
    cli(*FIT_CURVATURES, *GIVEN, "--trust-code").expect(0)
    assert meta_of("laplace-all")["structure"] != "full"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--curvature", "hessian", "--structure", "diag"), "expected full or subnetwork; got 'diag'"),
        (("--curvature", "fisher", "--center", "mode"), "works only with --center checkpoint"),
        (("--precision-per", "layer", "--prior-precision", "val"), "by marginal likelihood"),
        (("--rank", "3"), "--rank is for --structure low-rank, kron, ekfac with --layers all or a pattern"),
        (("--size", "3"), "is for --structure subnetwork"),
        ((*SUBNETWORK, "--draws", "3"), "drop --curvature and --structure subnetwork"),
        ((*SUBNETWORK, "--bias-precision", "3"), "give --prior-precision a number"),
        ((*SUBNETWORK, "--center", "mode"), "give --prior-precision val or a number"),
    ],
)
def test_what_does_not_belong_together_is_told(cli: Cli, words: tuple[str | int, ...], message: str) -> None:
    cli(*FIT_CURVATURES, *words, "--trust-code").expect(2, message)


def test_the_last_layer_has_one_curvature(cli: Cli) -> None:
    cli("fit-laplace", "ckpt.pt", "--curvature", "fisher").expect(2, "for the last layer, ggn equals the Hessian")
    cli("fit-laplace", "ckpt.pt", "--draws", "3").expect(2, "for the last layer the Gaussian itself is stored")
