"""The verdict on a refinement: every branch, how often each is wrong by simulation, and the noise it goes by."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from problems.command_line import Cli
from problems.seeds import seeded
from scipy import stats

from bnncli.evaluation.comparison import skewness_of
from bnncli.evaluation.verdict import ERROR_RATE, LOOKS, NEGLIGIBLE_NATS, VERDICTS, judge_gain, reach
from bnncli.flows.affine import Affine
from bnncli.inference import elbo as module
from bnncli.inference.elbo import elbo, measure_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget

NUM_REPEATS = 1000


@pytest.mark.parametrize(
    ("gain", "error", "verdict"),
    [
        (5.0, 1.0, "helped"),
        (-5.0, 1.0, "hurt"),
        (0.6, 0.15, "helped"),
        (0.0, 0.0, "negligible"),
        (0.1, 0.1, "negligible"),
        (-0.1, 0.1, "negligible"),
        (0.4, 0.01, "negligible"),  # a gain for certain, and for certain one that does not matter
        (0.1, 0.15, None),
        (18.25, 7.68, None),  # absence of evidence
        (-18.25, 7.68, None),
        (0.45, 0.05, None),  # a gain for certain, and whether it matters more draws will tell
        (-0.45, 0.05, None),
    ],
)
def test_a_verdict_needs_evidence(gain: float, error: float, verdict: str | None) -> None:
    assert judge_gain(gain, error, 10_000, is_last=False) == verdict


@pytest.mark.parametrize(
    ("gain", "error", "verdict"),
    [
        (18.25, 7.68, "undecided"),
        (-18.25, 7.68, "undecided"),
        (0.1, 0.15, "undecided"),
        (0.45, 0.05, "helped"),
        (-0.45, 0.05, "hurt"),
        (5.0, 1.0, "helped"),
        (0.1, 0.1, "negligible"),
        (math.nan, math.nan, "undecided"),
    ],
)
def test_the_last_look_says_what_is_known(gain: float, error: float, verdict: str) -> None:
    assert judge_gain(gain, error, 10_000, is_last=True) == verdict
    assert verdict in VERDICTS


def test_three_standard_errors_are_more_where_few_draws_tell_them() -> None:
    assert reach(10**6) == pytest.approx(3, abs=1e-4)
    for num_draws in (2, 8, 256):
        assert stats.t.sf(reach(num_draws), num_draws - 1) == pytest.approx(stats.norm.sf(3))
    assert judge_gain(4.0, 1.0, 8, is_last=True) == "undecided"
    assert judge_gain(4.0, 1.0, 256, is_last=True) == "helped"


def drawn_verdicts(differences: NDArray[np.float64], first: int) -> list[str]:
    """The verdict on each row of differences (R, first 2^(LOOKS - 1)), taken look by look until there is one."""
    found = []
    counts = [first * 2**look for look in range(LOOKS)]
    means = np.stack([differences[:, :count].mean(axis=1) for count in counts])
    errors = np.stack([differences[:, :count].std(axis=1, ddof=1) / math.sqrt(count) for count in counts])
    for row in range(len(differences)):
        looks = (
            judge_gain(
                means[k, row],
                errors[k, row],
                count,
                is_last=k == LOOKS - 1,
                skewness=skewness_of(differences[row, :count]),
            )
            for k, count in enumerate(counts)
        )
        found.append(next(verdict for verdict in looks if verdict is not None))
    return found


SHAPES = {
    "normal": lambda generator, size: generator.standard_normal(size),
    "skewed": lambda generator, size: generator.gamma(1, size=size) - 1,
    "heavy": lambda generator, size: (generator.lognormal(size=size) - math.exp(0.5)) / 2.1612,
}


@pytest.mark.parametrize("shape", ["normal", "skewed", pytest.param("heavy", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("gain", "spread", "wrong"),
    [
        (0.0, 3.0, "helped"),  # a spread at which looks go on to the end, or nearly
        (0.0, 3.0, "hurt"),
        (0.0, 30.0, "helped"),
        (0.0, 30.0, "hurt"),
        (1.0, 3.0, "negligible"),
        (-1.0, 3.0, "negligible"),
        (NEGLIGIBLE_NATS, 2.0, "negligible"),  # the worst case
        (-NEGLIGIBLE_NATS, 2.0, "negligible"),
        (1.0, 3.0, "hurt"),
        (-1.0, 3.0, "helped"),
    ],
)
def test_no_verdict_is_wrong_more_often_than_stated(shape: str, gain: float, spread: float, wrong: str) -> None:
    first = 64 if shape == "normal" else 256  # as many as refine draws first
    noise = SHAPES[shape](np.random.default_rng(0), (NUM_REPEATS, first * 2 ** (LOOKS - 1)))
    verdicts = drawn_verdicts(gain + spread * noise, first)
    share = np.mean([verdict == wrong for verdict in verdicts])
    assert share <= ERROR_RATE + 3 * math.sqrt(ERROR_RATE * (1 - ERROR_RATE) / NUM_REPEATS)


@pytest.mark.parametrize(
    ("gain", "spread", "right"), [(10.0, 10.0, "helped"), (-10.0, 10.0, "hurt"), (0.0, 1.0, "negligible")]
)
def test_what_is_plain_is_said(gain: float, spread: float, right: str) -> None:
    noise = np.random.default_rng(0).standard_normal((200, 64 * 2 ** (LOOKS - 1)))
    assert drawn_verdicts(gain + spread * noise, 64).count(right) >= 198


def make_case(shift: float) -> tuple[LastLayerTarget, Gaussian, Flow]:
    """A posterior that is exactly Gaussian, its Gaussian moved by three deviations, and a flow that moves it back by `shift`."""
    layout = HeadLayout(1, 1)
    features = torch.randn(12, 1, generator=seeded(), dtype=torch.float64)
    target = LastLayerTarget(features, (features[:, 0] > 0).long(), layout, Prior(0.3), 0.0)
    mode = fit_gaussian(target, start=torch.zeros(2)).gaussian
    direction = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    base = Gaussian(mode.mean + mode.covariance.unwhiten(3 * direction)[0], mode.covariance, layout, mode.prior)
    layer = Affine(layout, seeded()).requires_grad_(False).double()
    layer.shift -= shift * direction[0]
    return target, base, Flow(base, (layer,), "affine", "whitened")


def test_the_gain_is_that_of_a_closed_form_with_the_paired_error() -> None:
    target, base, flow = make_case(1.0)
    found = measure_gain(target, base, flow, generator=seeded(), num_samples=256)
    # Away by 3, then by 2: the divergence falls by (9 - 4) / 2. Draw by draw the gain is 2.5 + z, the weights -3 z and -2 z.
    assert found.value == pytest.approx(2.5, abs=4 * found.standard_error)
    gains = found.after.log_weights - found.before.log_weights
    assert found.standard_error == pytest.approx(float(gains.std()) / 16, rel=1e-9)
    assert found.standard_error == pytest.approx(1 / 16, rel=0.2)
    assert found.before.standard_error == pytest.approx(3 / 16, rel=0.2)
    assert found.standard_error < 0.5 * math.hypot(found.before.standard_error, found.after.standard_error)
    assert found.verdict == "helped"


def test_draws_go_on_until_they_decide_and_begin_as_they_did() -> None:
    target, base, flow = make_case(1.0)
    counted = [
        len(measure_gain(target, base, flow, generator=seeded(1), num_samples=count).before.log_weights)
        for count in (4, 64)
    ]
    assert counted[1] == 64
    assert counted[0] in (8, 16, 32, 64)
    once = elbo(target, base, generator=seeded(1), num_samples=4).log_weights
    more = measure_gain(target, base, flow, generator=seeded(1), num_samples=4).before.log_weights
    assert torch.equal(more[:4], once)


def test_drawing_ends_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    target, base, flow = make_case(1.0)
    generator = seeded(3)
    monkeypatch.setattr(
        module, "log_weights", lambda target, posterior, noise, _: 1e3 * torch.randn(len(noise), generator=generator)
    )
    found = measure_gain(target, base, flow, generator=seeded(), num_samples=8)
    assert (found.verdict, len(found.before.log_weights)) == ("undecided", 8 * 2 ** (LOOKS - 1))


def test_weights_that_are_not_finite_end_the_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, base, flow = make_case(1.0)
    monkeypatch.setattr(module, "log_weights", lambda target, posterior, noise, _: torch.full((len(noise),), math.nan))
    assert len(measure_gain(target, base, flow, generator=seeded(), num_samples=8).before.log_weights) == 8


def test_the_report_gives_the_paired_error(cli: Cli, small_run: Path) -> None:
    words = ("refine", small_run, "--flow", "radial", "--length", 2, "--epochs", 1, "--name", "again", "--json")
    metrics = cli(*words).json["metrics"]
    paired = metrics["elbo_gain"]["standard_error"]
    assert 0 < paired < 0.5 * math.hypot(*(metrics[f"elbo_{side}"]["standard_error"] for side in ("before", "after")))
    assert metrics["verdict"] in VERDICTS
    assert metrics["elbo_draws"] in [256 * 2**look for look in range(LOOKS)]
