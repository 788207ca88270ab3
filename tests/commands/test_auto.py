"""auto: the ladder climbed as far as it is needed, one recommendation, and predict that takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.arrays import make_wide_arrays
from problems.command_line import Cli, new_run
from problems.pages import read_page
from sklearn.metrics import roc_auc_score

import bnncli
from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands import auto as ladder
from bnncli.commands import refine
from bnncli.commands import stack as stack_work
from bnncli.commands.auto import find_siblings
from bnncli.models.architectures import mlp
from bnncli.system import signals
from bnncli.system.signals import BudgetSpent


def separable(num_train: int, num_features: int, *, scale: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Classes by a head that a network has learnt with too large weights."""
    generator = np.random.default_rng(seed)
    weight = generator.normal(size=(3, num_features))
    arrays: dict[str, np.ndarray] = {
        "head_weight": (scale * weight).astype(np.float32),
        "head_bias": np.zeros(3, np.float32),
    }
    for split, count in (("train", num_train), ("val", 400), ("test", 50)):
        features = generator.normal(size=(count, num_features)).astype(np.float32)
        noise = generator.gumbel(size=(count, 3))
        arrays |= {f"features_{split}": features, f"labels_{split}": (features @ weight.T + noise).argmax(axis=1)}
    return arrays


def auto(cli: Cli, run: Path, *words: object) -> dict[str, Any]:
    done = cli("auto", run, "--json", *words)
    assert done.code == 0, done.stderr
    return done.json


def test_where_a_gaussian_is_good_nothing_above_it_is_fitted_and_predict_takes_what_is_recommended(
    cli: Cli, tmp_path: Path
) -> None:
    run = new_run(cli, tmp_path / "run", separable(2000, 4, scale=6.0))
    found = auto(cli, run)
    assert [rung["name"] for rung in found["rungs"]] == ["network", "fit-temperature", "stack", "fit-laplace"]
    chosen = [row for row in found["rows"] if row["is_recommended"]]
    temperature = next(row for row in found["rows"] if row["posterior"] == "temperature")
    assert len(chosen) == 1
    assert chosen[0]["nll"] <= temperature["nll"]
    assert cli("predict", run, "--split", "test").code == 0
    made = [path.name for path in (tmp_path / "run.bnn/predictions").iterdir()]
    assert made == [f"{chosen[0]['posterior']}.{chosen[0]['integrator']}"]
    opened = bnncli.open(run)
    given = opened.predict(opened.split("test").features)
    assert [f"{given.posterior}.{given.integrator}"] == made
    assert auto(cli, run)["action"] == "up_to_date"
    assert cli("status", run, "--check").code == 0


