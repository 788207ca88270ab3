"""auto: the ladder climbed as far as it is needed, one recommendation, and predict that takes it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_all
from problems.arrays import make_wide_arrays
from problems.command_line import Cli, new_run
from problems.pages import read_page
from sklearn.metrics import roc_auc_score

import bnncli
from bnncli.artifacts.files import read_header, read_metrics
from bnncli.artifacts.predictions import read_predictions
from bnncli.artifacts.resume import state_path
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
    return cli("auto", run, "--json", *words).expect(0).json


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a recommendation."""
    folder = tmp_path_factory.mktemp("auto")
    np.savez(folder / "run.npz", **separable(300, 4, scale=3.0))  # type: ignore[arg-type]
    run_all(("extract-features", folder / "run", "--from-npz", folder / "run.npz"), ("auto", folder / "run"))
    return folder


@pytest.fixture
def recommended(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


@pytest.mark.long
def test_one_command_goes_from_a_checkpoint_to_a_report(cli: Cli, tmp_path: Path) -> None:
    cli("demo", "--files-only", "--dir", tmp_path).expect(0)
    words = [
        "auto", tmp_path / "lenet5-fmnist.pt", "--model", "lenet5", "--data", f"train=npz:{tmp_path}/train.npz@2000",
        "--data", f"test=npz:{tmp_path}/test.npz@600", "--hold-out", "val=test:300", "--report", "--json",
    ]  # fmt: skip
    found = cli(*words).expect(0).json
    assert [output["role"] for output in found["outputs"]] == ["recommended", "report"]
    assert "Verdict" in Path(found["outputs"][1]["path"]).read_text()
    assert {"test", "val", "train"} <= set(bnncli.open(words[1]).splits)
    again = cli(*words).expect(0).json
    assert (again["action"], again["rows"]) == ("up_to_date", found["rows"])


def test_good_gaussian_ends_the_ladder_and_is_predicted_with(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(2000, 4, scale=6.0))
    found = auto(cli, run)
    assert [rung["name"] for rung in found["rungs"]] == [
        "network",
        "fit-temperature",
        "fit-calibration",
        "stack",
        "fit-laplace",
    ]
    chosen = [row for row in found["rows"] if row["is_recommended"]]
    temperature = next(row for row in found["rows"] if row["posterior"] == "temperature")
    assert len(chosen) == 1
    assert chosen[0]["nll"] <= temperature["nll"]
    cli("predict", run, "--split", "test").expect(0)
    made = [path.name for path in (tmp_path / "run.bnn/predictions").iterdir()]
    assert made == [f"{chosen[0]['posterior']}.{chosen[0]['integrator']}"]
    opened = bnncli.open(run)
    given = opened.predict(opened.split("test").features)
    assert [f"{given.posterior}.{given.integrator}"] == made
    assert auto(cli, run)["action"] == "up_to_date"
    cli("status", run, "--check").expect(0)


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
    cli("fit-laplace", run, "--prior-precision", 0.02, "--structure", "full").expect(0)
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
def test_a_single_val_example_has_no_standard_error(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(60, 4, scale=3.0)
    arrays |= {f"{kind}_val": arrays[f"{kind}_val"][:1] for kind in ("features", "labels")}
    assert " +- " not in cli("auto", new_run(cli, tmp_path / "run", arrays)).expect(0).stdout


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
def test_names_follow_the_posterior_and_others_are_named(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(40, 6, scale=3.0, seed=1))
    cli("fit-laplace", run, "--prior-precision", 0.02).expect(0)
    cli("fit-vi", run, "--epochs", 1).expect(0)
    done = cli("auto", run, "--full", "--prior-precision", 0.5).expect(0)
    names = {path.stem for path in (tmp_path / "run.bnn/posteriors").iterdir()}
    assert {"laplace", "laplace-prior0p5", "refine-prior0p5", "hmc-prior0p5"} <= names
    assert "not considered: laplace, vi (" in done.stderr
    assert "their scores are slightly optimistic" not in done.stdout
    assert "their scores are slightly optimistic" in cli("auto", run).stdout


def test_a_budget_that_is_spent_leaves_fits_out_and_says_so(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    found = auto(cli, run, "--budget", "0.001s")
    assert [rung["name"] for rung in found["rungs"] if rung["is_there"]] == ["network", "fit-temperature"]
    assert "the budget is spent" in found["rungs"][-1]["note"]
    assert next(row for row in found["rows"] if row["is_recommended"])["posterior"] == "temperature"
    assert "no posterior was fitted" in found["metrics"]["sentence"]


def test_posteriors_that_are_there_are_judged_however_little_time_there_is(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    cli("stack", run).expect(0)
    found = auto(cli, run, "--budget", "0.001s")
    assert [rung["name"] for rung in found["rungs"] if rung["is_there"]] == ["network", "fit-temperature", "stack"]
    assert "stack" in {row["posterior"] for row in found["rows"]}


def test_a_fit_that_ends_past_the_deadline_is_kept(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    fit, now = stack_work.fit_stack, time.monotonic

    def late(*given: Any) -> Any:
        fitted = fit(*given)
        monkeypatch.setattr("time.monotonic", lambda: now() + 60)
        with pytest.raises(BudgetSpent):
            signals.raise_if_interrupted()
        return fitted

    monkeypatch.setattr(stack_work, "fit_stack", late)
    found = auto(cli, run, "--budget", "60s")
    assert {rung["name"]: rung["is_there"] for rung in found["rungs"]}["stack"]


@pytest.mark.long
@pytest.mark.parametrize("epochs", [600, 80])
def test_trained_flow_is_kept_by_budget(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
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
            cli("fit-laplace", run).expect(0)
            assert cli("refine", run, "--epochs", epochs).code != 0
    done = cli("auto", run, "--full", "--json").expect(0)
    assert "resuming" in done.stderr if epochs == 600 else "starting from scratch" in done.stderr
    assert not list((tmp_path / "run.bnn/posteriors").glob(".refine*"))
    header = read_header(tmp_path / "run.bnn/posteriors/refine.safetensors")
    whole = cli("refine", run, "--prior-precision", header.meta["prior_precision"], "--name", "whole", "--json")
    assert whole.json["metrics"]["elbo_after"] == pytest.approx(header.meta["metrics"]["elbo_after"])


def test_hints_name_what_auto_can_do(cli: Cli, small_run: Path) -> None:
    """Files that --force does not replace, and states that a fit of its own would say to start over without --resume."""
    folder = small_run.with_name("small.bnn")
    for name in ("stack", "stack-auto"):
        (folder / f"posteriors/{name}.safetensors").write_text("foreign")
    done = cli("auto", small_run).expect(73, f"move it away: auto writes {folder}/posteriors/stack-auto.safetensors")
    assert "--name" not in done.stderr.splitlines()[-1]
    for name in ("stack", "stack-auto"):
        (folder / f"posteriors/{name}.safetensors").unlink()
    (folder / "recommended.json").write_text("foreign")
    cli("auto", small_run).expect(73, "move it away, or use --run-dir")
    (folder / "recommended.json").unlink()
    for name in ("laplace", "refine"):
        (folder / f"posteriors/{name}.safetensors").unlink()
    state_path(folder / "posteriors/refine.safetensors").write_text("damaged")
    cli("auto", small_run, "--full").expect(0, "cannot resume from", "starting from scratch")


@pytest.mark.parametrize("words", [("--budget", "soon"), ("--budget", "0s"), ("--dry-run",)], ids=" ".join)
def test_what_cannot_be_asked_is_refused(cli: Cli, small_run: Path, words: tuple[str, ...]) -> None:
    cli("auto", small_run, *words).expect(2, words[0])


def test_a_run_without_val_labels_is_refused(cli: Cli, tmp_path: Path) -> None:
    arrays = separable(40, 3, scale=1.0)
    del arrays["labels_val"]
    cli("auto", new_run(cli, tmp_path / "run", arrays)).expect(66, "no labelled val split")


def test_damaged_recommendation_is_refused(cli: Cli, recommended: Path, tmp_path: Path) -> None:
    run, path = recommended, tmp_path / "run.bnn/recommended.json"
    assert read_metrics(path).meta["rows"]
    document = json.loads(path.read_text())
    document["rows"][0]["nll"] = 0.0
    path.write_text(json.dumps(document, sort_keys=True, indent=1) + "\n")
    cli("predict", run, "--split", "test").expect(65, "cannot use auto's recommendation", "--posterior NAME")
    cli("predict", run, "--split", "test", "--posterior", "all").expect(0)
    assert len(list((tmp_path / "run.bnn/predictions").iterdir())) > 1


def test_a_stale_recommendation_is_refused_where_no_posterior_is_named(cli: Cli, recommended: Path) -> None:
    run, arrays = recommended, separable(300, 4, scale=3.0)
    new_run(cli, run, {**arrays, "features_val": arrays["features_val"] + 1}, "--force")
    cli("predict", run, "--split", "test").expect(65, "cannot use auto's recommendation")
    cli("predict", run, "--split", "test", "--posterior", "map").expect(0)


@pytest.mark.long
def test_what_is_asserted_of_no_posterior_is_asserted_of_the_one_that_auto_recommends(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", separable(300, 4, scale=3.0))
    (chosen,) = [row for row in auto(cli, run)["rows"] if row["is_recommended"]]
    name = chosen["posterior"]
    cli("predict", run).expect(0)
    cli("predict", run, "--posterior", "all").expect(0)
    done = cli("evaluate", run, "--assert", "nll<100", "--assert", "accuracy-low>=0", "--json").expect(0)
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
    cli("predict", run, "--posterior", "temperature").expect(0)
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
    cli("predict", run, "--split", "test").expect(65)
    assert auto(cli, run)["metrics"]["detection"][0]["caught"] < 0.2


@pytest.mark.long
def test_accuracy_loss_needs_criterion_nll(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    cli("extract-features", "net-0.pt", *words, *data).expect(0)
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
    cli("predict", "net-0.pt", "--split", "val").expect(0)
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
    cli("predict", run).expect(0)
    cli("report", run).expect(0)
    page = read_page(tmp_path / "run.bnn/report.html")
    table = {row["score"]: row for row in page.one("pays").rows()}
    for one in found["metrics"]["qualities"]:
        title = one["score"] if one["score"] == "accuracy" else one["score"].upper()
        assert table[title]["stack (mc)"] == f"{one['value']:.4f}"
        assert table[title]["difference"] == f"{one['difference']:+.4f}"
    assert "on val, 400 examples" in page.one("pays").text
    assert "slightly optimistic" in page.one("pays").text
    cli("predict", run, "--posterior", "all").expect(0)
    cli("report", run, "--force").expect(0)
    assert "on test, 50 examples" in read_page(tmp_path / "run.bnn/report.html").one("pays").text
    cli("report", run, "--force", "--posterior", "laplace").expect(0)
    shown = read_page(tmp_path / "run.bnn/report.html").one("verdict")
    assert "stack (mc) against" not in shown.text  # it was not asked for
