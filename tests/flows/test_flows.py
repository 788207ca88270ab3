"""Flow layers against autograd's Jacobian, their own inverse and the laws of each."""

import math
import re
from typing import Any

import pytest
import torch
from problems.flow_layers import LAYOUTS, draw_points, every_flow, exact_start, make_layer, start_layer
from problems.seeds import seeded
from torch import Tensor

from bnncli.errors import UsageError
from bnncli.flows import SPACES, build_layers, choose_space, settings_of
from bnncli.flows._layers import orthonormal_columns
from bnncli.flows.planar import Planar
from bnncli.flows.radial import Radial

pytestmark = pytest.mark.core


def check_log_det(layer: Any, points: Tensor) -> None:
    with torch.no_grad():
        log_det = layer(points)[1]
    for point, got in zip(points, log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda z: layer(z[None])[0][0], point, vectorize=True)
        torch.testing.assert_close(got, torch.linalg.slogdet(jacobian)[1], rtol=1e-10, atol=1e-10)


@every_flow
@pytest.mark.parametrize("dim", [2, 5, 30])
@pytest.mark.parametrize("seed", range(3))
def test_log_det_is_that_of_autograds_jacobian(kind: str, settings: dict[str, Any], dim: int, seed: int) -> None:
    check_log_det(make_layer(kind, dim, seed, **settings), draw_points(dim))


