"""Posteriors over whole networks, from any inputs."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.artifacts.predictions import read_predictions

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
"""
FIT = ("fit-laplace", "ckpt.pt", "--prior-precision", "3")


@pytest.fixture
def checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose features are there, of a network by the user's own code; the test works beside it."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 1, 2, 2)).astype(np.float32)
    for name, rows in (("train", slice(0, 40)), ("test", slice(40, 60))):
        np.savez(f"{name}.npz", x=inputs[rows], y=(inputs[rows, 0, 0, 0] > 0).astype(np.int64))
    space: dict[str, object] = {}
    exec(NETWORK, space)
    torch.manual_seed(0)
    torch.save(space["make"]().state_dict(), "ckpt.pt")  # type: ignore[operator]
    splits = [word for name in ("train", "test") for word in ("--data", f"{name}=npz:{name}.npz")]
    assert cli("extract-features", "ckpt.pt", "--model", "net.py:make", *splits).code == 0
    return tmp_path / "ckpt.pt"


def test_the_last_layer_by_its_name_is_the_last_layer(cli: Cli, checkpoint: Path) -> None:
    assert cli(*FIT).code == 0
    named = cli(*FIT, "--layers", "3", "--center", "mode", "--trust-code", "--name", "named")
    assert named.code == 0
    folder = Path("ckpt.pt.bnn/posteriors")
    one, other = (read_header(folder / f"{name}.safetensors").meta for name in ("laplace", "named"))
    assert (one.get("layers"), other["layers"]) == (None, "3")
    evidence = [meta["metrics"]["log_marginal_likelihood"] for meta in (one, other)]
    assert evidence[0] == pytest.approx(evidence[1], abs=1e-4)
    asked = ("predict", "ckpt.pt", "--split", "test", "--integrator", "probit", "--trust-code")
    assert cli(*asked, "--posterior", "laplace", "--posterior", "named").code == 0
    probs = [
        read_predictions(Path(f"ckpt.pt.bnn/predictions/{name}.probit/test.h5")).probs for name in ("laplace", "named")
    ]
    np.testing.assert_allclose(probs[0], probs[1], atol=1e-5)


