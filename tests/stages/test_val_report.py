"""What fit-laplace says of its predictive on val: the numbers of predict, and a warning where plainer ones are better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.arrays import make_arrays, make_wide_arrays
from problems.command_line import Cli, new_run
from sklearn.linear_model import LogisticRegression

from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.recommendation import score
from bnncli.integrators import load_integrator, mc


def predictions(run: Path, variant: str) -> Any:
    return read_predictions(run.with_name("run.bnn") / "predictions" / variant / "val.h5")


def test_the_numbers_on_val_are_those_of_predict(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    metrics = cli("fit-laplace", run, "--prior-precision", "3", "--seed", "5", "--json").json["metrics"]
    found = metrics["val"]
    words = ("--integrator", "mc", "--integrator", "plug-in", "--integrator", "probit")
    assert cli("predict", run, "--split", "val", "--seed", "5", *words).code == 0
    variants = {"laplace": "laplace.mc", "plug-in": "laplace.plug-in", "probit": "laplace.probit"}
    for key, variant in {**variants, "network": "map.plug-in"}.items():
        content = predictions(run, variant)
        expected = score(key, np.asarray(content.probs), np.asarray(content.labels))
        assert found[key]["nll"] == pytest.approx(expected.nll, rel=1e-6), key
        assert found[key]["ece"] == pytest.approx(expected.ece, abs=1e-6), key
    assert (found["laplace"]["integrator"], found["laplace"]["samples"]) == (
        "mc",
        load_integrator("mc").default_samples,
    )
    assert (metrics["val_nll_laplace"], metrics["val_nll_network"]) == (
        found["laplace"]["nll"],
        found["network"]["nll"],
    )


def test_a_wide_head_is_measured_with_as_few_draws_as_predict_takes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_predictive_as_good_as_the_plainer_ones_is_not_warned_of(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", make_arrays())
    done = cli("fit-laplace", run, "--json")
    assert not [text for text in done.json["warnings"] if "predicts val worse" in text]
    assert done.json["metrics"]["recommended_integrator"] == "mc"
    assert "laplace.mc" in cli("predict", run).stdout


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
