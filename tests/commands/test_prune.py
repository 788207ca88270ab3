"""prune, sparse networks, and what evaluate says of density: against counts, dense products and scikit-learn."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.outputs import posterior_file
from safetensors.torch import load_file
from scipy import sparse as sparse_arrays
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from bnncli.artifacts.features import read_features
from bnncli.artifacts.predictions import read_predictions
from bnncli.cli.execute import run_command_line
from bnncli.commands.evaluate import curves as evaluate_density
from bnncli.commands.prune import choose_weights
from bnncli.evaluation.latent_networks import density_rows, density_thresholds, inclusion_histogram
from bnncli.latent.factors import initial_factors
from bnncli.latent.model import LatentModel, SpikeAndSlab
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.sparse import Sparse
from bnncli.session.inputs import open_posterior

pytestmark = pytest.mark.gpu

FIT = ("--epochs", "20", "--learning-rate", "0.03", "--hidden", "6")


@pytest.fixture(scope="module")
def fitted_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """finished_run with a latent binary network, made once."""
    folder = tmp_path_factory.mktemp("latent")
    shutil.copytree(finished_run.with_name("small.bnn"), folder / "small.bnn")
    assert run_command_line(["fit-lbbnn", str(folder / "small"), *FIT], io.StringIO()) == 0
    return folder / "small"


@pytest.fixture
def latent_run(fitted_run: Path, tmp_path: Path) -> Path:
    """A copy of fitted_run that a test may change."""
    shutil.copytree(fitted_run.with_name("small.bnn"), tmp_path / "small.bnn")
    return tmp_path / "small"


def test_a_sparse_network_comes_back_whole_and_stores_no_zeros() -> None:
    layout = NetworkLayout((5, 4, 3))
    theta = torch.randn(layout.num_params, generator=torch.Generator().manual_seed(0))
    is_out = torch.rand(layout.num_params, generator=torch.Generator().manual_seed(1)) < 0.7
    theta[is_out] = 0
    for weight, _ in layout.split(theta)[:1]:
        weight[2] = 0  # a row without any weight
    sparse = Sparse(theta, layout)
    tensors, meta = sparse.to_tensors()
    assert torch.equal(Sparse.from_tensors(tensors, meta).theta, theta)
    weights = sum(int((weight != 0).sum()) for weight, _ in layout.split(theta))
    assert sum(len(part) for name, part in tensors.items() if name.endswith("values")) == weights
    parts = [tensors[f"layers.0.weight.{part}"].numpy() for part in ("values", "col_indices", "crow_indices")]
    first = sparse_arrays.csr_array(tuple(parts), shape=(4, 5))
    assert np.array_equal(first.toarray(), layout.split(theta)[0][0].numpy())


@pytest.mark.parametrize("rule", [(), ("--rule", "density", "--density", "0.25")])
def test_prune_keeps_the_most_probable_weights_at_their_mean(cli: Cli, latent_run: Path, rule: tuple[str, ...]) -> None:
    done = cli("prune", latent_run, *rule, "--dense", latent_run.with_name("dense.safetensors"), "--json").expect(0)
    model = open_posterior(posterior_file(latent_run, "lbbnn"))[0].model
    inclusion, mean = model.factors.inclusion[0], model.factors.mean[0]
    if rule:
        kept = set(sorted(range(len(inclusion)), key=lambda i: -float(inclusion[i]))[: round(0.25 * len(inclusion))])
    else:
        kept = {i for i, value in enumerate(inclusion.tolist()) if value > 0.5}
    expected = torch.tensor([float(mean[i]) if i in kept else 0.0 for i in range(len(mean))])
    sparse = open_posterior(posterior_file(latent_run, "lbbnn-sparse"))[0]
    found = torch.cat([weight.flatten() for weight, _ in sparse.network.split(sparse.theta)])
    assert torch.equal(found, expected)
    metrics = done.json["metrics"]
    assert (metrics["weights_kept"], metrics["num_weights"]) == (len(kept), len(inclusion))

    split = read_features(latent_run.with_name("small.bnn") / "features/test.h5")
    network = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    network.load_state_dict(load_file(latent_run.with_name("dense.safetensors")))
    with torch.no_grad():
        probs = network(torch.from_numpy(split.features)).softmax(dim=1).double().numpy()
    assert split.labels is not None
    assert metrics["after"]["accuracy"] == pytest.approx(accuracy_score(split.labels, probs.argmax(axis=1)))
    theta = model.layout.join(inclusion * mean, model.factors.bias_mean[0])
    whole = model.layout.logits(torch.from_numpy(split.features), theta.unsqueeze(0))[0]
    assert metrics["before"]["accuracy"] == pytest.approx(accuracy_score(split.labels, whole.argmax(dim=1)))
    loss = log_loss(split.labels, whole.double().softmax(dim=1))
    assert metrics["before"]["nll"] == pytest.approx(loss, rel=1e-5)
    probs /= probs.sum(axis=1, keepdims=True)
    assert metrics["after"]["nll"] == pytest.approx(log_loss(split.labels, probs), rel=1e-5)
    cli("predict", latent_run, "--posterior", "lbbnn-sparse", "--split", "test").expect(0)
    predicted = read_predictions(latent_run.with_name("small.bnn") / "predictions/lbbnn-sparse.plug-in/test.h5")
    np.testing.assert_allclose(predicted.probs, probs, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--rule", "density"), 2, "--rule density and --density go together"),
        (("--density", "0.1"), 2, "--rule density and --density go together"),
        (("--posterior", "laplace"), 2, "expected a latent-binary posterior"),
        (("--posterior", "nothing"), 66, "nothing"),
        (("--split", "far"), 65, "no labels"),
    ],
)
def test_prune_refuses(cli: Cli, latent_run: Path, words: tuple[str, ...], code: int, text: str) -> None:
    cli("prune", latent_run, *words).expect(code, text)
    assert not posterior_file(latent_run, "lbbnn-sparse").exists()


def test_prune_writes_over_nothing_that_is_not_its_own(cli: Cli, latent_run: Path) -> None:
    foreign = latent_run.with_name("notes.txt")
    foreign.write_text("mine")
    cli("prune", latent_run, "--dense", foreign, "--force").expect(73)
    assert foreign.read_text() == "mine"
    dense = latent_run.with_name("dense.safetensors")
    cli("prune", latent_run, "--dense", dense).expect(0)
    cli("prune", latent_run, "--dense", dense).expect(73)
    cli("prune", latent_run, "--dense", dense, "--force").expect(0)


@pytest.mark.parametrize(
    "place", ["posteriors/lbbnn.safetensors", "posteriors/laplace.safetensors", "features/test.h5"]
)
def test_prune_keeps_inputs_even_with_force(cli: Cli, latent_run: Path, tmp_path: Path, place: str) -> None:
    path = latent_run.with_name("small.bnn") / place
    content = path.read_bytes()
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    for name in (path, link):
        cli("prune", latent_run, "--dense", name, "--force").expect(2)
    assert path.read_bytes() == content


def test_prune_says_what_accuracy_is_lost_and_how_to_keep_it(cli: Cli, latent_run: Path) -> None:
    done = cli("prune", latent_run, "--rule", "density", "--density", "0", "--json")
    metrics = done.json["metrics"]
    lost = f"from {metrics['before']['accuracy']:.4f} to {metrics['after']['accuracy']:.4f}"
    warning = done.json["warnings"][0]
    assert lost in warning
    command = warning.split("bnncli ")[1].split()
    kept = cli(*command, "--json").expect(0)
    inclusion = open_posterior(posterior_file(latent_run, "lbbnn"))[0].model.factors.inclusion
    assert metrics["expected_density"] == pytest.approx(float(inclusion.double().mean()))
    assert kept.json["metrics"]["density"] == pytest.approx(float(inclusion.double().mean()), abs=0.02)
    assert all("to keep as many" not in text for text in kept.json["warnings"])


def test_densities_of_draws_are_those_of_the_best_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = NetworkLayout((50, 40, 3))
    factors = initial_factors(layout, 3, torch.Generator().manual_seed(0))
    factors.logit[:2] = 30.0
    factors.logit[2] -= 2
    posterior = LatentBinary(LatentModel(layout, factors, SpikeAndSlab.constant(2)), best=2)
    monkeypatch.setattr(evaluate_density, "open_posterior", lambda path: (posterior, None))
    run: Any = SimpleNamespace(stream=lambda name: torch.Generator().manual_seed(1))
    rows, histograms = evaluate_density.compute_density_metrics(run, Path(), "mc")
    found = {(row["layer"], row["kind"]): row["value"] for row in rows}
    for layer, part in (("0", layout.weights(factors.inclusion[2])[0]), ("all", factors.inclusion[2])):
        error = float((part * (1 - part)).sum().sqrt()) / part.numel() / 10**0.5  # of ten draws
        assert found[layer, "expected"] == pytest.approx(float(part.double().mean()))
        assert found[layer, "sampled"] == pytest.approx(float(part.mean()), abs=5 * error)
        assert found[layer, "median"] == 0
    assert [sum(part["counts"]) for part in histograms] == [2000, 120]


def test_densities_are_counts() -> None:
    inclusion = [torch.tensor([[0.1, 0.6], [0.9, 0.5]]), torch.tensor([[1.0, 0.0]])]
    drawn = [torch.tensor([0.25, 0.75]), torch.tensor([0.5, 1.0])]
    rows = {(row["layer"], row["kind"]): row for row in density_rows(inclusion, drawn)}
    assert rows["all", "expected"]["value"] == pytest.approx((0.1 + 0.6 + 0.9 + 0.5 + 1) / 6)
    assert rows["0", "expected"]["value"] == pytest.approx(2.1 / 4)
    assert rows["all", "median"]["value"] == pytest.approx(3 / 6)
    assert rows["1", "sampled"]["value"] == pytest.approx(0.75)
    assert rows["all", "sampled"]["value"] == pytest.approx(np.mean([(1 + 1) / 6, (3 + 2) / 6]))
    assert (rows["0", "sampled"]["n"], rows["all", "sampled"]["n"]) == (4, 6)


def test_a_histogram_counts_every_probability() -> None:
    found = inclusion_histogram(torch.tensor([0.0, 0.04, 0.5, 0.99, 1.0]))
    assert sum(found["counts"]) == 5
    assert (found["counts"][0], found["counts"][10], found["counts"][-1]) == (2, 1, 2)


def test_thresholds_go_from_every_weight_to_few() -> None:
    inclusion = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    thresholds = density_thresholds(inclusion)
    shares = [float((inclusion > threshold).double().mean()) for threshold in thresholds]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert [shares[i] * 20_000 for i in (10, -1)] == [pytest.approx(20_000 * 10 ** (-3 * 10 / 19), abs=0.5), 20]
    few = torch.arange(1, 21) / 20
    assert [int((few.double() > threshold).sum()) for threshold in density_thresholds(few)][-2:] == [2, 1]
    assert density_thresholds(torch.full((5,), 0.3)) == [-1.0]


def test_ties_are_out_of_the_median_model_and_go_by_their_place_otherwise() -> None:
    layout = NetworkLayout((40, 1))
    factors = initial_factors(layout, 1, torch.Generator().manual_seed(0))
    factors.logit.zero_()
    factors.logit[0, :2] = torch.tensor([-1e-8, 1e-8])  # float32 cannot tell their probabilities from 1/2
    posterior = LatentBinary(LatentModel(layout, factors, SpikeAndSlab.constant(1)))
    only = torch.arange(40) == 1
    assert torch.equal(choose_weights(posterior, None), only)
    assert torch.equal(posterior.center[:40] != 0, only)
    assert torch.equal(posterior.pruned(0.5)[:40] != 0, only)
    rows = {row["kind"]: row["value"] for row in density_rows([posterior.inclusion], [torch.zeros(1)])}
    assert rows["median"] == 1 / 40
    assert choose_weights(posterior, 0.25).nonzero().flatten().tolist() == [*range(1, 11)]
    assert choose_weights(posterior, 1).sum() == 40
    assert choose_weights(posterior, 0).sum() == 0


def test_weights_that_are_nearly_surely_in_are_told_apart() -> None:
    layout = NetworkLayout((8, 1))
    factors = initial_factors(layout, 1, torch.Generator().manual_seed(0))
    factors.logit.copy_(torch.linspace(17, 24, 8).unsqueeze(0))  # all of them 1 in float32
    posterior = LatentBinary(LatentModel(layout, factors, SpikeAndSlab.constant(1)))
    kept = [int((posterior.pruned(threshold)[:8] != 0).sum()) for threshold in density_thresholds(posterior.inclusion)]
    assert kept == [8, 6, 4, 3, 2, 1]
    assert torch.equal(posterior.pruned(-1.0)[:8], factors.mean[0])


@pytest.mark.long
def test_evaluate_has_densities_and_the_curve_of_pruning(cli: Cli, latent_run: Path, tmp_path: Path) -> None:
    cli("predict", latent_run, "--posterior", "lbbnn", "--split", "test", "--split", "far").expect(0)
    words = ("--split", "test", "--curves", "--plot", tmp_path / "figures", "--json")
    done = cli("evaluate", latent_run, "--posterior", "lbbnn", *words).expect(0)
    row = next(row for row in done.json["rows"] if row["split"] == "test")
    densities = {(m["layer"], m["kind"]): m["value"] for m in row["metrics"] if m["name"] == "density"}
    inclusion = open_posterior(posterior_file(latent_run, "lbbnn"))[0].model.factors.inclusion[0]
    assert densities["all", "expected"] == pytest.approx(float(inclusion.double().mean()))
    assert {layer for layer, _ in densities} == {"all", "0", "1"}
    assert [sum(part["counts"]) for part in row["inclusion"]] == [30, 18]
    curve = row["curves"]["density"]
    assert (curve["density"][0], min(curve["density"]) > 0) == (1, True)
    assert all(0 <= value <= 1 for value in curve["accuracy"])
    # The network with every weight, each at its slab's mean.
    factors = open_posterior(posterior_file(latent_run, "lbbnn"))[0].model.factors
    split = read_features(latent_run.with_name("small.bnn") / "features/test.h5")
    layout = NetworkLayout((5, 6, 3))
    theta = layout.join(factors.mean, factors.bias_mean)
    predicted = layout.logits(torch.from_numpy(split.features), theta)[0].argmax(dim=1).numpy()
    assert split.labels is not None
    assert curve["accuracy"][0] == pytest.approx(accuracy_score(split.labels, predicted))
    assert (tmp_path / "figures/density-test.png").stat().st_size > 10_000
    cli("evaluate", latent_run, "--posterior", "lbbnn", "--split", "test", "--assert", "density<=0.000001").expect(3)
