"""Flows in a few directions of whitened coordinates: which they are, what density and ELBO they leave, and all of them at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from problems.heads import by_sign, gaussian_at_mode, head_target
from problems.seeds import seeded
from torch import Tensor

from bnncli import registry
from bnncli.flows import build_layers
from bnncli.inference.elbo import measure_gain
from bnncli.inference.refine import Objective, fit_flow
from bnncli.inference.row_space import RowLift, lift_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import directions as _subspace
from bnncli.structures.diag import Diag
from bnncli.structures.directions import Subspace
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace

LAYOUT = HeadLayout(2, 3)
make_target = partial(head_target, num_examples=24, labels=by_sign, prior=Prior(0.3, 0.1))


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def far_layers(kind: str, layout: HeadLayout, length: int = 2) -> tuple[torch.nn.Module, ...]:
    layers = build_layers(kind, layout, seeded(), length=length)
    for layer in layers:
        for parameter in layer.requires_grad_(False).parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=seeded(1), dtype=torch.float64)
    return layers


def inside_flow(kind: str, base: Gaussian, count: int = 3) -> Flow:
    subspace = Subspace.widest(base.covariance, count, seeded())
    return Flow(base, far_layers(kind, subspace.layout), kind, "whitened", subspace)


@pytest.mark.parametrize("structure", registry.names("curvature"))
@pytest.mark.parametrize("is_iterated", [False, True])
@pytest.mark.parametrize("prior", [Prior(0.3, 0.1), Prior(0.3)])
def test_directions_are_those_of_the_largest_eigenvalues(
    structure: str, prior: Prior, is_iterated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, count = HeadLayout(3, 19), 5
    base = gaussian_at_mode(make_target(layout, num_examples=40, prior=prior), structure)
    if is_iterated:
        monkeypatch.setattr(_subspace, "_MOST_DENSE", 0)
        monkeypatch.setattr(_subspace, "_MORE", 2)
    basis = Subspace.widest(base.covariance, count, seeded()).basis
    torch.testing.assert_close(basis.T @ basis, eye(count))
    root = base.covariance.unwhiten(eye(layout.num_params)).T
    values, vectors = torch.linalg.eigh(root @ root.T)
    moved = root @ basis
    torch.testing.assert_close(moved.T @ moved, values.flip(0)[:count].diag(), rtol=1e-3, atol=1e-4)
    within = vectors.flip(1)[:, values.flip(0) > 0.999 * values.flip(0)[count - 1]]
    torch.testing.assert_close(within @ (within.T @ moved), moved, rtol=0, atol=0.02)


def test_equal_variances_by_the_thousand_give_as_many_directions_as_are_asked_for() -> None:
    variances = torch.cat([torch.full((3000,), 2.0), torch.rand(1000, generator=seeded())]).double()

    class Hidden(Diag):
        widest = None

    found = Subspace.widest(Hidden(variances), 20, seeded()).basis
    torch.testing.assert_close(found.T @ found, eye(20))
    torch.testing.assert_close((found.square() * variances.unsqueeze(1)).sum(0), torch.full((20,), 2.0).double())


@pytest.mark.parametrize("kind", ["affine", "radial", "spline"])
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_density_has_the_determinant_of_autograds_jacobian(kind: str, structure: str) -> None:
    base = gaussian_at_mode(make_target(LAYOUT), structure)
    flow = inside_flow(kind, base)
    noise = base.noise(4, seeded(2))
    theta, log_density = flow.from_noise(noise)

    def move(one: Tensor) -> Tensor:
        basis, inside = flow.subspace.basis, one @ flow.subspace.basis
        image = inside.unsqueeze(0)
        for layer in flow.layers:
            image = layer(image)[0]
        return base.mean + base.covariance.unwhiten((one + basis @ (image[0] - inside)).unsqueeze(0))[0]

    for one, place, found in zip(noise, theta, log_density, strict=True):
        torch.testing.assert_close(move(one), place)
        jacobian = torch.autograd.functional.jacobian(move, one)
        normal = torch.distributions.Normal(0.0, 1.0).log_prob(one).sum()
        torch.testing.assert_close(normal - torch.linalg.slogdet(jacobian)[1], found)
    torch.testing.assert_close(flow.log_density(theta), log_density)
    objective = Objective.of(make_target(LAYOUT), base, "whitened", flow.subspace)
    expected = make_target(LAYOUT).log_joint(theta) - log_density + base.from_noise(noise)[1]
    torch.testing.assert_close(objective.estimate(flow.layers, noise).detach(), expected)


def test_the_rest_stays_as_it_is_in_the_base() -> None:
    base = gaussian_at_mode(make_target(LAYOUT))
    flow = inside_flow("radial", base)
    noise = base.noise(50, seeded(3))
    moved = base.covariance.whiten(flow.from_noise(noise)[0] - base.mean)
    outside = eye(8) - flow.subspace.basis @ flow.subspace.basis.T
    torch.testing.assert_close(moved @ outside, noise @ outside)
    assert (moved - noise).norm() > 1


def test_all_dimensions_are_the_whole() -> None:
    layout = HeadLayout(1, 4, has_bias=False)
    target = make_target(layout)
    values = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    base = replace(gaussian_at_mode(target, "diag"), covariance=Diag(values))
    subspace = Subspace.widest(base.covariance, 4, seeded())
    torch.testing.assert_close(subspace.basis, eye(4))
    plan = {"flow": "affine", "epochs": 20, "batch_size": 12, "num_draws": 4, "learning_rate": 0.03}
    whole, inside = (
        fit_flow(target, base, generator=seeded(), subspace=space, **plan).posterior for space in (None, subspace)
    )
    theta = base.sample(20, seeded(1)).double()
    torch.testing.assert_close(inside.log_density(theta), whole.log_density(theta))
    gain = measure_gain(target, whole, inside, generator=seeded(2), num_samples=50)
    assert gain.value == pytest.approx(0, abs=1e-9)
    assert measure_gain(target, base, inside, generator=seeded(2), num_samples=200).value > 0.1


def test_all_dimensions_of_any_base_are_the_whole_turned() -> None:
    base = gaussian_at_mode(make_target(LAYOUT))
    subspace = Subspace.widest(base.covariance, 8, seeded())
    layers = far_layers("radial", LAYOUT)
    turned = far_layers("radial", subspace.layout)
    for layer in turned:
        layer.x0.data = layer.x0 @ subspace.basis
    theta = base.sample(20, seeded(1)).double()
    whole, inside = Flow(base, layers, "radial"), Flow(base, turned, "radial", "whitened", subspace)
    torch.testing.assert_close(inside.log_density(theta), whole.log_density(theta))


@pytest.mark.parametrize("in_rows", [False, True])
def test_a_flow_inside_gains_and_is_read_as_it_was_written(in_rows: bool) -> None:
    layout = HeadLayout(1, 6)
    features = torch.randn(24, 6, generator=seeded(), dtype=torch.float64)
    features[:, 2 if in_rows else 6 :] = 0
    target = LastLayerTarget(features, (features[:, 0] > 0).long(), layout, Prior(0.03))
    rows = RowSpace.of(features, layout)
    inner = rows.target(target) if in_rows else target
    base = gaussian_at_mode(inner)
    subspace = Subspace.widest(base.covariance, 2, seeded())
    plan = {"flow": "affine", "epochs": 60, "batch_size": 24, "num_draws": 8, "learning_rate": 0.03}
    flow = fit_flow(inner, base, generator=seeded(), subspace=subspace, **plan).posterior
    if in_rows:
        base = lift_gaussian(base, RowLift(rows, target.prior))
        flow = replace(flow, base=base)
    assert measure_gain(target, base, flow, generator=seeded(1), num_samples=400).verdict == "helped"
    tensors, meta = flow.to_tensors()
    assert (meta["subspace"], tensors["subspace.basis"].shape[1]) == (2, 2)
    again = Flow.from_tensors(tensors, meta).to("cpu")
    theta = base.sample(5, seeded(1)).double()
    torch.testing.assert_close(again.log_density(theta), flow.log_density(theta))
    noise = base.noise(5, seeded(1))
    torch.testing.assert_close(flow.log_density(flow.from_noise(noise)[0]), flow.from_noise(noise)[1])


def test_a_subspace_of_another_theta_or_space_is_refused() -> None:
    base = gaussian_at_mode(make_target(LAYOUT))
    subspace = Subspace(eye(5)[:, :2])
    with pytest.raises(ValueError, match=r"basis: expected shape \(8, K\)"):
        Flow(base, (), "radial", "whitened", subspace)
    with pytest.raises(ValueError, match="a subspace needs whitened coordinates"):
        Flow(base, (), "radial", "weight", Subspace(eye(8)[:, :2]))
