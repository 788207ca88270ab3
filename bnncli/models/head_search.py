"""Find the head of a network: the linear map of features that gives one of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.data.splits import Inputs
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.models import Place
from bnncli.models.features import explain_refusal
from bnncli.models.head import (
    IDENTITY_HINT,
    LINKS,
    Head,
    HeadForm,
    Tap,
    choose_output,
    head_of,
    is_vector,
    last_linear,
    logits_of,
    missing_head_error,
    outputs_of,
    plain_copy,
    run_network,
)
from bnncli.models.tape import LINK_OF, Product, Tape, tap_number
from bnncli.names import format_names, quote_name
from bnncli.options.shared import IDENTITY

if TYPE_CHECKING:
    from torch import Tensor, nn


TOLERANCE = 1e-3  # of the largest output: rounding of float32 layers


@dataclass
class _Part:
    """A share of the logits (n, K): features in one tensor, times weight (K, D)."""

    inputs: Tensor
    product: Product
    weight: Tensor


@dataclass(frozen=True)
class TracedHead:
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
        """Return whether all products are in modules, or of parameters, named with + between them."""
        names = layer.split("+")
        return all(any(f"{own}.".startswith(f"{name}.") for name in names) for own in self.names)

    def is_made_from(self, tape: Tape, other: TracedHead) -> bool:
        """Return whether these are computed from another head's logits."""
        return other is not self and tape.depends(self.target, other.target)


def trace(tape: Tape, target: Tensor) -> TracedHead | None:
    """Express a tensor with one row per example as features times weights; None if that is impossible."""
    linear = _linear(tape, target)
    if linear is None or target.numel() != tape.num_rows * len(linear[2]):
        return None
    products, scales, shift = linear
    parts, bias, merged = _parts(tape, products, scales, shift)
    has_bias = bool(shift.any()) or any(product.bias is not None for product in [*products, *merged])
    weight = torch.cat([part.weight for part in parts], 1)
    taps = tuple(_tap(tape, part) for part in parts)
    for way in _list_reductions([part.product for part in parts], tape.num_rows):
        rounds = {product.reduce_range for product in products}
        form = HeadForm(taps, way, "", "none", rounds.pop() if len(rounds) == 1 else None, ())
        if rounds or not _agrees(form, parts, weight, bias, target):
            continue
        names = tuple(dict.fromkeys(product.name for product in [*products, *merged]))
        return TracedHead(
            target=target,
            products=tuple(product.at for product in products),
            names=names,
            name=_name_products(tape, names),
            weight=weight,
            bias=bias if has_bias else None,
            taps=taps,
            positions=way,
            reduce_range=form.reduce_range,
            notes=tuple(_notes(form, names, scales, has_positions=_has_positions(parts[0].product))),
        )
    return None


def _linear(tape: Tape, target: Tensor) -> tuple[list[Product], list[Tensor], Tensor] | None:
    """Return the products that a tensor comes from, and the scale (K,) of each and shift (K,) that follow, float64."""
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
        return made_of([_expand_constant(value, one) for value, one in zip(values, products, strict=True)])

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
    except (RuntimeError, TypeError, ValueError):  # an operation that cannot be replayed
        return None
    return (products, scales, shift[0]) if is_linear and all(bool(scale.any()) for scale in scales) else None


def _expand_constant(value: Tensor, product: Product) -> Tensor:
    """Expand (K,) to outputs of a product that are constant everywhere else."""
    shape = [1] * product.outputs.ndim
    shape[product.axis] = len(value)
    return value.reshape(shape).expand(product.outputs.shape)