@every_flow
@pytest.mark.parametrize("dim", [1, 2, 30])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_inverse_undoes_forward_and_forward_the_inverse(
    kind: str, settings: dict[str, Any], dim: int, spread: float
) -> None:
    points = draw_points(dim)
    for seed in range(5):
        layer = make_layer(kind, dim, seed, spread=spread, **settings)
        with torch.no_grad():
            torch.testing.assert_close(layer.inverse(layer(points)[0]), points, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(layer(layer.inverse(points))[0], points, rtol=1e-9, atol=1e-9)


@every_flow
@pytest.mark.parametrize("dim", [2, 30])
def test_layers_stay_invertible_for_extreme_parameters(kind: str, settings: dict[str, Any], dim: int) -> None:
    for seed in range(5):
        layer = make_layer(kind, dim, seed, spread=5.0, **settings)
        with torch.no_grad():
            image, log_det = layer(draw_points(dim))
            assert torch.isfinite(log_det).all()
            torch.testing.assert_close(layer(layer.inverse(image))[0], image, rtol=1e-7, atol=1e-7)


@every_flow
def test_density_of_a_pushed_standard_normal_integrates_to_one(kind: str, settings: dict[str, Any]) -> None:
    layer = make_layer(kind, 2, spread=0.5, **settings)
    with torch.no_grad():
        image = layer(torch.randn(4000, 2, generator=seeded(), dtype=torch.float64))[0]
        center, reach = image.mean(dim=0), float(12 * image.std(dim=0).max())
        axes = [torch.linspace(float(c) - reach, float(c) + reach, 301, dtype=torch.float64) for c in center]
        z = layer.inverse(torch.cartesian_prod(*axes))
        log_density = -0.5 * z.square().sum(dim=1) - math.log(2 * math.pi) - layer(z)[1]
    assert float(log_density.exp().sum()) * (2 * reach / 300) ** 2 == pytest.approx(1, abs=2e-3)


@exact_start
@pytest.mark.parametrize("dim", [2, 30, 850])
def test_layers_start_as_the_identity(kind: str, settings: dict[str, Any], dim: int) -> None:
    points = draw_points(dim)
    image, log_det = start_layer(kind, dim, **settings)(points)
    torch.testing.assert_close(image, points, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(log_det, torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-10)


@every_flow
def test_layers_start_with_a_gradient(kind: str, settings: dict[str, Any]) -> None:
    layer, points = start_layer(kind, 30, **settings), draw_points(30)
    image, log_det = layer(points)
    # The loss must not be blind to a rotation about 0, which is all that some layers do.
    loss = (image * torch.linspace(0.5, 2, 30, dtype=torch.float64)).square().sum() - log_det.sum()
    gradients = torch.autograd.grad(loss, list(layer.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert max(float(gradient.norm()) for gradient in gradients) > 0.1


@every_flow
def test_draws_together_are_draws_one_by_one(kind: str, settings: dict[str, Any]) -> None:
    layer, points = make_layer(kind, 30, **settings), draw_points(30)
    singles = [layer(point[None]) for point in points]
    image, log_det = layer(points)
    torch.testing.assert_close(image, torch.cat([single[0] for single in singles]))
    torch.testing.assert_close(log_det, torch.cat([single[1] for single in singles]))
    back = torch.cat([layer.inverse(single[0]) for single in singles])
    torch.testing.assert_close(layer.inverse(image), back, rtol=1e-9, atol=1e-9)


@every_flow
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_float32_stays_finite_far_out(kind: str, settings: dict[str, Any], spread: float) -> None:
    layer = make_layer(kind, 30, spread=spread, **settings).float()
    points = torch.linspace(-50, 50, 8).unsqueeze(1) * torch.ones(30)
    image, log_det = layer(points)
    gradients = torch.autograd.grad(image.sum() + log_det.sum(), list(layer.parameters()), allow_unused=True)
    for part in (image, log_det, *(gradient for gradient in gradients if gradient is not None)):
        assert torch.isfinite(part).all()


@every_flow
def test_layers_are_one_graph_for_the_compiler(kind: str, settings: dict[str, Any]) -> None:
    layer, points = make_layer(kind, 30, **settings), draw_points(30)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)  # a break, as a host sync makes, raises
    torch.testing.assert_close(compiled(points), layer(points))


@every_flow
@pytest.mark.parametrize("seed", [0, 1])
def test_parameters_and_settings_come_back_from_tensors(kind: str, settings: dict[str, Any], seed: int) -> None:
    layer, points = make_layer(kind, 5, seed, **settings), draw_points(5)
    again = type(layer).from_tensors(layer.to_tensors(), LAYOUTS[5])
    assert torch.equal(again(points)[0], layer(points)[0])
    assert settings_of(again) == settings_of(layer)
    assert settings.items() <= settings_of(layer).items()


@every_flow
def test_summary_is_finite_numbers_and_maps_names_the_parameters(kind: str, settings: dict[str, Any]) -> None:
    layer = make_layer(kind, 30, **settings)
    assert all(type(value) is float and math.isfinite(value) for value in layer.summary().values())
    assert layer.summary()
    raw = [name for name in layer.to_tensors() if name.startswith("raw_")]
    assert all(name in layer.maps for name in raw)
    assert set(layer.spaces) <= set(SPACES)


@pytest.mark.parametrize("kind", ["planar", "radial"])
def test_radial_and_planar_start_near_the_identity_as_in_pyro(kind: str) -> None:
    tensors = start_layer(kind, 850, 3).to_tensors()
    assert all(value.abs().max() <= 850**-0.5 for value in tensors.values())
    assert tensors[next(iter(tensors))].std() == pytest.approx(850**-0.5 / 3**0.5, rel=0.1)


def test_first_frames_are_spread_over_all_coordinates() -> None:
    frame = orthonormal_columns(start_layer("affine", 850, scale="low-rank").basis)
    assert frame.abs().max() < 6 / 850**0.5
    torch.testing.assert_close(frame.T @ frame, torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize("scale", ["kron", "block"])
def test_affine_scales_each_output_as_its_formula_says(scale: str) -> None:
    layer, points = make_layer("affine", 30, scale=scale), draw_points(30)
    with torch.no_grad():
        unit = [
            torch.eye(len(raw)).double() + raw.tril(-1) / len(raw) ** 0.5
            for raw in layer.feature_factor.view(-1, 10, 10)
        ]
        factor = torch.eye(3).double() + layer.output_factor.tril(-1) / 3**0.5
        for point, got in zip(points, layer(points)[0], strict=True):
            matrix = torch.cat([point[:27].view(3, 9), point[27:].view(3, 1)], dim=1)  # the bias is the last column
            rows = torch.stack([unit[k % len(unit)] @ matrix[k] for k in range(3)])
            moved = factor @ rows
            flat = torch.cat([moved[:, :9].flatten(), moved[:, 9]])
            torch.testing.assert_close(got, layer.shift + layer.log_scale.exp() * flat)


@pytest.mark.parametrize("scale", ["kron", "block", "low-rank"])
def test_density_of_an_affine_layer_is_that_of_its_gaussian(scale: str) -> None:
    layer, points = make_layer("affine", 30, 1, scale=scale), draw_points(30)
    with torch.no_grad():
        jacobian = (layer(torch.eye(30).double())[0] - layer(torch.zeros(1, 30).double())[0]).T
        reference = torch.distributions.MultivariateNormal(layer.shift, jacobian @ jacobian.T)
        z = layer.inverse(points)
        log_density = -0.5 * z.square().sum(dim=1) - 15 * math.log(2 * math.pi) - layer(z)[1]
        torch.testing.assert_close(log_density, reference.log_prob(points), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("correlation", [-0.9, 0.9])
@pytest.mark.parametrize("scale", ["kron", "low-rank"])
def test_affine_learns_correlations_of_either_sign(scale: str, correlation: float) -> None:
    covariance = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
    reference = torch.distributions.MultivariateNormal(torch.tensor([3.0, -2.0], dtype=torch.float64), covariance)
    layer = build_layers("affine", LAYOUTS[2], seeded(), length=1, scale=scale)[0]
    cubature = 2**0.5 * torch.cat([torch.eye(2), -torch.eye(2)]).double()  # exact for quadratics of a standard normal
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        image, log_det = layer(cubature)
        value = -(reference.log_prob(image) + log_det).mean()
        optimizer.zero_grad()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():
        jacobian = layer(torch.eye(2, dtype=torch.float64))[0] - layer(torch.zeros(2, 2, dtype=torch.float64))[0]
    torch.testing.assert_close(jacobian.T @ jacobian, covariance, rtol=0, atol=1e-3)


def test_points_near_a_narrow_center_of_radial_come_back_with_all_digits() -> None:
    layer: Any = make_layer("radial", 5)
    with torch.no_grad():
        layer.x0.zero_()
        layer.raw_alpha.fill_(-20.0)
        layer.raw_beta.zero_()
        points = 1e-9 * draw_points(5)
        torch.testing.assert_close(layer.inverse(layer(points)[0]), points, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("radial", {"rank": 3}, "\0rank\0: not supported by radial layers; supported by: affine"),
        ("affine", {"rank": 3}, "\0rank\0: not supported with \0scale\0 kron"),
        ("sylvester", {"rank": 31}, "\0rank\0: expected 1 to 30, the number of parameters; got 31"),
        ("affine", {"scale": "low-rank", "rank": 31}, "\0rank\0: expected 1 to 30, the number of parameters; got 31"),
    ],
)
def test_settings_that_a_flow_does_not_take_are_refused(kind: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        start_layer(kind, 30, **settings)


@pytest.mark.parametrize("angle", [1e-7, 1.0, 3.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_householder_turns_by_the_angle_it_says(angle: float, sign: float) -> None:
    layer: Any = start_layer("householder", 5)
    with torch.no_grad():
        for vector, turn in ((layer.first, 0.0), (layer.second, angle / 2)):
            vector.copy_(3 * torch.tensor([math.cos(turn), math.sin(turn), 0, 0, 0], dtype=torch.float64))
        layer.second.mul_(sign)  # the same reflection
        image = layer(torch.eye(5, dtype=torch.float64)[:1])[0][0]
    assert layer.summary()["angle"] == pytest.approx(angle)
    assert math.atan2(float(image[1]), float(image[0])) == pytest.approx(angle)


def test_householder_is_for_weight_space_alone_and_says_why() -> None:
    assert [choose_space(kind, "auto") for kind in ("householder", "radial")] == ["weight", "whitened"]
    with pytest.raises(UsageError, match="householder layers support weight space; got 'whitened'") as caught:
        choose_space("householder", "whitened")
    assert caught.value.hint is not None
    assert "does not change the standard normal of whitened space" in caught.value.hint


def test_summaries_tell_the_constrained_parameters() -> None:
    radial, planar = make_layer("radial", 5), make_layer("planar", 5)
    assert isinstance(radial, Radial)
    assert isinstance(planar, Planar)
    alpha = float(torch.nn.functional.softplus(radial.raw_alpha.detach()))
    assert radial.summary()["alpha"] == pytest.approx(alpha)
    assert radial.summary()["x0_norm"] == pytest.approx(float(radial.x0.detach().norm()))
    assert planar.summary()["w_norm"] == pytest.approx(float(planar.w.detach().norm()))


@pytest.mark.parametrize("scale", ["kron", "block"])
@pytest.mark.parametrize("dim", [5, 30])
def test_affine_inverse_and_score_are_those_of_a_solve_for_each_output_and_draw(scale: str, dim: int) -> None:
    layer, points, layout = make_layer("affine", dim, scale=scale), draw_points(dim), LAYOUTS[dim]

    def unit(raw: Tensor) -> Tensor:
        return torch.eye(raw.shape[-1], dtype=raw.dtype) + raw.tril(-1) / raw.shape[-1] ** 0.5

    outputs = unit(layer.output_factor)
    factors = unit(layer.feature_factor).expand(layout.num_outputs, -1, -1)
    moved = layout.augment((points - layer.shift) / layer.log_scale.exp())
    solved = torch.stack([torch.linalg.solve(outputs, draw) for draw in moved])
    expected = torch.stack(
        [torch.linalg.solve(a, row.T).T for a, row in zip(factors, solved.unbind(1), strict=True)], 1
    )
    torch.testing.assert_close(layer.inverse(points), layout.flatten(expected))
    jacobian = torch.autograd.functional.jacobian(lambda z: layer(z[None])[0][0], points[0])
    pushed = layer.push_score(points)
    torch.testing.assert_close(pushed, torch.linalg.solve(jacobian.T, points.T).T)
