"""Flows against reference transforms, together as one by one, and what they declare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyro.distributions.transforms as pyro_transforms
import pytest
import torch
from problems.flow_layers import EXAMPLES, LAYOUTS, draw_points, every_flow, make_layer, start_layer
from problems.seeds import seeded
from pyro.distributions.transforms.spline import _monotonic_rational_spline as pyro_spline_function
from torch import Tensor
from torch.nn.functional import softplus

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.flows import SPACES, Recipe, choose_recipe, choose_space, push, resolve_settings, settings_of
from bnncli.flows._affine_sizes import num_elements
from bnncli.flows._layers import orthonormal_columns
from bnncli.options.declaration import class_attribute


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
    "affine": torch_affine, "householder": pyro_householder, "iaf": pyro_iaf, "planar": pyro_planar,
    "radial": pyro_radial, "realnvp": pyro_realnvp, "spline": pyro_spline, "sylvester": PyroSylvester,
}  # fmt: skip


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


KINDS = [kind for kind, _ in EXAMPLES if hasattr(registry.load_class("flows", kind), "push_together")]
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_layers(kind: str, dim: int, count: int = 3, **choices: Any) -> list[Any]:
    return [make_layer(kind, dim, seed, **choices) for seed in range(count)]


def one_by_one(layers: Sequence[Any], z: Tensor) -> tuple[Tensor, Tensor]:
    """The layers' own formulas, differentiated by autograd."""
    total = z.new_zeros(len(z))
    for layer in layers:
        z, log_det = layer(z)
        total = total + log_det
    return z, total


def gradients(through: Any, layers: Sequence[Any], z: Tensor) -> list[Tensor]:
    """Of a loss to which every coordinate and log determinant matters in its own way, by z and all parameters."""
    image, log_det = through(layers, z)
    weights = torch.linspace(0.5, 2, image.numel(), dtype=z.dtype, device=z.device).view_as(image)
    loss = (weights * (image + image.cos())).sum() + (torch.arange(1, len(z) + 1, device=z.device) * log_det).sum()
    return list(torch.autograd.grad(loss, [z, *(part for layer in layers for part in layer.parameters())]))