def _list_reductions(products: list[Product], num_rows: int) -> list[str]:
    """Return how the inputs of products may become one vector per example, most likely first."""
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
    """Return the shares by source tensor, the bias (K,), and products merged into others.

    A share whose features are products of other features (a low-rank adapter) is merged into these.
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
    """Return whether the features of the pass times the weights equal the tensor."""
    passed = [part.inputs.detach().cpu().double() for part in parts]
    actual = target.detach().cpu().double().reshape(-1, len(weight))
    features = form.features(passed, actual, weight, bias)
    if features.shape[1:] != weight.shape[1:]:
        return False
    error = (form.rounded(features) @ weight.T + bias - actual).abs().max()
    return bool(error <= TOLERANCE * actual.abs().max() + 1e-6)


def _tap(tape: Tape, part: _Part) -> Tap:
    """Return where the features of a share pass, preferably into the module that multiplies them."""
    product = part.product
    places = [*tape.places.get(id(product.inputs), ()), *tape.places.get(id(part.inputs), ())]
    modules = tape.calls[product.at].modules
    own = [place for place in places if place.slot is not None and place.module in modules]
    inner = max(own, key=lambda place: modules.index(place.module), default=None)
    at: Place | int = inner or next(iter(places), None) or tap_number(tape, product.at)
    return Tap(at, product.axis)


def _name_products(tape: Tape, names: tuple[str, ...]) -> str:
    """Return a name for products: their own, that of a module with exactly these, or all with + between them."""
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
    """Return whether a product applies to more than one position."""
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


_VIEWS = {
    *("aten::view", "aten::reshape", "aten::flatten", "aten::squeeze", "aten::unsqueeze", "aten::_unsafe_view"),
    *("aten::contiguous", "aten::clone", "aten::detach", "aten::alias", "aten::to", "aten::_to_copy"),
}
IDENTITY_NOTE = (
    "the head is an identity layer on the network's logits: the posterior covers a scale, mixing and shift of "
    "the logits, not weights of the network"
)
UNIT_NOTE = (
    "the outputs for the first examples are between 0 and 1 and are treated as logits; a network that returns "
    "probabilities must return logits instead"
)
_USUAL = ("logits", "out")  # common names of logits among several outputs


class _HeadCandidate(NamedTuple):
    """A head, its output, and what that was computed from."""

    head: Head
    form: HeadForm
    traced: TracedHead


def find_head(
    model: nn.Module, first: Callable[[int], Inputs], *, layer: str | None = None, output: str | None = None
) -> Head:
    """Find the head of a network, which is put in evaluation mode.

    Args:
        first: returns the inputs (n, ...) of the first n examples.
        layer: location of its weights: a module, a parameter, or several with + between them; IDENTITY for an identity
            layer on the logits, unless weights have that name; None for any.
        output: name or index of the output with the logits; None to find it.

    Raises:
        DataError: there is none, or there are several.
        UsageError: there is no such layer or output, or the model does not accept the inputs.
    """
    is_identity = layer == IDENTITY and not any(name.split(".")[0] == IDENTITY for name, _ in model.named_parameters())
    if layer is not None and not is_identity:
        _check_names(model, layer)
    try:
        plain = None if is_identity else last_linear(model.eval(), first(1), layer=layer, output=output)
    except DataError as error:
        raise explain_refusal(model, first, error) from error.__cause__
    if plain is not None and plain.is_head:
        return plain.head
    inputs = first(2)
    with Tape(model.eval(), inputs) as tape:
        returned = run_network(model, inputs)
    if is_identity:
        return _identity_head(tape, returned, output)
    missing = getattr(model, "no_head", None)  # a graph has already been searched
    found = _heads(tape, returned, output) if missing is None else []
    fitting = [one for one in found if layer is None or one.traced.is_in(layer)]
    fitting = _outermost(tape, [one for one in fitting if one.head.name == layer] or fitting)
    if len(fitting) > 1:
        fitting = [one for one in fitting if one.form.output in _USUAL] or fitting
    if len(fitting) == 1:
        return fitting[0].head
    if len(fitting) > 1 or (layer is not None and found and plain is None):
        raise _ambiguous_head_error(fitting or found, layer, returned)
    if plain is None:
        if not outputs_of(returned):
            logits_of(returned)  # raises: it contains no tensor
        raise _suggest_identity(
            missing or _nonlinear_tail_error(tape, returned) or missing_head_error(model), tape, returned, output
        )
    return plain.head  # the proof on all rows reports what is wrong


def _check_names(model: nn.Module, layer: str) -> None:
    known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    for name in layer.split("+"):
        if name not in known:
            head_of(model, name)  # raises


def _heads(tape: Tape, returned: Any, output: str | None) -> list[_HeadCandidate]:
    """Return the heads of the network's outputs, in output order."""
    outputs = outputs_of(returned)
    if output is not None:
        outputs = {output: choose_output(returned, output)}
    found = []
    for name, tensor in outputs.items():
        link, index = _link(tape, tensor)
        traced = trace(tape, tensor if index is None else tape.calls[index].args[0])
        if traced is None:
            continue
        notes = (*_link_notes(link), *traced.notes)
        form = HeadForm(traced.taps, traced.positions, name, link, traced.reduce_range, notes)
        bias = None if traced.bias is None else plain_copy(traced.bias)
        found.append(_HeadCandidate(Head(traced.name, plain_copy(traced.weight), bias, form), form, traced))
    return found


