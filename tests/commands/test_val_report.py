"""What fits report of val: predictions, temperatures and integrators."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.arrays import make_arrays, make_wide_arrays
from problems.command_line import Cli, new_run
from sklearn.linear_model import LogisticRegression

from bnncli.artifacts.predictions import read_predictions
from bnncli.cli.execute import run_command_line
from bnncli.commands import hmc as work
from bnncli.evaluation.recommendation import score_predictive
from bnncli.integrators import load_integrator, mc
from bnncli.session import val_report


def predictions(run: Path, variant: str) -> Any:
    return read_predictions(run.with_name("run.bnn") / "predictions" / variant / "val.h5")


SMALL = ("--chains", 4, "--warmup", 30, "--draws", 30)
QUICK = ("--epochs", 30, "--elbo-draws", 16)
# Words of a fit, and the predictions that each of its numbers on val is of.
LAST_LAYER: dict[str, tuple[tuple[object, ...], dict[str, str]]] = {
    "laplace": (
        ("fit-laplace", "--prior-precision", 3),
        {"laplace": "laplace.mc", "plug-in": "laplace.plug-in", "probit": "laplace.probit", "network": "map.plug-in"},
    ),
    "hmc": (
        ("hmc", *SMALL, "--prior-precision", 3),
        {"hmc": "hmc.mc", "plug-in": "hmc.plug-in", "network": "map.plug-in"},
    ),
    "refine": (("refine", *QUICK), {"refine": "refine.mc", "base": "laplace.mc", "network": "map.plug-in"}),
}


@pytest.mark.parametrize("method", LAST_LAYER)
def test_the_numbers_on_val_are_those_of_predict_and_of_fit_temperature(cli: Cli, tmp_path: Path, method: str) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    (command, *words), variants = LAST_LAYER[method]
    if method == "refine":
        cli("fit-laplace", run, "--structure", "diag", "--prior-precision", 3).expect(0)
    done = cli(command, run, *words, "--seed", 5, "--json")
    found = done.json["metrics"]["val"]
    integrators = {variant.partition(".")[2] for variant in variants.values()}
    asked = [word for name in integrators for word in ("--integrator", name)]
    cli("predict", run, "--split", "val", "--seed", 5, *asked).expect(0)
    for key, variant in variants.items():
        content = predictions(run, variant)
        expected = score_predictive(key, np.asarray(content.probs), np.asarray(content.labels))
        assert found[key]["nll"] == pytest.approx(expected.nll, rel=1e-6), key
        assert found[key]["ece"] == pytest.approx(expected.ece, abs=1e-6), key
    fit = cli("fit-temperature", run, "--json").json["metrics"]
    assert found["temperature"]["temperature"] == pytest.approx(fit["temperature"], rel=1e-6)
    assert "val NLL and ECE: " in done.stderr
    assert "predicts val worse" not in done.stderr


def test_wide_head_uses_the_draws_of_predict(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mc, "_MOST_ELEMENTS", 2000)  # as if the head were far larger
    run = new_run(cli, tmp_path / "run", make_arrays())
    found = cli("fit-laplace", run, "--prior-precision", "3", "--json").json["metrics"]["val"]["laplace"]
    (output,) = cli("predict", run, "--posterior", "laplace", "--split", "val", "--json").json["outputs"]
    assert found["samples"] == output["draws"] < load_integrator("mc").default_samples


def test_temperatures_are_those_of_fit_temperature_and_their_nll_is_held_out(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    found = cli("fit-laplace", run, "--prior-precision", "3", "--json").json["metrics"]["val"]
    for key, words in (("temperature", ()), ("plug-in-temperature", ("--base", "laplace", "--name", "scaled"))):
        fit = cli("fit-temperature", run, *words, "--json").json["metrics"]
        assert found[key]["temperature"] == pytest.approx(fit["temperature"], rel=1e-6)
        assert 0 < found[key]["nll"] - fit["val_nll_after"]["value"] < 5 / 80  # about one part in N


def test_a_temperature_that_val_does_not_bound_is_compared_with_nothing(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    logits = arrays["features_val"] @ arrays["head_weight"].T + arrays["head_bias"]
    arrays["labels_val"] = logits.argmax(axis=1)  # the lower the temperature, the better
    run = new_run(cli, tmp_path / "run", arrays)
    done = cli("fit-laplace", run, "--prior-precision", "3", "--json").json
    assert "temperature" not in {**done["metrics"]["val"], **done["metrics"]["val_excess"]}
    assert "network" in done["metrics"]["val_excess"]
    assert not [text for text in done["warnings"] if "optimal temperature" in text]


def test_a_predictive_that_plainer_ones_beat_is_warned_of_with_numbers_and_commands(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_wide_arrays(num_test=40))
    words = ("--structure", "kron", "--prior-precision", "1000")
    done = cli("fit-laplace", run, *words, "--json")
    metrics = done.json["metrics"]
    (text,) = [text for text in done.json["warnings"] if "predicts val worse" in text]
    assert metrics["val_excess"]["network"]["is_worse"]
    assert f"bnncli predict {run} --posterior map ({metrics['val']['network']['nll']:.4f})" in text
    for key in ("laplace", "network", "temperature"):
        assert f"{metrics['val'][key]['nll']:.4f}" in text
    assert f"bnncli refine {run} --flow affine" in text
    assert "false alarms at most 5%" in text
    again = cli("fit-laplace", run, *words, "--json").json
    assert again["action"] == "up_to_date"
    assert text in again["warnings"]


def test_predict_takes_the_integrator_that_val_prefers(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_wide_arrays(num_test=40))
    done = cli("fit-laplace", run, "--structure", "kron", "--prior-precision", "3", "--json")
    val = done.json["metrics"]["val"]
    assert val["laplace"]["integrator"] == done.json["metrics"]["recommended_integrator"] == "plug-in"
    assert val["laplace"]["nll"] < val["mc"]["nll"]
    assert (
        "averaging makes the predictions on val worse"
        in cli("fit-laplace", run, "--force", "--structure", "kron", "--prior-precision", "3").stderr
    )
    for words, folder in (
        ((), "laplace.plug-in"),
        (("--integrator", "mc"), "laplace.mc"),
        (("--samples", "50"), "laplace.mc"),
        (("--keep-samples",), "laplace.mc"),
    ):
        done = cli("predict", run, "--posterior", "laplace", *words, "--force", "--json").json
        assert {Path(output["path"]).parent.name for output in done["outputs"]} == {folder}, words
    for rule, integrator in (("bald", "mc"), ("entropy", "plug-in")):
        done = cli("acquire", run, "--pool", "test", "--by", rule, "--posterior", "laplace", "--batch", "3", "--json")
        assert done.json["integrator"] == integrator, done.stderr


def test_the_prior_is_that_of_the_mode_alone_where_that_predicts_best(cli: Cli, tmp_path: Path) -> None:
    arrays = make_wide_arrays(num_test=40)
    run = new_run(cli, tmp_path / "run", arrays)
    found = cli("fit-laplace", run, "--json").json["metrics"]
    assert (found["prior_precision_for"], found["recommended_integrator"]) == ("plug-in", "plug-in")
    features, labels = arrays["features_train"].astype(float), arrays["labels_train"]
    fits = {}
    for precision in (found["prior_precision"], 100 * found["prior_precision"]):
        model = LogisticRegression(C=1 / precision, tol=1e-10, max_iter=20_000)
        padded = np.column_stack([features, np.ones(len(features))])  # bnncli's prior is on the bias too
        model.set_params(fit_intercept=False).fit(padded, labels)
        held_out = np.column_stack([arrays["features_val"], np.ones(len(arrays["labels_val"]))])
        probs = model.predict_proba(held_out)
        fits[precision] = -np.log(probs[np.arange(len(probs)), arrays["labels_val"]]).mean()
    assert found["val"]["laplace"]["nll"] == pytest.approx(fits[found["prior_precision"]], rel=1e-3)
    assert not cli("predict", run, "--posterior", "laplace", "--json").json["warnings"]
    (text,) = cli("predict", run, "--posterior", "laplace", "--integrator", "mc", "--json").json["warnings"]
    assert f"mc predicts val worse than plug-in (NLL {found['val']['mc']['nll']:.4f}, plug-in " in text
    assert fits[found["prior_precision"]] < fits[100 * found["prior_precision"]]


@pytest.mark.long
def test_the_steps_of_a_gain_add_up(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    found = cli("fit-laplace", run, "--json").json["metrics"]
    gain, val = found["val_gain"], found["val"]
    total = sum(gain[step]["value"] for step in ("temperature", "head", "averaging"))
    assert total == pytest.approx(val["network"]["nll"] - val["laplace"]["nll"], abs=1e-9)
    assert gain["head"]["value"] == pytest.approx(val["temperature"]["nll"] - val["plug-in"]["nll"], abs=1e-9)
    about = cli("fit-laplace", run, "--center", "checkpoint", "--name", "about", "--json").json["metrics"]
    assert about["val_gain"] is None  # no head was refitted
    cli("predict", run)
    shown = f"{gain['head']['value']:+.4f} +- {gain['head']['standard_error']:.4f}"
    for command in ("compare", "diagnose", "auto"):
        assert shown in cli(command, run).stdout, command


def test_without_a_network_or_labels_on_val_what_cannot_be_compared_is_left_out(cli: Cli, tmp_path: Path) -> None:
    arrays = make_arrays()
    headless = {name: part for name, part in arrays.items() if not name.startswith("head_")}
    run = new_run(cli, tmp_path / "run", headless)
    found = cli("fit-laplace", run, "--prior-precision", "3", "--json").json["metrics"]
    assert {"network", "temperature"}.isdisjoint(found["val"])
    assert found["val_nll_network"] is None
    (tmp_path / "two").mkdir()
    unlabelled = {name: part for name, part in arrays.items() if name != "labels_val"}
    run = new_run(cli, tmp_path / "two" / "run", unlabelled)
    metrics = cli("fit-laplace", run, "--prior-precision", "3", "--json").json["metrics"]
    assert (metrics["val"], metrics["val_excess"], metrics["recommended_integrator"]) == (None, None, None)


@pytest.mark.long
def test_draws_that_predict_worse_than_the_network_are_warned_of(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_wide_arrays())
    words = ("hmc", run, *SMALL, "--prior-precision")
    done = cli(*words, 1e-3, "--json").json
    excess = done["metrics"]["val_excess"]["temperature"]
    assert excess["is_worse"]
    assert excess["value"] > 2 * excess["standard_error"] > 0
    (text,) = [text for text in done["warnings"] if "predicts val worse" in text]
    assert f"bnncli fit-temperature {run}" in text
    again = cli(*words, 1e-3, "--json").json
    assert (again["action"], text in again["warnings"]) == ("up_to_date", True)


def test_draws_are_thinned_to_fit_memory(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    words = ("hmc", run, *SMALL, "--prior-precision", 3, "--json")
    whole = cli(*words).json["metrics"]["val"]["hmc"]
    num_params = sum(make_arrays()[f"head_{part}"].size for part in ("weight", "bias"))
    monkeypatch.setattr(work, "_MOST_PREDICTING", 70 * num_params)
    found = cli(*words, "--name", "thinned").json["metrics"]["val"]["hmc"]
    assert found["samples"] == 60
    assert found["nll"] == pytest.approx(whole["nll"], rel=0.1)


MODEL = ("--model", "mlp", "--model-arg", "inputs=6", "--model-arg", "hidden=8", "--model-arg", "classes=3")
SIZES = {"train": 150, "val": 150}
WEAK, STRONG = ("--prior-precision", 1e-4), ("--prior-precision", 1e4)
BRIEF = ("--chains", 4, "--warmup", 4, "--draws", 8)
# A prior under which each is worse than the network: one that pulls the weights to zero, or that says nothing of them.
FITS: dict[str, tuple[object, ...]] = {
    "laplace": ("fit-laplace", "--structure", "diag", *WEAK),
    "refine": ("refine", "--base", "weak", "--epochs", 1, "--elbo-draws", 4),
    "hmc": ("hmc", *STRONG, *BRIEF),
    "vi": ("fit-vi", "--epochs", 40, *STRONG),
    "swag": ("fit-swag", "--warmup", 10, "--epochs", 10, *STRONG),
    "sghmc": (
        "fit-sghmc",
        "--sampler",
        "sghmc",
        "--epochs",
        40,
        "--exploration",
        0.5,
        "--chains",
        2,
        "--draws",
        20,
        *STRONG,
    ),
}


def make_network(folder: Path, epochs: int) -> Path:
    """A network trained on three clouds, and its features."""
    rng = np.random.default_rng(0)
    words: list[object] = []
    for name, size in SIZES.items():
        y = rng.integers(0, 3, size)
        x = (rng.normal(size=(size, 6)) + 2 * np.eye(6)[y]).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=y)
        words += ["--data", f"{name}=npz:{folder / name}.npz"]
    network = folder / "net.safetensors"
    run("train", network, *MODEL, *words[:2], "--epochs", epochs, "--learning-rate", 0.01)
    run("extract-features", network, *MODEL, *words)
    return network


def run(*words: object) -> None:
    assert run_command_line([str(word) for word in words], io.StringIO()) == 0


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is not sure enough, so that one temperature makes it far better, and a Gaussian under a weak prior."""
    network = make_network(tmp_path_factory.mktemp("network"), 30)
    run("fit-laplace", network, "--layers", "all", "--structure", "diag", *WEAK, "--name", "weak")
    return network