def test_all_layers_are_fitted_predicted_with_and_up_to_date(cli: Cli, checkpoint: Path) -> None:
    assert cli(*FIT, "--layers", "all", "--trust-code").code == 0
    meta = read_header(Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors")).meta
    assert [part["name"] for part in meta["param_layout"]] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert (meta["center"], meta["structure"]) == ("checkpoint", "full")
    assert "up to date" in cli(*FIT, "--layers", "all").stderr  # which runs no code
    refused = cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test")
    assert (refused.code, "add --trust-code" in refused.stderr) == (77, True)
    skipped = cli("predict", "ckpt.pt", "--split", "test")  # nobody named it
    assert (skipped.code, "skipping laplace-all with logit-mc" in skipped.stderr) == (0, True)
    assert cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code").code == 0
    assert Path("ckpt.pt.bnn/predictions/laplace-all.logit-mc/test.h5").is_file()  # of the linearised network


@pytest.mark.parametrize("most_full", [pytest.param(2048, marks=pytest.mark.long), 0])
def test_the_mode_of_all_layers_is_found_and_told(
    cli: Cli, checkpoint: Path, most_full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mode", "prior_search"):
        monkeypatch.setattr(f"bnncli.inference.{module}.MAX_FULL_PRECONDITIONER", most_full)
    words = ("--layers", "all", "--center", "mode", "--prior-precision", "marglik", "--trust-code")
    done = cli("fit-laplace", "ckpt.pt", *words, "--json")
    assert done.code == 0, done.stderr
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
    done = cli(*words)
    assert done.code == 0, done.stderr
    assert "posterior standard deviations from the mode (all 23 parameters together; a draw is about 5 away): the limit of 8 passes was reached" in (
        done.stderr.replace("\n", " ")
    )  # fmt: skip
    monkeypatch.setattr("bnncli.inference.mode.NEAR", 0)
    monkeypatch.setattr("bnncli.inference.mode.MOST_PASSES", 6)
    refused = cli(*words, "--name", "other", "--seed", "3")
    assert (refused.code, "error: found no mode after" in refused.stderr) == (70, True)


def test_code_runs_only_where_it_is_trusted_and_the_same(cli: Cli, checkpoint: Path) -> None:
    refused = cli(*FIT, "--layers", "all")
    assert (refused.code, "add --trust-code" in refused.stderr) == (77, True)
    Path("net.py").write_text(NETWORK + "\n")
    changed = cli(*FIT, "--layers", "all", "--trust-code")
    assert (changed.code, "net.py has changed" in changed.stderr) == (65, True)


def test_data_that_changed_are_told(cli: Cli, checkpoint: Path) -> None:
    np.savez("train.npz", x=np.zeros((40, 1, 2, 2), np.float32), y=np.arange(40) % 2)
    changed = cli(*FIT, "--layers", "all", "--trust-code")
    assert (changed.code, "train.npz has changed" in changed.stderr) == (65, True)


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
    assert cli("extract-features", "ckpt.pt", *words).code == 0
    named = ("--layers", "3", "--trust-code", "--name", "named", "--center", "mode")
    for more in ((), ("--layers", "all", "--trust-code"), named):
        assert cli(*FIT, *more).code == 0
    skipped = cli("diagnose", "ckpt.pt", "--draws", 64, "--json")
    assert (skipped.code, list(skipped.json["posteriors"])) == (0, ["map", "laplace"])
    assert skipped.stderr.count("skipping laplace-all") == 1
    assert cli("diagnose", "ckpt.pt", "--posterior", "laplace-all").code == 77
    found = cli("diagnose", "ckpt.pt", "--draws", 64, "--trust-code", "--json")
    assert found.code == 0, found.stderr
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
    done = cli(*FIT, "--layers", "all", "--structure", structure, "--trust-code", "--json")
    assert done.code == 0, done.stderr
    metrics = done.json["metrics"]
    assert metrics["structure"] == structure
    assert f"{'an' if structure == 'ekfac' else 'a'} {structure} Hessian is not exact" in done.stderr
    assert metrics.get("columns_drawn") == (None if structure == "block" else 0)  # two outputs: all columns
    assert metrics.get("num_diagonal_params") == (None if structure == "block" else 0)
    asked = ("predict", "ckpt.pt", "--posterior", "laplace-all", "--split", "test", "--trust-code")
    assert cli(*asked, "--integrator", "probit", "--integrator", "mc").code == 0
    found = [
        read_predictions(Path(f"ckpt.pt.bnn/predictions/laplace-all.{name}/test.h5")).probs for name in ("probit", "mc")
    ]
    assert 0 < float(np.abs(found[0] - found[1]).max()) < 0.2


def test_a_network_that_was_edited_makes_its_posteriors_stale(cli: Cli, checkpoint: Path) -> None:
    fit = (*FIT, "--layers", "all", "--trust-code")
    assert cli(*fit).code == 0
    header = read_header(Path("ckpt.pt.bnn/posteriors/laplace-all.safetensors"))
    roles = {entry["role"]: entry.get("is_artifact", True) for entry in header.inputs}
    assert roles == {"features.train": True, "data.train": False, "model": False}
    assert cli("status", "ckpt.pt", "--check").code == 0
    Path("net.py").write_text(NETWORK + "\n")
    stale = cli("predict", "ckpt.pt", "--posterior", "laplace-all", "--trust-code")
    assert (stale.code, "laplace-all.safetensors is stale: model (net.py) has changed" in stale.stderr) == (65, True)
    assert "model (net.py) has changed" in cli("status", "ckpt.pt").stdout.replace("\n", " ")
    again = cli(*fit)
    assert (again.code, "net.py has changed" in again.stderr) == (65, True)
    assert cli("predict", "ckpt.pt", "--posterior", "map", "--split", "test").code == 0  # of features alone


def test_layers_select_posteriors_wherever_they_are_read(cli: Cli, checkpoint: Path) -> None:
    words = ("--model", "net.py:make", "--data", "val=npz:test.npz")
    assert cli("extract-features", "ckpt.pt", *words).code == 0
    assert cli(*FIT).code == 0
    assert cli(*FIT, "--layers", "3+1", "--trust-code").code == 0
    asked = ("--layers", "3+1")
    untrusted = [cli(name, "ckpt.pt", *asked) for name in ("predict", "diagnose")]
    assert [(one.code, "add --trust-code" in one.stderr) for one in untrusted] == [(77, True)] * 2
    assert cli("predict", "ckpt.pt", *asked, "--trust-code", "--split", "test").code == 0
    assert [path.name for path in Path("ckpt.pt.bnn/predictions").iterdir()] == ["laplace-3-1.logit-mc"]
    none = cli("compare", "ckpt.pt", "--layers", "last")  # of posteriors that are there
    assert none.code == 66
    assert "no predictions of a posterior over --layers last (have: over 3+1: laplace-3-1)" in none.stderr
    assert "bnncli predict ckpt.pt --layers last" in none.stderr
    assert cli("predict", "ckpt.pt", "--layers", "last", "--split", "test").code == 0
    found = cli("diagnose", "ckpt.pt", *asked, "--draws", 64, "--trust-code", "--json")
    assert (found.code, list(found.json["posteriors"])) == (0, ["laplace-3-1"])
    for words in (("evaluate", "--bootstrap", "0"), ("compare", "--metric", "nll", "--bootstrap", "100")):
        rows = cli(words[0], "ckpt.pt", *words[1:], "--layers", "last", "--json").json["rows"]
        assert [row["posterior"] for row in rows] == ["map", "laplace"]
    words = ("--metric", "nll", "--bootstrap", "100", "--baseline", "map", "--json")
    beside = cli("compare", "ckpt.pt", *asked, *words).json["rows"]  # which is over the last layer
    assert [row["posterior"] for row in beside] == ["map", "laplace-3-1"]
    held = cli("evaluate", "ckpt.pt", *asked, "--bootstrap", "0", "--assert", "nll<=9")  # of these alone
    assert held.code == 0, held.stderr


@pytest.mark.parametrize("name", ["predict", "diagnose"])
def test_layers_without_a_posterior_are_told(cli: Cli, checkpoint: Path, name: str) -> None:
    assert cli(*FIT).code == 0
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
    wrong = cli(name, "ckpt.pt", "--layers", "all+")
    assert (wrong.code, "expected last, all or patterns" in wrong.stderr) == (2, True)


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
    done = cli("extract-features", "ckpt.pt", "--model", f"nets.py:{name}", *data, *words)
    assert done.code == 0, done.stderr


def probabilities(cli: Cli, run: str, posterior: str) -> np.ndarray:
    words = ("--posterior", posterior, "--integrator", "plug-in", "--split", "test", "--trust-code")
    done = cli("predict", run, *words)
    assert done.code == 0, done.stderr
    return read_predictions(Path(f"{run}.bnn/predictions/{posterior}.plug-in/test.h5")).probs


@pytest.mark.parametrize("name", ["Several", "Probabilities", "Attention"])
@pytest.mark.long
def test_the_centre_predicts_as_the_network_does(cli: Cli, made: None, name: str) -> None:
    extract(cli, name, *(["--output", "main"] if name == "Several" else []))
    done = cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS)
    assert done.code == 0, done.stderr
    np.testing.assert_allclose(
        probabilities(cli, "ckpt.pt", "laplace-all"), probabilities(cli, "ckpt.pt", "map"), atol=2e-6
    )


def test_confident_probabilities_are_as_good_as_logits(cli: Cli, made: None) -> None:
    found = []
    for name in ("ConfidentProbabilities", "Confident"):
        extract(cli, name, "--force")
        done = cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS, "--force")
        assert done.code == 0, done.stderr
        assert probabilities(cli, "ckpt.pt", "map").max() > 1 - 1e-7
        words = ("--posterior", "laplace-all", "--integrator", "probit", "--split", "test", "--trust-code", "--force")
        assert cli("predict", "ckpt.pt", *words).code == 0
        found.append(read_predictions(Path("ckpt.pt.bnn/predictions/laplace-all.probit/test.h5")).probs)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_confident_labels_of_a_sigmoid_keep_their_logits(cli: Cli, made: None) -> None:
    with np.load("data.npz") as file:
        np.savez("data.npz", x=file["x"], y=np.eye(3, dtype=np.uint8)[file["y"]])
    extract(cli, "ConfidentLabels", "--task", "multilabel")
    done = cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS)
    assert done.code == 0, done.stderr
    ours, theirs = (probabilities(cli, "ckpt.pt", name) for name in ("laplace-all", "map"))
    assert theirs.max() > 1 - 1e-7
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_features_of_lower_precision_are_of_the_same_network(cli: Cli, made: None) -> None:
    extract(cli, "Plain", "--autocast", "bf16")
    assert cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS).code == 0


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
def test_what_was_just_made_is_no_other_revisions(
    cli: Cli, made: None, layers: str, structure: str, num_train: int
) -> None:
    with np.load("data.npz") as file:
        np.savez("data.npz", x=file["x"][: num_train + 10], y=file["y"][: num_train + 10])
    extract(cli, "Plain")
    words = ("--layers", layers, "--trust-code", "--prior-precision", "3")
    done = cli("fit-laplace", "ckpt.pt", *words, "--structure", structure, "--name", "q")
    assert done.code == 0, done.stderr
    for later in (("predict", "--posterior", "q"), ("refine", *words[:3], "--base", "q", "--epochs", "1")):
        done = cli(later[0], "ckpt.pt", *later[1:], "--trust-code")
        assert done.code == 0, done.stderr
    assert "stale" not in cli("status", "ckpt.pt").stdout