def test_a_network_at_its_best_temperature_is_recommended_where_posteriors_are_worse(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(12, 30, scale=1.0)  # the head is the truth, which twelve examples do not tell
    run = new_run(cli, tmp_path / "run", arrays)
    found = auto(cli, run)
    assert "no posterior has a significantly lower NLL (by more than 1%)" in found["metrics"]["sentence"]
    assert next(row for row in found["rows"] if row["is_recommended"])["posterior"] in ("temperature", "map")


@pytest.mark.long
def test_the_ladder_is_climbed_where_the_gaussian_is_no_good(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(40, 6, scale=3.0, seed=1)
    run = new_run(cli, tmp_path / "run", arrays)
    assert (
        cli("fit-laplace", run, "--prior-precision", 0.02, "--structure", "full").code == 0
    )  # a weak prior, as the user wants it
    found = auto(cli, run, "--full")
    names = {rung["posterior"]: rung["is_good"] for rung in found["rungs"]}
    assert {"laplace-auto", "refine-auto", "hmc-auto"} <= names.keys()  # what the user fitted stays
    assert names["hmc-auto"]


@pytest.mark.long
def test_chains_are_left_out_where_the_refined_posterior_is_behind(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_wide_arrays(num_test=40))
    found = auto(cli, run)
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    assert rungs["refine"]["is_good"] is False
    val = read_header(tmp_path / "run.bnn/posteriors/refine.safetensors").meta["metrics"]["val"]
    note = rungs["hmc"]["note"]
    assert not rungs["hmc"]["is_there"]
    assert f"refine predicts val worse than temperature (NLL {val['refine']['nll']:.4f}, " in note
    assert f"temperature {val['temperature']['nll']:.4f}); --full" in note
    assert val["refine"]["nll"] > 1.01 * val["temperature"]["nll"]


@pytest.mark.long
def test_what_was_judged_is_not_judged_again_until_it_is_another(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", separable(200, 4, scale=3.0))
    first = auto(cli, run)
    asked: list[str] = []
    judge = ladder._is_good
    monkeypatch.setattr(ladder, "_is_good", lambda *arguments: asked.append(arguments[1]) or judge(*arguments))
    again = auto(cli, run)
    assert ([rung["is_good"] for rung in again["rungs"]], asked) == ([rung["is_good"] for rung in first["rungs"]], [])
    auto(cli, run, "--prior-precision", 3)
    assert asked[0] == "laplace-prior3"
    asked.clear()
    auto(cli, run, "--force")
    assert asked[0] == "laplace"


@pytest.mark.long
def test_a_single_val_example_has_no_standard_error(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(60, 4, scale=3.0)
    arrays |= {f"{kind}_val": arrays[f"{kind}_val"][:1] for kind in ("features", "labels")}
    done = cli("auto", new_run(cli, tmp_path / "run", arrays))
    assert done.code == 0, done.stderr
    assert " +- " not in done.stdout


def test_another_prior_is_another_recommendation_without_force(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    first = auto(cli, run, "--prior-precision", 3)
    again = auto(cli, run, "--prior-precision", 30)
    assert (first["action"], again["action"]) == ("computed", "replaced")
    assert "laplace-prior30" in {rung["posterior"] for rung in again["rungs"]}  # the first stays
    first_file = (tmp_path / "run.bnn/posteriors/laplace.safetensors").read_bytes()
    third = auto(cli, run, "--prior-precision", 300)
    assert "laplace-prior300" in {rung["posterior"] for rung in third["rungs"]}
    assert (tmp_path / "run.bnn/posteriors/laplace.safetensors").read_bytes() == first_file
    assert (
        read_header(tmp_path / "run.bnn/posteriors/laplace-prior30.safetensors").provenance["params"]["prior_precision"]
        == 30
    )


@pytest.mark.long
def test_a_posterior_whose_judgement_the_budget_ends_is_no_less_there(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))

    def judge(run: object, name: str) -> bool:
        raise BudgetSpent

    monkeypatch.setattr(ladder, "_is_good", judge)
    found = auto(cli, run)
    rungs = {rung["name"]: rung for rung in found["rungs"]}
    assert (rungs["fit-laplace"]["is_there"], rungs["fit-laplace"]["is_good"]) == (True, None)
    assert "fitted, but not compared" in rungs["fit-laplace"]["note"]
    assert {row["posterior"] for row in found["rows"]} >= {"laplace"}
    assert "no posterior was fitted" not in found["metrics"]["sentence"]


@pytest.mark.long
def test_what_is_made_from_a_posterior_of_its_own_name_has_that_too_and_others_are_named(
    cli: Cli, tmp_path: Path
) -> None:
    run = new_run(cli, tmp_path / "run", separable(40, 6, scale=3.0, seed=1))
    assert cli("fit-laplace", run, "--prior-precision", 0.02).code == 0
    assert cli("fit-vi", run, "--epochs", 1).code == 0
    done = cli("auto", run, "--full", "--prior-precision", 0.5)
    assert done.code == 0, done.stderr
    names = {path.stem for path in (tmp_path / "run.bnn/posteriors").iterdir()}
    assert {"laplace", "laplace-prior0p5", "refine-prior0p5", "hmc-prior0p5"} <= names
    assert "not considered: laplace, vi (" in done.stderr
    assert "their scores are slightly optimistic" not in done.stdout
    assert "their scores are slightly optimistic" in cli("auto", run).stdout


def test_predict_takes_all_posteriors_where_all_are_asked_for(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    auto(cli, run)
    done = cli("predict", run, "--split", "test", "--posterior", "all")
    assert done.code == 0, done.stderr
    made = {path.name.partition(".")[0] for path in (tmp_path / "run.bnn/predictions").iterdir()}
    assert made == {path.stem for path in (tmp_path / "run.bnn/posteriors").iterdir()}


def test_a_budget_that_is_spent_leaves_fits_out_and_says_so(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    found = auto(cli, run, "--budget", "0.001s")
    assert [rung["name"] for rung in found["rungs"] if rung["is_there"]] == ["network", "fit-temperature"]
    assert "the budget is spent" in found["rungs"][-1]["note"]
    assert next(row for row in found["rows"] if row["is_recommended"])["posterior"] == "temperature"
    assert "no posterior was fitted" in found["metrics"]["sentence"]


def test_posteriors_that_are_there_are_judged_however_little_time_there_is(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    assert cli("stack", run).code == 0
    found = auto(cli, run, "--budget", "0.001s")
    assert [rung["name"] for rung in found["rungs"] if rung["is_there"]] == ["network", "fit-temperature", "stack"]
    assert "stack" in {row["posterior"] for row in found["rows"]}


def test_a_fit_that_ends_past_the_deadline_is_kept(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    fit = stack_work.fit_stack

    def late(*given: Any) -> Any:
        fitted = fit(*given)
        assert signals._deadline is not None
        signals._deadline = 0.0
        with pytest.raises(BudgetSpent):
            signals.raise_if_interrupted()
        return fitted

    monkeypatch.setattr(stack_work, "fit_stack", late)
    found = auto(cli, run, "--budget", "60s")
    assert {rung["name"]: rung["is_there"] for rung in found["rungs"]}["stack"]


@pytest.mark.long
@pytest.mark.parametrize("epochs", [600, 80])
def test_a_flow_that_was_trained_when_the_budget_ended_is_not_trained_again(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    run = new_run(cli, tmp_path / "run", separable(40, 6, scale=3.0, seed=1))

    def measure(*given: object, **named: object) -> None:
        raise BudgetSpent

    with monkeypatch.context() as patch:
        patch.setattr(refine, "measure_gain", measure)
        if epochs == 600:
            (refined,) = [rung for rung in auto(cli, run, "--full")["rungs"] if rung["name"] == "refine"]
            assert not refined["is_there"]
            assert "the budget is spent: continue with: bnncli refine" in refined["note"]
        else:  # of another request, which is no state for auto
            assert cli("fit-laplace", run).code == 0
            assert cli("refine", run, "--epochs", epochs).code != 0
    done = cli("auto", run, "--full", "--json")
    assert done.code == 0, done.stderr
    assert "resuming" in done.stderr if epochs == 600 else "starting from scratch" in done.stderr
    assert not list((tmp_path / "run.bnn/posteriors").glob(".refine*"))
    header = read_header(tmp_path / "run.bnn/posteriors/refine.safetensors")
    whole = cli("refine", run, "--prior-precision", header.meta["prior_precision"], "--name", "whole", "--json")
    assert whole.json["metrics"]["elbo_after"] == pytest.approx(header.meta["metrics"]["elbo_after"])


@pytest.mark.parametrize("words", [("--budget", "soon"), ("--budget", "0s"), ("--dry-run",)], ids=" ".join)
def test_what_cannot_be_asked_is_refused(cli: Cli, small_run: Path, words: tuple[str, ...]) -> None:
    done = cli("auto", small_run, *words)
    assert (done.code, words[0] in done.stderr) == (2, True)


def test_a_run_without_val_labels_is_refused(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(40, 3, scale=1.0)
    del arrays["labels_val"]
    done = cli("auto", new_run(cli, tmp_path / "run", arrays))
    assert (done.code, "no labelled val split" in done.stderr) == (66, True)


def test_a_damaged_recommendation_is_refused_where_no_posterior_is_named(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    found = auto(cli, run)
    path = Path(found["outputs"][0]["path"])
    assert read_metrics(path).meta["rows"]
    document = json.loads(path.read_text())
    document["rows"][0]["nll"] = 0.0
    path.write_text(json.dumps(document, sort_keys=True, indent=1) + "\n")
    done = cli("predict", run, "--split", "test")
    assert done.code == 65
    assert "cannot use auto's recommendation" in done.stderr
    assert "--posterior NAME" in done.stderr
    assert cli("predict", run, "--split", "test", "--posterior", "all").code == 0
    assert len(list((tmp_path / "run.bnn/predictions").iterdir())) > 1


def test_a_stale_recommendation_is_refused_where_no_posterior_is_named(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(300, 4, scale=3.0)
    run = new_run(cli, tmp_path / "run", arrays)
    auto(cli, run)
    new_run(cli, run, {**arrays, "features_val": arrays["features_val"] + 1}, "--force")
    done = cli("predict", run, "--split", "test")
    assert (done.code, "cannot use auto's recommendation" in done.stderr) == (65, True), done.stderr
    assert cli("predict", run, "--split", "test", "--posterior", "map").code == 0


@pytest.mark.long
def test_what_is_asserted_of_no_posterior_is_asserted_of_the_one_that_auto_recommends(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    (chosen,) = [row for row in auto(cli, run)["rows"] if row["is_recommended"]]
    name = chosen["posterior"]
    assert cli("predict", run).code == 0
    assert cli("predict", run, "--posterior", "all").code == 0
    done = cli("evaluate", run, "--assert", "nll<100", "--assert", "accuracy-low>=0", "--json")
    assert done.code == 0, done.stderr
    assert {(check["posterior"], check["integrator"]) for check in done.json["checks"]} == {
        (name, chosen["integrator"])
    }
    assert f"checking nll<100 for {name} ({chosen['integrator']}), which auto recommends" in done.stderr
    others = cli("evaluate", run, "--assert", f"nll<{name}.nll", "--json").json["checks"]
    assert others
    assert name not in {check["posterior"] for check in others}
    named = cli("evaluate", run, "--assert", "nll<100", "--posterior", "map", "--json").json["checks"]
    assert {check["posterior"] for check in named} == {"map"}


@pytest.mark.long
def test_what_is_detected_out_of_distribution_is_said_until_the_outliers_change(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(2000, 4, scale=6.0)
    arrays["features_far"] = 2 * np.random.default_rng(9).normal(size=(300, 4)).astype(np.float32)
    run = new_run(cli, tmp_path / "run", arrays, "--ood", "far")
    found = auto(cli, run)
    assert [one["score"] for one in found["metrics"]["qualities"]] == ["nll", "accuracy", "ece"]
    (far,) = found["metrics"]["detection"]
    assert (far["ood"], far["score"]) == ("far", "combined")
    assert cli("predict", run, "--posterior", "temperature").code == 0
    inside, outside = (
        read_predictions(run.with_name("run.bnn") / f"predictions/temperature.plug-in/{name}.h5").combined
        for name in ("val", "far")
    )
    assert inside is not None
    assert outside is not None
    labels = np.repeat([1, 0], [len(inside), len(outside)])
    assert far["auroc"] == pytest.approx(roc_auc_score(labels, np.concatenate([inside, outside])))
    threshold = np.sort(inside)[(len(inside) + 1) // 20 - 1]  # a twentieth of val lies below
    assert far["caught"] == pytest.approx((outside < threshold).mean())
    assert "far AUROC" in found["metrics"]["outside"]
    assert auto(cli, run)["action"] == "up_to_date"
    arrays["features_far"] = arrays["features_far"] / 2  # of the same distribution as val
    new_run(cli, run, arrays, "--ood", "far", "--force")
    assert cli("predict", run, "--split", "test").code == 65
    assert auto(cli, run)["metrics"]["detection"][0]["caught"] < 0.2


@pytest.mark.long
def test_a_posterior_that_loses_accuracy_is_recommended_by_its_nll_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bnncli.commands.auto.FEWEST_ROWS", 10**9)  # a stack fits val, which tells of both features
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "head_weight": np.array([[0.03, 3.0], [0, 0]], np.float32),  # too flat in one feature, right in the other
        "head_bias": np.zeros(2, np.float32),
    }
    for split, count in (("train", 3000), ("val", 600), ("test", 50)):
        features = generator.normal(size=(count, 2)) * 2
        features[np.arange(count), (generator.permutation(count) % 10 < 7).astype(int)] = (
            0  # one feature each, the first more often
        )
        logits = features @ [3.0, 0.0 if split == "train" else 3.0]  # the second tells nothing of what is fitted
        labels = (generator.random(count) > 1 / (1 + np.exp(-logits))).astype(np.int64)
        arrays |= {f"features_{split}": features.astype(np.float32), f"labels_{split}": labels}
    run = new_run(cli, tmp_path / "run", arrays)
    words = ("--prior-precision", 1, "--budget", "60s")
    kept = auto(cli, run, *words)
    assert next(row for row in kept["rows"] if row["is_recommended"])["posterior"] in ("temperature", "map")
    assert "without losing accuracy (laplace" in kept["metrics"]["sentence"]
    by_nll = auto(cli, run, *words, "--criterion", "nll")
    assert (by_nll["action"], by_nll["metrics"]["pays"]) == ("replaced", True)
    assert next(row for row in by_nll["rows"] if row["is_recommended"])["posterior"] == "laplace"


def test_siblings_are_files_that_differ_in_one_number_and_not_in_size(tmp_path: Path) -> None:
    sizes = {
        "net-0.pt": 1000,
        "net-1.pt": 1004,
        "net-2.pt": 2000,
        "other-3.pt": 1000,
        "net-0.pt.bak": 1000,
        "net-12.pt": 1000,
    }
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"0" * size)
    (tmp_path / "net-5.pt").mkdir()
    assert [path.name for path in find_siblings(tmp_path / "net-0.pt")] == ["net-1.pt", "net-12.pt"]
    assert find_siblings(tmp_path / "net-0.pt.bak") == []
    assert find_siblings(tmp_path / "net-7.pt") == []
    for name in (
        "run-epoch3.pt",
        "run-epoch4.pt",
        "epoch=3-val=1.ckpt",
        "epoch=4-val=1.ckpt",
        "step_100.pt",
        "step_200.pt",
    ):
        (tmp_path / name).write_bytes(b"0" * 1000)
    assert [find_siblings(tmp_path / name) for name in ("run-epoch3.pt", "epoch=3-val=1.ckpt", "step_100.pt")] == [
        [],
        [],
        [],
    ]
    (tmp_path / "plain.pt").write_bytes(b"0")
    assert find_siblings(tmp_path / "plain.pt") == []


def truth(inputs: torch.Tensor) -> torch.Tensor:
    """Logits (N, 3) that no last layer of few hidden units has."""
    return 3 * torch.stack([inputs[:, 0], inputs[:, 1] * inputs[:, 2], inputs[:, 3].sin()], dim=1)


def learner(seed: int) -> torch.nn.Module:
    """A network with hidden units and a last layer of its own, fitted to noisy rows of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = mlp.build(inputs=8, hidden=(40,), classes=3)
    first, last = found.features[0], found.ll
    inputs = torch.randn(200, 8, generator=generator)
    targets = truth(inputs).softmax(1) - 1 / 3
    with torch.no_grad():
        first.weight.copy_(torch.randn(40, 8, generator=generator) / 2)
        first.bias.copy_(torch.randn(40, generator=generator))
        hidden = first(inputs).relu()
        wanted = hidden.T @ hidden + 10 * torch.eye(40)
        last.weight.copy_(12 * torch.linalg.solve(wanted, hidden.T @ targets).T)
        last.bias.zero_()
    return found.eval()


@pytest.fixture
def networks(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """net-0.pt to net-5.pt: three trained apart, then the first after a further step, a spoilt one, and no checkpoint."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(5)
    for split, count in (("train", 100), ("val", 600)):
        inputs = torch.randn(count, 8, generator=generator)
        labels = torch.multinomial(truth(inputs).softmax(1), 1, generator=generator)[:, 0]
        np.savez(f"{split}.npz", x=inputs.numpy(), y=labels.numpy())
    for seed in range(3):
        torch.save(learner(seed).state_dict(), f"net-{seed}.pt")
    near, spoilt = learner(0), learner(3)
    with torch.no_grad():
        near.ll.weight.mul_(1.1)
        spoilt.ll.weight.mul_(-1)
    for number, network in ((3, near), (4, spoilt)):
        torch.save(network.state_dict(), f"net-{number}.pt")
    Path("net-5.pt").write_bytes(b"0" * Path("net-0.pt").stat().st_size)
    words = ("--model", "mlp", "--model-arg", "inputs=8", "--model-arg", "hidden=40", "--model-arg", "classes=3")
    data = ("--data", "train=npz:train.npz", "--data", "val=npz:val.npz")
    done = cli("extract-features", "net-0.pt", *words, *data)
    assert done.code == 0, done.stderr
    return tmp_path


@pytest.mark.long
def test_checkpoints_of_the_same_network_trained_apart_are_tried_as_an_ensemble(cli: Cli, networks: Path) -> None:
    found = auto(cli, Path("net-0.pt"), "--budget", "60s")
    (rung,) = [rung for rung in found["rungs"] if rung["name"] == "fit-ensemble"]
    members = read_header(Path("net-0.pt.bnn/posteriors/ensemble.safetensors")).meta["metrics"]["members"]
    assert members == ["net-0.pt", "net-1.pt", "net-2.pt"]
    for name, why in (
        ("net-3.pt", "its last layer is nearly that of net-0.pt"),
        ("net-4.pt", "accuracy on val"),
        ("net-5.pt", "neither a torch nor a safetensors checkpoint"),
    ):
        assert f"{name} (" in rung["note"]
        assert why in rung["note"]
    with np.load("val.npz") as arrays:
        inputs, labels = torch.from_numpy(arrays["x"]), arrays["y"]
    with torch.no_grad():
        logits = torch.stack([learner(seed)(inputs).double() for seed in range(3)])
    temperature = read_header(Path("net-0.pt.bnn/posteriors/ensemble.safetensors")).meta["metrics"]["temperature"]
    nll = -float((logits / temperature).softmax(2).mean(0)[range(600), labels].log().mean())
    (row,) = [row for row in found["rows"] if row["posterior"] == "ensemble"]
    assert row["nll"] == pytest.approx(nll, abs=1e-5)
    assert row["is_recommended"]
    assert cli("predict", "net-0.pt", "--split", "val").code == 0
    assert Path("net-0.pt.bnn/predictions/ensemble.mc/val.h5").is_file()
    assert auto(cli, Path("net-0.pt"))["action"] in ("up_to_date", "replaced")


@pytest.mark.long
def test_an_ensemble_of_other_siblings_replaces_that_of_auto(cli: Cli, networks: Path) -> None:
    for place, away in enumerate(("net-2.pt", "net-1.pt", "net-2.pt")):
        Path(away).rename("away")
        found = auto(cli, Path("net-0.pt"), "--budget", "60s")
        Path("away").rename(away)
        (rung,) = [rung for rung in found["rungs"] if rung["name"] == "fit-ensemble"]
        assert rung["posterior"] == ("ensemble-auto" if place == 1 else "ensemble")
        file = Path(f"net-0.pt.bnn/posteriors/{rung['posterior']}.safetensors")
        assert away not in read_header(file).meta["metrics"]["members"]
    Path("net-1.pt").unlink()
    Path("net-2.pt").unlink()
    torch.save(learner(6).state_dict(), "net-6.pt")
    auto(cli, Path("net-0.pt"), "--budget", "60s")
    members = read_header(Path("net-0.pt.bnn/posteriors/ensemble-auto.safetensors")).meta["metrics"]["members"]
    assert members == ["net-0.pt", "net-6.pt"]


@pytest.mark.long
def test_features_without_a_network_have_no_siblings(cli: Cli, tmp_path: Path) -> None:
    for number in range(2):
        run = new_run(cli, tmp_path / f"run-{number}", separable(60, 4, scale=1))
        run.write_bytes(b"no checkpoint")
    assert "fit-ensemble" not in {rung["name"] for rung in auto(cli, run)["rungs"]}


def test_no_ensemble_is_made_where_the_data_are_gone_or_the_time_is(cli: Cli, networks: Path) -> None:
    found = auto(cli, Path("net-0.pt"), "--budget", "0.001s")
    (rung,) = [rung for rung in found["rungs"] if rung["name"] == "fit-ensemble"]
    assert (rung["is_there"], rung["note"]) == (False, "skipped: the budget is spent")
    Path("val.npz").rename("elsewhere.npz")
    found = auto(cli, Path("net-0.pt"))
    (rung,) = [rung for rung in found["rungs"] if rung["name"] == "fit-ensemble"]
    assert (rung["is_there"], "val.npz" in rung["note"]) == (False, True)
    assert found["rows"]


@pytest.mark.long
@pytest.mark.usefixtures("scores_are_rough")
def test_the_report_shows_what_auto_measured_on_val_until_the_network_is_predicted(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(200, 4, scale=6.0))
    said = cli("auto", run).stdout
    found = auto(cli, run)
    chosen = next(row for row in found["rows"] if row["is_recommended"])
    assert chosen["posterior"] == "stack"
    gain = read_header(tmp_path / "run.bnn/posteriors/laplace.safetensors").meta["metrics"]["val_gain"]["averaging"]
    shown = f"{-gain['value']:+.4f} +- {gain['standard_error']:.4f}"
    assert f"averaging over laplace changes the val NLL by {shown} nats" in said
    assert cli("predict", run).code == 0
    assert cli("report", run).code == 0
    page = read_page(tmp_path / "run.bnn/report.html")
    table = {row["score"]: row for row in page.one("pays").rows()}
    for one in found["metrics"]["qualities"]:
        title = one["score"] if one["score"] == "accuracy" else one["score"].upper()
        assert table[title]["stack (mc)"] == f"{one['value']:.4f}"
        assert table[title]["difference"] == f"{one['difference']:+.4f}"
    assert "on val, 400 examples" in page.one("pays").text
    assert "slightly optimistic" in page.one("pays").text
    assert cli("predict", run, "--posterior", "all").code == 0
    assert cli("report", run, "--force").code == 0
    assert "on test, 50 examples" in read_page(tmp_path / "run.bnn/report.html").one("pays").text
    assert cli("report", run, "--force", "--posterior", "laplace").code == 0
    shown = read_page(tmp_path / "run.bnn/report.html").one("verdict")
    assert "stack (mc) against" not in shown.text  # it was not asked for
