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


def test_the_published_real_nvp_fails_the_same_check() -> None:
    """Skaaret-Lund (2022), equations 3.6 and 3.7: the shift also moves the half that scale and shift depend on."""
    weights = torch.randn(3, 6, 6, generator=seeded(), dtype=torch.float64)
    mask = torch.tensor([1.0, 0, 1, 0, 1, 0], dtype=torch.float64)

    def layer(z: Tensor, shifted: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh((mask * z) @ weights[0])
        shift, scale = hidden @ weights[1], torch.sigmoid(hidden @ weights[2])
        log_det = ((1 - mask) * scale.log()).sum(dim=1)
        return mask * z + (1 - mask) * scale * z + shifted * (1 - scale) * shift, log_det

    points = torch.randn(6, 6, generator=seeded(1), dtype=torch.float64)
    check_log_det(lambda z: layer(z, 1 - mask), points)
    with pytest.raises(AssertionError, match="not close"):
        check_log_det(lambda z: layer(z, torch.ones(6, dtype=torch.float64)), points)


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
def test_a_seed_gives_the_same_layer(kind: str, settings: dict[str, Any]) -> None:
    first, second = (start_layer(kind, 30, 3, **settings).to_tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


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


@pytest.mark.parametrize("index", [0, 1])
def test_iaf_coordinates_depend_on_the_ones_before_them_alone(index: int) -> None:
    layer, point = make_layer("iaf", 30, index, hidden=64), draw_points(30)[0]
    jacobian = torch.autograd.functional.jacobian(lambda z: layer(z[None])[0][0], point)
    ordered = jacobian if index == 0 else jacobian.flip(0, 1)
    assert ordered.triu(1).abs().max() == 0
    assert (ordered[1:, 0] != 0).all()


@pytest.mark.parametrize("kind", ["realnvp", "spline"])
@pytest.mark.parametrize("index", [0, 1])
def test_coupling_layers_keep_one_half_and_move_the_other(kind: str, index: int) -> None:
    layer, points = make_layer(kind, 5, index, hidden=7), draw_points(5)
    has_moved = (layer(points)[0] != points).any(dim=0)
    assert has_moved.tolist() == [index == 1] * 2 + [index == 0] * 3


def test_spline_is_the_identity_outside_its_interval_and_monotone_inside() -> None:
    layer = make_layer("spline", 2, spread=5.0, hidden=7)
    moved = torch.linspace(-7, 7, 1401, dtype=torch.float64)
    with torch.no_grad():
        image = layer(torch.stack([torch.full_like(moved, 0.3), moved], dim=1))[0][:, 1]
    assert torch.equal(image[moved.abs() >= 5], moved[moved.abs() >= 5])
    assert (image.diff() > 0).all()
    assert (image - moved).abs().max() > 0.5


@pytest.mark.parametrize("raw", [-50.0, 50.0])
def test_sylvester_bends_stay_monotone_for_any_parameters(raw: float) -> None:
    layer = start_layer("sylvester", 5).float()
    with torch.no_grad():
        layer.outer.fill_diagonal_(raw)
        direction = orthonormal_columns(layer.basis)[:, 0]
        image, log_det = layer(torch.linspace(-3, 3, 51).unsqueeze(1) * direction)
    assert torch.isfinite(log_det).all()  # 0 is among the points, where tanh is steepest
    assert ((image @ direction).diff() >= 0).all()


@pytest.mark.parametrize("angle", [0.0, 1e-9, 0.5, 3.0])
def test_householder_turns_by_the_angle_it_says(angle: float) -> None:
    layer = start_layer("householder", 5)
    with torch.no_grad():
        for vector, turn in ((layer.first, 0.0), (layer.second, angle / 2)):
            vector.copy_(3 * torch.tensor([math.cos(turn), math.sin(turn), 0, 0, 0], dtype=torch.float64))
        image = layer(torch.eye(5, dtype=torch.float64)[:1])[0][0]
    assert layer.summary()["angle"] == pytest.approx(angle)
    assert math.atan2(float(image[1]), float(image[0])) == pytest.approx(angle)


def test_householder_is_for_weight_space_alone_and_says_why() -> None:
    assert [choose_space(kind, "auto") for kind in ("householder", "radial")] == ["weight", "whitened"]
    with pytest.raises(UsageError, match="householder layers support weight space; got 'whitened'") as caught:
        choose_space("householder", "whitened")
    assert caught.value.hint is not None
    assert "does not change the standard normal of whitened space" in caught.value.hint


@pytest.mark.parametrize("raw_alpha", [-20.0, -1.0, 0.0, 20.0])
@pytest.mark.parametrize("raw_beta", [-20.0, -1.0, 0.0, 20.0])
def test_radial_maps_radii_monotonically_for_any_parameters(raw_alpha: float, raw_beta: float) -> None:
    layer = make_layer("radial", 1)
    with torch.no_grad():
        layer.raw_alpha.fill_(raw_alpha)
        layer.raw_beta.fill_(raw_beta)
        radii = layer.x0 + torch.linspace(0, 9, 50, dtype=torch.float64).unsqueeze(1)
        image = layer(radii)[0]
    assert layer.summary()["beta"] > -layer.summary()["alpha"]
    assert (image.diff(dim=0) > 0).all()


def test_radial_with_beta_zero_is_the_identity() -> None:
    layer, points = make_layer("radial", 5), draw_points(5)
    with torch.no_grad():
        layer.raw_beta.copy_(layer.raw_alpha)
        image, log_det = layer(points)
    torch.testing.assert_close(image, points)
    torch.testing.assert_close(log_det, torch.zeros(6, dtype=torch.float64))


def test_radial_keeps_its_centre_and_comes_back_to_it() -> None:
    layer = make_layer("radial", 5)
    with torch.no_grad():
        center = layer.x0.detach()[None]
        assert torch.equal(layer(center)[0], center)
        assert torch.equal(layer.inverse(center), center)


@pytest.mark.parametrize("seed", range(5))
def test_planar_stays_invertible_for_any_parameters(seed: int) -> None:
    layer = make_layer("planar", 30, seed, spread=5.0)
    points = draw_points(30, 50)
    with torch.no_grad():
        slope = layer.summary()["slope"]
        moved = layer(points)[0] @ layer.w
    assert slope >= -1  # softplus rounds to 0 in the end
    assert torch.equal(moved.argsort(), (points @ layer.w).argsort())


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