def test_parameters_that_the_logits_do_not_see_are_refused(cli: Cli, made: None) -> None:
    extract(cli, "Plain")
    refused = cli("fit-laplace", "ckpt.pt", "--layers", "other", *FIT_ON_INPUTS[2:])
    assert (refused.code, "its logits do not depend on these parameters" in refused.stderr) == (65, True)


def test_data_that_are_gone_are_told_with_the_command_that_names_them_again(cli: Cli, made: None) -> None:
    extract(cli, "Plain")
    Path("data.npz").rename("moved.npz")
    refused = cli("fit-laplace", "ckpt.pt", *FIT_ON_INPUTS)
    assert refused.code == 66
    assert "no file 'data.npz'; the features of split 'train' were extracted from it" in refused.stderr
    assert "bnncli extract-features ckpt.pt --model nets.py:Plain --data train=npz:data.npz" in refused.stderr


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_texts_of_any_length_are_read_as_extract_features_read_them(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
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
    assert cli("extract-features", kind, "--model", f"hf:{kind}", *data, "--batch-size", "5").code == 0
    done = cli("fit-laplace", kind, *FIT_ON_INPUTS)
    assert done.code == 0, done.stderr
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
    done = cli("extract-features", "run", "--model", "peft:adapter", "--base-model", "base", *data)
    assert done.code == 0, done.stderr
    fit = ("--layers", "*lora_*", *FIT_ON_INPUTS[2:], "--name", "laplace-all")
    done = cli("fit-laplace", "run", *fit)
    assert done.code == 0, done.stderr
    parts = read_header(Path("run.bnn/posteriors/laplace-all.safetensors")).meta["param_layout"]
    assert [part["name"].split(".")[-4:-1] for part in parts] == [
        [layer, ab, "default"] for layer in ("query", "value") for ab in ("lora_A", "lora_B")
    ]
    np.testing.assert_allclose(probabilities(cli, "run", "laplace-all"), probabilities(cli, "run", "map"), atol=2e-6)
    assert cli("predict", "run", "--posterior", "laplace-all", "--split", "test", "--trust-code").code == 0
