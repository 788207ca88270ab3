"""Flow layers against independent references: Pyro's transforms, dense matrices, one reflection at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro.distributions.transforms as pyro_transforms
import pytest
import torch
from problems.flow_layers import EXAMPLES, LAYOUTS, draw_points, every_flow, make_layer
from problems.seeds import seeded
from pyro.distributions.transforms.spline import _monotonic_rational_spline as pyro_spline_function
from torch import Tensor

from bnncli import registry
from bnncli.flows._layers import orthonormal_columns


def pyro_radial(layer: Any) -> Any:
    return filled(pyro_transforms.Radial(5), x0=layer.x0, alpha_prime=layer.raw_alpha, beta_prime=layer.raw_beta)


def pyro_planar(layer: Any) -> Any:
    return filled(pyro_transforms.Planar(5), w=layer.w, u=layer.raw_u, bias=layer.bias)


def unit_lower(raw: Tensor) -> Tensor:
    size = raw.shape[-1]
    return raw.tril(-1) / size**0.5 + torch.eye(size, dtype=raw.dtype)


def torch_affine(layer: Any) -> Any:
    """The same map as one dense lower triangular matrix after another, by torch's own transform."""
    if layer.scale == "low-rank":
        frame = orthonormal_columns(layer.basis)
        core = layer.core.tril(-1) / len(layer.core) ** 0.5 + layer.core.diagonal().exp().diag()
        rest = torch.eye(5, dtype=torch.float64) - frame @ frame.T
        linear = rest + frame @ core @ frame.T
    elif layer.scale == "diag":
        linear = torch.eye(5, dtype=torch.float64)
    else:  # HeadLayout(1, 4): vec(B Z A^T) of one row with its bias last
        linear = unit_lower(layer.feature_factor.view(5, 5))  # of its one output
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
        raw = torch.tanh(kept @ net.hidden_weight.T + net.hidden_bias) @ net.weight.T / 7 + net.bias
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
        raw = torch.tanh(x.double() @ self.hidden_weight.T + self.hidden_bias) @ self.weight.T / 7 + self.bias
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


def test_every_flow_has_an_example_and_a_reference() -> None:
    assert {kind for kind, _ in EXAMPLES} == set(registry.names("flows")) == set(REFERENCES)


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
    lower = [unit_lower(raw) for raw in (layer.output_factor, layer.feature_factor)]
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


@pytest.mark.parametrize("index", [0, 1])
def test_iaf_inverse_is_pyros(index: int) -> None:
    layer, points = make_layer("iaf", 5, index, hidden=7), draw_points(5)
    torch.testing.assert_close(layer.inverse(points), pyro_iaf(layer)._inverse(points))
