"""Monte Carlo over draws of theta: intervals, Sobol draws, draws made once."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli
from problems.heads import ONE, THREE, TWO, at_random_by, gaussian_at_mode, head_target
from problems.seeds import seeded
from scipy import special
from torch import Tensor

from bnncli import integrators
from bnncli.artifacts.predictions import read_predictions
from bnncli.errors import UsageError
from bnncli.flows import build_layers
from bnncli.integrators import _draws, load_integrator
from bnncli.integrators._partitions import central_interval, effective_draws, interval_level
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.samples import Samples

LAYOUTS = [ONE, TWO, THREE]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def make_gaussian(layout: HeadLayout, structure: str = "full") -> Gaussian:
    return gaussian_at_mode(head_target(layout, labels=at_random_by(0), prior=0.5), structure)


def naive_probs(draws: Tensor, features: Tensor, layout: HeadLayout) -> np.ndarray:
    """(S, N, C) of theta (S, P)."""
    logits = layout.logits(features.double(), draws.double()).numpy()
    if layout.num_outputs == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=2)
    return special.softmax(logits, axis=2)


def test_an_interval_is_numpys_quantiles() -> None:
    draws = torch.rand(7, 53, generator=seeded(), dtype=torch.float64)
    expected = np.quantile(draws.numpy(), [0.025, 0.975], axis=1, method="weibull").T
    np.testing.assert_allclose(central_interval(draws), expected, rtol=1e-12)
    np.testing.assert_allclose(central_interval(draws, torch.full((53,), 2.0)), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 9, 39])
def test_the_interval_of_few_draws_is_all_of_them(size: int) -> None:
    draws = torch.rand(5, size, generator=seeded(), dtype=torch.float64)
    expected = torch.stack([draws.min(dim=1).values, draws.max(dim=1).values], dim=1)
    for weights in (None, torch.ones(size)):
        torch.testing.assert_close(central_interval(draws, weights), expected)


def test_a_weighted_interval_interpolates_between_the_middles_of_shares() -> None:
    draws = torch.rand(6, 400, generator=seeded(), dtype=torch.float64)
    weights = torch.rand(400, generator=seeded(1), dtype=torch.float64) ** 3
    weights[:5] = 0
    size = float(weights.sum() ** 2 / weights.square().sum())
    assert 39 < size < 200
    tails = [(0.025 * (size + 1) - 0.5) / size, (0.975 * (size + 1) - 0.5) / size]
    for row, found in zip(draws.numpy(), central_interval(draws, weights), strict=True):
        order = np.argsort(row)
        shares = (weights.numpy() / weights.sum().item())[order]
        expected = np.interp(tails, np.cumsum(shares) - shares / 2, row[order])
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def share_held(size: int, *, weights_of: Any = None, repeats: int = 4000) -> tuple[float, float]:
    """Mean and standard error of the probability that intervals of `size` skewed draws hold, drawn afresh each time."""
    draws = 2 * torch.randn(repeats, size, generator=seeded(size), dtype=torch.float64) + 1
    if weights_of is None:
        ends = central_interval(torch.sigmoid(draws))
    else:
        rows = [central_interval(torch.sigmoid(row[None]), weights_of(row)) for row in draws]
        ends = torch.cat(rows)
    mean = 1.0 if weights_of is None else 2.0
    held = torch.special.ndtr((torch.logit(ends) - mean) / 2).diff(dim=1)[:, 0]
    return float(held.mean()), float(held.std() / math.sqrt(repeats))


@pytest.mark.parametrize("size", [2, 5, 20, 38, 39, 60, 200])
def test_an_interval_holds_its_level(size: int) -> None:
    held, error = share_held(size)
    level = interval_level(size)
    assert level == pytest.approx(min(0.95, (size - 1) / (size + 1)))
    assert held == pytest.approx(level, abs=4 * error + 0.002)  # linear between draws of a skewed distribution


@pytest.mark.parametrize(("size", "allowed"), [(40, 0.03), (300, 0.01)])
def test_a_weighted_interval_holds_about_its_level(size: int, allowed: float) -> None:
    """Draws of N(1, 4) weighted to N(2, 4): 0.78 S are effective, but fewer of them in the tail that was weighted up."""
    held, error = share_held(size, weights_of=lambda row: (row / 4).softmax(dim=0), repeats=800)
    row = 2 * torch.randn(10**5, generator=seeded(), dtype=torch.float64) + 1
    kish = size * effective_draws(10**5, (row / 4).softmax(dim=0)) / 10**5
    assert held == pytest.approx(min(0.95, (kish - 1) / (kish + 1)), abs=3 * error + allowed)


def test_one_draw_has_no_level() -> None:
    assert interval_level(1) is None


@every_layout
@pytest.mark.parametrize("budget", [2**19, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mc_gives_the_predicted_classs_interval(
    layout: HeadLayout, budget: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(integrators._CHUNK_LOGITS, "cpu", budget)
    monkeypatch.setattr(_draws, "_CHUNK_EXAMPLES", 5)
    # A few draws lie far out, so that the class at their mean is often not the predicted one.
    draws = torch.randn(1, 48, layout.num_params, generator=seeded())
    draws[:, :6] *= 60
    features = torch.randn(40, layout.num_features, generator=seeded(1)).to(dtype)
    prediction = load_integrator("mc").predict(Samples(draws, layout), features, num_samples=None, generator=seeded())
    probs = naive_probs(draws[0], features, layout)
    predicted = probs.mean(axis=0).argmax(axis=1)
    center = naive_probs(draws.mean(dim=1), features, layout)[0].argmax(axis=1)
    assert (predicted != center).sum() > 3
    expected = np.quantile(probs[:, np.arange(40), predicted], [0.025, 0.975], axis=0, method="weibull").T
    np.testing.assert_allclose(prediction.interval, expected, atol=2e-5)


def test_many_draws_narrow_the_block_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, posterior = LAYOUTS[2], make_gaussian(LAYOUTS[2])
    features = torch.randn(40, 4, generator=seeded(1))
    whole = load_integrator("mc").predict(posterior, features, num_samples=30, generator=seeded())
    monkeypatch.setitem(_draws._KEPT, "cpu", 90)
    drawn = load_integrator("mc").prepare(posterior, num_samples=30, generator=seeded())
    assert _draws.chunks(features, drawn._draws(features))[0][0] == slice(0, 3)  # type: ignore[attr-defined]
    assert layout == posterior.layout
    torch.testing.assert_close(drawn.predict(posterior, features).interval, whole.interval)  # type: ignore[call-arg]


def test_one_draw_has_no_interval() -> None:
    features = torch.randn(3, 4, generator=seeded())
    prediction = load_integrator("mc").predict(make_gaussian(LAYOUTS[2]), features, num_samples=1, generator=seeded())
    assert prediction.interval is None


@pytest.mark.parametrize("name", ["mc", "logit-mc"])
@pytest.mark.parametrize("qmc", [False, True])
def test_draws_made_once_serve_every_block(name: str, qmc: bool) -> None:
    posterior, features = make_gaussian(LAYOUTS[2]), torch.randn(20, 4, generator=seeded(1))
    integrator = load_integrator(name, qmc=qmc)
    whole = integrator.predict(posterior, features, num_samples=16, generator=seeded(3))
    ready = integrator.prepare(posterior, num_samples=16, generator=seeded(3))
    parts = [ready.predict(posterior, block, num_samples=5, generator=seeded(9)) for block in features.split(7)]
    torch.testing.assert_close(torch.cat([part.probs for part in parts]), whole.probs)
    kept = ready.probs_of_draws(posterior, features)  # type: ignore[attr-defined]
    assert kept.shape == (16, 20, 3)
    np.testing.assert_allclose(kept.double().mean(dim=0), whole.probs, atol=1e-3)


@cache
def known() -> tuple[Gaussian, Tensor, Tensor]:
    """A posterior, features (N, D) and their probabilities (N, C) by 2^16 Sobol points of the logits."""
    posterior, features = make_gaussian(LAYOUTS[1]), torch.randn(6, 4, generator=seeded(1), dtype=torch.float64)
    exact = load_integrator("logit-mc", qmc=True).predict(posterior, features, num_samples=2**16, generator=seeded())
    return posterior, features, exact.probs.double()


def many_errors(name: str, *, qmc: bool, num_seeds: int = 100) -> Tensor:
    """Errors (R, N, C) of predictions by 32 draws under many seeds."""
    posterior, features, exact = known()
    integrator = load_integrator(name, qmc=qmc)
    found = [
        integrator.predict(posterior, features, num_samples=32, generator=seeded(seed)).probs
        for seed in range(num_seeds)
    ]
    return torch.stack(found).double() - exact


@pytest.mark.parametrize("name", [pytest.param("mc", marks=pytest.mark.long), "logit-mc"])
def test_sobol_draws_are_unbiased_and_err_less(name: str) -> None:
    plain, quasi = many_errors(name, qmc=False), many_errors(name, qmc=True)
    for errors in (plain, quasi):
        standard_error = errors.std(dim=0) / math.sqrt(len(errors))
        assert (errors.mean(dim=0).abs() < 4 * standard_error + 2e-5).all()
    # Each of the two mean squares has a standard error of at most sqrt(2 / 100) of itself, if all examples erred alike.
    assert quasi.square().mean() < 0.5 * plain.square().mean()


def test_a_flow_draws_from_sobol_points_too() -> None:
    base = make_gaussian(LAYOUTS[2])
    flow = Flow(base, tuple(build_layers("radial", base.layout, seeded(), length=1)), "radial")
    found = load_integrator("mc", qmc=True).prepare(flow, num_samples=16, generator=seeded())
    generator = seeded()
    expected, _ = flow.from_noise(torch.cat([base.quasi_noise(2, generator) for _ in range(8)]))
    assert torch.equal(found.theta, expected.float())  # type: ignore[attr-defined]


def test_stored_draws_have_no_sobol_points() -> None:
    posterior = Samples(torch.zeros(1, 4, LAYOUTS[2].num_params), LAYOUTS[2])
    with pytest.raises(UsageError, match=r"\0qmc\0 needs a posterior built from standard normals .*, got samples"):
        load_integrator("mc", qmc=True).prepare(posterior, num_samples=4, generator=seeded())


def test_an_odd_number_of_sobol_draws_brings_a_warning() -> None:
    posterior = make_gaussian(LAYOUTS[2])
    for name in ("mc", "logit-mc"):
        integrator = load_integrator(name, qmc=True)
        assert "16 or 32" in integrator.prepare(posterior, num_samples=20, generator=seeded()).warning  # type: ignore[attr-defined]
        default = integrator.prepare(posterior, num_samples=integrator.default_samples, generator=seeded())  # type: ignore[attr-defined]
        assert default.warning is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mc", "logit-mc"])
def test_kept_draws_are_those_of_the_integrator(name: str, cli: Cli, small_run: Path) -> None:
    words = ("--posterior", "laplace", "--split", "test", "--integrator", name, "--qmc", "--samples", 32)
    assert cli("predict", small_run, *words, "--keep-samples").code == 0
    path = small_run.with_name("small.bnn") / f"predictions/laplace.{name}-qmc/test.h5"
    content = read_predictions(path)  # checks that the mean of the draws is the prediction
    assert content.probs_samples is not None
    assert content.probs_samples.shape == (32, 120, 3)
    assert content.interval is not None
    predicted = content.probs[:].argmax(axis=1)
    draws = content.probs_samples[:][:, np.arange(120), predicted].astype(np.float64)
    expected = np.quantile(draws, [0.025, 0.975], axis=0, method="weibull").T
    np.testing.assert_allclose(content.interval, expected, atol=1e-3)


def test_sobol_draws_of_stored_draws_are_refused_by_name(cli: Cli, small_run: Path) -> None:
    done = cli("predict", small_run, "--posterior", "hmc", "--integrator", "mc", "--qmc")
    assert done.code == 2
    assert "--integrator mc-qmc does not work for a samples posterior (hmc)" in done.stderr
