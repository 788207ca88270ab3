"""fit-lbbnn from the command line: artifacts that predict, evaluate and diagnose take; refusals; resumption."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli, new_run
from problems.seeds import seeded
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions
from bnncli.commands import fit_lbbnn
from bnncli.commands.fit_lbbnn import FitLbbnnOptions, TrainingData, measure
from bnncli.latent.factors import initial_factors
from bnncli.latent.fit import History, nll_of_repeats
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.session.inputs import open_posterior

pytestmark = pytest.mark.gpu

QUICK = ("--epochs", "4", "--learning-rate", "0.02")


def fitted(cli: Cli, run: Path, *words: object) -> dict[str, Any]:
    return cli("fit-lbbnn", run, *QUICK, *words, "--json").expect(0).json


@pytest.mark.parametrize(
    ("hidden", "estimator"),
    [
        ((), "lrt"),
        ((), "mnf"),
        pytest.param((), "concrete", marks=pytest.mark.long),
        (("--hidden", "6,4"), "mnf"),
        pytest.param(("--hidden", "6,4"), "lrt", marks=pytest.mark.long),
        pytest.param(("--hidden", "6,4"), "concrete", marks=pytest.mark.long),
    ],
)
def test_later_commands_take_each_estimator(cli: Cli, small_run: Path, estimator: str, hidden: tuple[str, ...]) -> None:
    fitted(cli, small_run, "--estimator", estimator, *hidden)
    path = small_run.with_name("small.bnn") / "posteriors/lbbnn.safetensors"
    metrics = open_posterior(path)[1].meta["metrics"]
    parts = sum(sum(layer.values()) for layer in metrics["divergence"])
    assert metrics["bound"]["value"] == pytest.approx(metrics["expected_log_likelihood"]["value"] - parts)
    errors = [metrics[name]["standard_error"] for name in ("bound", "expected_log_likelihood")]
    assert (errors[0] > errors[1], errors[0] == errors[1]) == (estimator == "mnf", estimator != "mnf")
    assert 0 < metrics["density"] < 1
    assert len(metrics["density_by_layer"]) == 1 + 2 * bool(hidden)
    words = ("--posterior", "lbbnn", "--integrator", "all", "--split", "test")
    cli("predict", small_run, *words).expect(0)
    folder = small_run.with_name("small.bnn") / "predictions"
    assert {entry.name for entry in folder.glob("lbbnn.*")} == {"lbbnn.mc", "lbbnn.mean", "lbbnn.plug-in"}
    done = cli("evaluate", small_run, "--posterior", "lbbnn", "--json").expect(0)
    rows = [row for row in done.json["rows"] if row["split"] == "test"]
    assert {row["integrator"]: row["samples"] for row in rows} == {
        "mc": 200 if hidden else 1000,
        "mean": None,
        "plug-in": None,
    }
    discrepancy = next(metric for metric in rows[0]["metrics"] if metric["name"] == "mmd2")
    assert (discrepancy["value"] is None) == bool(hidden)  # another theta than that of hmc
    if estimator != "mnf":  # each pair of posteriors that is judged takes as long as a fit
        path.with_name("refine.safetensors").unlink()
        path.with_name("hmc.nc").unlink()
    judged = cli("diagnose", small_run, "--json").expect(0)
    assert "lbbnn" in (judged.stderr if hidden else judged.json["posteriors"])


def test_repeats_are_one_ensemble(cli: Cli, small_run: Path) -> None:
    fitted(cli, small_run, "--repeats", "3")
    cli("predict", small_run, "--posterior", "lbbnn", "--split", "test", "--keep-samples", "--samples", 6).expect(0)
    file = read_predictions(small_run.with_name("small.bnn") / "predictions/lbbnn.mc/test.h5")
    assert file.probs_samples is not None
    assert file.probs_samples.shape[0] == 6
    np.testing.assert_allclose(np.asarray(file.probs_samples, dtype=float).mean(axis=0), file.probs, atol=2e-3)


def test_a_prediction_has_a_network_of_each_repeat_at_least(cli: Cli, small_run: Path) -> None:
    fitted(cli, small_run, "--repeats", "12", "--slab-sd", "1")
    cli("predict", small_run, "--posterior", "lbbnn", "--split", "test").expect(0)
    file = read_predictions(small_run.with_name("small.bnn") / "predictions/lbbnn.mc/test.h5")
    posterior = open_posterior(small_run.with_name("small.bnn") / "posteriors/lbbnn.safetensors")[0]
    assert file.header.meta["samples"] == 1008  # a multiple of 12
    drawn = posterior.sample(12, seeded(0))
    # Draws are of the repeats in turn: the biases, which hardly scatter, lie within a few standard deviations of their own
    # repeat's means, and far from the next one's. Two repeats may be near each other: not all of them are.
    factors = posterior.model.factors
    away = (drawn[:, -3:] - factors.bias_mean) / factors.bias_sd
    assert float(away.abs().max()) < 5
    another = (drawn[:, -3:].roll(1, 0) - factors.bias_mean) / factors.bias_sd
    assert float(another.abs().median()) > 3


def test_two_classes_without_a_head_are_one_logit(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", 300), ("test", 100)):
        features = rng.normal(size=(count, 6)).astype(np.float32)
        arrays |= {f"features_{split}": features, f"labels_{split}": (features[:, 0] > 0).astype(np.int64)}
    run = new_run(cli, tmp_path / "two", arrays)
    cli("fit-lbbnn", run, "--epochs", 60, "--learning-rate", "0.1", "--repeats", 4, "--slab-sd", 2).expect(0)
    posterior = open_posterior(tmp_path / "two.bnn/posteriors/lbbnn.safetensors")[0]
    assert posterior.layout.num_outputs == 1
    inclusion = posterior.model.factors.inclusion
    assert inclusion.shape == (4, 6)
    assert bool((inclusion[:, 0] > 0.9).all())
    assert float(inclusion[:, 1:].mean()) < 0.5
    cli("predict", run, "--posterior", "lbbnn").expect(0)
    accuracy = next(
        metric["value"]
        for metric in cli("evaluate", run, "--json").json["rows"][0]["metrics"]
        if metric["name"] == "accuracy"
    )
    assert accuracy > 0.9


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--hidden", "4,x"), "expected sizes joined by commas"),
        (("--flow-length", "3"), "--flow-length is for --estimator mnf"),
        (("--temperature", "0.1"), "--temperature is for --estimator concrete"),
        (("--flow-rate", "0.1"), "--flow-rate is for --estimator mnf"),
        (("--estimator", "concrete", "--variance", "published"), "--variance is for --estimator lrt and mnf"),
        (("--start-inclusion", "2,1"), "expected LOW,HIGH"),
        (("--early-epochs", "3"), "has no effect without"),
        (("--prior-inclusion", "1"), "--prior-inclusion"),
    ],
)
def test_wrong_options_are_told_before_any_work(cli: Cli, small_run: Path, words: tuple[str, ...], text: str) -> None:
    assert cli("fit-lbbnn", small_run, *words).expect(2, text).stderr.count("\n") <= 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("1e30",), "the bound is not finite in epoch 1"),
        (("1e200", "--schedule", "cosine"), "a learning rate of 1e+200 is out of range for float32"),
    ],
)
def test_a_diverging_fit_says_so(cli: Cli, small_run: Path, words: tuple[str, ...], why: str) -> None:
    cli("fit-lbbnn", small_run, "--epochs", 3, "--learning-rate", *words).expect(70, why, "--learning-rate")
    assert not (small_run.with_name("small.bnn") / "posteriors/lbbnn.safetensors").exists()


@pytest.fixture
def two_class_run(cli: Cli, tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", 300), ("test", 100)):
        features = rng.normal(size=(count, 5)).astype(np.float32)
        labels = features[:, 1] + 0.3 * features[:, 3] + 0.3 * rng.normal(size=count) > 0
        arrays |= {f"features_{split}": features, f"labels_{split}": labels.astype(np.int64)}
    new_run(cli, tmp_path / "two", arrays)
    return tmp_path / "two"


SELECT = ("--epochs", 40, "--learning-rate", "0.03", "--repeats", 7, "--prior-inclusion", "0.3")


def test_the_inputs_that_are_in_are_told(cli: Cli, two_class_run: Path) -> None:
    done = cli("fit-lbbnn", two_class_run, *SELECT, "--json").expect(0)
    posterior, header = open_posterior(two_class_run.with_name("two.bnn") / "posteriors/lbbnn.safetensors")
    inputs = done.json["metrics"]["inputs"]
    assert inputs == header.meta["metrics"]["inputs"]
    inclusion = posterior.model.factors.inclusion.double().numpy()
    assert [part["input"] for part in inputs] == [1, 2, 3, 4, 5]
    for column, part in zip(inclusion.T, inputs, strict=True):
        assert part["mean"] == pytest.approx(np.mean(column))
        assert part["sd"] == pytest.approx(np.std(column, ddof=1))
        assert part["share_in"] == pytest.approx(sum(value > 0.5 for value in column) / 7)
    told = cli("fit-lbbnn", two_class_run, *SELECT)
    line = next(line for line in told.stderr.splitlines() if "included inputs" in line)
    named = {part["input"] for part in inputs if f" {part['input']} ({part['mean']:.2f})" in line}
    assert named == {i + 1 for i, column in enumerate(inclusion.T) if np.mean(column) > 0.5}
    assert 2 in named


@pytest.mark.parametrize("estimator", ["lrt", "mnf", "concrete"])
@pytest.mark.long
def test_every_estimator_selects_the_inputs_that_matter(cli: Cli, two_class_run: Path, estimator: str) -> None:
    words = ("--repeats", 6, "--prior-inclusion", "0.3", "--learning-rate", "0.1", "--epochs", 40)
    words = (*words, "--batch-size", 150, "--slab-sd", 1)
    done = cli("fit-lbbnn", two_class_run, *words, "--estimator", estimator, "--json").expect(0)
    shares = [part["share_in"] for part in done.json["metrics"]["inputs"]]
    assert shares[1] == shares[3] == 1
    assert max(shares[0], shares[2], shares[4]) <= 1 / 6


def test_a_prior_that_starts_give_away_keeps_everything_in(cli: Cli, two_class_run: Path) -> None:
    learnt = {}
    for weight in ("0", "10"):
        done = cli(
            "fit-lbbnn", two_class_run, "--estimator", "concrete", "--epochs", 5, "--prior-weight", weight,
            "--name", f"w{weight}", "--json",
        )  # fmt: skip
        learnt[weight] = done.json["metrics"]["prior_inclusion"][0]
    path = two_class_run.with_name("two.bnn") / "posteriors/w0.safetensors"
    inclusion = float(open_posterior(path)[0].model.factors.inclusion.double().mean())
    assert learnt["0"] == pytest.approx(inclusion, rel=1e-5)
    assert learnt["10"] == pytest.approx((inclusion + 10 * 0.05) / 11, rel=1e-2)


def test_only_a_single_logit_of_the_inputs_selects_inputs(cli: Cli, two_class_run: Path) -> None:
    assert "inputs" not in fitted(cli, two_class_run, "--hidden", "3")["metrics"]


def test_evaluate_has_the_rates_of_true_and_false_positives(cli: Cli, two_class_run: Path) -> None:
    cli("fit-lbbnn", two_class_run, *SELECT, "--epochs", 12).expect(0)
    cli("predict", two_class_run, "--posterior", "lbbnn", "--split", "test").expect(0)
    done = cli("evaluate", two_class_run, "--true-inputs", "2,4", "--json").expect(0)
    found = {metric["name"]: metric for metric in done.json["rows"][0]["metrics"]}
    path = two_class_run.with_name("two.bnn") / "posteriors/lbbnn.safetensors"
    inclusion = open_posterior(path)[0].model.factors.inclusion.tolist()
    for name, columns in (("true_positive_rate", (1, 3)), ("false_positive_rate", (0, 2, 4))):
        rates = [sum(row[i] > 0.5 for i in columns) / len(columns) for row in inclusion]
        assert found[name]["value"] == pytest.approx(np.mean(rates))
        assert found[name]["standard_error"] == pytest.approx(np.std(rates, ddof=1) / 7**0.5)
        assert found[name]["n"] == len(columns)
    table = cli("evaluate", two_class_run, "--true-inputs", "2,4").stdout
    assert "TPR" in table
    assert "FPR" in table
    everything = cli("evaluate", two_class_run, "--true-inputs", "1,2,3,4,5", "--force", "--json").json["rows"][0][
        "metrics"
    ]
    assert next(m for m in everything if m["name"] == "false_positive_rate")["value"] is None
    cli("evaluate", two_class_run, "--true-inputs", "2,6").expect(2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--true-inputs", "1,x"), "expected distinct comma-separated numbers from 1"),
        (("--true-inputs", "0,1"), "expected distinct comma-separated numbers from 1"),
        (("--true-inputs", "1,1"), "expected distinct comma-separated numbers from 1"),
        (("--true-inputs", "1,2"), "one layer and a single logit"),
    ],
)
def test_true_inputs_are_for_single_logits(cli: Cli, small_run: Path, words: tuple[str, ...], text: str) -> None:
    cli("evaluate", small_run, *words).expect(2, text)


def test_without_hidden_layers_the_val_split_chooses_the_slab(cli: Cli, small_run: Path) -> None:
    done = cli("fit-lbbnn", small_run, "--epochs", 8, "--json").expect(0)
    search = done.json["metrics"]["slab_sd_search"]
    best = min(search, key=lambda one: one["val_nll"])["slab_sd"]
    assert len(search) == 10
    assert done.json["metrics"]["slab_sd"] == [pytest.approx(best)]
    assert "features.val" in {entry["role"] for entry in done.json["inputs"]}
    given = cli("fit-lbbnn", small_run, "--epochs", 8, "--slab-sd", best, "--name", "given", "--json").json
    assert given["metrics"]["slab_sd_search"] is None
    # The search leaves no trace in the fit.
    files = [
        open_posterior(small_run.with_name("small.bnn") / f"posteriors/{n}.safetensors")[0] for n in ("lbbnn", "given")
    ]
    np.testing.assert_allclose(files[0].center, files[1].center, rtol=1e-4, atol=1e-5)
    hidden = cli("fit-lbbnn", small_run, "--epochs", 1, "--hidden", 4, "--name", "hidden", "--json").json
    assert hidden["metrics"]["slab_sd"] == [1.0, 1.0]


@pytest.mark.parametrize(("num_outputs", "likelihood"), [(1, None), (3, None), (3, "multilabel")])
def test_the_nll_of_repeats_is_that_of_the_mean_probability(num_outputs: int, likelihood: str | None) -> None:
    layout = NetworkLayout((4, num_outputs), likelihood)
    start = initial_factors(layout, 2, seeded(0), mean_range=2)
    model = LatentModel(layout, start, SpikeAndSlab.constant(1))
    features = torch.randn(7, 4, generator=seeded(1))
    labels = torch.arange(7) % layout.num_classes
    if likelihood is not None:
        labels = torch.randint(2, (7, 3), generator=seeded(3), dtype=torch.uint8)
    found = nll_of_repeats(model, features, labels, seeded(2))
    rng = seeded(2)
    for repeat, value in enumerate(found.tolist()):
        theta = layout.join(*model.draw_weights(torch.full((10,), repeat), rng))
        logits = layout.logits(features, theta).double()
        if likelihood is not None:
            expected = torch.nn.functional.binary_cross_entropy(logits.sigmoid().mean(dim=0), labels.double()).item()
        else:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=2) if num_outputs == 1 else logits
            probs = logits.softmax(dim=2).mean(dim=0)
            expected = log_loss(labels, probs, labels=range(layout.num_classes))
        assert value == pytest.approx(expected, rel=1e-5)


def test_standardised_inputs_give_a_posterior_for_inputs_as_they_are(cli: Cli, small_run: Path) -> None:
    cli("fit-lbbnn", small_run, *QUICK, "--standardize", "--slab-sd", "1").expect(0)
    folder = small_run.with_name("small.bnn")
    posterior = open_posterior(folder / "posteriors/lbbnn.safetensors")[0]
    features = read_features(folder / "features/train.h5").features
    scaled = StandardScaler().fit_transform(features.astype(np.float64))
    factors = posterior.model.factors
    plain = posterior.model.layout.join(factors.mean[0] * factors.inclusion[0], factors.bias_mean[0])
    expected = posterior.layout.logits(torch.from_numpy(scaled).float(), plain.unsqueeze(0))
    found = posterior.layout.logits(torch.from_numpy(features), posterior.mean_theta.unsqueeze(0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(features, scaled, atol=0.1)


def test_the_slab_of_standardised_inputs_is_chosen_on_a_val_split_scaled_alike(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "val", "test"):
        features = rng.normal(size=(200, 4)).astype(np.float32)
        labels = (features[:, 0] > 0).astype(np.int64)
        arrays |= {f"features_{split}": 1000 + 50 * features, f"labels_{split}": labels}
    new_run(cli, tmp_path / "far", arrays)
    done = cli(
        "fit-lbbnn",
        tmp_path / "far",
        "--epochs",
        20,
        "--batch-size",
        50,
        "--learning-rate",
        "0.1",
        "--standardize",
        "--json",
    ).expect(0)
    losses = [one["val_nll"] for one in done.json["metrics"]["slab_sd_search"]]
    assert max(losses) < 0.8  # log 2 is that of a network that knows nothing
    assert min(losses) < 0.65


def test_the_repeat_of_the_highest_bound_stands_for_all() -> None:
    layout = NetworkLayout((4, 3))
    model = LatentModel(layout, initial_factors(layout, 3, seeded(0)), SpikeAndSlab.constant(1))
    history, nothing = History(), torch.zeros(3, 1)
    for fit in ([0.0, 50.0, 0.0], [0.0, 1.0, 4.0], [0.0, 1.0, 4.0], [0.0, 1.0, 4.0], [0.0, 1.0, 4.0], [5.0, 1.0, 3.0]):
        history.add(
            log_likelihood=torch.tensor(fit),
            weight_divergence=torch.tensor([[0.0], [0.0], [1.0]]),
            bias_divergence=nothing,
            flow_divergence=nothing,
            density=nothing,
        )
    run: Any = SimpleNamespace(stream=lambda name: seeded(1))
    assert fit_lbbnn._posterior(run, model, history).best == 2


@pytest.mark.parametrize("best", [0, 1])
def test_the_expected_log_likelihood_is_that_of_the_best_repeat(best: int) -> None:
    layout = NetworkLayout((2, 1))
    factors = initial_factors(layout, 2, seeded(0))
    factors.logit.fill_(50.0)
    factors.rho.fill_(-50.0)
    factors.mean[0], factors.mean[1] = torch.tensor([0.0, 0.0]), torch.tensor([3.0, 0.0])
    factors.bias_mean.zero_()
    factors.bias_rho.fill_(-50.0)
    posterior = LatentBinary(LatentModel(layout, factors, SpikeAndSlab.constant(1)), best=best)
    data = TrainingData(torch.tensor([[1.0, 0.0], [2.0, 5.0]]), torch.tensor([1, 0]), None)
    run: Any = SimpleNamespace(console=SimpleNamespace(poll=lambda: None), device=torch.device("cpu"))
    run.stream = lambda name: seeded(1)
    found = measure(run, posterior, data, variance="exact", estimator="lrt")
    expected = [2 * np.log(0.5), -np.log1p(np.exp(-3.0)) - np.log1p(np.exp(6.0))][best]
    for name in ("expected_log_likelihood", "expected_log_likelihood_of_activations"):
        assert found[name]["value"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "hidden", "epochs"),
    [
        (60_000, 100, None, 60),
        (10_000, 100, None, 60),
        (9_901, 100, None, 60),
        (9_900, 100, None, 61),  # 99 steps an epoch
        (200, 100, None, 3000),
        (200, 400, None, 6000),
        (200, 100, "5", 250),
    ],
)
def test_default_epochs_give_6000_steps(num_examples: int, batch_size: int, hidden: str | None, epochs: int) -> None:
    options = FitLbbnnOptions(batch_size=batch_size, hidden=hidden)
    assert options.resolved(num_examples).epochs == epochs
    assert FitLbbnnOptions(epochs=7, hidden=hidden).resolved(num_examples).epochs == 7


def test_a_head_without_bias_has_predictions_of_a_latent_one_with_it(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {"head_weight": rng.normal(size=(3, 4)).astype(np.float32)}
    for split, count in (("train", 60), ("test", 20)):
        arrays[f"features_{split}"] = rng.normal(size=(count, 4)).astype(np.float32)
        arrays[f"labels_{split}"] = rng.integers(3, size=count)
    run = new_run(cli, tmp_path / "bare", arrays)
    fitted(cli, run)
    cli("fit-laplace", run, "--prior-precision", 1).expect(0)
    cli("predict", run, "--posterior", "lbbnn", "--posterior", "laplace", "--split", "test").expect(0)
    cli("diagnose", run).expect(0, "skipping lbbnn")
    cli("diagnose", run, "--posterior", "lbbnn").expect(65, "has a bias, but other posteriors of this run have none")
