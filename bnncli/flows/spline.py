"""Neural spline flow: one half of theta goes through monotone splines whose shape depends on the other half.

Durkan, Bekasov, Murray and Papamakarios (2019), arXiv:1906.04032, section 3.1: rational-quadratic splines (Gregory and
Delbourgo 1982) inside [-5, 5], the identity outside; equations 4 to 8 of the paper.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bnncli.flows import ALL_DATA, SPACES, Recipe, load_tensors, place_buffer, tensors_of
from bnncli.flows._layers import Conditioner, half_sizes, join_halves, settings_in, split_halves
from bnncli.numerics.running_sum import running_sum
from bnncli.options.declaration import HIDDEN
from bnncli.parameters.layouts import ParamLayout

NUM_BINS = 8
BOUND = 5.0  # of a standard normal, 6e-7 lies outside
MIN_FRACTION = 1e-3  # of the interval, each bin's width and height
MIN_DERIVATIVE = 1e-3
_PARTS = 3 * NUM_BINS - 1
_DERIVATIVE_ONE = math.log(math.expm1(1 - MIN_DERIVATIVE))

SETTINGS = {"hidden": HIDDEN}


class Spline(nn.Module):
    """F(z) = (z_kept, g(z_moved)), g a spline for each coordinate, with 23 numbers each from network(z_kept).

    Starts as the identity: equal bins and slopes of 1, since the network's outputs are 0.

    Args:
        layout: of theta; only P matters.
        generator: of the network's first weights.
        hidden: hidden units of the network.
        index: place among the layers: even ones keep the first half, odd ones the second.
    """

    recipe: ClassVar[Recipe] = ALL_DATA
    settings: ClassVar[tuple[str, ...]] = (*SETTINGS, "index")
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = (
        "(8 widths, 8 heights, 7 slopes) a coordinate = network.weight / hidden tanh(network.hidden_weight z_kept + "
        "network.hidden_bias) + network.bias; widths and heights 10 (0.001 + 0.992 softmax(raw)); "
        "slopes 0.001 + softplus(raw + log(exp(0.999) - 1)); even index keeps the first half"
    )

    def __init__(
        self, layout: ParamLayout, generator: torch.Generator, *, hidden: int = HIDDEN.default, index: int = 0
    ) -> None:
        super().__init__()
        self.hidden, self.index = hidden, index
        self.register_buffer("place", place_buffer(index, generator))
        num_kept, num_moved = half_sizes(layout.num_params, index)
        self.network = Conditioner(num_kept, _PARTS * num_moved, hidden=hidden, generator=generator)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J|, the sum of the splines' log slopes, (S,)."""
        kept, moved = split_halves(z, self.index)
        image, log_slope = _forward(moved, *self._knots(kept))
        return join_halves(kept, image, self.index), log_slope.sum(dim=1)

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y by solving a quadratic equation in y's bin."""
        kept, moved = split_halves(y, self.index)
        return join_halves(kept, _inverse(moved, *self._knots(kept)), self.index)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `network.*`, float64, and `place` (1,), the index."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return load_tensors(cls(layout, torch.Generator(), **settings_in(tensors)), tensors)

    def summary(self) -> dict[str, float]:
        """Return the smallest and largest slope at a knot and the largest move of a knot, all where z_kept = 0."""
        with torch.no_grad():
            x, y, slopes = self._knots(self.network.hidden_weight.new_zeros(1, self.network.hidden_weight.shape[1]))
            weight_norm = float(self.network.weight.norm())
            if x.numel() == 0:
                return {"weight_norm": weight_norm}
            return {
                "min_slope_at_0": float(slopes.min()),
                "max_slope_at_0": float(slopes.max()),
                "max_move_at_0": float((y - x).abs().max()),
                "weight_norm": weight_norm,
            }

    def _knots(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return knots x, y and slopes there, each (S, number moved, 9), for the kept half (S, number kept)."""
        raw = self.network(kept).unflatten(1, (self.network.bias.shape[0] // _PARTS, _PARTS))
        widths, heights, slopes = raw.split([NUM_BINS, NUM_BINS, NUM_BINS - 1], dim=2)
        ones = torch.ones_like(slopes[..., :1])
        inner = MIN_DERIVATIVE + softplus(slopes + _DERIVATIVE_ONE)
        return _positions(widths), _positions(heights), torch.cat([ones, inner, ones], dim=2)


class _Bin(NamedTuple):
    """The ends of each number's bin, and the slopes there; all (S, m)."""

    x: Tensor
    width: Tensor
    y: Tensor
    height: Tensor
    slope: Tensor
    next_slope: Tensor


def _positions(raw: Tensor) -> Tensor:
    """Return knots (..., 9) from -5 to 5, for the bins' raw sizes (..., 8)."""
    fractions = MIN_FRACTION + (1 - NUM_BINS * MIN_FRACTION) * raw.softmax(dim=-1)
    inner = (2 * BOUND) * running_sum(fractions[..., :-1]) - BOUND
    end = torch.full_like(inner[..., :1], BOUND)
    return torch.cat([-end, inner, end], dim=-1)


def _find_bin(place: Tensor, x: Tensor, y: Tensor, slopes: Tensor) -> _Bin:
    """Return the bin whose number is place (S, m), from all knots and slopes (S, m, 9)."""
    left = place.unsqueeze(-1)
    x_left, x_right, y_left, y_right, slope, next_slope = (
        knots.gather(-1, side).squeeze(-1) for knots in (x, y, slopes) for side in (left, left + 1)
    )
    return _Bin(x_left, x_right - x_left, y_left, y_right - y_left, slope, next_slope)


def _place(value: Tensor, knots: Tensor) -> Tensor:
    """Return the bin number 0 to 7 of value (S, m) among knots (S, m, 9)."""
    return (value.unsqueeze(-1) >= knots[..., 1:-1]).sum(dim=-1)


def _forward(z: Tensor, x: Tensor, y: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the splines' values and log slopes at z (S, m); equations 4 and 5."""
    inside = z.clamp(-BOUND, BOUND)
    part = _find_bin(_place(inside, x), x, y, slopes)
    mean_slope = part.height / part.width
    t = (inside - part.x) / part.width
    curve = t * (1 - t)
    excess = part.next_slope + part.slope - 2 * mean_slope
    denominator = mean_slope + excess * curve
    image = part.y + part.height * (mean_slope * t.square() + part.slope * curve) / denominator
    ends = part.next_slope * t.square() + 2 * mean_slope * curve + part.slope * (1 - t).square()
    log_slope = 2 * (mean_slope.log() - denominator.log()) + ends.log()
    is_inside = z.abs() < BOUND
    return torch.where(is_inside, image, z), torch.where(is_inside, log_slope, torch.zeros_like(log_slope))


def _inverse(image: Tensor, x: Tensor, y: Tensor, slopes: Tensor) -> Tensor:
    """Return the z (S, m) where the splines have the values image (S, m); equations 6 to 8, in the form without cancellation."""
    inside = image.clamp(-BOUND, BOUND)
    part = _find_bin(_place(inside, y), x, y, slopes)
    mean_slope = part.height / part.width
    rise = inside - part.y
    excess = part.next_slope + part.slope - 2 * mean_slope
    a = part.height * (mean_slope - part.slope) + rise * excess
    b = part.height * part.slope - rise * excess
    c = -mean_slope * rise
    root = (b.square() - 4 * a * c).clamp(min=0).sqrt()
    z = part.x + part.width * (2 * c / (-b - root))
    return torch.where(image.abs() < BOUND, z, image)
