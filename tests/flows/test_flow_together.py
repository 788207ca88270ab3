"""Layers pushed through all at once, with gradients written by hand, against autograd through one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from problems.flow_layers import EXAMPLES, LAYOUTS, draw_points, make_layer
from problems.seeds import seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bnncli.inference.refine
from bnncli import registry
from bnncli.covariances.diag import Diag
from bnncli.flows import push
from bnncli.inference.refine import Objective
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget

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


class Operations(TorchDispatchMode):
    """Counts the operations on tensors; views and the like launch no kernel and count as well."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


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
def test_a_step_through_five_layers_is_about_half_the_operations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, layers, counts = LAYOUTS[30], make_layers(kind, 30, 5), []
    target = LastLayerTarget(draw_points(9, 20), torch.arange(20) % 3, layout, Prior(1.0))
    base = Gaussian(torch.zeros(30).double(), Diag(torch.ones(30).double()), layout, Prior(1.0))
    objective, noise = Objective.of(target, base, "whitened"), draw_points(30, 1)
    batch = target.examples(torch.arange(20))
    for through in (push, one_by_one):
        monkeypatch.setattr(bnncli.inference.refine, "push", through)
        with Operations() as operations:
            objective.estimate(layers, noise, *batch).sum().backward()
        counts.append(operations.count)
    assert counts[0] < 0.55 * counts[1]


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
    alpha, beta = (float(part.detach()) for part in layer._constrained())
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
