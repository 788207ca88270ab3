"""A tensor of a forward pass as features times weights: products followed by nothing but a scale and a shift of each output, and
by an average over positions or the choice of one. Found by running again what follows the products, and compared with the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.extraction.form import HeadForm, Tap
from bnncli.extraction.tape import Place, Product, Tape, tap_number
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-3  # of the largest output: what the rounding of float32 layers explains


@dataclass
class _Part:
    """A share of the logits (n, K): features that pass as one tensor, times weight (K, D)."""

    inputs: Tensor
    product: Product
    weight: Tensor


@dataclass(frozen=True)
class Traced:
    """Logits (n, K) = features (n, D) times weight (K, D), float64, plus bias (K,) or None.

    Attributes:
        target: the logits.
        products: indices of the calls that they come from.
        names: of the products.
    """

    target: Tensor
    products: tuple[int, ...]
    names: tuple[str, ...]
    name: str
    weight: Tensor
    bias: Tensor | None
    taps: tuple[Tap, ...]
    positions: str
    reduce_range: bool | None
    notes: tuple[str, ...]

    def is_in(self, layer: str) -> bool:
        """Whether all products lie in modules, or are of parameters, named with + between them."""
        names = layer.split("+")
        return all(any(f"{own}.".startswith(f"{name}.") for name in names) for own in self.names)

    def is_made_from(self, tape: Tape, other: Traced) -> bool:
        """Whether another's logits are among what these are made from."""
        return other is not self and tape.depends(self.target, other.target)


def trace(tape: Tape, target: Tensor) -> Traced | None:
    """A tensor of a row for each example as features times weights; None where it is not."""
    linear = _linear(tape, target)
    if linear is None or target.numel() != tape.num_rows * len(linear[2]):
        return None
    products, scales, shift = linear
    parts, bias, merged = _parts(tape, products, scales, shift)
    has_bias = bool(shift.any()) or any(product.bias is not None for product in [*products, *merged])
    weight = torch.cat([part.weight for part in parts], 1)
    taps = tuple(_tap(tape, part) for part in parts)
    for way in _ways([part.product for part in parts], tape.num_rows):
        rounds = {product.reduce_range for product in products}
        form = HeadForm(taps, way, "", "none", rounds.pop() if len(rounds) == 1 else None, ())
        if rounds or not _agrees(form, parts, weight, bias, target):
            continue
        names = tuple(dict.fromkeys(product.name for product in [*products, *merged]))
        return Traced(
            target=target,
            products=tuple(product.at for product in products),
            names=names,
            name=_one_name(tape, names),
            weight=weight,
            bias=bias if has_bias else None,
            taps=taps,
            positions=way,
            reduce_range=form.reduce_range,
            notes=tuple(_notes(form, names, scales, has_positions=_has_positions(parts[0].product))),
        )
    return None