def _identity_head(tape: Tape, returned: Any, output: str | None) -> Head:
    """Return an identity layer on the logits that an output is, or is a softmax or sigmoid of.

    Raises:
        DataError: no output has a vector per example, several have, or it has probabilities of unknown origin.
        UsageError: there is no such output.
    """
    outputs = outputs_of(returned) if output is None else {output: choose_output(returned, output)}
    if not outputs:
        logits_of(returned)  # raises: it contains no tensor
    fitting = {name: one for name, one in outputs.items() if is_vector(one, tape.num_rows)}
    usual = [name for name in fitting if name in _USUAL]
    names = usual if len(fitting) > 1 and usual else [*fitting]
    if len(names) != 1:
        shapes = ", ".join(f"{quote_name(name)} {tuple(one.shape)}" for name, one in outputs.items())
        raise DataError(
            f"an identity layer needs one output with one vector per example; {tape.num_rows} examples gave {shapes}",
            code="not_the_head", hint="choose one with \0output\0 NAME" if fitting else None,
        )  # fmt: skip
    tensor = outputs[names[0]]
    link, index = _link(tape, tensor)
    rows = tensor.reshape(tape.num_rows, -1)
    sums = rows.sum(1)
    if link == "none" and bool((rows >= 0).all()) and torch.allclose(sums, torch.ones_like(sums)):
        raise DataError(
            "the network's outputs look like probabilities (they sum to one), but no softmax was found",
            code="not_the_head", hint="return the input of the softmax, or log-probabilities",
        )  # fmt: skip
    taps = () if index is None else (Tap(tap_number(tape, index), -1),)
    doubt = (UNIT_NOTE,) if link == "none" and bool(((rows >= 0) & (rows <= 1)).all()) else ()
    form = HeadForm(taps, "all", names[0], link, None, (*_link_notes(link), *doubt, IDENTITY_NOTE))
    return Head(IDENTITY, torch.eye(rows.shape[1]), torch.zeros(rows.shape[1]), form)


def _suggest_identity(error: DataError, tape: Tape, returned: Any, output: str | None) -> DataError:
    """Add the identity layer to the error for a missing head, if that is possible."""
    try:
        _identity_head(tape, returned, output)
    except DataError:
        return error
    return DataError(error.message, code=error.code, hint=f"{error.hint}; {IDENTITY_HINT}")


def _link_notes(link: str) -> tuple[str, ...]:
    return (
        ()
        if link == "none"
        else (f"the network returns {LINKS[link].returns}; bnncli uses the logits before this step",)
    )


def _link(tape: Tape, output: Tensor) -> tuple[str, int | None]:
    """Return the last softmax or sigmoid before an output, by name and call index; none, and None."""
    tensor, index = output, tape.writer(output, len(tape.calls))
    is_log = False
    while index is not None:
        call = tape.calls[index]
        if call.operation in LINK_OF:
            link = LINK_OF[call.operation]
            known = {"softmax": "log_softmax"}.get(link) if is_log else link
            return ("none", None) if known is None else (known, index)
        if call.operation == "aten::log" and not is_log:
            is_log = True
        elif call.operation not in _VIEWS:
            break
        tensor = call.args[0]
        index = tape.writer(tensor, index)
    return "none", None


def _outermost(tape: Tape, found: list[_HeadCandidate]) -> list[_HeadCandidate]:
    """Return one entry per head from which no other is computed; features returned beside logits do not count."""
    unique: dict[tuple[int, ...], _HeadCandidate] = {}
    for one in found:
        known = unique.get(one.traced.products)
        if known is None or (known.form.link != "none" and one.form.link == "none"):
            unique[one.traced.products] = one
    heads = [*unique.values()]
    return [one for one in heads if not any(other.traced.is_made_from(tape, one.traced) for other in heads)]


def _nonlinear_tail_error(tape: Tape, returned: Any) -> DataError | None:
    """Return the error that the steps after the last weights are not linear; None if no output comes from weights."""
    for output in outputs_of(returned).values():
        before = tape.before(output)
        if before is not None:
            names = format_names(product.name for product in map(tape.product, before[0]) if product is not None)
            after = ", ".join(dict.fromkeys(tape.calls[index].operation.partition("::")[2] for index in before[1]))
            return DataError(
                f"the network's output is not linear in any features: it is computed from {names} by "
                f"{after or 'nothing else'}",
                code="no_head",
                hint="after the last weights, bnncli supports only a scale, an average over positions, a softmax or "
                "a sigmoid",
            )
    return None


def _ambiguous_head_error(found: list[_HeadCandidate], layer: str | None, returned: Any) -> DataError | UsageError:
    """Return the error that there are several heads, or none of the name; lists them."""
    heads = list_heads(found)
    if layer is not None and not any(one.traced.is_in(layer) for one in found):
        return UsageError(
            f"\0last_layer\0: {quote_name(layer)} does not produce an output of the network; these do: {heads}"
        )
    first = f"the network returns {len(returned)} outputs, and the first is used; " * isinstance(
        returned, (tuple, list)
    )
    hint = f"add \0last_layer\0 {found[0].head.name}" if first else "choose one with \0last_layer\0 NAME"
    return DataError(f"{first}the network has several heads: {heads}", code="not_the_head", hint=hint)


def list_heads(found: list[_HeadCandidate]) -> str:
    """List heads with their sizes and outputs."""
    return ", ".join(
        f"{quote_name(one.head.name)} ({one.head.layout}; output {quote_name(one.form.output)})" for one in found
    )
