"""fit-ensemble: its predictions against each network run by hand, and what is no ensemble."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from bnncli.artifacts.posteriors import read_posterior
from bnncli.artifacts.predictions import read_predictions
from bnncli.models.architectures import resnet20

NETWORK = """
import torch
def make(width=2):
    layers = torch.nn.Conv2d(1, width, 3), torch.nn.BatchNorm2d(width), torch.nn.ReLU(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(16 * width, 3))
"""
DATA = ("--data", "train=npz:train.npz", "--data", "test=npz:test.npz", "--hold-out", "val=test:10")
OWN = ("--model", "net.py:make")


def network(seed: int, width: int = 2, classes: int = 3) -> nn.Sequential:
    """The network of net.py, after a few batches of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten()
        found = nn.Sequential(*layers, nn.Linear(16 * width, classes))
        for _ in range(3):
            found(torch.randn(8, 1, 6, 6) * (1 + seed) + seed)
    return found.eval()


def save(path: str, module: nn.Module) -> None:
    torch.save(module.state_dict(), path)


def inputs_of(name: str) -> Tensor:
    with np.load(name) as arrays:
        return torch.from_numpy(arrays["x"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data of three classes, and three networks with batch norm whose statistics differ much."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, count in (("train", 30), ("test", 40)):
        x = rng.normal(size=(count, 1, 6, 6)).astype(np.float32)
        np.savez(f"{name}.npz", x=x, y=rng.integers(0, 3, count))
    Path("net.py").write_text(NETWORK)
    for seed in range(3):
        save(f"{seed}.pt", network(seed))
    return tmp_path


def probabilities(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of the classes, and the rows that they are of."""
    content = read_predictions(path)
    return np.asarray(content.probs), np.asarray(content.sample_id)


def test_predictions_are_the_mean_of_the_networks_own(cli: Cli) -> None:
    cli("extract-features", "0.pt", *OWN, *DATA).expect(0)
    done = cli("fit-ensemble", "0.pt", "1.pt", "2.pt", "--trust-code")
    assert (done.code, done.stdout) == (0, "0.pt.bnn/posteriors/ensemble.safetensors\n")
    assert ("3 members" in done.stderr, "predicts val worse" in done.stderr) == (True, False)
    assert "up to date" in cli("fit-ensemble", "0.pt", "1.pt", "2.pt", "--trust-code").stderr
    cli("predict", "0.pt", "--posterior", "ensemble", "--split", "test", "--trust-code").expect(
        0, "draws: ensemble.mc 3"
    )
    found, rows = probabilities(Path("0.pt.bnn/predictions/ensemble.mc/test.h5"))
    with torch.no_grad():
        own = [network(seed)(inputs_of("test.npz")[rows]).double().softmax(1) for seed in range(3)]
    np.testing.assert_allclose(found, torch.stack(own).mean(0).numpy(), atol=1e-6)
    assert not np.allclose(found, own[0].numpy(), atol=0.01)
    tensors, header = read_posterior(Path("0.pt.bnn/posteriors/ensemble.safetensors"))
    assert len(tensors["members"]) == 3
    labels = np.load("test.npz")["y"]
    held_out = np.setdiff1d(np.arange(40), rows)
    with torch.no_grad():
        each = torch.stack([network(seed)(inputs_of("test.npz")[held_out]).double().softmax(1) for seed in range(3)])
    nll = -each[:, range(10), labels[held_out]].log().mean(1)
    assert header.meta["metrics"]["val_nll_members"] == pytest.approx(nll.tolist(), rel=1e-5)
    together = -each.mean(0)[range(10), labels[held_out]].log().mean()
    assert header.meta["metrics"]["val"]["ensemble"]["nll"] == pytest.approx(float(together), rel=1e-5)
    assert header.meta["metrics"]["val"]["network"]["nll"] == pytest.approx(float(nll[0]), rel=1e-5)


@pytest.mark.long
def test_later_commands_take_an_ensemble_like_any_other(cli: Cli) -> None:
    cli("extract-features", "0.pt", *OWN, *DATA).expect(0)
    cli("fit-ensemble", "0.pt", "1.pt", "2.pt", "--trust-code").expect(0)
    cli("predict", "0.pt", "--posterior", "map", "--posterior", "ensemble", "--trust-code").expect(0)
    scored = cli("evaluate", "0.pt", "--posterior", "ensemble", "--bootstrap", 0, "--json")
    assert {row["posterior"] for row in scored.json["rows"]} == {"ensemble"}
    cli("compare", "0.pt", "--bootstrap", 100).expect(0)
    diagnosed = cli("diagnose", "0.pt", "--posterior", "ensemble", "--trust-code", "--json").expect(0)
    assert diagnosed.json["posteriors"]["ensemble"]["elbo"]["value"] is None
    cli("verify", "0.pt.bnn").expect(0)
    cli("status", "0.pt", "--check").expect(0)


def test_a_resnet_predicts_with_each_members_own_statistics(cli: Cli) -> None:
    rng = np.random.default_rng(1)
    np.savez("images.npz", x=rng.normal(size=(4, 3, 8, 8)).astype(np.float32), y=np.array([0, 1, 2, 1]))
    members = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(2):
            torch.manual_seed(seed)
            one = resnet20.build(classes=3)
            one(torch.randn(4, 3, 8, 8) * (1 + seed))
            save(f"r{seed}.pt", one)
            members.append(one.eval())
    cli("extract-features", "r0.pt", "--model", "resnet20", "--data", "test=npz:images.npz").expect(0)
    cli("fit-ensemble", "r0.pt", "r1.pt").expect(0)
    cli("predict", "r0.pt", "--posterior", "ensemble").expect(0)
    found, rows = probabilities(Path("r0.pt.bnn/predictions/ensemble.mc/test.h5"))
    with torch.no_grad():
        own = torch.stack([one(inputs_of("images.npz")[rows]).double().softmax(1) for one in members])
    np.testing.assert_allclose(found, own.mean(0).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("member", "code", "said"),
    [
        ("1.pt", 2, "MEMBER: 1.pt is given twice"),
        ("0.pt", 2, "MEMBER: 0.pt is given twice"),
        ("copy.pt", 2, "MEMBER: copy.pt has the same weights as 1.pt"),
        ("wide.pt", 65, "has shape (3, 1, 3, 3) in the checkpoint"),
        ("four.pt", 65, "'4.weight' has shape (4, 32) in the checkpoint"),
        ("absent.pt", 66, "absent.pt"),
        ("train.npz", 65, "train.npz"),
    ],
)
def test_what_is_no_member_is_told_in_a_line(cli: Cli, member: str, code: int, said: str) -> None:
    save("wide.pt", network(5, width=3))
    save("four.pt", network(5, classes=4))
    save("copy.pt", network(1))
    cli("extract-features", "0.pt", *OWN, *DATA).expect(0)
    cli("fit-ensemble", "0.pt", "1.pt", member, "--trust-code").expect(code, said)
    assert not Path("0.pt.bnn/posteriors/ensemble.safetensors").exists()


def test_a_built_in_network_of_other_sizes_is_no_member(cli: Cli) -> None:
    from bnncli.models.architectures import mlp

    save("m.pt", mlp.build(inputs=36, hidden=(3,), classes=3))
    save("n.pt", mlp.build(inputs=36, hidden=(4,), classes=3))
    cli("extract-features", "m.pt", "--model", "mlp", *DATA).expect(0)
    cli("fit-ensemble", "m.pt", "n.pt").expect(
        65, "n.pt: 'features.0.weight' has shape (4, 36), but (3, 36) in m.pt; members must have the same"
    )


def test_code_is_run_only_where_it_is_trusted(cli: Cli) -> None:
    cli("extract-features", "0.pt", *OWN, *DATA).expect(0)
    cli("fit-ensemble", "0.pt", "1.pt").expect(77)


def test_a_member_that_changed_makes_the_ensemble_anew(cli: Cli) -> None:
    cli("extract-features", "0.pt", *OWN, *DATA).expect(0)
    cli("fit-ensemble", "0.pt", "1.pt", "--trust-code").expect(0)
    save("1.pt", network(9))
    done = cli("fit-ensemble", "0.pt", "1.pt", "--trust-code")
    assert "member.2 has changed" in done.stderr
    assert done.code == 0
    cli("fit-ensemble", "0.pt", "1.pt", "2.pt", "--trust-code").expect(73)


def test_a_stale_ensemble_is_made_again_of_the_same_members(cli: Cli) -> None:
    cli("extract-features", "0.pt", *OWN, *DATA).expect(0)
    cli("fit-ensemble", "0.pt", "1.pt", "2.pt", "--trust-code").expect(0)
    cli("extract-features", "0.pt", *OWN, *DATA, "--mean", 0.5, "--force").expect(0)
    found = cli("status", "0.pt", "--json").json["artifacts"]
    (entry,) = [one for one in found if one["name"] == "posteriors/ensemble.safetensors"]
    assert (entry["state"], entry["remake"]) == ("stale", "bnncli fit-ensemble 0.pt 1.pt 2.pt --trust-code")


def test_other_members_are_another_ensemble_and_their_order_is_none(cli: Cli) -> None:
    cli("extract-features", "0.pt", *OWN, *DATA).expect(0)
    save("3.pt", network(3))
    cli("fit-ensemble", "0.pt", "1.pt", "2.pt", "--trust-code").expect(0)
    assert "up to date" in cli("fit-ensemble", "0.pt", "2.pt", "1.pt", "--trust-code").stderr
    cli("fit-ensemble", "0.pt", "1.pt", "3.pt", "--trust-code").expect(73, "members")


def informative_labels() -> None:
    """Labels that the networks tell something of: those of their mean for most rows."""
    rng = np.random.default_rng(3)
    for name in ("train", "test"):
        with torch.no_grad():
            mean = torch.stack([network(seed)(inputs_of(f"{name}.npz")).softmax(1) for seed in range(3)]).mean(0)
        labels = np.where(rng.random(len(mean)) < 0.7, mean.argmax(1).numpy(), rng.integers(0, 3, len(mean)))
        np.savez(f"{name}.npz", x=inputs_of(f"{name}.npz").numpy(), y=labels)


def test_one_temperature_divides_the_logits_of_all_members(cli: Cli) -> None:
    informative_labels()
    half = (*DATA[:-1], "val=test:20")
    cli("extract-features", "0.pt", *OWN, *half).expect(0)
    words = ("fit-ensemble", "0.pt", "1.pt", "2.pt", "--trust-code", "--each", "temperature", "--json")
    metrics = cli(*words).json["metrics"]
    cli("predict", "0.pt", "--posterior", "ensemble", "--split", "test", "--trust-code").expect(0)
    found, rows = probabilities(Path("0.pt.bnn/predictions/ensemble.mc/test.h5"))
    labels, val = np.load("test.npz")["y"], np.setdiff1d(np.arange(40), rows)
    with torch.no_grad():
        logits = torch.stack([network(seed)(inputs_of("test.npz")).double() for seed in range(3)])

    def nll(log_temperature: float) -> float:
        probs = (logits[:, val] / np.exp(log_temperature)).softmax(2).mean(0)
        return -float(probs[range(20), labels[val]].log().mean())

    best = minimize_scalar(nll, bounds=(np.log(0.05), np.log(20)), method="bounded", options={"xatol": 1e-8}).x
    assert metrics["temperature"] == pytest.approx(np.exp(best), rel=1e-4)
    assert abs(best) > 0.1
    np.testing.assert_allclose(found, (logits[:, rows] / np.exp(best)).softmax(2).mean(0).numpy(), atol=1e-5)
    assert metrics["val"]["ensemble"]["nll"] > nll(best)  # held out
    assert metrics["val"]["ensemble"]["nll"] == pytest.approx(nll(best), abs=0.1)


def test_a_temperature_needs_labels_of_val(cli: Cli) -> None:
    cli("extract-features", "0.pt", *OWN, *DATA[:4]).expect(0)
    cli("fit-ensemble", "0.pt", "1.pt", "--trust-code", "--each", "temperature").expect(
        66, "the temperature is chosen on labelled data"
    )


@pytest.mark.long
def test_a_mixture_of_laplace_posteriors_is_the_mean_of_what_each_predicts_by_itself(cli: Cli) -> None:
    informative_labels()
    half = (*DATA[:-1], "val=test:20", "--hold-out", "calib=test:10")
    for seed in range(3):
        cli("extract-features", f"{seed}.pt", *OWN, *half).expect(0)
    words = ("fit-ensemble", "0.pt", "2.pt", "1.pt", "--trust-code", "--each", "laplace")
    done = cli(*words, "--json").expect(0)
    assert done.json["outputs"][0]["path"] == "0.pt.bnn/posteriors/mola.safetensors"
    own, compared = [], 0
    for seed, precision in enumerate(done.json["metrics"]["prior_precision"]):
        searched = cli("fit-laplace", f"{seed}.pt", "--name", "searched", "--json").json["metrics"]
        if searched["prior_precision_for"] == "mc":  # a member's is for draws, whatever its mode predicts
            assert precision == pytest.approx(searched["prior_precision"], rel=1e-3)
            compared += 1
        cli("fit-laplace", f"{seed}.pt", "--prior-precision", precision).expect(0)
        draws = ("--posterior", "laplace", "--split", "test", "--integrator", "logit-mc", "--samples", 8192)
        cli("predict", f"{seed}.pt", *draws).expect(0)
        own.append(probabilities(Path(f"{seed}.pt.bnn/predictions/laplace.logit-mc/test.h5"))[0])
    assert compared
    assert "up to date" in cli(*words).stderr
    cli("predict", "0.pt", "--posterior", "mola", "--trust-code", "--samples", 60000).expect(0)
    found, rows = probabilities(Path("0.pt.bnn/predictions/mola.mc/test.h5"))
    table_of = ("--posterior", "mola", "--trust-code", "--samples", 60000, "--table", "new.npz", "--probabilities")
    cli("predict", "0.pt", "--data", "new=npz:test.npz", *table_of).expect(0)
    with np.load("new.npz") as table:
        np.testing.assert_allclose(table["probabilities"][rows], found, atol=1e-5)
    np.testing.assert_allclose(
        found, np.mean(own, axis=0), atol=6e-3
    )  # 4 standard errors of 20,000 draws a member, sd .2
    assert np.abs(found - own[0]).max() > 0.05
    cli("evaluate", "0.pt", "--posterior", "mola", "--bootstrap", 0).expect(0)
    cli("calibrate", "0.pt", "--posterior", "mola", "--sets", "lac", "--coverage", 0.8).expect(0)
    cli("predict", "0.pt", "--posterior", "map").expect(0)
    assert "mola" in cli("compare", "0.pt", "--bootstrap", 100).stdout
    cli("verify", "0.pt.bnn").expect(0)
    cli("diagnose", "0.pt", "--posterior", "mola", "--trust-code").expect(65, "no common target")
    cli("diagnose", "0.pt").expect(0)


def test_without_labels_of_val_members_choose_their_precision_by_leaving_out_examples(cli: Cli) -> None:
    informative_labels()
    for seed in (0, 1):
        cli("extract-features", f"{seed}.pt", *OWN, *DATA[:4]).expect(0)
    done = cli("fit-ensemble", "0.pt", "1.pt", "--trust-code", "--each", "laplace", "--json").expect(0)
    alone = [cli("fit-laplace", f"{seed}.pt", "--json").json["metrics"]["prior_precision"] for seed in (0, 1)]
    assert done.json["metrics"]["prior_precision"] == pytest.approx(alone, rel=1e-4)
    assert done.json["metrics"]["val"] is None


def test_members_that_spoil_the_first_network_are_warned_of(cli: Cli) -> None:
    labels = network(0)(inputs_of("test.npz")).argmax(1).numpy()  # as the first network has them
    np.savez("test.npz", x=inputs_of("test.npz").numpy(), y=labels)
    spoilt = network(0)
    with torch.no_grad():
        spoilt[4].weight *= -30
    save("spoilt.pt", spoilt)
    half = (*DATA[:-1], "val=test:20")
    cli("extract-features", "0.pt", *OWN, *half).expect(0)
    done = cli("fit-ensemble", "0.pt", "spoilt.pt", "--trust-code", "--json").expect(0)
    assert done.json["metrics"]["val_excess"]["network"]["is_worse"]
    assert "ensemble predicts val worse than simpler choices" in done.stderr
    assert "bnncli predict 0.pt --posterior map" in done.stderr


def test_its_cost_is_the_sum_of_the_members(cli: Cli) -> None:
    flat = ("--model", "mlp", "--model-arg", "inputs=36", "--model-arg", "hidden=3", "--model-arg", "classes=3")
    cli("train", "m.safetensors", *flat, *DATA, "--epochs", 2, "--seeds", 2).expect(0)
    cli("train", "one.safetensors", *flat, *DATA, "--epochs", 3, "--seed", 7).expect(0)
    cli("extract-features", "m-0.safetensors", *DATA).expect(0)
    done = cli("fit-ensemble", "m-0.safetensors", "m-1.safetensors", "one.safetensors", "--json").expect(0)
    assert done.json["metrics"]["gradient_passes"] == 7
