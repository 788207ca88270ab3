"""Inputs of posteriors over other layers: texts, images, several outputs, lower precision; what cannot be read or differentiated."""

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

FIT = ("--layers", "all", "--trust-code", "--structure", "diag", "--prior-precision", "3")
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
    done = cli("fit-laplace", "ckpt.pt", *FIT)
    assert done.code == 0, done.stderr
    np.testing.assert_allclose(
        probabilities(cli, "ckpt.pt", "laplace-all"), probabilities(cli, "ckpt.pt", "map"), atol=2e-6
    )


def test_confident_probabilities_are_as_good_as_logits(cli: Cli, made: None) -> None:
    found = []
    for name in ("ConfidentProbabilities", "Confident"):
        extract(cli, name, "--force")
        done = cli("fit-laplace", "ckpt.pt", *FIT, "--force")
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
    done = cli("fit-laplace", "ckpt.pt", *FIT)
    assert done.code == 0, done.stderr
    ours, theirs = (probabilities(cli, "ckpt.pt", name) for name in ("laplace-all", "map"))
    assert theirs.max() > 1 - 1e-7
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_features_of_lower_precision_are_of_the_same_network(cli: Cli, made: None) -> None:
    extract(cli, "Plain", "--autocast", "bf16")
    assert cli("fit-laplace", "ckpt.pt", *FIT).code == 0


@pytest.mark.parametrize(("name", "why"), [("Branching", "differentiated"), ("Frozen", "differentiated")])
def test_networks_without_derivatives_are_refused_in_a_line(cli: Cli, made: None, name: str, why: str) -> None:
    extract(cli, name)
    refused = cli("fit-laplace", "ckpt.pt", *FIT)
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
    refused = cli("fit-laplace", "ckpt.pt", "--layers", "other", *FIT[2:])
    assert (refused.code, "its logits do not depend on these parameters" in refused.stderr) == (65, True)


def test_data_that_are_gone_are_told_with_the_command_that_names_them_again(cli: Cli, made: None) -> None:
    extract(cli, "Plain")
    Path("data.npz").rename("moved.npz")
    refused = cli("fit-laplace", "ckpt.pt", *FIT)
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
    done = cli("fit-laplace", kind, *FIT)
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
    fit = ("--layers", "*lora_*", *FIT[2:], "--name", "laplace-all")
    done = cli("fit-laplace", "run", *fit)
    assert done.code == 0, done.stderr
    parts = read_header(Path("run.bnn/posteriors/laplace-all.safetensors")).meta["param_layout"]
    assert [part["name"].split(".")[-4:-1] for part in parts] == [
        [layer, ab, "default"] for layer in ("query", "value") for ab in ("lora_A", "lora_B")
    ]
    np.testing.assert_allclose(probabilities(cli, "run", "laplace-all"), probabilities(cli, "run", "map"), atol=2e-6)
    assert cli("predict", "run", "--posterior", "laplace-all", "--split", "test", "--trust-code").code == 0
