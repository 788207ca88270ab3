"""Many sets of labels as one target: each row has the log joint and the gradient of its own target."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import seeded

from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.variants import ManyLabels

LAYOUTS = [HeadLayout(3, 2), HeadLayout(1, 2), HeadLayout(2, 2, has_bias=False)]


def many(layout: HeadLayout, num_sets: int = 3) -> ManyLabels:
    features = torch.randn(11, 2, generator=seeded(), dtype=torch.float64)
    sets = torch.randint(layout.num_classes, (num_sets, 11), generator=seeded(1))
    targets = [LastLayerTarget(features, labels, layout, Prior(0.7, 0.2)) for labels in sets]
    means = torch.randn(num_sets, layout.num_params, generator=seeded(2), dtype=torch.float64)
    roots = torch.randn(num_sets, layout.num_params, layout.num_params, generator=seeded(3), dtype=torch.float64).tril()
    return ManyLabels(targets, means, roots)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_row_is_of_its_own_target(layout: HeadLayout) -> None:
    target = many(layout)
    z = torch.randn(6, layout.num_params, generator=seeded(4), dtype=torch.float64)
    value, gradient = target.log_joint_and_grad(z)
    torch.testing.assert_close(target.log_joint(z), value)
    for row in range(6):
        own = row % 3
        theta = target.means[own] + target.roots[own] @ z[row]
        torch.testing.assert_close(target.theta(z)[row], theta)
        joint, slope = target.targets[own].log_joint_and_grad(theta.unsqueeze(0))
        torch.testing.assert_close(value[row], joint[0])
        torch.testing.assert_close(gradient[row], slope[0] @ target.roots[own])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_row_of_a_minibatch_is_of_its_own_targets(layout: HeadLayout) -> None:
    target, rows = many(layout), torch.tensor([7, 0, 3, 10])
    z = torch.randn(6, layout.num_params, generator=seeded(4), dtype=torch.float64)
    value, gradient = target.minibatch(*target.examples(rows)).log_joint_and_grad(z)
    for row in range(6):
        own = target.targets[row % 3]
        theta = target.theta(z)[row].unsqueeze(0)
        joint, slope = own.minibatch(*own.examples(rows)).log_joint_and_grad(theta)
        torch.testing.assert_close(value[row], joint[0])
        torch.testing.assert_close(gradient[row], slope[0] @ target.roots[row % 3])


def test_draws_are_told_apart_by_their_target() -> None:
    target = many(LAYOUTS[0])
    z = torch.randn(6, 4, LAYOUTS[0].num_params, generator=seeded(4), dtype=torch.float64)
    found = target.by_target(z)
    assert found.shape == (3, 8, LAYOUTS[0].num_params)
    for own in range(3):  # rows own and own + 3, four draws each
        expected = torch.cat([z[own], z[own + 3]]) @ target.roots[own].T + target.means[own]
        torch.testing.assert_close(found[own], expected)


def test_targets_of_other_features_are_refused() -> None:
    one, other = many(LAYOUTS[0]), many(LAYOUTS[0])
    with pytest.raises(ValueError, match="share their features"):
        ManyLabels([*one.targets[:2], other.targets[2]], one.means, one.roots)
