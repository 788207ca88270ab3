"""Probabilities that an evaluation keeps: those of that theta alone, as long as they are asked for, and the Hessian's numbers the same."""

from __future__ import annotations

import pytest
import torch
from problems.heads import head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli.curvature import ggn
from bnncli.parameters.layouts import HeadLayout
from bnncli.targets import last_layer
from bnncli.targets.last_layer import LastLayerTarget

LAYOUT = HeadLayout(4, 7)


@pytest.fixture
def target() -> LastLayerTarget:
    return head_target(LAYOUT, 50, prior=0.5, dtype=torch.float32)


def thetas(count: int) -> Tensor:
    return torch.randn(count, LAYOUT.num_params, generator=seeded(), dtype=torch.float64)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that probabilities were made again."""
    count: list[int] = []
    probabilities = LastLayerTarget.probabilities

    def counted(self: LastLayerTarget, theta: Tensor, features: Tensor | None = None) -> Tensor:
        count.append(1)
        return probabilities(self, theta, features)

    monkeypatch.setattr(LastLayerTarget, "probabilities", counted)
    return count


def test_a_hessian_where_the_target_was_evaluated_makes_none_again(target: LastLayerTarget, made: list[int]) -> None:
    theta, vector = thetas(2)
    plain = target.hessian_vector_product(theta, vector.unsqueeze(0))
    factors = ggn(target, theta, "kron")
    del made[:]
    with target.keeping():
        target.log_joint_and_grad(theta.unsqueeze(0))
        torch.testing.assert_close(target.hessian_vector_product(theta, vector.unsqueeze(0)), plain)
        for name, value in ggn(target, theta, "kron").items():
            torch.testing.assert_close(value, factors[name])
        for value in ggn(target, theta, "kron", before=factors).values():
            assert torch.isfinite(value).all()
        assert made == []


def test_what_is_kept_is_of_one_theta_and_of_the_time_within(target: LastLayerTarget, made: list[int]) -> None:
    theta, other = thetas(2)
    with target.keeping():
        target.log_joint_and_grad(theta.unsqueeze(0))
        target.row_probabilities(other)(slice(0, 5), target.features[:5])
        assert len(made) == 1
        found = target.row_probabilities(theta)(slice(0, 5), target.features[:5])
        assert len(made) == 1
        torch.testing.assert_close(found, target.probabilities(theta, target.features[:5]))
        target.log_joint_and_grad(other.unsqueeze(0))  # takes the place
        assert target._kept.find(theta) is None
        target.log_joint_and_grad(torch.stack([theta, other]))  # of which of the two?
        assert target._kept.find(theta) is None
        moving = theta.unsqueeze(0).clone()
        target.log_joint_and_grad(moving, dtype=torch.float64)
        found = target._kept.find(theta)
        assert found is not None
        torch.testing.assert_close(found, target.probabilities(theta))
        assert found.dtype == target.dtype
        moving += 1  # in place: theta is where it was
        assert target._kept.find(theta) is found
        assert target._kept.find(moving[0]) is None
    assert target._kept.find(theta) is None
    target.log_joint_and_grad(theta.unsqueeze(0))
    assert target._kept.find(theta) is None


def test_large_ones_are_made_again(target: LastLayerTarget, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_layer, "_KEPT_BYTES", 4 * 4 * 50 - 1)
    theta = thetas(1)[0]
    with target.keeping():
        target.log_joint_and_grad(theta.unsqueeze(0))
        target.row_probabilities(theta)(slice(0, 5), target.features[:5])
    assert len(made) == 1
