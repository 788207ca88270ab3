"""SWAG: its covariance against the dense one, the moments of the iterates it saw, the learning rate that it chooses by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from problems.heads import by_noisy_sign, draw_theta, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli.errors import NumericError
from bnncli.inference.swag import LEAST_SHARE, SwagPlan, fit_swag, halve_learning_rate, noise_trace
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.logits import head_spread
from bnncli.structures.swag import Swag

LAYOUT = HeadLayout(3, 4)
PLAN = SwagPlan(warmup=2, epochs=6, rank=4, batch_size=7, learning_rate=0.05)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(), dtype=torch.float64)


def parts(rank: int = 3) -> tuple[Tensor, Tensor]:
    return 0.1 + normal(15).square(), normal(rank, 15)


def dense(variances: Tensor, deviations: Tensor, scale: float) -> Tensor:
    return scale * (variances.diag() / 2 + deviations.T @ deviations / (2 * (len(deviations) - 1)))


@pytest.mark.parametrize(("rank", "scale"), [(3, 1.0), (20, 0.5)])
def test_the_algebra_is_that_of_the_dense_matrix(rank: int, scale: float) -> None:
    variances, deviations = parts(rank)
    covariance, expected = Swag.of(variances, deviations, scale), dense(variances, deviations, scale)
    root = covariance.unwhiten(torch.eye(15, dtype=torch.float64)).T
    torch.testing.assert_close(root @ root.T, expected)
    torch.testing.assert_close(covariance.whiten(root.T), torch.eye(15, dtype=torch.float64))
    torch.testing.assert_close(covariance.pull_back(normal(2, 15)), normal(2, 15) @ root)
    torch.testing.assert_close(covariance.marginal_variances(), expected.diagonal())
    gaussian = Gaussian(normal(15), covariance, LAYOUT, Prior(1.0))
    theta = normal(5, 15) * 2
    normalised = torch.distributions.MultivariateNormal(normal(15), expected)
    torch.testing.assert_close(gaussian.log_density(theta), normalised.log_prob(theta))
    features = normal(6, 4)
    jacobian = LAYOUT.jacobian(features)
    torch.testing.assert_close(head_spread(covariance, LAYOUT).covariance(features), jacobian @ expected @ jacobian.mT)


def test_equal_deviations_are_one_direction() -> None:
    variances, deviations = parts(1)
    same = deviations.expand(4, -1)
    root = Swag.of(variances, same).unwhiten(torch.eye(15, dtype=torch.float64)).T
    torch.testing.assert_close(root @ root.T, dense(variances, same, 1.0))


def test_a_stored_one_comes_back() -> None:
    gaussian = Gaussian(normal(15), Swag.of(*parts(), 0.7), LAYOUT, Prior(2.0))
    tensors, meta = gaussian.to_tensors()
    again = Gaussian.from_tensors(tensors, meta)
    assert meta["structure"] == "swag"
    theta = normal(4, 15)
    torch.testing.assert_close(again.log_density(theta), gaussian.log_density(theta), rtol=1e-5, atol=1e-5)


def plain_sgd(plan: SwagPlan, start: Tensor) -> list[Tensor]:
    """The iterate at the end of every epoch, by the textbook."""
    target = head_target(LAYOUT, 30)
    generator, theta, velocity, found = seeded(), start.clone(), torch.zeros_like(start), []
    for _ in range(plan.warmup + plan.epochs):
        for rows in torch.randperm(30, generator=generator).split(plan.batch_size):
            gradient = target.minibatch(*target.examples(rows)).log_joint_and_grad(theta[None])[1][0] / 30
            velocity = plan.momentum * velocity + gradient
            theta = theta + plan.learning_rate * velocity
        found.append(theta)
    return found


def test_mean_variances_and_deviations_are_those_of_the_iterates() -> None:
    start = draw_theta(LAYOUT)
    fit = fit_swag(head_target(LAYOUT, 30), PLAN, start=start, generator=seeded())
    taken = plain_sgd(PLAN, start)[PLAN.warmup :]
    stacked = torch.stack(taken)
    torch.testing.assert_close(fit.gaussian.mean, stacked.mean(dim=0))
    means = [stacked[: count + 1].mean(dim=0) for count in range(len(taken))]
    deviations = torch.stack([one - mean for one, mean in zip(taken, means, strict=True)])[-PLAN.rank :]
    expected = dense(stacked.var(dim=0, correction=0), deviations, 1.0)
    root = fit.gaussian.covariance.unwhiten(torch.eye(15, dtype=torch.float64)).T
    torch.testing.assert_close(root @ root.T, expected)
    assert fit.num_still == 0


def test_a_parameter_that_does_not_move_has_next_to_no_variance() -> None:
    layout = HeadLayout(1, 2, has_bias=False)
    target = head_target(layout, 30)
    target.features[:, 1] = 0
    fit = fit_swag(target, PLAN, start=torch.zeros(2), generator=seeded())
    assert fit.num_still == 1
    assert math.isfinite(fit.gaussian.entropy)
    assert float(fit.gaussian.sample(50, seeded())[:, 1].abs().max()) < 10 * LEAST_SHARE**0.5


def test_the_trace_of_the_noise_is_that_of_single_gradients() -> None:
    target, theta = head_target(LAYOUT, 400, labels=by_noisy_sign), draw_theta(LAYOUT)
    rows = [torch.tensor([row]) for row in range(400)]
    single = torch.stack(
        [target.minibatch(*target.examples(row)).log_joint_and_grad(theta[None])[1][0] for row in rows]
    )
    single = single / 400
    expected = float(single.var(dim=0).sum())
    traces = [noise_trace(target, theta, 20, seeded(seed))[0] for seed in range(30)]
    error = torch.tensor(traces).std() / 30**0.5
    assert abs(sum(traces) / 30 - expected) < 4 * error
    assert noise_trace(target, theta, 20, seeded())[1] == 1.0


@pytest.mark.parametrize(("size", "batch_size"), [(40, 20), (43, 10), (700, 10)])
def test_the_trace_of_the_noise_is_that_of_its_batches_with_the_correction_for_a_finite_population(
    size: int, batch_size: int
) -> None:
    """By NumPy, of the same batches: those left over and those beyond the most are not looked at."""
    target, theta = head_target(LAYOUT, size, labels=by_noisy_sign), draw_theta(LAYOUT)
    order = torch.randperm(size, generator=seeded(3)).split(batch_size)
    whole = [rows for rows in order if len(rows) == batch_size][:64]
    probs = LAYOUT.logits(target.features, theta[None])[0].softmax(1)
    labels = (
        torch.nn.functional.one_hot(target.labels.long(), probs.shape[1]) if target.labels.ndim == 1 else target.labels
    )
    inputs = torch.cat([target.features, torch.ones(size, 1)], dim=1) if LAYOUT.has_bias else target.features
    single = ((probs - labels).double().unsqueeze(2) * inputs.double().unsqueeze(1)).flatten(1).numpy()
    means = np.stack([single[rows.numpy()].mean(axis=0) for rows in whole])
    expected = batch_size * means.var(axis=0, ddof=1).sum() / (1 - batch_size / size)
    found, passes = noise_trace(target, theta, batch_size, seeded(3))
    assert found == pytest.approx(expected, rel=1e-4)
    assert passes == pytest.approx(len(whole) * batch_size / size)


def test_a_resumed_fit_is_the_same() -> None:
    target, start, states = head_target(LAYOUT, 30), draw_theta(LAYOUT), []
    whole = fit_swag(target, PLAN, start=start, generator=seeded(), save=lambda state, last: states.append(state))
    again = fit_swag(target, PLAN, start=start + 1, generator=seeded(3), state=states[4])
    assert torch.equal(again.gaussian.mean, whole.gaussian.mean)
    assert torch.equal(again.gaussian.sample(3, seeded()), whole.gaussian.sample(3, seeded()))
    assert torch.equal(again.history, whole.history)


def test_a_rate_that_is_too_high_is_told() -> None:
    plan = SwagPlan(1, 200, 4, 7, learning_rate=1e4)
    with pytest.raises(NumericError, match="not finite") as caught:
        fit_swag(head_target(LAYOUT, 30, dtype=torch.float32), plan, start=draw_theta(LAYOUT), generator=seeded())
    assert "learning_rate" in str(caught.value.hint)


def test_a_rate_at_which_steps_run_away_is_halved_and_a_right_one_kept() -> None:
    target, start = head_target(LAYOUT, 200, labels=by_noisy_sign), draw_theta(LAYOUT)
    right = SwagPlan(2, 10, 4, 20, learning_rate=0.05)
    kept, epochs = halve_learning_rate(target, right, start=start, generator=seeded())
    assert (kept, epochs) == (right, 10)
    hot = replace(right, learning_rate=1000 * 0.05)
    cooled, epochs = halve_learning_rate(target, hot, start=start, generator=seeded())
    assert cooled.learning_rate < 0.1 * hot.learning_rate
    assert epochs > 10
    ends = [float(fit_swag(target, plan, start=start, generator=seeded()).history[-1]) for plan in (hot, cooled)]
    assert ends[1] > ends[0] + LAYOUT.num_params / 2