def _linear(tape: Tape, target: Tensor) -> tuple[list[Product], list[Tensor], Tensor] | None:
    """The products that a tensor comes from, with the scale (K,) of each and the shift (K,) that follow them, float64."""
    before = tape.before(target)
    if before is None:
        return None
    products = [product for product in map(tape.product, before[0]) if product is not None]
    sizes = {len(product.weight) for product in products}
    num_outputs = sizes.pop()
    if sizes or target.numel() % num_outputs:
        return None

    def made_of(outputs: Sequence[Tensor]) -> Tensor:
        values = {one.at: value for one, value in zip(products, outputs, strict=True)}
        return tape.replay(target, before[1], values).reshape(-1, num_outputs)

    def after(values: Sequence[Tensor]) -> Tensor:
        return made_of([_spread(value, one) for value, one in zip(values, products, strict=True)])

    zero = torch.zeros(num_outputs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        size = 1 + torch.rand(num_outputs, dtype=torch.float64, generator=generator)
        return size * torch.randint(0, 2, (num_outputs,), generator=generator).mul(2).sub(1)

    def anything() -> list[Tensor]:
        return [torch.randn(one.outputs.shape, dtype=torch.float64, generator=generator) for one in products]

    try:
        shift = after([zero] * len(products))
        probes = [some() for _ in products]
        rows = [
            after([zero] * index + [probe] + [zero] * (len(probes) - index - 1)) for index, probe in enumerate(probes)
        ]
        scales = [(row - shift)[0] / probe for row, probe in zip(rows, probes, strict=True)]
        others = [some() for _ in products]
        moved = sum(scale * other for scale, other in zip(scales, others, strict=True))
        first, second = anything(), anything()
        both = [one + other for one, other in zip(first, second, strict=True)]
        pairs = [
            (after(others), shift + moved),
            (after([-other for other in others]), shift - moved),  # a ReLU is linear on one side
            (shift, shift[:1].expand_as(shift)),
            (made_of(both) + shift, made_of(first) + made_of(second)),  # unlike a maximum over positions
        ]
        is_linear = all(torch.allclose(one, expected) for one, expected in pairs)
    except (RuntimeError, TypeError, ValueError):  # an operation that cannot be run again by itself
        return None
    return (products, scales, shift[0]) if is_linear and all(bool(scale.any()) for scale in scales) else None


def _spread(value: Tensor, product: Product) -> Tensor:
    """Outputs of a product that are the same (K,) everywhere."""
    shape = [1] * product.outputs.ndim
    shape[product.axis] = len(value)
    return value.reshape(shape).expand(product.outputs.shape)


def _ways(products: list[Product], num_rows: int) -> list[str]:
    """How the inputs of products may become one vector an example, the likelier first."""
    if any(product.inputs.ndim < 2 or len(product.inputs) != num_rows for product in products):
        return []
    if any(product.is_whole for product in products):
        return ["all"] if all(product.is_whole for product in products) else []
    if all(product.inputs.ndim == 2 for product in products):
        return ["row"]
    if any(product.inputs.ndim == 2 for product in products):
        return []
    ways = ["one"] if len(products) == 1 else []
    return ["mean", *ways] if products[0].axis == 1 else [*ways, "mean"]


def _parts(
    tape: Tape, products: list[Product], scales: list[Tensor], shift: Tensor
) -> tuple[list[_Part], Tensor, list[Product]]:
    """Shares by the tensor that they are made from, the bias (K,), and the products inside that were merged into others.

    A share whose features are themselves products of the features of others (an adapter of low rank) joins these.
    """
    parts: dict[int, _Part] = {}
    bias, merged = shift, list[Product]()

    def add(product: Product, weight: Tensor, constant: Tensor) -> None:
        nonlocal bias
        inputs = tape.origin(product.inputs, product.at)
        bias = bias + constant
        if id(inputs) in parts:
            parts[id(inputs)].weight = parts[id(inputs)].weight + weight
        else:
            parts[id(inputs)] = _Part(inputs, product, weight)

    for product, scale in zip(products, scales, strict=True):
        add(product, scale[:, None] * product.weight, scale * (0 if product.bias is None else product.bias))
    for key in list(parts) if len(parts) > 1 else ():
        inner = _linear(tape, parts[key].inputs)
        others = {id(tape.origin(one.inputs, one.at)) for one in inner[0]} if inner else {key}
        if inner is None or not others <= parts.keys() - {key}:
            continue
        outer = parts.pop(key).weight
        bias = bias + outer @ inner[2]
        for product, scale in zip(inner[0], inner[1], strict=True):
            own = scale * (0 if product.bias is None else product.bias)
            add(product, outer @ (scale[:, None] * product.weight), outer @ own)
            merged.append(product)
    return list(parts.values()), bias, merged


def _agrees(form: HeadForm, parts: list[_Part], weight: Tensor, bias: Tensor, target: Tensor) -> bool:
    """Whether the features of the pass times the weights are the tensor."""
    passed = [part.inputs.detach().cpu().double() for part in parts]
    actual = target.detach().cpu().double().reshape(-1, len(weight))
    features = form.features(passed, actual, weight, bias)
    if features.shape[1:] != weight.shape[1:]:
        return False
    error = (form.rounded(features) @ weight.T + bias - actual).abs().max()
    return bool(error <= TOLERANCE * actual.abs().max() + 1e-6)


def _tap(tape: Tape, part: _Part) -> Tap:
    """Where the features of a share pass: best into the module that multiplies them."""
    product = part.product
    places = [*tape.places.get(id(product.inputs), ()), *tape.places.get(id(part.inputs), ())]
    modules = tape.calls[product.at].modules
    own = [place for place in places if place.slot is not None and place.module in modules]
    inner = max(own, key=lambda place: modules.index(place.module), default=None)
    at: Place | int = inner or next(iter(places), None) or tap_number(tape, product.at)
    return Tap(at, product.axis)


def _one_name(tape: Tape, names: tuple[str, ...]) -> str:
    """A name for products: their own, that of the module that has them and no others, or all with + between them."""
    if len(names) == 1:
        return names[0]
    first = names[0].split(".")
    for size in range(len(first) - 1, 0, -1):
        parent = ".".join(first[:size])
        within = {product.name for product in tape.products() if product.name.startswith(f"{parent}.")}
        if {*names} == within:
            return parent
    return "+".join(names)


def _has_positions(product: Product) -> bool:
    """Whether it is applied at more than one."""
    return product.outputs.numel() > len(product.outputs) * len(product.weight)


def _notes(form: HeadForm, names: tuple[str, ...], scales: list[Tensor], *, has_positions: bool) -> list[str]:
    notes = []
    if len(form.taps) > 1:
        notes.append(f"features are the concatenated outputs of {len(form.taps)} layers: {', '.join(names)}")
    elif len(names) > 1:
        notes.append(f"merged {len(names)} layers over the same features into one head: {', '.join(names)}")
    if len(scales) == 1 and not bool((scales[0] == 1).all()):
        notes.append("the scale or shift applied to each logit after the last layer is part of the head")
    if form.positions == "mean" and has_positions:
        notes.append(
            "the last layer is applied at every position and averaged, so features are averages over positions"
        )
    if form.positions == "one":
        notes.append(
            "the last layer is applied at every position and one position is selected, so features come from "
            "that position"
        )
    if form.reduce_range is not None:
        notes.append(
            "the last layer is quantised to 8 bits: the head is dequantised, the rest of the network runs as saved"
        )
    return notes
