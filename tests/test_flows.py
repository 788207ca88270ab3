"""Flow layers against autograd's Jacobian, Pyro's transforms and their own inverse."""

import math
import re
from collections.abc import Callable
from typing import Any

import pyro.distributions.transforms as pyro_transforms
import pytest
import torch
from pyro.distributions.transforms.spline import _monotonic_rational_spline as pyro_spline_function
from torch import Tensor

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.flows import SPACES, build_layers, choose_space, settings_of
from bnncli.flows._orthonormal import orthonormal_columns
from bnncli.flows.planar import Planar
from bnncli.flows.radial import Radial
from bnncli.layout import HeadLayout

LAYOUTS = {
    1: HeadLayout(1, 1, has_bias=False),
    2: HeadLayout(1, 1),
    5: HeadLayout(1, 4),
    30: HeadLayout(3, 9),
    850: HeadLayout(10, 84),
}
# Every flow with the settings that its tests run with; a flow that is not here fails test_every_flow_has_an_example.
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("affine", {"scale": "kron"}),
    ("affine", {"scale": "low-rank"}),
    ("householder", {}),
    ("iaf", {"hidden": 7}),
    ("planar", {}),
    ("radial", {}),
    ("realnvp", {"hidden": 7}),
    ("spline", {"hidden": 7}),
    ("sylvester", {}),
]
every_flow = pytest.mark.parametrize(("kind", "settings"), EXAMPLES, ids=lambda value: str(value))
exact_start = pytest.mark.parametrize(
    ("kind", "settings"), [case for case in EXAMPLES if case[0] not in ("planar", "radial")], ids=str
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def start_layer(kind: str, dim: int, seed: int = 0, **settings: Any) -> Any:
    """One layer of two, as a fit starts with it: the first for an even seed, the second for an odd one."""
    return build_layers(kind, LAYOUTS[dim], seeded(seed), length=2, **settings)[seed % 2]


def make_layer(kind: str, dim: int, seed: int = 0, *, spread: float = 1.0, **settings: Any) -> Any:
    """A layer far from the identity: each row of each parameter moved by a vector of length about `spread`.

    One number alone is a row; vectors move by `spread` a coordinate.
    """
    layer, generator = start_layer(kind, dim, seed, **settings), seeded(seed + 100)
    with torch.no_grad():
        for parameter in layer.parameters():
            size = parameter.shape[-1] if parameter.ndim > 1 else 1
            step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += spread * step / max(size, 1) ** 0.5
    return layer


def draw_points(dim: int, num_points: int = 6) -> Tensor:
    return 2 * torch.randn(num_points, dim, generator=seeded(9), dtype=torch.float64)


def test_every_flow_has_an_example_and_a_reference() -> None:
    assert {kind for kind, _ in EXAMPLES} == set(registry.names("flows")) == set(REFERENCES)


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
        axes = [torch.linspace(float(c) - reach, float(c) + reach, 601, dtype=torch.float64) for c in center]
        z = layer.inverse(torch.cartesian_prod(*axes))
        log_density = -0.5 * z.square().sum(dim=1) - math.log(2 * math.pi) - layer(z)[1]
    assert float(log_density.exp().sum()) * (2 * reach / 600) ** 2 == pytest.approx(1, abs=2e-3)


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


def pyro_radial(layer: Any) -> Any:
    return filled(pyro_transforms.Radial(5), x0=layer.x0, alpha_prime=layer.raw_alpha, beta_prime=layer.raw_beta)


def pyro_planar(layer: Any) -> Any:
    return filled(pyro_transforms.Planar(5), w=layer.w, u=layer.raw_u, bias=layer.bias)


def torch_affine(layer: Any) -> Any:
    """The same map as one dense lower triangular matrix after another, by torch's own transform."""
    if layer.scale == "low-rank":
        frame = orthonormal_columns(layer.basis)
        core = layer.core.tril(-1) + layer.core.diagonal().exp().diag()
        rest = torch.eye(5, dtype=torch.float64) - frame @ frame.T
        linear = rest + frame @ core @ frame.T
    else:  # HeadLayout(1, 4): vec(B Z A^T) of one row with its bias last
        feature = layer.feature_factor.tril(-1) + layer.feature_factor.diagonal().exp().diag()
        linear = layer.output_factor.exp() * feature
    dense = layer.log_scale.exp().diag() @ linear
    return Dense(layer.shift, dense)


class Dense:
    """y = shift + M z, with the log determinant by slogdet."""

    def __init__(self, shift: Tensor, matrix: Tensor) -> None:
        self.shift, self.matrix = shift, matrix

    def __call__(self, z: Tensor) -> Tensor:
        return self.shift + z @ self.matrix.T

    def log_abs_det_jacobian(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.slogdet(self.matrix)[1].expand(z.shape[0])


def filled(transform: Any, **values: Tensor) -> Any:
    for name, value in values.items():
        setattr(transform, name, torch.nn.Parameter(value.detach().clone()))
    return transform


def pyro_householder(layer: Any) -> Any:
    """Pyro's reflections about 0, moved to the centre."""
    reflections = pyro_transforms.Householder(5, count_transforms=2)
    reflections.u_unnormed = torch.nn.Parameter(torch.stack([layer.first, layer.second]))
    move = torch.distributions.transforms.AffineTransform
    parts = [move(-layer.center, 1.0, event_dim=1), reflections, move(layer.center, 1.0, event_dim=1)]
    return torch.distributions.transforms.ComposeTransform(parts)


class PyroSylvester:
    """Pyro's Sylvester in the coordinates Q^T z, last first.

    It multiplies rows by its matrices, so that its log determinant is right only where its own Q is the identity.
    """

    def __init__(self, layer: Any) -> None:
        outer, inner, _ = layer._constrained()
        self.frame = orthonormal_columns(layer.basis)
        self.pyro = filled(pyro_transforms.Sylvester(5, 2), b=layer.bias.flip(0)).double()
        self.pyro.Q = lambda _: torch.eye(5, dtype=torch.float64)
        self.pyro.R, self.pyro.S = (lambda: outer.flip(0, 1).T), (lambda: inner.flip(0, 1).T)

    def __call__(self, z: Tensor) -> Tensor:
        return self.pyro((z @ self.frame).flip(1)).flip(1) @ self.frame.T

    def log_abs_det_jacobian(self, z: Tensor, y: Tensor) -> Tensor:
        return self.pyro._cached_logDetJ


class Halved:
    """A map of the moved half given the kept one, on whole points: kept first, as Pyro has them."""

    def __init__(
        self, layer: Any, num_parts: int, moved_map: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> None:
        kept = [0, 1] if layer.index % 2 == 0 else [2, 3, 4]
        self.order = kept + [i for i in range(5) if i not in kept]
        self.num_kept, self.num_parts = len(kept), num_parts
        self.network, self.moved_map = layer.network, moved_map

    def __call__(self, z: Tensor) -> Tensor:
        kept, moved = z[:, self.order].split([self.num_kept, 5 - self.num_kept], dim=1)
        net = self.network
        raw = torch.tanh(kept @ net.hidden_weight.T + net.hidden_bias) @ net.weight.T + net.bias
        image, log_slope = self.moved_map(moved, raw)
        self.log_det = log_slope.sum(dim=1)
        return torch.cat([kept, image], dim=1)[:, torch.tensor(self.order).argsort()]

    def log_abs_det_jacobian(self, z: Tensor, y: Tensor) -> Tensor:
        return self.log_det


def pyro_realnvp(layer: Any) -> Any:
    def move(moved: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        shift, log_scale = raw.chunk(2, dim=1)
        log_scale = 2 * torch.tanh(log_scale / 2)
        coupling = pyro_transforms.AffineCoupling(0, lambda _: (shift, log_scale))
        return coupling(moved), log_scale

    return Halved(layer, 2, move)


def pyro_spline(layer: Any) -> Any:
    def move(moved: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        parts = raw.view(len(moved), moved.shape[1], 23)
        slopes = 0.001 + torch.nn.functional.softplus(parts[..., 16:] + math.log(math.e**0.999 - 1))
        widths, heights = parts[..., :8].softmax(-1), parts[..., 8:16].softmax(-1)
        return pyro_spline_function(moved, widths, heights, slopes, bound=5.0, min_derivative=0.0)

    return Halved(layer, 23, move)


class PyroIaf(torch.nn.Module):
    """The network of an iaf layer, its masks one weight at a time, as Pyro's transform wants it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.permutation = range(5) if layer.index % 2 == 0 else range(4, -1, -1)
        rank = {coordinate: place for place, coordinate in enumerate(self.permutation)}
        net, self.reach = layer.network, [1, 2, 2, 2, 3, 4, 4]  # 1 to 4 in 7 even steps, halves to even
        self.hidden_weight, self.weight = net.hidden_weight.detach().clone(), net.weight.detach().clone()
        self.hidden_bias, self.bias = net.hidden_bias.detach(), net.bias.detach()
        for k, reach in enumerate(self.reach):
            for i in range(5):
                if rank[i] >= reach:
                    self.hidden_weight[k, i] = 0
                if rank[i] < reach:
                    self.weight[i, k] = self.weight[5 + i, k] = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raw = torch.tanh(x.double() @ self.hidden_weight.T + self.hidden_bias) @ self.weight.T + self.bias
        return raw[:, :5], 2 * torch.tanh(raw[:, 5:] / 2)


def pyro_iaf(layer: Any) -> Any:
    return pyro_transforms.AffineAutoregressive(PyroIaf(layer))


REFERENCES: dict[str, Callable[[Any], Any]] = {
    "affine": torch_affine,
    "householder": pyro_householder,
    "iaf": pyro_iaf,
    "planar": pyro_planar,
    "radial": pyro_radial,
    "realnvp": pyro_realnvp,
    "spline": pyro_spline,
    "sylvester": PyroSylvester,
}


@every_flow
@pytest.mark.parametrize("seed", [0, 1])
def test_layer_is_the_reference_transform(kind: str, settings: dict[str, Any], seed: int) -> None:
    layer, points = make_layer(kind, 5, seed, **settings), draw_points(5)
    reference = REFERENCES[kind](layer)
    image, log_det = layer(points)
    expected = reference(points)
    torch.testing.assert_close(image, expected)
    torch.testing.assert_close(log_det, reference.log_abs_det_jacobian(points, expected), rtol=1e-6, atol=1e-6)


def test_kron_affine_is_a_dense_kronecker_product() -> None:
    layer, layout = make_layer("affine", 30, scale="kron"), LAYOUTS[30]
    lower = [raw.tril(-1) + raw.diagonal().exp().diag() for raw in (layer.output_factor, layer.feature_factor)]
    points = draw_points(30)
    vec = layout.augment(points).flatten(1) @ torch.kron(*lower).T
    expected = layer.shift + layer.log_scale.exp() * layout.flatten(vec.unflatten(1, (3, 10)))
    torch.testing.assert_close(layer(points)[0], expected)


def test_orthonormal_columns_are_a_product_of_reflections() -> None:
    vectors = torch.randn(7, 3, generator=seeded(), dtype=torch.float64)
    product = torch.eye(7, dtype=torch.float64)
    for v in vectors.T:
        product = product @ (torch.eye(7, dtype=torch.float64) - 2 * v.outer(v) / v.dot(v))
    frame = orthonormal_columns(vectors)
    torch.testing.assert_close(frame, product[:, :3])
    torch.testing.assert_close(frame.T @ frame, torch.eye(3, dtype=torch.float64))


def test_first_frames_are_spread_over_all_coordinates() -> None:
    frame = orthonormal_columns(start_layer("affine", 850, scale="low-rank").basis)
    assert frame.abs().max() < 6 / 850**0.5
    torch.testing.assert_close(frame.T @ frame, torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize("correlation", [-0.9, 0.9])
@pytest.mark.parametrize("scale", ["kron", "low-rank"])
def test_affine_learns_correlations_of_either_sign(scale: str, correlation: float) -> None:
    covariance = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
    reference = torch.distributions.MultivariateNormal(torch.tensor([3.0, -2.0], dtype=torch.float64), covariance)
    layer = build_layers("affine", LAYOUTS[2], seeded(), length=1, scale=scale)[0]
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    cubature = 2**0.5 * torch.cat([torch.eye(2), -torch.eye(2)]).double()  # exact for quadratics of a standard normal
    for _ in range(300):
        image, log_det = layer(cubature)
        loss = -(reference.log_prob(image) + log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        jacobian = layer(torch.eye(2, dtype=torch.float64))[0] - layer(torch.zeros(2, 2, dtype=torch.float64))[0]
    torch.testing.assert_close(jacobian.T @ jacobian, covariance, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("radial", {"rank": 3}, "--rank: radial layers have none; flows that take it: affine"),
        ("affine", {"rank": 3}, "--rank: --scale kron has none"),
        ("sylvester", {"rank": 31}, "--rank: expected 1 to 30, the number of parameters; got 31"),
        ("affine", {"scale": "low-rank", "rank": 31}, "--rank: expected 1 to 30, the number of parameters; got 31"),
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


@pytest.mark.parametrize("index", [0, 1])
def test_iaf_inverse_is_pyros(index: int) -> None:
    layer, points = make_layer("iaf", 5, index, hidden=7), draw_points(5)
    torch.testing.assert_close(layer.inverse(points), pyro_iaf(layer)._inverse(points))


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
    with pytest.raises(UsageError, match="householder layers act in weight space; got 'whitened'") as caught:
        choose_space("householder", "whitened")
    assert caught.value.hint is not None
    assert "leaves the standard normal of whitened space as it is" in caught.value.hint


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