@pytest.mark.parametrize("method", FITS)
def test_one_that_predicts_worse_than_what_is_simpler_is_warned_of(cli: Cli, network: Path, method: str) -> None:
    command, *words = FITS[method]
    done = cli(command, network, "--layers", "all", *words, "--json").expect(0)
    found, excess = done.json["metrics"]["val"], done.json["metrics"]["val_excess"]
    assert {"network", "temperature"} <= set(excess)
    assert excess["temperature"]["is_worse"]
    assert excess["temperature"]["value"] == pytest.approx(found[method]["nll"] - found["temperature"]["nll"])
    (text,) = [text for text in done.json["warnings"] if "predicts val worse" in text]
    assert f"bnncli fit-temperature {network}" in text
    used = found[method]["integrator"]
    words = ("--posterior", f"{method}-all", "--split", "val", "--integrator", used)
    cli("predict", network, *words).expect(0)
    folder = network.with_name(f"{network.name}.bnn") / "predictions"
    content = read_predictions(folder / f"{method}-all.{used}/val.h5")
    expected = score_predictive(method, np.asarray(content.probs), np.asarray(content.labels))
    assert found[method]["nll"] == pytest.approx(expected.nll, rel=1e-5)


def test_expensive_scores_use_some_examples(cli: Cli, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *words = FITS["vi"]
    line = (command, network, "--layers", "all", *words, "--json", "--name")
    every = cli(*line, "every").json
    monkeypatch.setitem(val_report._MOST_NUMBERS, "cpu", 1)
    done = cli(*line, "some")
    metrics = done.json["metrics"]
    assert (
        "measuring val scores on 100 of the 150 val examples, drawn at random, because each takes 200 passes of the network"
        in done.stderr
    )
    assert (every["metrics"]["val_num_examples"], metrics["val_num_examples"]) == (150, 100)
    assert metrics["val"]["vi"]["nll"] != every["metrics"]["val"]["vi"]["nll"]
    for name, one in every["metrics"]["val"].items():
        assert metrics["val"][name]["nll"] == pytest.approx(one["nll"], abs=4 * one["standard_error"])
    again = cli(*line, "again").json["metrics"]
    assert again["val"] == metrics["val"]


def test_one_that_may_predict_worse_is_told_of_without_a_warning(cli: Cli, tmp_path: Path) -> None:
    network = make_network(tmp_path, 100)
    words = ("fit-laplace", network, "--layers", "all", "--structure", "diag", "--json", "--prior-precision")
    done = cli(*words, 2.5, "--name", "wide")
    metrics = done.json["metrics"]
    own, gaps = metrics["val"]["laplace"]["nll"], metrics["val_excess"]
    assert not any(gap["is_worse"] for gap in gaps.values())
    assert own > 1.01 * metrics["val"]["network"]["nll"]
    assert (
        f"wide has a higher NLL on val than a simpler choice: {own:.4f} (logit-mc, 256 draws), against " in done.stderr
    )
    assert f"(worse by {gaps['network']['value']:.4f} +- {gaps['network']['standard_error']:.4f})" in done.stderr
    assert "the difference is not significant with 150 examples" in done.stderr
    assert "higher NLL" not in cli(*words, 1e4, "--name", "narrow").stderr
