"""Flow layers against autograd's Jacobian, Pyro's transforms and their own inverse."""

import pyro.distributions.transforms as pyro_transforms
import pytest
import torch
from torch import Tensor

from bnncli import registry
from bnncli.flows.planar import Planar
from bnncli.flows.radial import Radial

every_flow = pytest.mark.parametrize("kind", registry.names("flows"))
PYRO_NAMES = {
    "radial": {"x0": "x0", "raw_alpha": "alpha_prime", "raw_beta": "beta_prime"},
    "planar": {"w": "w", "raw_u": "u", "bias": "bias"},
}


def make_layer(kind: str, dim: int, seed: int = 0, spread: float = 1.0) -> torch.nn.Module:
    """A layer far from the identity: parameters from N(0, spread^2)."""
    generator = torch.Generator().manual_seed(seed)
    layer = registry.load_class("flows", kind)(dim, generator)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def draw_points(dim: int, num_points: int = 6) -> Tensor:
    return 2 * torch.randn(num_points, dim, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@every_flow
@pytest.mark.parametrize("dim", [2, 5, 30])
@pytest.mark.parametrize("seed", range(4))
def test_log_det_is_that_of_autograds_jacobian(kind: str, dim: int, seed: int) -> None:
    layer, points = make_layer(kind, dim, seed), draw_points(dim)
    with torch.no_grad():
        log_det = layer(points)[1]
    for point, got in zip(points, log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda z: layer(z[None])[0][0], point)
        torch.testing.assert_close(got, torch.linalg.slogdet(jacobian)[1], rtol=1e-10, atol=1e-11)


@every_flow
def test_layer_is_pyros_transform(kind: str) -> None:
    layer, points = make_layer(kind, 5), draw_points(5)
    reference = registry_name_to_pyro(kind)(5)
    for name, value in layer.to_tensors().items():
        setattr(reference, PYRO_NAMES[kind][name], torch.nn.Parameter(value))
    image, log_det = layer(points)
    torch.testing.assert_close(image, reference(points))
    torch.testing.assert_close(log_det, reference.log_abs_det_jacobian(points, reference(points)))


def registry_name_to_pyro(kind: str) -> type:
    return getattr(pyro_transforms, kind.capitalize())


@every_flow
@pytest.mark.parametrize("dim", [1, 2, 30])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_inverse_undoes_forward(kind: str, dim: int, spread: float) -> None:
    points = draw_points(dim)
    for seed in range(10):
        layer = make_layer(kind, dim, seed, spread)
        with torch.no_grad():
            image = layer(points)[0]
            torch.testing.assert_close(layer(layer.inverse(image))[0], image, rtol=1e-9, atol=1e-9)
            if spread < 5:  # beyond, a near-singular layer loses digits of z itself
                torch.testing.assert_close(layer.inverse(image), points, rtol=1e-6, atol=1e-6)


@every_flow
def test_parameters_come_back_from_tensors(kind: str) -> None:
    layer, points = make_layer(kind, 4), draw_points(4)
    again = type(layer).from_tensors(layer.to_tensors())
    assert torch.equal(again(points)[0], layer(points)[0])


@every_flow
def test_a_seed_gives_the_same_layer_near_the_identity(kind: str) -> None:
    load = registry.load_class("flows", kind)
    first, second = (load(850, torch.Generator().manual_seed(3)).to_tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.abs().max() <= 850**-0.5 for value in first.values())
    assert first[next(iter(first))].std() == pytest.approx(850**-0.5 / 3**0.5, rel=0.1)


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
    layer = make_layer("radial", 3)
    with torch.no_grad():
        center = layer.x0.detach()[None]
        assert torch.equal(layer(center)[0], center)
        assert torch.equal(layer.inverse(center), center)


@pytest.mark.parametrize("seed", range(5))
def test_planar_stays_invertible_for_any_parameters(seed: int) -> None:
    layer = make_layer("planar", 8, seed, spread=5.0)
    points = draw_points(8, 50)
    with torch.no_grad():
        slope = layer.summary()["slope"]
        moved = layer(points)[0] @ layer.w
    assert slope >= -1  # softplus rounds to 0 in the end
    assert torch.equal(moved.argsort(), (points @ layer.w).argsort())


def test_summaries_tell_the_constrained_parameters() -> None:
    radial, planar = make_layer("radial", 3), make_layer("planar", 3)
    assert isinstance(radial, Radial)
    assert isinstance(planar, Planar)
    alpha = float(torch.nn.functional.softplus(radial.raw_alpha.detach()))
    assert radial.summary()["alpha"] == pytest.approx(alpha)
    assert radial.summary()["x0_norm"] == pytest.approx(float(radial.x0.detach().norm()))
    assert planar.summary()["w_norm"] == pytest.approx(float(planar.w.detach().norm()))