@every_kind
@pytest.mark.parametrize("dim", [1, 5, 850])
@pytest.mark.parametrize(("num_points", "count"), [(1, 5), (4, 1), (4, 3)])
def test_layers_together_are_layers_one_by_one(kind: str, dim: int, num_points: int, count: int) -> None:
    layers, z = make_layers(kind, dim, count), draw_points(dim, num_points).requires_grad_()
    for mine, reference in zip(push(layers, z), one_by_one(layers, z), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
    for mine, reference in zip(gradients(push, layers, z), gradients(one_by_one, layers, z), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-11)


@every_kind
@pytest.mark.parametrize("dim", [1, 5])
def test_their_gradient_is_that_of_differences(kind: str, dim: int) -> None:
    layers, z = make_layers(kind, dim), draw_points(dim, 2).requires_grad_()
    parts = [part for layer in layers for part in layer.parameters()]
    assert torch.autograd.gradcheck(lambda z, *_: push(layers, z), (z, *parts))


@every_kind
def test_the_noise_that_goes_in_needs_no_gradient(kind: str) -> None:
    layers, z = make_layers(kind, 5), draw_points(5)
    parts = [part for layer in layers for part in layer.parameters()]
    mine, reference = (
        torch.autograd.grad(torch.stack([part.square().sum() for part in through(layers, z)]).sum(), parts)
        for through in (push, one_by_one)
    )
    torch.testing.assert_close(mine, reference)


@every_kind
@pytest.mark.parametrize("part", [0, 1])
def test_a_second_derivative_is_refused_and_not_left_out(kind: str, part: int) -> None:
    layers, z = make_layers(kind, 5), draw_points(5).requires_grad_()
    with pytest.raises(AssertionError, match="differentiable once"):
        torch.autograd.grad(push(layers, z)[part].sum(), z, create_graph=True)
    (first,) = torch.autograd.grad(one_by_one(layers, z)[part].sum(), z, create_graph=True)
    assert float(torch.autograd.grad(first.square().sum(), z)[0].norm()) > 0


@every_kind
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_float32_gradients_are_as_exact_as_autograds_far_out_and_close_by(kind: str, spread: float) -> None:
    layers = make_layers(kind, 30, spread=spread)
    scales = torch.tensor([1e-6, 1e-3, 1.0, 50.0], dtype=torch.float64).unsqueeze(1)
    z = (scales * torch.randn(4, 30, generator=seeded(), dtype=torch.float64)).float()
    exact = gradients(one_by_one, layers, z.double().requires_grad_())
    layers, z = [layer.float() for layer in layers], z.requires_grad_()
    both = zip(gradients(push, layers, z), gradients(one_by_one, layers, z), exact, strict=True)
    for mine, autograds, reference in both:
        errors = [float((part - reference).norm()) for part in (mine, autograds)]
        assert errors[0] <= 3 * errors[1] + 1e-5 * float(reference.norm())


@every_kind
def test_no_value_is_asked_for_on_the_host(kind: str) -> None:
    """Nothing that a captured graph could not hold: tensors without values raise where one is asked for."""
    layers = [layer.to(device="meta") for layer in make_layers(kind, 30)]
    z = draw_points(30).to("meta").requires_grad_()
    assert gradients(push, layers, z)[0].shape == (6, 30)
    with pytest.raises(RuntimeError, match="item"):
        float(push(layers, z.detach())[1].detach().sum())


def at_center(offset: float, **raw: float) -> tuple[Any, Tensor]:
    """A radial layer in float32 and a point at some distance of its centre along each axis."""
    layer = make_layer("radial", 30, 1).float()
    with torch.no_grad():
        layer.x0.zero_()
        for name, value in raw.items():
            getattr(layer, name).fill_(value)
    return layer, torch.full((1, 30), offset, requires_grad=True)


@pytest.mark.parametrize("offset", [0.0, 1e-38, 1e-30, 1e-20, 1e-12])
def test_radial_gradients_are_finite_and_right_at_the_center(offset: float) -> None:
    layer, z = at_center(offset)
    image, log_det = push([layer], z)
    to_image, to_log_det = (torch.autograd.grad(part.sum(), z, retain_graph=True)[0] for part in (image, log_det))
    # d image / d z is 1 + beta / alpha; the log determinant falls or rises with the distance, and has a kink at 0.
    alpha, far = (float(softplus(raw.detach())) for raw in (layer.raw_alpha, layer.raw_beta))
    beta = far - alpha
    torch.testing.assert_close(to_image, torch.full((1, 30), 1 + beta / alpha), rtol=1e-5, atol=0)
    exact = torch.autograd.grad(layer.double()(z.double())[1].sum(), z)[0]
    assert torch.isfinite(to_log_det).all()
    if offset == 0 or offset >= 1e-12:
        torch.testing.assert_close(to_log_det, exact, rtol=1e-4, atol=0)
    else:  # the squares of its coordinates vanish
        assert (to_log_det.abs() <= exact.abs() * (1 + 1e-5)).all()
    assert all(torch.isfinite(part).all() for part in gradients(push, [layer.float()], z))


@pytest.mark.parametrize(("offset", "raw"), [(1e9, {}), (1.0, {"raw_alpha": 1e25, "raw_beta": 2e25})])
def test_radial_gradients_are_right_far_from_the_center_and_where_the_square_of_h_vanishes(
    offset: float, raw: dict[str, float]
) -> None:
    layer, z = at_center(offset, **raw)
    mine = torch.autograd.grad(push([layer], z)[1].sum(), [z, *layer.parameters()])
    wide = z.detach().double().requires_grad_()
    layer.double()
    exact = torch.autograd.grad(layer(wide)[1].sum(), [wide, *layer.parameters()])
    for got, reference in zip(mine, exact, strict=True):
        assert float(reference.norm()) > 0
        torch.testing.assert_close(got.double(), reference, rtol=1e-4, atol=0)


@every_flow
@pytest.mark.parametrize("dim", [5, 30])
def test_settings_are_those_of_a_layer_that_is_built(kind: str, settings: dict[str, Any], dim: int) -> None:
    for given in (settings, {}):
        found = resolve_settings(kind, LAYOUTS[dim], **given)
        assert found == settings_of(start_layer(kind, dim, **given)), given
        assert found == settings_of(start_layer(kind, dim, **found))


@pytest.mark.parametrize("kind", registry.names("flows"))
def test_what_a_class_declares_is_read_without_it(kind: str) -> None:
    built = registry.load_class("flows", kind)
    for name in ("recipe", "settings", "spaces", "spaces_reason", "maps"):
        assert class_attribute("flows", kind, name) == getattr(built, name, None)
    assert isinstance(choose_recipe(kind), Recipe)
    assert choose_space(kind, "auto") in SPACES
    assert registry.has_attribute("flows", kind, "push_together") == hasattr(built, "push_together")


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("radial", {"rank": 2}, "\0rank\0: not supported by radial layers; supported by: affine, sylvester"),
        ("affine", {"rank": 2}, "\0rank\0: not supported with \0scale\0 kron; use \0scale\0 low-rank"),
        ("affine", {"scale": "low-rank", "rank": 31}, "\0rank\0: expected 1 to 30, the number of parameters; got 31"),
        ("sylvester", {"rank": 0}, "\0rank\0: expected 1 to 30, the number of parameters; got 0"),
    ],
)
def test_a_wrong_setting_is_told_alike_with_and_without_a_layer(kind: str, given: dict[str, Any], said: str) -> None:
    for use in (lambda: resolve_settings(kind, LAYOUTS[30], **given), lambda: start_layer(kind, 30, **given)):
        with pytest.raises(UsageError) as caught:
            use()
        assert caught.value.message == said


@pytest.mark.parametrize("scale", ["kron", "block", "low-rank"])
def test_an_affine_layer_has_as_many_numbers_as_are_told(scale: str) -> None:
    for dim in (5, 30, 850):
        layer = start_layer("affine", dim, scale=scale)
        assert num_elements(LAYOUTS[dim], scale) == sum(part.numel() for part in layer.parameters()), dim


@pytest.mark.parametrize("kind", registry.names("posteriors"))
def test_what_a_posterior_can_do_is_told_without_it(kind: str) -> None:
    built = registry.load_class("posteriors", kind)
    needs = ("center", "mean_theta", "sample", "quasi_noise", "log_density", "logit_moments", "logit_root", "absent")
    assert {need for need in needs if registry.has_attribute("posteriors", kind, need)} == {
        need for need in needs if hasattr(built, need)
    }
